"""Pictures of the baseline methods."""

# ruff: noqa: RUF001  # Greek letters of the papers

from __future__ import annotations

import itertools
from collections.abc import Callable

from shapes import (
    BLUE,
    GREEN,
    INK,
    LINE,
    ORANGE,
    PALE,
    RED,
    SOFT,
    arrow,
    box,
    circle,
    flow,
    line,
    lines,
    spread,
    text,
)


def _three_clients(sent: str, does: str, server: tuple[str, ...]) -> str:
    parts = [text(110, 24, does), text(400, 24, sent), text(620, 24, "server")]
    for i, y in enumerate((44, 92, 140)):
        parts += [
            box(20, y, 180, 34, BLUE, f"client {i + 1}, n{'₁₂₃'[i]} examples"),
            arrow(202, y + 17, 536, 108),
        ]
    parts += [box(540, 84, 160, 48, GREEN, *server), line(620, 134, 620, 192), line(620, 192, 110, 192)]
    return "".join([*parts, arrow(110, 192, 110, 178), text(365, 208, "the new model w goes back", size=12)])


def fedavg() -> str:
    return _three_clients("models w₁, w₂, w₃", "train from w", ("mean of models,", "weights n_k / n"))


def fedsgd() -> str:
    return _three_clients("gradients ∇L₁, ∇L₂, ∇L₃", "one gradient at w", ("one step along", "their mean"))


def _valley(x: float, y: float, name: str, colour: str) -> str:
    rings = (circle(x, y, radius, colour=colour, dash="3 4") for radius in (18, 38, 58))
    return "".join(
        [
            *rings,
            circle(x, y, 3, colour=colour, fill=colour),
            text(x + 66, y + 4, name, size=12, anchor="start"),
        ]
    )


def fedprox() -> str:
    parts = [_valley(520, 92, "least loss of client k", BLUE), circle(160, 120, 4, colour=INK, fill=INK)]
    parts += [text(146, 124, "w", anchor="end"), arrow(160, 120, 456, 98, colour=LINE)]
    parts += [
        lines(390, 78, "FedAvg: all the way", colour=SOFT),
        arrow(160, 120, 330, 122, colour=BLUE, width=2.4),
    ]
    zigzag = " ".join(f"{164 + 10 * i},{140 + (6 if i % 2 else -2)}" for i in range(17))
    parts += [f'<polyline points="{zigzag}" fill="none" stroke="{ORANGE}" stroke-width="1.6"/>']
    return "".join(
        [*parts, text(344, 126, "v", anchor="start"), lines(250, 172, "the pull μ (v - w) holds it back")]
    )


def scaffold() -> str:
    parts = [
        _valley(520, 66, "least loss of client 1", BLUE),
        _valley(520, 194, "least loss of client 2", ORANGE),
    ]
    parts += [circle(120, 130, 4, colour=INK, fill=INK), text(106, 134, "w", anchor="end")]
    parts += [
        arrow(120, 130, 320, 96, colour=BLUE, width=2.4),
        arrow(320, 96, 340, 130, colour=RED, width=2.4),
    ]
    parts += [arrow(120, 130, 330, 132, colour=GREEN, width=2.4), text(210, 100, "- ∇L₁", colour=BLUE)]
    parts += [
        text(350, 112, "c₁ - c", colour=RED, anchor="start"),
        text(220, 150, "corrected step", colour=GREEN),
    ]
    return "".join(
        [*parts, lines(220, 214, "c₁: where client 1 was led so far", "c: where all clients were led")]
    )


def ppsgd() -> str:
    parts = [box(40, 40, 180, 48, BLUE, "shared part w"), text(248, 70, "+", size=20)]
    parts += [box(276, 40, 180, 48, GREEN, "personal part v_k"), text(484, 70, "=", size=20)]
    parts += [
        box(512, 40, 200, 48, LINE, "model of client k"),
        arrow(130, 90, 130, 134),
        arrow(366, 90, 366, 134),
    ]
    parts += [lines(130, 154, "its change is clipped, noised", "and sent to the server")]
    return "".join([*parts, lines(366, 154, "learns with a rate of its own", "and never leaves the client")])


def centaur() -> str:
    parts = [text(206, 24, "one client's network")]
    for i in range(4):
        colour = GREEN if i == 3 else BLUE
        parts.append(box(30 + 92 * i, 40, 78, 70, colour, *(("head",) if i == 3 else ("layer", f"{i + 1}"))))
    parts += [arrow(154, 112, 154, 150, colour=BLUE), arrow(345, 112, 345, 150, colour=GREEN)]
    parts += [
        lines(154, 168, "representation: clipped,", "noised, sent"),
        lines(345, 168, "stays on", "the client"),
    ]
    parts += [arrow(400, 75, 456, 75), box(460, 46, 130, 58, ORANGE, "sum of K", "noisy changes")]
    return "".join([*parts, arrow(592, 75, 626, 75), box(630, 46, 116, 58, BLUE, "shared", "layers")])


