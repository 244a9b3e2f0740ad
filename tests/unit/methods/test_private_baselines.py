"""DP-FedAvg, cpSGD and DP-FedSNLC: their arithmetic, their noise and what they declare."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil import At, Plan, Task
from fedveil.engines.worker import ClientWorker
from fedveil.experiment.config import build_method
from fedveil.methods.cpsgd import CpSGD, Levels, hadamard, rotate, rotate_back
from fedveil.methods.dp_fedsnlc import explaining
from fedveil.methods.method import AnyMethod
from fedveil.privacy.accounting import epsilon_of
from fedveil.privacy.integer_mechanisms import least_binomial
from fedveil.privacy.noise.integers import MOST_COUNTED_TRIALS, centred_binomial
from fedveil.privacy.releases import ApproximateDP
from fedveil.session.privacy_guard import privacy_statement
from fedveil.streams import ClientStreams, ServerStreams, named_stream
from fedveil.training.per_example import MARGIN
from fedveil.tree import flatten, sub, with_axis
from tests.contract.federation import distance, make_clients, make_plan, make_task
from tests.refusals import refuses

PLAN = Plan(100, 10, "poisson", 300, 600, 600)


def made(name: str, **fields: Any) -> AnyMethod:
    return build_method({"name": name, "batch_size": 4} | fields)


def exchange(method: AnyMethod, seed: int = 0) -> tuple[Any, Any, Any, At]:
    task, plan = make_task(), make_plan()
    at = At(plan, 1)
    server = method.init_server(task.init(0), plan)
    down = method.broadcast(at, server, (0, 1, 3))
    up, _ = ClientWorker(task, make_clients(), method, seed).update((0, 1, 3), down, {}, at)
    return server, down, up, at


# --- DP-FedAvg ------------------------------------------------------------------------------------------------


def test_the_servers_noise_protects_against_observers_only() -> None:
    statement = privacy_statement(made("dp-fedavg", noise_multiplier=1.0), PLAN, 1e-5)
    found = {row.adversary: row.epsilon for row in statement.proven}
    assert found["server"] is None
    assert found["observer"] == pytest.approx(
        12.398, abs=0.002
    )  # the subsampled Gaussian of the oracle table


def test_the_clients_noise_protects_against_everybody() -> None:
    method = made("dp-fedavg", noise_multiplier=2.0, noise_scope="local")
    found = {row.adversary: row.epsilon for row in privacy_statement(method, PLAN, 1e-5).proven}
    assert found["server"] is not None
    assert found["observer"] is not None
    assert found["observer"] < found["server"]


def test_record_level_epsilon_agrees_with_the_oracle() -> None:
    method = made("dp-fedavg", unit="record", noise_multiplier=1.0, record_rate=0.0256, epochs=5)
    everyone = Plan(5, 5, "all", 1, 10_000, 10_000)
    steps = round(5 / 0.0256)
    assert method.releases(everyone)[0].accesses == steps
    found = epsilon_of(method.releases(everyone), everyone, 1e-5, "server", "record")
    assert found == pytest.approx(2.384, abs=0.03)  # 200 steps: 2.3840


def test_the_server_adds_the_declared_noise_to_the_sum() -> None:
    method = made("dp-fedavg", noise_multiplier=3.0, clip=0.5)
    task, plan = make_task(), make_plan()
    server = method.init_server(task.init(0), plan)
    _, _, up, _ = exchange(method)
    draws = []
    for t in range(1, 80):
        after = method.server_update(task, At(plan, t), server, (0, 1, 3), up, ServerStreams(0, t))
        draws.append(flatten(with_axis(after.params)))
    spread = torch.cat(draws).std(0)
    assert float(spread.mean()) == pytest.approx(3.0 * 0.5 / 3, rel=0.05)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_record_level_step_is_the_clipped_sum_over_the_expected_batch(rate: float) -> None:
    """Without noise: 1 / rate steps of gradients, each clipped, against a plain loop over the same batches."""
    task = Task(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3, bias=False)).double())
    clients, plan = make_clients(), make_plan()
    method = made(
        "dp-fedavg", unit="record", noise_multiplier=0.0, clip=0.4, record_rate=rate, epochs=1, lr=0.1
    )
    at = At(plan, 1)
    server = method.init_server(task.init(0), plan)
    up, _ = ClientWorker(task, clients, method, 0).update((1,), method.broadcast(at, server, (1,)), {}, at)
    start = w = server.params["1.weight"]
    (drawn,) = ClientStreams(0, 1, (1,)).noise("sampling")
    for _ in range(round(1 / rate)):
        total = torch.zeros_like(w)
        for taken, place in zip(drawn.random(9) < rate, clients.parts[1], strict=True):
            if taken:
                error = torch.softmax(w @ clients.x[place], 0)
                error[clients.y[place]] -= 1
                g = torch.outer(error, clients.x[place])
                total += g * min(1.0, 0.4 * (1 - MARGIN) / float(g.norm()))
        w = w - 0.1 * total / (9 * rate)
    assert torch.allclose(up.tensors()["update/1.weight"][0], w - start, atol=1e-7)


def test_a_deployed_node_draws_the_dropout_of_record_level_steps_in_secret() -> None:
    """The batch is everything and there is no noise: what differs between two tries are the masks."""
    method = made("dp-fedavg", unit="record", noise_multiplier=0.0, record_rate=1.0, epochs=1)
    task, plan = make_task(), make_plan()
    at = At(plan, 1)
    down = method.broadcast(at, method.init_server(task.init(0), plan), (0,))
    found = []
    for source in ("seeded", "seeded", "entropy", "entropy"):
        worker = ClientWorker(task, make_clients(), method, 0, source)
        found.append(flatten(worker.update((0,), down, {}, at)[0].tensors()))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[2], found[3])


def test_record_level_refuses_momentum() -> None:
    with refuses("method.momentum"):
        made("dp-fedavg", unit="record", momentum=0.9)


@pytest.mark.parametrize("name", ["dp-fedavg", "fedceo"])
def test_record_level_noise_is_accounted_for_by_epochs(name: str) -> None:
    with refuses("method.local_steps"):
        made(name, unit="record", local_steps=5)
    assert made(name, unit="client", local_steps=5)


# --- cpSGD ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_hadamard_is_the_matrix_product(d: int) -> None:
    matrix = np.array([[1.0]])
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rows = torch.from_numpy(named_stream(d).standard_normal((3, d)))
    assert np.allclose(hadamard(rows).numpy(), rows.numpy() @ matrix / math.sqrt(d))


@pytest.mark.parametrize("n", [1, 5, 64, 72])
def test_rotation_keeps_lengths_and_can_be_undone(n: int) -> None:
    rows = torch.from_numpy(named_stream(n).standard_normal((2, n)))
    turned = rotate(rows, 4)
    assert torch.allclose(turned.norm(dim=1), rows.norm(dim=1))
    assert torch.allclose(rotate_back(turned, 4, n), rows)


def test_the_fewest_trials_that_the_theorem_allows() -> None:
    found = least_binomial(1.0, 0.05, 256, 2.0, 1e-6)
    assert found.epsilon <= 2.0
    fewer = type(found)(1.0, found.trials - 8, 0.05, 256, 1e-6)
    assert fewer.epsilon > 2.0


def test_uploads_are_small_integers() -> None:
    method = made("cpsgd", epsilon=500.0, clip=0.3)
    _, _, up, _ = exchange(method)
    assert isinstance(up, Levels)
    assert up.levels.dtype == torch.int16
    assert up.levels.shape == (3, 128)  # 72 parameters, padded to a power of 2


def test_the_sum_is_right_on_average() -> None:
    """Many rounds of the same uploads' sum come to the mean of the clipped updates."""
    method = made("cpsgd", epsilon=50.0, clip=0.3, levels=64)
    assert isinstance(method, CpSGD)
    task, plan = make_task(), make_plan()
    server = method.init_server(task.init(0), plan)
    bare = build_method({"name": "dp-fedavg", "batch_size": 4, "noise_multiplier": 0.0, "clip": 0.3})
    worker = ClientWorker(task, make_clients(), bare, 0)
    at = At(plan, 1)
    plain, _ = worker.update((0, 1, 3), bare.broadcast(at, server, (0, 1, 3)), {}, at)
    expected = flatten(plain.map(lambda _, leaf: leaf.mean(0, keepdim=True)).update)[0]  # type: ignore[attr-defined]
    moved = []
    for source in range(40):
        private = ClientWorker(task, make_clients(), method, 0)
        private.noise_source = "entropy"
        up, _ = private.update((0, 1, 3), method.broadcast(at, server, (0, 1, 3)), {}, at)
        assert isinstance(up, Levels)
        after = method.server_update(task, at, server, (0, 1, 3), up, ServerStreams(source, 1))
        moved.append(flatten(with_axis(sub(after.params, server.params)))[0])
    stack = torch.stack(moved)
    error = (stack.mean(0) - expected) / (stack.std(0) / math.sqrt(len(moved)))
    assert float(error.abs().max()) < 8
    assert float(error.square().mean()) == pytest.approx(1, abs=0.6)


