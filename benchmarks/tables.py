"""Time and memory of loading a large CSV file: 200,000 rows of 100 columns, in a process of its own.

python benchmarks/tables.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, COLUMNS = 200_000, 100


def write(path: Path) -> None:
    stream = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join([*(f"c{k}" for k in range(COLUMNS - 1)), "y"]) + "\n")
        for _ in range(0, ROWS, 10_000):
            values = stream.normal(size=(10_000, COLUMNS - 1))
            labels = stream.integers(0, 2, 10_000)
            lines = ([*(f"{v:.4f}" for v in row), str(y)] for row, y in zip(values, labels, strict=True))
            file.writelines(",".join(line) + "\n" for line in lines)


def load(path: Path) -> None:
    from fedveil.data.table import load_table

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    made = load_table(path=path, label="y")
    taken = time.perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = path.stat().st_size / 1e6
    print(
        f"{len(made.train) + len(made.test)} rows, {megabytes:.0f} MB: {taken:.1f} s, "
        f"at most {most / 1e6:.2f} GB ({before / 1e6:.2f} GB of it before)"
    )


def main() -> None:
    if len(sys.argv) > 1:
        load(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.csv"
        write(path)
        subprocess.run([sys.executable, __file__, str(path)], env=os.environ, check=True)


if __name__ == "__main__":
    main()