def dp_fedavg() -> str:
    parts = []
    for y, name, words in (
        (
            20,
            "central",
            ((120, BLUE, ("update",)), (120, BLUE, ("clip to C",)), (150, ORANGE, ("server: sum + σC",))),
        ),
        (
            86,
            "local",
            ((120, BLUE, ("update",)), (150, ORANGE, ("clip to C, + σC",)), (120, GREEN, ("server: sum",))),
        ),
        (
            152,
            "record",
            (
                (120, ORANGE, ("gradients of a", "batch, clipped, + σC")),
                (120, BLUE, ("many steps",)),
                (120, GREEN, ("server: mean",)),
            ),
        ),
    ):
        wide = tuple((width + 30, colour, said) for width, colour, said in words)
        parts += [text(60, y + 28, name), flow(y, *wide, x=120)]
    return "".join(parts)


def dp_fedprox() -> str:
    step = flow(
        40,
        (118, BLUE, ("Poisson batch", "of records")),
        (120, BLUE, ("gradients,", "each clipped to C")),
        (100, ORANGE, ("sum", "+ noise σC")),
        (120, BLUE, ("+ pull μ (v - w)",)),
        (96, GREEN, ("step of v",)),
    )
    back = [line(690, 90, 690, 118), line(690, 118, 72, 118), arrow(72, 118, 72, 92)]
    return "".join(
        [step, *back, lines(380, 140, "every local step; the pull reads no record, so it needs no noise")]
    )


def _bars(selected: Callable[[int], bool], rest: str, *, noise: bool = True) -> str:
    """Coordinates of an update; those selected carry noise."""
    parts = [line(40, 150, 700, 150, colour=INK)]
    for i, value in enumerate((70, 22, 48, 90, 12, 64, 30, 104, 18, 76, 40, 8, 58, 26, 82, 36)):
        x, chosen = 56 + 40 * i, selected(value)
        colour = BLUE if chosen else rest
        dash = "" if chosen or rest == RED else ' stroke-dasharray="3 3"'
        fill = PALE[colour] if chosen or rest == RED else "none"
        parts.append(
            f'<rect x="{x}" y="{150 - value}" width="18" height="{value}" fill="{fill}" stroke="{colour}"{dash}/>'
        )
        if chosen and noise:
            parts.append(line(x + 9, 134 - value, x + 9, 166 - value, colour=BLUE))
    return "".join(parts)


def dp_fedags_proven() -> str:
    parts = [
        text(40, 24, "coordinates of one client's clipped update", anchor="start"),
        _bars(lambda v: v >= 58, LINE),
    ]
    parts += [
        lines(200, 182, "selected: sent with noise", colour=BLUE),
        lines(540, 182, "others: not sent at all"),
    ]
    return "".join(
        [
            *parts,
            lines(370, 206, "the selection is public, or has its own share of the guarantee", colour=INK),
        ]
    )


def dp_fedsnlc() -> str:
    parts = [
        text(40, 24, "change of the local loss by each coordinate", anchor="start"),
        _bars(lambda v: v >= 48, RED),
    ]
    parts += [lines(200, 182, "explain most of the change: noise is added", colour=BLUE)]
    return "".join([*parts, lines(560, 182, "the rest: sent as it is", colour=RED)])


def cpsgd() -> str:
    parts = []
    for i, off in enumerate(spread(8, 1)):
        tall, even, x = (86, 20)[i != 2] * (1 if off >= 0 else -1), 34 + 14 * off, 30 + 18 * i
        parts.append(line(x, 110, x, 110 - tall * 0.8, colour=BLUE))
        parts.append(line(x + 220, 110, x + 220, 110 - even * (1 if i % 2 else -1), colour=BLUE))
        parts.append(
            circle(x + 440, 110 - 16 * round(even / 16) * (1 if i % 2 else -1), 3, colour=BLUE, fill=BLUE)
        )
    parts += [line(454, 110 + 16 * k, 612, 110 + 16 * k, dash="2 3") for k in range(-3, 4)]
    parts += [arrow(186, 110, 232, 110), arrow(406, 110, 446, 110), arrow(618, 110, 650, 110)]
    parts += [box(654, 84, 96, 52, ORANGE, "+ binomial", "noise"), lines(96, 206, "clipped update")]
    return "".join(
        [*parts, lines(316, 206, "rotated: even sizes"), lines(534, 206, "rounded to a few levels")]
    )


