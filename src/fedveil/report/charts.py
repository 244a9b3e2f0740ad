"""Charts of curves and of settings on a plane, as inline SVG.

Every chart has a description in words, and its values for the page's script, which shows them at the pointer or by the
arrow keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from fedveil.report.scales import Scale, exact, linear, logarithmic
from fedveil.report.svg import HALF, WIDE, both_sizes, dash_of, frame, marker, path, place_of

_MOST_POINTS = 400
_SHARES = (0.0, 1.0)


@dataclass(frozen=True)
class Curve:
    """A named line; `low` and `high` bound its band over seeds, and equal the line if there is no band."""

    name: str
    look: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """A setting on a plane; x None is drawn in the right column, for settings without a proven epsilon."""

    name: str
    look: int
    x: float | None
    y: float
    spread: float | None
    note: str


def line_chart(
    curves: Sequence[Curve],
    *,
    label: str,
    x_label: str,
    y_label: str,
    percent: bool = True,
    rates: bool = False,
    whole: bool = False,
    span: tuple[float, float] = _SHARES,
) -> str:
    """Lines with bands; `rates`: both axes run from 0 to 1, with the diagonal; `whole`: x counts something.

    The axis ends where values, which lie in `span`, can end.
    """
    factor = 100.0 if percent else 1.0
    scaled = [_scaled(_thin(curve), factor) for curve in curves if curve.x]
    if not scaled:
        return ""

    def draw(width: int) -> tuple[int, str]:
        height = {WIDE: 360, HALF: 420}.get(width, 280)
        left, right, top, bottom = 52, width - 14, 26, height - 44
        if rates:
            x, y = exact(0, 1, left, right, count=5), exact(0, factor, bottom, top, count=5)
        else:
            xs = [value for curve in scaled for value in curve.x]
            ys = [value for curve in scaled for value in (*curve.low, *curve.high)]
            ticks = 8 if width == WIDE else 4
            x, y = (
                exact(min(xs), max(xs), left, right, count=ticks, whole=whole),
                linear(ys, bottom, top, _times(span, factor)),
            )
        parts = [frame(x, y, x_label, y_label, height)]
        if rates:
            parts.append(f'<path class="guess" d="M{left} {bottom}L{right} {top}"/>')
        parts += [_band(curve, x, y) for curve in scaled if list(curve.low) != list(curve.high)]
        parts += [_line(curve, x, y) for curve in scaled]
        parts.append(
            f'<g class="hover" data-left="{left}" data-right="{right}" data-low="{x.low:g}" data-high="{x.high:g}">'
            f'<line class="guide" y1="{top}" y2="{bottom}"/></g>'
        )
        return height, "".join(parts)

    data = {"x": x_label, "unit": " %" if percent else "", "series": [_series(curve) for curve in scaled]}
    carried = json.dumps(data, separators=(",", ":"))
    return both_sizes(
        draw, label, wide=HALF if rates else WIDE, data=carried, classes="half" if rates else ""
    )


def _times(span: tuple[float, float], factor: float) -> tuple[float, float]:
    return factor * span[0], factor * span[1]


def _scaled(curve: Curve, factor: float) -> Curve:
    y, low, high = ([factor * value for value in values] for values in (curve.y, curve.low, curve.high))
    return replace(curve, y=y, low=low, high=high)


def _band(curve: Curve, x: Scale, y: Scale) -> str:
    upper = [(x(a), y(b)) for a, b in zip(curve.x, curve.high, strict=True)]
    lower = [(x(a), y(b)) for a, b in zip(curve.x, curve.low, strict=True)]
    return f'<path class="band f{place_of(curve.look)}" d="{path(upper + lower[::-1])}Z"/>'


def _line(curve: Curve, x: Scale, y: Scale) -> str:
    """A curve with about six marks on it."""
    points = [(x(a), y(b)) for a, b in zip(curve.x, curve.y, strict=True)]
    step = max(1, len(points) // 6)
    shown = points[step - 1 :: step] or points
    return (
        f'<path class="line s{place_of(curve.look)}" d="{path(points)}"{dash_of(curve.look)}>'
        f"<title>{escape(curve.name)}</title></path>"
    ) + "".join(marker(px, py, curve.look, 3.6) for px, py in shown)


def _series(curve: Curve) -> dict[str, Any]:
    """A curve for the page's script; bounds that are the line itself are left out."""
    return {
        "name": curve.name,
        "look": place_of(curve.look),
        "x": [round(v, 6) for v in curve.x],
        "y": [round(v, 4) for v in curve.y],
        "low": [round(v, 4) for v in curve.low] if list(curve.low) != list(curve.y) else [],
        "high": [round(v, 4) for v in curve.high] if list(curve.high) != list(curve.y) else [],
    }


