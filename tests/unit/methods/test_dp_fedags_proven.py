"""The provable variants: what is sent, its guarantee, and that nothing else is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedveil import ArrayClients, At, Plan, Task
from fedveil.audits.canaries import gaussian_epsilon
from fedveil.audits.of_method import audit_method
from fedveil.errors import InputError
from fedveil.experiment.config import build_method
from fedveil.methods.dp_fedags import printed_sigma
from fedveil.methods.dp_fedags_proven import DPFedAGSProven, Selected, public_mask, scattered
from fedveil.privacy.accounting import account_participation, epsilon_of
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.noise import grid
from fedveil.session.privacy_guard import privacy_statement
from fedveil.streams import ClientStreams, ServerStreams, named_stream
from fedveil.training.private_sgd import clipped_sum
from fedveil.tree import flatten, sub, with_axis
from tests.contract.federation import make_clients, make_plan, make_task
from tests.contract.test_methods import train
from tests.refusals import refuses

DELTA = 1e-3
PAPER = Plan(100, 10, "fixed", 200, 600, 600)
VARIANTS: list[dict[str, Any]] = [
    {"variant": "everywhere"},
    {"variant": "public-mask", "selected": 0.25},
    {"variant": "top-k", "selected": 0.25},
    {"variant": "sparse-vector", "selected": 0.25, "upload_epsilon": 2.0},
]


def made(**fields: Any) -> DPFedAGSProven:
    method = build_method({"name": "dp-fedags-proven", "batch_size": 4} | fields)
    assert isinstance(method, DPFedAGSProven)
    return method


def exchange(method: DPFedAGSProven) -> tuple[Any, Any, Selected, Any]:
    from fedveil.engines.worker import ClientWorker

    task, plan = make_task(), make_plan()
    at = At(plan, 1)
    server = method.init_server(task.init(0), plan)
    down = method.broadcast(at, server, (0, 1, 3))
    up, _ = ClientWorker(task, make_clients(), method, 0).update((0, 1, 3), down, {}, at)
    assert isinstance(up, Selected)
    return server, down, up, at


# --- the guarantee --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["everywhere", "public-mask"])
@pytest.mark.parametrize(
    ("claimed", "once", "all_rounds"), [(0.1, 0.43, 2.43), (0.2, 0.80, 4.64), (0.5, 1.62, 10.27)]
)
def test_epsilon_is_that_of_the_table(variant: Any, claimed: float, once: float, all_rounds: float) -> None:
    """At delta 1e-5, with the noise that the paper prints for its claimed epsilon."""
    method = made(variant=variant, noise_multiplier=printed_sigma(claimed))
    releases = method.releases(PAPER)
    one = {row.adversary: row.epsilon for row in account_participation(releases, PAPER, 1e-5)}
    assert one["server"] == pytest.approx(once, abs=0.006)
    found = epsilon_of(releases, PAPER, 1e-5, "server", "client")
    assert found == pytest.approx(all_rounds, abs=0.006)


@pytest.mark.parametrize("fields", VARIANTS)
def test_every_adversary_gets_an_epsilon(fields: dict[str, Any]) -> None:
    rows = privacy_statement(made(**fields), PAPER, DELTA).proven
    assert {row.adversary for row in rows} == {"server", "observer", "client"}
    assert all(row.epsilon is not None and math.isfinite(row.epsilon) for row in rows)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_top_k_has_the_zcdp_of_its_noise_multiplier_for_any_k(share: float, count: int) -> None:
    method = made(variant="top-k", noise_multiplier=3.0, selection_share=share)
    priced = method._top_k(count)
    rho = count * priced.selection_epsilon**2 / 8 + 1 / (2 * priced.multiplier**2)
    assert rho == pytest.approx(1 / (2 * 3.0**2))
    assert priced.protection().rho == pytest.approx(rho)


def test_the_sparse_vector_spends_what_it_declares() -> None:
    priced = made(variant="sparse-vector", upload_epsilon=1.5)._sparse_vector(40)
    assert priced.protection().epsilon == pytest.approx(1.5)
    assert priced.epsilon_questions / priced.epsilon_threshold == pytest.approx(80 ** (2 / 3))


@pytest.mark.parametrize("fields", VARIANTS[:3])
def test_noise_can_be_calibrated_to_a_target(fields: dict[str, Any]) -> None:
    def releases(noise: float) -> Any:
        return made(**fields, noise_multiplier=noise).releases(PAPER)

    noise = calibrate(releases, PAPER, DELTA, 5.0, "server", "client", tolerance=0.05)
    found = epsilon_of(releases(noise), PAPER, DELTA, "server", "client")
    assert found is not None
    assert 4.75 <= found <= 5.0


def test_without_noise_or_clip_nothing_is_claimed() -> None:
    for fields in ({"noise_multiplier": 0.0}, {"clip": math.inf}):
        rows = privacy_statement(made(**fields), PAPER, DELTA).proven
        assert all(row.epsilon is None for row in rows)


# --- what leaves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", VARIANTS)
def test_unselected_coordinates_are_zero_and_not_sent(fields: dict[str, Any]) -> None:
    method = made(**fields)
    server, down, up, at = exchange(method)
    d = len(server.seen)
    k = method.count(d)
    assert up.values.shape == (3, k)
    read = method.read_upload(at, down, up)
    moved = flatten(sub(read.models, read.start))
    assert int((moved != 0).sum(1).max()) <= k
    expected = k * up.values.element_size() + (
        4 * k if fields["variant"] in ("top-k", "sparse-vector") else 0
    )
    assert up.row_bytes() == expected


def test_a_public_mask_needs_no_indices_in_uploads() -> None:
    _, down, up, _ = exchange(made(variant="public-mask", selected=0.25))
    assert up.own == {}
    assert down.mask["places"].shape == (1, up.values.shape[1])


def test_clipping_happens_on_the_mask() -> None:
    """With a tiny clip and hardly any noise the sent values have exactly the clip's length."""
    _, _, up, _ = exchange(made(selected=0.3, clip=1e-3, noise_multiplier=1e-4))
    assert torch.allclose(up.values.norm(dim=1), torch.full((3,), 1e-3, dtype=torch.float64), rtol=1e-3)


