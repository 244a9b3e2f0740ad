"""FedCEO's figures: the effect of smoothing on the clients' models.

Figure 1: roughness of a layer (class by client) before and after. Figure 5: the singular values of every frequency.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from fedveil.evaluation.smoothness import laplacian_smoothness
from fedveil.figures.figure import INKS, LINES, new_figure
from fedveil.linalg import slice_singular_values, t_tsvd

_SHADES = LinearSegmentedColormap.from_list("roughness", ["#ffffff", "#9fb3c8", INKS[0], "#0b1622"])


def smoothness_figure(
    before: Tensor, after: Tensor, *, classes: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Layers `[K, classes, h]` before and after smoothing, on one scale: darker is rougher."""
    figure = new_figure(7.2, 3.8)
    maps = figure.subplots(1, 2)
    draw_roughness(figure, maps, before, after, classes)
    for axes in maps:
        axes.set_xlabel("client (slot)")
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def draw_roughness(
    figure: Figure, maps: Sequence[Axes], before: Tensor, after: Tensor, classes: Sequence[str] | None = None
) -> None:
    """Draw layers before and after smoothing on two axes; their rows are `classes`, numbered without names."""
    names = [str(c) for c in range(before.shape[1])] if classes is None else list(classes)
    rough = [laplacian_smoothness(stack.double()).T for stack in (before, after)]  # [classes, K]
    most = float(rough[0].max()) or 1.0
    for axes, values, name in zip(maps, rough, ("uploads with noise", "after smoothing"), strict=True):
        shown = axes.imshow(
            values.numpy(), aspect="auto", cmap=_SHADES, vmin=0, vmax=most, interpolation="nearest"
        )
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_yticks(range(len(names)), names, fontsize=8 if len(names) <= 12 else 5)
        axes.set_ylabel("class")
        axes.set_xticks(range(0, values.shape[1], 1 + values.shape[1] // 12))
    figure.colorbar(shown, ax=maps, pad=0.02, fraction=0.04, label="roughness across clients")


def smoothing_figures(
    stack: Tensor, threshold: float, *, title: str, classes: Sequence[str]
) -> dict[str, Figure]:
    """Figures of the effect of smoothing on a stack of noisy layers `[K, d, h]`: `spectrum` and `smoothness`."""
    after = t_tsvd(stack, threshold)
    rows = classes if len(classes) == stack.shape[1] else None
    return {
        "spectrum": spectrum_figure(stack, after, threshold, title=title),
        "smoothness": smoothness_figure(stack, after, classes=rows, title=title),
    }


def spectrum_figure(before: Tensor, after: Tensor, threshold: float, *, title: str = "") -> Figure:
    """The singular values of every frequency slice of a stack `[K, d, h]`, before and after smoothing."""
    figure = new_figure(7.2, 3.4)
    pair = figure.subplots(1, 2, sharey=True)
    for axes, stack, name in zip(
        pair, (before, after), ("uploads with noise", "after smoothing"), strict=True
    ):
        values = slice_singular_values(stack)
        for j, row in enumerate(values.tolist()):
            text = {0: "frequency 0: the sum", 1: "other frequencies: differences"}.get(j)
            style = {"color": INKS[0], "linewidth": 2.2} if j == 0 else _quiet(j)
            axes.plot(range(1, len(row) + 1), row, label=text, **style)
        axes.axhline(threshold, color=INKS[1], linestyle="--", linewidth=1.2)
        axes.text(
            values.shape[1],
            threshold,
            f"threshold {threshold:.2g}",
            ha="right",
            va="bottom",
            fontsize=8,
            color=INKS[1],
        )
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("singular value, by rank")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    pair[0].set_ylabel("size")
    pair[0].set_ylim(bottom=0)
    pair[1].legend(frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def _quiet(j: int) -> dict[str, object]:
    shade = 0.35 + 0.1 * (j % 5)
    return {"color": str(shade), "linestyle": LINES[j % len(LINES)], "linewidth": 1.1}
