"""The threat model of membership attacks: observations, candidates, and the attacker's own examples.

The attacker does not get the membership labels; scoring happens elsewhere (`score.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from fedveil.attacks.registry import register_among, with_settings
from fedveil.data.client_data import ArrayClients
from fedveil.errors import InputError, known_name
from fedveil.lazy_torch import torch
from fedveil.streams import ClientStreams
from fedveil.task import Batch, Task
from fedveil.training.local_sgd import local_sgd
from fedveil.tree import Params, rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """`x [n, ...]` and `y [n]`."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise InputError(
                "y", len(self.y), f"there are {len(self.x)} examples", "Give one label for each."
            )

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Tensor) -> Examples:
        return Examples(self.x[index], self.y[index])

    def __add__(self, other: Examples) -> Examples:
        return Examples(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]))


@dataclass(frozen=True)
class Recipe:
    """How the target was trained, from its public configuration; shadow models are trained in the same way.

    `examples` is the size of its training set, if known.
    """

    lr: float
    batch_size: int
    epochs: int
    examples: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class MembershipView:
    """The observed models `[R, ...]`, in order, and the candidates.

    `own` are the attacker's examples, from the same population and disjoint from the candidates. `sent` and `start`
    are one client's uploaded gradient and the broadcast model, both `[1, ...]`, if an upload is attacked.
    """

    task: Task
    models: Params
    asked: Examples
    own: Examples
    recipe: Recipe
    start: Params | None = None
    sent: Params | None = None

    def __post_init__(self) -> None:
        if len(self.asked) == 0:
            raise InputError("asked", 0, "there is no candidate", "Give at least one example.")

    @property
    def model_count(self) -> int:
        return int(next(iter(self.models.values())).shape[0])

    def newest(self) -> Params:
        """The last observed model, as a stack of one."""
        return rows(self.models, [self.model_count - 1])


class MembershipAttack(Protocol):
    """An attack by name: a frozen, validated dataclass whose fields are its settings."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        """A score for each candidate, `[n]` in float64; higher means more likely a member."""
        ...


MEMBERSHIP_ATTACKS: dict[str, type[MembershipAttack]] = {}
C = TypeVar("C")
_CHUNK = 1024  # examples evaluated at a time


def register_membership(name: str, summary: str) -> Callable[[type[C]], type[C]]:
    """Register an attack under its name."""
    return register_among(MEMBERSHIP_ATTACKS, name, summary)


def make_membership_attack(name: str, settings: Mapping[str, Any] | None = None) -> MembershipAttack:
    """The attack of this name with these settings, validated."""
    kind = MEMBERSHIP_ATTACKS[known_name("attack", "attack", name, MEMBERSHIP_ATTACKS)]
    return with_settings(kind, settings)


def train_shadows(
    task: Task,
    recipe: Recipe,
    pool: Examples,
    parts: list[Tensor],
    rng: np.random.Generator,
    start: Params | None = None,
) -> Params:
    """One shadow model per part of the pool, `[S, ...]`, trained as the clients of a single stacked run.

    Without `start` `[1, ...]`, every shadow has its own initial weights (or the model instance's, if the task's model
    is an instance).
    """
    if any(len(part) == 0 for part in parts) or not parts:
        raise InputError(
            "own", len(pool), "leaves a shadow model without examples", "Give the attacker more examples."
        )
    seed = int(rng.integers(2**31))
    w = start
    if w is None:
        fresh = [task.init(seed + s) for s in range(len(parts))]
        w = {name: torch.stack([one[name] for one in fresh]) for name in fresh[0]}
    data = ArrayClients(pool.x, pool.y, parts).load(range(len(parts)))
    batch = recipe.batch_size
    # The same number of steps on fewer examples.
    if recipe.examples is not None and data.largest < recipe.examples:
        batch = max(1, round(batch * data.largest / recipe.examples))
    return local_sgd(
        task,
        w,
        data,
        ClientStreams(seed, 0, tuple(range(len(parts)))),
        lr=recipe.lr,
        batch_size=batch,
        epochs=recipe.epochs,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    ).params


def log_probabilities(task: Task, models: Params, examples: Examples) -> Tensor:
    """Log probabilities of the classes, `[R, n, classes]` in float64, model by model."""
    return _asked(models, examples, lambda one, x, _: task.outputs(one, x)).log_softmax(-1)


def losses(task: Task, models: Params, examples: Examples) -> Tensor:
    """The loss of every example under every model, `[R, n]` in float64."""
    return _asked(models, examples, lambda one, x, y: task.losses(one, Batch(x, y)))


def _asked(models: Params, examples: Examples, ask: Callable[[Params, Tensor, Tensor], Tensor]) -> Tensor:
    """The output of every model for every example, model by model, `[R, n, ...]` in float64."""
    parts = list(zip(examples.x.split(_CHUNK), examples.y.split(_CHUNK), strict=True))
    out = []
    for r in range(next(iter(models.values())).shape[0]):
        one = rows(models, [r])
        out.append(torch.cat([ask(one, x.unsqueeze(0), y.unsqueeze(0))[0] for x, y in parts]).double())
    return torch.stack(out)


def half_of(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A random half of `count` positions, and the other half."""
    order = torch.from_numpy(rng.permutation(count))
    return order[: count // 2], order[count // 2 :]
