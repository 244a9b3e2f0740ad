"""The parts of inversion attacks: rows that do not touch each other, labels, local steps, known defences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedveil.attacks.inversion.labels import infer_labels
from fedveil.attacks.inversion.matching import (
    candidate_gradients,
    cosine_distance,
    squared_distance,
    total_variation,
)
from fedveil.attacks.inversion.optimise import stacked_adam, stacked_lbfgs
from fedveil.attacks.registry import list_attacks, make_attack
from fedveil.attacks.view import ServerView, image_box
from fedveil.data.client_data import ArrayClients
from fedveil.methods.disclosure import Adaptation, LocalSteps
from fedveil.models.registry import make_model
from fedveil.streams import ClientStreams, named_stream
from fedveil.task import Batch, Task
from fedveil.training.local_sgd import local_sgd
from fedveil.tree import Params, expand, flatten, with_axis, without_axis
from tests.refusals import refuses

SHAPE = (1, 8, 8)


def make_view(model: str = "lenet-zhu", targets: int = 2, examples: int = 1, **options: Any) -> ServerView:
    task = Task(lambda: make_model(model, SHAPE, 4, **options))
    params = {name: leaf.double() for name, leaf in task.init(1).items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(targets, examples, *SHAPE, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (targets, examples), generator=generator)
    observed = task.grad(expand(with_axis(params), targets), Batch(x, y))
    low, high = image_box((0.0,), (1.0,))
    return ServerView(task, params, observed, examples, SHAPE, 4, (low - 9, high + 9), y)


def random_images(rows: int, examples: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, examples, *SHAPE, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("model", ["lenet-zhu", "lenet-5", "logistic"])
def test_candidate_gradients_equal_the_tasks_own(model: str) -> None:
    view = make_view(model, examples=3)
    x = random_images(2, 3)
    assert view.labels is not None
    expected = view.task.grad(expand(with_axis(view.params), 2), Batch(x, view.labels))
    for rows in (slice(0, 2), slice(0, 1)):
        found = candidate_gradients(view, x[rows], view.labels[rows])
        for name, leaf in expected.items():
            torch.testing.assert_close(found[name].detach(), leaf[rows], rtol=1e-9, atol=1e-12)


def test_second_derivatives_of_a_stack_equal_those_of_single_rows() -> None:
    view = make_view(targets=3)
    assert view.labels is not None
    distance = cosine_distance(view.observed, Adaptation())
    x = random_images(3, 1).requires_grad_()
    (together,) = torch.autograd.grad(distance(candidate_gradients(view, x, view.labels)).sum(), x)
    for t in range(3):
        one = cosine_distance({name: leaf[t : t + 1] for name, leaf in view.observed.items()}, Adaptation())
        row = x[t : t + 1].detach().requires_grad_()
        (alone,) = torch.autograd.grad(one(candidate_gradients(view, row, view.labels[t : t + 1])).sum(), row)
        torch.testing.assert_close(together[t], alone[0], rtol=1e-8, atol=1e-12)


def test_simulated_local_steps_equal_local_training() -> None:
    view = make_view(examples=4, targets=1)
    data = ArrayClients.from_arrays([(random_images(1, 4)[0], torch.tensor([0, 1, 2, 3]))]).load([0])
    local = LocalSteps(lr=0.3, batch_size=4, epochs=3, momentum=0.5, weight_decay=0.01)
    trained = local_sgd(
        view.task,
        with_axis(view.params),
        data,
        ClientStreams(0, 1, (0,)),
        lr=0.3,
        batch_size=4,
        epochs=3,
        momentum=0.5,
        weight_decay=0.01,
    )
    found = candidate_gradients(replace(view, local=local), data.x, data.y)
    for name, leaf in without_axis(trained.params).items():
        expected = (view.params[name] - leaf) / 0.3
        torch.testing.assert_close(found[name][0].detach(), expected, rtol=1e-7, atol=1e-10)


def test_simulated_local_steps_may_end_within_an_epoch() -> None:
    view = make_view(examples=4, targets=1)
    x, y = random_images(1, 4), torch.tensor([[0, 1, 2, 3]])
    steps = LocalSteps(lr=0.3, batch_size=2, epochs=7, steps=3)
    found = candidate_gradients(replace(view, local=steps), x, y)
    w = dict(view.params)
    for batch in (slice(0, 2), slice(2, 4), slice(0, 2)):
        g = view.task.grad(with_axis(w), Batch(x[:, batch], y[:, batch]))
        w = {name: leaf - 0.3 * g[name][0] for name, leaf in w.items()}
    for name, leaf in w.items():
        torch.testing.assert_close(found[name][0].detach(), (view.params[name] - leaf) / 0.3)


def test_a_trained_model_can_be_inverted() -> None:
    view = make_view("logistic", targets=1)
    assert view.labels is not None
    local = LocalSteps(lr=0.1, batch_size=1, epochs=3)
    x = torch.rand(1, 1, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sent = {
        name: leaf.detach()
        for name, leaf in candidate_gradients(replace(view, local=local), x, view.labels).items()
    }
    attacked = replace(view, local=local, observed=sent)
    finding = make_attack("idlg", {"steps": 200, "restarts": 2})(attacked, named_stream(0, "attack"))
    assert float((finding.images - x).abs().max()) < 1e-3


@pytest.mark.parametrize(("epochs", "steps"), [(2, None), (1, 5)])
def test_candidates_trained_in_a_clients_order_send_what_it_sends(epochs: int, steps: int | None) -> None:
    """Batches of 2, 2 and 1, shuffled anew in each pass; said in steps, the second pass ends early."""
    local = LocalSteps(lr=0.3, batch_size=2, epochs=epochs, steps=steps)
    view = replace(make_view(examples=5, targets=1), local=local)
    x, y = random_images(1, 5), torch.tensor([[0, 1, 2, 3, 0]])
    orders = torch.tensor([[[3, 0, 4, 1, 2], [2, 1, 0, 4, 3]]])
    assert local.passes(5) == 2
    w = with_axis(view.params)
    for batch in [part for order in orders[0] for part in order.split(2)][: local.count(5)]:
        g = view.task.grad(w, Batch(x[:, batch], y[:, batch]))
        w = {name: leaf - 0.3 * g[name] for name, leaf in w.items()}
    found = candidate_gradients(view, x, y, orders)
    for name, leaf in view.params.items():
        torch.testing.assert_close(found[name][0].detach(), (leaf - w[name][0]) / 0.3, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    "local",
    [
        LocalSteps(lr=0.3, batch_size=2, steps=1),
        LocalSteps(lr=0.3, batch_size=3, weight_decay=0.1),
        LocalSteps(lr=0.3, batch_size=3),
    ],
)
def test_a_single_local_step_is_that_of_its_batch_and_decay(local: LocalSteps) -> None:
    view = replace(make_view(examples=3, targets=1), local=local)
    x, y = random_images(1, 3), torch.tensor([[0, 1, 2]])
    taken = slice(local.batch_size)
    g = view.task.grad(with_axis(view.params), Batch(x[:, taken], y[:, taken]))
    found = candidate_gradients(view, x, y)
    for name, leaf in view.params.items():
        expected = g[name][0] + local.weight_decay * leaf
        torch.testing.assert_close(found[name][0].detach(), expected, rtol=1e-7, atol=1e-10)


def test_restarts_guess_the_order_of_a_clients_batches() -> None:
    """Of three images in batches of 2 and 1, in an order that is not the candidates' own."""
    view = make_view(targets=1, examples=3)
    x = torch.rand(1, 3, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([[0, 1, 2]])
    told = replace(view, local=LocalSteps(lr=0.1, batch_size=2), labels=labels, box=image_box((0.0,), (1.0,)))
    sent = candidate_gradients(told, x, labels, torch.tensor([[[1, 2, 0]]]))
    attacked = replace(told, observed={name: leaf.detach() for name, leaf in sent.items()})
    one, many = (
        make_attack("inverting-gradients", {"steps": 150, "restarts": restarts, "tv": 0.0})(
            attacked, named_stream(0, "attack")
        )
        for restarts in (1, 6)
    )
    assert float(many.losses.min()) < 0.01 * float(one.losses.min())
    assert float((many.images - x).abs().mean()) < 0.3 * float((one.images - x).abs().mean())
    assert "the client's order of batches is unknown: one order was tried" in one.notes
    assert "the client's order of batches is unknown: each of 6 restarts tried another" in many.notes


def test_lbfgs_rows_are_independent_and_find_the_minimum() -> None:
    generator = torch.Generator().manual_seed(0)
    curvature = torch.rand(4, 6, generator=generator, dtype=torch.float64) * 5 + 0.1
    centre = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    start = torch.randn(4, 6, generator=generator, dtype=torch.float64)

    def objective(rows: slice) -> object:
        return lambda x: (
            (curvature[rows] * (x - centre[rows]).square()).sum(1) + (x - centre[rows]).pow(4).sum(1)
        )

    together = stacked_lbfgs(start, objective(slice(0, 4)), iterations=40)  # type: ignore[arg-type]
    torch.testing.assert_close(together.variables[0], centre, rtol=0, atol=1e-5)
    for k in range(4):
        rows = slice(k, k + 1)
        alone = stacked_lbfgs(start[rows], objective(rows), iterations=40)  # type: ignore[arg-type]
        torch.testing.assert_close(together.variables[0][rows], alone.variables[0], rtol=1e-7, atol=1e-9)


def test_lbfgs_survives_a_row_that_leaves_the_numbers() -> None:
    start = torch.tensor([[1.0], [1.0]], dtype=torch.float64)

    def objective(x: Tensor) -> Tensor:
        return torch.stack([(x[0, 0] - 3).square(), torch.log(x[1, 0] * 0)])

    found = stacked_lbfgs(start, objective, iterations=30)
    assert float(found.variables[0][0]) == pytest.approx(3.0)
    assert float(found.loss[1]) == float("inf")


def test_adam_keeps_the_box_and_takes_pictures() -> None:
    low, high = torch.tensor(-0.5), torch.tensor(0.5)
    found = stacked_adam(
        [torch.zeros(2, 3)],
        lambda variables: (variables[0] - 2).square().sum(1),
        steps=50,
        lr=0.1,
        signed=True,
        box=(low, high),
    )
    assert float(found.variables[0].max()) == 0.5
    assert [step for step, _ in found.path] == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("signed", [True, False])
def test_adam_survives_a_row_that_leaves_the_numbers(signed: bool) -> None:
    found = stacked_adam(
        [torch.ones(2, 1)],
        lambda variables: torch.stack([(variables[0][0, 0] - 3).square(), torch.log(variables[0][1, 0] * 0)]),
        steps=100,
        lr=0.1,
        signed=signed,
    )
    assert float(found.variables[0][0]) == pytest.approx(3.0, abs=0.5)
    assert float(found.variables[0][1]) == 1.0


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[[[0.0, 1.0], [2.0, 5.0]]]])
    assert total_variation(x).tolist() == [(2 + 4) / 2 + (1 + 3) / 2]


