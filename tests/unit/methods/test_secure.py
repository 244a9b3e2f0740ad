"""Methods under secure aggregation: what runs, what is refused, and that masks change no bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil
from fedveil.data.client_data import ArrayClients
from fedveil.engines.worker import ClientWorker
from fedveil.errors import InputError
from fedveil.methods import METHODS
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.secure import IntegerUpload, SecurelyAggregated, securely_aggregated, sums_securely
from fedveil.privacy.accounting import account, epsilon_of
from fedveil.privacy.releases import GaussianNoise, Plan, Release
from fedveil.secure_sum.settings import SecureSum
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from tests.unit.secure_sum.in_process import Federation

ABLE: dict[str, dict[str, Any]] = {
    "udp-fedavg": {},
    "dp-fedavg": {},
    "fedavg": {},
    "fedprox": {"weighting": "uniform"},
    "fedceo": {"restart": "mean", "interval": 2},
    "dp-fedags-proven": {},
    "dp-fedsgd": {"record_rate": 0.5, "clip": 0.5},
}
N = 5


def make(name: str, **fields: Any) -> AnyMethod:
    return METHODS[name](**fields)


def make_task() -> Task:
    return Task(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))


def make_clients(count: int = N, equal: bool = False) -> ArrayClients:
    made = torch.Generator().manual_seed(0)
    sizes = [8 if equal else 4 + 3 * i for i in range(count)]
    return ArrayClients.from_arrays(
        [(torch.randn(n, 6, generator=made), torch.randint(0, 3, (n,), generator=made)) for n in sizes]
    )


def plan_of(clients: ArrayClients, rounds: int = 3) -> Plan:
    return Plan(len(clients.sizes), len(clients.sizes), "all", rounds, min(clients.sizes), max(clients.sizes))


def trained(method: AnyMethod, **options: Any) -> dict[str, torch.Tensor]:
    options = {"clients": make_clients(), "noise": "seeded", **options}
    return fedveil.run(make_task(), method=method, rounds=3, sampler="all", **options).model


def test_methods_that_need_only_a_sum_support_secure_aggregation() -> None:
    assert {name for name, kind in METHODS.items() if sums_securely(kind)} == set(ABLE)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ABLE) - {"fedprox"}))
def test_other_methods_are_refused_with_what_to_use_instead(name: str) -> None:
    try:
        method = METHODS[name]()
    except InputError:
        pytest.skip("has no default")
    with pytest.raises(InputError) as caught:
        securely_aggregated(method, SecureSum())
    assert caught.value.field == "aggregation.kind"
    assert "udp-fedavg" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("fedceo", {}, "method.restart"),
        ("fedceo", {"restart": "mean", "unit": "record"}, "method.unit"),
        ("fedceo", {"restart": "mean", "noise_scope": "local"}, "method.noise_scope"),
        ("udp-fedavg", {"noise_scope": "local"}, "method.noise_scope"),
        ("dp-fedavg", {"noise_scope": "local"}, "method.noise_scope"),
        ("dp-fedavg", {"unit": "record"}, "method.unit"),
        ("dp-fedags-proven", {"variant": "top-k"}, "method.variant"),
        ("dp-fedags-proven", {"unit": "record"}, "method.unit"),
    ],
)
def test_fields_that_need_single_uploads_are_refused(name: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        securely_aggregated(METHODS[name](**fields), SecureSum())
    assert caught.value.field == field


@pytest.mark.parametrize("name", sorted(ABLE))
@pytest.mark.parametrize("leaves", [{}, {"node-002": 2}, {"node-004": 1}, {"node-000": 4}])
def test_masks_change_no_bit(name: str, leaves: dict[str, int]) -> None:
    """The whole protocol in process against the sum of the simulator, and the model after it."""
    task, clients = make_task(), make_clients()
    method = SecurelyAggregated(METHODS[name](**ABLE[name]), SecureSum())
    plan = plan_of(clients)
    server, at = method.init_server(task.init(0), plan), At(plan, 1)
    ids = tuple(range(N))
    up, _ = ClientWorker(task, clients, method, 0).update(ids, method.broadcast(at, server, ids), {}, at)
    assert isinstance(up, IntegerUpload)
    rows = torch.cat([leaf.reshape(N, -1) for leaf in up.values.values()], 1).numpy().view(np.uint32)
    federation = Federation(N, SecureSum(), length=rows.shape[1])
    words, survivors = federation.run(dict(zip(federation.names, rows, strict=True)), leaves)
    left = [i for i, node in enumerate(federation.names) if node in survivors]

    shown = method.disclosed(up.rows(left))
    assert shown.summed == len(left)
    flat = torch.cat([leaf.reshape(-1) for leaf in shown.values.values()]).numpy().view(np.uint32)
    assert (flat == words).all()
    after, again = (
        method.model(method.server_update(task, at, server, left, sent, ServerStreams(0, 1)))
        for sent in (up.rows(left), shown)
    )
    assert all(torch.equal(leaf, again[key]) for key, leaf in after.items())


def test_below_the_threshold_the_model_stays_as_it_was() -> None:
    task, clients = make_task(), make_clients()
    method = SecurelyAggregated(METHODS["udp-fedavg"](), SecureSum())
    plan = plan_of(clients)
    server, at = method.init_server(task.init(0), plan), At(plan, 1)
    up, _ = ClientWorker(task, clients, method, 0).update(
        range(3), method.broadcast(at, server, range(N)), {}, at
    )
    for few, sent in ((range(3), up), ((), None)):
        assert method.server_update(task, at, server, few, sent, ServerStreams(0, 1)) is server


@pytest.mark.parametrize("name", sorted(ABLE))
def test_without_noise_it_is_the_plain_method(name: str) -> None:
    quiet = {"noise_multiplier": 0.0} if name not in ("fedavg", "fedprox") else {}
    method = METHODS[name](**ABLE[name], **quiet)
    plain, secure = trained(method), trained(method, aggregation=SecureSum())
    for key, leaf in plain.items():
        assert torch.allclose(leaf, secure[key], atol=2e-6), key


@pytest.mark.parametrize("name", sorted(ABLE))
def test_results_do_not_depend_on_how_clients_are_grouped(name: str) -> None:
    method = METHODS[name](**ABLE[name])
    one, other = (
        trained(method, aggregation=SecureSum(), execution=how, workers=workers)
        for how, workers in (("stacked", 1), ("stacked", 2))
    )
    assert all(torch.equal(leaf, other[key]) for key, leaf in one.items())


def test_the_noise_of_the_model_is_that_of_the_shares() -> None:
    """Clients with nothing to learn: what moves the model is noise of sigma C sqrt(n / (t - c)) / n."""
    task = Task(lambda: nn.Linear(2000, 3))
    clients = ArrayClients.from_arrays([(torch.zeros(1, 2000), torch.zeros(1, dtype=torch.long))] * N)
    method = make("udp-fedavg", lr=1e-12, clip=0.5, noise_multiplier=3.0)
    start = task.init(0)["weight"]
    options: dict[str, Any] = {"rounds": 1, "sampler": "all", "noise": "seeded"}
    found = fedveil.run(task, clients, method, aggregation=SecureSum(4, 1), **options)
    moved = (found.model["weight"] - start).double()
    assert float(moved.std()) == pytest.approx(3.0 * 0.5 * math.sqrt(5 / 3) / 5, rel=0.03)


def test_a_run_states_the_noise_of_the_clients_that_answered(tmp_path: Path) -> None:
    method = make("udp-fedavg", noise_multiplier=4.0)
    found = fedveil.run(
        make_task(),
        make_clients(),
        method,
        rounds=2,
        sampler="all",
        aggregation=SecureSum(colluders=1),
        results=tmp_path / "run",
        transcript=True,
    )
    rows = found.summary["privacy"]["proven"]
    assert {row["adversary"] for row in rows} == {"server", "observer", "client"}
    for row in rows:
        assert row["epsilon"] is not None
        assert any("at least 5 of 5 clients answered" in text for text in row["assumptions"])
    written = (tmp_path / "run" / "transcript" / "round-000001" / "exchange-0000" / "up.bin").read_bytes()
    assert IntegerUpload.from_bytes(written).summed == N  # single uploads are not on the record
    assert IntegerUpload.from_bytes(written).count == 1


def test_impossible_groups_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for settings, field in (
        (SecureSum(3, 0), "aggregation.threshold"),
        (SecureSum(4, 3), "aggregation.threshold"),
        (SecureSum(5, 4), "aggregation.colluders"),
    ):
        with pytest.raises(InputError) as caught:
            trained(METHODS["udp-fedavg"](), aggregation=settings, results=tmp_path / "run")
        assert caught.value.field == field
        assert not (tmp_path / "run").exists()
    with pytest.raises(InputError) as caught:
        trained(METHODS["udp-fedavg"](), clients=make_clients(2), aggregation=SecureSum())
    assert caught.value.field == "partition.clients"


SILOS = SecureSum(4, 1)


def test_a_sum_of_records_has_one_noise_for_all_silos() -> None:
    """Silos with nothing to learn: sigma C sqrt(n / (t - c)) on the sum, where each alone would add sigma C."""
    task = Task(lambda: nn.Linear(2000, 3, bias=False))
    clients = ArrayClients.from_arrays([(torch.zeros(4, 2000), torch.zeros(4, dtype=torch.long))] * N)
    method = make("dp-fedsgd", lr=1.0, momentum=0.0, clip=0.5, noise_multiplier=3.0, record_rate=0.5)
    start = task.init(0)["weight"]
    options: dict[str, Any] = {"rounds": 1, "sampler": "all", "noise": "seeded"}
    found = {
        kind: fedveil.run(task, clients, method, aggregation=kind, **options).model["weight"]
        for kind in (None, SILOS)
    }
    plain, secure = (float((found[kind] - start).double().std()) for kind in (None, SILOS))
    batch = 0.5 * 4
    assert secure == pytest.approx(3.0 * 0.5 * math.sqrt(5 / 3) / (N * batch), rel=0.03)
    assert plain == pytest.approx(3.0 * 0.5 * math.sqrt(5) / (N * batch), rel=0.03)


def test_a_sum_of_records_is_charged_as_one_of_records() -> None:
    method = SecurelyAggregated(make("dp-fedsgd", noise_multiplier=1.5, record_rate=0.1), SILOS)
    plan = Plan(5, 5, "all", 20, 100, 100)
    rows = {row.adversary: row for row in account(tuple(method.releases(plan)), plan, 1e-5)}
    alone = account(
        tuple(make("dp-fedsgd", noise_multiplier=1.5, record_rate=0.1).releases(plan)), plan, 1e-5
    )
    assert {row.unit for row in rows.values()} == {"record"}
    server, other = rows["server"].epsilon, rows["client"].epsilon
    assert server is not None
    assert other is not None
    assert server == alone[0].epsilon, "the same epsilon against the server for a third of the variance"
    known = Release("x", "record", ("server",), GaussianNoise(1.5 * math.sqrt(2 / 3)), rate=0.1)
    assert other == epsilon_of((known,), plan, 1e-5, "server", "record")
    assert all(row.assumptions for row in rows.values())


def test_a_record_moves_the_integers_by_no_more_than_its_clip_and_the_rounding() -> None:
    """Seeded noise is the same with and without the record, so what is left is the record itself."""
    task, clients = make_task(), make_clients(equal=True)
    method = SecurelyAggregated(make("dp-fedsgd", record_rate=1.0, clip=0.05, noise_multiplier=2.0), SILOS)
    plan = plan_of(clients)
    at, server = At(plan, 1), method.init_server(task.init(0), plan)
    noise = method.noise(plan)
    down = method.broadcast(at, server, range(N))
    whole = clients.load([0])
    pairs = [(whole.x[0], whole.y[0]), (whole.x[0][:-1], whole.y[0][:-1])]
    with_it, without = (
        method.client_update(
            task, at, down, ArrayClients.from_arrays([pair]).load([0]), {}, ClientStreams(0, 1, (0,))
        )[0]
        for pair in pairs
    )
    moved = torch.cat(
        [(leaf - without.values[key]).double().flatten() for key, leaf in with_it.values.items()]
    )
    assert 0 < float(moved.norm()) <= noise.clip / noise.step + math.sqrt(len(moved))
    assert noise.longest == 0.05 * 8


@pytest.mark.parametrize(
    ("fields", "plan", "field"),
    [
        ({"clip": math.inf, "noise_multiplier": 1.0}, Plan(5, 5, "all", 3, 9, 9), "method.clip"),
        ({"noise_multiplier": 1.0}, Plan(5, 5, "all", 3, 9, 10**7), "method.noise_multiplier"),
        ({}, Plan(5, 4, "poisson", 3, 9, 9), "run.sampler"),
    ],
)
def test_sums_of_records_that_could_wrap_are_refused(fields: dict[str, Any], plan: Plan, field: str) -> None:
    with pytest.raises(InputError) as caught:
        SecurelyAggregated(make("dp-fedsgd", **fields), SILOS).init_server({}, plan)
    assert caught.value.field == field
