"""How long commands take to start, as a ratio to `python -c pass` on the same machine.

python benchmarks/startup.py

Every command has its bytecode, as in an installed package. The processor's time is less disturbed by other work on the
machine than the clock's.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = Path(__file__).parents[1] / "experiments" / "demo.toml"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "fedveil --help": ["-m", "fedveil", "--help"],
    "completion": ["-c", "import fedveil.cli, sys; sys.argv = ['fedveil']; fedveil.cli.main()"],
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
COMPLETION = {"_FEDVEIL_COMPLETE": "complete_bash", "COMP_WORDS": "fedveil ac", "COMP_CWORD": "1"}


def seconds(arguments: list[str], environment: dict[str, str], times: int = 5) -> tuple[float, float]:
    """The medians of several starts by the clock and of the processor, the first not counted."""
    taken, used = [], []
    for _ in range(times + 1):
        start, before = time.perf_counter(), _processor()
        subprocess.run(
            [sys.executable, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            env=environment,
        )
        taken.append(time.perf_counter() - start)
        used.append(_processor() - before)
    return statistics.median(taken[1:]), statistics.median(used[1:])


def _processor() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as cache:
        environment["PYTHONPYCACHEPREFIX"] = cache
        _, bare = seconds(COMMANDS["python -c pass"], environment)
        for name, arguments in COMMANDS.items():
            more = COMPLETION if name == "completion" else {}
            taken, used = seconds(arguments, environment | more)
            print(
                f"{name:34} {taken:6.2f} s  {used:6.2f} s of the processor  {used / bare:6.1f} x", flush=True
            )


if __name__ == "__main__":
    main()
