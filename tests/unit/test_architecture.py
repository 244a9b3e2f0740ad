"""Imports point one way, and files stay short enough to read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "fedveil"

# From the words everything is written in, to the command line. A module imports from its own layer or above.
LAYERS = [
    [
        "errors",
        "validation",
        "plugins",
        "numerics",
        "streams",
        "tree",
        "messages",
        "atomic_files",
        "linalg",
        "linear_network",
        "text_model",
        "task",
    ],
    ["data"],
    ["partition"],
    ["models"],
    ["privacy"],
    ["training"],
    ["evaluation"],
    ["figures"],
    ["methods"],
    ["engines"],
    ["session"],
    ["attacks"],
    ["audits"],
    ["experiment"],  # what a configuration says, and what a run needs of it
    ["federation"],
    ["experiment.run", "experiment.compare"],  # choose the engine, a federation among them
    ["attack_runs"],
    ["report"],
    ["cli", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def layer(module: str) -> int | None:
    """The rank of the longest name in `LAYERS` that the module is in."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((RANK[name] for name in names if name in RANK), None)


def imports(path: Path) -> list[str]:
    """What a file imports, by module: the package's top and relative names would hide the layer they come from."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            assert node.module != "fedveil", f"{path.name} imports from the top of the package"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedveil."):
            found.append((node.module or "").removeprefix("fedveil."))
        elif isinstance(node, ast.Import):
            assert "fedveil" not in {a.name for a in node.names}, (
                f"{path.name} imports the top of the package"
            )
            found += [a.name.removeprefix("fedveil.") for a in node.names if a.name.startswith("fedveil.")]
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).as_posix() != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_point_upwards(path: Path) -> None:
    own = layer(path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."))
    assert own is not None, f"give {path.name} a layer"
    for module in imports(path):
        theirs = layer(module)
        assert theirs is not None, f"give {module} a layer"
        assert theirs <= own, f"{path.name} imports {module} from further down"


ROOT = SOURCE.parents[1]


def own_files(folder: str) -> list[Path]:
    """The Python files of a folder, without environments that a benchmark has made for itself."""
    return [path for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts]


PYTHON = sorted(
    path for folder in ("src", "tests", "experiments", "benchmarks") for path in own_files(folder)
)


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_files_that_are_run_by_their_path_exist(path: Path) -> None:
    for name in re.findall(r'with_name\("(\w+\.py)"\)', path.read_text()):
        assert path.with_name(name).exists()
