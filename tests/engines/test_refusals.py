"""Attacks by questions: what a node answers or refuses does not depend on its records beyond what it charges.

The server chooses every configuration, plan and message. Two nodes that differ in one record must refuse the same
questions with the same words, and charge the same for those that they answer.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")
from flwr.app import Context, Message, RecordDict

from fedveil.engines.flower.wire import (
    EXCHANGE,
    HELLO,
    REASONS,
    VERSION,
    Order,
    RefusalError,
    fingerprint,
    hello,
    pack_order,
    read_introduction,
    read_reply,
    refuse,
)
from fedveil.errors import FedveilError
from fedveil.experiment.config import make_config
from fedveil.experiment.prepare import task_for
from fedveil.federation.client_app import app as client_app
from fedveil.federation.node import open_node
from fedveil.federation.run_settings import RunSettings
from fedveil.methods import METHODS
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from tests.engines.grid import InMemoryNodes

RECORDS, CLASSES, SHAPE = 8, 10, (4,)
LIMIT = {"unit": "record", "adversary": "server", "epsilon": 4.0, "delta": 1e-5}
CLIENT = 2


def labels(kind: str) -> list[int]:
    """The labels of one data set; all differ from the first by one record."""
    held = [0, 1, 2, 3, 0, 1, 2, 3, 0]
    return {
        "plain": held,
        "highest label": [*held[:3], 9, *held[4:]],
        "label of its own": [*held[:4], 6, *held[5:]],
        "without a label": [*held[:3], 0, *held[4:]],
        "one more": [*held, 5],
        "one less": held[:-1],
        "too few": held[:-1][: RECORDS - 1],
        "beyond the classes": [*held[:2], 11, *held[3:]],
    }[kind]


NEIGHBOURS = (
    "highest label",
    "label of its own",
    "without a label",
    "one more",
    "one less",
    "too few",
    "beyond the classes",
)


def write_node(folder: Path, kind: str, declared: Mapping[str, Any], policy: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    held = labels(kind)
    x = np.random.default_rng(0).normal(size=(len(labels("one more")), *SHAPE)).astype(np.float32)
    np.savez(folder / "data.npz", x=x[: len(held)], y=np.array(held))
    data = {"reader": "npz", "path": "data.npz"} | dict(declared)
    (folder / "node.toml").write_text(tomli_w.dumps({"name": "node-2", "client": CLIENT, "data": data}))
    (folder / "policy.toml").write_text(tomli_w.dumps(dict(policy)))
    return folder


@dataclass(frozen=True)
class Question:
    """What a server sends: a configuration, a plan, a place in it, and which cohort it announces."""

    config: dict[str, Any]
    plan: dict[str, Any]
    round: int = 1
    exchange: int = 0
    seed: int = 0


def heard(folder: Path, question: Question) -> list[object]:
    """All that a server learns by this question, but for the numbers in an upload; and what it cost."""
    try:
        config = make_config(question.config)
    except FedveilError:
        text = tomli_w.dumps(question.config)  # a server need not be fedveil's own
    else:
        text = config.to_toml()
    values = {
        "config": text,
        "seed": question.seed,
        "experiment": "x",
        "results": "",
        "data": "",
        "noise": "",
    }
    grid = InMemoryNodes(
        client_app,
        [{"fedveil-node": str(folder)}],
        {f"fedveil-{key}": value for key, value in values.items()},
    )
    found: list[object] = [_said(grid, hello(), HELLO)]
    try:
        config = make_config(question.config)
        classes = config.task.classes
        assert classes is not None
        task, method = task_for(config, SHAPE, classes), config.build_method()
        at = At(Plan(**question.plan), question.round, question.exchange)
        down = method.broadcast(at, method.init_server(task.init(0), at.plan), range(at.plan.cohort)).rows(
            [0]
        )
    except (FedveilError, ArithmeticError, TypeError, IndexError, RuntimeError):
        return [*found, _charges(folder)]
    order = Order("run", CLIENT, at, VERSION, fingerprint(task, method), None, (), down.to_bytes())
    found.append(_said(grid, pack_order(order), EXCHANGE))
    return [*found, _charges(folder)]


def _said(grid: InMemoryNodes, content: RecordDict, kind: str) -> object:
    (reply,) = grid.send_and_receive([Message(content, 1000, kind)])
    head = json.loads(str(reply.content.config_records["fedveil"]["head"]))
    if head["kind"] == "reply":
        up = reply.content.array_records["message"]["message"].data
        length = int.from_bytes(up[:4], "little")
        return head | {"length": len(up), "scalars": json.loads(up[4 : 4 + length]).get("scalars")}
    return head


def _charges(folder: Path) -> list[object]:
    return [entry.release for entry in open_node(folder).guard.ledger.entries]


def config_of(method: Mapping[str, Any], **task: Any) -> dict[str, Any]:
    return {
        "task": {"dataset": "none", "model": "logistic", "input_shape": list(SHAPE), "classes": CLASSES}
        | task,
        "partition": {"clients": 3},
        "method": dict(method),
        "run": {"engine": "flower", "rounds": 2, "sampler": "all"},
    }


PLAN = {
    "clients": 3,
    "cohort": 3,
    "sampler": "all",
    "rounds": 2,
    "records_per_client": 1,
    "largest_client": 20,
}
MATCHING = {"name": "fedlap-dp", "ipc": 1, "trajectories": 1, "max_steps": 1, "real_batches": 1}
POLICY = {"methods": sorted(METHODS), "minimum_cohort": 2, "limit": [LIMIT]}
OPEN = {"methods": sorted(METHODS), "minimum_cohort": 1}
DECLARED: dict[str, Any] = {"records": RECORDS}


@pytest.mark.parametrize("declared", [{}, DECLARED, {"classes": CLASSES}], ids=["none", "records", "classes"])
@pytest.mark.parametrize(
    ("method", "task"),
    [
        ({"name": "dp-fedavg", "unit": "record"}, {"classes": 9}),
        ({"name": "dp-fedavg", "unit": "record"}, {"classes": 2}),
        (MATCHING | {"labels": "own"}, {}),
        (MATCHING | {"labels": "own", "classes_per_client": 4}, {}),
        (MATCHING | {"labels": [[0], [0], [9]]}, {}),
        (MATCHING | {"labels": [[0], [0], [0, 1, 2, 3]]}, {}),
    ],
)
def test_a_server_cannot_ask_for_labels_by_what_is_refused(
    method: dict[str, Any], task: dict[str, Any], declared: dict[str, Any], tmp_path: Path
) -> None:
    """Record-level epsilon 4, and no question tells two nodes apart that differ in one label."""
    question = Question(config_of(method, **task), PLAN)
    answers = [
        heard(write_node(tmp_path / kind / "node-2", kind, declared, POLICY), question)
        for kind in ("plain", "highest label", "label of its own", "without a label")
    ]
    assert all(answer == answers[0] for answer in answers)


def test_a_plan_for_other_sizes_is_refused_by_the_declared_number_of_records(tmp_path: Path) -> None:
    config = config_of({"name": "dp-fedavg", "unit": "record"})
    for size in (RECORDS - 1, RECORDS, RECORDS + 1):
        question = Question(config, PLAN | {"records_per_client": size, "largest_client": size})
        answers = [
            heard(write_node(tmp_path / f"{size} {kind}" / "node-2", kind, DECLARED, POLICY), question)
            for kind in ("plain", "one more", "one less", "too few")
        ]
        assert all(answer == answers[0] for answer in answers)


def test_a_refusal_carries_its_reason_and_nothing_of_the_node() -> None:
    secret = "record 7: epsilon 3.2 of 4"
    for reason in REASONS:
        content = refuse(RefusalError(reason, secret, "method.ipc"), "node-2")
        head = json.loads(str(content.config_records["fedveil"]["head"]))
        assert head == {"kind": "refusal", "reason": reason, "field": "method.ipc", "node": "node-2"}
        with pytest.raises(RefusalError) as caught:
            read_reply(content)
        assert (caught.value.reason, caught.value.field) == (reason, "method.ipc")


def test_a_server_learns_neither_a_limit_nor_what_is_spent_of_it(tmp_path: Path) -> None:
    """The same words to a node with nothing left and to one that never had enough."""
    method = {"name": "dp-fedavg", "unit": "record", "noise_multiplier": 0.7}
    question = Question(config_of(method), PLAN)
    folder = write_node(
        tmp_path / "spent" / "node-2", "plain", DECLARED, POLICY | {"limit": [LIMIT | {"epsilon": 60.0}]}
    )
    while (said := heard(folder, question)[1])["kind"] == "reply":  # type: ignore[index]
        pass
    never = write_node(
        tmp_path / "never" / "node-2", "plain", DECLARED, POLICY | {"limit": [LIMIT | {"epsilon": 0.01}]}
    )
    assert heard(never, question)[1] == said
    assert said == {"kind": "refusal", "reason": "policy", "field": "", "node": "node-2"}


def test_an_introduction_contains_the_declared_facts(tmp_path: Path) -> None:
    folder = write_node(tmp_path / "a", "one more", DECLARED, OPEN)
    values = RunSettings(make_config(config_of({"name": "fedavg"})), 0, "x", tmp_path).to_run_config()
    context = Context(1, 1, {"fedveil-node": str(folder)}, RecordDict(), dict(values))
    reply = client_app(Message(hello(), 1000, HELLO), context)
    assert read_introduction(reply.content).size == RECORDS


NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 7, 10**9, 10**30, 0.0, 0.5, 1.0, 1e-3, 2.5, 1e6, 1e30, 1e300, float("inf")]
)
WORDS = st.sampled_from(
    ["own", "all", "record", "client", "local", "central", "shared", "min", "max", "fixed", "cosine", "x"]
)
LABELS = st.lists(st.lists(st.integers(-1, 10), max_size=4), min_size=0, max_size=4)
WRAPS = st.lists(
    st.sampled_from(
        [
            {"name": "dp-sgd"},
            {"name": "gradient-pruning", "part": 0.5},
            {"name": "sign-compression"},
            {"name": "model-average", "decay": 0.5},
            {"name": "gradient-laplace", "scale": 1.0},
        ]
    ),
    max_size=2,
)
QUICK = {
    "ipc": 1,
    "trajectories": 1,
    "max_steps": 1,
    "real_batches": 1,
    "image_updates": 1,
    "model_updates": 1,
    "matching_steps": 1,
    "server_steps": 1,
    "perturbation_steps": 1,
}
PLAIN: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"unit": "record"},
    "fedsgd": {"batch_size": 2},
    "fedem": {"batch_size": 4},
}


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """A method with some of its fields changed, for a model, a plan and a place that may fit or not."""
    name = draw(st.sampled_from(sorted(METHODS)))
    known = {field.name for field in dataclasses.fields(METHODS[name])}  # type: ignore[arg-type]
    fields: dict[str, Any] = {
        key: value for key, value in (QUICK | PLAIN.get(name, {})).items() if key in known
    }
    for key in draw(st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True)):
        fields[key] = draw(st.one_of(NUMBERS, WORDS, LABELS, st.booleans()))
    task: dict[str, Any] = {"classes": draw(st.sampled_from([2, 3, 4, 7, 9, 10, 12]))}
    if draw(st.booleans()):
        task |= draw(
            st.sampled_from(
                [
                    {"model": "mlp-2", "model_options": {"hidden": 3}},
                    {"model": "lstm", "text": {"vocabulary": "hash", "length": 4}},
                    {"model": "lenet-5"},
                    {"model": "mlp-2", "model_options": {"hidden": -1}},
                    {"input_shape": [5]},
                ]
            )
        )
    config = config_of({"name": name} | fields, **task) | {"wrap": draw(WRAPS)}
    sizes = sorted(draw(st.tuples(*[st.sampled_from([1, 7, 8, 9, 20])] * 2)))
    cohort = draw(st.sampled_from([1, 2, 3]))
    plan = PLAN | {"records_per_client": sizes[0], "largest_client": sizes[1], "cohort": cohort}
    plan["sampler"] = draw(st.sampled_from(["all", "fixed", "poisson"]))
    place = draw(st.sampled_from([(1, 0), (2, 0), (3, 0), (1, 1), (1, 7)]))
    return Question(config, plan, *place, seed=draw(st.sampled_from([0, 5])))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(questions(), st.sampled_from(NEIGHBOURS), st.booleans(), st.booleans())
def test_refusals_are_equal_on_neighbouring_data_for_any_message(
    question: Question, kind: str, full: bool, limited: bool
) -> None:
    torch.manual_seed(0)
    declared = DECLARED | ({"classes": CLASSES, "labels": [0, 1, 2, 3]} if full else {})
    place = Path(tempfile.mkdtemp())
    try:
        policy = POLICY if limited else OPEN
        one, two = (
            heard(write_node(place / kind / "node-2", kind, declared, policy), question)
            for kind in ("plain", kind)
        )
        assert one == two
    finally:
        shutil.rmtree(place)
