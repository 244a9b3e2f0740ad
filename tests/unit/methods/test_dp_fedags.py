"""DP-FedAGS as printed: Eq. 35, Eq. 37, the split of the budget, what leaves unperturbed, and what it claims."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import ArrayClients, At, Plan, Task, run
from fedveil.engines.worker import ClientWorker
from fedveil.errors import DivergedError
from fedveil.experiment.config import build_method
from fedveil.methods.dp_fedags import (
    DPFedAGS,
    Gradient,
    aggregation_weights,
    printed_sigma,
    significant,
    threshold_place,
)
from fedveil.privacy.clipping import clip_rows
from fedveil.session.privacy_guard import privacy_statement
from fedveil.streams import ClientStreams, named_stream
from fedveil.task import cross_entropy
from fedveil.tree import flatten
from tests.refusals import refuses

PLAN = Plan(4, 4, "all", 200, 5, 5)
SIZES = torch.tensor([600])


def linear_task() -> Task:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)).double()

    return Task(build)


def clients(*sizes: int) -> ArrayClients:
    draw = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randn(n, 6, generator=draw, dtype=torch.float64), torch.randint(0, 3, (n,), generator=draw))
        for n in sizes
    ]
    return ArrayClients.from_arrays(pairs)


def upload(method: DPFedAGS, source: ArrayClients, t: int = 1) -> Gradient:
    task = linear_task()
    at = At(PLAN, t)
    down = method.broadcast(at, method.init_server(task.init(0), PLAN), range(len(source.sizes)))
    up, _ = ClientWorker(task, source, method, 0).update(range(len(source.sizes)), down, {}, at)
    assert isinstance(up, Gradient)
    return up


# --- Eq. 35 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "place"),
    [(1, 5), (100, 500), (180, 900), (181, 900), (200, 900)],
)
def test_the_threshold_rises_with_the_rounds_up_to_nine_tenths(t: int, place: int) -> None:
    assert threshold_place(t, 200, 1000) == place


def test_places_are_rounded_up_and_stay_within_the_model() -> None:
    assert threshold_place(1, 3, 10) == 4
    assert threshold_place(3, 3, 10) == 9
    assert threshold_place(1, 500, 10) == 1
    assert threshold_place(7, 7, 1) == 1


def test_there_is_no_threshold_without_rounds() -> None:
    with refuses("run.rounds"):
        threshold_place(1, 0, 10)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 400), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_threshold_is_the_smaller_of_the_two_sorted_values(t: int, more: int, d: int, seed: int) -> None:
    rounds = t + more
    value = torch.from_numpy(named_stream(seed).standard_normal((2, d)))
    ordered = value.sort(dim=1).values
    first = ordered[:, min(d, max(1, math.ceil(t * d / rounds - 1e-12))) - 1]
    second = ordered[:, math.ceil(9 * d / 10 - 1e-12) - 1]
    expected = value >= torch.minimum(first, second)[:, None]
    found = significant(value, threshold_place(t, rounds, d), (0.0, 0.0), [])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("t", [1, 50, 100, 150, 180, 200])
def test_without_selection_noise_the_noised_fraction_follows_the_schedule(t: int) -> None:
    method = DPFedAGS(selection_noise=False)
    clipped = torch.from_numpy(named_stream(1).standard_normal((2, 5000))) / 100
    out = method.perturb(clipped, At(PLAN, t), ClientStreams(0, t, (0, 1)), SIZES.repeat(2))
    noised = (out != clipped).double().mean(1)
    assert noised == pytest.approx([1 - min(t / 200, 0.9) + 1 / 5000] * 2, abs=1e-3)


def test_with_selection_noise_the_choice_is_close_to_a_coin() -> None:
    method = DPFedAGS(epsilon=0.1)
    clipped = torch.from_numpy(named_stream(1).standard_normal((1, 20_000))) / 150
    for t in (1, 200):
        out = method.perturb(clipped, At(PLAN, t), ClientStreams(0, t, (0,)), SIZES)
        assert float((out != clipped).double().mean()) == pytest.approx(0.5, abs=0.02)


# --- what leaves the client -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_unselected_coordinates_leave_bit_by_bit_and_the_others_with_the_stated_noise(kind: Any) -> None:
    method = DPFedAGS(epsilon=0.5, noise_kind=kind, selection_noise=False)
    clipped = clip_rows({"g": torch.from_numpy(named_stream(2).standard_normal((1, 40_000)))}, 1.0)["g"]
    out = method.perturb(clipped, At(PLAN, 100), ClientStreams(5, 100, (0,)), SIZES)
    chosen = clipped >= clipped.kthvalue(20_000, dim=1).values
    assert torch.equal(out[~chosen], clipped[~chosen])
    noise = (out - clipped)[chosen]
    expected = math.sqrt(2) / 0.45 if kind == "laplace" else printed_sigma(0.5)
    assert float(noise.std()) == pytest.approx(expected, rel=0.03)
    assert float(noise.mean()) == pytest.approx(0, abs=4 * expected / math.sqrt(20_000))


@pytest.mark.parametrize("kind", ["laplace", "gaussian"])
def test_record_sensitivity_is_twice_the_clip_over_the_clients_records(kind: Any) -> None:
    """Each client's noise goes by its own number of records; the schedule of what is noised stays."""
    method = DPFedAGS(epsilon=0.5, clip=2.0, noise_kind=kind, sensitivity="record", selection_noise=False)
    clipped = clip_rows({"g": torch.from_numpy(named_stream(2).standard_normal((2, 40_000)))}, 2.0)["g"]
    out = method.perturb(clipped, At(PLAN, 100), ClientStreams(5, 100, (0, 1)), torch.tensor([100, 400]))
    for row, dS in enumerate((0.04, 0.01)):  # noqa: N806
        changed = out[row] != clipped[row]
        assert int(changed.sum()) == pytest.approx(20_000, abs=20)
        noise = (out[row] - clipped[row])[changed]
        expected = math.sqrt(2) * dS / 0.45 if kind == "laplace" else printed_sigma(0.5, dS) * 2.0
        assert float(noise.std()) == pytest.approx(expected, rel=0.03)


