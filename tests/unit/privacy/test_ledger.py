from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedveil.errors import InputError, LedgerError
from fedveil.privacy import ledger as ledger_module
from fedveil.privacy.accounting import account, account_rounds
from fedveil.privacy.ledger import GENESIS, Budget, BudgetKeeper, Ledger
from fedveil.privacy.releases import GaussianNoise, Plan, Release
from tests.refusals import refuses
from tests.unit.privacy.declarations import fedceo, udp_fedavg

PLAN = Plan(100, 10, "poisson", 40)
DELTA = 1e-5
RELEASES = udp_fedavg(1.0)


def _charge(path: Path, rounds: int, run: str = "run") -> Ledger:
    ledger = Ledger(path)
    for t in range(1, rounds + 1):
        ledger.charge(run, t, RELEASES, PLAN, replay_safe=True)
    return ledger


def test_one_line_per_release_that_another_reader_verifies(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.jsonl"
    _charge(path, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["round"], line["release"]["what"]) for line in lines[:3]] == [
        (1, "each upload"),
        (1, "the noisy mean"),
        (2, "each upload"),
    ]
    assert [line["previous"] for line in lines[1:]] == [line["hash"] for line in lines[:-1]]
    assert len(Ledger(path)) == 6


def test_only_what_a_round_releases_is_charged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for t in range(1, 31):
        ledger.charge("run", t, fedceo(1.0, 15), PLAN, replay_safe=True)
    what = [entry.release.what for entry in ledger.entries]
    assert (what.count("the personal models"), what.count("the noisy mean")) == (2, 28)


def test_the_spent_budget_is_that_of_the_plan(tmp_path: Path) -> None:
    ledger = _charge(tmp_path / "ledger.jsonl", 40)
    assert account_rounds(ledger.rounds(), DELTA) == account(RELEASES, PLAN, DELTA)
    assert account_rounds(Ledger(tmp_path / "ledger.jsonl").rounds(), DELTA) == account(RELEASES, PLAN, DELTA)


def test_a_resumed_simulation_is_charged_once_and_a_deployment_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _charge(path, 5)
    resumed = Ledger(path)
    assert resumed.charge("run", 5, RELEASES, PLAN, replay_safe=True) == 0
    once = account_rounds(resumed.rounds(), DELTA)
    assert resumed.charge("run", 5, RELEASES, PLAN, replay_safe=False) == 2
    assert resumed.charge("run", 5, RELEASES, PLAN, replay_safe=False) == 2
    assert [entry.attempt for entry in resumed.entries[-4:]] == [1, 1, 2, 2]
    for before, after in zip(once, account_rounds(resumed.rounds(), DELTA), strict=True):
        assert before.epsilon is not None
        assert after.epsilon is not None
        assert after.epsilon > before.epsilon


def test_a_replay_with_other_releases_is_charged_beside_the_first(tmp_path: Path) -> None:
    ledger = _charge(tmp_path / "ledger.jsonl", 1)
    assert ledger.charge("run", 1, udp_fedavg(3.0), PLAN, replay_safe=True) == 2
    assert len(ledger) == 4


def test_runs_that_share_a_ledger_share_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second = Ledger(path), Ledger(path)
    for t in range(1, 21):
        first.charge("a", t, RELEASES, PLAN, replay_safe=True)
        second.charge("b", t, RELEASES, PLAN, replay_safe=True)
    assert account_rounds(Ledger(path).rounds(), DELTA) == account(RELEASES, PLAN, DELTA)


@pytest.mark.parametrize("line", [0, 2, 5])
def test_an_altered_line_is_refused(tmp_path: Path, line: int) -> None:
    path = tmp_path / "ledger.jsonl"
    _charge(path, 3)
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = (
        lines[line]
        .replace('"multiplier": 0.3', '"multiplier": 3.3')
        .replace('"multiplier": 1.0', '"multiplier": 9.0')
    )
    path.write_text("".join(lines))
    with refuses("hash", LedgerError):
        Ledger(path)


