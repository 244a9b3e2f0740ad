"""Shamir's secret sharing of 32 bytes: any t shares determine the secret, t - 1 disclose nothing about it.

The secret is the value at 0 of a random polynomial of degree t - 1 over the integers modulo a prime above 2^256, and
the share of holder x = 1, 2, ... is the polynomial's value at x.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
"""The smallest prime above 2^256, so that every secret of 32 bytes is an element of the field."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(
    secret: bytes, threshold: int, holders: Sequence[int], below: Callable[[int], int] = secrets.randbelow
) -> dict[int, bytes]:
    """A share for each holder.

    Args:
        secret: 32 bytes.
        threshold: Number of shares needed to reconstruct the secret.
        holders: Their points x, distinct and from 1 on.
        below: Draws a uniform number below its argument.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, this one {len(secret)}")
    if len(set(holders)) != len(holders) or not all(1 <= x < PRIME for x in holders):
        raise ValueError("holders must be distinct numbers from 1 on")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"{len(holders)} holders cannot reach a threshold of {threshold}")
    coefficients = [int.from_bytes(secret), *(below(PRIME) for _ in range(threshold - 1))]
    return {x: polynomial(coefficients, x, PRIME).to_bytes(SHARE_BYTES) for x in holders}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret of at least `threshold` shares.

    Raises:
        ValueError: There are too few shares, or they are not of one secret.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares do not reach the threshold of {threshold}")
    points = {x: int.from_bytes(share) for x, share in shares.items()}
    if any(len(shares[x]) != SHARE_BYTES or y >= PRIME or x < 1 for x, y in points.items()):
        raise ValueError("not a share")
    used = dict(list(points.items())[:threshold])
    secret = interpolated(used, 0, PRIME)
    if any(interpolated(used, x, PRIME) != y for x, y in points.items() if x not in used):
        raise ValueError("the shares are not of one secret")
    if secret >= 1 << 8 * SECRET_BYTES:
        raise ValueError("the shares are not of a secret of 32 bytes")
    return secret.to_bytes(SECRET_BYTES)


def interpolated(points: Mapping[int, int], at: int, prime: int) -> int:
    """The value at `at` of the polynomial through these points."""
    weights = _weights(tuple(points), at, prime)
    return sum(weight * y for weight, y in zip(weights, points.values(), strict=True)) % prime


@lru_cache(maxsize=256)  # all secrets of a round have the same holders
def _weights(places: tuple[int, ...], at: int, prime: int) -> tuple[int, ...]:
    """The Lagrange weights of the values at `places` in the value at `at`."""
    weights = []
    for own in places:
        above = below = 1
        for other in places:
            if other != own:
                above = above * (at - other) % prime
                below = below * (own - other) % prime
        weights.append(above * pow(below, -1, prime) % prime)
    return tuple(weights)


def polynomial(coefficients: Sequence[int], x: int, prime: int) -> int:
    """The value at `x` of the polynomial with these coefficients, the constant one first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % prime
    return value
