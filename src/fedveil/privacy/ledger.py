"""The privacy ledger: an append-only file with one entry per release, written before the release is made.

`ledger.jsonl` holds one line per release. Each line contains the hash of the line before, so an altered,
missing or reordered line is detected and the ledger refused. `ledger.jsonl.head` beside it holds the number of
lines and the last hash, so truncation is detected too (unless both files are forged together: the ledger
protects against accidents and careless edits, not against the owner of the disk). The head is written before
the first line, so a ledger with lines and no head is damaged.

A crash while a line is written leaves an incomplete last line. The round's uploads had not been released then, since
`charge` returns only after the disk has confirmed. The incomplete bytes are removed when the ledger is next written;
complete lines stay charged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import InputError, LedgerError, whole_number
from fedveil.privacy.accounting import (
    Cohort,
    Round,
    Rounds,
    account_rounds,
    last_that_fits,
    rounds_of,
)
from fedveil.privacy.releases import Adversary, Plan, Release, Unit

GENESIS = "0" * 64
LOCK_SECONDS = 30.0
_REMEDY = "Restore the file from a copy, or treat the budget as spent."


@dataclass(frozen=True)
class Entry:
    """One charged release, with its run, round and attempt."""

    index: int
    run: str
    round: int
    attempt: int
    cohort: Cohort
    release: Release
    previous: str
    hash: str

    @staticmethod
    def digest(body: dict[str, Any]) -> str:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def write(
        cls, index: int, run: str, round_: int, attempt: int, plan: Plan, release: Release, previous: str
    ) -> Entry:
        cohort = Cohort.of(plan)
        entry = cls(index, run, round_, attempt, cohort, release, previous, "")
        return cls(index, run, round_, attempt, cohort, release, previous, cls.digest(entry._body()))

    def _body(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "run": self.run,
            "round": self.round,
            "attempt": self.attempt,
            "clients": self.cohort.clients,
            "cohort": self.cohort.cohort,
            "sampler": self.cohort.sampler,
            "release": self.release.to_json(),
            "previous": self.previous,
        }

    def line(self) -> bytes:
        return json.dumps({**self._body(), "hash": self.hash}, allow_nan=False).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes, index: int, previous: str) -> Entry:
        """Parse a line; refuses one that is altered or does not follow `previous` at `index`."""
        number = index + 1
        try:
            body = json.loads(line)
            stored = body.pop("hash")
            cohort = Cohort(body["clients"], body["cohort"], body["sampler"])
            release = Release.from_json(body["release"])
            entry = cls(
                body["index"],
                body["run"],
                body["round"],
                body["attempt"],
                cohort,
                release,
                body["previous"],
                stored,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError) as error:
            raise LedgerError(
                f"line {number}: not a ledger entry ({error})", field="entry", value=number
            ) from error
        if cls.digest(body) != stored:
            raise LedgerError(f"line {number}: altered after it was written", field="hash", value=number)
        if entry.index != index or entry.previous != previous:
            raise LedgerError(
                f"line {number}: a line before it is missing or replaced", field="previous", value=number
            )
        return entry


class Ledger:
    """All releases charged so far by every run that shares the file. Safe for concurrent writers."""

    def __init__(self, path: Path) -> None:
        """Open the ledger at `path` (made with its folder at the first charge) and verify all of it."""
        self.path = Path(path)
        self._entries: list[Entry] = []
        self._offset = 0
        self._groups: dict[tuple[str, int, int], list[Entry]] = {}
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._held: int | None = None
        self.refresh()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def refresh(self) -> None:
        """Read and verify what other processes have appended."""
        # The head is read first: lines that another process appends meanwhile are additional to its count.
        head = self._head()
        count, last = head or (0, GENESIS)
        data = self._appended()
        if data is None:
            if self._entries or count:
                raise LedgerError(
                    f"{self.path}: the privacy ledger has disappeared. {_REMEDY}", field="ledger"
                )
            return
        if head is None and (data or self._entries):
            if self._head() is not None:  # another process has just created the ledger
                self.refresh()
                return
            raise LedgerError(
                f"{self.path}: its head is missing, so lines may be missing at its end. {_REMEDY}",
                field="head",
            )
        complete = data.rfind(b"\n") + 1
        for line in data[:complete].splitlines():
            try:
                self._keep(Entry.read(line, len(self._entries), self._last_hash()))
            except LedgerError as error:
                raise LedgerError(
                    f"{self.path}: {error}. {_REMEDY}", field=error.field, value=error.value
                ) from error
        self._offset += complete
        if count > len(self._entries) or (count and self._entries[count - 1].hash != last):
            raise LedgerError(
                f"{self.path}: holds {len(self._entries)} entries where {count} were written. {_REMEDY}",
                field="entries",
                value=len(self._entries),
            )

    def _appended(self) -> bytes | None:
        """The content after the lines that were read before; None if there is no file."""
        try:
            if not self.path.exists():
                return None
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:
                    raise LedgerError(
                        f"{self.path}: the privacy ledger has become shorter. {_REMEDY}",
                        field="size",
                        value=size,
                    )
                file.seek(self._offset)
                return file.read()
        except OSError as error:
            raise LedgerError(
                f"{self.path}: the privacy ledger cannot be opened: {error.strerror}. Choose another path.",
                field="file",
                value=error.strerror,
            ) from error

    def charge(
        self, run: str, round_: int, releases: Sequence[Release], plan: Plan, *, replay_safe: bool
    ) -> int:
        """Charge the releases of round `round_` (from 1) of `run`; returns the number of new lines.

        Returns only after the disk has confirmed, so every later release is on the ledger.
        `replay_safe`: the round draws the same noise each time it is run (simulation), so a resumed round is
        charged once. Otherwise (deployment) each attempt draws fresh noise and is charged again.
        """
        with self._locked() as file:
            self.refresh()
            attempt = 0 if replay_safe else self._attempts[run, round_]
            new: list[Entry] = []
            for release in self._uncharged(run, round_, attempt, releases):
                previous = new[-1].hash if new else self._last_hash()
                index = len(self._entries) + len(new)
                new.append(Entry.write(index, run, round_, attempt, plan, release, previous))
            if new:
                self._append(file, new)
        return len(new)

    def _uncharged(self, run: str, round_: int, attempt: int, releases: Sequence[Release]) -> list[Release]:
        """The releases of an attempt at a round that are not on the ledger yet."""
        charged = Counter(entry.release for entry in self._groups.get((run, round_, attempt), []))
        missing = []
        for release in releases:
            if not release.happens_in(round_):
                continue
            if charged[release] > 0:
                charged[release] -= 1
            else:
                missing.append(release)
        return missing

    def is_charged(self, run: str, round_: int, releases: Sequence[Release] = ()) -> bool:
        """Whether the round is on the ledger; with `releases`, whether all of them are, which a crash may prevent."""
        return self._attempts[run, round_] > 0 and not self._uncharged(run, round_, 0, releases)

    def rounds(self, run: str | None = None) -> Rounds:
        """The releases of all runs, or of this one, grouped by round, equal rounds counted."""
        return Counter(
            Round(tuple(entry.release for entry in group), group[0].cohort)
            for (owner, _, _), group in self._groups.items()
            if run in (None, owner)
        )

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._groups.setdefault((entry.run, entry.round, entry.attempt), []).append(entry)
        started = self._attempts[entry.run, entry.round]
        self._attempts[entry.run, entry.round] = max(started, entry.attempt + 1)

    def _last_hash(self) -> str:
        return self._entries[-1].hash if self._entries else GENESIS

    def _head_path(self) -> Path:
        return self.path.parent / f"{self.path.name}.head"

    def _head(self) -> tuple[int, str] | None:
        """The number of lines written and the hash of the last; None if there is no head."""
        try:
            head = json.loads(self._head_path().read_text())
            return whole_number("entries", head["entries"], 0), str(head["hash"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LedgerError(
                f"{self._head_path()}: cannot be read: {error.strerror}. Make it readable.",
                field="file",
                value=error.strerror,
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError, InputError) as error:
            raise LedgerError(
                f"{self._head_path()}: not the head of a privacy ledger. {_REMEDY}", field="head"
            ) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, so that a budget check stays valid until the charge is written."""
        with self._locked() as self._held:
            try:
                yield
            finally:
                self._held = None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file descriptor, open for writing and locked against other processes."""
        if self._held is not None:
            yield self._held
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise LedgerError(
                            f"{self.path}: another run keeps the ledger locked. Wait for it to end.",
                            field="lock",
                        ) from error
                    time.sleep(0.01)
            yield file
        finally:
            os.close(file)  # releases the lock

    def _append(self, file: int, new: Sequence[Entry]) -> None:
        data = b"".join(entry.line() for entry in new)
        try:
            if self._offset == 0:
                self._write_head(0, GENESIS)
            os.ftruncate(file, self._offset)  # an incomplete line of a crash, never released
            os.lseek(file, self._offset, os.SEEK_SET)
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
            os.fsync(file)
            self._write_head(len(self._entries) + len(new), new[-1].hash)
            if self._offset == 0:
                self._sync_folder()
        except OSError as error:
            raise self._unwritable(error) from error
        self._offset += len(data)
        for entry in new:
            self._keep(entry)

    def _unwritable(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"{self.path}: the privacy ledger cannot be written: {error.strerror}. Fix the disk, or choose "
            "another path.",
            field="file",
            value=error.strerror,
        )

    def _sync_folder(self) -> None:
        """Sync the folder: a new file survives a power cut only if its directory entry is on the disk."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write_head(self, count: int, last: str) -> None:
        target = self._head_path()
        fresh = target.with_name(target.name + ".new")
        with fresh.open("w") as file:
            json.dump({"entries": count, "hash": last}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)


