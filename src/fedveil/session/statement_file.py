"""`statement.json`: the guarantees of a finished run, bound by hashes to its configuration, model, files and ledger.

Besides the published model it contains nothing that depends on the data, so it may be published: the data enters as a
commitment whose salt stays in the folder, and so do files with values without noise, whose contents could be guessed
and compared with a plain hash. `verify` recomputes every epsilon from the ledger and checks every hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.atomic_files import write_atomically
from fedveil.errors import InputError, LedgerError
from fedveil.privacy.accounting import Rounds, account_rounds, named_pairs
from fedveil.privacy.ledger import Entry, Ledger
from fedveil.privacy.meaning import fewest_records, grade, guess_accuracy
from fedveil.session.model_file import MODEL

STATEMENT = "statement.json"
SALT = ".salt"
SCHEMA = "fedveil-statement/2"
_UNSALTED = "fedveil-statement/1"  # the same with plain hashes of all files
STATISTICS = (
    "statistics.json"  # the numbers that a table was standardised with, if they were released with noise
)
_OTHER_FILES = ("config.toml", "rounds.jsonl", STATISTICS, MODEL)
_PRIVATE = ("rounds.jsonl", "summary.json")
"""They hold scores, sizes of cohorts and label counts without noise: their hashes are salted."""
_ROW = (
    "unit",
    "adversary",
    "adjacency",
    "sampler",
    "epsilon",
    "delta",
    "theorem",
    "reason",
    "assumptions",
    "ends",
)


@dataclass(frozen=True)
class Check:
    """One verification: its subject, outcome and finding."""

    name: str
    passed: bool
    found: str


def write_statement(folder: Path, run: str, summary: Mapping[str, Any], ledger: Path | None) -> None:
    """Write the statement of a run, after all other files except `summary.json`, which marks the run as finished.

    Args:
        folder: The run's folder.
        run: The name of the run on the ledger.
        summary: The content of `summary.json`.
        ledger: The ledger to which the run was charged.
    """
    if not (folder / SALT).exists():
        write_atomically(folder / SALT, secrets.token_hex(16).encode())
    files = {name: hash_of(folder, name) for name in _OTHER_FILES if (folder / name).exists()}
    files["summary.json"] = hash_of(folder, "summary.json", summary_bytes(summary))
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        **_described(summary),
        "files": files,
        "data_commitment": _commit(folder),
        "ledger": _ledger_state(folder, ledger),
    }
    whole = body | {"hash": Entry.digest(body)}
    write_atomically(folder / STATEMENT, (json.dumps(whole, indent=2) + "\n").encode())


def hash_of(folder: Path, name: str, content: bytes | None = None, *, salted: bool = True) -> str:
    """The hash of a file of a run, of this content or of what it contains; of private files with the folder's salt."""
    content = (folder / name).read_bytes() if content is None else content
    salt = (folder / SALT).read_bytes() + name.encode() if salted and name in _PRIVATE else b""
    return _sha256(salt + content)


def summary_bytes(summary: Mapping[str, Any]) -> bytes:
    """The contents of `summary.json`."""
    return (json.dumps(summary, indent=2) + "\n").encode()


