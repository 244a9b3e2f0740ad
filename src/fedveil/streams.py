"""Random streams, one for each (seed, round, client, purpose).

Results depend neither on the order of the cohort nor on who computes them, because every draw comes from a
stream that is named by its purpose. Privacy noise has its own purpose; on a deployed node it comes from the operating
system's entropy, since a server that knows the seed could subtract the noise.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

NoiseSource = Literal["seeded", "entropy"]


class Stream(Protocol):
    """The interface of a random generator; `numpy.random.Generator` satisfies it."""

    def random(self, size: int) -> npt.NDArray[np.float64]: ...
    def standard_normal(self, size: int) -> npt.NDArray[np.float64]: ...
    def bytes(self, length: int) -> bytes: ...


class _Key(ISeedSequence):
    """A Philox key used as it is; `Philox(key=...)` would first read system entropy, which takes far longer."""

    def __init__(self, key: npt.NDArray[np.uint64]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[np.uint64]:
        return self._key


def named_stream(seed: int, *name: int | str) -> np.random.Generator:
    """The stream of this name: the same bits for the same name, independent of every other name.

    Args:
        seed: The run's seed.
        name: Words and numbers that identify the purpose.

    Returns:
        A new generator.
    """
    text = "\x1f".join(map(str, (seed, *name)))
    key = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype="<u8")
    philox = np.random.Philox(_Key(key))  # type: ignore[arg-type]  # any ISeedSequence works
    return np.random.Generator(philox)


class EntropyStream:
    """Draws from the operating system's entropy, which cannot be reproduced, even with the run's seed."""

    def bytes(self, length: int) -> bytes:
        return os.urandom(length)

    def random(self, size: int) -> npt.NDArray[np.float64]:
        words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        uniform: npt.NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return uniform

    def standard_normal(self, size: int) -> npt.NDArray[np.float64]:
        pairs = (size + 1) // 2
        # Box-Muller; 1 - u is never 0.
        radius: npt.NDArray[np.float64] = np.sqrt(-2.0 * np.log1p(-self.random(pairs)))
        angle = 2.0 * np.pi * self.random(pairs)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


@dataclass(frozen=True)
class ClientStreams:
    """The streams of the clients of one exchange, in the order of the client axis.

    Args:
        seed: The run's seed.
        round: The round, from 1.
        clients: The clients, in the order of the client axis.
        exchange: The exchange within the round, from 0.
        noise_source: Where privacy noise comes from.
        layer: Number of the wrapper that draws (0: the method itself); each has its own streams.

    Guarantees:
        A client's noise depends neither on the cohort nor on its order
        (`test_a_clients_noise_does_not_depend_on_the_cohort`).
    """

    seed: int
    round: int
    clients: tuple[int, ...]
    exchange: int = 0
    noise_source: NoiseSource = "seeded"
    layer: int = 0

    def rows(self, index: Sequence[int]) -> ClientStreams:
        return replace(self, clients=tuple(self.clients[i] for i in index))

    def of_round(self, purpose: str) -> list[np.random.Generator]:
        """One stream per client, the same in every exchange of the round (used for the order of batches)."""
        return [named_stream(self.seed, self.round, client, purpose) for client in self.clients]

    def of_exchange(self, purpose: str) -> list[np.random.Generator]:
        """One stream per client, different in every exchange."""
        layer = () if self.layer == 0 else (f"layer {self.layer}",)
        return [
            named_stream(self.seed, self.round, self.exchange, client, purpose, *layer)
            for client in self.clients
        ]

    def unknown_to_server(self, seeded: list[np.random.Generator]) -> list[np.random.Generator]:
        """`seeded`; on a deployed node entropy streams, since the server knows the seed and could reproduce them."""
        if self.noise_source == "seeded":
            return seeded
        return [np.random.default_rng(int.from_bytes(os.urandom(32))) for _ in self.clients]

    def noise(self, purpose: str = "noise") -> list[Stream]:
        """One stream of privacy noise per client."""
        if self.noise_source == "entropy":
            return [EntropyStream() for _ in self.clients]
        return list(self.of_exchange(f"privacy/{purpose}"))


@dataclass(frozen=True)
class ServerStreams:
    """The server's streams of one exchange.

    Args:
        seed: The run's seed.
        round: The round, from 1.
        exchange: The exchange within the round, from 0.
        noise_source: Where privacy noise comes from.
    """

    seed: int
    round: int
    exchange: int = 0
    noise_source: NoiseSource = "seeded"

    def of_exchange(self, purpose: str) -> np.random.Generator:
        return named_stream(self.seed, self.round, self.exchange, "server", purpose)

    def noise(self, purpose: str = "noise") -> Stream:
        if self.noise_source == "entropy":
            return EntropyStream()
        return self.of_exchange(f"privacy/{purpose}")


def normal(streams: Sequence[Stream], shape: Sequence[int], like: Tensor) -> Tensor:
    """Standard normal draws `[K, *shape]` with `like`'s dtype and device, row k from stream k.

    For randomness that is not privacy noise, such as the start of an optimisation; a mechanism draws privacy noise.
    """
    return table([stream.standard_normal for stream in streams], shape, like)


def table(
    draws: Sequence[Callable[[int], npt.NDArray[np.float64]]], shape: Sequence[int], like: Tensor
) -> Tensor:
    """Row k from `draws[k]`, converted to `like`'s dtype row by row, while the row is in the cache."""
    size = math.prod(shape)
    drawn = like.new_empty((len(draws), size))
    for row, draw in zip(drawn, draws, strict=True):
        row.copy_(torch.from_numpy(draw(size)))
    return drawn.reshape(len(draws), *shape)