def plane_chart(
    dots: Sequence[Dot],
    *,
    label: str,
    x_label: str,
    y_label: str,
    joined: Sequence[Sequence[int]] = (),
    percent: bool = True,
    span: tuple[float, float] = _SHARES,
) -> str:
    """Settings as marks with their deviation, epsilon by logarithm; a line connects dots `joined` by place."""
    factor = 100.0 if percent else 1.0

    def draw(width: int) -> tuple[int, str]:
        height = 340 if width == HALF else 280
        left, right, top, bottom = 52, width - 14, 26, height - 44
        unproven = any(dot.x is None for dot in dots)
        known = [dot.x for dot in dots if dot.x is not None]
        ys = [factor * (dot.y + sign * (dot.spread or 0)) for dot in dots for sign in (-1, 1)]
        y = linear(ys, bottom, top, _times(span, factor))
        edge = right - (86 if unproven else 0)
        x = logarithmic([*known, 1.0, 10.0], left, edge, most=6 if width == HALF else 4)
        parts = [frame(x, y, x_label, y_label, height)]
        if unproven:
            parts.append(
                f'<rect class="unproven" x="{edge + 8}" y="{top}" width="{right - edge - 8}" '
                f'height="{bottom - top}"/><text class="tick" text-anchor="middle" '
                f'x="{(edge + 8 + right) / 2:.0f}" y="{top - 8}">none proven</text>'
            )

        def place(dot: Dot) -> tuple[float, float]:
            return ((edge + 8 + right) / 2 if dot.x is None else x(dot.x), y(factor * dot.y))

        for members in joined:
            on = [place(dots[i]) for i in members if dots[i].x is not None]
            if len(on) > 1:
                parts.append(f'<path class="join" d="{path(sorted(on))}"/>')
        for dot in dots:
            px, py = place(dot)
            if dot.spread:
                top_y, low_y = y(factor * (dot.y + dot.spread)), y(factor * (dot.y - dot.spread))
                parts.append(
                    f'<path class="line s{place_of(dot.look)}" d="M{px:.1f} {top_y:.1f}V{low_y:.1f}'
                    f'M{px - 4:.1f} {top_y:.1f}h8M{px - 4:.1f} {low_y:.1f}h8"/>'
                )
            parts.append(f"<g><title>{escape(dot.note)}</title>{marker(px, py, dot.look, 6)}</g>")
        parts += _name_dots([(*place(dot), dot.name) for dot in dots], right)
        return height, "".join(parts)

    return both_sizes(draw, label, wide=HALF)


def _name_dots(dots: Sequence[tuple[float, float, str]], right: float) -> list[str]:
    """Names beside their dots, where there is room and no other dot is nearer; the legend names the others."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y, _ in dots]
    out = []
    for x, y, name in sorted(dots, key=lambda dot: dot[1]):  # of two close dots the upper has the upper name
        wide = 6.3 * len(name)
        for across, down in ((10, -9), (-10 - wide, -9), (10, 18), (-10 - wide, 18)):
            box = (x + across, y + down - 11, x + across + wide, y + down + 3)
            inside = box[0] >= 54 and box[2] <= right and box[1] >= 26
            nearest = min(_distance(box, px, py) for px, py, _ in dots) == _distance(box, x, y)
            if inside and nearest and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                out.append(f'<text class="name" x="{box[0]:.1f}" y="{y + down:.1f}">{escape(name)}</text>')
                break
    return out


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _distance(box: tuple[float, float, float, float], x: float, y: float) -> float:
    return math.hypot(max(box[0] - x, 0, x - box[2]), max(box[1] - y, 0, y - box[3]))


def _thin(curve: Curve) -> Curve:
    """At most 400 points: more than the screen has columns say nothing."""
    count = len(curve.x)
    if count <= _MOST_POINTS:
        return curve
    keep = sorted({round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})
    lists = ([values[i] for i in keep] for values in (curve.x, curve.y, curve.low, curve.high))
    return Curve(curve.name, curve.look, *lists)
