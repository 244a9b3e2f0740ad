"""A run's folder: written crash-safely, and readable without fedveil.

`config.toml`, `rounds.jsonl`, `ledger.jsonl`, `model.safetensors`, `checkpoint/`, `transcript/`, `statement.json`, and
finally `summary.json`, whose presence marks the run as finished. A finished folder's files are never overwritten.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import safetensors

from fedveil.atomic_files import remove_leftovers, sync, write_atomically, writing
from fedveil.engines.engine import Engine
from fedveil.errors import ResultError
from fedveil.lazy_torch import safetensors_torch, torch
from fedveil.messages import Message, Record
from fedveil.methods.method import At
from fedveil.numerics import MARK, numerics_of, require_numerics
from fedveil.session.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedveil.session.loop import Callback, RoundEnd
from fedveil.session.model_file import CHECKSUM, MODEL, model_problems, write_model
from fedveil.session.statement_file import summary_bytes, write_statement
from fedveil.tree import Params

_ALWAYS = {"method", "seed", "rounds", "seconds", "bytes_up", "bytes_down", "stopped", "privacy"}


@dataclass(frozen=True)
class Result:
    """A finished (or stopped) run.

    Args:
        summary: The content of `summary.json`: scores, traffic, plan and privacy statement.
        history: One entry per round.
        model: The trained parameters.
        folder: The run's folder; None if it is not recorded.
    """

    summary: dict[str, Any]
    history: list[dict[str, Any]]
    model: Params
    folder: Path | None

    @property
    def accuracy(self) -> float | None:
        value = self.summary.get("accuracy")
        return None if value is None else float(value)

    @property
    def privacy(self) -> dict[str, Any]:
        """The privacy statement: the paper's claim, the guarantees against each adversary, the audit."""
        statement: dict[str, Any] = self.summary["privacy"]
        return statement


