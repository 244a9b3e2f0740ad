"""Who holds what, to look at: a table for the terminal and a figure for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedveil.errors import InputError

_BUBBLES_UP_TO = 30  # more clients than this are easier to read as a heat map
_INK = "#1f3b57"
_SOFT = "#8c959f"


def counts_table(
    counts: Tensor, classes: Sequence[str] | None = None, *, title: str = "Examples per client and class"
) -> Table:
    """A table with a row per client and a column per class; the larger a count, the bolder, zero is a dot."""
    names = _class_names(counts, classes)
    table = Table(title=title, header_style="bold", row_styles=["", "on grey7"], pad_edge=False)
    table.add_column("client", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("all", justify="right", style="bold")
    most = int(counts.max())
    for client, row in enumerate(counts.tolist()):
        cells = [
            Text("·", style="dim")
            if not count
            else Text(str(count), style="bold" if 2 * count > most else "")
            for count in row
        ]
        table.add_row(str(client), *cells, str(sum(row)))
    table.add_section()
    table.add_row("all", *(str(total) for total in counts.sum(0).tolist()), str(int(counts.sum())))
    return table


def counts_figure(
    counts: Tensor, classes: Sequence[str] | None = None, *, title: str | None = None
) -> Figure:
    """Classes by clients as bubbles whose area is the count, or as a heat map for more than 30 clients.

    Above it are the clients' sizes. One ink from light to dark: it reads the same in grey.
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
        shown = main.imshow(grid, aspect="auto", cmap="Greys", vmin=0, interpolation="nearest")
        figure.colorbar(shown, ax=main, label="examples", pad=0.01, fraction=0.04)
    main.set_yticks(range(number), names, fontsize=8 if number <= 30 else 5)
    main.set_xlabel("client")
    main.set_ylabel("class")
    main.xaxis.set_major_locator(MaxNLocator(nbins=min(clients, 20), integer=True, min_n_ticks=1))
    main.set_xlim(-0.6, clients - 0.4)
    main.tick_params(length=2, color=_SOFT)
    for axes in (top, main):
        for spine in axes.spines.values():
            spine.set_color(_SOFT)
            spine.set_linewidth(0.6)
    if title:
        top.set_title(title, fontsize=11, loc="left")
    return figure


def save_picture(
    counts: Tensor, path: str | Path, classes: Sequence[str] | None = None, *, title: str | None = None
) -> Path:
    """Write the figure as PNG, PDF or SVG, as the path's ending says."""
    target = Path(path)
    if target.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise InputError("path", str(path), "no such kind of picture", "Use .png, .pdf or .svg.")
    target.parent.mkdir(parents=True, exist_ok=True)
    counts_figure(counts, classes, title=title).savefig(target)
    return target


def _draw_bubbles(axes: Axes, grid: np.ndarray, width: float, height: float) -> None:
    number, clients = grid.shape
    across = min(0.85 * (width - 1.0) / clients, 0.72 * (height - 1.4) / number) * 72.0  # points
    rows, columns = np.nonzero(grid)
    share = grid[rows, columns] / max(grid.max(), 1.0)
    axes.scatter(columns, rows, s=(across**2) * share, color=_INK, linewidths=0, zorder=2)
    axes.set_ylim(number - 0.4, -0.6)
    axes.grid(color="#e3e6ea", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _class_names(counts: Tensor, classes: Sequence[str] | None) -> list[str]:
    if counts.dim() != 2 or not counts.numel():
        raise InputError(
            "counts", list(counts.shape), "not clients by classes", "Give Partition.counts(...)."
        )
    if classes is None:
        return [str(label) for label in range(counts.shape[1])]
    if len(classes) != counts.shape[1]:
        raise InputError(
            "classes", len(classes), f"there are {counts.shape[1]} columns", "Give one name per class."
        )
    return list(classes)