def test_top_k_takes_the_largest_when_its_noise_is_small() -> None:
    method = made(variant="top-k", selected=0.1, noise_multiplier=1e-7, clip=10.0, selection_share=0.9)
    _, _, up, _ = exchange(method)
    whole = made(variant="everywhere", noise_multiplier=0.0, clip=10.0)
    _, _, dense, _ = exchange(whole)
    k = up.values.shape[1]
    expected = dense.values.abs().topk(k, dim=1).indices.sort(1).values
    assert torch.equal(up.own["places"].sort(1).values.long(), expected)
    assert torch.allclose(up.values, dense.values.gather(1, up.own["places"].long()), atol=1e-4)


def test_the_mask_follows_what_was_published_and_explores_the_rest() -> None:
    seen = torch.zeros(100)
    seen[[3, 40, 77]] = torch.tensor([5.0, -9.0, 2.0])
    mask = public_mask(seen, 6, 0.5, round=1)
    assert {3, 40, 77} <= set(mask.tolist())
    assert len(set(mask.tolist())) == 6
    assert not torch.equal(mask, public_mask(seen, 6, 0.5, round=2))
    assert torch.equal(mask, public_mask(seen, 6, 0.5, round=1))
    assert len(public_mask(seen, 100, 0.0, round=1)) == 100


def test_all_coordinates_are_looked_at_sooner_or_later() -> None:
    seen, looked = torch.ones(50), set()
    for t in range(1, 80):
        looked |= set(public_mask(seen, 10, 0.5, t).tolist())
    assert looked == set(range(50))


def test_equal_places_add_up() -> None:
    values = torch.tensor([[1.0, 2.0, 0.0]])
    assert scattered(values, torch.tensor([[1, 1, 0]]), 3).tolist() == [[0.0, 3.0, 0.0]]


def test_a_mask_of_everything_is_variant_0() -> None:
    whole = {"noise_multiplier": 0.5, "clip": 0.7}
    one = train(made(variant="public-mask", selected=1.0, **whole))
    two = train(made(variant="everywhere", **whole))
    assert all(torch.allclose(one[name], two[name], atol=1e-12) for name in one)


def test_variant_0_is_dp_fedavg_with_the_noise_turned_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """(w0 - w) / eta clipped to C, and w - w0 clipped to eta C, are one mechanism up to the sign of the noise."""
    lr = 0.5
    proven = train(made(variant="everywhere", noise_multiplier=0.8, clip=0.6, lr=lr))
    original = grid.rounded_normal
    monkeypatch.setattr(grid, "rounded_normal", lambda value, *given: -original(-value, *given))
    fields = {"name": "dp-fedavg", "noise_scope": "local", "noise_multiplier": 0.8, "clip": 0.6 * lr}
    plain = train(build_method(fields | {"batch_size": 4, "lr": lr}))
    assert all(torch.allclose(proven[name], plain[name], atol=1e-9) for name in proven)


def test_the_server_adds_the_noise_of_missing_clients() -> None:
    """The published mean of a Poisson round has the declared noise, whoever participated."""
    method = made(variant="everywhere", noise_multiplier=2.0, clip=1.0, lr=1.0)
    task, plan = make_task(), make_plan(sampler="poisson")
    server = method.init_server(task.init(0), plan)
    draws = []
    for t in range(1, 60):
        after = method.server_update(task, At(plan, t), server, (), None, ServerStreams(0, t))
        draws.append(flatten({k: v.unsqueeze(0) for k, v in sub(after.params, server.params).items()}))
    std = float(torch.cat(draws).std())
    assert std == pytest.approx(2.0 * math.sqrt(plan.cohort) / plan.cohort, rel=0.05)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"variant": "sparse-vector"}, "upload_epsilon"),
        ({"variant": "sparse-vector", "upload_epsilon": 0.0}, "upload_epsilon"),
        ({"variant": "top-k", "upload_epsilon": 1.0}, "upload_epsilon"),
        ({"variant": "top-k", "clip": math.inf}, "clip"),
        ({"variant": "top-k", "noise_multiplier": 0.0}, "noise_multiplier"),
        ({"selected": 0.0}, "selected"),
        ({"selected": 1.5}, "selected"),
        ({"explore": -0.1}, "explore"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"variant": "V1"}, "variant"),
    ],
)
def test_impossible_fields_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with refuses(f"method.{named}"):
        made(**fields)


