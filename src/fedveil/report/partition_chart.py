"""The chart of the partition as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fedveil.report.svg import both_sizes

MOST_BUBBLES = 40  # clients; beyond, shades are easier to read
_BARS, _TOP = 46, 66  # height of the bars of the clients' sizes, and where the classes begin


@dataclass(frozen=True)
class _Grid:
    """The position of the cell of a client and a class."""

    left: float
    cell: float
    tall: float

    def across(self, client: int) -> float:
        """The middle of a client's column."""
        return self.left + (client + 0.5) * self.cell

    def down(self, label: int) -> float:
        """The middle of a class's row."""
        return _TOP + (label + 0.5) * self.tall


def partition_chart(
    counts: Sequence[Sequence[int]], classes: Sequence[str], who: Sequence[str] = (), *, label: str
) -> str:
    """Classes by clients, named if `who` names them: dots whose area is the count, or shades where they are many."""
    clients, number = len(counts), len(counts[0])
    who = [*who, *(str(client) for client in range(len(who), clients))]
    names = [*classes, *(str(i) for i in range(len(classes), number))][:number]

    def draw(width: int) -> tuple[int, str]:
        left = 14 + 6.5 * max(len(_clip(name, 14)) for name in names)
        cell = (width - left - 8) / clients
        grid = _Grid(left, cell, min(26.0, max(14.0, cell)) if number <= 40 else 7.0)
        height = round(_TOP + number * grid.tall + 40)
        parts = _size_bars([sum(row) for row in counts], who, grid)
        parts += _cells(counts, names, who, grid, width)
        longest = max(24.0, 6.5 * max(len(_clip(name, 14)) for name in who[:clients]) + 6)
        every = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if cell * s >= longest or s == 1000)
        parts += [
            f'<text class="tick" text-anchor="middle" x="{grid.across(client):.1f}" '
            f'y="{height - 24}">{escape(_clip(who[client], 14))}</text>'
            for client in range(0, clients, every)
        ]
        parts.append(
            f'<text class="axis" text-anchor="middle" x="{(left + width) / 2:.0f}" y="{height - 5}">client</text>'
        )
        return height, "".join(parts)

    return both_sizes(draw, label)


def _size_bars(sizes: Sequence[int], who: Sequence[str], grid: _Grid) -> list[str]:
    """A bar per client, as high as its number of examples."""
    parts = []
    most = max(1, *sizes)
    for client, size in enumerate(sizes):
        bar = _BARS * size / most
        parts.append(
            f'<rect class="f0" x="{grid.left + client * grid.cell + grid.cell * 0.14:.1f}" '
            f'y="{10 + _BARS - bar:.1f}" '
            f'width="{grid.cell * 0.72:.1f}" height="{bar:.1f}">'
            f"<title>client {escape(who[client])}: {size} examples</title></rect>"
        )
    parts.append(
        f'<text class="tick" x="0" y="20">{max(sizes)}</text><text class="tick" x="0" y="54">0</text>'
    )
    return parts


def _cells(
    counts: Sequence[Sequence[int]], names: Sequence[str], who: Sequence[str], grid: _Grid, width: int
) -> list[str]:
    """Every class's row: its name, and a dot or a shade for each client that holds it."""
    bubbles = len(counts) <= MOST_BUBBLES
    most = max(1, max(max(row) for row in counts))
    parts = []
    for label, name in enumerate(names):
        middle = grid.down(label)
        if len(names) <= 40 or label % 5 == 0:
            parts.append(f'<text class="tick" x="0" y="{middle + 4:.1f}">{escape(_clip(name, 14))}</text>')
        if bubbles:
            parts.append(f'<path class="grid" d="M{grid.left:.0f} {middle:.1f}H{width - 8}"/>')
        for client, row in enumerate(counts):
            if count := row[label]:
                title = f"<title>client {escape(who[client])}, class {escape(name)}: {count} examples</title>"
                draw = _dot if bubbles else _shade
                parts.append(draw(count / most, client, label, grid, title))
    return parts


def _dot(share: float, client: int, label: int, grid: _Grid, title: str) -> str:
    radius = 0.48 * min(grid.cell, grid.tall) * share**0.5
    return (
        f'<circle class="f0" cx="{grid.across(client):.1f}" cy="{grid.down(label):.1f}" r="{max(radius, 0.8):.2f}">'
        f"{title}</circle>"
    )


def _shade(share: float, client: int, label: int, grid: _Grid, title: str) -> str:
    return (
        f'<rect class="f0" x="{grid.left + client * grid.cell:.2f}" y="{_TOP + label * grid.tall:.1f}" '
        f'width="{grid.cell:.2f}" height="{grid.tall:.1f}" opacity="{0.08 + 0.92 * share:.3f}">'
        f"{title}</rect>"
    )


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
