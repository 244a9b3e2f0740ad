"""Nothing that is read can run: no unsafe pickle, no evaluated text, anywhere in the package."""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path

import pytest

from fedveil.data.cifar import read_cifar_pickle
from fedveil.errors import DataError
from fedveil.evaluation.image_quality import read_arrays

PACKAGE = Path(__file__).parents[2] / "src" / "fedveil"
RESTRICTED = {"data/cifar.py": "_SafeUnpickler", "evaluation/image_quality.py": "_ArraysOnly"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__"}
NEVER_ATTRIBUTES = {
    ("torch", "load"), ("pickle", "load"), ("pickle", "loads"), ("joblib", "load"), ("marshal", "loads"),
    ("yaml", "load"), ("os", "system"), ("shelve", "open"), ("dill", "load"), ("cloudpickle", "load"),
}  # fmt: skip
UNSAFE_MODULES = {name for name, attribute in NEVER_ATTRIBUTES if attribute in ("load", "loads")} - {"torch"}


def unsafe(tree: ast.Module) -> list[str]:
    """The calls of `tree` that could run what they read."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in UNSAFE_MODULES:
            found.append(f"line {node.lineno}: a part of {node.module} under a name of its own")
        if isinstance(node, ast.Import):
            renamed = [name.name for name in node.names if name.asname and name.name in UNSAFE_MODULES]
            found += [f"line {node.lineno}: {name} under another name" for name in renamed]
        if not isinstance(node, ast.Call):
            continue
        line = f"line {node.lineno}"
        call = node.func
        if isinstance(call, ast.Name) and call.id in NEVER_CALLED:
            found.append(f"{line}: {call.id}")
        if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
            if (call.value.id, call.attr) in NEVER_ATTRIBUTES:
                found.append(f"{line}: {call.value.id}.{call.attr}")
            if (call.value.id, call.attr) == ("pickle", "Unpickler"):
                found.append(f"{line}: an unrestricted unpickler")
            silent = "allow_pickle" not in {word.arg for word in node.keywords}
            if silent and call.value.id in ("np", "numpy") and call.attr == "load":
                found.append(f"{line}: numpy.load that does not say allow_pickle=False")
        for word in node.keywords:
            harmful = {"shell": True, "allow_pickle": True, "trust_remote_code": True}
            if word.arg in harmful and not (isinstance(word.value, ast.Constant) and not word.value.value):
                found.append(f"{line}: {word.arg}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_no_file_can_run_what_it_reads(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert unsafe(tree) == []
    imports = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    if "pickle" in imports:
        subclass = RESTRICTED[str(path.relative_to(PACKAGE))]
        (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == subclass)
        assert any(isinstance(part, ast.FunctionDef) and part.name == "find_class" for part in found.body)


@pytest.mark.parametrize(
    "text",
    ["eval(x)", "torch.load(f)", "pickle.loads(b)", "np.load(f, allow_pickle=True)", "run(c, shell=True)",
     "np.load(f, allow_pickle=flag)", "np.load(f)", "pickle.Unpickler(f)", "joblib.load(f)",
     "AutoModel.x(p, trust_remote_code=True)", "import pickle as p", "from pickle import loads"],
)  # fmt: skip
def test_the_check_detects_violations(text: str) -> None:
    assert unsafe(ast.parse(text)) != []


@pytest.mark.parametrize("text", ["np.load(f, allow_pickle=False)", "safetensors.torch.load(b)"])
def test_the_check_lets_safe_readers_pass(text: str) -> None:
    assert unsafe(ast.parse(text)) == []


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.mark,))


def test_a_pickle_with_code_in_it_is_refused_and_does_not_run(tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / "batch"
    file.write_bytes(pickle.dumps({b"data": Bomb(mark), b"labels": [1]}))
    with pytest.raises(DataError):
        read_cifar_pickle(file, b"labels", num_classes=10)
    with pytest.raises(DataError):
        read_arrays(file.read_bytes())
    assert not mark.exists()
    assert "pathlib" in sys.modules
