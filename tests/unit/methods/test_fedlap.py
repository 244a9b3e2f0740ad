"""FedLAP and FedLAP-DP as methods: published epsilons, bytes on the wire, radii, label sets, bad input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedveil import METHODS, At, Plan, Task, run
from fedveil.data.client_data import ArrayClients
from fedveil.engines.worker import ClientWorker
from fedveil.experiment.config import build_method
from fedveil.methods.fedlap import FedLAP, FedLAPDP, MeasuredSet, Server, global_radius
from fedveil.methods.method import AnyMethod, field_names
from fedveil.methods.psg import PSG
from fedveil.methods.wrappers import WrappedMethod
from fedveil.methods.wrappers.averaging import ModelAverage
from fedveil.models.registry import make_model
from fedveil.privacy.accounting import account
from fedveil.session.options import PrivacySettings
from fedveil.streams import ServerStreams
from fedveil.tree import norms, sub, with_axis
from tests.refusals import refuses

GROUPS = ((0, 1), (2,))
QUICK: dict[str, Any] = {
    "ipc": 2,
    "trajectories": 1,
    "max_steps": 2,
    "real_batches": 1,
    "image_updates": 2,
    "image_lr": 0.5,
    "batch_size": 4,
    "lr": 0.1,
    "server_steps": 5,
}


def task() -> Task:
    return Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)).double())


def clients() -> ArrayClients:
    """Client 0 holds classes 0 and 1, client 1 class 2."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for group, n in zip(GROUPS, (8, 5), strict=True):
        y = torch.tensor([group[i % len(group)] for i in range(n)])
        x = torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64) + y[:, None, None, None]
        pairs.append((x, y))
    return ArrayClients.from_arrays(pairs)


PLAN = Plan(2, 2, "all", 3, 5, 8)


def uploads(method: AnyMethod, ids: tuple[int, ...] = (0, 1), round: int = 1, known: Any = None) -> Any:
    problem, at = task(), At(PLAN, round)
    server = method.init_server(problem.init(0), PLAN)
    down = method.broadcast(at, server, ids)
    return ClientWorker(problem, clients(), method, 0).update(ids, down, known or {}, at)


def paper_plan(rounds: int) -> Plan:
    return Plan(5, 5, "all", rounds, 10_000, 10_000)


@pytest.mark.parametrize(
    "rounds, epsilon", [(1, 2.787), (7, 6.725), (15, 10.183), (17, 10.931), (27, 14.306)]
)
def test_published_epsilons_are_those_of_the_default_method(rounds: int, epsilon: float) -> None:
    plan = paper_plan(rounds)
    rows = account(FedLAPDP().releases(plan), plan, 1e-5, "rdp")
    assert {row.unit for row in rows} == {"record"}
    assert [round(row.epsilon or 0.0, 3) for row in rows] == [epsilon] * 3


def test_the_charge_is_the_worst_case_of_the_loops() -> None:
    release = FedLAPDP().releases(paper_plan(1))[0]
    assert (release.accesses, release.rate) == (200, 0.0256)
    assert FedLAPDP(radius=1e-9).releases(paper_plan(1))[0].accesses == 200
    assert PSG().releases(paper_plan(1))[0].accesses == 10_000
    small = Plan(2, 2, "all", 1, 3, 9)
    assert FedLAPDP().releases(small)[0].rate == 1.0
    assert FedLAPDP(batch_size=2).releases(small)[0].rate == 2 / 3  # of the smallest client


def test_without_noise_or_clip_nothing_is_proven() -> None:
    for method in (FedLAPDP(noise_multiplier=0.0), FedLAPDP(clip=math.inf)):
        rows = account(method.releases(PLAN), PLAN, 1e-5)
        assert all(row.epsilon is None for row in rows)
    assert all(row.epsilon is None for row in account(FedLAP().releases(PLAN), PLAN, 1e-5))


def test_a_budget_without_noise_is_refused(tmp_path: Path) -> None:
    method = FedLAPDP(**QUICK, noise_multiplier=0.0)
    with refuses("privacy.budget"):
        run(
            task(), clients(), method, rounds=1, privacy=PrivacySettings(budget=1.0), results=tmp_path / "run"
        )


