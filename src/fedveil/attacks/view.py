"""The input and output of an attack.

A view contains only what an honest-but-curious server has: the task, the broadcast, the clients' answers, the public
settings of the method. An attack never gets a client's data; scoring happens elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from fedveil.attacks.text.leak import TokenLeak
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.methods.disclosure import Adaptation, LocalSteps
from fedveil.task import Task
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

StepCallback = Callable[[int, int, float], None]
"""Called with the step, the number of steps, and the smallest loss so far."""


UNKNOWN = -1
"""Marks a token that the server does not know."""


@dataclass(frozen=True)
class TextKnowledge:
    """A server's knowledge about texts besides the gradient.

    `known [T, B, L]` has padding and special tokens at their positions (the lengths are assumed to be known), and
    `UNKNOWN` elsewhere. `public` are public texts as tokens, from `source`.
    """

    known: Tensor
    vocabulary: int
    special: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None
    public: tuple[tuple[int, ...], ...]
    source: str


@dataclass(frozen=True)
class ServerView:
    """T uploads that answer one broadcast, as observed by the server.

    Args:
        task: The model and its loss.
        params: The broadcast model, leaves without a client axis.
        observed: The uploaded gradient, or `(start - sent model) / lr` for a trained model, leaves `[T, ...]`.
        examples: Number of examples behind an upload.
        input_shape: The shape of one example.
        classes: Number of classes.
        box: The smallest and the largest value of an input.
        labels: `[T, B]`, only if the server is assumed to know them.
        local: The local training behind a trained model.
        adaptation: The attacker's adaptation to the defence.
        public: Public examples `[n, ...]` of the same kind.
        text: The knowledge about texts, if the data is text.
        drift: The term added to each gradient of local training, `[T, ...]`, which the server knows.
        notes: Facts about the clients' training that the server does not know.
        centre: Mean of pixels that are not normalised, where searches start.
        unit: Their standard deviation, the unit of step sizes.
    """

    task: Task
    params: Params
    observed: Params
    examples: int
    input_shape: tuple[int, ...]
    classes: int
    box: tuple[Tensor, Tensor] | None = None
    labels: Tensor | None = None
    local: LocalSteps | None = None
    adaptation: Adaptation = field(default_factory=Adaptation)
    public: Tensor | None = None
    text: TextKnowledge | None = None
    drift: Params | None = None
    notes: tuple[str, ...] = ()
    centre: float = 0.0
    unit: float = 1.0

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise InputError(
                "examples", self.examples, "an upload has at least one example", "Use 1 or more."
            )
        missing = sorted(set(self.params) - set(self.observed))
        if missing:
            raise InputError("observed", missing, "these parameters have no gradient", "Give one for each.")
        if self.labels is not None and tuple(self.labels.shape) != (self.targets, self.examples):
            raise InputError(
                "labels",
                list(self.labels.shape),
                f"there are {self.targets} uploads of {self.examples} examples",
                f"Give labels of shape [{self.targets}, {self.examples}].",
            )

    @property
    def targets(self) -> int:
        return int(next(iter(self.observed.values())).shape[0])

    def double(self) -> ServerView:
        """The same view in double precision."""
        return self._as(torch.float64)

    def _as(self, dtype: torch.dtype) -> ServerView:
        changed: dict[str, Any] = dict(self.__dict__)
        changed["params"] = {name: leaf.to(dtype) for name, leaf in self.params.items()}
        changed["observed"] = {name: leaf.to(dtype) for name, leaf in self.observed.items()}
        if self.drift is not None:
            changed["drift"] = {name: leaf.to(dtype) for name, leaf in self.drift.items()}
        if self.box is not None:
            changed["box"] = (self.box[0].to(dtype), self.box[1].to(dtype))
        return ServerView(**changed)


def image_box(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of a normalised pixel: black and white.

    Args:
        mean: Mean of each channel.
        std: Standard deviation of each channel.

    Returns:
        Two tensors `[C, 1, 1]`.
    """
    m, s = torch.tensor(mean), torch.tensor(std)
    return ((0 - m) / s).reshape(-1, 1, 1), ((1 - m) / s).reshape(-1, 1, 1)


@dataclass(frozen=True)
class Finding:
    """The finding of an attack.

    Args:
        attack: Name of the attack.
        images: The best reconstruction by the attacker's own loss, `[T, B, ...]`; for texts, token ids.
        labels: `[T, B]`.
        losses: The losses of all restarts, `[T, R]`.
        path: (step, images) of the best restart at intermediate steps.
        steps: Number of steps.
        seconds: Duration.
        notes: Notes for the reader of the finding.
        leaks: For texts, the tokens disclosed directly by each upload.
    """

    attack: str
    images: Tensor
    labels: Tensor
    losses: Tensor
    path: tuple[tuple[int, Tensor], ...]
    steps: int
    seconds: float
    notes: tuple[str, ...] = ()
    leaks: tuple[TokenLeak, ...] = ()


class Attack(Protocol):
    """An attack by name: a frozen, validated dataclass whose fields are its settings."""

    name: ClassVar[str]
    summary: ClassVar[str]
    of_texts: ClassVar[bool]

    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding: ...