def test_a_rehashed_line_breaks_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _charge(path, 3)
    lines = path.read_text().splitlines()
    body = json.loads(lines[1])
    body.pop("hash")
    body["release"]["protection"]["multiplier"] = 100.0
    lines[1] = json.dumps({**body, "hash": ledger_module.Entry.digest(body)})
    path.write_text("\n".join(lines) + "\n")
    with refuses("previous", LedgerError, value=3):
        Ledger(path)


@pytest.mark.parametrize("gap", [0, 3])
def test_a_missing_line_is_refused(tmp_path: Path, gap: int) -> None:
    path = tmp_path / "ledger.jsonl"
    _charge(path, 3)
    lines = path.read_text().splitlines(keepends=True)
    del lines[gap]
    path.write_text("".join(lines))
    with refuses("previous", LedgerError):
        Ledger(path)


def test_a_cut_off_end_and_a_lost_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = _charge(path, 3)
    data = path.read_bytes()
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:-2]))
    with refuses("entries", LedgerError, value=4):
        Ledger(path)
    with refuses("size", LedgerError, value=2386):
        ledger.charge("run", 4, RELEASES, PLAN, replay_safe=True)
    path.unlink()
    with refuses("ledger", LedgerError):
        Ledger(path)


def test_another_ledger_of_the_same_length_is_refused(tmp_path: Path) -> None:
    """Every line of it is valid; only the head, which has the hash of the last one, differs."""
    _charge(tmp_path / "ledger.jsonl", 3)
    _charge(tmp_path / "other.jsonl", 3, run="another run")
    (tmp_path / "other.jsonl").replace(tmp_path / "ledger.jsonl")
    with refuses("entries", LedgerError, value=6):
        Ledger(tmp_path / "ledger.jsonl")


def test_a_charge_is_on_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    sync = os.fsync

    def watched(file: int) -> None:
        sync(file)
        if os.path.samestat(os.fstat(file), path.stat()):
            synced.append(path.read_bytes())

    path = tmp_path / "ledger.jsonl"
    monkeypatch.setattr(os, "fsync", watched)
    _charge(path, 2)
    assert len(synced) == 2
    assert synced[-1] == path.read_bytes()


def test_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for text in ("hello\n", "{}\n", "[1]\n", '{"hash": 3}\n'):
        path.write_text(text)
        (tmp_path / "ledger.jsonl.head").write_text(json.dumps({"entries": 0, "hash": GENESIS}))
        with refuses("entry", LedgerError, value=1):
            Ledger(path)


