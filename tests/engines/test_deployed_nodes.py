"""Deployed nodes in this process: their own folders decide, whatever the server's configuration says."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedveil.data.dataset import TextExamples
from fedveil.data.registry import load_dataset
from fedveil.engines.flower.wire import (
    HELLO,
    REASONS,
    VERSION,
    Order,
    RefusalError,
    fingerprint,
    pack_order,
    read_introduction,
    read_reply,
)
from fedveil.errors import FedveilError
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import prepare
from fedveil.experiment.run import run_seed
from fedveil.federation.client_app import app as client_app
from fedveil.federation.client_app import node_of
from fedveil.federation.launch import with_shape
from fedveil.federation.node import open_node
from fedveil.federation.run_settings import LOG, RunSettings
from fedveil.federation.server_app import app as server_app
from fedveil.messages import Message as Downlink
from fedveil.methods import METHODS
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.user_level import CohortModel
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.releases import Plan
from fedveil.session.results import Result, ResultFolder
from fedveil.streams import NoiseSource
from fedveil.tree import Params
from tests.contract.federation import distance
from tests.engines.configs import COMPARED, quick_config
from tests.engines.grid import Fault, InMemoryNodes
from tests.refusals import refuses

NODES = 3


def write_nodes(
    place: Path, *, seeded: bool = True, policies: Mapping[int, object] | None = None, count: int = NODES
) -> list[Path]:
    """A folder for each client, with the examples that the simulator would give to it."""
    clients = prepare(quick_config("fedavg", clients=count), 0).clients
    folders = []
    for client in range(count):
        folder = place / f"node-{client}"
        folder.mkdir(parents=True)
        data = clients.load([client])
        np.savez(folder / "data.npz", x=data.x[0].numpy(), y=data.y[0].numpy())
        node = {
            "name": f"node-{client}",
            "client": client,
            "data": {"reader": "npz", "path": "data.npz"},
            "testing": {"seeded_noise": seeded},
        }
        (folder / "node.toml").write_text(tomli_w.dumps(node))
        policy = (policies or {}).get(client, {"methods": sorted(METHODS), "minimum_cohort": 1})
        assert isinstance(policy, dict)
        (folder / "policy.toml").write_text(tomli_w.dumps(policy))
        folders.append(folder)
    return folders


def deployed(
    config: Config,
    folders: Sequence[Path],
    results: Path,
    *,
    noise: NoiseSource | None = "seeded",
    faults: Mapping[int, Fault] | None = None,
) -> Result:
    settings = RunSettings(with_shape(config, None), 0, "test", results, None, noise)
    given = settings.to_run_config()
    grid = InMemoryNodes(client_app, [{"fedveil-node": str(folder)} for folder in folders], given, faults)
    server_app(grid, Context(1, 1, {}, RecordDict(), dict(given)))
    return ResultFolder(settings.folder).read()


def federated(name: str, **run: object) -> Config:
    return quick_config(name, "flower", clients=NODES, **run)


@pytest.mark.parametrize("name", COMPARED)
def test_nodes_with_their_own_data_give_the_simulators_bits(name: str, tmp_path: Path) -> None:
    here = run_seed(quick_config(name, clients=NODES), 0, experiment="test", results=tmp_path)
    there = deployed(federated(name), write_nodes(tmp_path), tmp_path)
    assert distance(here.model, there.model) == 0
    assert there.summary["privacy"] == here.summary["privacy"]
    assert "per_client" not in there.summary, "the server cannot score what it does not hold"


def test_nodes_and_server_draw_noise_from_entropy(tmp_path: Path) -> None:
    config = federated("udp-fedavg")
    models = [
        deployed(config, write_nodes(tmp_path / f"{i}", seeded=False), tmp_path / f"r{i}", noise=None).model
        for i in range(2)
    ]
    assert distance(*models) > 1e-3


def test_a_seed_from_the_server_does_not_make_a_nodes_noise_predictable(tmp_path: Path) -> None:
    """The server may seed its own noise; the nodes do not follow."""
    config = federated("udp-fedavg", rounds=1)
    models = [
        deployed(
            config, write_nodes(tmp_path / f"{i}", seeded=False), tmp_path / f"r{i}", noise="seeded"
        ).model
        for i in range(2)
    ]
    assert distance(*models) > 1e-3


ASKED = At(Plan(NODES, NODES, "all", 9, 1, 240), 1)


def asked(
    folder: Path, config: Config, make: Callable[[AnyMethod, Params], Downlink], seed: int = 0
) -> RecordDict:
    """The answer of this folder's node to a message that its server has made up, from the method and a model."""
    given = RunSettings(with_shape(config, None), seed, "test", folder).to_run_config()
    node = node_of(Context(1, 1, {"fedveil-node": str(folder)}, RecordDict(), dict(given)))
    task, method = node.worker.task, node.worker.method
    down = make(method, task.init(0)).to_bytes()
    mark = fingerprint(task, method)
    return node.answer(pack_order(Order("run", node.client, ASKED, VERSION, mark, None, (), down)))