def _described(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the statement that is computed from the summary."""
    privacy, plan = summary["privacy"], summary["plan"]
    records = fewest_records(plan["clients"], plan["smallest_client"], plan["largest_client"])
    units = {"client": plan["clients"], "record": records}
    rows = []
    for proof in privacy["proven"]:
        row = {key: proof[key] for key in _ROW if key in proof}
        epsilon, delta = proof["epsilon"], proof["delta"]
        row["grade"] = grade(epsilon, delta, units[proof["unit"]]).word
        row["guess_accuracy"] = None if epsilon is None else guess_accuracy(epsilon, delta)
        rows.append(row)
    return {
        "version": summary["environment"]["fedveil"],
        "numerics": summary["numerics"],
        "method": summary["method"],
        "dataset": summary.get("dataset"),
        "model": summary.get("model"),
        "rounds": summary["rounds"],
        "plan": plan,
        "noise": privacy["noise"],
        "removable": privacy["removable"],
        "paper_claim": privacy["paper_claim"],
        "proven": rows,
    }


def _commit(folder: Path) -> str | None:
    """A commitment to the data: its digest, hidden by a salt that stays in the folder."""
    data = folder / ".data"
    return _sha256((folder / SALT).read_bytes() + data.read_bytes()) if data.exists() else None


def _ledger_state(folder: Path, path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    entries = Ledger(path).entries
    return {
        "shared": path.resolve().parent != folder.resolve(),
        "entries": len(entries),
        "head": entries[-1].hash if entries else None,
    }


def verify(folder: Path, ledger: Path | None = None) -> list[Check]:
    """Check the statement of a finished run against its folder.

    Args:
        folder: The run's folder.
        ledger: The ledger, if the run shares one that its configuration does not name.

    Returns:
        The checks in order; if one cannot be carried out, it is the last.

    Guarantees:
        A change of any field of the statement, of any file that a statement names, of the ledger or of its head fails
        a check, even if the statement's hash is recomputed; the time in `made` is covered by that hash only
        (`tests/unit/session/test_statement_tampering.py`).
    """
    return list(_checks(folder, ledger))


def _checks(folder: Path, ledger: Path | None) -> Iterator[Check]:
    stated, problem = _load(folder / STATEMENT)
    if stated is None:
        yield Check(STATEMENT, False, problem)
        return
    whole = _hash_fits(stated) and stated.get("schema") in (SCHEMA, _UNSALTED)
    yield Check(STATEMENT, whole, "intact" if whole else "altered after it was written, or of another schema")
    try:
        yield from _file_checks(folder, stated["files"], salted=stated.get("schema") != _UNSALTED)
        yield _run_check(folder, stated["run"])
        yield from _summary_checks(folder, stated)
        yield _data_check(folder, stated["data_commitment"])
        yield from _ledger_checks(folder, stated, ledger)
    except (KeyError, TypeError, ValueError, AttributeError, InputError) as error:
        yield Check(STATEMENT, False, f"a field is missing or of the wrong kind: {error}")


def _hash_fits(stated: Mapping[str, Any]) -> bool:
    body = {key: value for key, value in stated.items() if key != "hash"}
    try:
        return Entry.digest(body) == stated.get("hash")
    except ValueError:  # it contains a number that JSON does not support
        return False


def _file_checks(folder: Path, stated: Mapping[str, str], *, salted: bool) -> Iterator[Check]:
    known = (*_OTHER_FILES, "summary.json")
    for name in known:
        if name in stated:
            yield _file_check(folder, name, stated[name], salted=salted)
        elif (folder / name).exists() or name == "summary.json":
            yield Check(name, False, f"{STATEMENT} has no hash of it")
    for name in set(stated) - set(known):
        yield Check(name, False, f"{STATEMENT} names it, but it is not a file of a run")


def _run_check(folder: Path, stated: str) -> Check:
    """Check that the stated name is the one stored in the folder."""
    try:
        kept = (folder / ".run").read_text()
    except (OSError, UnicodeDecodeError):
        return Check("run", False, "the folder's .run is missing or cannot be read")
    return Check("run", kept == stated, kept if kept == stated else f"{kept}, stated {stated}")


def _summary_checks(folder: Path, stated: Mapping[str, Any]) -> Iterator[Check]:
    summary, problem = _load(folder / "summary.json")
    if summary is None:
        yield Check("summary.json", False, problem)
        return
    try:
        described = _described(summary)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield Check("summary.json", False, f"a field is missing or of the wrong kind: {error}")
        return
    other = [key for key, value in described.items() if key not in stated or stated[key] != value]
    known = {*described, "schema", "run", "made", "files", "data_commitment", "ledger", "hash"}
    other += sorted(set(stated) - known)
    found = f"differs from summary.json in {', '.join(other)}" if other else "as in summary.json"
    yield Check("claims", not other, found)


def _data_check(folder: Path, stated: str | None) -> Check:
    data, salt = folder / ".data", folder / SALT
    if stated is None:
        return Check("data", not data.exists(), f"{STATEMENT} commits to none")
    right = data.exists() and salt.exists() and _commit(folder) == stated
    return Check("data", right, "as committed to" if right else "its digest or salt is missing or altered")


def _load(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, "is missing: the run is not finished, or an earlier version made it"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"cannot be read: {error}"
    return (found, "") if isinstance(found, dict) else (None, "is not an object")


def _file_check(folder: Path, name: str, expected: str, *, salted: bool) -> Check:
    try:
        found = hash_of(folder, name, salted=salted)
    except OSError as error:
        other = "" if error.filename == str(folder / name) else f": {Path(str(error.filename)).name}"
        return Check(name, False, f"cannot be read{other}: {error.strerror}")
    return Check(name, found == expected, f"sha256 {found[:16]}" + ("" if found == expected else ", altered"))


def _ledger_checks(folder: Path, stated: Mapping[str, Any], given: Path | None) -> Iterator[Check]:
    state = stated["ledger"]
    if state is None:
        yield Check("ledger", False, "the run was charged to no ledger: no epsilon can be recomputed")
        return
    path = given or (_configured_ledger(folder) if state["shared"] else folder / "ledger.jsonl")
    try:
        if path is None or not path.exists():
            raise LedgerError("does not exist; give its path with --ledger", field="ledger")
        ledger = Ledger(path)
    except LedgerError as error:
        yield Check("ledger", False, str(error))
        return
    count, head, run = state["entries"], state["head"], stated["run"]
    entries = ledger.entries
    shared = path.resolve().parent != folder.resolve()
    later = entries[count:] if shared else ()
    kept = (
        state["shared"] == shared
        and len(entries) - len(later) == count
        and head == (entries[count - 1].hash if count else None)
        and not any(entry.run == run for entry in later)
    )
    found = f"{count} entries, head {(head or 'none')[:16]}"
    yield Check("ledger", kept, found if kept else f"not the one stated ({found})")
    rounds = ledger.rounds(run)
    for row in stated["proven"]:
        yield _row_check(row, rounds)
    stated_pairs = {(row["unit"], row["adversary"]) for row in stated["proven"]}
    hidden = [pair for pair in named_pairs(rounds) if pair not in stated_pairs]
    if hidden:
        rows = ", ".join(f"{unit} against {adversary}" for unit, adversary in hidden)
        yield Check("rows", False, f"the ledger has releases about {rows}, of which nothing is stated")


def _row_check(row: Mapping[str, Any], rounds: Rounds) -> Check:
    """Recompute one row of the guarantees."""
    pairs, ends = [(row["unit"], row["adversary"])], row.get("ends", 1)
    (again,) = account_rounds(rounds, row["delta"], pairs=pairs, ends=ends)
    recomputed = again.to_json()
    other = [key for key in ("adjacency", "sampler") if recomputed[key] != row[key]]
    if not row["theorem"].startswith(recomputed["theorem"]):  # a selection of the best run adds its own
        other.append("theorem")
    if not set(recomputed["assumptions"]) <= set(row["assumptions"]):
        other.append("assumptions")
    right = _same(again.epsilon, row["epsilon"])
    said = f"recomputed {_shown(again.epsilon)}" + ("" if right else f", stated {_shown(row['epsilon'])}")
    if other:
        said += f"; the ledger has another {', '.join(other)}"
    return Check(f"epsilon, {row['unit']} against {row['adversary']}", right and not other, said)


def _configured_ledger(folder: Path) -> Path | None:
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        return Path(config["privacy"]["ledger"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same(found: float | None, stated: float | None) -> bool:
    if found is None or stated is None:
        return found is stated
    return math.isclose(found, stated, rel_tol=1e-6, abs_tol=1e-9)


def _shown(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:.6g}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