def test_a_torn_last_line_of_a_crash_is_repaired_without_losing_a_charge(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _charge(path, 2)
    whole = path.read_bytes()
    reference = _charge(tmp_path / "other.jsonl", 3).path.read_bytes()
    lines = reference.splitlines(keepends=True)
    path.write_bytes(whole + lines[4] + lines[5][:40])  # round 3: one line complete, one torn, head not yet
    ledger = Ledger(path)
    assert len(ledger) == 5  # the complete line counts as spent
    assert ledger.charge("run", 3, RELEASES, PLAN, replay_safe=True) == 1
    assert path.read_bytes() == reference
    assert len(Ledger(path)) == 6


def test_it_is_on_the_disk_before_charge_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    synced: list[int] = []
    nodes: list[int] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(path.stat().st_size)
        nodes.append(os.fstat(file).st_ino)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    Ledger(path).charge("run", 1, RELEASES, PLAN, replay_safe=True)
    own = [size for size, node in zip(synced, nodes, strict=True) if node == path.stat().st_ino]
    assert own == [path.stat().st_size]
    assert tmp_path.stat().st_ino in nodes, "the new file itself would be lost in a power cut"


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def full(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with refuses("file", LedgerError, value="No space left on device"):
        ledger.charge("run", 1, RELEASES, PLAN, replay_safe=True)
    monkeypatch.undo()
    assert ledger.charge("run", 1, RELEASES, PLAN, replay_safe=True) == 2
    assert len(Ledger(ledger.path)) == 2


def test_two_writers_share_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with ThreadPoolExecutor(2) as pool:  # each opens the file for itself, as two processes would
        for done in [pool.submit(_charge, path, 30, run) for run in ("a", "b")]:
            done.result()
    whole = Ledger(path)
    assert len(whole) == 120
    assert {entry.run for entry in whole.entries[:80]} == {"a", "b"}


def test_a_locked_ledger_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "LOCK_SECONDS", 0.05)
    first, second = Ledger(tmp_path / "ledger.jsonl"), Ledger(tmp_path / "ledger.jsonl")
    with first._locked(), refuses("lock", LedgerError):
        second.charge("run", 1, RELEASES, PLAN, replay_safe=True)


def _run(path: Path, run: str, budget: Budget, rounds: range, *, replay_safe: bool = True) -> int:
    ledger = Ledger(path)
    keeper = BudgetKeeper(budget, ledger, run, RELEASES, PLAN)
    for t in rounds:
        if not keeper.allows(t, replay_safe=replay_safe):
            return t - 1
        ledger.charge(run, t, RELEASES, PLAN, replay_safe=replay_safe)
    return rounds[-1]


def _observer(path: Path) -> float:
    (value,) = [
        row.epsilon for row in account_rounds(Ledger(path).rounds(), DELTA) if row.adversary == "observer"
    ]
    assert value is not None
    return value


def test_the_budget_stops_before_the_round_that_would_exceed_it(tmp_path: Path) -> None:
    budget = Budget(4.0, DELTA, "observer", "client")
    path = tmp_path / "ledger.jsonl"
    last = _run(path, "a", budget, range(1, 41))
    assert 0 < last < 40
    assert _observer(path) <= 4.0
    assert _run(path, "a", budget, range(1, 41)) == last  # resumed from the start: nothing is charged twice
    assert len(Ledger(path)) == 2 * last
    assert _run(path, "b", budget, range(1, 41)) == 0  # another run on the same data has nothing left
    Ledger(path).charge("a", last + 1, RELEASES, PLAN, replay_safe=True)
    assert _observer(path) > 4.0


def test_a_deployed_resume_has_less_left(tmp_path: Path) -> None:
    budget = Budget(4.0, DELTA, "observer", "client")
    path = tmp_path / "ledger.jsonl"
    straight = _run(tmp_path / "other.jsonl", "a", budget, range(1, 41), replay_safe=False)
    assert _run(path, "a", budget, range(1, 6), replay_safe=False) == 5
    resumed = _run(path, "a", budget, range(1, 41), replay_safe=False)
    assert resumed == straight - 5
    assert _observer(path) <= 4.0


def test_two_runs_side_by_side_stay_within_the_shared_budget(tmp_path: Path) -> None:
    budget = Budget(4.0, DELTA, "observer", "client")
    path = tmp_path / "ledger.jsonl"
    ledgers = {run: Ledger(path) for run in "ab"}
    keepers = {run: BudgetKeeper(budget, ledgers[run], run, RELEASES, PLAN) for run in "ab"}
    for t in range(1, 41):
        for run in "ab":
            if keepers[run].allows(t, replay_safe=True):
                ledgers[run].charge(run, t, RELEASES, PLAN, replay_safe=True)
    assert 3.5 < _observer(path) <= 4.0


def test_a_half_written_round_does_not_pass_for_a_charged_one_when_the_budget_is_spent(
    tmp_path: Path,
) -> None:
    """The upload is on the ledger, the mean is not: meanwhile another run spends what the mean would cost."""
    budget = Budget(4.0, DELTA, "observer", "client")
    path = tmp_path / "ledger.jsonl"
    _charge(path, 1, "a")
    first, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first)
    (tmp_path / "ledger.jsonl.head").write_text(json.dumps({"entries": 0, "hash": GENESIS}))
    assert _run(path, "b", budget, range(1, 41)) > 1
    while BudgetKeeper(budget, Ledger(path), "c", RELEASES, PLAN).charge(1, replay_safe=False):
        pass
    assert not BudgetKeeper(budget, Ledger(path), "a", RELEASES, PLAN).charge(1, replay_safe=True)
    assert _observer(path) <= 4.0