def test_a_shared_noise_scope_states_that_it_needs_secure_aggregation() -> None:
    rows = privacy_statement(made("cpsgd", epsilon=0.5), Plan(100, 10, "fixed", 20), 1e-5).proven
    found = {row.adversary: row for row in rows}
    assert found["server"].epsilon is None
    assert "secure aggregation" in found["server"].reason
    assert found["observer"].epsilon is not None
    local = privacy_statement(
        made("cpsgd", epsilon=0.5, noise_scope="local"), Plan(100, 10, "fixed", 20), 1e-5
    )
    assert all(row.epsilon is not None for row in local.proven)


@pytest.mark.parametrize("cohort", [2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.5, 20.0, 5000.0])
@pytest.mark.parametrize("dimension", [2, 128, 65_536])
def test_the_other_clients_trials_prove_the_guarantee_against_a_participant(
    cohort: int, epsilon: float, dimension: int
) -> None:
    """A client knows the trials that it added itself: the guarantee against it is that of the rest."""
    method, plan = made("cpsgd", epsilon=epsilon), Plan(100, cohort, "fixed", 20)
    assert isinstance(method, CpSGD)
    insider = method.releases(plan)[1].insider
    assert isinstance(insider, ApproximateDP)
    whole = method.mechanism().of(dimension)
    left = replace(whole, trials=(cohort - 1) * method.share(dimension, plan).trials)
    assert whole.epsilon <= epsilon
    assert left.epsilon <= insider.epsilon


