"""Shapes of which the methods' pictures are made, as SVG."""

# Greek letters of the papers

from __future__ import annotations

import math
from collections.abc import Iterator

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
BLUE, ORANGE, GREEN, RED = "#1f5c99", "#c4541a", "#157a5e", "#b3261e"
PALE = {BLUE: "#dce9f5", ORANGE: "#f9e3d6", GREEN: "#dcefe8", RED: "#f8dcda", LINE: "#eef1f4"}


def text(x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'
    )


def lines(x: float, y: float, *words: str, size: int = 12, colour: str = SOFT, anchor: str = "middle") -> str:
    rows = (text(x, y + 16 * i, row, size=size, colour=colour, anchor=anchor) for i, row in enumerate(words))
    return "".join(rows)


def box(x: float, y: float, width: float, height: float, colour: str, *words: str) -> str:
    """A box with words in its middle."""
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{PALE[colour]}" stroke="{colour}"/>'
    )
    top = y + height / 2 + 4 - 8 * (len(words) - 1)
    return shape + lines(x + width / 2, top, *words, size=13, colour=INK)


def arrow(x: float, y: float, to_x: float, to_y: float, *, colour: str = SOFT, width: float = 1.6) -> str:
    length = math.hypot(to_x - x, to_y - y)
    along = ((to_x - x) / length, (to_y - y) / length)
    base = (to_x - 8 * along[0], to_y - 8 * along[1])
    sides = (
        (base[0] - 4 * along[1], base[1] + 4 * along[0]),
        (base[0] + 4 * along[1], base[1] - 4 * along[0]),
    )
    head = " ".join(f"{a:.1f},{b:.1f}" for a, b in ((to_x, to_y), *sides))
    shaft = (
        f'<line x1="{x:g}" y1="{y:g}" x2="{base[0]:.1f}" y2="{base[1]:.1f}" '
        f'stroke="{colour}" stroke-width="{width:g}"/>'
    )
    return f'{shaft}<polygon points="{head}" fill="{colour}"/>'


def circle(
    x: float, y: float, radius: float, *, colour: str = LINE, fill: str = "none", dash: str = ""
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" stroke="{colour}"{dashes}/>'


def line(x: float, y: float, to_x: float, to_y: float, *, colour: str = LINE, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" '
        f'stroke-width="1.5"{dashes}/>'
    )


def spread(count: int, seed: int) -> Iterator[float]:
    """Numbers in (-1, 1) that look irregular and never change."""
    for i in range(count):
        yield math.sin(12.9898 * (i + 1) + 78.233 * seed) * math.cos(4.1414 * (i + 1) * seed)


def flow(y: float, *steps: tuple[float, str, tuple[str, ...]], x: float = 14, gap: float = 42) -> str:
    """Boxes from left to right with arrows between them; each has a width, a colour and words."""
    parts = []
    for place, (width, colour, words) in enumerate(steps):
        if place:
            parts.append(arrow(x - gap + 2, y + 24, x - 2, y + 24))
        parts.append(box(x, y, width, 48, colour, *words))
        x += width + gap
    return "".join(parts)