# --- records --------------------------------------------------------------------------------------------------


def plain_task() -> Task:
    """Without dropout, so that sums can be compared."""
    size = make_clients().x[0].numel()
    return Task(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(size, 3)).double())


def sums(x: torch.Tensor, y: torch.Tensor, clip: float) -> torch.Tensor:
    """What one client's records add up to before noise."""
    task = plain_task()
    data = ArrayClients.from_arrays([(x, y)]).load([0])
    batch = replace(data.everything(), mask=torch.ones(1, len(y), dtype=torch.bool))
    return flatten(clipped_sum(task, with_axis(task.init(0)), batch, clip))[0]


def test_no_record_moves_the_sum_by_more_than_stated() -> None:
    """Tries to break the sensitivity: records of any size, labels and neighbours, and the worst pair that is found."""
    clip, worst_zeroed, worst_replaced = 0.7, 0.0, 0.0
    rng = named_stream(0, "records")
    shape = make_clients().x.shape[1:]
    for size in (1e-6, 1.0, 1e3, 1e6):
        for _ in range(10):
            x = torch.from_numpy(rng.standard_normal((6, *shape)) * size)
            y = torch.from_numpy(rng.integers(0, 3, 6))
            whole = sums(x, y, clip)
            zeroed = whole - sums(x[1:], y[1:], clip)
            other_x, other_y = x.clone(), y.clone()
            other_x[0], other_y[0] = -x[0] * float(rng.choice([1.0, 1e3])), (y[0] + 1) % 3
            worst_zeroed = max(worst_zeroed, float(zeroed.norm()))
            worst_replaced = max(worst_replaced, float((whole - sums(other_x, other_y, clip)).norm()))
    assert 0.99 * clip < worst_zeroed <= clip * (1 + 1e-9)
    assert 1.1 * clip < worst_replaced <= 2 * clip * (1 + 1e-9)


@pytest.mark.parametrize("variant", ["everywhere", "public-mask"])
def test_an_upload_is_the_mean_of_clipped_records_with_the_declared_noise(variant: Any) -> None:
    task, plan, clients = plain_task(), make_plan(), make_clients()
    at = At(plan, 1)
    quiet, loud = (
        made(variant=variant, unit="record", noise_multiplier=noise, clip=0.7) for noise in (1e-5, 3.0)
    )
    down = quiet.broadcast(at, quiet.init_server(task.init(0), plan), (0, 1, 3))
    up, _ = quiet.client_update(task, at, down, clients.load([0, 1, 3]), {}, ClientStreams(0, 1, (0, 1, 3)))
    for row, client in enumerate((0, 1, 3)):
        part = clients.parts[client]
        expected = sums(clients.x[part], clients.y[part], 0.7) / len(part)
        if down.mask:
            expected = expected[down.mask["places"][0].long()]
        torch.testing.assert_close(up.values[row].double(), expected, rtol=0, atol=1e-4)
    sent = [
        loud.client_update(task, at, down, clients.load([1]), {}, ClientStreams(seed, 1, (1,)))[0].values[0]
        for seed in range(200)
    ]
    noise = torch.stack(sent).double() - up.values[1].double()
    assert float(noise.std()) == pytest.approx(3.0 * 0.7 / len(clients.parts[1]), rel=0.05)


def test_record_level_epsilon_is_that_of_one_gaussian_per_participation() -> None:
    method = made(unit="record", variant="everywhere", noise_multiplier=4.0)
    rows = {row.adversary: row for row in account_participation(method.releases(PAPER), PAPER, 1e-5)}
    for adversary in ("server", "observer", "client"):
        assert rows[adversary].unit == "record"
        assert rows[adversary].epsilon == pytest.approx(gaussian_epsilon(1 / 4.0, 1e-5), rel=0.01)
        assert rows[adversary].adjacency == "zero-out"


def test_audits_of_records_find_no_more_than_is_proven() -> None:
    from tests.contract import untouched

    method = made(unit="record", variant="everywhere", noise_multiplier=1.0)
    assert untouched.audit_untouched_records(method, PAPER, delta=1e-5).lower_bound == 0
    for found in audit_method(method, PAPER, delta=1e-5, samples=2000):
        assert not found.broken, found


@pytest.mark.parametrize(
    ("field", "value"),
    [("epochs", 2), ("momentum", 0.5), ("weight_decay", 0.1), ("local_steps", 3), ("variant", "top-k")],
)
def test_records_are_protected_in_one_plain_step_only(field: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        made(**({"unit": "record", "variant": "everywhere"} | {field: value}))
    assert refused.value.field == f"method.{field}"