@dataclass(frozen=True)
class Budget:
    """The largest (epsilon, delta) allowed for a `unit` against `adversary`."""

    epsilon: float
    delta: float
    adversary: Adversary
    unit: Unit

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise InputError("budget", self.epsilon, "is not above 0", "Use a positive epsilon.")
        if not 0 < self.delta < 1:
            raise InputError("delta", self.delta, "is not a probability", "Use a number in (0, 1).")


class BudgetKeeper:
    """Checks before each round whether the budget allows it, given all entries of the ledger.

    The last round within the budget is found once by bisection; later checks are a comparison, unless another run
    has written to the same ledger in between.
    """

    def __init__(
        self, budget: Budget, ledger: Ledger, run: str, releases: Sequence[Release], plan: Plan
    ) -> None:
        self.budget = budget
        self._ledger = ledger
        self._run = run
        self._releases = tuple(releases)
        self._plan = plan
        self._counted = (-1, -1)
        self._last = 0

    def allows(self, round_: int, *, replay_safe: bool) -> bool:
        """Whether round `round_` may start: with it, epsilon stays within the budget."""
        self._ledger.refresh()
        if replay_safe and self._ledger.is_charged(self._run, round_, self._releases):
            return True  # it was charged when it started
        if (unplanned := self._unplanned(round_)) != self._counted:
            self._counted = unplanned
            self._last = self._last_round(round_)
        return round_ <= self._last

    def charge(self, round_: int, *, replay_safe: bool) -> bool:
        """Charge round `round_` if the budget allows it, atomically, so that two runs cannot both spend the rest."""
        if not self.allows(round_, replay_safe=replay_safe):
            return False  # checked before the lock is taken, so that most of the work happens outside it
        with self._ledger.held():
            if not self.allows(round_, replay_safe=replay_safe):
                return False
            self._ledger.charge(self._run, round_, self._releases, self._plan, replay_safe=replay_safe)
        return True

    def _unplanned(self, round_: int) -> tuple[int, int]:
        """How many entries other runs have, and this run other than first attempts of earlier rounds."""
        own = [entry for entry in self._ledger.entries if entry.run == self._run]
        repeated = sum(entry.attempt > 0 or entry.round >= round_ for entry in own)
        return len(self._ledger) - len(own), repeated

    def _last_round(self, first: int) -> int:
        """The last round, from `first` on, within the budget; `first` - 1 if none is."""
        before = self._ledger.rounds()

        def fits(last: int) -> bool:
            total = before + rounds_of(self._releases, self._plan, last, first)
            pair = [(self.budget.unit, self.budget.adversary)]
            if not total:
                return True
            (row,) = account_rounds(total, self.budget.delta, pairs=pair)
            return row.epsilon is not None and row.epsilon <= self.budget.epsilon

        return last_that_fits(fits, first - 1, max(self._plan.rounds, first))