def test_a_member_of_the_cohort_learns_more_than_an_observer() -> None:
    for sampler in ("fixed", "poisson", "all"):
        plan = Plan(10, 10 if sampler == "all" else 4, sampler, 20)
        found = {row.adversary: row.epsilon for row in privacy_statement(made("cpsgd"), plan, 1e-5).proven}
        assert found["observer"] is not None
        assert found["client"] is not None
        assert found["client"] > found["observer"]


def test_a_single_participant_observes_no_other_client() -> None:
    assert made("cpsgd").releases(Plan(100, 1, "fixed", 20))[1].insider is None


def test_absent_clients_trials_are_added_by_the_server() -> None:
    method = made("cpsgd", epsilon=5.0)
    task = make_task()
    server, down, up, at = exchange(method)
    one = up.rows([0])
    after = method.server_update(task, at, server, (0,), one, ServerStreams(0, 1))
    read = method.read_upload(at, down, one)
    assert read is not None
    assert distance(after.params, {name: leaf[0] for name, leaf in read.models.items()}) > 0


@pytest.mark.parametrize("trials", [MOST_COUNTED_TRIALS, MOST_COUNTED_TRIALS + 8, 8 * 10**6])
def test_binomial_draws_have_the_right_moments_on_both_paths(trials: int) -> None:
    draws = centred_binomial(trials, 20_000, named_stream(trials))
    std = math.sqrt(trials) / 2
    assert abs(draws.mean()) < 4 * std / math.sqrt(20_000)
    assert draws.std() == pytest.approx(std, rel=0.02)
    assert ((draws / std) ** 4).mean() == pytest.approx(3, abs=0.2)


# --- DP-FedSNLC -----------------------------------------------------------------------------------------------


def test_the_smallest_set_that_explains_the_share() -> None:
    change = torch.tensor([[5.0, 1.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert explaining(change, 0.5).tolist() == [[True, False, False, False], [False] * 4]
    assert explaining(change, 0.8).tolist()[0] == [True, False, True, False]
    assert explaining(change, 0.81).tolist()[0] == [True, True, True, False]


def test_fedsnlc_noises_what_changes_the_loss_and_nothing_else() -> None:
    method = made("dp-fedsnlc", epsilon=0.5)
    clipped = torch.tensor([[0.5, 0.5, 0.0, 0.1]], dtype=torch.float64)
    slope = torch.tensor([[1.0, 0.0, 1.0, 0.01]], dtype=torch.float64)
    out = method.perturb(clipped, slope, ClientStreams(0, 1, (0,)), torch.tensor([9]))  # type: ignore[attr-defined]
    assert (out != clipped).tolist() == [[True, False, False, False]]


def test_fedsnlc_clips_and_its_noise_is_the_printed_one_times_the_clip() -> None:
    """At an epsilon that leaves no noise worth the name the clipped gradient is sent."""
    start, _, up, _ = exchange(made("dp-fedsnlc", clip=0.02, epsilon=1e16, lr=0.1))
    plain = exchange(made("fedavg", lr=0.1))[2]
    for row in range(3):
        sent = flatten({name: leaf[row : row + 1] for name, leaf in up.gradient.items()})[0]
        moved = [start.params[name] - leaf[row] for name, leaf in plain.params.items()]
        gradient = torch.cat([leaf.flatten() for leaf in moved]) / 0.1
        torch.testing.assert_close(sent, 0.02 * gradient / gradient.norm(), rtol=0, atol=1e-8)
    method = made("dp-fedsnlc", clip=0.5, epsilon=0.5)
    clipped = torch.full((1, 20_000), 1e-3, dtype=torch.float64)
    noise = method.perturb(clipped, clipped, ClientStreams(0, 1, (0,)), torch.tensor([9]))[:, :18_000] - 1e-3  # type: ignore[attr-defined]
    sigma = math.sqrt(2 * math.log(1.25 * math.exp(0.5))) / 0.5
    assert float(noise.std()) == pytest.approx(sigma * 0.5, rel=0.03)


def test_fedsnlc_states_that_nothing_is_proven() -> None:
    rows = privacy_statement(made("dp-fedsnlc"), PLAN, 1e-3).proven
    assert all(row.epsilon is None and "no noise" in row.reason for row in rows)


@pytest.mark.parametrize("name", ["dp-fedsnlc", "cpsgd"])
@pytest.mark.parametrize("epsilon", [0, -1, math.inf, math.nan])
def test_a_bad_epsilon_is_refused(name: str, epsilon: float) -> None:
    with refuses("method.epsilon"):
        made(name, epsilon=epsilon)
