"""T uploads times R restarts are rows of one stack: rows t*R .. t*R+R-1 belong to upload t."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedveil.attacks.inversion.optimise import Optimised
from fedveil.attacks.view import Finding, ServerView
from fedveil.lazy_torch import torch
from fedveil.streams import named_stream
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The stack of an attack: the observed gradient and the labels of each row."""

    view: ServerView
    restarts: int
    labels: Tensor

    @property
    def count(self) -> int:
        return self.view.targets * self.restarts

    @property
    def observed(self) -> Params:
        return {name: repeat(leaf, self.restarts) for name, leaf in self.view.observed.items()}

    @property
    def orders(self) -> Tensor | None:
        """The order `[N, passes, B]` in which each row trains its candidates; None if it does not matter.

        A client's shuffle is secret. The first restart keeps the order of the candidates, every other one guesses; a
        wrong guess has a larger loss.
        """
        local, examples = self.view.local, self.view.examples
        if local is None or local.batch(examples) == examples:
            return None
        passes = local.passes(examples)
        guessed = [
            named_stream(restart, "order", number).permutation(examples) if restart else np.arange(examples)
            for restart in range(self.restarts)
            for number in range(passes)
        ]
        table = torch.from_numpy(np.stack(guessed)).reshape(self.restarts, passes, examples)
        return table.repeat(self.view.targets, 1, 1)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the stack for the reader of the finding."""
        if self.orders is None:
            return self.view.notes
        tried = (
            "one order was tried" if self.restarts == 1 else f"each of {self.restarts} restarts tried another"
        )
        return (*self.view.notes, f"the client's order of batches is unknown: {tried}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, self.view.examples, *self.view.input_shape)

    def noise(self, rng: np.random.Generator) -> Tensor:
        """A standard normal start for each restart, the same for every upload, so that uploads are independent."""
        return self.view.centre + self.view.unit * self.spread(
            rng, self.view.examples, *self.view.input_shape
        )

    def spread(self, rng: np.random.Generator, *shape: int) -> Tensor:
        """Standard normal numbers of this shape for each restart, repeated for every upload."""
        like = next(iter(self.view.params.values()))
        drawn = torch.from_numpy(rng.standard_normal((self.restarts, *shape))).to(like)
        return drawn.repeat(self.view.targets, *(1 for _ in shape))


def make_rows(view: ServerView, restarts: int, labels: Tensor) -> Rows:
    return Rows(view, restarts, repeat(labels, restarts))


def repeat(leaf: Tensor, restarts: int) -> Tensor:
    return leaf.repeat_interleave(restarts, dim=0)


class Clock:
    """Measures seconds since its creation."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began


class Named:
    """A name for `fedveil list attacks`; set when an attack is registered."""

    name: ClassVar[str]
    summary: ClassVar[str]
    of_texts: ClassVar[bool] = False


def best_of(
    attack: Named,
    rows: Rows,
    images: Tensor,
    loss: Tensor,
    labels: Tensor,
    path: Sequence[tuple[int, Tensor]],
    *,
    steps: int,
    clock: Clock,
    notes: tuple[str, ...] = (),
) -> Finding:
    """The restart with the smallest loss for each upload; NaN is never chosen."""
    table = torch.nan_to_num(loss, nan=torch.inf).reshape(rows.view.targets, rows.restarts)
    pick = torch.arange(rows.view.targets, device=table.device) * rows.restarts + table.argmin(1)
    return Finding(
        attack.name,
        images[pick].reshape(rows.view.targets, rows.view.examples, *rows.view.input_shape).float(),
        labels[pick],
        table,
        tuple(
            (step, x[pick].reshape(rows.view.targets, rows.view.examples, *rows.view.input_shape).float())
            for step, x in path
        ),
        steps,
        clock.seconds,
        (*notes, *rows.notes),
    )


def best_images(
    attack: Named, rows: Rows, found: Optimised, *, steps: int, clock: Clock, notes: tuple[str, ...]
) -> Finding:
    """`best_of` for a search over images with the rows' labels."""
    return best_of(
        attack,
        rows,
        found.variables[0],
        found.loss,
        rows.labels,
        found.path,
        steps=steps,
        clock=clock,
        notes=notes,
    )
