"""Masks that cancel in the sum: vectors modulo 2^32 from a key stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedveil.secure_sum import primitives
from fedveil.secure_sum.identities import Terms

Words = np.ndarray[Any, np.dtype[np.uint32]]


def mask(key: bytes, length: int) -> Words:
    """Uniform numbers modulo 2^32: the raw key stream, without rejection."""
    return np.frombuffer(primitives.key_stream(key, 4 * length), dtype="<u4").astype(np.uint32, copy=False)


def pair_key(terms: Terms, own: str, private: bytes, other: str, public: bytes) -> bytes:
    """The key of the mask that two nodes share in this round.

    Raises:
        ValueError: The public key is invalid.
    """
    first, second = sorted((own, other))
    return primitives.derive(primitives.agree(private, public), terms.bound("pair mask", first, second))


def self_key(terms: Terms, node: str, seed: bytes) -> bytes:
    """The key of the mask that only this node knows until its seed is reconstructed."""
    return primitives.derive(seed, terms.bound("self mask", node))


def add_pair_masks(total: Words, own: str, keys: Iterable[tuple[str, bytes]]) -> None:
    """Add to `total`, in place, the masks that `own` shares with other nodes: plus for later names, else minus."""
    for other, key in keys:
        if own < other:
            total += mask(key, len(total))
        else:
            total -= mask(key, len(total))
