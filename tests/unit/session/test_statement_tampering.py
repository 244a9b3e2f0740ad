"""Every field of statement, ledger, configuration, summary and model is changed, one at a time: each is found."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tomli_w
import torch
from typer.testing import CliRunner

import fedveil
from fedveil.cli.app import app
from fedveil.privacy.accounting import account_rounds
from fedveil.privacy.ledger import Entry
from fedveil.session import statement_file
from fedveil.session.statement_file import STATEMENT, verify

Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    data = [(torch.randn(6, 3), torch.randint(0, 2, (6,))) for _ in range(3)]
    task = fedveil.Task(lambda: torch.nn.Linear(3, 2))
    method: Any = fedveil.METHODS["udp-fedavg"]
    method = method(noise_multiplier=2.0, clip=1.0)
    rows: dict[str, Any] = {"test": data[0], "public": (torch.randn(6, 3), data[0][1])}
    stop = fedveil.EarlyStopping("loss", patience=1)  # rows say over how many ends delta is divided
    how: dict[str, Any] = {"rounds": 3, "cohort": 2, "noise": "entropy", "early_stopping": stop}
    fedveil.run(task, data, method, **how, **rows, results=folder)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture(autouse=True)
def accounted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rounds have equal guarantees: hundreds of runs of the accountant would say the same."""
    monkeypatch.setattr(statement_file, "account_rounds", _account)


@functools.cache
def _account_cached(rounds: Any, delta: Any, pairs: Any, ends: Any) -> Any:
    return account_rounds(Counter(dict(rounds)), delta, pairs=list(pairs), ends=ends)


def _account(rounds: Any, delta: Any, *, pairs: Any, ends: Any) -> Any:
    return _account_cached(frozenset(rounds.items()), delta, tuple(pairs), ends)


def test_the_untouched_run_has_no_failed_check(run: Path) -> None:
    assert failed(run) == {}


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where the values of a document are that hold no others."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    inner = [place for key, part in items for place in places(part, (*at, key))]
    yield from inner or [at]


def changed(document: Any, place: Place, change: Callable[[Any], Any] | None) -> Any:
    """The document with one value changed, or removed."""
    out = copy.deepcopy(document)
    *way, last = place
    inner = functools.reduce(lambda part, key: part[key], way, out)
    if change is None:
        del inner[last]
    else:
        inner[last] = change(inner[last])
    return out


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value[:-1]}{'b' if value.endswith('a') else 'a'}"
    return ["something"] if value == [] else "something"


def failed(folder: Path) -> dict[str, str]:
    return {check.name: check.found for check in verify(folder) if not check.passed}


def fitted(statement: dict[str, Any]) -> dict[str, Any]:
    """The statement with a hash that fits."""
    body = {key: value for key, value in statement.items() if key != "hash"}
    return body | {"hash": Entry.digest(body)}


WAYS: dict[str, Callable[[Any], Any] | None] = {"changed": other, "emptied": lambda _: None, "removed": None}


@pytest.mark.parametrize("way", WAYS)
def test_every_field_of_the_statement_is_checked(run: Path, way: str) -> None:
    original = json.loads((run / STATEMENT).read_text())
    tried = 0
    for place in places(original):
        document = changed(original, place, WAYS[way])
        if document == original:
            continue
        (run / STATEMENT).write_text(json.dumps(document))
        assert STATEMENT in failed(run), place
        tried += 1
    assert tried > 40


@pytest.mark.parametrize("way", WAYS)
def test_a_hash_that_fits_hides_no_change_but_of_the_time(run: Path, way: str) -> None:
    original = json.loads((run / STATEMENT).read_text())
    for place in places(original):
        if place in (("hash",), ("made",)):
            continue
        document = changed(original, place, WAYS[way])
        if document == original:
            continue
        (run / STATEMENT).write_text(json.dumps(fitted(document)))
        found = failed(run)
        assert found, place
        name = str(place[0])
        told = " ".join([*found, *found.values()])
        expected = {"schema": STATEMENT, "files": str(place[-1]), "data_commitment": "data"}.get(name, name)
        assert expected in told or STATEMENT in found, (place, told)


