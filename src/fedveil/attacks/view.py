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
    """T uploads that answer one broadcast. Leaves of `observed` are `[T, ...]`, those of `params` have no such axis.

    `observed` is what was sent as a gradient, or `(sent model's start - sent model) / lr` for a trained model;
    then `local` says how it was trained. `labels [T, B]` are there only if the server is taken to know them.
    `public` are examples `[n, ...]` of the same kind that anybody has; `text` is there if the data are texts.
    `drift` `[T, ...]` was added to each gradient of local training, which the server has sent or can add up.
    `notes` say what of the clients' training the server does not know. `centre` and `unit` are the mean and deviation
    of pixels that do not come normalised: searches start and step in these units.
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
    """The least and greatest value of a normalised pixel, `[C, 1, 1]`: black and white."""
    m, s = torch.tensor(mean), torch.tensor(std)
    return ((0 - m) / s).reshape(-1, 1, 1), ((1 - m) / s).reshape(-1, 1, 1)


@dataclass(frozen=True)
class Finding:
    """What an attack found. `images [T, B, ...]` are the attacker's best guess by its own loss, never by the truth.

    `losses [T, R]` are those of every restart; `path` holds (step, images) of the winning restart on its way. Of texts,
    `images` and `path` hold token ids `[T, B, L]`, and `leaks` the tokens that each upload named outright.
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
