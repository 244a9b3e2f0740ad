"""How contenders are timed beside each other: turn by turn, start-up apart."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Round = Callable[[], object]


def seconds(work: Round) -> float:
    """How long it took; a contender in another process says so itself."""
    began = time.perf_counter()
    told = work()
    return told if isinstance(told, float) else time.perf_counter() - began


def steady(work: Round, at_least: float = 0.5) -> float:
    """Seconds per round, averaged over half a second: a single short round depends on what ran before it."""
    took = [seconds(work)]
    while sum(took) < at_least:
        took.append(seconds(work))
    return statistics.mean(took)


@dataclass(frozen=True)
class Contender:
    round: Round
    start_up: float

    @classmethod
    def started(cls, begin: Callable[[], Round]) -> Contender:
        """What `begin` makes, after its first round; nothing else runs meanwhile."""
        began = time.perf_counter()
        work = begin()
        work()
        return cls(work, time.perf_counter() - began)


@dataclass(frozen=True)
class Ratio:
    """The peer's time over ours in the same turn."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, theirs: Sequence[float], ours: Sequence[float]) -> Ratio:
        ratios = sorted(t / o for t, o in zip(theirs, ours, strict=True))
        return cls(statistics.median(ratios), ratios[0], ratios[-1])

    def text(self) -> str:
        return f"{self.median:.1f} ({self.lowest:.1f}-{self.highest:.1f})"


@dataclass(frozen=True)
class Row:
    """One peer on one workload; `expected` is the ratio that is aimed at, None where no target is set."""

    what: str
    peer: str
    peer_seconds: float
    our_seconds: float
    ratio: Ratio
    expected: float | None
    peer_start_up: float
    our_start_up: float

    @property
    def missed(self) -> bool:
        return self.expected is not None and self.ratio.median < self.expected

    def text(self) -> str:
        target = "" if self.expected is None else f"{self.expected:g}{' (missed)' if self.missed else ''}"
        return (
            f"| {self.what} | {self.peer} | {self.peer_seconds:.3g} s | {self.our_seconds:.3g} s "
            f"| {self.ratio.text()} | {target} | {self.peer_start_up:.1f} s | {self.our_start_up:.1f} s |"
        )


HEADER = (
    "| what | peer | peer | ours | ratio: median (range) | expected at least | peer's start-up | our start-up |\n"
    "|---|---|---|---|---|---|---|---|"
)


def interleaved(
    what: str, contenders: dict[str, Contender], turns: int, expected: dict[tuple[str, str], float]
) -> list[Row]:
    """One row for every contender but ours."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, one in contenders.items():
            times[name].append(steady(one.round))
    ours = contenders["ours"]
    rows = [
        Row(
            what,
            name,
            statistics.median(times[name]),
            statistics.median(times["ours"]),
            Ratio.of(times[name], times["ours"]),
            expected.get((what, name.partition(",")[0])),
            peer.start_up,
            ours.start_up,
        )
        for name, peer in contenders.items()
        if peer is not ours
    ]
    for row in rows:
        print(row.text(), flush=True)
    return rows


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    described = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in described if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__.partition("+")[0],
    }