@pytest.mark.parametrize(
    ("change", "cohort", "said"),
    [
        (lambda leaf: leaf[None], 3.99, "'cohort' of a CohortModel is not of type int"),
        (lambda leaf: torch.stack([leaf, leaf]), NODES, "not one row"),
        (lambda leaf: leaf[None].half(), NODES, "the model's is float32"),
        (lambda leaf: leaf[None, ..., :-1], NODES, "the model's is float32"),
        (lambda leaf: leaf[None] / 0, NODES, "is not finite"),
    ],
)
def test_a_message_that_would_reduce_the_noise_is_refused_and_charges_nothing(
    change: Callable[[torch.Tensor], torch.Tensor],
    cohort: int,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_nodes(tmp_path, seeded=False)[0]
    reply = asked(
        folder,
        federated("udp-fedavg"),
        lambda _, model: CohortModel({name: change(leaf) for name, leaf in model.items()}, cohort),
    )
    with pytest.raises(RefusalError) as caught:
        read_reply(reply)
    assert caught.value.reason == "message"
    assert said in caplog.text, "the node's own log says why"
    assert len(open_node(folder).guard.ledger) == 0


def test_a_server_that_changes_the_seed_of_a_run_is_refused(tmp_path: Path) -> None:
    """The seed shuffles the examples that `dp-sgd` reads batch by batch: with another they would be read again."""
    folder = write_nodes(tmp_path, seeded=False)[0]

    def plain(_: AnyMethod, model: Params) -> Downlink:
        return CohortModel({name: leaf[None] for name, leaf in model.items()}, NODES)

    read_reply(asked(folder, federated("udp-fedavg"), plain, seed=3))
    charged = len(open_node(folder).guard.ledger)
    with pytest.raises(RefusalError) as caught:
        read_reply(asked(folder, federated("udp-fedavg"), plain, seed=4))
    assert caught.value.reason == "policy"
    assert len(open_node(folder).guard.ledger) == charged


def _overflowing(method: AnyMethod, model: Params) -> Downlink:
    huge = {key: torch.full_like(leaf, 1e38) for key, leaf in model.items()}
    down: Downlink = method.broadcast(ASKED, method.init_server(huge, ASKED.plan), range(NODES))
    return down.rows([0])


def test_a_model_too_large_for_the_noise_is_refused_for_any_data(tmp_path: Path) -> None:
    """Uploads of udp-fedavg are models, and no noise fits beside 1e38 in float32: the server knows that beforehand."""
    real, blank = (write_nodes(tmp_path / name, seeded=False)[0] for name in ("real", "blank"))
    with np.load(blank / "data.npz") as held:
        x, y = np.zeros_like(held["x"]), held["y"]
    np.savez(blank / "data.npz", x=x, y=y)
    told = []
    for node in (real, blank):
        with pytest.raises(RefusalError) as caught:
            read_reply(asked(node, federated("udp-fedavg"), _overflowing))
        told.append((caught.value.reason, caught.value.field, str(caught.value)))
    assert told[0] == told[1]


def test_a_model_that_overflows_on_the_data_is_answered_all_the_same(tmp_path: Path) -> None:
    """An error would tell the server something of the data, and no noise hides an error."""
    folder = write_nodes(tmp_path, seeded=False)[0]
    reply = read_reply(asked(folder, federated("dp-fedprox"), _overflowing))
    up = METHODS["dp-fedprox"].up_type.from_bytes(reply.up)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in up.tensors().values())
    assert len(open_node(folder).guard.ledger) > 0


