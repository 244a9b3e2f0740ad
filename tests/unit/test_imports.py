"""Starting costs what is used: libraries that only some commands need are loaded by those."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
