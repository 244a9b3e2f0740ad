"""Imports point one way, methods are known by their contract alone, and files stay short enough to read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fedveil.methods import METHODS
from fedveil.methods.wrappers import WRAPPERS

SOURCE = Path(__file__).parents[2] / "src" / "fedveil"

# From the words everything is written in, to the command line. A module imports from its own layer or above.
LAYERS = [
    [
        "errors",
        "lazy_modules",
        "lazy_torch",
        "validation",
        "plugins",
        "numerics",
        "streams",
        "tree",
        "messages",
        "atomic_files",
        "linalg",
        "linear_network",
        "sequential",
        "text_model",
        "token_losses",
        "stream_dropout",
        "losses",
        "task",
    ],
    ["data"],
    ["features"],
    ["partition"],
    ["models"],
    ["secure_sum"],
    ["privacy"],
    ["training"],
    ["evaluation"],
    ["figures"],
    ["methods"],
    ["engines"],
    ["session"],
    ["prediction"],  # a finished run's model in use
    ["attacks"],
    ["audits"],
    ["experiment"],  # what a configuration says, and what a run needs of it
    ["federation"],
    # these choose the engine, a federation among them, or build on what does
    [
        "experiment.run",
        "experiment.compare",
        "experiment.estimates",
        "experiment.selection",
        "experiment.reproduce",
    ],
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


# What the rest of the library may know of methods: their contract and their registries; None: every name in it.
CONTRACT: dict[str, set[str] | None] = {
    "methods": {"METHODS"},
    "methods.method": None,
    "methods.describe": {
        "Described",
        "describe_fields",
        "describe_options",
    },  # of any class; it knows no method
    "methods.beforehand": {"released_before"},  # around any method
    "methods.disclosure": None,
    "methods.fields": {"STRICT"},
    "methods.secure": None,  # around any method; engines must know that uploads are masked
    "methods.wrappers": {"WRAPPERS", "Wrapper"},
    "methods.wrappers.wrapper": {"wrapper_fields"},
}
OUTSIDE = [path for path in FILES if path.relative_to(SOURCE).parts[0] != "methods"]


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_method_is_known_outside_its_file(path: Path) -> None:
    """Neither its class nor its messages, so no `isinstance` can ask for them, nor its name in a question.

    A name as a default value (`"name": "fedavg"`) is no question.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("fedveil.methods") for name in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedveil.methods"):
            module = (node.module or "").removeprefix("fedveil.")
            assert module in CONTRACT, f"{path.name} imports {module}; let the method answer by a hook"
            allowed = CONTRACT[module]
            assert allowed is None or {name.name for name in node.names} <= allowed
        if isinstance(node, ast.Compare | ast.Subscript | ast.MatchValue):
            asked = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            assert not asked & ({*METHODS, *WRAPPERS}), f"{path.name} asks for a method by its name"


ROOT = SOURCE.parents[1]


def own_files(folder: str) -> list[Path]:
    """The Python files of a folder, without environments that a benchmark has made for itself."""
    return [path for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts]


PYTHON = sorted(
    path for folder in ("src", "tests", "experiments", "benchmarks") for path in own_files(folder)
)


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_have_at_most_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_functions_have_at_most_60_lines(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = len((ast.get_docstring(node) or "").splitlines())
            assert (node.end_lineno or node.lineno) - node.lineno - docstring < 60, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_files_that_are_run_by_their_path_exist(path: Path) -> None:
    for name in re.findall(r'with_name\("(\w+\.py)"\)', path.read_text()):
        assert path.with_name(name).exists()


NOISE = "privacy/noise/"
DRAWS = {
    "normal", "standard_normal", "multivariate_normal", "lognormal", "randn", "randn_like", "normal_", "log_normal_",
    "trunc_normal_", "laplace", "gumbel", "gumbel_softmax", "exponential", "standard_exponential", "exponential_",
    "logistic", "standard_cauchy", "cauchy_", "standard_t", "standard_gamma", "binomial", "negative_binomial",
    "random_raw", "erfinv", "poisson", "geometric", "geometric_",
    "bernoulli", "bernoulli_", "uniform_", "distributions", "rvs",
}  # fmt: skip

# Random draws that protect nothing, by file and function, each with its reason.
NOT_PRIVACY_NOISE = {
    "streams.py normal": "the helper itself, for the noise package and for the uses below",
    "task.py _kept": "dropout masks",
    "task.py Task._kept": "dropout masks",
    "privacy/sampling.py draw_cohort": "the size of a Poisson cohort, which is accounted for as sampling",
    "training/surrogate.py noise_images": "the images that synthetic sets start from, drawn before any data is read",
    "methods/feddm.py nearby": "networks around the model at which features are compared; declared unprotected",
    "methods/fedem.py FedEM._first_delta": "where the search for a perturbation starts; declared unprotected",
    "methods/fedem.py FedEM._project.directions": "directions for perturbations of length zero; declared unprotected",
    "features/synthetic_images.py _leaves": "colours of images that are drawn without data",
    "models/lenet.py lenet_zhu": "first weights",
    "models/lstm.py LSTMLayer.__init__": "first weights",
    "models/lstm.py LSTMClassifier.__init__": "first weights",
    "models/transformer.py Transformer.__init__": "first weights",
    "experiment/verdicts.py _likely_mean": "means that seeds would have, for the interval of an order",
    "attack_runs/inversion.py _without_uploads": "guesses that look at no upload",
    "attacks/inversion/gias.py train_decoder": "codes that an attacker trains its decoder on",
    "attacks/inversion/labels.py _expected_probabilities": "inputs that an attacker makes up",
    "attacks/inversion/restarts.py Rows.spread": "where an attacker starts",
    "attacks/text/search.py Search._start": "where an attacker starts",
    "audits/one_run.py random_canaries": "canaries of an audit",
    "session/checks.py _moved.step": "weights at which a model is checked for mixing its records",
}


def draws(path: Path) -> set[str]:
    """The functions of a file that draw noise, or hand such a draw on, by file and qualified name."""
    found = set()

    def visit(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            used = child.attr if isinstance(child, ast.Attribute) else getattr(child, "id", None)
            if used in DRAWS:
                found.add(f"{path.relative_to(SOURCE).as_posix()} {place}")
            inside = isinstance(child, ast.FunctionDef | ast.ClassDef)
            visit(child, f"{place}.{child.name}".lstrip(".") if inside else place)  # type: ignore[attr-defined]

    visit(ast.parse(path.read_text()), "")
    return found


def test_privacy_noise_is_drawn_in_one_module() -> None:
    drawn = {place for path in FILES for place in draws(path)}
    assert any(place.startswith(NOISE) for place in drawn)
    outside = {place for place in drawn if not place.startswith(NOISE)}
    assert outside == set(NOT_PRIVACY_NOISE)  # new draws need a reason, reasons without a draw are stale


def test_only_mechanisms_and_distortions_use_the_noise_module() -> None:
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if NOISE not in path.as_posix()
        and re.search(r"privacy import .*\bnoise\b|privacy\.noise\b", path.read_text())
    }
    assert users == {
        "privacy/mechanisms.py",
        "privacy/integer_mechanisms.py",
        "privacy/distortions.py",
    }