def test_another_runs_entry_is_noticed_though_the_number_of_repeated_ones_falls(tmp_path: Path) -> None:
    """After a half-written round is completed, one entry of another run restores the number that was compared."""
    budget = Budget(4.0, DELTA, "observer", "client")
    path = tmp_path / "ledger.jsonl"
    _charge(path, 2, "a")
    *kept, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept))
    (tmp_path / "ledger.jsonl.head").write_text(json.dumps({"entries": 0, "hash": GENESIS}))
    keeper = BudgetKeeper(budget, Ledger(path), "a", RELEASES, PLAN)
    assert keeper.charge(2, replay_safe=True)
    large = Release("a large part", "client", ("observer",), GaussianNoise(1.6), participation="charged")
    Ledger(path).charge("b", 1, [large], PLAN, replay_safe=True)
    assert _observer(path) < 4.0
    for t in range(3, 41):
        keeper.charge(t, replay_safe=True)
    assert _observer(path) <= 4.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_impossible_budgets_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(InputError):
        Budget(epsilon, delta, "server", "client")


def test_concurrent_appends_are_not_mistaken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the entries and the head that vouches for them another process may have written both."""
    path = tmp_path / "ledger.jsonl"
    reader, writer = _charge(path, 1), Ledger(path)
    read = Ledger._head
    meanwhile = iter([2])

    def head(self: Ledger) -> tuple[int, str] | None:
        if self is reader:
            for round_ in meanwhile:
                writer.charge("other", round_, RELEASES, PLAN, replay_safe=True)
        return read(self)

    monkeypatch.setattr(Ledger, "_head", head)
    reader.refresh()
    assert len(reader) == len(writer) == 4


@pytest.mark.parametrize(
    "head", ['{"entries": 1e999, "hash": ""}', '{"entries": -3, "hash": ""}', "[" * 100_000, "[]", "\udcff"]
)
def test_a_head_that_is_none_is_an_error_with_a_remedy(head: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _charge(path, 1)
    (tmp_path / "ledger.jsonl.head").write_bytes(head.encode("utf-8", "surrogateescape"))
    with refuses("head", LedgerError):
        Ledger(path)


def test_a_line_nested_without_end_is_no_entry(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("[" * 100_000 + "\n")
    (tmp_path / "ledger.jsonl.head").write_text(json.dumps({"entries": 0, "hash": GENESIS}))
    with refuses("entry", LedgerError, value=1):
        Ledger(path)


def test_a_cut_ledger_does_not_pass_because_its_head_is_missing(tmp_path: Path) -> None:
    """Without the head nothing would say how many lines there were."""
    path = tmp_path / "ledger.jsonl"
    _charge(path, 1)
    reader = _charge(path, 2)
    whole = path.read_bytes()
    (tmp_path / "ledger.jsonl.head").unlink()
    path.write_bytes(whole[: whole.index(b"\n") + 1])
    with pytest.raises(LedgerError):
        Ledger(path)
    path.write_bytes(whole)
    with pytest.raises(LedgerError):
        Ledger(path)
    with pytest.raises(LedgerError):
        reader.refresh()


def test_a_crash_before_the_first_line_leaves_a_ledger_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"

    def dies(_file: int, _length: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", dies)
        with pytest.raises(KeyboardInterrupt):
            _charge(path, 1)
    assert (tmp_path / "ledger.jsonl.head").exists()
    assert len(_charge(path, 1)) == len(Ledger(path)) > 0
