"""README's table of ratios, from the JSON that `compare.py` wrote.

python benchmarks/peers/table.py benchmarks/peers/results.json README.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- peers: written by `make peers` -->", "<!-- end of peers -->"
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
    "W2": "10 clients x 500, LeNet-5, one epoch",
}


def table(results: Mapping[str, Any]) -> str:
    """One line per workload, one column per peer; a target that was missed is shown as missed."""
    rows: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        peer = row["peer"].partition(",")[0]
        if peer in PEERS:
            rows.setdefault(NAMES.get(row["what"], row["what"]), {})[peer] = _cell(row)
    used = [peer for peer in PEERS if any(peer in cells for cells in rows.values())]
    machine = results["machine"]
    lines = [
        "Time of the other over ours, interleaved in one run (`make peers`), median and range of "
        f"{results['turns']} turns,",
        f"start-up left out, on {machine['cores']} cores of {machine['processor']}, torch {machine['torch']}:",
        "",
        "| | " + " | ".join(PEERS[peer] for peer in used) + " |",
        "|---|" + "---|" * len(used),
    ]
    for name, cells in rows.items():
        lines.append(f"| {name} | " + " | ".join(cells.get(peer, "") for peer in used) + " |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    ratio, expected = row["ratio"], row["expected"]
    text = f"{ratio['median']:.1f} ({ratio['lowest']:.1f}-{ratio['highest']:.1f})"
    missed = expected is not None and ratio["median"] < expected
    return f"{text}, target {expected:g} missed" if missed else text


def written(page: str, results: Mapping[str, Any]) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main() -> None:
    source, page = Path(sys.argv[1]), Path(sys.argv[2])
    page.write_text(written(page.read_text(), json.loads(source.read_text())))


if __name__ == "__main__":
    main()
