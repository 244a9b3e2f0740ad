"""A statement that holds is verified; a change of any file of the run is found."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import fedveil
from fedveil.privacy.ledger import Entry, Ledger
from fedveil.session.model_file import CHECKSUM
from fedveil.session.statement_file import (
    SCHEMA,
    STATEMENT,
    Check,
    hash_of,
    summary_bytes,
    verify,
    write_statement,
)


def train(
    folder: Path,
    *,
    ledger: Path | None = None,
    noise: str = "entropy",
    method: str = "udp-fedavg",
    **fields: float,
) -> Path:
    data = [(torch.randn(15, 5), torch.randint(0, 2, (15,))) for _ in range(4)]
    task = fedveil.Task(lambda: torch.nn.Linear(5, 2))
    fedveil.run(
        task,
        data,
        fedveil.METHODS[method](**fields),
        rounds=2,
        cohort=2,
        noise=noise,  # type: ignore[arg-type]
        test=data[0],
        results=folder,
        privacy=fedveil.PrivacySettings(ledger=ledger),
    )
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if not check.passed}


def test_an_untouched_run_is_verified(run: Path) -> None:
    checks = verify(run)
    assert failed(checks) == set()
    assert {"ledger", "data", "summary.json", "epsilon, client against observer"} <= {c.name for c in checks}


@pytest.mark.parametrize("method", ["fedavg", "udp-fedavg"])
@pytest.mark.parametrize("noise", ["seeded", "entropy"])
def test_runs_of_every_noise_are_verified(tmp_path: Path, noise: str, method: str) -> None:
    assert failed(verify(train(tmp_path / "run", noise=noise, method=method))) == set()


@pytest.mark.parametrize("name", ["config.toml", "rounds.jsonl", "model.safetensors", "summary.json"])
@pytest.mark.parametrize("how", ["changed", "removed", "longer"])
def test_a_changed_file_fails_verification(run: Path, name: str, how: str) -> None:
    path = run / name
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(data + b" " if how == "longer" else data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    assert name in failed(verify(run))


@pytest.mark.parametrize("name", [".data", ".salt"])
@pytest.mark.parametrize("removed", [True, False])
def test_other_data_fails_verification(run: Path, name: str, removed: bool) -> None:
    if removed:
        (run / name).unlink()
    else:
        (run / name).write_text("0" * 32)
    salted = {"rounds.jsonl", "summary.json"} if name == ".salt" else set()
    assert failed(verify(run)) == {"data"} | salted


def test_a_smaller_epsilon_in_the_statement_fails_verification(run: Path) -> None:
    stated = json.loads((run / STATEMENT).read_text())
    stated["proven"][0]["epsilon"] = 0.1
    (run / STATEMENT).write_text(json.dumps(stated))
    assert STATEMENT in failed(verify(run))


def test_a_forged_statement_with_a_valid_hash_fails_against_the_ledger(run: Path) -> None:
    stated = json.loads((run / STATEMENT).read_text())
    del stated["hash"]
    stated["proven"][0]["epsilon"] = 0.1
    (run / STATEMENT).write_text(json.dumps(stated | {"hash": Entry.digest(stated)}))
    row = stated["proven"][0]
    assert failed(verify(run)) >= {"claims", f"epsilon, {row['unit']} against {row['adversary']}"}


def test_consistently_rewritten_files_pass_and_only_an_external_head_differs(
    run: Path, tmp_path: Path
) -> None:
    """What verification cannot show: the model had little noise, everything else is of a run with much."""
    forged = train(tmp_path / "forged", noise_multiplier=50.0)
    kept = json.loads((run / STATEMENT).read_text())["ledger"]["head"]
    shutil.copy(run / "model.safetensors", forged)
    summary = json.loads((forged / "summary.json").read_text())
    summary[CHECKSUM] = json.loads((run / "summary.json").read_text())[CHECKSUM]
    (forged / "summary.json").write_bytes(summary_bytes(summary))
    stated = json.loads((forged / STATEMENT).read_text())
    del stated["hash"]
    for name in ("model.safetensors", "summary.json"):
        stated["files"][name] = hash_of(forged, name)
    (forged / STATEMENT).write_text(json.dumps(stated | {"hash": Entry.digest(stated)}))
    assert failed(verify(forged)) == set()
    assert stated["ledger"]["head"] != kept


def test_a_guarantee_left_out_of_all_files_is_found_on_the_ledger(run: Path) -> None:
    """The large epsilon against the server is not mentioned anywhere."""
    summary = json.loads((run / "summary.json").read_text())
    stated = json.loads((run / STATEMENT).read_text())
    del stated["hash"]
    for told in (summary["privacy"], stated):
        told["proven"] = [row for row in told["proven"] if row["adversary"] != "server"]
    (run / "summary.json").write_bytes(summary_bytes(summary))
    stated["files"]["summary.json"] = hash_of(run, "summary.json")
    (run / STATEMENT).write_text(json.dumps(stated | {"hash": Entry.digest(stated)}))
    assert failed(verify(run)) == {"rows"}


@pytest.mark.parametrize(
    "how", ["line removed", "changed", "removed", "head removed", "head changed", "longer"]
)
def test_a_changed_ledger_fails_verification(run: Path, how: str) -> None:
    path, head = run / "ledger.jsonl", run / "ledger.jsonl.head"
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "line removed":
        path.write_bytes(b"".join(lines[:-1]))
    elif how == "changed":
        path.write_bytes(b"".join(lines).replace(b'"cohort": 2', b'"cohort": 1'))
    elif how == "removed":
        path.unlink()
    elif how == "head removed":
        head.unlink()
    elif how == "head changed":
        head.write_text('{"entries": 1, "hash": "0"}')
    else:
        ledger = Ledger(path)
        entry = ledger.entries[0]
        plan = fedveil.Plan(clients=4, cohort=2, sampler="fixed", rounds=3)
        ledger.charge(entry.run, 3, [entry.release], plan, replay_safe=True)
    assert "ledger" in failed(verify(run))


def test_a_consistently_truncated_ledger_fails_against_the_statement(run: Path) -> None:
    path = run / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[:-1]
    path.write_bytes(b"".join(lines))
    last = json.loads(lines[-1])["hash"]
    (run / "ledger.jsonl.head").write_text(json.dumps({"entries": len(lines), "hash": last}))
    assert "ledger" in failed(verify(run))


def test_a_shared_ledger_may_grow(tmp_path: Path) -> None:
    shared = tmp_path / "shared.jsonl"
    first = train(tmp_path / "first", ledger=shared)
    second = train(tmp_path / "second", ledger=shared)
    assert failed(verify(first, shared)) == set()
    assert failed(verify(second, shared)) == set()
    assert failed(verify(first)) == {"ledger"}


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "{"])
def test_no_statement_is_not_verified(run: Path, text: str) -> None:
    (run / STATEMENT).write_text(text)
    assert STATEMENT in failed(verify(run))


def test_the_statement_holds_no_digest_of_the_data_and_no_seed(run: Path) -> None:
    text = (run / STATEMENT).read_text()
    assert (run / ".data").read_text() not in text
    assert (run / ".salt").read_text() not in text
    assert "seed" not in json.loads(text)
    assert json.loads(text)["schema"] == SCHEMA


def test_the_published_statement_confirms_no_guess_of_a_private_file(run: Path) -> None:
    """Who knows all records but one, and tries all times, knows these files but for that record: scores without noise,
    the sizes of cohorts. A hash alone would tell which guess is right."""
    stated = json.loads((run / STATEMENT).read_text())
    others = {
        name: hash_ for name, hash_ in stated["files"].items() if name in ("rounds.jsonl", "summary.json")
    }
    assert len(others) == 2
    for name, told in others.items():
        assert told != hashlib.sha256((run / name).read_bytes()).hexdigest()
    (run / ".salt").unlink()
    write_statement(run, stated["run"], json.loads((run / "summary.json").read_text()), run / "ledger.jsonl")
    again = json.loads((run / STATEMENT).read_text())["files"]
    assert {name for name in again if again[name] != stated["files"][name]} == set(others)


def test_a_statement_of_the_earlier_schema_is_verified(run: Path) -> None:
    stated = json.loads((run / STATEMENT).read_text())
    del stated["hash"]
    stated["schema"] = "fedveil-statement/1"
    (run / STATEMENT).write_text(json.dumps(stated | {"hash": Entry.digest(stated)}))
    assert failed(verify(run)) == {"rounds.jsonl", "summary.json"}
    stated["files"] = {
        name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in stated["files"]
    }
    (run / STATEMENT).write_text(json.dumps(stated | {"hash": Entry.digest(stated)}))
    assert failed(verify(run)) == set()