def test_a_node_whose_policy_refuses_is_named_and_the_others_continue(tmp_path: Path) -> None:
    folders = write_nodes(tmp_path, policies={1: {"methods": ["fedlap-dp"], "minimum_cohort": 1}})
    result = deployed(federated("fedavg"), folders, tmp_path)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert result.folder is not None
    log = (result.folder / LOG).read_text()
    assert f"client 1, node 'node-1' (1001), dropped out: node node-1 refused: {REASONS['policy']}" in log
    told = [
        line for line in log.splitlines() if "dropped out" in line
    ]  # here the node writes to the same log
    assert not any("fedlap-dp" in line for line in told), "its policy is its own"
    assert len(open_node(folders[1]).guard.ledger) == 0
    assert len(open_node(folders[0]).guard.ledger) > 0


def test_a_message_beyond_a_nodes_limit_is_refused_by_name_and_charges_nothing(tmp_path: Path) -> None:
    small = {"methods": ["fedavg"], "minimum_cohort": 1, "maximum_message": 19_000}
    folders = write_nodes(tmp_path, policies={1: small})
    result = deployed(federated("fedavg"), folders, tmp_path)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert result.folder is not None
    log = (result.folder / LOG).read_text()
    assert f"client 1, node 'node-1' (1001), dropped out: node node-1 refused: {REASONS['size']}" in log
    assert not any("19000" in line for line in log.splitlines() if "dropped out" in line)
    assert len(open_node(folders[1]).guard.ledger) == 0


def test_a_node_that_cannot_read_its_data_is_named_without_a_word_of_them(tmp_path: Path) -> None:
    folders = write_nodes(tmp_path)
    (folders[1] / "data.npz").write_bytes(b"a secret")
    result = deployed(federated("fedavg"), folders, tmp_path)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert result.folder is not None
    log = (result.folder / LOG).read_text()
    assert f"node 1001 is refused: node node-1 refused: {REASONS['unavailable']}" in log
    assert "secret" not in log


def test_a_server_of_another_version_is_refused_before_its_words_are_read(tmp_path: Path) -> None:
    folder = write_nodes(tmp_path)[0]
    words = {"kind": "hello", "version": "9.9"}
    content = RecordDict({"fedveil": ConfigRecord({"head": json.dumps(words)})})
    grid = InMemoryNodes(client_app, [{"fedveil-node": str(folder)}], {"fedveil-config": "in another tongue"})
    (reply,) = grid.send_and_receive([Message(content, 1000, HELLO)])
    with pytest.raises(RefusalError) as caught:
        read_introduction(reply.content)
    assert caught.value.reason == "version"


def test_a_node_never_takes_the_servers_data(tmp_path: Path) -> None:
    """Whatever data set the server names, each node trains on what its own file names."""
    folders = write_nodes(tmp_path)
    one = deployed(federated("fedavg"), folders, tmp_path / "one")
    for folder in folders:
        with np.load(folder / "data.npz") as held:
            np.savez(folder / "data.npz", x=held["x"][:, :, ::-1], y=held["y"])
    other = deployed(federated("fedavg"), folders, tmp_path / "other")
    assert distance(one.model, other.model) > 0


def test_a_node_without_a_folder_is_refused_in_a_federation(tmp_path: Path) -> None:
    settings = RunSettings(with_shape(federated("fedavg"), None), 0, "test", tmp_path, None, "seeded")
    given = settings.to_run_config()
    grid = InMemoryNodes(client_app, [{"partition-id": p} for p in range(NODES)], given)
    with refuses("nodes", FedveilError, value=0):
        server_app(grid, Context(1, 1, {}, RecordDict(), dict(given)))


WORDS = {"ill": ("fever", "cough", "pain"), "well": ("fine", "rested", "cheerful")}


def text_config(path: Path, engine: str, **task: object) -> Config:
    made = quick_config("fedavg", engine, clients=NODES).model_dump(exclude_none=True)
    text = {"vocabulary": "hash", "size": 64, "length": 6}
    made["task"] = {
        "dataset": "labelled-text",
        "data_options": {"path": str(path)},
        "model": "lstm",
        "text": text,
    }
    made["task"]["model_options"] = {"embedding": 4, "hidden": 6}
    made["task"] |= task
    made["partition"] |= {"kind": "iid"}
    return make_config(made)