@pytest.mark.parametrize("model", ["lenet-zhu", "logistic"])
def test_label_of_one_example_is_read_off(model: str) -> None:
    view = make_view(model, targets=8)
    assert view.labels is not None
    assert torch.equal(infer_labels(replace(view, labels=None), named_stream(0, "x")), view.labels)


def test_labels_of_a_batch_are_counted() -> None:
    view = make_view("logistic", targets=5, examples=6)
    assert view.labels is not None
    found = infer_labels(replace(view, labels=None), named_stream(0, "x"))
    assert found.shape == view.labels.shape
    right = (found == view.labels.sort(1).values).double().mean()
    assert float(right) > 0.6  # a quarter of them would be luck


def test_labels_cannot_be_inferred_without_a_last_linear_layer_of_that_size() -> None:
    with refuses("labels", value="inferred"):
        infer_labels(replace(make_view(), labels=None, classes=7), named_stream(0, "x"))
    without_bias = make_view("mlp-2", examples=3)
    with refuses("labels", value="inferred"):
        infer_labels(replace(without_bias, labels=None), named_stream(0, "x"))


def test_labels_of_another_number_than_the_examples_are_refused() -> None:
    view = make_view(examples=2)
    with refuses("labels"):
        replace(view, labels=torch.zeros(2, 5, dtype=torch.long))