def test_an_additional_field_fails_verification(run: Path) -> None:
    original = json.loads((run / STATEMENT).read_text())
    (run / STATEMENT).write_text(json.dumps(fitted(original | {"approved": True})))
    assert "approved" in failed(run)["claims"]
    added = changed(original, ("files",), lambda files: files | {"../other": "0"})
    (run / STATEMENT).write_text(json.dumps(fitted(added)))
    assert "../other" in failed(run)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_cells_that_are_not_numbers_are_detected(run: Path, value: str) -> None:
    text = (run / STATEMENT).read_text()
    epsilon = json.loads(text)["proven"][0]["epsilon"]
    (run / STATEMENT).write_text(text.replace(f'"epsilon": {epsilon}', f'"epsilon": {value}', 1))
    assert STATEMENT in failed(run)


@pytest.mark.parametrize("way", WAYS)
def test_every_field_of_the_summary_is_checked(run: Path, way: str) -> None:
    original = json.loads((run / "summary.json").read_text())
    for place in places(original):
        document = changed(original, place, WAYS[way])
        if document != original:
            (run / "summary.json").write_text(json.dumps(document, indent=2) + "\n")
            assert "summary.json" in failed(run), place


def test_every_field_of_the_configuration_is_checked(run: Path) -> None:
    path = run / "config.toml"
    path.write_text(tomli_w.dumps({"method": {"name": "m", "clip": 1.0}, "run": {"rounds": 3, "seeds": [0]}}))
    statement = json.loads((run / STATEMENT).read_text())
    statement["files"]["config.toml"] = statement_file._sha256(path.read_bytes())
    (run / STATEMENT).write_text(json.dumps(fitted(statement)))
    assert failed(run) == {}
    original = tomllib.loads(path.read_text())
    for place in places(original):
        path.write_text(tomli_w.dumps(changed(original, place, other)))
        assert set(failed(run)) == {"config.toml"}, place


def test_every_weight_is_checked(run: Path) -> None:
    path = run / "model.safetensors"
    original = safetensors.torch.load(path.read_bytes())
    for name, tensor in original.items():
        for place in range(tensor.numel()):
            weights = {key: value.clone() for key, value in original.items()}
            weights[name].view(-1)[place] += 2**-10
            path.write_bytes(safetensors.torch.save(weights))
            assert set(failed(run)) == {"model.safetensors"}, (name, place)


@pytest.mark.parametrize("fits", [False, True])
def test_every_field_of_the_ledger_is_checked(run: Path, fits: bool) -> None:
    """Also where the chain of hashes and the head are made to fit: the statement names the head."""
    path, head = run / "ledger.jsonl", run / "ledger.jsonl.head"
    original = [json.loads(line) for line in path.read_text().splitlines()]
    for line, entry in enumerate(original):
        for place in places(entry):
            entries = [*original[:line], changed(entry, place, other), *original[line + 1 :]]
            if fits:
                for at in range(len(entries)):
                    entries[at] = fitted(entries[at] | ({"previous": entries[at - 1]["hash"]} if at else {}))
                head.write_text(json.dumps({"entries": len(entries), "hash": entries[-1]["hash"]}))
            if entries == original:
                continue  # the hash was made to fit again
            path.write_text("".join(json.dumps(item) + "\n" for item in entries))
            assert "ledger" in failed(run), (line, place)


@pytest.mark.parametrize("name", [".run", ".data", ".salt", "ledger.jsonl.head", "rounds.jsonl"])
def test_every_other_file_is_checked(run: Path, name: str) -> None:
    data = (run / name).read_bytes()
    for at in range(0, len(data), max(1, len(data) // 50)):
        (run / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert failed(run), at
    (run / name).unlink()
    assert failed(run)


def test_a_ledger_beside_the_run_is_not_called_shared(run: Path) -> None:
    """Else entries that were added later would count as those of other runs."""
    statement = json.loads((run / STATEMENT).read_text())
    statement["ledger"] = statement["ledger"] | {"shared": True, "entries": 0, "head": None}
    (run / STATEMENT).write_text(json.dumps(fitted(statement)))
    found = {check.name for check in verify(run, run / "ledger.jsonl") if not check.passed}
    assert "ledger" in found


def test_the_command_names_what_differs_and_ends_with_1(run: Path) -> None:
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    statement = json.loads((run / STATEMENT).read_text())
    statement["proven"][0]["epsilon"] = 0.5
    (run / STATEMENT).write_text(json.dumps(fitted(statement)))
    result = CliRunner().invoke(app, ["verify", str(run)])
    row = statement["proven"][0]
    assert result.exit_code == 1
    assert f"FAILED  epsilon, {row['unit']} against {row['adversary']}" in result.output
    assert "FAILED  claims: differs from summary.json in proven" in result.output
