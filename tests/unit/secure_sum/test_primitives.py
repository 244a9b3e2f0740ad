"""Known answers of the RFCs through our own wrappers, and Shamir's sharing against brute force."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from fedveil.secure_sum import primitives, shamir

unhex = bytes.fromhex


def test_x25519_is_that_of_rfc_7748() -> None:
    bob = unhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    alice_public = unhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    public = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    secret = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert primitives.agreement_public(bob).hex() == public
    assert primitives.agree(bob, alice_public).hex() == secret
    with pytest.raises(ValueError, match="shared key"):
        primitives.agree(bob, bytes(32))


def test_ed25519_is_that_of_rfc_8032() -> None:
    private = unhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    public = unhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = unhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert primitives.signing_public(private) == public
    assert primitives.sign(private, b"\x72") == signature
    assert primitives.is_signed(public, b"\x72", signature)
    assert not primitives.is_signed(public, b"\x73", signature)
    assert not primitives.is_signed(public, b"\x72", b"")


def test_chacha20_is_that_of_rfc_8439() -> None:
    """Section 2.3.2 for the key stream, 2.8.2 for the sealed text."""
    stream = primitives.key_stream(bytes(range(32)), 64, unhex("000000090000004a00000000"), 1)
    assert stream == unhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    key, nonce = bytes(range(0x80, 0xA0)), unhex("070000004041424344454647")
    bound = unhex("50515253c0c1c2c3c4c5c6c7")
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    sealed = primitives.seal(key, text, bound, nonce)
    assert sealed[:16] == unhex("d31a8d34648e60db7b86afbc53ef7ec2")
    assert sealed[-16:] == unhex("1ae10b594f09e26a7e902ecbd0600691")
    assert primitives.unseal(key, sealed, bound, nonce) == text
    assert primitives.unseal(key, sealed, bound + b"x", nonce) is None


def test_hkdf_is_that_of_rfc_5869() -> None:
    derived = primitives.derive(bytes([0x0B] * 22), bytes(range(0xF0, 0xFA)), bytes(range(13)), 42)
    assert derived.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_every_t_shares_give_the_secret_and_fewer_are_refused() -> None:
    secret = primitives.random_key()
    shares = shamir.split(secret, 3, [1, 2, 4, 5, 9])
    for count in (3, 4, 5):
        for chosen in itertools.permutations(shares, count):
            assert shamir.combine({x: shares[x] for x in chosen}, 3) == secret
    with pytest.raises(ValueError, match="threshold"):
        shamir.combine({x: shares[x] for x in (1, 2)}, 3)


def test_extreme_secrets_survive() -> None:
    for secret in (bytes(32), b"\xff" * 32):
        assert shamir.combine(shamir.split(secret, 2, [1, 2, 3]), 2) == secret


def test_wrong_shares_are_noticed_where_there_are_more_than_needed() -> None:
    shares = shamir.split(primitives.random_key(), 2, [1, 2, 3])
    with pytest.raises(ValueError, match="one secret"):
        shamir.combine(shares | {3: bytes(33)}, 2)
    with pytest.raises(ValueError, match="not a share"):
        shamir.combine({1: shares[1], 2: b"\xff" * 33}, 2)


def test_fewer_than_t_shares_disclose_nothing_by_brute_force() -> None:
    """In a field of 7 elements, over all polynomials: any t - 1 shares have the same law for every secret."""
    prime, threshold, holders = 7, 3, (1, 2, 3, 4)
    laws = []
    for secret in range(prime):
        seen: Counter[tuple[int, ...]] = Counter()
        for rest in itertools.product(range(prime), repeat=threshold - 1):
            values = {x: shamir.polynomial((secret, *rest), x, prime) for x in holders}
            for pair in itertools.combinations(holders, threshold - 1):
                seen[(*pair, *(values[x] for x in pair))] += 1
            for chosen in itertools.combinations(holders, threshold):
                assert shamir.interpolated({x: values[x] for x in chosen}, 0, prime) == secret
        laws.append(seen)
    assert all(law == laws[0] for law in laws)


def test_shares_are_drawn_from_the_whole_field() -> None:
    """The other coefficients are uniform below the prime, whatever the secret."""
    drawn: list[int] = []

    def below(limit: int) -> int:
        drawn.append(limit)
        return 1

    shamir.split(bytes(32), 4, [1, 2, 3, 4], below)
    assert drawn == [shamir.PRIME] * 3
    firsts = np.array([shamir.split(bytes(32), 2, [1, 2])[1][1] for _ in range(2000)])
    assert len(np.unique(firsts)) > 240


@pytest.mark.parametrize(
    ("secret", "threshold", "holders"),
    [
        (bytes(31), 2, [1, 2]),
        (bytes(32), 3, [1, 2]),
        (bytes(32), 0, [1]),
        (bytes(32), 1, [0, 1]),
        (bytes(32), 1, [1, 1]),
    ],
)
def test_what_cannot_be_shared_is_refused(secret: bytes, threshold: int, holders: list[int]) -> None:
    with pytest.raises(ValueError, match=r"secret|holders"):
        shamir.split(secret, threshold, holders)
