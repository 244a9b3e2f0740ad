"""FedCEO's round: slots, the schedule of its threshold, what it smooths, and what it discloses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedveil import At, Plan
from fedveil.engines.simulation import Simulation
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedceo import FedCEO, NoisyModel, Server
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.accounting import account, account_rounds, rounds_of
from fedveil.privacy.releases import Sampler
from fedveil.session.loop import run_rounds
from fedveil.streams import ServerStreams
from fedveil.tree import Params, mean
from tests.contract.federation import distance, make_clients, make_plan, make_task
from tests.refusals import refuses

PLAN = Plan(10, 4, "fixed", 12, 5, 5)
SHAPES = {"conv.weight": (4, 3, 2, 2), "conv.bias": (4,), "fc.weight": (5, 6), "fc.bias": (5,)}


def stack(count: int, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def shrunk(matrix: Tensor, threshold: float) -> Tensor:
    """Matrix soft-thresholding by its definition."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found: Tensor = left @ torch.diag((values - threshold).clamp_min(0)) @ right
    return found


def updated(
    method: FedCEO,
    server: Server,
    up: Params | None,
    *,
    round: int,
    slot: list[int] | None = None,
    plan: Plan = PLAN,
) -> Server:
    """The server after these uploads, given by clients 0, 1, ..."""
    count = 0 if up is None else len(up["fc.bias"])
    message = None
    if up is not None:
        message = NoisyModel(up, torch.tensor([0] * count if slot is None else slot))
    at, rng = At(plan, round), ServerStreams(0, round)
    return method.server_update(make_task(), at, server, tuple(range(count)), message, rng)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lam", 0.0),
        ("lam", -1.0),
        ("lam", math.nan),
        ("lam", math.inf),
        ("theta", 0.99),
        ("theta", math.inf),
        ("interval", 0),
        ("layers", "first:2"),
        ("layers", "last:0"),
    ],
)
def test_bad_fields_are_refused(field: str, value: Any) -> None:
    with refuses(field):
        FedCEO(**{field: value})


def test_unknown_layers_are_refused_before_training() -> None:
    with refuses("layers"):
        FedCEO(layers=["fc9"]).init_server(mean(stack(1)), PLAN)
    with refuses("layers"):
        FedCEO(layers=[]).init_server(mean(stack(1)), PLAN)


def test_a_stack_that_is_not_finite_is_refused() -> None:
    broken = stack(4)
    broken["fc.weight"][2, 0, 0] = math.nan
    with refuses("stack"):
        FedCEO(lam=1.0).smooth(broken, 10, 0.0)


@pytest.mark.parametrize("theta", [1.0, 1.5])
def test_the_threshold_follows_the_geometric_schedule(theta: float) -> None:
    method = FedCEO(lam=4.0, theta=theta, interval=3)
    for t in (3, 6, 12):
        expected = theta ** (t / 3) / (2 * 4.0)
        assert method.threshold(t, 0.0, 4, 5, 6) == pytest.approx(expected, rel=1e-12)


def test_an_infinite_threshold_gives_zeros() -> None:
    """theta^(t/I) overflows in long runs; without noise "auto" still smooths nothing."""
    up = stack(3)
    smooth = FedCEO(lam=0.1, theta=10.0, interval=1).smooth(up, 1000, 0.0)
    assert torch.count_nonzero(smooth["fc.weight"]) == 0
    kept = FedCEO(theta=10.0, interval=1).smooth(up, 1000, 0.0)
    assert torch.equal(kept["fc.weight"], up["fc.weight"])


def test_smoothing_is_the_closed_form_layer_by_layer() -> None:
    """Against complex SVDs of all slices; convolutions fold as o x (i kh kw), vectors are averaged."""
    up = stack(4)
    smooth = FedCEO(lam=0.2, theta=1.1, interval=3).smooth(up, 6, 0.0)
    threshold = 1.1**2 / 0.4
    for name, fold in (("conv.weight", (4, 4, 12)), ("fc.weight", (4, 5, 6))):
        slices = torch.fft.fft(up[name].reshape(fold), dim=0)
        shrunken = torch.stack([_complex_shrunk(one, threshold) for one in slices])
        expected = torch.fft.ifft(shrunken, dim=0).real.reshape(up[name].shape)
        torch.testing.assert_close(smooth[name], expected, rtol=0, atol=1e-9)
    for name in ("conv.bias", "fc.bias"):
        assert torch.equal(smooth[name], up[name].mean(0, keepdim=True).expand_as(up[name]))


