"""The chart of epsilons as inline SVG: a row per adversary, with proven, audited and claimed values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fedveil.privacy.meaning import SCALE
from fedveil.report.scales import Scale, logarithmic, short
from fedveil.report.svg import WIDE, both_sizes, place_of

_HEAD, _STEP, _LINE = 24, 26, 16  # heights of a heading, of a row and of each further line of a heading


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


@dataclass(frozen=True)
class _Place:
    """Where rows are drawn: epsilon on `x`, up to `edge`; beyond it the column of what is not proven."""

    width: int
    left: float
    edge: float
    right: float
    x: Scale

    @property
    def unproven(self) -> float:
        return (self.edge + 6 + self.right) / 2


def privacy_chart(rows: Sequence[Row], *, label: str) -> str:
    """Epsilon on a log scale, a row per adversary: proven, audited and claimed values side by side."""
    values = [mark.value for row in rows for mark in row.marks if mark.value is not None and mark.value > 0]

    def draw(width: int) -> tuple[int, str]:
        left = 168 if width == WIDE else max(84, 14 + 6 * max(len(row.short) for row in rows))
        headings = [_lines(row.heading, width // 8) for row in rows]
        top = 30 if width == WIDE else 44
        height = top + sum(_tall(heading) for heading in headings) + len(rows) * _STEP + 46
        right, bottom = width - 12, height - 40
        edge = right - (96 if width == WIDE else 56)
        x = logarithmic([*values, 0.1, 10.0, 100.0], left, edge, most=8 if width == WIDE else 4)
        place = _Place(width, left, edge, right, x)
        parts = [
            *_privacy_bands(x, top, bottom, rows=1 if width == WIDE else 2),
            *_background(place, top, height),
        ]
        at = float(top)
        for row, heading in zip(rows, headings, strict=True):
            at += _tall(heading)
            parts += _heading(heading, at, width)
            at += _STEP
            parts += _row(row, at, place)
        return height, "".join(parts)

    return both_sizes(draw, label, classes="privacy")


def _tall(heading: Sequence[str]) -> int:
    return _HEAD + _LINE * (len(heading) - 1) if heading else 0


def _background(place: _Place, top: int, height: int) -> list[str]:
    """The column of what is not proven, the ticks of the axis and its name."""
    bottom, edge, right = height - 40, place.edge, place.right
    parts = [
        f'<rect class="unproven" x="{edge + 6}" y="{top}" width="{right - edge - 6}" height="{bottom - top}"/>'
        f'<text class="bandname" text-anchor="middle" x="{place.unproven:.0f}" y="{top - 9}">'
        f"{'nothing proven' if place.width == WIDE else 'none'}</text>"
    ]
    parts += [
        f'<path class="grid" d="M{place.x(tick):.1f} {top}V{bottom}"/><text class="tick" text-anchor="middle" '
        f'x="{place.x(tick):.1f}" y="{bottom + 16}">{short(tick)}</text>'
        for tick in place.x.ticks
    ]
    parts.append(
        f'<text class="axis" text-anchor="middle" x="{(place.left + edge) / 2:.0f}" y="{height - 6}">'
        "epsilon (logarithmic): smaller is more private</text>"
    )
    return parts


def _heading(heading: Sequence[str], at: float, width: int) -> list[str]:
    """The name of a setting, its lines ending above `at`."""
    if not heading:
        return []
    tall = _tall(heading)
    return [f'<rect class="gap" x="0" y="{at - tall:.0f}" width="{width}" height="{tall}"/>'] + [
        f'<text class="name strong" x="0" y="{at - 7 - _LINE * above:.0f}">{escape(text)}</text>'
        for above, text in enumerate(reversed(heading))
    ]


def _row(row: Row, at: float, place: _Place) -> list[str]:
    """One adversary's marks, above `at`."""
    parts = []
    left, right, middle = place.left, place.right, at - _STEP / 2
    if all(mark.kind in ("audit", "claim") for mark in row.marks):
        # The zones say what a proof is worth. A bound from below, or a claim, is worth none of it.
        parts.append(
            f'<rect class="gap" x="{left}" y="{at - _STEP:.0f}" width="{right - left}" height="{_STEP}"/>'
        )
    name = row.label if place.width == WIDE else row.short
    parts.append(f'<text class="tick" x="8" y="{middle + 4:.0f}">{escape(name)}</text>')
    parts.append(f'<path class="grid" d="M{left} {middle:.1f}H{right}"/>')
    for mark in row.marks:
        px = place.unproven if mark.value is None else place.x(max(mark.value, place.x.low))
        parts.append(f"<g><title>{escape(mark.note)}</title>{_privacy_mark(mark, px, middle, row.look)}</g>")
        if mark.kind != "claim" and mark.value is not None:
            beside = 16 if mark.kind == "audit" else 9
            parts.append(
                f'<text class="value" x="{px + beside:.1f}" y="{middle - 4:.1f}">{mark.value:.3g}</text>'
            )
    return parts


def _privacy_bands(x: Scale, top: float, bottom: float, rows: int) -> list[str]:
    """The grades behind the marks, each with its name; on a phone the names take turns on two lines."""
    parts = []
    start = x.start
    for place, step in enumerate(SCALE):
        end, name = x(min(step.limit, x.high)), step.band
        if end <= start:
            continue
        parts.append(
            f'<rect class="zone z{place}" x="{start:.1f}" y="{top}" width="{end - start:.1f}" '
            f'height="{bottom - top:.1f}"/>'
        )
        if (place == 0 or rows > 1 or end - start > 6.2 * len(name)) and end - start > 12:
            line = top - 9 - 14 * (place % rows)
            parts.append(
                f'<text class="bandname" text-anchor="middle" x="{(start + end) / 2:.1f}" y="{line}">{name}</text>'
            )
        start = end
    return parts


def _privacy_mark(mark: Mark, x: float, y: float, number: int) -> str:
    if mark.kind == "client":
        return f'<circle class="f{place_of(number)}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
    if mark.kind == "record":
        return f'<circle class="hollow s{place_of(number)}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    if mark.kind == "audit":
        return f'<path class="audit" d="M{x:.1f} {y - 8:.1f}V{y + 8:.1f}M{x:.1f} {y:.1f}h12m-4 -4l4 4l-4 4"/>'
    return f'<path class="hollow claim" d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7Z"/>'


def _lines(text: str, most: int) -> list[str]:
    """The text in lines of at most so many letters, none for no text; a longer word has a line to itself."""
    return textwrap.wrap(text, most, break_on_hyphens=False)