def _images(x: float, y: float, colour: str, seed: int) -> str:
    parts = []
    for i in range(6):
        left, top = x + 30 * (i % 3), y + 30 * (i // 3)
        place = f'x="{left}" y="{top}" width="26" height="26" rx="2"'
        parts.append(f'<rect {place} fill="{PALE[colour]}" stroke="{colour}"/>')
        for j, off in enumerate(spread(6, i + seed)):
            place = f'cx="{left + 6 + 7 * (j % 3)}" cy="{top + 9 + 9 * (j // 3)}" r="{2 + 1.5 * off:.1f}"'
            parts.append(f'<circle {place} fill="{colour}"/>')
    return "".join(parts)


def _matching(middle: tuple[str, ...], gradient: str, end: tuple[str, ...], colour: str = BLUE) -> str:
    """Real and synthetic images whose gradients are compared on a network."""
    parts = [_images(30, 20, BLUE, 2), _images(30, 130, GREEN, 5), text(76, 98, "private images", size=12)]
    parts += [text(76, 208, "synthetic images", size=12), box(176, 76, 150, 64, LINE, *middle)]
    parts += [
        arrow(126, 50, 174, 92),
        arrow(126, 160, 174, 126),
        arrow(328, 92, 382, 60),
        arrow(328, 126, 382, 152),
    ]
    parts += [
        box(386, 30, 120, 48, colour, gradient, "one class"),
        box(386, 134, 120, 48, GREEN, "gradient of", "one class"),
    ]
    parts += [line(446, 80, 446, 132, dash="3 3"), text(456, 110, "made equal", size=12, anchor="start")]
    return "".join([*parts, arrow(508, 158, 574, 124), box(578, 84, 160, 56, GREEN, *end)])


def dsc() -> str:
    return _matching(
        ("the same random", "augmentation,", "one network"),
        "gradient of",
        ("server trains once", "on all images"),
    )


def psg() -> str:
    return _matching(
        ("a fresh random", "network"),
        "clipped, + σC",
        ("one message; server", "trains on all images"),
        ORANGE,
    )


def feddm() -> str:
    parts = [text(190, 24, "features h and logits z of one class"), circle(190, 118, 78, dash="4 3")]
    for i, (a, b) in enumerate(zip(spread(14, 3), spread(14, 4), strict=True)):
        colour = BLUE if i < 9 else GREEN
        parts.append(circle(190 + 66 * a, 118 + 60 * b, 5, colour=colour, fill=PALE[colour]))
    for x, colour, name in ((176, BLUE, "mean of the data"), (214, GREEN, "mean of the images")):
        parts += [line(x - 7, 112, x + 7, 126, colour=colour), line(x - 7, 126, x + 7, 112, colour=colour)]
        parts += [text(290, 96 if colour == BLUE else 150, name, colour=colour, anchor="start")]
    parts += [
        line(180, 119, 210, 119, colour=ORANGE, dash="2 2"),
        text(290, 123, "pulled together", anchor="start"),
    ]
    parts += [arrow(430, 118, 486, 118), _images(492, 90, GREEN, 4), arrow(586, 118, 634, 118)]
    return "".join(
        [*parts, box(638, 92, 110, 52, GREEN, "server trains", "near w"), lines(536, 178, "synthetic images")]
    )


def fedlap() -> str:
    parts = [circle(170, 118, 84, dash="4 3"), text(86, 44, "radius r", colour=SOFT), text(170, 134, "w")]
    at = [(170, 118), (186, 94), (210, 82), (226, 98), (246, 88)]
    parts += [arrow(*a, *b, colour=GREEN) for a, b in itertools.pairwise(at)]
    parts += [lines(170, 222, "a client walks on its synthetic images")]
    curve = " ".join(f"{400 + 2 * i},{140 - 0.022 * (i - 62) ** 2:.1f}" for i in range(110))
    parts += [line(396, 166, 636, 166, colour=INK), line(396, 40, 396, 166, colour=INK)]
    parts += [f'<polyline points="{curve}" fill="none" stroke="{BLUE}" stroke-width="2.4"/>']
    parts += [line(524, 142, 524, 166, colour=ORANGE, dash="4 3"), text(524, 184, "r_k", colour=ORANGE)]
    return "".join([*parts, text(516, 30, "loss on its real data"), lines(516, 222, "distance from w")])
