"""What FedCEO discloses at record level and with restarts, and its last round."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch

from fedveil import At, Plan
from fedveil.errors import InputError
from fedveil.methods.fedceo import FedCEO, Server
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.accounting import account
from fedveil.privacy.releases import Sampler
from fedveil.streams import ClientStreams
from fedveil.tree import mean
from tests.contract.federation import distance, make_clients, make_plan, make_task
from tests.unit.methods.test_fedceo import PLAN, stack, updated


def test_record_level_releases_count_the_noisy_batches() -> None:
    plan = Plan(100, 10, "all", 1, 400, 400)
    method = FedCEO(unit="record", noise_multiplier=1.0, epochs=30, batch_size=64)
    row = next(row for row in account(method.releases(plan), plan, 1e-5) if row.adversary == "server")
    assert row.unit == "record"
    assert row.epsilon == pytest.approx(15.2, abs=0.06)


@pytest.mark.parametrize("unit", ["client", "record"])
def test_after_smoothing_a_client_starts_from_its_own_last_upload(unit: Literal["client", "record"]) -> None:
    """Updates are small, so an upload shows where its client started; the third never took part."""
    method = FedCEO(restart="own", interval=2, unit=unit, clip=1e-3, noise_multiplier=1.0, lr=1e-3)
    task, plan = make_task(), make_plan(rounds=9)
    data, rng = make_clients().load([0, 1, 3]), ClientStreams(0, 3, (0, 1, 3))
    server = method.init_server(task.init(0), plan)
    state = method.init_client(task, data, rng)
    for name, leaf in task.init(0).items():
        state[f"last.{name}"][:2] = leaf + 5
    state["known"][:2] = True
    for round_, moved in ((3, 5.0), (2, 0.0), (4, 0.0)):
        at = At(plan, round_)
        up, after = method.client_update(task, at, method.broadcast(at, server, (0, 1, 3)), data, state, rng)
        for name, leaf in up.params.items():
            expected = server.params[name].expand_as(leaf).clone()
            expected[:2] += moved
            torch.testing.assert_close(leaf, expected, rtol=0, atol=0.05)
            assert torch.equal(after[f"last.{name}"], leaf)
        assert bool(after["known"].all())


def test_weights_without_noise_are_not_carried_on() -> None:
    unnoised: list[dict[str, Any]] = [{"noise_multiplier": 0.0}, {"clip": math.inf}]
    for broken in unnoised:
        for unit in ("client", "record"):
            with pytest.raises(InputError) as caught:
                FedCEO(**{"restart": "own", "unit": unit, **broken})
            assert caught.value.field == "restart"


def epsilons(method: Any, plan: Plan) -> dict[str, float | None]:
    return {row.adversary: row.epsilon for row in account(method.releases(plan), plan, 1e-5)}


@pytest.mark.parametrize("sampler", ["fixed", "poisson"])
def test_own_restarts_add_no_release_to_the_server_and_uploads_to_everybody_else(sampler: Sampler) -> None:
    plan = Plan(100, 10, sampler, 40, 5, 5)
    own, plain = (epsilons(m, plan) for m in (FedCEO(restart="own", interval=5), UDPFedAvg()))
    assert own["server"] == plain["server"]
    for adversary in ("observer", "client"):
        dearer, cheaper = own[adversary], plain[adversary]
        assert dearer is not None
        assert cheaper is not None
        assert dearer > cheaper
    rows = FedCEO(restart="own", interval=5).releases(plan)
    assert {row.participation for row in rows} == {"seen"}
    for round_ in range(1, 41):
        found = [row for row in rows if "observer" in row.visible_to and row.happens_in(round_)]
        assert len(found) == 1
        assert found[0].accesses == (2 if round_ in range(6, 41, 5) else 1)


def test_own_restarts_in_every_round_charge_every_round_twice() -> None:
    plan = Plan(100, 10, "fixed", 4, 5, 5)
    rows = FedCEO(restart="own", interval=1).releases(plan)
    assert all(any("observer" in row.visible_to and row.happens_in(t) for row in rows) for t in range(1, 5))


def test_at_record_level_own_restarts_are_composed_participations() -> None:
    plan = Plan(100, 10, "fixed", 40, 64, 64)
    own, slot = (FedCEO(unit="record", restart=restart).releases(plan) for restart in ("own", "slot"))
    assert own == slot


def test_the_final_round_may_stay_unsmoothed() -> None:
    start, up = Server(mean(stack(1)), {}), stack(4)
    kept = updated(FedCEO(lam=0.01, interval=3, smooth_last=False, noise_multiplier=0.0), start, up, round=12)
    torch.testing.assert_close(kept.params, mean(up), rtol=0, atol=1e-12)
    assert kept.personal == {}
    smoothed = updated(FedCEO(lam=0.01, interval=3, noise_multiplier=0.0), start, up, round=12)
    assert distance(smoothed.params, kept.params) > 1


def test_no_noise_is_no_privacy() -> None:
    for method in (FedCEO(noise_multiplier=0.0), FedCEO(unit="record", clip=math.inf)):
        assert all(row.epsilon is None for row in account(method.releases(PLAN), PLAN, 1e-5))
