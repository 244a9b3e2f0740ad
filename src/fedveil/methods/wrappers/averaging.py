"""Rules that filter the released model over rounds, which averages out noise that is independent between rounds."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.methods.fields import STRICT
from fedveil.methods.wrappers.wrapper import Memory, Rule, Step, wrapper
from fedveil.tree import Params, add, scale, sub, zeros_like


@wrapper("model-average", "releases an exponential average of the models of all rounds")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelAverage(Rule):
    """`m <- decay m + (1 - decay) w`, released as `m / (1 - decay^t)`: a weighted mean of the models so far.

    Args:
        decay: Weight of the earlier models.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Weight of the earlier models in the average."""

    def start(self, params: Params) -> Memory:
        return zeros_like(params)

    def step(self, round: int, memory: Memory, before: Params, after: Params) -> Step:
        total = add(scale(memory, self.decay), after, scale=1 - self.decay)
        return Step(total, scale(total, 1 / (1 - self.decay**round)))


@wrapper("low-pass", "releases the models after a second-order low-pass filter over the rounds")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class LowPass(Rule):
    """A Butterworth filter of the displacement from the public initial model, where the filter is at rest.

    Args:
        cutoff: Frequency of half power, in cycles per two rounds (1 would pass everything).
    """

    cutoff: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Frequency of half power, in cycles per two rounds."""

    def coefficients(self) -> tuple[float, float, float, float, float]:
        """b0, b1, b2, a1, a2 of the bilinear transform of 1 / (s^2 + sqrt(2) s + 1)."""
        warped = math.tan(math.pi * self.cutoff / 2)
        norm = 1 + math.sqrt(2) * warped + warped**2
        b = warped**2 / norm
        return b, 2 * b, b, 2 * (warped**2 - 1) / norm, (1 - math.sqrt(2) * warped + warped**2) / norm

    def start(self, params: Params) -> Memory:
        rest = zeros_like(params)
        return _named(start=params, first=rest, second=rest)

    def step(self, round: int, memory: Memory, before: Params, after: Params) -> Step:
        b0, b1, b2, a1, a2 = self.coefficients()
        start, first, second = (_part(memory, name) for name in ("start", "first", "second"))
        x = sub(after, start)
        y = add(first, x, scale=b0)
        first = add(add(second, x, scale=b1), y, scale=-a1)
        second = add(scale(x, b2), y, scale=-a2)
        return Step(_named(start=start, first=first, second=second), add(start, y))


@wrapper("server-momentum", "the server moves by a decaying sum of past changes (FedAvgM)")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServerMomentum(Rule):
    """`v <- momentum v + (w - before)`, `w <- before + lr v`; training continues from there.

    Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.
    2019.

    Args:
        momentum: Weight of the earlier steps.
        lr: Learning rate of the server.
    """

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of past changes."""
    lr: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the sum of changes that the model moves by."""

    def start(self, params: Params) -> Memory:
        return zeros_like(params)

    def step(self, round: int, memory: Memory, before: Params, after: Params) -> Step:
        velocity = add(sub(after, before), memory, scale=self.momentum)
        moved = add(before, velocity, scale=self.lr)
        return Step(velocity, moved, resume=moved)


def _named(**parts: Params) -> Memory:
    return {f"{part}/{name}": leaf for part, params in parts.items() for name, leaf in params.items()}


def _part(memory: Memory, part: str) -> Params:
    return {
        name.removeprefix(f"{part}/"): leaf for name, leaf in memory.items() if name.startswith(f"{part}/")
    }