def toy() -> tuple[Params, Params]:
    generator = torch.Generator().manual_seed(0)
    observed = {"a": torch.randn(1, 50, generator=generator), "b": torch.randn(1, 40, generator=generator)}
    return observed, {name: leaf.clone() for name, leaf in observed.items()}


def test_attacks_adapt_to_known_masks_signs_and_noise() -> None:
    observed, true = toy()
    masked = {name: leaf * (torch.arange(leaf.shape[1]) % 2) for name, leaf in observed.items()}
    assert float(cosine_distance(masked, Adaptation("mask"))(true)) == pytest.approx(0, abs=1e-6)
    assert float(cosine_distance(masked, Adaptation())(true)) > 0.1
    assert float(squared_distance(masked, Adaptation("mask"))(true)) == pytest.approx(0, abs=1e-9)
    loud = {"a": observed["a"].clone(), "b": observed["b"]}
    loud["a"][0, :5] += 1000.0
    assert float(cosine_distance(loud, Adaptation("small", limit=10.0))(true)) == pytest.approx(0, abs=1e-6)
    signs = {name: 0.01 * leaf.sign() for name, leaf in observed.items()}
    adaptive = float(cosine_distance(signs, Adaptation("sign"))(true))
    assert adaptive < float(cosine_distance(signs, Adaptation())(true))
    drowned = {"a": observed["a"], "b": 100 * torch.randn(1, 40, generator=torch.Generator().manual_seed(1))}
    weighed = float(cosine_distance(drowned, Adaptation("noise", 120.0))(true))
    plain = float(cosine_distance(drowned, Adaptation())(true))
    assert weighed == pytest.approx(plain)  # everything is below the noise: nothing is preferred
    drowned["a"] = 1000 * observed["a"]
    assert float(cosine_distance(drowned, Adaptation("noise", 120.0))(true)) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("name", ["inverting-gradients", "dlg"])
