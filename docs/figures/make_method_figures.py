"""Draws the pictures of the methods' pages, as SVG: `python docs/figures/make_method_figures.py`.

Nothing here is random and nothing is measured: the pictures explain an idea. A test holds the files to this script.
"""

# ruff: noqa: RUF001  # Greek letters of the papers

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import baseline_pictures as others
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
    line,
    lines,
    spread,
    text,
)

TARGET = Path(__file__).parents[1] / "methods"


def averaging() -> str:
    """UDP-FedAvg and DP-FedAvg: clip or scale, add noise, sum."""
    parts = [
        text(130, 24, "clip to C"),
        circle(130, 120, 62, dash="4 3"),
        text(130, 200, "longer updates are cut", size=12),
    ]
    parts += [arrow(130, 120, 224, 66, colour=LINE), arrow(130, 120, 183.8, 89.1, colour=BLUE, width=2.4)]
    parts += [arrow(130, 120, 108, 98, colour=BLUE, width=2.4), text(60, 76, "C", colour=SOFT)]
    parts += [text(350, 24, "normalise = true"), circle(350, 120, 62, dash="4 3")]
    parts += [arrow(350, 120, 306, 76, colour=BLUE, width=2.4), arrow(350, 120, 328, 98, colour=LINE)]
    parts += [
        arrow(350, 120, 403.8, 89.1, colour=BLUE, width=2.4),
        text(350, 200, "short ones are lengthened too", size=12),
    ]
    parts += [text(600, 24, "noise, then the sum")]
    for i, y in enumerate((52, 96, 140)):
        parts += [
            box(480, y, 108, 32, BLUE, f"client {i + 1} + noise"),
            arrow(588, y + 16, 640, 112, colour=SOFT),
        ]
    parts += [box(642, 90, 92, 44, GREEN, "sum", "noise σC")]
    parts += [lines(607, 200, "shared: σC/√K each; local: σC each", colour=INK)]
    return "".join(parts)


def stack(x: float, y: float, rough: float, colour: str) -> str:
    """Three models behind one another, each a little bar chart; rough ones have noise."""
    parts = []
    for k in (2, 1, 0):
        left, top = x + 22 * k, y - 18 * k
        parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="92" height="76" rx="4" fill="{PALE[colour]}" stroke="{colour}"/>'
        )
        for i, off in enumerate(spread(7, k + 1)):
            height = 18 + 10 * math.sin(i) + 8 + rough * 24 * off
            place = f'x="{left + 8 + 11 * i:.1f}" y="{top + 68 - height:.1f}" width="7" height="{height:.1f}"'
            parts.append(f'<rect {place} fill="{colour}"/>')
    return "".join(parts)


def fedceo() -> str:
    parts = [
        stack(20, 88, 1.0, ORANGE),
        lines(90, 190, "K noisy models:", "the noise differs,", "the signal is alike"),
    ]
    parts += [arrow(172, 110, 226, 110), text(199, 98, "DFT", size=12)]
    for i, (height, cut) in enumerate(((84, 22), (40, 22), (34, 22), (30, 22))):
        x = 246 + 46 * i
        parts.append(
            f'<rect x="{x}" y="{154 - height}" width="26" height="{height}" fill="{PALE[LINE]}" stroke="{LINE}"/>'
        )
        parts.append(
            f'<rect x="{x}" y="{154 - height + cut}" width="26" height="{height - cut}" fill="{GREEN}"/>'
        )
        parts.append(text(x + 13, 170, f"f = {i}", size=11, colour=SOFT))
    parts += [
        lines(
            328,
            190,
            "singular values of each frequency:",
            "all are lowered by the threshold,",
            "differences between clients most",
        )
    ]
    parts += [arrow(446, 110, 500, 110), text(473, 98, "inverse", size=12)]
    parts += [
        stack(520, 88, 0.15, GREEN),
        lines(590, 190, "K smooth models:", "client k resumes", "from its own"),
    ]
    return "".join(parts)


