"""The provable variants: what leaves, what it costs, and that nothing else does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedveil import At, Plan
from fedveil.errors import InputError
from fedveil.experiment.config import build_method
from fedveil.methods.dp_fedags import printed_sigma
from fedveil.methods.dp_fedags_proven import DPFedAGSProven, Selected, public_mask, scattered
from fedveil.privacy.accounting import account_participation, epsilon_of
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.noise import grid
from fedveil.session.privacy_guard import privacy_statement
from fedveil.streams import ServerStreams
from fedveil.tree import flatten, sub
from tests.contract.federation import make_clients, make_plan, make_task
from tests.contract.test_methods import train

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


# --- the price ------------------------------------------------------------------------------------------------


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
def test_top_k_costs_the_zcdp_of_its_noise_multiplier_for_any_k(share: float, count: int) -> None:
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


def test_a_public_mask_costs_no_index_on_the_way_up() -> None:
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


def test_missing_clients_are_made_up_for_in_noise() -> None:
    """The published mean of a Poisson round has the declared noise, whoever came."""
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
    with pytest.raises(InputError, match=f"method.{named}"):
        made(**fields)
