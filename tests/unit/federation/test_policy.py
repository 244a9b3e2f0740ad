"""A node refuses what its policy does not allow, charges itself before it works, and does not forget."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.client_data import ClientData
from fedveil.errors import LedgerError
from fedveil.federation.node import open_node
from fedveil.federation.policy import PolicyGuard, RefusedError
from fedveil.methods import METHODS
from fedveil.methods.fedsgd import FedSGD, batch_in_step
from fedveil.methods.method import AnyMethod
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.methods.wrappers.defences import DPSGD
from fedveil.privacy.accounting import Cohort, Round, account_rounds
from fedveil.privacy.releases import GaussianNoise, Plan, Release
from fedveil.streams import ClientStreams
from tests.refusals import refuses
from tests.unit.federation.makers import OPEN_POLICY, POLICY, node_folder

PLAN = Plan(10, 4, "fixed", 50, 12, 12)
LOCAL = UDPFedAvg(noise_scope="local", noise_multiplier=2.0)
SHARED = UDPFedAvg(noise_multiplier=2.0)


def epsilon_of_uploads(multiplier: float, times: int, delta: float = 1e-5) -> float:
    """The price of so many uploads with this noise, from the accountant's own words and not the guard's."""
    release = Release("upload", "client", ("server",), GaussianNoise(multiplier), participation="charged")
    rounds = Counter({Round((release,), Cohort(2, 2, "all")): times})
    (row,) = account_rounds(rounds, delta, pairs=[("client", "server")])
    assert row.epsilon is not None
    return row.epsilon


def spent(guard: PolicyGuard) -> float:
    (row,) = guard.spent()
    assert row.epsilon is not None
    return row.epsilon


def test_every_participation_is_charged_in_full_for_any_claimed_sampling_rate(tmp_path: Path) -> None:
    """A plan of 10^6 clients must not make an upload cheaper: the node knows only that it took part."""
    guard = open_node(node_folder(tmp_path)).guard
    for number, plan in enumerate([PLAN, replace(PLAN, clients=10**6), replace(PLAN, sampler="poisson")], 1):
        guard.admit(f"run {number}", 1, LOCAL, plan)
        assert spent(guard) == pytest.approx(epsilon_of_uploads(2.0, number), rel=1e-9)


def test_shared_noise_is_accounted_for_by_the_announced_cohort(tmp_path: Path) -> None:
    guard = open_node(node_folder(tmp_path)).guard
    guard.admit("run", 1, SHARED, replace(PLAN, sampler="poisson"), announced=9)
    assert spent(guard) == pytest.approx(epsilon_of_uploads(2.0 / math.sqrt(9), 1), rel=1e-6)


def most_uploads(multiplier: float, epsilon: float) -> int:
    """How many uploads this epsilon allows."""
    count = 0
    while epsilon_of_uploads(multiplier, count + 1) <= epsilon:
        count += 1
    return count


def test_the_limit_holds_before_any_work_and_is_named(tmp_path: Path) -> None:
    node = open_node(node_folder(tmp_path, policy=POLICY.replace("20.0", "4.0")))
    admitted = most_uploads(2.0, 4.0)
    for number in range(1, admitted + 1):
        node.guard.admit("r", number, LOCAL, PLAN)
    with pytest.raises(RefusedError) as refusal:
        node.guard.admit("r", admitted + 1, LOCAL, PLAN)
    assert refusal.value.node == "node-0"
    assert "epsilon 4 at delta 1e-05 (client level, against the server)" in refusal.value.limit
    assert refusal.value.would == pytest.approx(epsilon_of_uploads(2.0, admitted + 1), rel=1e-9)
    assert len(node.guard.ledger) == 2 * admitted, "a refusal charges nothing"


def test_a_restarted_node_has_not_forgotten_and_a_new_run_starts_no_new_budget(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, policy=POLICY.replace("20.0", "4.0"))
    for number in range(most_uploads(2.0, 4.0)):
        open_node(folder).guard.admit(f"run {number}", 1, LOCAL, PLAN)
    with refuses("limit", RefusedError):
        open_node(folder).guard.admit("another run", 1, LOCAL, PLAN)


def test_a_repeated_round_is_charged_again(tmp_path: Path) -> None:
    guard = open_node(node_folder(tmp_path)).guard
    for times in (1, 2, 3):
        guard.admit("run", 1, LOCAL, PLAN)
        assert spent(guard) == pytest.approx(epsilon_of_uploads(2.0, times), rel=1e-9)


def test_the_exchanges_of_a_round_are_charged_once_and_a_step_back_again(tmp_path: Path) -> None:
    guard = open_node(node_folder(tmp_path, policy=OPEN_POLICY)).guard
    method = FedSGD(batch_size=4)
    assert method.exchanges(PLAN) == 3
    lines = len(list(method.releases(PLAN)))
    for exchange in range(3):
        guard.admit("run", 1, method, PLAN, exchange=exchange)
    assert len(guard.ledger) == lines
    guard.admit("run", 1, method, PLAN, exchange=2)
    assert len(guard.ledger) == 2 * lines
    guard.admit("run", 1, method, PLAN, exchange=0)
    assert len(guard.ledger) == 3 * lines
    with refuses("exchange", RefusedError):
        guard.admit("run", 1, method, PLAN, exchange=3)


@pytest.mark.parametrize(
    ("plan", "method", "announced", "field"),
    [
        (replace(PLAN, cohort=1), LOCAL, 0, "minimum_cohort"),
        (replace(PLAN, sampler="poisson"), LOCAL, 1, "minimum_cohort"),
        (PLAN, METHODS["scaffold"](), 0, "methods"),
        (PLAN, METHODS["fedavg"](), 0, "limit"),
        (PLAN, SHARED, 5, "cohort"),
        (replace(PLAN, sampler="poisson"), SHARED, 11, "cohort"),
        (replace(PLAN, records_per_client=100, largest_client=100), LOCAL, 0, "records"),
        (replace(PLAN, records_per_client=1, largest_client=11), LOCAL, 0, "records"),
    ],
)
def test_refused_rounds_charge_nothing(
    tmp_path: Path, plan: Plan, method: AnyMethod, announced: int, field: str
) -> None:
    guard = open_node(node_folder(tmp_path)).guard
    with refuses(field, RefusedError):
        guard.admit("run", 1, method, plan, announced=announced)
    assert len(guard.ledger) == 0


@pytest.mark.parametrize("round_", [0, -1, 51])
def test_a_round_outside_the_plan_is_refused(tmp_path: Path, round_: int) -> None:
    with refuses("exchange", RefusedError):
        open_node(node_folder(tmp_path)).guard.admit("run", round_, LOCAL, PLAN)


def test_a_plan_or_method_that_changes_in_a_run_is_refused(tmp_path: Path) -> None:
    folder = node_folder(tmp_path)
    open_node(folder).guard.admit("run", 1, LOCAL, PLAN)
    for method, plan in [
        (LOCAL, replace(PLAN, rounds=60)),
        (UDPFedAvg(noise_scope="local", noise_multiplier=2.5), PLAN),
    ]:
        with refuses("plan", RefusedError):
            open_node(folder).guard.admit("run", 2, method, plan)
    open_node(folder).guard.admit("run", 2, LOCAL, PLAN)


def test_a_record_is_not_read_twice_in_a_round_that_is_charged_once(tmp_path: Path) -> None:
    guard = open_node(node_folder(tmp_path, policy=OPEN_POLICY)).guard
    method = DPSGD().around(FedSGD(batch_size=4))

    def read(seed: int, exchange: int) -> set[int]:
        guard.admit("run", 1, method, PLAN, exchange=exchange, seed=seed)
        data = ClientData(torch.arange(12)[None], torch.zeros(1, 12), torch.tensor([12]))
        rng = ClientStreams(seed, 1, (0,), exchange, "entropy")
        return set(batch_in_step(data, 4, exchange, rng).x.flatten().tolist())

    first = read(0, 0)
    with refuses("plan", RefusedError):
        read(1, 1)
    assert first | read(0, 1) | read(0, 2) == set(range(12))
    assert len(guard.ledger) == 1


def test_a_cohort_that_grows_within_a_round_is_refused(tmp_path: Path) -> None:
    guard = open_node(node_folder(tmp_path, policy=OPEN_POLICY)).guard
    method, plan = FedSGD(batch_size=4), replace(PLAN, sampler="poisson")
    guard.admit("run", 1, method, plan, exchange=0, announced=4)
    with refuses("cohort", RefusedError):
        guard.admit("run", 1, method, plan, exchange=1, announced=9)


def test_a_ledger_that_was_cut_or_removed_stops_the_node(tmp_path: Path) -> None:
    folder = node_folder(tmp_path)
    for number in (1, 2):
        open_node(folder).guard.admit("run", number, LOCAL, PLAN)
    ledger = folder / "state" / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[: whole.index(b"\n") + 1])
    with refuses("entries", LedgerError, value=1):
        open_node(folder)
    ledger.unlink()
    ledger.with_name("ledger.jsonl.head").unlink()
    with refuses("ledger", LedgerError):
        open_node(folder).guard.admit("run", 3, LOCAL, PLAN)


def _admit_until_refused(folder: Path, name: str) -> int:
    guard = open_node(folder).guard
    for number in range(1, 51):
        try:
            guard.admit(name, number, LOCAL, PLAN)
        except RefusedError:
            return number - 1
    return 50


def test_two_guards_cannot_both_take_the_last_round(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, policy=POLICY.replace("20.0", "4.0"))
    with ThreadPoolExecutor(2) as pool:  # each with a guard and files of its own, as two processes have
        admitted = list(pool.map(_admit_until_refused, [folder, folder], ["a", "b"]))
    assert sum(admitted) == most_uploads(2.0, 4.0)


@settings(max_examples=10, deadline=None)
@given(
    sigma=st.floats(0.7, 6.0),
    epsilon=st.floats(0.5, 15.0),
    requests=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_no_sequence_of_requests_exceeds_the_limit(
    tmp_path_factory: pytest.TempPathFactory,
    sigma: float,
    epsilon: float,
    requests: list[tuple[int, int]],
) -> None:
    """Any order of runs and rounds, repeats included: admitted exactly while the closed composition allows it."""
    folder = node_folder(tmp_path_factory.mktemp("node"), policy=POLICY.replace("20.0", repr(epsilon)))
    method = UDPFedAvg(noise_scope="local", noise_multiplier=sigma)
    admitted = 0
    for run, round_ in requests:
        fits = epsilon_of_uploads(sigma, admitted + 1) <= epsilon
        try:
            open_node(folder).guard.admit(str(run), round_, method, PLAN)
        except RefusedError:
            assert not fits
        else:
            assert fits
            admitted += 1
    if admitted:
        assert spent(open_node(folder).guard) <= epsilon


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("methods = []", "policy.toml: methods"),
        ('methods = ["nonsense"]', "methods"),
        ('methods = ["fedavg"]\nminimum_cohort = 0', "policy.toml: minimum_cohort"),
        ('methods = ["fedavg"]\nepsilon = 3', "policy.toml: epsilon"),
        (POLICY.replace("20.0", "inf"), "policy.toml: limit.0.epsilon"),
        (POLICY.replace("1e-5", "1.5"), "policy.toml: limit.0.delta"),
        (POLICY.replace('"server"', '"everybody"'), "policy.toml: limit.0.adversary"),
        ("methods = [", "file"),
    ],
)
def test_an_invalid_policy_is_refused(tmp_path: Path, text: str, field: str) -> None:
    with refuses(field):
        open_node(node_folder(tmp_path, policy=text))
