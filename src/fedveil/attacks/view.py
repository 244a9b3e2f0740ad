"""What an attacker is given, and what it hands back.

A view holds only what an honest-but-curious server has: the task, the model it sent, what clients answered, the
public settings of the method. An attack never sees a client's data; scoring happens elsewhere.
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
"""In the place of a token that the server does not know."""


@dataclass(frozen=True)
class TextKnowledge:
    """What a server knows of texts before it looks at a gradient.

    `known [T, B, L]` holds padding and special tokens in their places (the lengths are taken to be known), and
    `UNKNOWN` in all others. `public` are texts of tokens that anybody has, from `source`.
    """

    known: Tensor
    vocabulary: int
    special: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None
    public: tuple[tuple[int, ...], ...]
    source: str


@dataclass(frozen=True)
class ServerView:
    """T uploads that answer one broadcast, as the server sees them.

    Args:
        task: The model and its loss.
        params: The broadcast model, leaves without a client axis.
        observed: What was sent as a gradient, or `(start - sent model) / lr` for a trained model, leaves `[T, ...]`.
        examples: Number of examples behind an upload.
        input_shape: The shape of one example.
        classes: Number of classes.
        box: The least and the greatest value of an input.
        labels: `[T, B]`, only if the server is taken to know them.
        local: How a trained model was trained.
        adaptation: What the attacker knows of the defence.
        public: Examples `[n, ...]` of the same kind that anybody has.
        text: What is known of texts, if the data are texts.
        drift: Added to each gradient of local training, `[T, ...]`, which the server has sent or can add up.
        notes: What of the clients' training the server does not know.
        centre: Mean of pixels that do not come normalised: searches start there.
        unit: Their deviation: searches step in this unit.
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
                "examples", self.examples, "an upload stands for at least one example", "Use 1 or more."
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
    """The least and greatest value of a normalised pixel: black and white.

    Args:
        mean: Of each channel.
        std: Of each channel.

    Returns:
        Two tensors `[C, 1, 1]`.
    """
    m, s = torch.tensor(mean), torch.tensor(std)
    return ((0 - m) / s).reshape(-1, 1, 1), ((1 - m) / s).reshape(-1, 1, 1)


@dataclass(frozen=True)
class Finding:
    """What an attack found.

    Args:
        attack: Its name.
        images: The attacker's best guess by its own loss, never by the truth, `[T, B, ...]`; of texts token ids.
        labels: `[T, B]`.
        losses: Those of every restart, `[T, R]`.
        path: (step, images) of the winning restart on its way.
        steps: Number of steps.
        seconds: How long it took.
        notes: For the reader of the finding.
        leaks: Of texts, the tokens that each upload named outright.
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