def _complex_shrunk(matrix: Tensor, threshold: float) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found: Tensor = left @ torch.diag((values - threshold).clamp_min(0).to(left.dtype)) @ right
    return found


def test_a_large_threshold_gives_everyone_the_truncated_mean() -> None:
    """Proposition 3.2: only the lowest frequency is left."""
    generator = torch.Generator().manual_seed(1)
    common = 40 * torch.randn(5, 6, generator=generator, dtype=torch.float64)
    up = stack(4) | {"fc.weight": common + torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)}
    threshold = 1.01 * float(torch.linalg.svdvals(torch.fft.fft(up["fc.weight"], dim=0)[1:]).max())
    smooth = FedCEO(lam=1 / (2 * threshold), interval=3).smooth(up, 3, 0.0)["fc.weight"]
    expected = shrunk(up["fc.weight"].mean(0), threshold / 4)
    for personal in smooth:
        torch.testing.assert_close(personal, expected, rtol=0, atol=1e-9)


def test_folded_biases_and_chosen_layers() -> None:
    up = stack(4)
    folded = FedCEO(lam=0.5, interval=3, biases="fold").smooth(up, 3, 0.0)
    spectrum = torch.fft.fft(up["fc.bias"], dim=0)
    length = spectrum.abs().square().sum(1, keepdim=True).sqrt()
    expected = torch.fft.ifft(
        spectrum * (1 - 1 / length).clamp_min(0), dim=0
    ).real  # n x 1: one singular value
    torch.testing.assert_close(folded["fc.bias"], expected, rtol=0, atol=1e-9)
    last = FedCEO(lam=0.5, interval=3, layers="last:1").smooth(up, 3, 0.0)
    named = FedCEO(lam=0.5, interval=3, layers=["fc"]).smooth(up, 3, 0.0)
    assert distance(last, named) == 0
    assert torch.equal(last["conv.weight"], up["conv.weight"].mean(0, keepdim=True).expand(4, -1, -1, -1, -1))
    torch.testing.assert_close(last["fc.weight"], FedCEO(lam=0.5, interval=3).smooth(up, 3, 0.0)["fc.weight"])


def test_one_client_is_matrix_soft_thresholding() -> None:
    up = stack(1)
    smooth = FedCEO(lam=0.5, interval=1).smooth(up, 1, 0.0)
    torch.testing.assert_close(smooth["fc.weight"][0], shrunk(up["fc.weight"][0], 1.0), rtol=0, atol=1e-9)


def test_equal_clients_stay_equal() -> None:
    up = {name: leaf.expand(4, *leaf.shape[1:]) for name, leaf in stack(1).items()}
    smooth = FedCEO(lam=0.5, interval=1).smooth(up, 1, 0.0)
    for leaf in smooth.values():
        torch.testing.assert_close(leaf, leaf[:1].expand_as(leaf), rtol=0, atol=1e-12)
    expected = shrunk(up["fc.weight"][0], 1.0 / 4)
    torch.testing.assert_close(smooth["fc.weight"][0], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("d", "h", "slots"), [(300, 100, 10), (200, 200, 5), (120, 400, 7)])
def test_auto_is_the_edge_of_pure_noise(d: int, h: int, slots: int) -> None:
    """Every singular value of noise lies just below the threshold, so smoothing leaves next to nothing of it."""
    method = FedCEO(noise_multiplier=1.5, clip=2.0, interval=1, server_lr=0.5)
    plan = Plan(100, slots, "fixed", 5)
    std = 0.5 * 1.5 * 2.0 / math.sqrt(slots)
    assert method.noise_std(At(plan, 1)) == pytest.approx(std)
    generator = torch.Generator().manual_seed(d)
    noise = std * torch.randn(slots, d, h, generator=generator, dtype=torch.float64)
    threshold = method.threshold(1, std, slots, d, h)
    largest = float(torch.linalg.svdvals(torch.fft.fft(noise, dim=0)).max())
    assert threshold == pytest.approx(std * math.sqrt(slots) * (math.sqrt(d) + math.sqrt(h)))
    assert 0.95 * threshold < largest < 1.05 * threshold
    left = method.smooth({"fc.weight": noise}, 1, std)["fc.weight"]
    assert float(left.norm() / noise.norm()) < 0.02