def test_rows_of_one_size_are_noised_as_rows_of_several() -> None:
    clipped = torch.from_numpy(named_stream(3).standard_normal((2, 50)))
    method = DPFedAGS(epsilon=0.5, sensitivity="record")
    rng = ClientStreams(5, 100, (0, 1))
    both = method.perturb(clipped, At(PLAN, 100), rng, torch.tensor([100, 100]))
    mixed = method.perturb(clipped, At(PLAN, 100), rng, torch.tensor([100, 400]))
    assert torch.equal(both[0], mixed[0])


def test_magnitude_selects_large_negative_coordinates_and_signed_does_not() -> None:
    clipped = torch.full((1, 100), 0.01, dtype=torch.float64)
    clipped[0, 0] = -0.5
    at = At(PLAN, 180)
    for compare, changed in (("signed", False), ("magnitude", True)):
        method = build_method({"name": "dp-fedags", "selection_noise": False, "compare": compare})
        assert isinstance(method, DPFedAGS)
        out = method.perturb(clipped, at, ClientStreams(0, 180, (0,)), SIZES)
        assert bool(out[0, 0] != -0.5) == changed


def test_the_printed_sigmas() -> None:
    assert [round(printed_sigma(eps), 2) for eps in (0.1, 0.2, 0.5)] == [8.04, 4.60, 2.41]


