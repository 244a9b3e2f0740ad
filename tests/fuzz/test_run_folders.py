"""Whatever lies in a run's folder, resuming gives the same run or an error that says what to do, never less privacy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import fedveil
from fedveil.errors import LedgerError, ResultError
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.session.results import Result
from tests.contract.federation import make_clients, make_task
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("bounded")

ROUNDS = 6


def train(folder: Path) -> Result:
    method = UDPFedAvg(noise_multiplier=1.0, clip=1.0, lr=0.1, epochs=1, batch_size=4)
    return fedveil.run(
        make_task(), make_clients(), method, rounds=ROUNDS, cohort=3, results=folder, checkpoint_every=2,
        workers=1, execution="one-by-one", noise="seeded",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def begun(whole: Result, tmp_path: Path) -> Path:
    """The folder of a run that was killed just before its end."""
    assert whole.folder is not None
    folder = tmp_path / "run"
    shutil.copytree(whole.folder, folder)
    for name in ("summary.json", "model.safetensors"):
        (folder / name).unlink()
    return folder


CONTENT = {
    "nothing": b"",
    "zeros": bytes(300),
    "no text": b"\xff\xfe\n",
    "a list": b"[]\n",
    "a number": b"3\n",
    "no round": b'{"a": 1}\n',
    "a round of a half": b'{"round": 0.5}\n',
    "nested without end": b"[" * 100_000 + b"\n",
    "a number without end": b'{"round": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("kind", CONTENT)
def test_damaged_rounds_are_replayed(kind: str, begun: Path, whole: Result) -> None:
    (begun / "rounds.jsonl").write_bytes(CONTENT[kind])
    result = train(begun)
    assert all(torch.equal(leaf, whole.model[name]) for name, leaf in result.model.items())
    assert [line["round"] for line in result.history] == [*range(1, ROUNDS + 1)]
    assert result.summary["bytes_up"] == whole.summary["bytes_up"]
    assert (begun / "ledger.jsonl").read_bytes().count(b"\n") == ROUNDS * 2


@pytest.mark.parametrize("kind", ["nothing", "zeros", "no text"])
def test_damaged_checkpoints_are_passed_over(kind: str, begun: Path, whole: Result) -> None:
    for path in (begun / "checkpoint").glob("*.ckpt"):
        path.write_bytes(CONTENT[kind])
    result = train(begun)
    assert all(torch.equal(leaf, whole.model[name]) for name, leaf in result.model.items())


def test_a_run_does_not_resume_without_the_ledger_of_its_rounds(begun: Path) -> None:
    for path in begun.glob("ledger.jsonl*"):
        path.unlink()
    with refuses("round", LedgerError, value=1):
        train(begun)
    assert not (begun / "ledger.jsonl").exists()


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors", ".identity"])
@pytest.mark.parametrize("kind", CONTENT)
def test_a_damaged_result_is_refused(name: str, kind: str, whole: Result, tmp_path: Path) -> None:
    assert whole.folder is not None
    shutil.copytree(whole.folder, tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(CONTENT[kind])
    with refuses("configuration" if name == ".identity" else "results", ResultError):
        train(tmp_path / "run")
