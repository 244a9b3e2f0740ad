"""How long commands take to start, as a ratio to `python -c pass` on the same machine.

python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

DEMO = Path(__file__).parents[1] / "experiments" / "demo.toml"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "fedveil --help": ["-m", "fedveil", "--help"],
    "fedveil list results": ["-m", "fedveil", "list", "results"],
    "fedveil list experiments": ["-m", "fedveil", "list", "experiments"],
    "fedveil list methods": ["-m", "fedveil", "list", "methods"],
    "fedveil list methods fedceo": ["-m", "fedveil", "list", "methods", "fedceo"],
    "fedveil list models": ["-m", "fedveil", "list", "models"],
    "fedveil list datasets": ["-m", "fedveil", "list", "datasets"],
    "fedveil list attacks": ["-m", "fedveil", "list", "attacks"],
    "fedveil account (no data)": ["-m", "fedveil", "account", str(DEMO), "--records-per-client", "100"],
    "python -c 'import dp_accounting'": ["-c", "import dp_accounting"],
    "python -c 'import torch'": ["-c", "import torch"],
}


def seconds(arguments: list[str], times: int = 5) -> float:
    """The median of several starts, the first not counted."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
        )
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main() -> None:
    bare = seconds(COMMANDS["python -c pass"])
    for name, arguments in COMMANDS.items():
        found = seconds(arguments)
        print(f"{name:32} {found:6.2f} s  {found / bare:6.1f} x")


if __name__ == "__main__":
    main()