def test_nodes_with_their_own_texts_give_the_simulators_bits(tmp_path: Path) -> None:
    lines = [
        f"patient {number} is {words[number % 3]} today\t{label}"
        for number in range(30)
        for label, words in WORDS.items()
    ]
    path = tmp_path / "notes.tsv"
    path.write_text("\n".join(lines) + "\n")
    config = text_config(path, "simulation")
    here = run_seed(config, 0, experiment="test", results=tmp_path)
    texts = load_dataset("labelled-text", path=path).train
    assert isinstance(texts, TextExamples)
    assert texts.labels is not None
    folders = write_nodes(tmp_path / "nodes")
    for folder, part in zip(folders, prepare(config, 0).partition.parts, strict=True):
        rows = [f"{texts.texts[i]}\t{sorted(WORDS)[int(texts.labels[i])]}" for i in part.tolist()]
        (folder / "notes.tsv").write_text("\n".join(rows) + "\n")
        data = {"reader": "texts", "path": "notes.tsv", "classes": sorted(WORDS)}
        node = tomllib.loads((folder / "node.toml").read_text()) | {"data": data}
        (folder / "node.toml").write_text(tomli_w.dumps(node))
    there = deployed(text_config(path, "flower"), folders, tmp_path)
    assert [line["answered"] for line in there.history] == [3, 3]
    assert distance(here.model, there.model) == 0


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ({"model": "causal-lm"}, "task.model"),
        ({"model": "bert"}, "task.model"),
        ({"model_options": {"embedding_path": "/etc"}}, "task.model"),
        ({"text": {"vocabulary": "public", "path": "words.txt"}}, "task.text.vocabulary"),
        ({"text": {"vocabulary": "hash", "length": 6, "too_long": "refuse"}}, "task.text.too_long"),
        ({"input_shape": [9]}, "task.input_shape"),
    ],
)
def test_settings_that_read_files_or_disclose_data_are_refused_by_server_and_node(
    task: dict[str, object], field: str, tmp_path: Path
) -> None:
    config = text_config(tmp_path / "notes.tsv", "flower", dataset="none", classes=2, input_shape=[6])
    content = config.model_dump(exclude_none=True)
    content["task"].pop("data_options")
    config = make_config(content | {"task": content["task"] | task})
    with refuses(field):
        with_shape(config, None)
    if "input_shape" in task:
        return
    settings = RunSettings(config, 0, "test", tmp_path)
    context = Context(1, 1, {"fedveil-node": str(write_nodes(tmp_path)[0])}, RecordDict(), {})
    context.run_config = dict(settings.to_run_config())
    with refuses(field):
        node_of(context)


def test_a_killed_server_resumes_and_every_attempt_is_charged(tmp_path: Path) -> None:
    """Deployed nodes draw fresh noise, so what a dead server asked for is spent, and spent again."""
    config = federated("scaffold", rounds=4, cohort=3, checkpoint_every=2)
    folders = write_nodes(tmp_path, seeded=False)
    left = 8  # orders: rounds 1 and 2, then two of round 3

    def dying(message: Message, answer: Callable[[], Message]) -> Message:
        nonlocal left
        reply = answer()
        left -= message.metadata.message_type.startswith("train")
        if left == 0:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        deployed(config, folders, tmp_path, noise=None, faults=dict.fromkeys(range(1000, 1003), dying))
    result = deployed(config, folders, tmp_path, noise=None)
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())
    assert result.folder is not None
    own = [entry.round for entry in Ledger(result.folder / "ledger.jsonl").entries]
    assert own.count(3) == 2 * own.count(1), "round 3 was begun twice"
    twice = 0
    for folder in folders:
        spent = [entry.round for entry in open_node(folder).guard.ledger.entries]
        assert set(spent) == {1, 2, 3, 4}
        twice += spent.count(3) == 2 * spent.count(1)
    assert twice == 2, "the two nodes that had answered"


def test_nodes_charge_nothing_more_once_their_run_is_cancelled(tmp_path: Path) -> None:
    """Flower closes the way to the nodes of a run that is cancelled: whatever the server sends fails."""
    folders = write_nodes(tmp_path, seeded=False)
    asked = 0

    def cancelled_after_four(message: Message, answer: Callable[[], Message]) -> Message:
        nonlocal asked
        if message.metadata.message_type.startswith("train"):
            asked += 1
            if asked > 4:
                raise ConnectionError("the run is over")
        return answer()

    faults: dict[int, Fault] = dict.fromkeys(range(1000, 1003), cancelled_after_four)
    with pytest.raises(ConnectionError):
        deployed(federated("udp-fedavg", rounds=4, cohort=3), folders, tmp_path, noise=None, faults=faults)
    spent = [[entry.round for entry in open_node(folder).guard.ledger.entries] for folder in folders]
    assert sorted(max(rounds) for rounds in spent) == [1, 1, 2], "four answers: round 1, and one of round 2"
