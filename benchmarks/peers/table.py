"""The tables of ratios in README and docs/speed.md, from the JSON that `compare.py` and `ray_cluster.py` wrote.

    python benchmarks/peers/table.py

A target that was missed is shown as missed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS = {
    "pfl": "Apple's pfl",
    "flower": "Flower's Ray simulation",
    "opacus": "Opacus in a plain loop",
    "plain": "plain PyTorch loop, best threads",
}
NAMES = {
    "W1": "10 clients x 600, MLP-2, 30 epochs",
    "W5": "1000 clients x 60, MLP-2, one epoch",
    "W5-200": "200 clients x 60, MLP-2, one epoch",
    "W5-2000": "2000 clients x 60, MLP-2, one epoch",
    "W2": "10 clients x 500, LeNet-5, one epoch",
}
RAY_HEADER = (
    "| what | local pool | Ray engine | Flower | Ray engine / local pool | Flower / Ray engine |\n"
    "|---|---|---|---|---|---|"
)


def summary(results: Mapping[str, Any], ray: Mapping[str, Any]) -> str:
    """One line per workload, one column per peer."""
    rows: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        peer = row["peer"].partition(",")[0]
        if peer in PEERS:
            cells = rows.setdefault(NAMES.get(row["what"], row["what"]), {})
            cells[peer] = _cell(row["ratio"], row["expected"])
    for row in ray["rows"]:
        if "flower" in row["targets"]:
            rows[f"{NAMES[row['what']]}, ours on a Ray cluster"] = {"flower": _flower(row)}
    used = [peer for peer in PEERS if any(peer in cells for cells in rows.values())]
    lines = [
        "Time of the other over ours, interleaved (`make peers`), start-up left out; median and range of",
        f"{_measured(results, ray)}:",
        "",
        "| | " + " | ".join(PEERS[peer] for peer in used) + " |",
        "|---|" + "---|" * len(used),
    ]
    for name, cells in rows.items():
        lines.append(f"| {name} | " + " | ".join(cells.get(peer, "") for peer in used) + " |")
    return "\n".join(lines)


def details(results: Mapping[str, Any]) -> str:
    """Every row with its times."""
    lines = [
        f"Median and range of {_measured(results)}:",
        "",
        "| what | peer | peer | ours | peer / ours | peer's start-up | our start-up |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(row) for row in results["rows"]])


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"| {row['what']} | {row['peer']} | {row['peer_seconds']:.3g} s | {row['our_seconds']:.3g} s "
        f"| {_cell(row['ratio'], row['expected'])} "
        f"| {row['peer_start_up']:.1f} s | {row['our_start_up']:.1f} s |"
    )


def ray_details(ray: Mapping[str, Any]) -> str:
    lines = [f"Median and range of {_measured(ray)}:", "", RAY_HEADER]
    return "\n".join(lines + [ray_line(row) for row in ray["rows"]])


def ray_line(row: Mapping[str, Any]) -> str:
    seconds, limit = row["seconds"], row["targets"].get("overhead")
    overhead = _ratio(row["overhead"], 2)
    if limit is not None and row["overhead"]["median"] > limit:
        overhead += f", target {limit:g} missed"
    return (
        f"| {row['what']} | {seconds['pool']:.3g} s | {seconds['ray']:.3g} s | {seconds['flower']:.3g} s "
        f"| {overhead} | {_flower(row)} |"
    )


def _flower(row: Mapping[str, Any]) -> str:
    bound = "" if row["flower_finished"] else "at least "
    return bound + _cell(row["flower"], row["targets"].get("flower"))


def _cell(ratio: Mapping[str, float], expected: float | None) -> str:
    missed = expected is not None and ratio["median"] < expected
    return _ratio(ratio) + (f", target {expected:g} missed" if missed else "")


def _ratio(ratio: Mapping[str, float], digits: int = 1) -> str:
    median, lowest, highest = (f"{ratio[key]:.{digits}f}" for key in ("median", "lowest", "highest"))
    return f"{median} ({lowest}-{highest})"


def _measured(*found: Mapping[str, Any]) -> str:
    """How often and where."""
    told = {
        f"{one['turns']} turns on {one['machine']['cores']} cores of {one['machine']['processor']}, "
        f"torch {one['machine']['torch']}"
        for one in found
    }
    return "\nand ".join(sorted(told))


def written(page: str, name: str, text: str) -> str:
    """The page with this text between the marks of this name."""
    begin, end = f"<!-- {name}: written by `make peers` -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def pages(results: Mapping[str, Any], ray: Mapping[str, Any]) -> dict[Path, str]:
    """Both pages with their tables."""
    readme, speed = ROOT / "README.md", ROOT / "docs" / "speed.md"
    page = written(speed.read_text(), "peers", details(results))
    return {
        readme: written(readme.read_text(), "peers", summary(results, ray)),
        speed: written(page, "ray", ray_details(ray)),
    }


def main() -> None:
    results, ray = (json.loads((HERE / name).read_text()) for name in ("results.json", "ray.json"))
    for page, text in pages(results, ray).items():
        page.write_text(text)


if __name__ == "__main__":
    main()
