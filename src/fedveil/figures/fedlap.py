"""Figures of synthetic images by class and round (FedLAP-DP's Figures 12 and 13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fedveil.errors import InputError
from fedveil.figures.figure import new_figure
from fedveil.training.surrogate import PADDING

_MOST_CLASSES, _MOST_OF_A_CLASS = 10, 4


@dataclass(frozen=True)
class Sets:
    """The synthetic sets of one round: images `[K, n, ...]` and labels `[K, n]`."""

    images: Tensor
    labels: Tensor

    def of_class(self, label: int) -> Tensor:
        """The images of one class, of all clients."""
        return self.images[self.labels == label]


def images_figure(
    rounds: Mapping[int, Sets],
    classes: Sequence[int],
    names: Sequence[str],
    *,
    columns: int = 4,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> Figure:
    """A row per class, a block of `columns` images per round; pixels are denormalised and clipped to [0, 1].

    `mean` and `std` are the constants of the normalisation, per channel or one for all.
    """
    if not rounds:
        raise InputError("rounds", [], "must not be empty", "Keep at least one completed round.")
    shift, stretch = (torch.tensor(values)[:, None, None] for values in (mean, std))
    figure = new_figure(1.0 + 0.62 * columns * len(rounds), 0.4 + 0.62 * len(classes))
    blocks = figure.subfigures(1, len(rounds), squeeze=False)[0]
    for number, (block, (round_, sets)) in enumerate(zip(blocks, rounds.items(), strict=True)):
        block.suptitle(f"round {round_}", fontsize=9)
        grid = block.subplots(len(classes), columns, squeeze=False)
        for row, label in zip(grid, classes, strict=True):
            found = sets.of_class(label)
            for place, axes in enumerate(row):
                axes.set_xticks([])
                axes.set_yticks([])
                if place < len(found):
                    seen = (found[place] * stretch + shift).clamp(0, 1)
                    picture = seen.permute(1, 2, 0).float().numpy()
                    axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
                else:
                    axes.set_visible(False)
            if number == 0:
                row[0].set_ylabel(names[label], fontsize=8, rotation=0, ha="right", va="center")
    return figure


def some_images_figure(
    round: int, sets: Sets, names: Sequence[str], *, mean: Sequence[float], std: Sequence[float]
) -> Figure | None:
    """A few images of the first classes in a round's sets; None if there are no images."""
    shown = sorted(set(sets.labels[sets.labels != PADDING].tolist()))[:_MOST_CLASSES]
    if not shown:
        return None
    columns = min(_MOST_OF_A_CLASS, max(len(sets.of_class(label)) for label in shown))
    return images_figure({round: sets}, shown, names, columns=columns, mean=mean, std=std)
