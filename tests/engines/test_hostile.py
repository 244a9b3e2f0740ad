"""A node that sends whatever it likes cannot end a run; a server that does cannot end, fill or sound out a node."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedveil.engines.flower.wire import (
    HELLO,
    REASONS,
    RefusalError,
    Reply,
    hello,
    pack_reply,
    read_introduction,
    read_order,
    read_reply,
)
from fedveil.errors import NobodyAnsweredError
from fedveil.federation import client_app as client_module
from fedveil.federation.client_app import app as client_app
from fedveil.federation.launch import with_shape
from fedveil.federation.node import open_node
from fedveil.federation.resources import require_affordable, require_counted
from fedveil.federation.run_settings import LOG, RunSettings
from fedveil.methods import METHODS
from fedveil.methods.dp_fedags_proven import Selected
from fedveil.methods.fedavg import TrainedModel
from fedveil.privacy.releases import Plan
from fedveil.session.results import Result
from tests.engines.grid import Fault, InMemoryNodes
from tests.engines.test_deployed_nodes import NODES, deployed, federated, write_nodes

DEEP = "[" * 100_000


def head(text: str) -> RecordDict:
    return RecordDict({"fedveil": ConfigRecord({"head": text})})


def says(kind: str, **fields: object) -> RecordDict:
    return head(json.dumps({"kind": kind} | fields))


def answering(kind: str, content: RecordDict) -> Fault:
    """Sends this to every message of the kind, and the truth to others."""

    def fault(message: Message, answer: Callable[[], Message]) -> Message:
        asked = message.metadata.message_type.startswith(kind)
        return Message(content, reply_to=message) if asked else answer()

    return fault


def uploading(change: Callable[[bytes], bytes]) -> Fault:
    def fault(message: Message, answer: Callable[[], Message]) -> Message:
        reply = answer()
        if not message.metadata.message_type.startswith("train"):
            return reply
        said = read_reply(reply.content)
        return Message(pack_reply(Reply(**(said.__dict__ | {"up": change(said.up)}))), reply_to=message)

    return fault


def log_of(result: Result) -> str:
    assert result.folder is not None
    return (result.folder / LOG).read_text()


REPLY = {"client": 1, "round": 1, "exchange": 0, "version": "", "fingerprint": "", "remembers": False}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (head(DEEP), "not a message of fedveil"),
        (head('{"kind": "reply", "client": ' + '{"a": ' * 100_000), "not a message of fedveil"),
        (says("reply", **(REPLY | {"client": float("inf")})), "its reply is damaged"),
        (says("reply", **(REPLY | {"round": 10**400})), "its reply is damaged"),
        (says("refusal", text="lies"), f"node None refused: {REASONS['error']}"),
        (
            says("refusal", node="x\n2026-01-01 INFO all is well"),
            "node x 2026-01-01 INFO all is well refused",
        ),
        (says("refusal", field="x\n2026-01-01 INFO"), "(x 2026-01-01 INFO)"),
    ],
)
def test_an_invalid_reply_drops_only_its_sender(content: RecordDict, said: str, tmp_path: Path) -> None:
    faults = {1001: answering("train", content)}
    result = deployed(federated("fedavg", cohort=NODES), write_nodes(tmp_path), tmp_path, faults=faults)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert said in log_of(result)
    assert "\n2026-01-01" not in log_of(result), "nobody writes lines of his own into the log"


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 10**400, 2**63, 1.5, True, "7", None, [1]])
def test_a_node_that_counts_beyond_reason_is_not_let_in(number: object, tmp_path: Path) -> None:
    who = {"name": "x", "client": 1, "size": number, "version": "", "fingerprint": ""}
    faults = {1001: answering("query", says("introduction", **who))}
    result = deployed(federated("fedavg", cohort=NODES), write_nodes(tmp_path), tmp_path, faults=faults)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert "is refused: its introduction is damaged" in log_of(result)


def numbers_for_tensors(_: bytes) -> bytes:
    text = json.dumps({"kind": "TrainedModel", "scalars": {"params": 3, "size": 4}, "empty": [], "order": []})
    return len(text).to_bytes(4, "little") + text.encode() + b"\x08\0\0\0\0\0\0\0{}      "


def without_parameters(data: bytes) -> bytes:
    return TrainedModel({}, TrainedModel.from_bytes(data).size).to_bytes()


@pytest.mark.parametrize("change", [numbers_for_tensors, without_parameters])
def test_the_only_answer_of_a_round_may_be_hostile(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """Then there are no others to compare it with."""
    silent: Fault = lambda message, answer: (  # noqa: E731
        None if message.metadata.message_type.startswith("train") else answer()
    )
    faults = {1000: silent, 1001: uploading(change), 1002: silent}
    config = federated("fedavg", cohort=NODES, deadline=1.0)
    with pytest.raises(NobodyAnsweredError) as caught:
        deployed(config, write_nodes(tmp_path), tmp_path, faults=faults)
    assert sorted(caught.value.reasons) == [0, 1, 2]


def test_an_upload_that_the_server_cannot_use_is_dropped(tmp_path: Path) -> None:
    """Coordinates that no model has are of the right shape and type."""

    def elsewhere(data: bytes) -> bytes:
        up = Selected.from_bytes(data)
        return Selected(up.values, {"places": torch.full_like(up.own["places"], 10**9)}).to_bytes()

    config = federated("dp-fedags-proven", cohort=NODES)
    config = config.model_copy(update={"method": config.method | {"variant": "top-k"}})
    faults = {1001: uploading(elsewhere)}
    result = deployed(config, write_nodes(tmp_path), tmp_path, faults=faults)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert "dropped out: the server cannot use its upload (RuntimeError)" in log_of(result)


def told(folder: Path, values: dict[str, Any]) -> tuple[str, str]:
    """Reason and field: why the node of this folder does not introduce itself to a server that sends these values."""
    grid = InMemoryNodes(client_app, [{"fedveil-node": str(folder)}], values)
    (reply,) = grid.send_and_receive([Message(hello(), 1000, HELLO)])
    with pytest.raises(RefusalError) as caught:
        read_introduction(reply.content)
    assert str(caught.value).startswith(f"node node-0 refused: {REASONS[caught.value.reason]}")
    return caught.value.reason, caught.value.field


def sent(folder: Path, **task: object) -> dict[str, Any]:
    values: dict[str, Any] = dict(
        RunSettings(with_shape(federated("fedavg"), None), 0, "test", folder).to_run_config()
    )
    config = tomllib.loads(values["fedveil-config"])
    config["task"] |= task
    return values | {"fedveil-config": tomli_w.dumps(config)}


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ({"model_options": {"hidden": 10**12}}, "task.model_options.hidden"),
        ({"model_options": {"hidden": 10**18}}, "task.model_options.hidden"),
        ({"model_options": {"hidden": 4 * 10**6}}, "task.model"),
        ({"classes": 10**9}, "task.classes"),
        ({"classes": 4 * 10**6}, "task.model"),
    ],
)
def test_a_model_beyond_a_nodes_largest_message_is_not_built(
    task: dict[str, Any], field: str, tmp_path: Path
) -> None:
    folder = write_nodes(tmp_path)[0]
    assert told(folder, sent(folder, **task)) == ("size", field)


@pytest.mark.parametrize(
    ("method", "field"),
    [
        ({"name": "fedlap-dp", "ipc": 10**9}, "method.ipc"),
        ({"name": "fedlap-dp", "ipc": 4 * 10**5}, "method.ipc"),
        ({"name": "fedlap-dp", "trajectories": 10**5, "max_steps": 10**3}, "method.trajectories"),
        ({"name": "fedlap-dp", "trajectories": 10**5, "real_batches": 10**6}, "method.name"),
        ({"name": "feddm", "matching_steps": 4 * 10**6}, "method.matching_steps"),
        ({"name": "dsc", "max_steps": 10**6}, "method.max_steps"),
        ({"name": "psg", "real_batches": 10**6}, "method.real_batches"),
        ({"name": "fedavg", "epochs": 10**9}, "method.epochs"),
        ({"name": "udp-fedavg", "epochs": 3 * 10**6}, "method.epochs"),
        ({"name": "scaffold", "local_steps": 10**12}, "method.local_steps"),
        ({"name": "dp-fedavg", "unit": "record", "record_rate": 1e-9}, "method.record_rate"),
        ({"name": "dp-fedavg", "unit": "record", "record_rate": 5e-324}, "method.record_rate"),
        ({"name": "fedem", "batch_size": 4 * 10**6}, "method.batch_size"),
        ({"name": "fedem", "perturbation_steps": 10**7}, "method.perturbation_steps"),
        ({"name": "fedlap", "labels": [[10**9]]}, "method.labels"),
    ],
)
def test_work_beyond_a_nodes_policy_is_refused_by_its_field_and_charges_nothing(
    method: dict[str, Any], field: str, tmp_path: Path
) -> None:
    folder = write_nodes(tmp_path)[0]
    values = sent(folder)
    config = tomllib.loads(values["fedveil-config"]) | {"method": method}
    assert told(folder, values | {"fedveil-config": tomli_w.dumps(config)}) == ("size", field)
    assert len(open_node(folder).guard.ledger) == 0


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ({"features": "pretrained", "feature_options": {"path": "/"}}, ("configuration", "task.features")),
        ({"features": "scattering", "feature_options": {"angles": 10**9}}, None),
    ],
)
def test_a_server_does_not_choose_what_a_node_reads_or_how_much_it_computes(
    task: dict[str, Any], answer: tuple[str, str] | None, tmp_path: Path
) -> None:
    folder = write_nodes(tmp_path)[0]
    values = sent(folder)
    config = tomllib.loads(values["fedveil-config"])
    config["task"] |= task
    found = told(folder, values | {"fedveil-config": tomli_w.dumps(config)})
    assert found == answer if answer else found[0] in ("configuration", "size", "message")
    assert len(open_node(folder).guard.ledger) == 0


def test_the_defaults_of_every_method_are_within_a_new_policy(tmp_path: Path) -> None:
    folder = write_nodes(tmp_path)[0]
    policy = open_node(folder).guard.policy
    for name in METHODS:
        config = federated(name).model_copy(update={"method": {"name": name}})
        require_affordable(config, policy, records=600, classes=10, example_bytes=4 * 784)


@pytest.mark.parametrize("field", ["clients", "rounds"])
def test_a_plan_beyond_reason_is_refused(field: str, tmp_path: Path) -> None:
    policy = open_node(write_nodes(tmp_path)[0]).guard.policy.model_copy(update={"maximum_steps": 100})
    huge: dict[str, Any] = {field: 101}
    with pytest.raises(RefusalError) as caught:
        require_counted(replace(Plan(3, 3, "all", 3, 1, 9), **huge), policy)
    assert caught.value.field == f"run.{field}"


@pytest.mark.parametrize("seed", ["abc", -1, 2**70, float("inf")])
def test_a_seed_that_is_none_is_refused(seed: object, tmp_path: Path) -> None:
    folder = write_nodes(tmp_path)[0]
    assert told(folder, sent(folder) | {"fedveil-seed": seed}) == ("configuration", "seed")


def test_settings_nested_without_end_are_refused(tmp_path: Path) -> None:
    folder = write_nodes(tmp_path)[0]
    given = sent(folder) | {"fedveil-config": "a = " + DEEP}
    assert told(folder, given) == ("configuration", "run configuration")


def test_a_failure_discloses_nothing_else_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower itself would send the text along."""

    def fails(_: Context) -> None:
        raise ZeroDivisionError("record 7 of patient X")

    monkeypatch.setattr(client_module, "node_of", fails)
    folder = write_nodes(tmp_path)[0]
    assert told(folder, sent(folder)) == ("error", "")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.5, True, "3", None, [], 10**400])
@pytest.mark.parametrize("key", ["clients", "cohort", "rounds", "records_per_client", "largest_client"])
def test_a_plan_is_counted_in_whole_numbers(key: str, value: object) -> None:
    plan = {"clients": 3, "cohort": 3, "sampler": "all", "rounds": 9, "records_per_client": 1}
    plan |= {"largest_client": 9, key: value}
    order = {"run": "r", "client": 0, "plan": plan, "at": [1, 0], "version": "", "fingerprint": ""}
    with pytest.raises(RefusalError) as caught:
        read_order(says("order", **order, state=None, needed=[]))
    assert caught.value.reason == "message"