@given(st.floats(0.01, 10), st.floats(0.01, 1000), st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_the_budget_is_split_as_stated(epsilon: float, q: float, share: float) -> None:
    one, two, three = DPFedAGS(epsilon=epsilon, selections=q, selection_share=share).budgets
    assert one + two + three == pytest.approx(epsilon)
    assert one / two == pytest.approx(q ** (2 / 3))
    assert one + two == pytest.approx(share * epsilon)


def test_the_upload_is_the_clipped_accumulated_gradient_where_it_is_not_noised() -> None:
    """Against a naive loop of SGD in float64."""
    source = clients(6)
    method = DPFedAGS(lr=0.2, epochs=3, batch_size=6, selection_noise=False, clip=0.5)
    task = linear_task()
    w = {k: v.clone().requires_grad_() for k, v in task.init(0).items()}
    total = {k: torch.zeros_like(v) for k, v in w.items()}
    loss_sum = 0.0
    for _ in range(3):
        scores = source.x @ w["1.weight"].T + w["1.bias"]
        loss = torch.nn.functional.cross_entropy(scores, source.y)
        loss_sum += float(loss.detach())
        grads = torch.autograd.grad(loss, list(w.values()))
        for (name, leaf), g in zip(w.items(), grads, strict=True):
            total[name] += g
            with torch.no_grad():
                leaf -= 0.2 * g
    up = upload(method, source, t=180)
    flat = torch.cat([leaf.flatten() for leaf in total.values()])
    flat = flat / max(1.0, float(flat.norm()) / 0.5)
    sent = flatten(up.gradient)[0]
    untouched = flat < flat.kthvalue(threshold_place(180, 200, len(flat))).values
    assert untouched.sum() > 10
    assert torch.allclose(sent[untouched], flat[untouched], atol=1e-6)
    assert float(up.loss[0]) == pytest.approx(loss_sum)
    assert up.size.tolist() == [6]


# --- Eq. 37 ---------------------------------------------------------------------------------------------------


def test_weights_follow_the_equation() -> None:
    n, losses = torch.tensor([1, 2, 5]), torch.tensor([0.5, 1.5, 2.0])
    expected = [
        (k * 4.0 + 8 * loss) / (2 * 8 * 4.0) for k, loss in zip([1, 2, 5], [0.5, 1.5, 2.0], strict=True)
    ]
    assert aggregation_weights(n, losses, "proportional").tolist() == pytest.approx(expected)
    inverse = [(k / 8 + (1 - loss / 4) / 2) / 2 for k, loss in zip([1, 2, 5], [0.5, 1.5, 2.0], strict=True)]
    assert aggregation_weights(n, losses, "inverse").tolist() == pytest.approx(inverse)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 10)), min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_weights_sum_to_one(rows: list[tuple[int, float]]) -> None:
    sizes = torch.tensor([n for n, _ in rows])
    losses = torch.tensor([loss if n else 0.0 for n, loss in rows], dtype=torch.float64)
    for kind in ("proportional", "inverse", "none"):
        weights = aggregation_weights(sizes, losses, kind)
        assert float(weights.sum()) == pytest.approx(1)
        assert bool((weights >= 0).all())


def test_equal_losses_or_none_give_fedavgs_weights() -> None:
    n = torch.tensor([3, 3, 6])
    assert aggregation_weights(n, torch.zeros(3), "proportional").tolist() == pytest.approx([0.25, 0.25, 0.5])
    equal = torch.tensor([4, 4, 4])
    assert aggregation_weights(equal, torch.ones(3), "proportional").tolist() == pytest.approx([1 / 3] * 3)


# --- edges ----------------------------------------------------------------------------------------------------


def test_a_client_without_examples_has_no_weight() -> None:
    up = upload(DPFedAGS(), clients(5, 0, 7))
    assert up.loss[1] == 0
    assert up.size[1] == 0
    assert aggregation_weights(up.size, up.loss, "proportional")[1] == 0
    assert aggregation_weights(up.size, up.loss, "inverse")[1] == 0


def test_a_zero_gradient_is_all_significant_and_finite() -> None:
    out = DPFedAGS(selection_noise=False).perturb(
        torch.zeros(2, 50, dtype=torch.float64), At(PLAN, 3), ClientStreams(0, 3, (0, 1)), SIZES.repeat(2)
    )
    assert bool(torch.isfinite(out).all())
    assert bool((out != 0).all())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0),
        ("epsilon", -1),
        ("epsilon", math.inf),
        ("selections", 0),
        ("clip", math.inf),
        ("selection_share", 1.0),
        ("noise_kind", "cauchy"),
        ("compare", "both"),
        ("loss_weight", "more"),
    ],
)
def test_bad_fields_are_refused_by_name(field: str, value: Any) -> None:
    with refuses(f"method.{field}", value=value):
        build_method({"name": "dp-fedags", field: value})


def test_more_selections_than_parameters_are_refused_before_training() -> None:
    with refuses("method.selections"):
        DPFedAGS(selections=22).init_server(linear_task().init(0), PLAN)
    DPFedAGS(selections=21).init_server(linear_task().init(0), PLAN)


def test_a_loss_that_is_not_finite_names_its_client() -> None:
    def endless(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, y) + math.inf  # whose gradient is finite

    layers = linear_task().module
    with refuses("upload", DivergedError, value=(0, "loss")):
        run(Task(layers, loss=endless), clients(5, 5), DPFedAGS(), rounds=1, workers=1)


def test_a_run_of_no_rounds_is_refused() -> None:
    with refuses("run.rounds"):
        run(linear_task(), clients(5, 5), DPFedAGS(), rounds=0)


def test_the_statement_separates_claim_and_proof() -> None:
    statement = privacy_statement(DPFedAGS(epsilon=0.1), PLAN, 1e-3)
    assert "epsilon 0.1" in str(statement.paper_claim)
    assert all(row.epsilon is None for row in statement.proven)
    assert all("no noise" in row.reason and "threshold" in row.reason for row in statement.proven)
    assert "Nothing is proven" in statement.in_words()