def test_traffic_relative_to_the_model_is_that_of_the_paper() -> None:
    """Table 1, CIFAR-10: FedLAP and FedDM 0.96x of the model, SCAFFOLD 2x, FedAvg 1x."""
    model = make_model("convnet", (3, 32, 32), 10, seed=0)
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    whole = sum(leaf.numel() * leaf.element_size() for leaf in params.values())
    images = torch.zeros(1, 2 * FedLAP().ipc, 3, 32, 32)
    labels = torch.zeros(1, 2 * FedLAP().ipc, dtype=torch.long)
    up = MeasuredSet(images, labels, torch.zeros(1), torch.zeros(1, dtype=torch.long))
    assert round(up.row_bytes() / whole, 2) == 0.96
    plan = paper_plan(1)
    for name, times in (("fedavg", 1), ("scaffold", 2)):
        method = METHODS[name]()
        down = method.broadcast(At(plan, 1), method.init_server(params, plan), range(5))
        assert down.row_bytes() == times * whole


def test_traffic_is_recorded_in_every_round() -> None:
    method = FedLAP(**QUICK, labels="own", classes_per_client=2)
    result = run(task(), clients(), method, rounds=2, sampler="all")
    images, labels = 4 * 16 * 8, 4 * 8
    assert [line["bytes_up"] for line in result.history] == [2 * (images + labels + 8 + 8)] * 2
    whole = sum(leaf.numel() * 8 for leaf in task().init(0).values())
    assert [line["bytes_down"] for line in result.history] == [2 * (whole + 8)] * 2


def test_own_labels_are_the_clients_classes_padded_to_one_shape() -> None:
    up, _ = uploads(FedLAP(**QUICK, labels="own", classes_per_client=2))
    assert up.labels.tolist() == [[0, 0, 1, 1], [2, 2, -1, -1]]
    everything, _ = uploads(FedLAP(**QUICK))
    assert everything.labels.tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    declared, _ = uploads(FedLAPDP(**QUICK, labels=GROUPS))
    assert torch.equal(declared.labels, up.labels)


def test_labels_that_cannot_be_are_refused() -> None:
    with refuses("method.labels"):
        uploads(FedLAPDP(**QUICK, labels=((0, 2), (2,))))
    with refuses("method.labels"):
        uploads(FedLAPDP(**QUICK, labels=((0, 1),)))
    with refuses("method.labels"):
        uploads(FedLAPDP(**QUICK, labels=((0, 0), (2,))))
    with refuses("method.classes_per_client"):
        uploads(FedLAP(**QUICK, labels="own", classes_per_client=1))


@pytest.mark.parametrize(
    ("method", "field"),
    [
        (FedLAPDP(**QUICK, labels=((0, 1), (1, 2))), "method.labels"),
        (FedLAPDP(**QUICK, labels=((0, 1),)), "method.labels"),
        (FedLAPDP(**QUICK, labels=((0, 1), (7,))), "method.labels"),
        (
            WrappedMethod(FedLAP(**QUICK, labels="own", classes_per_client=1), ModelAverage()),
            "method.classes_per_client",
        ),
    ],
)
def test_the_labels_of_all_clients_are_checked_before_anybody_works(
    method: AnyMethod, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientWorker, "update", lambda *_: pytest.fail("a client was asked"))
    with refuses(field):
        run(task(), clients(), method, rounds=1, sampler="all", results=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "field, value",
    [
        ("ipc", 0),
        ("radius", 0.0),
        ("radius", -1.0),
        ("radius", math.nan),
        ("max_steps", 0),
        ("image_lr", 0.0),
        ("squared_weight", -0.1),
        ("squared_weight", math.inf),
        ("batch_size", 0),
        ("noise_multiplier", -1.0),
        ("augment", ["shear"]),
        ("labels", "some"),
    ],
)
def test_bad_fields_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        FedLAPDP(**{field: value})
    entry = ".0" if isinstance(value, list) else ""
    with refuses(f"method.{field}{entry}"):
        build_method({"name": "fedlap-dp", field: value})


def test_radius_strategies() -> None:
    measured = torch.tensor([3.0, 1.0, 2.0])
    expected = {"min": 1.0, "median": 2.0, "max": 3.0, "fixed": math.inf, "constant": 7.0}
    for strategy, value in expected.items():
        assert global_radius(strategy, measured, 7.0) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["min", "median", "max", "constant"])
def test_the_server_walks_no_further_than_its_radius_and_a_step(strategy: Any) -> None:
    method = FedLAP(**(QUICK | {"server_steps": 50}), radius_strategy=strategy, radius=0.4)
    problem, at = task(), At(PLAN, 1)
    server = method.init_server(problem.init(0), PLAN)
    up, _ = uploads(method)
    after = method.server_update(problem, at, server, (0, 1), up, ServerStreams(0, 1))
    assert after.radius == global_radius(strategy, up.radius, 0.4)
    assert bool((up.radius <= 0.4).all())
    shorter = FedLAP(
        **(QUICK | {"server_steps": max(1, after.steps - 1)}), radius_strategy=strategy, radius=0.4
    )
    before = shorter.server_update(problem, at, server, (0, 1), up, ServerStreams(0, 1))
    if after.steps > 1:
        assert float(norms(with_axis(sub(before.params, server.params)))) < after.radius


