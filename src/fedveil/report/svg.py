"""Parts of charts as inline SVG: both sizes of a chart, frames, marks and swatches.

A chart is drawn twice, for a wide page and for a phone, so that letters never shrink. Colours come from the page's
variables, so charts follow light and dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from fedveil.figures.style import LOOKS, look
from fedveil.report.scales import Scale, short

WIDE, HALF, NARROW = 880, 492, 352


def both_sizes(
    draw: Callable[[int], tuple[int, str]], label: str, *, wide: int = WIDE, data: str = "", classes: str = ""
) -> str:
    """One labelled chart with the drawings (a height and SVG) of `draw` for both widths."""
    attribute = f' data-chart="{escape(data)}"' if data else ""
    focus = ' tabindex="0"' if data else ""
    svgs = []
    for size, width in (("wide", wide), ("narrow", NARROW)):
        height, body = draw(width)
        svgs.append(
            f'<svg class="{size}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"{focus}>'
            f"{body}</svg>"
        )
    return f'<div class="chart {classes}"{attribute}>{"".join(svgs)}</div>'


def marker(x: float, y: float, number: int, size: float) -> str:
    """The mark of a look, as SVG."""
    kind = look(number).marker
    name = f"f{place_of(number)}"
    if kind == "circle":
        return f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    if kind == "ring":
        return f'<circle class="hollow s{place_of(number)}" cx="{x:.1f}" cy="{y:.1f}" r="{size * 0.9:.1f}"/>'
    r = size
    shapes = {
        "square": f"m{-r} {-r}h{2 * r}v{2 * r}h{-2 * r}Z",
        "triangle": f"m0 {-1.2 * r:.2f}l{1.15 * r:.2f} {2.1 * r:.2f}h{-2.3 * r:.2f}Z",
        "down": f"m0 {1.2 * r:.2f}l{1.15 * r:.2f} {-2.1 * r:.2f}h{-2.3 * r:.2f}Z",
        "diamond": f"m0 {-1.35 * r:.2f}l{1.35 * r:.2f} {1.35 * r:.2f}l{-1.35 * r:.2f} {1.35 * r:.2f}"
        f"l{-1.35 * r:.2f} {-1.35 * r:.2f}Z",
    }
    if kind in shapes:
        return f'<path class="{name}" d="M{x:.1f} {y:.1f}{shapes[kind]}"/>'
    r *= 0.9
    return (
        f'<path class="line s{place_of(number)}" d="M{x - r:.1f} {y - r:.1f}l{2 * r:.1f} {2 * r:.1f}'
        f'M{x - r:.1f} {y + r:.1f}l{2 * r:.1f} {-2 * r:.1f}"/>'
    )


def swatch(number: int) -> str:
    """A setting's line and mark for a legend."""
    return (
        '<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true">'
        f'<path class="line s{place_of(number)}" d="M1 6H33"{dash_of(number)}/>{marker(17, 6, number, 3.6)}</svg>'
    )


def frame(x: Scale, y: Scale, x_label: str, y_label: str, height: int) -> str:
    """Axes with their ticks and labels."""
    parts = [
        f'<path class="grid" d="M{x.start} {y(tick):.1f}H{x.end}"/><text class="tick" text-anchor="end" '
        f'x="{x.start - 8}" y="{y(tick) + 4:.1f}">{short(tick)}</text>'
        for tick in y.ticks
    ]
    parts += [
        f'<path class="stub" d="M{x(tick):.1f} {y.start}v5"/><text class="tick" text-anchor="middle" '
        f'x="{x(tick):.1f}" y="{y.start + 17}">{short(tick)}</text>'
        for tick in x.ticks
    ]
    parts.append(f'<path class="stub" d="M{x.start} {y.start}H{x.end}"/>')
    parts.append(f'<text class="axis" x="0" y="12">{escape(y_label)}</text>')
    parts.append(
        f'<text class="axis" text-anchor="middle" x="{(x.start + x.end) / 2:.0f}" y="{height - 6}">'
        f"{escape(x_label)}</text>"
    )
    return "".join(parts)


def path(points: Sequence[tuple[float, float]]) -> str:
    """The points joined by straight lines, as the `d` of a path."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def dash_of(number: int) -> str:
    """The dashes of a look, as an attribute."""
    dash = look(number).dash
    return f' stroke-dasharray="{" ".join(f"{part:g}" for part in dash)}"' if dash else ""


def place_of(number: int) -> int:
    """The number of a look's colour among the page's variables."""
    return number % len(LOOKS)