class ResultFolder:
    """One run's folder, which one process at a time may write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    def run(self) -> str:
        """A unique name of the run, kept if the folder is moved: its original place, and random digits."""
        try:
            return self._run_mark.read_text()
        except (OSError, UnicodeDecodeError):  # no name yet, or a folder that `held` will refuse
            return f"{'/'.join(self.path.parts[-3:])} {secrets.token_hex(6)}"

    def begin(self) -> str:
        """The run's name, stored in the folder; call it while the folder is held."""
        name = self.run()
        if not self._run_mark.exists():
            write_atomically(self._run_mark, name.encode())
        return name

    @property
    def _run_mark(self) -> Path:
        return self.path / ".run"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other processes."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ResultError(
                f"cannot write results to {self.path}: {error.strerror}. Choose another folder with --results.",
                field="results",
                value=str(self.path),
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise self._in_use() from error
        try:
            yield
        finally:
            lock.close()

    def require_unheld(self) -> None:
        """Refuse a folder locked by another process, before its incomplete ledger is read."""
        with suppress(OSError), (self.path / ".lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                raise self._in_use() from error

    def _in_use(self) -> ResultError:
        return ResultError(
            f"{self.path} is in use by another process. Wait for it, or choose another folder.",
            field="lock",
            value=str(self.path),
        )

    def require(self, identity: str) -> None:
        """Refuse a folder of another identity, which covers everything the result depends on except the data."""
        mark = self.path / ".identity"
        if mark.exists() and mark.read_bytes() != identity.encode():
            raise ResultError(
                f"{self.path} holds a run of another configuration: its method, clients, rounds, seed or model "
                "differ. Remove it or choose another folder.",
                field="configuration",
                value=str(self.path),
            )

    def require_numerics(self, current: int) -> None:
        """Refuse a folder of other numerics, whose rounds and result cannot be combined with new ones."""
        require_numerics(self.path, numerics_of(self.path), current)

    def require_data(self, digest: str | None) -> None:
        """Refuse a folder of other data of the same shape: its result is not that of this data, and rounds replayed
        with the same noise on other data would disclose the difference without noise."""
        mark = self.path / ".data"
        if digest is not None and mark.exists() and mark.read_text() != digest:
            raise ResultError(
                f"{self.path} holds a run on other data: the clients' examples or the test set have changed since. "
                "Remove it, or choose another folder with --results.",
                field="data",
                value=str(self.path),
            )

    def start(
        self,
        config: str,
        identity: str,
        run: str,
        server_type: type[Record],
        numerics: int,
        data: str | None = None,
        *,
        replay_safe: bool = True,
    ) -> Checkpoint | None:
        """Start, or resume from the newest intact checkpoint; rounds after it are replayed.

        A checkpoint whose rounds are not all recorded is skipped, unless replaying them would make further releases.
        """
        stored = self.path / "config.toml"
        mark = self.path / ".identity"
        remove_leftovers(self.path)
        if not self._run_mark.exists():
            write_atomically(self._run_mark, run.encode())
        elif self.run() != run:
            raise ResultError(
                f"{self.path}: another process has started this run meanwhile. Start again to resume it.",
                field="lock",
                value=str(self.path),
            )
        if not mark.exists():
            write_atomically(stored, config.encode())
            write_atomically(self.path / MARK, f"{numerics}\n".encode())
            if data is not None:
                write_atomically(self.path / ".data", data.encode())
            write_atomically(mark, identity.encode())  # written last: it marks the configuration as complete
        lines = self.rounds()
        recorded = sum(line["round"] == place for place, line in enumerate(lines, 1))
        checkpoint = load_checkpoint(
            self.path / "checkpoint", server_type, numerics, most=recorded if replay_safe else None
        )
        keep = [line for line in lines if checkpoint and line["round"] <= checkpoint.round]
        text = "".join(json.dumps(line) + "\n" for line in keep)
        write_atomically(self.path / "rounds.jsonl", text.encode())
        return checkpoint

    def rounds(self) -> list[dict[str, Any]]:
        """The recorded rounds, up to the first incomplete or damaged line."""
        path = self.path / "rounds.jsonl"
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ResultError(
                f"{path} cannot be read: {error.strerror}. Remove it or fix the disk.",
                field="rounds.jsonl",
                value=error.strerror,
            ) from error
        lines: list[dict[str, Any]] = []
        for text in content.split(b"\n"):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                break
            if not isinstance(line, dict) or type(line.get("round")) is not int:
                break
            lines.append(line)
        return lines

    def finish(self, model: Params, summary: Mapping[str, Any], ledger: Path | None) -> dict[str, Any]:
        """Write the model, the statement and then the summary, which is returned with the model's checksum."""
        whole = dict(summary) | {CHECKSUM: write_model(self.path, model)}
        write_statement(self.path, self.run(), whole, ledger)
        write_atomically(self.path / "summary.json", summary_bytes(whole))
        return whole

    def read(self) -> Result:
        """The finished run in this folder."""
        if not self.finished:
            raise ResultError(
                f"{self.path} holds no finished run: summary.json is missing. Run it again to finish it, or give "
                "another folder: `fedveil list results` names them.",
                field="summary.json",
            )
        try:
            summary = json.loads((self.path / "summary.json").read_text())
            if not isinstance(summary, dict) or not summary.keys() >= _ALWAYS:
                raise ValueError("summary.json is not a run's summary")
            if problems := model_problems(self.path, summary):
                raise ValueError(problems[0])
            model = safetensors_torch.load_file(self.path / MODEL)
        except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
            raise ResultError(
                f"{self.path} is damaged: {error}. Restore it from a copy, or remove it and run it again.",
                field="results",
                value=str(self.path),
            ) from error
        return Result(summary, self.rounds(), model, self.path)


class RoundLog(Callback):
    """Appends each round's metrics to `rounds.jsonl` and keeps them in memory."""

    def __init__(self, history: list[dict[str, Any]], path: Path | None) -> None:
        self.history = history
        self._path = path

    def round_ends(self, end: RoundEnd) -> None:
        line = {"round": end.at.round, **end.metrics}
        self.history.append(line)
        if self._path is not None:
            with writing(self._path), self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Checkpoints(Callback):
    """Saves the run every `every` rounds, and on request (an interrupted run) after the last complete round."""

    def __init__(self, folder: Path, engine: Engine, every: int, numerics: int) -> None:
        self._folder = folder
        self._engine = engine
        self._every = every
        self._numerics = numerics
        self._unsaved: Checkpoint | None = None

    def round_ends(self, end: RoundEnd) -> None:
        # Client states are replaced, never edited, so a shallow copy is enough.
        states = dict(self._engine.state())
        self._unsaved = Checkpoint(end.at.round, end.server, states, self._numerics)
        if end.at.round % self._every == 0 and not end.last:
            self.save()

    def save(self) -> None:
        if self._unsaved is not None:
            # The checkpoint's rounds must be on the disk before the checkpoint.
            sync(self._folder.with_name("rounds.jsonl"))
            save_checkpoint(self._folder, self._unsaved)
            self._engine.saved()
            self._unsaved = None


class Transcript(Callback):
    """Records the messages, for attacks: `transcript/round-R/exchange-E/{down,up}.bin` and the clients.

    Optionally only for some rounds, and for the first so many exchanges of each.
    """

    def __init__(
        self, folder: Path, rounds: Sequence[int] | None = None, exchanges: int | None = None
    ) -> None:
        self._folder = folder
        self._rounds = None if rounds is None else frozenset(rounds)
        self._exchanges = exchanges

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        if self._rounds is not None and at.round not in self._rounds:
            return
        if self._exchanges is not None and at.exchange >= self._exchanges:
            return
        folder = self._folder / f"round-{at.round:06d}" / f"exchange-{at.exchange:04d}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "clients.json", json.dumps(list(cohort)).encode())
        write_atomically(folder / "down.bin", down.to_bytes())
        if up is not None:
            write_atomically(folder / "up.bin", up.to_bytes())


def environment() -> dict[str, Any]:
    """What results depend on besides configuration and seed: versions and machine."""
    return {
        "fedveil": metadata.version("fedveil"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "dp-accounting": metadata.version("dp-accounting"),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
    }
