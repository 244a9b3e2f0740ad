"""Charts as inline SVG: drawn twice, for a wide page and for a phone, so that letters never shrink.

Colours come from the page's variables, so charts follow light and dark. Every chart says in words what it shows, and
carries its values for the page's script, which shows them under the pointer or the arrow keys.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fedveil.figures.style import LOOKS, look
from fedveil.report.scales import Scale, exact, linear, logarithmic, short

WIDE, HALF, NARROW = 880, 492, 352
MOST_BUBBLES = 40  # clients; beyond, shades are easier to read
_MOST_POINTS = 400
_BANDS = ((1.0, "strong"), (10.0, "meaningful"), (float("inf"), "too large to protect"))


@dataclass(frozen=True)
class Curve:
    """A named line; `low` and `high` bound its band over seeds, and are the line itself without one."""

    name: str
    look: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """A setting on a plane; x None stands in the column at the right, where nothing is proven."""

    name: str
    look: int
    x: float | None
    y: float
    spread: float | None
    note: str


@dataclass(frozen=True)
class Mark:
    """A value on a row of the privacy chart."""

    kind: str
    value: float | None
    note: str


@dataclass(frozen=True)
class Row:
    """One adversary of one setting, named in full and for a phone; `heading` starts a new setting."""

    heading: str
    look: int
    label: str
    short: str
    marks: Sequence[Mark]


def both_sizes(
    draw: Callable[[int], tuple[int, str]], label: str, *, wide: int = WIDE, data: str = "", classes: str = ""
) -> str:
    """What `draw` makes of both widths (a height and SVG), as one chart that names itself."""
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


def line_chart(
    curves: Sequence[Curve],
    *,
    label: str,
    x_label: str,
    y_label: str,
    percent: bool = True,
    rates: bool = False,
    whole: bool = False,
) -> str:
    """Lines with bands; `rates`: both axes run from 0 to 1, with the diagonal; `whole`: x counts something."""
    thin = [_thin(curve) for curve in curves if curve.x]
    if not thin:
        return ""
    factor = 100.0 if percent else 1.0

    def draw(width: int) -> tuple[int, str]:
        height = {WIDE: 360, HALF: 420}.get(width, 280)
        left, right, top, bottom = 52, width - 14, 26, height - 44
        xs = [value for curve in thin for value in curve.x]
        ys = [factor * value for curve in thin for value in (*curve.low, *curve.high)]
        ticks = 8 if width == WIDE else 4
        if rates:
            x, y = exact(0, 1, left, right, count=5), exact(0, factor, bottom, top, count=5)
        else:
            x, y = exact(min(xs), max(xs), left, right, count=ticks, whole=whole), linear(ys, bottom, top)
        parts = [_frame(x, y, x_label, y_label, height)]
        if rates:
            parts.append(f'<path class="guess" d="M{left} {bottom}L{right} {top}"/>')
        for curve in thin:
            upper = [(x(a), y(factor * b)) for a, b in zip(curve.x, curve.high, strict=True)]
            lower = [(x(a), y(factor * b)) for a, b in zip(curve.x, curve.low, strict=True)]
            if list(curve.low) != list(curve.high):
                parts.append(f'<path class="band f{_n(curve.look)}" d="{_path(upper + lower[::-1])}Z"/>')
        for curve in thin:
            points = [(x(a), y(factor * b)) for a, b in zip(curve.x, curve.y, strict=True)]
            parts.append(
                f'<path class="line s{_n(curve.look)}" d="{_path(points)}"{_dash(curve.look)}>'
                f"<title>{escape(curve.name)}</title></path>"
            )
            step = max(1, len(points) // 6)
            shown = points[step - 1 :: step] or points
            parts.extend(marker(px, py, curve.look, 3.6) for px, py in shown)
        parts.append(
            f'<g class="hover" data-left="{left}" data-right="{right}" data-low="{x.low:g}" data-high="{x.high:g}">'
            f'<line class="guide" y1="{top}" y2="{bottom}"/></g>'
        )
        return height, "".join(parts)

    data = {
        "x": x_label,
        "unit": " %" if percent else "",
        "series": [
            {
                "name": curve.name,
                "look": _n(curve.look),
                "x": [round(v, 6) for v in curve.x],
                "y": [round(factor * v, 4) for v in curve.y],
                "low": [round(factor * v, 4) for v in curve.low] if list(curve.low) != list(curve.y) else [],
                "high": [round(factor * v, 4) for v in curve.high]
                if list(curve.high) != list(curve.y)
                else [],
            }
            for curve in thin
        ],
    }
    carried = json.dumps(data, separators=(",", ":"))
    return both_sizes(
        draw, label, wide=HALF if rates else WIDE, data=carried, classes="half" if rates else ""
    )


def plane_chart(
    dots: Sequence[Dot],
    *,
    label: str,
    x_label: str,
    y_label: str,
    log: bool,
    joined: Sequence[Sequence[int]] = (),
) -> str:
    """Settings as marks with their deviation; `joined` lists the places of dots that a line connects."""

    def draw(width: int) -> tuple[int, str]:
        height = 340 if width == HALF else 280
        left, right, top, bottom = 52, width - 14, 26, height - 44
        unproven = any(dot.x is None for dot in dots)
        known = [dot.x for dot in dots if dot.x is not None]
        ys = [100 * (dot.y + sign * (dot.spread or 0)) for dot in dots for sign in (-1, 1)]
        y = linear(ys, bottom, top)
        edge = right - (86 if unproven else 0)
        if log:
            x = logarithmic([*known, 1.0, 10.0], left, edge, most=6 if width == HALF else 4)
        else:
            x = linear(known, left, edge, count=6 if width == HALF else 3, zero=True)
        parts = [_frame(x, y, x_label, y_label, height)]
        if unproven:
            parts.append(
                f'<rect class="unproven" x="{edge + 8}" y="{top}" width="{right - edge - 8}" '
                f'height="{bottom - top}"/><text class="tick" text-anchor="middle" '
                f'x="{(edge + 8 + right) / 2:.0f}" y="{top - 8}">none proven</text>'
            )

        def place(dot: Dot) -> tuple[float, float]:
            return ((edge + 8 + right) / 2 if dot.x is None else x(dot.x), y(100 * dot.y))

        for members in joined:
            on = [place(dots[i]) for i in members if dots[i].x is not None]
            if len(on) > 1:
                parts.append(f'<path class="join" d="{_path(sorted(on))}"/>')
        for dot in dots:
            px, py = place(dot)
            if dot.spread:
                top_y, low_y = y(100 * (dot.y + dot.spread)), y(100 * (dot.y - dot.spread))
                parts.append(
                    f'<path class="line s{_n(dot.look)}" d="M{px:.1f} {top_y:.1f}V{low_y:.1f}'
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


def privacy_chart(rows: Sequence[Row], *, label: str) -> str:
    """Epsilon on a log scale, a row per adversary: proven, audited and claimed values side by side."""
    values = [mark.value for row in rows for mark in row.marks if mark.value is not None and mark.value > 0]

    def draw(width: int) -> tuple[int, str]:
        left = 168 if width == WIDE else max(84, 14 + 6 * max(len(row.short) for row in rows))
        head, step, line = 24, 26, 16
        headings = [_lines(row.heading, width // 8) for row in rows]
        top = 30
        height = top + sum(head + line * (len(h) - 1) for h in headings if h) + len(rows) * step + 46
        right, bottom = width - 12, height - 40
        edge = right - (96 if width == WIDE else 56)
        x = logarithmic([*values, 0.1, 10.0, 100.0], left, edge, most=8 if width == WIDE else 4)
        parts = _privacy_bands(x, top, bottom)
        parts.append(
            f'<rect class="unproven" x="{edge + 6}" y="{top}" width="{right - edge - 6}" height="{bottom - top}"/>'
            f'<text class="bandname" text-anchor="middle" x="{(edge + 6 + right) / 2:.0f}" y="{top - 9}">'
            f"{'nothing proven' if width == WIDE else 'none'}</text>"
        )
        for tick in x.ticks:
            parts.append(
                f'<path class="grid" d="M{x(tick):.1f} {top}V{bottom}"/><text class="tick" text-anchor="middle" '
                f'x="{x(tick):.1f}" y="{bottom + 16}">{short(tick)}</text>'
            )
        parts.append(
            f'<text class="axis" text-anchor="middle" x="{(left + edge) / 2:.0f}" y="{height - 6}">'
            "epsilon (logarithmic): smaller is more private</text>"
        )
        at = float(top)
        for row, heading in zip(rows, headings, strict=True):
            if heading:
                tall = head + line * (len(heading) - 1)
                at += tall
                parts.append(f'<rect class="gap" x="0" y="{at - tall:.0f}" width="{width}" height="{tall}"/>')
                parts += [
                    f'<text class="name strong" x="0" y="{at - 7 - line * above:.0f}">{escape(text)}</text>'
                    for above, text in enumerate(reversed(heading))
                ]
            at += step
            middle = at - step / 2
            if all(mark.kind in ("audit", "claim") for mark in row.marks):
                # The zones say what a proof is worth. A bound from below, or a claim, is worth none of it.
                parts.append(
                    f'<rect class="gap" x="{left}" y="{at - step:.0f}" width="{right - left}" height="{step}"/>'
                )
            parts.append(
                f'<text class="tick" x="8" y="{middle + 4:.0f}">'
                f"{escape(row.label if width == WIDE else row.short)}</text>"
            )
            parts.append(f'<path class="grid" d="M{left} {middle:.1f}H{right}"/>')
            for mark in row.marks:
                px = (edge + 6 + right) / 2 if mark.value is None else x(max(mark.value, x.low))
                parts.append(
                    f"<g><title>{escape(mark.note)}</title>{_privacy_mark(mark, px, middle, row.look)}</g>"
                )
                if mark.kind != "claim" and mark.value is not None:
                    beside = 16 if mark.kind == "audit" else 9
                    parts.append(
                        f'<text class="value" x="{px + beside:.1f}" y="{middle - 4:.1f}">{mark.value:.3g}</text>'
                    )
        return height, "".join(parts)

    return both_sizes(draw, label, classes="privacy")


def _privacy_bands(x: Scale, top: float, bottom: float) -> list[str]:
    parts = []
    start = x.start
    for place, (limit, name) in enumerate(_BANDS):
        end = x(min(limit, x.high))
        if end <= start:
            continue
        parts.append(
            f'<rect class="zone z{place}" x="{start:.1f}" y="{top}" width="{end - start:.1f}" '
            f'height="{bottom - top:.1f}"/>'
        )
        if end - start > 6.2 * len(name):
            parts.append(
                f'<text class="bandname" text-anchor="middle" x="{(start + end) / 2:.1f}" y="{top - 9}">{name}</text>'
            )
        start = end
    return parts


def _privacy_mark(mark: Mark, x: float, y: float, number: int) -> str:
    if mark.kind == "client":
        return f'<circle class="f{_n(number)}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
    if mark.kind == "record":
        return f'<circle class="hollow s{_n(number)}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    if mark.kind == "audit":
        return f'<path class="audit" d="M{x:.1f} {y - 8:.1f}V{y + 8:.1f}M{x:.1f} {y:.1f}h12m-4 -4l4 4l-4 4"/>'
    return f'<path class="hollow claim" d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7Z"/>'


def partition_chart(counts: Sequence[Sequence[int]], classes: Sequence[str], *, label: str) -> str:
    """Classes by clients: dots whose area is the count, or shades where the clients are many."""
    clients, number = len(counts), len(counts[0])
    most = max(1, max(max(row) for row in counts))
    names = [*classes, *(str(i) for i in range(len(classes), number))][:number]
    bubbles = clients <= MOST_BUBBLES

    def draw(width: int) -> tuple[int, str]:
        longest = max(len(_clip(name, 14)) for name in names)
        left = 14 + 6.5 * longest
        cell = (width - left - 8) / clients
        tall = min(26.0, max(14.0, cell)) if number <= 40 else 7.0
        bars, top = 46, 66
        height = round(top + number * tall + 40)
        sizes = [sum(row) for row in counts]
        parts = []
        for client, size in enumerate(sizes):
            bar = bars * size / max(1, *sizes)
            parts.append(
                f'<rect class="f0" x="{left + client * cell + cell * 0.14:.1f}" y="{10 + bars - bar:.1f}" '
                f'width="{cell * 0.72:.1f}" height="{bar:.1f}"><title>client {client}: {size} examples</title></rect>'
            )
        parts.append(
            f'<text class="tick" x="0" y="20">{max(sizes)}</text><text class="tick" x="0" y="54">0</text>'
        )
        for label_, name in enumerate(names):
            middle = top + (label_ + 0.5) * tall
            if number <= 40 or label_ % 5 == 0:
                parts.append(
                    f'<text class="tick" x="0" y="{middle + 4:.1f}">{escape(_clip(name, 14))}</text>'
                )
            if bubbles:
                parts.append(f'<path class="grid" d="M{left:.0f} {middle:.1f}H{width - 8}"/>')
            for client in range(clients):
                count = counts[client][label_]
                if not count:
                    continue
                title = f"<title>client {client}, class {escape(name)}: {count} examples</title>"
                middle_x = left + (client + 0.5) * cell
                if bubbles:
                    radius = 0.48 * min(cell, tall) * (count / most) ** 0.5
                    parts.append(
                        f'<circle class="f0" cx="{middle_x:.1f}" cy="{middle:.1f}" r="{max(radius, 0.8):.2f}">'
                        f"{title}</circle>"
                    )
                else:
                    parts.append(
                        f'<rect class="f0" x="{left + client * cell:.2f}" y="{top + label_ * tall:.1f}" '
                        f'width="{cell:.2f}" height="{tall:.1f}" opacity="{0.08 + 0.92 * count / most:.3f}">'
                        f"{title}</rect>"
                    )
        every = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if cell * s >= 24 or s == 1000)
        parts += [
            f'<text class="tick" text-anchor="middle" x="{left + (client + 0.5) * cell:.1f}" '
            f'y="{height - 24}">{client}</text>'
            for client in range(0, clients, every)
        ]
        parts.append(
            f'<text class="axis" text-anchor="middle" x="{(left + width) / 2:.0f}" y="{height - 5}">client</text>'
        )
        return height, "".join(parts)

    return both_sizes(draw, label)


def marker(x: float, y: float, number: int, size: float) -> str:
    """The mark of a look, as SVG."""
    kind = look(number).marker
    name = f"f{_n(number)}"
    if kind == "circle":
        return f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    if kind == "ring":
        return f'<circle class="hollow s{_n(number)}" cx="{x:.1f}" cy="{y:.1f}" r="{size * 0.9:.1f}"/>'
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
        f'<path class="line s{_n(number)}" d="M{x - r:.1f} {y - r:.1f}l{2 * r:.1f} {2 * r:.1f}'
        f'M{x - r:.1f} {y + r:.1f}l{2 * r:.1f} {-2 * r:.1f}"/>'
    )


def swatch(number: int) -> str:
    """A setting's line and mark for a legend."""
    return (
        '<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true">'
        f'<path class="line s{_n(number)}" d="M1 6H33"{_dash(number)}/>{marker(17, 6, number, 3.6)}</svg>'
    )


def _frame(x: Scale, y: Scale, x_label: str, y_label: str, height: int) -> str:
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


def _thin(curve: Curve) -> Curve:
    """At most 400 points: more than the screen has columns say nothing."""
    count = len(curve.x)
    if count <= _MOST_POINTS:
        return curve
    keep = sorted({round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})
    lists = ([values[i] for i in keep] for values in (curve.x, curve.y, curve.low, curve.high))
    return Curve(curve.name, curve.look, *lists)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _dash(number: int) -> str:
    dash = look(number).dash
    return f' stroke-dasharray="{" ".join(f"{part:g}" for part in dash)}"' if dash else ""


def _n(number: int) -> int:
    return number % len(LOOKS)


def _lines(text: str, most: int) -> list[str]:
    """The text in lines of at most so many letters, none for no text; a longer word has a line to itself."""
    return textwrap.wrap(text, most, break_on_hyphens=False)


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