def test_auto_takes_the_noise_of_all_private_steps_as_far_as_the_server_follows() -> None:
    method = FedCEO(
        unit="record", noise_multiplier=1.5, clip=2.0, epochs=3, batch_size=10, lr=0.2, server_lr=0.5
    )
    plan = Plan(100, 5, "fixed", 5, 40, 40)
    steps, expected_batch = 3 * 4, 10
    each = 0.5 * 0.2 * 1.5 * 2.0 / expected_batch
    assert method.noise_std(At(plan, 1)) == pytest.approx(each * math.sqrt(steps))


def test_auto_without_noise_leaves_everything() -> None:
    up = stack(4)
    for method in (FedCEO(noise_multiplier=0.0, interval=1), FedCEO(clip=math.inf, interval=1)):
        smooth = method.smooth(up, 1, method.noise_std(At(PLAN, 1)))
        assert torch.equal(smooth["fc.weight"], up["fc.weight"])


def test_slots_hand_their_models_on() -> None:
    """Slot j continues slot j; a slot without predecessor starts from the shared model."""
    method = FedCEO(lam=0.5, interval=3)
    server = updated(method, Server(mean(stack(1)), {}), stack(4), round=3)
    assert len(server.personal["fc.weight"]) == 4
    torch.testing.assert_close(server.params, mean(server.personal))
    more = method.broadcast(At(PLAN, 4), server, (1, 3, 5, 7, 8, 9))
    assert more.slot.tolist() == [1, 2, 3, 4, 0, 0]
    assert torch.equal(more.params["fc.weight"][:4], server.personal["fc.weight"])
    assert torch.equal(more.params["fc.weight"][5], server.params["fc.weight"])
    fewer = method.broadcast(At(PLAN, 4), server, (2, 6))
    assert torch.equal(fewer.params["fc.weight"], server.personal["fc.weight"][:2])
    assert method.broadcast(At(PLAN, 4), server, ()).count == 0
    after = updated(method, server, stack(4, seed=2), round=4, slot=[1, 2, 3, 4])
    assert after.personal == {}
    assert method.broadcast(At(PLAN, 5), after, (0, 1)).slot.tolist() == [0]


def test_the_cohorts_models_are_held_after_smoothing_only() -> None:
    method = FedCEO(interval=2, lam=1.0, noise_multiplier=0.0)
    first = updated(method, Server(mean(stack(3)), {}), stack(3), round=1)
    assert method.cohort_models(first) is None
    models = method.cohort_models(updated(method, first, stack(3, 1), round=2))
    assert models is not None
    assert len(models["fc.bias"]) == 3


def test_after_smoothing_whole_cohorts_give_the_plain_mean() -> None:
    """Line 17: the mean of the uploads."""
    method = FedCEO(lam=0.5, interval=3, noise_multiplier=0.0)
    server = updated(method, Server(mean(stack(1)), {}), stack(4), round=3)
    up = stack(4, seed=3)
    after = updated(method, server, up, round=4, slot=[1, 2, 3, 4])
    torch.testing.assert_close(after.params, mean(up), rtol=0, atol=1e-12)


def test_who_drops_out_after_smoothing_takes_its_slot_along() -> None:
    """The shared model moves by the mean update of those who participated, wherever each of them started."""
    method = FedCEO(lam=0.5, interval=3, noise_multiplier=0.0)
    server = updated(method, Server(mean(stack(1)), {}), stack(4), round=3)
    up = stack(2, seed=4)
    after = updated(method, server, up, round=4, slot=[4, 1])
    starts = server.personal["fc.weight"][[3, 0]]
    expected = server.params["fc.weight"] + (up["fc.weight"] - starts).mean(0)
    torch.testing.assert_close(after.params["fc.weight"], expected, rtol=0, atol=1e-12)


def test_poisson_cohorts_divide_by_their_expectation() -> None:
    poisson = Plan(10, 4, "poisson", 12, 5, 5)
    method = FedCEO(lam=0.5, interval=3, noise_multiplier=0.0)
    server = updated(method, Server(mean(stack(1)), {}), stack(3), round=3, plan=poisson)
    up = stack(5, seed=5)
    slot = [1, 2, 3, 0, 0]
    after = updated(method, server, up, round=4, slot=slot, plan=poisson)
    starts = torch.cat([server.personal["fc.weight"], server.params["fc.weight"].expand(2, -1, -1)])
    expected = server.params["fc.weight"] + (up["fc.weight"] - starts).sum(0) / 4
    torch.testing.assert_close(after.params["fc.weight"], expected, rtol=0, atol=1e-12)