def test_a_reconstruction_does_not_depend_on_other_uploads_in_the_stack(name: str) -> None:
    view = make_view()
    attack = make_attack(name, {"steps": 20, "restarts": 3})
    together = attack(view, named_stream(0, "a"))
    for t in range(2):
        single = replace(
            view,
            observed={name: leaf[t : t + 1] for name, leaf in view.observed.items()},
            labels=None if view.labels is None else view.labels[t : t + 1],
        )
        alone = attack(single, named_stream(0, "a"))
        assert len(set(alone.losses[0].tolist())) == 3, "restarts must not share a start"
        torch.testing.assert_close(together.losses[t], alone.losses[0], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(together.images[t], alone.images[0], rtol=1e-4, atol=1e-4)


def test_restarts_as_a_stack_equal_single_runs() -> None:
    view = make_view()
    stacked = make_attack("inverting-gradients", {"steps": 20, "restarts": 3})(view, named_stream(0, "a"))
    rng = named_stream(0, "a")
    one = make_attack("inverting-gradients", {"steps": 20})
    losses = torch.cat([one(view, rng).losses for _ in range(3)], dim=1)
    torch.testing.assert_close(stacked.losses, losses, rtol=1e-5, atol=0)


def test_analytic_needs_a_first_linear_layer_and_one_example() -> None:
    with refuses("attack", value="analytic"):
        make_attack("analytic")(make_view(), named_stream(0, "a"))
    with refuses("examples", value=2):
        make_attack("analytic")(make_view("logistic", examples=2), named_stream(0, "a"))


def test_gias_needs_public_images_of_the_right_shape() -> None:
    with refuses("public"):
        make_attack("gias")(make_view(), named_stream(0, "a"))
    wrong = replace(make_view(), public=torch.zeros(5, 1, 4, 4))
    with refuses("public"):
        make_attack("gias")(wrong, named_stream(0, "a"))


def test_every_attack_is_listed_and_unknown_ones_are_refused() -> None:
    names = [info.name for info in list_attacks()]
    assert names == [
        "analytic",
        "dlg",
        "embedding-rows",
        "gias",
        "gradinversion",
        "idlg",
        "inverting-gradients",
        "lamp",
    ]
    with refuses("attack.name", value="inverting-gradient"):
        make_attack("inverting-gradient")
    with refuses("stepz", value=3):
        make_attack("idlg", {"stepz": 3})
    with refuses("steps", value=0):
        make_attack("idlg", {"steps": 0})


def test_adam_on_a_stack_takes_the_steps_of_torch() -> None:
    start, centre = torch.randn(3, 5), torch.randn(3, 5)
    ours = stacked_adam([start], lambda v: (v[0] - centre).pow(4).sum(1), steps=40, lr=0.3).variables[0]
    theirs = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([theirs], lr=0.3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [15, 25, 35], gamma=0.1)
    for _ in range(40):
        optimiser.zero_grad()
        (theirs - centre).pow(4).sum().backward()
        optimiser.step()
        schedule.step()
    torch.testing.assert_close(ours, theirs.detach())


def test_the_distances_gradients_are_autograds() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 1, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(total_variation, (x,))
    down, across = (x.diff(dim=axis).abs().flatten(1).mean(1) for axis in (-2, -1))
    torch.testing.assert_close(total_variation(x), down + across)
    observed = {"a": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    distance = cosine_distance(observed, Adaptation())
    seen = [torch.randn_like(leaf).requires_grad_() for leaf in observed.values()]
    assert torch.autograd.gradcheck(lambda *leaves: distance(dict(zip("ab", leaves, strict=True))), seen)
    flat, wanted = flatten(dict(zip("ab", seen, strict=True))), flatten(observed)
    plain = 1 - torch.cosine_similarity(flat, wanted, dim=1)
    torch.testing.assert_close(distance(dict(zip("ab", seen, strict=True))), plain)


@pytest.mark.parametrize(("decay", "moved"), [(False, 8.0), (True, 3.222)])
def test_the_learning_rate_stays_without_decay(decay: bool, moved: float) -> None:
    """Signed steps on a slope are as long as the learning rate: 3 + 0.2 + 0.02 + 0.002 with decay at 3/8, 5/8, 7/8."""
    start = torch.zeros(1, 1, dtype=torch.float64)
    found = stacked_adam(
        [start], lambda leaves: -leaves[0].sum(1), steps=80, lr=0.1, signed=True, decay=decay
    )
    assert float(found.variables[0]) == pytest.approx(moved, rel=1e-3)
