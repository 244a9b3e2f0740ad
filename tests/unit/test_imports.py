"""Starting costs what is used: libraries that only some commands need are loaded by those."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "experiments" / "demo.toml"

ON_DEMAND = ("dp_accounting", "flwr", "matplotlib", "mlxtend", "pandas", "scipy.optimize", "scipy.stats", "sklearn",
             "tokenizers", "transformers")  # fmt: skip

PROGRAMS = {
    "import fedveil": "import fedveil",
    "fedveil --help": "import fedveil.cli, sys; sys.argv = ['fedveil', '--help']; fedveil.cli.main()",
    "fedveil list methods": "import fedveil.cli, sys; sys.argv = ['fedveil', 'list', 'methods']; fedveil.cli.main()",
    "fedveil list attacks": "import fedveil.cli, sys; sys.argv = ['fedveil', 'list', 'attacks']; fedveil.cli.main()",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_heavy_libraries_are_loaded_when_used(program: str) -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print("LOADED", [name for name in {ON_DEMAND!r} if name in sys.modules]))
{program}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout, done.stdout[-200:]


def test_a_simulation_loads_neither_the_report_nor_the_federation(tmp_path: Path) -> None:
    arguments = ["run", str(DEMO), "--set", "run.rounds=1", "--results", str(tmp_path)]
    code = f"""
import atexit, fedveil.cli, sys
others = ("fedveil.report", "fedveil.federation")
atexit.register(lambda: print("LOADED", [name for name in sys.modules if name.startswith(others)]))
sys.argv = ["fedveil", *{arguments!r}]
fedveil.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout, done.stdout[-300:]
