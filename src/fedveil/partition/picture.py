"""A partition as a table for the terminal and as a figure for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedveil.errors import InputError

_BUBBLES_UP_TO = 30  # a heat map is easier to read for more clients
_COLUMNS_UP_TO = 12
_TERMINAL = 80
_LONGEST_NAME = 20
_MOST_CLIENTS = 40  # rows of the table
_INK = "#1f3b57"
_SOFT = "#8c959f"
_SHADES = LinearSegmentedColormap.from_list("ink", ["#ffffff", "#9fb3c8", _INK, "#0b1622"])


def counts_table(
    counts: Tensor,
    classes: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
) -> Table:
    """A table with a row per client, at most 40 of them, and a sum over all.

    Up to twelve classes have a column each if that fits 80 characters: a count above half the largest
    is bold and zero is a dot. Otherwise columns show how many classes a client holds and its largest class.
    """
    names = _class_names(counts, classes)
    least = len(str(int(counts.sum(0).max())))
    total_width = len(str(int(counts.sum())))
    shown = (list(map(str, range(len(counts)))) if clients is None else list(clients))[:_MOST_CLIENTS]
    first = min(max([6, *map(len, shown)]), _LONGEST_NAME)
    wide = len(names) > _COLUMNS_UP_TO or first + 3 + len(names) * (least + 1) + total_width > _TERMINAL
    heads = ["classes", "largest class"] if wide else names
    gap = 1 if first + 4 + len(heads) * (least + 2) + total_width <= _TERMINAL else 0
    table = Table(
        title="Examples per client and class", box=box.SIMPLE_HEAD, padding=(0, 0, 0, gap), pad_edge=False
    )
    table.add_column(
        "client", justify="right", min_width=6, max_width=first, overflow="ellipsis", no_wrap=True
    )
    # Long names are shortened, numbers never.
    room = (_TERMINAL - first - 4 - total_width) // len(heads) - 1 - gap
    for head in heads:
        table.add_column(
            head,
            justify="right",
            min_width=least,
            max_width=max(least, room),
            overflow="ellipsis",
            no_wrap=True,
        )
    table.add_column("all", justify="right", style="bold", min_width=total_width)
    most = int(counts.max())
    rows = counts.tolist()
    for client, row in zip(shown, rows, strict=False):
        cells = _summary(row, names) if wide else [_cell(count, most) for count in row]
        table.add_row(Text(client), *cells, str(sum(row)))
    if len(rows) > _MOST_CLIENTS:
        table.caption = f"{len(rows) - _MOST_CLIENTS} more clients are not shown"
    table.add_section()
    total = counts.sum(0).tolist()
    table.add_row(
        "all", *(_summary(total, names) if wide else [Text(str(n)) for n in total]), str(sum(total))
    )
    return table


def counts_figure(counts: Tensor, classes: Sequence[str] | None = None) -> Figure:
    """Classes by clients as bubbles whose area is the count, or as a heat map for more than 30 clients.

    Above it are the clients' sizes. A single hue from light to dark, readable in greyscale.
    """
    names = _class_names(counts, classes)
    grid = counts.numpy().T.astype(np.float64)  # [classes, clients]
    number, clients = grid.shape
    width = float(np.clip(2.6 + 0.30 * clients, 5.2, 11.0))
    height = float(np.clip(1.9 + 0.30 * number, 3.4, 13.0))
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, max(2.5, 0.33 * number)])
    top.bar(np.arange(clients), grid.sum(0), width=0.72 if clients <= _BUBBLES_UP_TO else 1.0, color=_INK)
    top.set_ylabel("examples")
    top.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    top.spines[["top", "right"]].set_visible(False)
    top.tick_params(axis="x", length=0, labelbottom=False)
    if clients <= _BUBBLES_UP_TO:
        _draw_bubbles(main, grid, width, height)
    else:
        shown = main.imshow(grid, aspect="auto", cmap=_SHADES, vmin=0, interpolation="nearest")
        figure.colorbar(shown, ax=main, label="examples", pad=0.01, fraction=0.04)
    main.set_yticks(range(number), names, fontsize=8 if number <= 30 else 5)
    main.set_xlabel("client")
    main.set_ylabel("class")
    if clients <= 20:
        main.set_xticks(range(clients))
    else:
        main.xaxis.set_major_locator(MaxNLocator(nbins=20, steps=[1, 2, 5, 10], integer=True))
    main.set_xlim(-0.6, clients - 0.4)
    main.tick_params(length=2, color=_SOFT)
    for axes in (top, main):
        for spine in axes.spines.values():
            spine.set_color(_SOFT)
            spine.set_linewidth(0.6)
    return figure


def save_picture(counts: Tensor, path: str | Path, classes: Sequence[str] | None = None) -> Path:
    """Write the figure as PNG, PDF or SVG, depending on the suffix of the path."""
    target = Path(path)
    if target.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise InputError("path", str(path), "is not a supported image format", "Use .png, .pdf or .svg.")
    figure = counts_figure(counts, classes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target)
    except OSError as error:
        raise InputError(
            "path", str(path), f"cannot be written: {error.strerror}", "Choose another place."
        ) from error
    return target


def _draw_bubbles(axes: Axes, grid: np.ndarray, width: float, height: float) -> None:
    number, clients = grid.shape
    across = min(0.95 * (width - 1.2) / clients, 0.88 * (height - 1.6) / number) * 72.0  # points
    rows, columns = np.nonzero(grid)
    share = grid[rows, columns] / max(grid.max(), 1.0)
    axes.scatter(columns, rows, s=(across**2) * share, color=_INK, linewidths=0, zorder=2)
    note = f"largest dot: {int(grid.max())} examples"
    axes.text(1.0, 1.01, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color="#57606a")
    axes.set_ylim(number - 0.4, -0.6)
    axes.grid(color="#e3e6ea", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _cell(count: int, most: int) -> Text:
    return Text(str(count), style="bold" if 2 * count > most else "") if count else Text("·", style="dim")


def _summary(row: Sequence[int], names: Sequence[str]) -> list[Text]:
    largest = max(range(len(row)), key=row.__getitem__)
    share = row[largest] / max(sum(row), 1)
    return [Text(str(sum(count > 0 for count in row))), Text(f"{names[largest]} ({share:.0%})")]


def _class_names(counts: Tensor, classes: Sequence[str] | None) -> list[str]:
    if counts.dim() != 2 or not counts.numel():
        raise InputError(
            "counts",
            list(counts.shape),
            "does not have the shape [clients, classes]",
            "Give Partition.counts(...).",
        )
    if classes is None:
        return [str(label) for label in range(counts.shape[1])]
    if len(classes) != counts.shape[1]:
        raise InputError(
            "classes", len(classes), f"there are {counts.shape[1]} columns", "Give one name per class."
        )
    return list(classes)
