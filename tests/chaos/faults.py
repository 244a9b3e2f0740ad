"""Faults on purpose: after each, a resumed run must end in the same model, bit for bit, and every round whose
result was on disk must be on the ledger.

`make chaos` (or `python -m tests.chaos.faults --kills 50`) runs all of them and prints how many were tried and
survived; it exits with 1 if any was not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import fedveil
from fedveil.data.client_data import ArrayClients
from fedveil.errors import FedveilError
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.models.registry import make_model
from fedveil.privacy.ledger import Ledger
from fedveil.session.options import PrivacySettings
from fedveil.session.results import ResultFolder
from fedveil.task import Task

ROUNDS = 12
_FORK = multiprocessing.get_context("fork")


class NotSurvivedError(Exception):
    """A guarantee that did not hold."""


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise NotSurvivedError(promise)


def train(
    folder: Path, *, workers: int = 1, seed: int = 0, ledger: Path | None = None, rounds: int = ROUNDS
) -> None:
    """The run that is disturbed: user-level DP on digits, a checkpoint every second round, a full transcript."""
    x, y = load_digits(return_X_y=True)
    parts = np.array_split(np.random.default_rng(0).permutation(len(x)), 10)
    clients = ArrayClients(
        torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y), [torch.from_numpy(part) for part in parts]
    )
    method = UDPFedAvg(noise_multiplier=1.0, clip=1.0, lr=0.1, epochs=3, batch_size=16)
    fedveil.run(
        Task(lambda: make_model("mlp-2", (64,), 10)),
        clients,
        method,
        rounds=rounds,
        cohort=4,
        seed=seed,
        noise="seeded",
        results=folder,
        privacy=PrivacySettings(ledger=ledger),
        checkpoint_every=2,
        transcript=True,
        workers=workers,
        execution="one-by-one",
    )


def _quietly(go: Callable[[], None]) -> None:
    """In a child process: one thread, no output, exit code 2 for an error that names its remedy."""
    os.setsid()
    torch.set_num_threads(1)
    try:
        go()
    except FedveilError:
        os._exit(2)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(0)


def start(go: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    process = _FORK.Process(target=_quietly, args=(go,))
    process.start()
    return process


def _code(process: multiprocessing.process.BaseProcess, seconds: float = 120) -> int:
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise NotSurvivedError("the run hung")
    return process.exitcode


def released(folder: Path) -> set[int]:
    """The rounds of which something left a client or the server."""
    wire = {int(path.name.removeprefix("round-")) for path in (folder / "transcript").glob("round-*")}
    return wire | {line["round"] for line in ResultFolder(folder).rounds()}


def charged(ledger: Path) -> set[int]:
    return {entry.round for entry in Ledger(ledger).entries}


def _never_too_little(folder: Path) -> None:
    missing = released(folder) - charged(folder / "ledger.jsonl")
    _require(not missing, f"rounds {sorted(missing)} were released but are not on the ledger")


class Laboratory:
    """The undisturbed run, and a fresh folder for each fault."""

    def __init__(self, place: Path) -> None:
        self.place = place
        began = time.monotonic()
        self._run(place / "whole")
        self.seconds = time.monotonic() - began
        self.model = (place / "whole" / "model.safetensors").read_bytes()
        self.entries = len(Ledger(place / "whole" / "ledger.jsonl").entries)
        self._count = 0

    def _run(self, folder: Path, workers: int = 1) -> None:
        process = start(lambda: train(folder, workers=workers))
        _require(_code(process) == 0, "the run did not finish")

    def fresh(self) -> Path:
        self._count += 1
        return self.place / f"fault-{self._count}"

    def finishes_the_same(self, folder: Path, workers: int = 1) -> None:
        _never_too_little(folder)
        self._run(folder, workers)
        _require((folder / "model.safetensors").read_bytes() == self.model, "the resumed model differs")
        ledger = Ledger(folder / "ledger.jsonl")
        _require(len(ledger.entries) == self.entries, "a replayed round was not charged exactly once")
        _require(not list(folder.rglob("*.tmp")), "half-written files were left behind")


def killed(lab: Laboratory, rng: np.random.Generator) -> None:
    """SIGKILL at a random moment, up to three times in a row, with and without worker processes."""
    folder = lab.fresh()
    workers = int(rng.integers(1, 3))
    for _ in range(int(rng.integers(1, 4))):
        process = start(lambda: train(folder, workers=workers))
        process.join(float(rng.uniform(0, 1.1 * lab.seconds)))
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)  # only the run itself: its workers must notice
        process.join()
        if process.pid is not None:
            _require(_group_ends(process.pid), "worker processes outlived the run")
        if folder.exists():
            _never_too_little(folder)
    lab.finishes_the_same(folder, workers)


def killed_at_a_write(lab: Laboratory, rng: np.random.Generator) -> None:
    """SIGKILL just before or after the disk confirms a write: of the ledger, its head, a checkpoint, a transcript."""
    folder = lab.fresh()
    left, after = int(rng.integers(1, 160)), bool(rng.random() < 0.5)

    def doomed() -> None:
        real, calls = os.fsync, iter(range(left, -1, -1))

        def fsync(file: int) -> None:
            last = next(calls, 1) == 0
            if after or not last:
                real(file)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync  # type: ignore[assignment]
        train(folder)

    _require(_code(start(doomed)) in (0, -signal.SIGKILL), "the run did not end as it was made to")
    lab.finishes_the_same(folder)


def interrupted(lab: Laboratory, rng: np.random.Generator) -> None:
    """Ctrl-C, or the SIGTERM of whoever stops the machine: nothing outlives the run."""
    folder = lab.fresh()
    workers = int(rng.integers(1, 3))
    process = start(lambda: train(folder, workers=workers))
    process.join(float(rng.uniform(0.2, 1.0)) * lab.seconds)
    if process.exitcode is None and process.pid is not None:
        os.kill(process.pid, signal.SIGINT if rng.random() < 0.5 else signal.SIGTERM)
    _code(process)
    assert process.pid is not None
    _require(_group_ends(process.pid), "worker processes outlived the run")
    lab.finishes_the_same(folder, workers)


def worker_killed(lab: Laboratory, rng: np.random.Generator) -> None:
    """The system kills a worker for its memory: the run says so, and resumes when it is started again."""
    folder = lab.fresh()
    process = start(lambda: train(folder, workers=2))
    assert process.pid is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (found := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(float(rng.uniform(0, 0.5)) * lab.seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(found[int(rng.integers(len(found)))]), signal.SIGKILL)
    _require(_code(process) in (0, 2), "a killed worker was not reported as an error to fix")
    lab.finishes_the_same(folder, 2)


def _group_ends(group: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    os.killpg(group, signal.SIGKILL)
    return False


def full_disk(lab: Laboratory, rng: np.random.Generator) -> None:
    """No file can grow past a random size; then there is room again."""
    folder = lab.fresh()
    size = int(rng.integers(200, 40_000))

    def cramped() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        train(folder)

    _require(_code(start(cramped)) == 2, "a full disk was not reported as an error to fix")
    lab.finishes_the_same(folder)


@contextlib.contextmanager
def _small_disk(place: Path, kilobytes: int) -> Iterator[None]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise PermissionError("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def full_file_system(lab: Laboratory, rng: np.random.Generator) -> None:
    """A file system with no room left; then another file is removed from it."""
    place = lab.fresh()
    with _small_disk(place, 1600):
        ballast = place / "ballast"
        ballast.write_bytes(bytes(1024 * int(rng.integers(1000, 1560))))
        _require(_code(start(lambda: train(place / "run"))) == 2, "a full disk was not reported")
        ballast.unlink()
        lab.finishes_the_same(place / "run")


def unwritable(lab: Laboratory, rng: np.random.Generator) -> None:
    """A results folder that cannot be made: said at once, nothing written; elsewhere the run works."""
    file = lab.fresh()
    file.write_text("")
    _require(_code(start(lambda: train(file / "run"))) == 2, "an unwritable folder was not reported")
    _require(file.read_text() == "", "something was written")
    lab.finishes_the_same(_begun(lab, rng))


def read_only(lab: Laboratory, rng: np.random.Generator) -> None:
    """A file system that turns read-only between two starts of a run; then it can be written again."""
    place = lab.fresh()
    with _small_disk(place, 16_000):
        folder = _begun(lab, rng, place / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        try:
            _require(_code(start(lambda: train(folder))) == 2, "a read-only folder was not reported")
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        lab.finishes_the_same(folder)


def _begun(lab: Laboratory, rng: np.random.Generator, folder: Path | None = None) -> Path:
    """A folder whose run was killed after some checkpoints."""
    folder = folder or lab.fresh()
    process = start(lambda: train(folder))
    wanted = int(rng.integers(1, ROUNDS // 2 - 1))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.exitcode is None:
        saved = [int(path.stem.removeprefix("round-")) for path in folder.glob("checkpoint/round-*.ckpt")]
        if saved and max(saved) >= 2 * wanted:
            break
        time.sleep(0.001)
    process.kill()
    process.join()
    return folder


def clock_jumps(lab: Laboratory, rng: np.random.Generator) -> None:
    """The wall clock jumps by up to ten years, forward and back, every time it is read."""
    folder = lab.fresh()
    years = rng.uniform(-10, 10, 1000) * 3.15e7

    def confused() -> None:
        real = time.time
        jumps = iter(np.tile(years, 1000))
        time.time = lambda: real() + float(next(jumps))
        train(folder)

    _require(_code(start(confused)) == 0, "the run did not finish")
    lab.finishes_the_same(folder)


def one_folder_twice(lab: Laboratory, _rng: np.random.Generator) -> None:
    """Two processes on one results folder: one is refused or reads the finished run, the other is undisturbed."""
    folder = lab.fresh()
    codes = sorted(_code(process) for process in [start(lambda: train(folder)) for _ in range(2)])
    _require(codes in ([0, 2], [0, 0]), f"exit codes {codes}")
    lab.finishes_the_same(folder)


def one_ledger_twice(lab: Laboratory, _rng: np.random.Generator) -> None:
    """Two runs that share a ledger: every round of both is on it, and its chain holds."""
    place = lab.fresh()
    ledger = place / "ledger.jsonl"
    runs = [
        start(lambda seed=seed: train(place / f"run-{seed}", seed=seed, ledger=ledger))  # type: ignore[misc]
        for seed in (0, 1)
    ]
    _require([_code(process) for process in runs] == [0, 0], "a run did not finish")
    entries = Ledger(ledger).entries  # verifies the whole chain
    rounds = {(entry.run, entry.round) for entry in entries}
    _require(len(rounds) == 2 * ROUNDS and len(entries) == 2 * lab.entries, "rounds are missing")


def damaged_checkpoint(lab: Laboratory, rng: np.random.Generator) -> None:
    """The newest checkpoint cut off, or a byte of it changed, at a random place."""
    folder = _begun(lab, rng)
    newest = max((folder / "checkpoint").glob("round-*.ckpt"))
    data = newest.read_bytes()
    place = int(rng.integers(0, len(data)))
    harmed = (
        data[:place] if rng.random() < 0.5 else data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    )
    newest.write_bytes(harmed)
    lab.finishes_the_same(folder)


def emptied_checkpoints(lab: Laboratory, rng: np.random.Generator) -> None:
    """What some file systems leave of files after a power cut: their names."""
    folder = _begun(lab, rng)
    for path in (folder / "checkpoint").glob("round-*.ckpt"):
        path.write_bytes(b"")
    lab.finishes_the_same(folder)


def torn_rounds(lab: Laboratory, rng: np.random.Generator) -> None:
    """The record of rounds cut off anywhere, zeros or noise in place of the rest: no round is missing afterwards."""
    folder = _begun(lab, rng)
    log = folder / "rounds.jsonl"
    whole = log.read_bytes()
    cut = int(rng.integers(0, len(whole)))
    log.write_bytes(whole[:cut] + [b"", bytes(100), rng.bytes(100)][int(rng.integers(3))])
    _never_too_little(folder)
    lab.finishes_the_same(folder)
    _require([line["round"] for line in ResultFolder(folder).rounds()] == [*range(1, ROUNDS + 1)], "a gap")


def folder_removed(lab: Laboratory, rng: np.random.Generator) -> None:
    """Somebody removes the results while they are written: an error, and the next start begins anew."""
    folder = _begun(lab, rng)
    process = start(lambda: train(folder))
    process.join(float(rng.uniform(0.1, 0.6)) * lab.seconds)
    with contextlib.suppress(OSError):  # the run writes meanwhile
        shutil.rmtree(folder)
    _require(_code(process) in (0, 2), "removed results were not reported")
    shutil.rmtree(folder, ignore_errors=True)
    lab.finishes_the_same(folder)


def lost_ledger(lab: Laboratory, rng: np.random.Generator) -> None:
    """The ledger and its head are deleted: a run that has completed rounds does not begin another ledger."""
    folder = _begun(lab, rng)
    kept = {path: path.read_bytes() for path in folder.glob("ledger.jsonl*")}
    for path in kept:
        path.unlink()
    _require(_code(start(lambda: train(folder))) == 2, "a run went on without the ledger of its rounds")
    _require(not (folder / "ledger.jsonl").exists(), "another ledger was begun")
    for path, content in kept.items():
        path.write_bytes(content)
    lab.finishes_the_same(folder)


def torn_ledger(lab: Laboratory, rng: np.random.Generator) -> None:
    """A line of the ledger that a crash cut off; a ledger that someone shortened is refused."""
    folder = _begun(lab, rng)
    ledger = folder / "ledger.jsonl"
    whole = ledger.read_bytes()
    # Lines that the head does not vouch for yet were never released: one that it does vouch for is cut.
    vouched = json.loads(ledger.with_name("ledger.jsonl.head").read_text())["entries"]
    ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[: vouched - 1]))
    _require(_code(start(lambda: train(folder))) == 2, "a shortened ledger was believed")
    ledger.write_bytes(whole + b'{"index": 99, "run": "x')
    lab.finishes_the_same(folder)


Fault = Callable[[Laboratory, np.random.Generator], None]
FAULTS: dict[str, tuple[Fault, int]] = {
    "killed at a random moment": (killed, 0),
    "killed at a write": (killed_at_a_write, 10),
    "interrupted": (interrupted, 4),
    "worker killed": (worker_killed, 4),
    "file size limit reached": (full_disk, 5),
    "file system full": (full_file_system, 3),
    "unwritable folder": (unwritable, 1),
    "read-only file system": (read_only, 2),
    "clock jumps": (clock_jumps, 1),
    "two runs, one folder": (one_folder_twice, 2),
    "two runs, one ledger": (one_ledger_twice, 2),
    "damaged checkpoint": (damaged_checkpoint, 10),
    "emptied checkpoints": (emptied_checkpoints, 1),
    "torn record of rounds": (torn_rounds, 6),
    "results removed meanwhile": (folder_removed, 2),
    "torn or shortened ledger": (torn_ledger, 2),
    "lost ledger": (lost_ledger, 2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    console = Console()
    table = Table("fault", "tried", "survived")
    all_tried = all_survived = 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lab = Laboratory(Path(folder))
        for name, (fault, times) in FAULTS.items():
            tried = survived = 0
            for _ in range(times or options.kills):
                try:
                    fault(lab, rng)
                except PermissionError as error:
                    console.print(f"{name}: not tried, {error}")
                    break
                except NotSurvivedError as error:
                    console.print(f"{name}: {error}", style="red")
                else:
                    survived += 1
                tried += 1
            table.add_row(name, str(tried), str(survived))
            all_tried, all_survived = all_tried + tried, all_survived + survived
    table.add_section()
    table.add_row("all", str(all_tried), str(all_survived))
    console.print(table)
    return int(all_survived < all_tried)


if __name__ == "__main__":
    sys.exit(main())
