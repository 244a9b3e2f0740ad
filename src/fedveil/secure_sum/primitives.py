"""The cryptography behind a secure sum, each primitive from the package `cryptography` and wrapped once.

Keys and signatures are raw bytes here, so that messages hold nothing else.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
_ONCE = bytes(12)
"""The nonce for keys that encrypt only one message."""


def random_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def signing_public(private: bytes) -> bytes:
    """The public half of an Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, text: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).sign(text)


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Whether the holder of this Ed25519 key signed the text."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def agreement_public(private: bytes) -> bytes:
    """The public half of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """The X25519 secret of both keys.

    Raises:
        ValueError: The public key is invalid or of low order.
    """
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def derive(secret: bytes, info: bytes, salt: bytes | None = None, length: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256."""
    return HKDF(SHA256(), length, salt, info).derive(secret)


def key_stream(key: bytes, length: int, nonce: bytes = _ONCE, counter: int = 0) -> bytes:
    """ChaCha20's key stream."""
    cipher = Cipher(ChaCha20(key, counter.to_bytes(4, "little") + nonce), mode=None)
    return cipher.encryptor().update(bytes(length))


def seal(key: bytes, text: bytes, bound_to: bytes, nonce: bytes = _ONCE) -> bytes:
    """Encrypt by ChaCha20-Poly1305 under a key that is used once."""
    return ChaCha20Poly1305(key).encrypt(nonce, text, bound_to)


def unseal(key: bytes, sealed: bytes, bound_to: bytes, nonce: bytes = _ONCE) -> bytes | None:
    """The plaintext; None if it was altered or bound to other data."""
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, bound_to)
    except (InvalidTag, ValueError):
        return None