def test_missing_noise_is_topped_up() -> None:
    """Two of four participated: the server adds what is missing of sigma C, over the two it divides by."""
    method = FedCEO(interval=3, noise_multiplier=2.0, clip=0.5)
    start = {"fc.weight": torch.zeros(200, 300, dtype=torch.float64), "fc.bias": torch.zeros(5).double()}
    same = {name: leaf.expand(2, *leaf.shape) for name, leaf in start.items()}
    after = updated(method, Server(start, {}), same, round=1)
    expected = 2.0 * 0.5 * math.sqrt(1 - 2 / 4) / 2
    assert float(after.params["fc.weight"].std()) == pytest.approx(expected, rel=0.02)


def test_drop_outs_in_a_smoothing_round_leave_a_smaller_stack() -> None:
    server = updated(FedCEO(lam=0.5, interval=3), Server(mean(stack(1)), {}), stack(3), round=3)
    assert len(server.personal["fc.weight"]) == 3


def test_a_round_without_participants() -> None:
    method = FedCEO(lam=0.5, interval=3)
    before = updated(method, Server(mean(stack(1)), {}), stack(4), round=3)
    plain = updated(method, before, None, round=4)
    assert (
        float((plain.params["fc.weight"] - before.params["fc.weight"]).abs().max()) > 0
    )  # the declared noise
    smoothing = updated(method, before, None, round=6)
    assert torch.equal(smoothing.params["fc.weight"], before.params["fc.weight"])
    assert smoothing.personal == {}


def trained(method: Any, rounds: int) -> Params:
    task, clients, plan = make_task(), make_clients(), make_plan(rounds=rounds)
    engine = Simulation(task, clients, method, plan, seed=0, execution="stacked", workers=1)
    server = method.init_server(task.init(0), plan)
    found: Params = method.model(run_rounds(task, method, engine, plan, server, seed=0).server)
    return found


def test_without_noise_and_smoothing_it_is_fedavg() -> None:
    """A huge lambda smooths nothing, so the mean after the first smoothing round is FedAvg's."""
    quick: dict[str, Any] = {"epochs": 2, "batch_size": 4}
    bare = FedCEO(noise_multiplier=0.0, clip=math.inf, lam=1e12, interval=3, **quick)
    assert distance(trained(bare, 3), trained(FedAvg(weighting="uniform", **quick), 3)) < 1e-9


@pytest.mark.parametrize("unit", ["client", "record"])
def test_smoothing_rounds_do_not_depend_on_how_clients_are_computed(unit: Any) -> None:
    method = FedCEO(lam=2.0, theta=1.1, interval=2, epochs=2, batch_size=4, unit=unit, momentum=0.5)
    task, clients, plan = make_task(), make_clients(), make_plan(rounds=5)
    found = []
    for execution, workers in (("stacked", 1), ("one-by-one", 1), ("stacked", 2)):
        engine = Simulation(task, clients, method, plan, seed=0, execution=execution, workers=workers)  # type: ignore[arg-type]
        try:
            server = method.init_server(task.init(0), plan)
            found.append(run_rounds(task, method, engine, plan, server, seed=0).server.tensors())
        finally:
            engine.close()
    assert distance(found[0], found[1]) < 1e-9
    assert distance(found[0], found[2]) == 0


def test_a_model_put_in_place_moves_the_personal_ones_along() -> None:
    method = FedCEO(lam=0.5, interval=3)
    server = updated(method, Server(mean(stack(1)), {}), stack(4), round=3)
    moved = method.with_model(server, {name: leaf + 1 for name, leaf in server.params.items()})
    torch.testing.assert_close(moved.personal["fc.weight"], server.personal["fc.weight"] + 1)
    torch.testing.assert_close(moved.params, mean(moved.personal))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_mean_of_the_smoothed_models_is_the_shrunken_mean(count: int) -> None:
    """For any threshold, not only Proposition 3.2's; so it needs no single upload."""
    up = stack(count)
    for lam in (3.0, 0.3, 0.05):
        method = FedCEO(lam=lam, interval=3, theta=1.2)
        whole = mean(method.smooth(up, 6, 0.0))
        alone = method.smooth(
            {name: leaf.mean(0, keepdim=True) for name, leaf in up.items()}, 6, 0.0, of=count
        )
        for name, leaf in whole.items():
            torch.testing.assert_close(alone[name][0], leaf, rtol=0, atol=1e-9)


