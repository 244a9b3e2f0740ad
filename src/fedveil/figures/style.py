"""One style for all figures: the charts of reports and the figures for papers share colours, dashes and markers.

Consecutive looks differ in lightness, dash and marker, so that they can be distinguished in greyscale. After the last
colour, the first is used again with another dash and another marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Marker = Literal["circle", "square", "triangle", "diamond", "cross", "ring", "down"]


@dataclass(frozen=True)
class Look:
    """The colour, dash and marker of one setting, in all figures."""

    light: str
    dark: str
    dash: tuple[float, ...]
    marker: Marker


LOOKS: tuple[Look, ...] = (
    Look("#1f4e79", "#8fc1f0", (), "circle"),
    Look("#c2571a", "#f2a46f", (7, 3), "square"),
    Look("#12806a", "#63d0b4", (2, 2.5), "triangle"),
    Look("#7b3f98", "#cfa0e8", (9, 3, 2, 3), "diamond"),
    Look("#94700a", "#e3c25c", (4, 2), "down"),
    Look("#b0304f", "#f28ca6", (12, 4), "ring"),
    Look("#4f5b66", "#b4c0cc", (1.5, 4), "cross"),
    Look("#2e8bd0", "#4c9be0", (), "square"),
    Look("#5a8f12", "#a6d45c", (7, 3), "triangle"),
    Look("#c93a9e", "#f07fd0", (2, 2.5), "diamond"),
    Look("#6b4226", "#c99a72", (9, 3, 2, 3), "down"),
    Look("#df463c", "#ff7d6e", (4, 2), "ring"),
)
_DASHES = tuple(item.dash for item in LOOKS[:7])
_MARKERS = tuple(item.marker for item in LOOKS[:7])

LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "panel": "#f6f7f9",
    "ink": "#18212b",
    "soft": "#55616e",
    "rule": "#dde2e7",
    "accent": "#1f4e79",
    "good": "#17694f",
    "fair": "#1f5c94",
    "weak": "#8a5a00",
    "bad": "#a02c2c",
}
DARK: Mapping[str, str] = {
    "paper": "#11161c",
    "panel": "#192028",
    "ink": "#e8ecf0",
    "soft": "#a3afbb",
    "rule": "#2e3843",
    "accent": "#8fc1f0",
    "good": "#6fd3ac",
    "fair": "#8fc1f0",
    "weak": "#e3b45c",
    "bad": "#f29a92",
}
_MATPLOTLIB_MARKERS: Mapping[Marker, str] = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "cross": "X",
    "ring": "o",
    "down": "v",
}


def look(number: int) -> Look:
    """The look of the setting with this number; no two of the first 84 share both colour and marker."""
    again, place = divmod(number, len(LOOKS))
    base = LOOKS[place]
    dash = _DASHES[(_DASHES.index(base.dash) + again) % len(_DASHES)]
    marker = _MARKERS[(_MARKERS.index(base.marker) + 3 * again) % len(_MARKERS)]
    return replace(base, dash=dash, marker=marker)


def css() -> str:
    """The colours as CSS variables, for light and dark mode; print is always light."""
    light = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    light += "".join(f"--s{place}:{item.light};" for place, item in enumerate(LOOKS))
    dark += "".join(f"--s{place}:{item.dark};" for place, item in enumerate(LOOKS))
    dark_only = "@media screen and (prefers-color-scheme: dark)"
    return f":root{{color-scheme:light dark;{light}}}\n{dark_only}{{:root{{{dark}}}}}\n"


def matplotlib_style() -> dict[Any, Any]:
    """Settings for `matplotlib.rc_context`: thin lines, no box, text as text in vector output."""
    return {
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.labelcolor": LIGHT["ink"],
        "axes.edgecolor": LIGHT["soft"],
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": LIGHT["rule"],
        "grid.linewidth": 0.5,
        "xtick.color": LIGHT["soft"],
        "ytick.color": LIGHT["soft"],
        "legend.frameon": False,
        "lines.linewidth": 1.4,
        "figure.dpi": 160,
        "pdf.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": "fedveil",
    }


def matplotlib_line(number: int) -> dict[str, Any]:
    """Colour, dash and marker of a setting, as arguments of `Axes.plot`."""
    item = look(number)
    hollow = item.marker == "ring"
    return {
        "color": item.light,
        "linestyle": (0, item.dash) if item.dash else "solid",
        "marker": _MATPLOTLIB_MARKERS[item.marker],
        "markersize": 4,
        "markerfacecolor": "white" if hollow else item.light,
    }
