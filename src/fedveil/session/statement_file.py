"""`statement.json`: what a finished run proves, bound by hashes to its configuration, model, records and ledger.

It holds nothing that depends on the data beyond the published model, so it may be published with it: the data enters as
a commitment, whose salt stays in the folder. `verify` recomputes every epsilon from the ledger and checks every hash.
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
from fedveil.errors import LedgerError
from fedveil.privacy.accounting import account_rounds
from fedveil.privacy.ledger import Entry, Ledger
from fedveil.privacy.meaning import grade, guess_accuracy
from fedveil.session.model_file import MODEL

STATEMENT = "statement.json"
SCHEMA = "fedveil-statement/1"
STATISTICS = "statistics.json"  # what a table was standardised with, where that was released with noise
_OTHER_FILES = ("config.toml", "rounds.jsonl", STATISTICS, MODEL)
_ROW = ("unit", "adversary", "adjacency", "sampler", "epsilon", "delta", "theorem", "reason", "assumptions")


@dataclass(frozen=True)
class Check:
    """One thing that was verified, and what was found."""

    name: str
    passed: bool
    found: str


def write_statement(folder: Path, run: str, summary: Mapping[str, Any], ledger: Path | None) -> None:
    """Write the statement of a run whose other files are written, all but `summary.json`, which marks the end.

    Args:
        folder: The run's folder.
        run: The name of the run on the ledger.
        summary: What `summary.json` will hold.
        ledger: Where the run was charged.
    """
    files = {name: _sha256((folder / name).read_bytes()) for name in _OTHER_FILES if (folder / name).exists()}
    files["summary.json"] = _sha256(summary_bytes(summary))
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": summary["environment"]["fedveil"],
        "numerics": summary["numerics"],
        "method": summary["method"],
        "dataset": summary.get("dataset"),
        "model": summary.get("model"),
        "rounds": summary["rounds"],
        "plan": summary["plan"],
        **_claims(summary),
        "files": files,
        "data_commitment": _commit(folder),
        "ledger": _ledger_state(folder, ledger),
    }
    whole = body | {"hash": Entry.digest(body)}
    write_atomically(folder / STATEMENT, (json.dumps(whole, indent=2) + "\n").encode())


def summary_bytes(summary: Mapping[str, Any]) -> bytes:
    """The contents of `summary.json`."""
    return (json.dumps(summary, indent=2) + "\n").encode()


def _claims(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the statement that follows from the summary."""
    privacy, plan = summary["privacy"], summary["plan"]
    units = {"client": plan["clients"], "record": plan["clients"] * plan["smallest_client"]}
    rows = []
    for told in privacy["proven"]:
        row = {key: told[key] for key in _ROW if key in told}
        epsilon, delta = told["epsilon"], told["delta"]
        row["grade"] = grade(epsilon, delta, units[told["unit"]]).word
        row["guess_accuracy"] = None if epsilon is None else guess_accuracy(epsilon, delta)
        rows.append(row)
    return {
        "noise": privacy["noise"],
        "removable": privacy["removable"],
        "paper_claim": privacy["paper_claim"],
        "proven": rows,
    }


def _commit(folder: Path) -> str | None:
    """A commitment to the data: its digest, hidden by a salt that stays in the folder."""
    data, salt = folder / ".data", folder / ".salt"
    if not data.exists():
        return None
    if not salt.exists():
        write_atomically(salt, secrets.token_hex(16).encode())
    return _sha256(salt.read_bytes() + data.read_bytes())


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
        ledger: The ledger, where the run shares one that its configuration does not name.

    Returns:
        All checks in order; after one that cannot be carried out the rest are left out.

    Guarantees:
        A change of any file that the statement names, of the statement itself, of the ledger or of its head fails a
        check (`tests/unit/session/test_statement_file.py`).
    """
    return list(_checks(folder, ledger))


def _checks(folder: Path, ledger: Path | None) -> Iterator[Check]:
    stated, problem = _load(folder / STATEMENT)
    if stated is None:
        yield Check(STATEMENT, False, problem)
        return
    body = {key: value for key, value in stated.items() if key != "hash"}
    whole = Entry.digest(body) == stated.get("hash") and stated.get("schema") == SCHEMA
    yield Check(STATEMENT, whole, "intact" if whole else "altered after it was written, or of another schema")
    if not whole:
        return
    for name, expected in stated["files"].items():
        yield _file_check(folder / name, expected)
    summary, problem = _load(folder / "summary.json")
    if summary is None:
        yield Check("summary.json", False, problem)
        return
    same = _claims(summary) == {key: stated[key] for key in _claims(summary)}
    yield Check("claims", same, "as in summary.json" if same else "differ from those in summary.json")
    if stated["data_commitment"] is not None:
        kept = (folder / ".data").exists() and (folder / ".salt").exists()
        right = kept and _commit(folder) == stated["data_commitment"]
        yield Check("data", right, "as committed to" if right else "its digest or salt is missing or altered")
    yield from _ledger_checks(folder, stated, ledger)


def _load(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, "is missing: the run is not finished, or an earlier version made it"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"cannot be read: {error}"
    return (found, "") if isinstance(found, dict) else (None, "is not an object")


def _file_check(path: Path, expected: str) -> Check:
    try:
        found = _sha256(path.read_bytes())
    except OSError as error:
        return Check(path.name, False, f"cannot be read: {error.strerror}")
    return Check(
        path.name, found == expected, f"sha256 {found[:16]}" + ("" if found == expected else ", altered")
    )


def _ledger_checks(folder: Path, stated: Mapping[str, Any], given: Path | None) -> Iterator[Check]:
    state = stated["ledger"]
    if state is None:
        yield Check("ledger", False, "the run was charged to no ledger: no epsilon can be recomputed")
        return
    path = given or (_configured_ledger(folder) if state["shared"] else folder / "ledger.jsonl")
    try:
        if path is None or not path.exists():
            raise LedgerError("is not there; name it with --ledger")
        ledger = Ledger(path)
    except LedgerError as error:
        yield Check("ledger", False, str(error))
        return
    entries = ledger.entries
    count = state["entries"]
    grown = len(entries) > count and not state["shared"]
    kept = len(entries) >= count and (count == 0 or entries[count - 1].hash == state["head"])
    told = f"{count} entries, head {(state['head'] or 'none')[:16]}"
    yield Check("ledger", kept and not grown, told if kept and not grown else f"not the one stated ({told})")
    rounds = ledger.rounds(stated["run"])
    for row in stated["proven"]:
        (again,) = account_rounds(rounds, row["delta"], pairs=[(row["unit"], row["adversary"])])
        right = _same(again.epsilon, row["epsilon"])
        name = f"epsilon, {row['unit']} against {row['adversary']}"
        said = f"recomputed {_shown(again.epsilon)}"
        yield Check(name, right, said if right else f"{said}, stated {_shown(row['epsilon'])}")


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