def test_without_personal_models_others_see_the_mean_only() -> None:
    method = FedCEO(lam=0.5, interval=3, restart="mean", noise_multiplier=0.0)
    up, start = stack(4), Server(mean(stack(1)), {})
    after = updated(method, start, up, round=3)
    assert after.personal == {}
    expected = updated(FedCEO(lam=0.5, interval=3, noise_multiplier=0.0), start, up, round=3)
    for name, leaf in expected.params.items():
        torch.testing.assert_close(after.params[name], leaf, rtol=0, atol=1e-9)
    assert method.broadcast(At(PLAN, 4), after, (0, 1)).slot.tolist() == [0]
    plan = Plan(100, 10, "poisson", 300)
    assert FedCEO(restart="mean").releases(plan) == UDPFedAvg().releases(plan)


@pytest.mark.parametrize(
    ("sampler", "sigma", "interval", "server", "observer", "client"),
    [
        ("poisson", 1.0, 15, 349.96, 73.529, 75.20),
        ("poisson", 1.5, 10, 168.34, 45.170, 45.95),
        ("poisson", 2.0, 10, 102.86, 28.837, 29.34),
        ("fixed", 1.0, 15, 300.83, 79.01, 79.22),
        ("fixed", 1.5, 10, 146.05, 46.78, 46.88),
        ("fixed", 2.0, 10, 89.92, 30.14, 30.20),
    ],
)
def test_the_server_learns_as_much_as_from_averaging_and_others_learn_more(
    sampler: Sampler, sigma: float, interval: int, server: float, observer: float, client: float
) -> None:
    """The table of docs/methods/fedceo.md; members of a cohort know their own share of the mean's noise."""
    plan = Plan(100, 10, sampler, 300)
    ours = account(FedCEO(noise_multiplier=sigma, interval=interval).releases(plan), plan, 1e-5)
    plain = account(UDPFedAvg(noise_multiplier=sigma).releases(plan), plan, 1e-5)
    epsilon = {row.adversary: row.epsilon for row in ours}
    averaging = {row.adversary: row.epsilon for row in plain}
    assert epsilon["server"] == averaging["server"]
    assert epsilon == pytest.approx({"server": server, "observer": observer, "client": client}, abs=6e-3)
    for adversary in ("observer", "client"):
        less, more = averaging[adversary], epsilon[adversary]
        assert less is not None
        assert more is not None
        assert less < more


def test_after_smoothing_participation_is_not_hidden_by_the_sum() -> None:
    """A participant shifts the slots behind it, which changes what the others send by more than its own clip."""
    method = FedCEO(noise_multiplier=1.0, interval=2)
    plan = Plan(100, 10, "poisson", 3)
    server = Server(mean(stack(1)), stack(3))
    with_it, without = (method.broadcast(At(plan, 3), server, present) for present in ([0, 1, 2], [1, 2]))
    assert with_it.slot.tolist()[1:] == [2, 3]
    assert without.slot.tolist() == [1, 2]

    def divergence(bound: float, others: float = 10.0) -> float:
        """Of one round's sum in units of the clip: the others send as much from these slots as less from those."""
        x = np.linspace(-30.0, 30.0, 600_001)
        absent, own, empty = (stats.norm.pdf(x, m) for m in (others, 1 - others, -others))
        p = 0.9 * absent + 0.1 * own
        q = 0.9 * absent + 0.1 * empty
        return float(np.maximum(p - math.exp(bound) * q, 0).sum() * (x[1] - x[0]))

    third = [replace(release, participation="hidden") for release in method.releases(plan)]
    hidden = account_rounds(rounds_of(third, plan, first=3), 1e-3, pairs=[("client", "observer")])[0].epsilon
    priced = account_rounds(
        rounds_of(method.releases(plan), plan, first=3), 1e-3, pairs=[("client", "observer")]
    )[0].epsilon
    assert hidden is not None
    assert priced is not None
    assert divergence(hidden) > 10 * 1e-3
    assert divergence(priced) <= 1e-3


def test_folding_of_vectors_is_refused_where_no_smoothed_layer_has_one() -> None:
    params = {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2, 2), "b.bias": torch.zeros(2)}
    plan = Plan(4, 2, "fixed", 10, 5, 5)
    FedCEO(biases="fold").init_server(params, plan)
    with refuses("method.biases"):
        FedCEO(biases="fold", layers=["a"]).init_server(params, plan)
