"""The ledger, the budget and the statement around a whole run."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from fedveil import METHODS, Plan, run
from fedveil.errors import LedgerError
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy import ledger as ledger_module
from fedveil.privacy.accounting import account_rounds, epsilon_of
from fedveil.privacy.ledger import Ledger
from fedveil.session.loop import Callback, RoundEnd
from fedveil.session.options import PrivacySettings
from fedveil.session.privacy_guard import PrivacyGuard, declared, privacy_statement
from fedveil.session.results import Result
from fedveil.session.statement_file import verify
from tests.contract.federation import (
    SIZES,
    StopsAfter,
    distance,
    make_clients,
    make_method,
    make_plan,
    make_task,
)
from tests.refusals import refuses

METHOD = make_method("udp-fedavg", noise_multiplier=2.0)


def go(folder: Path | None, method: AnyMethod = METHOD, **more: Any) -> Result:
    fields: dict[str, Any] = {"rounds": 6, "cohort": 3, "workers": 1, "score_clients": False}
    fields |= {"noise": "seeded"} | more
    return run(make_task(), make_clients(), method, results=folder, **fields)


def after(rounds: int, adversary: Any = "server", *, deployed: bool = False) -> float:
    plan = make_plan(rounds=rounds)
    value = epsilon_of(declared(METHOD, plan, deployed=deployed), plan, 1e-5, adversary, "client")
    assert value is not None
    return value


def test_the_budget_stops_before_the_round_that_would_exceed_it(tmp_path: Path) -> None:
    budget = (after(3) + after(4)) / 2
    settings = PrivacySettings(budget=budget, budget_adversary="server")
    result = go(tmp_path / "run", privacy=settings)
    assert result.summary["rounds"] == 3
    assert "does not allow round 4" in result.summary["stopped"]
    assert {entry.round for entry in Ledger(tmp_path / "run" / "ledger.jsonl").entries} == {1, 2, 3}
    row = next(r for r in result.privacy["proven"] if r["adversary"] == "server")
    assert row["epsilon"] == pytest.approx(after(3))


def test_the_record_of_a_round_has_epsilon_up_to_it() -> None:
    rounds = {line["round"]: line["epsilon"] for line in go(None, rounds=3).history}
    assert rounds == pytest.approx({t: after(t, "observer") for t in (1, 2, 3)})


def test_runs_that_share_a_ledger_share_the_budget(tmp_path: Path) -> None:
    ledger = tmp_path / "shared.jsonl"
    settings = PrivacySettings(budget=(after(6) + after(7)) / 2, budget_adversary="server", ledger=ledger)
    first = go(tmp_path / "a" / "x" / "run", rounds=4, privacy=settings)
    second = go(tmp_path / "b" / "x" / "run", rounds=6, privacy=settings)
    assert first.summary["stopped"] is None
    assert second.summary["rounds"] == 2
    together = next(row for row in account_rounds(Ledger(ledger).rounds(), 1e-5) if row.adversary == "server")
    assert together.epsilon == pytest.approx(after(6))


def test_two_runs_at_once_do_not_both_take_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PrivacySettings(budget=(after(1) + after(2)) / 2, budget_adversary="server")
    at = At(make_plan(rounds=6), 1)
    one, other = (PrivacyGuard(METHOD, at.plan, settings, run, tmp_path / "shared.jsonl") for run in "ab")
    charge = Ledger.charge

    def interrupted(ledger: Ledger, *args: Any, **more: Any) -> int:
        monkeypatch.setattr(Ledger, "charge", charge)
        with refuses("lock", LedgerError):
            other.round_starts(at, ())  # both have found room; the ledger is not written yet
        return charge(ledger, *args, **more)

    monkeypatch.setattr(Ledger, "charge", interrupted)
    monkeypatch.setattr(ledger_module, "LOCK_SECONDS", 0.05)
    assert one.round_starts(at, ()) is None
    assert "does not allow round 1" in str(other.round_starts(at, ()))
    assert {entry.run for entry in Ledger(tmp_path / "shared.jsonl").entries} == {"a"}


def test_runs_without_a_folder_have_distinct_names_on_a_shared_ledger(tmp_path: Path) -> None:
    settings = PrivacySettings(ledger=tmp_path / "shared.jsonl")
    go(None, privacy=settings, rounds=2)
    go(None, make_method("udp-fedavg", noise_multiplier=2.0, lr=0.2), privacy=settings, rounds=2)
    assert len(Ledger(tmp_path / "shared.jsonl")) == 2 * 2 * 2


@pytest.mark.parametrize("folders", [(None, None), ("one/a/b/c", "two/a/b/c")])
def test_a_run_on_other_data_is_not_mistaken_for_a_resumed_one(
    tmp_path: Path, folders: tuple[str | None, str | None]
) -> None:
    settings = PrivacySettings(ledger=tmp_path / "shared.jsonl")
    models = []
    for sizes, folder in zip((SIZES, SIZES[::-1]), folders, strict=True):
        results = None if folder is None else tmp_path / folder
        fields: dict[str, Any] = {"rounds": 2, "cohort": 3, "workers": 1, "noise": "seeded"}
        clients = make_clients(sizes)
        models.append(run(make_task(), clients, METHOD, results=results, privacy=settings, **fields).model)
    assert distance(*models) > 0
    server = next(
        row
        for row in account_rounds(Ledger(tmp_path / "shared.jsonl").rounds(), 1e-5)
        if row.adversary == "server"
    )
    assert server.epsilon == pytest.approx(after(4))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (METHODS["fedavg"](), PrivacySettings(budget=5.0)),
        (make_method("udp-fedavg", noise_multiplier=0.0), PrivacySettings(budget=5.0)),
        (METHOD, PrivacySettings(budget=5.0, budget_unit="record")),
    ],
)
def test_a_budget_that_nothing_can_prove_is_refused_before_anything_is_written(
    tmp_path: Path, method: AnyMethod, settings: PrivacySettings
) -> None:
    with refuses("privacy.budget"):
        go(tmp_path / "run", method, privacy=settings)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_needs_a_ledger() -> None:
    with refuses("privacy.budget"):
        go(None, privacy=PrivacySettings(budget=5.0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("then", ["run", "elsewhere"])
def test_a_resumed_run_is_charged_once_wherever_its_folder_is(
    tmp_path: Path, then: str, shared: bool
) -> None:
    settings = PrivacySettings(ledger=tmp_path / "shared.jsonl" if shared else None)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", checkpoint_every=1, callbacks=[StopsAfter(2)], privacy=settings)
    (tmp_path / "run").rename(tmp_path / then)
    go(tmp_path / then, checkpoint_every=1, privacy=settings)
    entries = Ledger(settings.ledger or tmp_path / then / "ledger.jsonl").entries
    assert [entry.round for entry in entries] == [t for t in range(1, 7) for _ in range(2)]
    assert {entry.attempt for entry in entries} == {0}


def test_a_run_stopped_by_its_budget_is_finished_and_stays_so(tmp_path: Path) -> None:
    settings = PrivacySettings(budget=after(2) * 1.001, budget_adversary="server")
    first = go(tmp_path / "run", privacy=settings)
    again = go(tmp_path / "run", privacy=settings)
    assert first.summary["rounds"] == again.summary["rounds"] == 2
    assert len(Ledger(tmp_path / "run" / "ledger.jsonl")) == 4


def test_rounds_that_a_deployment_repeats_are_in_its_statement(tmp_path: Path) -> None:
    plan = make_plan(rounds=6)
    at = At(plan, 6)
    for _ in range(3):  # killed twice before a checkpoint was written
        guard = PrivacyGuard(
            METHOD, plan, PrivacySettings(), "run", tmp_path / "ledger", noise="entropy", deployed=True
        )
        for number in range(1, 7):
            assert guard.round_starts(At(plan, number), (0, 1, 2)) is None
    Ledger(tmp_path / "ledger").charge("other", 1, METHOD.releases(plan), plan, replay_safe=False)
    end = RoundEnd(at, (0, 1, 2), METHOD.init_server(make_task().init(0), plan), {}, last=True)
    guard.round_ends(end)
    stated = {row.adversary: row.epsilon for row in guard.statement(6).proven}
    assert stated["server"] == pytest.approx(after(18))
    assert stated["observer"] == end.metrics["epsilon"] == pytest.approx(after(18, "observer", deployed=True))
    assert guard.statement(0).proven == guard.statement(6).proven


class StopsBefore(Callback):
    """Ends a run before a round."""

    def __init__(self, round: int) -> None:
        self._round = round

    def round_starts(self, at: At, cohort: Sequence[int]) -> str | None:
        return "enough" if at.round == self._round else None


@pytest.mark.parametrize("last", [1, 3])
def test_a_statement_covers_rounds_of_an_earlier_attempt_that_are_not_repeated(
    tmp_path: Path, last: int
) -> None:
    """Also with seeded noise: what was released before a crash stays released, however early the resumed run ends."""
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", callbacks=[StopsAfter(5)])
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    again = go(tmp_path / "run", callbacks=[StopsBefore(last)])
    assert again.summary["rounds"] == last - 1
    row = next(r for r in again.privacy["proven"] if r["adversary"] == "server")
    assert row["epsilon"] == pytest.approx(after(5))
    assert all(check.passed for check in verify(tmp_path / "run"))


def test_sampling_does_not_amplify_where_nodes_refuse_small_cohorts() -> None:
    """Three clients, two expected, nodes that refuse to be alone: who else answers depends on one client."""
    udp, plan = make_method("udp-fedavg"), Plan(3, 2, "poisson", 1)
    p, x = 2 / 3, np.linspace(-12, 12, 20_001)

    def published(contribution: float | None) -> Any:
        """The density of a sum of noise 1 with the others' +1 and -1; None: the third client does not exist."""
        total = np.zeros_like(x)
        for present in itertools.product((0, 1), repeat=2 if contribution is None else 3):
            chance = math.prod(p if one else 1 - p for one in present)
            sent = [u for u, one in zip((1.0, -1.0, contribution or 0.0), present, strict=False) if one]
            total += chance * norm.pdf(x, sum(sent) if len(sent) >= 2 else 0.0)
        return total

    def delta(one: Any, other: Any, epsilon: float) -> float:
        return float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * (x[1] - x[0]))

    deployed = privacy_statement(udp, plan, 1e-5, deployed=True).proven
    row = next(row for row in deployed if row.adversary == "observer")
    assert row.adjacency == "zero-out"
    assert row.epsilon is not None
    assert delta(published(1.0), published(0.0), row.epsilon) <= row.delta
    hidden = next(r for r in privacy_statement(udp, plan, 1e-5).proven if r.adversary == "observer")
    assert hidden.adjacency == "add-remove"  # which holds where everybody answers, as in a simulation
    assert hidden.epsilon is not None
    assert delta(published(1.0), published(0.0), hidden.epsilon) > hidden.delta
    assert delta(published(1.0), published(None), hidden.epsilon) == pytest.approx(0.0026, rel=0.05)
    guard = PrivacyGuard(udp, plan, PrivacySettings(), "r", None, noise="entropy", deployed=True)
    assert guard.statement(1).proven == deployed
    central = privacy_statement(
        METHODS["dp-fedavg"](), plan, 1e-5, deployed=True
    ).proven  # nobody is told the size
    assert [r.adjacency for r in central if r.adversary == "observer"] == ["add-remove"]
