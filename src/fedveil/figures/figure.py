"""A figure in the project's style: readable in greyscale, saved as PNG or vector graphics."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import matplotlib
from matplotlib.figure import Figure

from fedveil.errors import InputError
from fedveil.figures.style import LOOKS, matplotlib_style

LINES = ("-", "--", ":", "-.")
INKS = tuple(item.light for item in LOOKS)
P = ParamSpec("P")
# The same figure is the same file, whenever it is written.
_UNDATED: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def in_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(matplotlib_style()):
            return draw(*args, **kwargs)

    return styled


def new_figure(width: float = 6.0, height: float = 3.8) -> Figure:
    """A new figure without matplotlib's global state."""
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the path's suffix."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise InputError("path", str(path), "is not a supported image format", "Use .png, .pdf or .svg.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(matplotlib_style()):
            figure.savefig(path, dpi=150, metadata=_UNDATED.get(path.suffix.lower()))
    except OSError as error:
        raise InputError(
            "path", str(path), f"cannot be written: {error.strerror}", "Choose another or make room."
        ) from error