def test_fixed_takes_its_number_of_steps() -> None:
    method = FedLAP(**(QUICK | {"server_steps": 7}), radius_strategy="fixed", radius=1e-6)
    problem = task()
    up, _ = uploads(method)
    start = method.init_server(problem.init(0), PLAN)
    after = method.server_update(problem, At(PLAN, 1), start, (0, 1), up, ServerStreams(0, 1))
    assert isinstance(after, Server)
    assert after.steps == 7


def test_the_radius_may_be_measured_on_some_examples() -> None:
    some, _ = uploads(FedLAP(**QUICK, radius_examples=2))
    every, _ = uploads(FedLAP(**QUICK, radius_examples=100))
    plain, _ = uploads(FedLAP(**QUICK))
    assert torch.equal(every.radius, plain.radius)
    assert torch.equal(some.images, plain.images)


def test_warm_images_continue_from_the_last_round() -> None:
    method = FedLAP(**QUICK, reinit=False)
    up, states = uploads(method)
    assert torch.equal(states["images"], up.images)
    known = {k: {"images": states["images"][k]} for k in (0, 1)}
    again, _ = uploads(method, round=2, known=known)
    cold, _ = uploads(FedLAP(**QUICK), round=2)
    still = FedLAP(**(QUICK | {"image_lr": 1e-12}), reinit=False)
    assert torch.allclose(uploads(still, round=2, known=known)[0].images, up.images)
    assert not torch.equal(again.images, cold.images)


def test_private_images_depend_on_the_noise_alone_beyond_the_clip() -> None:
    """Record-level noise of sigma = 0 and C = inf is Algorithm 1 with a constant radius, image by image."""
    private, _ = uploads(FedLAPDP(**QUICK, clip=math.inf, noise_multiplier=0.0, radius=2.0))
    plain, _ = uploads(FedLAP(**QUICK, radius_strategy="constant", model_updates=2, radius=2.0))
    assert torch.allclose(private.images, plain.images, rtol=1e-9, atol=1e-12)
    noisy, _ = uploads(FedLAPDP(**QUICK, radius=2.0))
    assert not torch.allclose(noisy.images, private.images)


def test_private_uploads_contain_neither_size_nor_measured_radius() -> None:
    up, _ = uploads(FedLAPDP(**QUICK))
    assert set(up.tensors()) == {"images", "labels"}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # an epsilon beyond all use
@pytest.mark.parametrize("name", ["fedlap", "fedlap-dp", "feddm", "dsc", "psg"])
def test_learning_works_where_clients_share_no_class(name: str) -> None:
    fields: dict[str, Any] = QUICK | {"server_steps": 60, "image_updates": 5, "trajectories": 2}
    extra: dict[str, dict[str, Any]] = {
        "fedlap-dp": {"noise_multiplier": 0.1, "radius": 5.0},
        "psg": {"noise_multiplier": 0.02, "clip": 1.0, "trajectories": 10},
        "feddm": {"matching_steps": 10, "spread": 0.1},
        "dsc": {"augment": ()},
    }
    known = set(field_names(METHODS[name]))
    chosen = {key: value for key, value in fields.items() if key in known} | extra.get(name, {})
    held = clients()
    test = (held.x, held.y)
    method = METHODS[name](**(chosen | {"labels": "own"}))
    result = run(task(), held, method, rounds=3, sampler="all", test=test, seed=1, noise="seeded")
    assert result.accuracy is not None
    assert result.accuracy > 0.7


@pytest.mark.parametrize("examples", [0, 1])
@pytest.mark.parametrize("name", ["fedlap", "fedlap-dp", "dsc", "psg", "feddm"])
def test_a_client_with_no_example_or_one_does_no_harm(name: str, examples: int) -> None:
    held = clients()
    lonely = ArrayClients(held.x, held.y, [*held.parts, torch.zeros(examples, dtype=torch.long)])
    known = set(field_names(METHODS[name]))
    chosen = {key: value for key, value in QUICK.items() if key in known}
    if "matching_steps" in known:
        chosen["matching_steps"] = 2
    if name == "dsc":
        chosen["augment"] = ()
    result = run(task(), lonely, METHODS[name](**(chosen | {"labels": "own"})), rounds=2, sampler="all")
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())