def fedlap_dp() -> str:
    parts = [box(14, 60, 104, 56, BLUE, "private", "records"), arrow(118, 88, 176, 88)]
    parts += [box(178, 60, 130, 56, ORANGE, "clipped gradients", "+ noise σC"), arrow(308, 88, 366, 88)]
    for i in range(6):
        x, y = 372 + 30 * (i % 3), 60 + 30 * (i // 3)
        parts.append(
            f'<rect x="{x}" y="{y}" width="26" height="26" rx="2" fill="{PALE[GREEN]}" stroke="{GREEN}"/>'
        )
        for j, off in enumerate(spread(6, i + 2)):
            place = f'cx="{x + 6 + 7 * (j % 3)}" cy="{y + 9 + 9 * (j // 3)}" r="{2 + 1.5 * off:.1f}"'
            parts.append(f'<circle {place} fill="{GREEN}"/>')
    parts += [
        lines(416, 142, "synthetic images whose", "gradients imitate the", "noisy ones"),
        arrow(468, 88, 524, 88),
    ]
    parts += [
        circle(640, 100, 72, dash="4 3"),
        arrow(640, 100, 656, 68, colour=GREEN),
        arrow(656, 68, 684, 60, colour=GREEN),
    ]
    parts += [arrow(684, 60, 700, 76, colour=GREEN), text(640, 118, "w"), text(568, 44, "r", colour=SOFT)]
    parts += [
        lines(640, 196, "the server trains on all images", "and stops at the radius r"),
        line(640, 100, 577, 66, dash="2 3"),
    ]
    parts += [lines(150, 142, "everything to the right of the", "noise costs no more privacy")]
    return "".join(parts)


def dp_fedags() -> str:
    parts = [line(40, 150, 700, 150, colour=INK), line(40, 92, 700, 92, colour=ORANGE, dash="5 4")]
    parts += [text(706, 96, "λ", colour=ORANGE, anchor="start")]
    values = (70, 22, 48, 90, 12, 64, 30, 104, 18, 76, 40, 8, 58, 26, 82, 36)
    for i, value in enumerate(values):
        x, noised = 56 + 40 * i, value >= 58
        colour = BLUE if noised else RED
        parts.append(
            f'<rect x="{x}" y="{150 - value}" width="18" height="{value}" fill="{PALE[colour]}" stroke="{colour}"/>'
        )
        if noised:
            parts.append(line(x + 9, 150 - value - 16, x + 9, 150 - value + 16, colour=BLUE))
    parts += [text(40, 24, "coordinates of one client's clipped gradient", anchor="start")]
    parts += [
        lines(200, 182, "above the threshold: noise is added", colour=BLUE),
        lines(540, 182, "below: sent as they are", colour=RED),
    ]
    parts += [
        lines(
            370, 206, "dp-fedags-proven sends only selected coordinates, all of them with noise", colour=INK
        )
    ]
    return "".join(parts)


def fedem() -> str:
    parts = [
        text(150, 24, "one example and its perturbation"),
        circle(150, 118, 70, dash="4 3"),
        circle(150, 118, 26, dash="4 3"),
    ]
    parts += [
        arrow(150, 118, 196, 82, colour=ORANGE, width=2.4),
        text(140, 122, "x", anchor="end"),
        text(204, 78, "x + δ", anchor="start"),
    ]
    parts += [lines(150, 208, "ρ_min ≤ ‖δ‖ ≤ ρ_max", colour=INK)]
    curve = " ".join(f"{320 + 2 * i},{150 - 74 * math.exp(-i / 26) - 6:.1f}" for i in range(76))
    parts += [
        text(396, 24, "δ is learnt to lower the loss"),
        f'<polyline points="{curve}" fill="none" stroke="{GREEN}" stroke-width="2.4"/>',
    ]
    parts += [
        line(316, 156, 476, 156, colour=INK),
        line(316, 60, 316, 156, colour=INK),
        text(396, 178, "N steps", size=12),
    ]
    parts += [
        box(536, 60, 76, 40, BLUE, "client"),
        box(660, 60, 76, 40, GREEN, "server"),
        arrow(612, 72, 658, 72),
        arrow(660, 90, 614, 90),
    ]
    parts += [
        text(636, 52, "∇ at x + δ", size=12),
        lines(636, 130, "the gradient belongs to", "a distorted input;", "no noise, no epsilon"),
    ]
    return "".join(parts)


def dp_fedsgd() -> str:
    parts = [text(110, 24, "one silo, one round")]
    for i in range(24):
        x, y = 26 + 22 * (i % 8), 50 + 22 * (i // 8)
        drawn = i in (1, 4, 7, 10, 13, 19, 22)
        parts.append(circle(x, y, 7, colour=BLUE if drawn else LINE, fill=PALE[BLUE] if drawn else "none"))
    parts += [lines(104, 132, "each record is drawn", "with rate q"), arrow(206, 72, 250, 72)]
    parts += [box(252, 50, 118, 44, BLUE, "gradient of each", "clipped to C"), arrow(370, 72, 412, 72)]
    parts += [box(414, 50, 104, 44, ORANGE, "sum", "+ noise σC"), arrow(518, 72, 578, 72)]
    parts += [box(580, 50, 140, 44, GREEN, "server: mean of silos,", "momentum, step")]
    parts += [
        lines(466, 132, "protected before", "it leaves the silo"),
        lines(650, 132, "divided by q·n₀, which", "is part of the plan"),
    ]
    return "".join(parts)


FIGURES: dict[str, tuple[Callable[[], str], int, str]] = {
    "udp-fedavg": (averaging, 220, "Updates are clipped or scaled to C, noised and summed"),
    "fedceo": (fedceo, 234, "Noisy models are stacked, smoothed across clients and given back"),
    "fedlap-dp": (fedlap_dp, 220, "Noisy gradients become synthetic images, on which the server trains"),
    "dp-fedags": (dp_fedags, 220, "Only coordinates above the threshold get noise"),
    "fedem": (fedem, 220, "A perturbation within a shell lowers the loss and distorts the gradient"),
    "fedavg": (others.fedavg, 220, "Clients train, the server averages their models"),
    "fedsgd": (others.fedsgd, 220, "Clients send gradients, the server takes the step"),
    "fedprox": (others.fedprox, 190, "A pull towards the global model holds local training back"),
    "scaffold": (others.scaffold, 274, "Control variates turn a client's step towards the optimum of all"),
    "ppsgd": (others.ppsgd, 190, "A shared part with noise and a personal part that stays on the client"),
    "centaur": (others.centaur, 200, "All layers but the head are shared with noise"),
    "dp-fedavg": (
        others.dp_fedavg,
        220,
        "Noise from the server, from each client, or in each step of DP-SGD",
    ),
    "dp-fedprox": (others.dp_fedprox, 160, "A step of DP-SGD and a pull towards the global model"),
    "dp-fedags-proven": (
        others.dp_fedags_proven,
        220,
        "Selected coordinates carry noise, the others are not sent",
    ),
    "dp-fedsnlc": (
        others.dp_fedsnlc,
        200,
        "Coordinates that change the loss most get noise, the others none",
    ),
    "cpsgd": (others.cpsgd, 220, "An update is clipped, rotated, rounded to levels and gets binomial noise"),
    "dsc": (others.dsc, 220, "Synthetic images are learnt to have the gradients of private ones"),
    "psg": (others.psg, 220, "Synthetic images follow clipped and noised gradients of random networks"),
    "feddm": (others.feddm, 210, "Synthetic images get the mean features and logits of the data"),
    "fedlap": (
        others.fedlap,
        234,
        "A client finds the radius within which its synthetic images can be trusted",
    ),
    "dp-fedsgd": (dp_fedsgd, 160, "A Poisson batch, clipped per record and noised in the silo"),
}


def draw(name: str) -> str:
    """The picture as an SVG file."""
    maker, height, title = FIGURES[name]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif"><title>{title}</title>'
        f'<rect width="760" height="{height}" rx="8" fill="#ffffff"/>{maker()}</svg>\n'
    )


def main() -> None:
    for name in FIGURES:
        (TARGET / f"{name}.svg").write_text(draw(name))


if __name__ == "__main__":
    main()
