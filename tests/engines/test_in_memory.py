"""Every registered method through the apps of Flower, in this process: the same bits as the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
import httpx
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedveil import METHODS, Task
from fedveil.engines.flower import node as node_module
from fedveil.engines.flower import roster as roster_module
from fedveil.engines.flower.engine import FlowerEngine, Limits
from fedveil.engines.flower.node import Node, admit_all
from fedveil.engines.flower.roster import Roster
from fedveil.engines.flower.wire import Reply, pack_reply, read_reply
from fedveil.engines.simulation import Simulation
from fedveil.engines.worker import ClientWorker
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import prepare
from fedveil.experiment.run import run_seed
from fedveil.federation import server_app as server_module
from fedveil.federation.client_app import app as client_app
from fedveil.federation.run_settings import LOG, RunSettings
from fedveil.federation.server_app import app as server_app
from fedveil.methods.fedavg import TrainedModel
from fedveil.methods.method import AnyMethod
from fedveil.privacy.ledger import Ledger
from fedveil.session.loop import run_rounds
from fedveil.session.results import Result, ResultFolder
from tests.contract.federation import distance, make_clients, make_method, make_plan, make_task
from tests.engines.configs import quick_config
from tests.engines.grid import Fault, InMemoryNodes

CLIENTS = 4


def on_flower(
    config: Config,
    results: Path,
    faults: Mapping[int, Fault] | None = None,
    prepare_grid: Callable[[InMemoryNodes], None] = lambda _grid: None,
) -> Result:
    settings = RunSettings(config, 0, "test", results)
    given = settings.to_run_config()
    grid = InMemoryNodes(client_app, [{"partition-id": p} for p in range(CLIENTS)], given, faults)
    prepare_grid(grid)
    server_app(grid, Context(1, 1, {}, RecordDict(), dict(given)))
    return ResultFolder(settings.folder).read()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_apps_give_the_simulators_bits(name: str, tmp_path: Path) -> None:
    here = run_seed(quick_config(name), 0, experiment="test", results=tmp_path)
    there = on_flower(quick_config(name, "flower-simulation"), tmp_path)
    assert distance(here.model, there.model) == 0
    assert [line["answered"] for line in there.history] == [line["answered"] for line in here.history]
    for key in ("privacy", "per_client", "personal", "bytes_up", "bytes_down"):
        assert there.summary[key] == here.summary[key]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fedceo", {"unit": "record"}),
        ("dsc", {"labels": "own"}),
        ("fedlap-dp", {"labels": [[0, 1], [2], [3, 4], [5]]}),
        ("dp-fedags-proven", {"variant": "sparse-vector", "upload_epsilon": 4.0}),
    ],
)
def test_variants_of_methods_too(name: str, fields: dict[str, object], tmp_path: Path) -> None:
    """Whose uploads have padding, or repeat less of what they were sent."""
    content = quick_config(name, cohort=4).model_dump(exclude_none=True)
    content["method"] |= fields
    here = run_seed(make_config(content), 0, experiment="test", results=tmp_path)
    content["run"]["engine"] = "flower-simulation"
    there = on_flower(make_config(content), tmp_path)
    assert [line["answered"] for line in there.history] == [4, 4]
    assert distance(here.model, there.model) == 0


def own_nodes(method: AnyMethod, task: Task, place: Path) -> ClientApp:
    """A client app whose nodes hold the clients of the small federation: double precision, unequal sizes."""
    clients = make_clients()
    app = ClientApp()

    def node(context: Context) -> Node:
        client = int(str(context.node_config["partition-id"]))
        worker = ClientWorker(task, clients, method, 0)
        size = clients.sizes[client]
        return Node(f"client-{client}", client, size, worker, place / str(client), admit_all)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return Message(node(context).introduction(), reply_to=message)

    @app.train("exchange")
    def exchange(message: Message, context: Context) -> Message:
        return Message(node(context).answer(message.content), reply_to=message)

    return app


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_stacked_simulator_agrees_in_double_precision(name: str, tmp_path: Path) -> None:
    task, plan, method = make_task(), make_plan(), make_method(name)
    start = method.init_server(task.init(0), plan)
    stacked = Simulation(task, make_clients(), method, plan, seed=0, execution="stacked", workers=1)
    here = run_rounds(task, method, stacked, plan, start, seed=0).server
    nodes = [{"partition-id": p} for p in range(plan.clients)]
    grid = InMemoryNodes(own_nodes(method, task, tmp_path), nodes, {})
    engine = FlowerEngine(grid, Roster(grid), task, method, plan, run="run", limits=Limits(), states=tmp_path)
    there = run_rounds(task, method, engine, plan, start, seed=0).server
    assert distance(method.model(here), method.model(there)) < 1e-9


def changed(change: Callable[[Reply], Reply | RecordDict]) -> Fault:
    """A node whose reply to an order is changed on its way."""

    def fault(message: Message, answer: Callable[[], Message]) -> Message:
        reply = answer()
        if message.metadata.message_type.startswith("train"):
            new = change(read_reply(reply.content))
            content = new if isinstance(new, RecordDict) else pack_reply(new)
            return Message(content, reply_to=message)
        return reply

    return fault


def upload(spoil: Callable[[TrainedModel], TrainedModel]) -> Fault:
    def change(reply: Reply) -> Reply:
        spoilt = spoil(TrainedModel.from_bytes(reply.up))
        return Reply(**(reply.__dict__ | {"up": spoilt.to_bytes()}))

    return changed(change)


def field(name: str, value: object) -> Fault:
    return changed(lambda reply: Reply(**(reply.__dict__ | {name: value})))


def no_answer(message: Message, answer: Callable[[], Message]) -> Message | None:
    return None if message.metadata.message_type.startswith("train") else answer()


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return upload(lambda up: up.map(lambda name, leaf: change(leaf) if name.startswith("params") else leaf))


FAULTY: dict[str, tuple[Fault, str]] = {
    "nan": (each(lambda leaf: leaf * torch.nan), "is not finite"),
    "infinite": (each(lambda leaf: leaf / 0), "is not finite"),
    "shape": (each(lambda leaf: leaf[..., :-1]), "the model's is"),
    "type": (each(lambda leaf: leaf.double()), "the model's is"),
    "two rows": (each(lambda leaf: torch.cat([leaf, leaf])), "not one row"),
    "missing leaves": (
        upload(lambda up: TrainedModel(dict(list(up.params.items())[1:]), up.size)),
        "not those of the others",
    ),
    "boasting": (upload(lambda up: TrainedModel(up.params, up.size * 0 + 10**9)), "'size' is not between"),
    "negative": (upload(lambda up: TrainedModel(up.params, -up.size)), "'size' is not between"),
    "garbage": (field("up", b"\x00garbage"), "not a TrainedModel"),
    "oversized": (field("up", bytes(2 << 20)), "more than the 1048576 allowed"),
    "version": (field("version", "9.9"), "its fedveil is '9.9'"),
    "model": (field("fingerprint", "0" * 16), "its model or method is another"),
    "another client": (field("client", 0), "it answers for client 0"),
    "another round": (field("round", 77), "of round 77"),
    "foreign": (changed(lambda _reply: RecordDict()), "not a message of fedveil"),
    "silent": (no_answer, "no answer within 1 s"),
}


FOUR = quick_config("fedavg", "flower-simulation", cohort=4, deadline=1.0, max_message="1MiB")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run in which client 2 never answers."""
    return on_flower(FOUR, tmp_path_factory.mktemp("three"), {1002: no_answer})


@pytest.mark.parametrize("kind", sorted(FAULTY))
def test_a_broken_node_drops_out_by_name_and_the_run_continues(
    kind: str, three: Result, tmp_path: Path
) -> None:
    fault, said = FAULTY[kind]
    result = on_flower(FOUR, tmp_path, {1002: fault})
    assert [line["answered"] for line in result.history] == [3, 3]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())
    assert result.folder is not None
    log = (result.folder / LOG).read_text()
    assert "round 1, exchange 0: client 2, node 'client-2' (1002), dropped out:" in log
    assert said in log
    assert distance(result.model, three.model) == 0, "nothing of the broken upload is in the model"


@pytest.mark.parametrize("name", ["VERSION", "fingerprint"])
def test_a_node_that_claims_a_taken_client_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stranger(_message: Message, answer: Callable[[], Message]) -> Message:
        with monkeypatch.context() as patch:
            other = "9.9" if name == "VERSION" else lambda *_: "0" * 16
            patch.setattr(node_module, name, other)
            return answer()

    config = quick_config("fedavg", "flower-simulation", cohort=4)
    result = on_flower(config, tmp_path, {1001: stranger})
    assert [line["answered"] for line in result.history] == [3, 3]
    assert result.folder is not None
    log = (result.folder / LOG).read_text()
    assert "node 'client-1' (1001) is refused" in log
    assert "client 1 dropped out: no node of it is online" in log


def test_a_refused_node_is_asked_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator may have fixed it without the server noticing that it was offline."""
    monkeypatch.setattr(roster_module, "ASK_AGAIN_SECONDS", 0.0)
    hellos: list[int] = []

    def broken_at_first(message: Message, answer: Callable[[], Message]) -> Message:
        if not message.metadata.message_type.startswith("query"):
            return answer()
        hellos.append(1)
        return Message(RecordDict(), reply_to=message) if len(hellos) < 3 else answer()

    result = on_flower(
        quick_config("fedavg", "flower-simulation", cohort=4), tmp_path, {1001: broken_at_first}
    )
    assert [line["answered"] for line in result.history] == [3, 4]


def test_a_slow_node_is_asked_once_and_admitted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking it again would throw away what it has done so far, and it would never be ready."""
    monkeypatch.setattr(roster_module, "HELLO_SECONDS", 0.1)
    monkeypatch.setattr(server_module, "GATHER_SECONDS", 0.1)
    asked: list[str] = []
    trained: list[int] = []

    def quick(message: Message, answer: Callable[[], Message]) -> Message:
        trained.extend([1] if message.metadata.message_type.startswith("train") else [])
        return answer()

    def slow(message: Message, answer: Callable[[], Message]) -> Message | None:
        if message.metadata.message_type.startswith("train"):
            return answer()
        asked.append(message.metadata.message_id)
        return answer() if len(trained) == 2 else None

    config = quick_config("fedavg", "flower-simulation", cohort=4, rounds=3)
    result = on_flower(config, tmp_path, {1000: quick, 1001: slow})
    assert len(set(asked)) == 1
    assert [line["answered"] for line in result.history] == [3, 3, 4]


def test_too_few_answers_count_as_none_and_leave_every_state_as_it_was(tmp_path: Path) -> None:
    config = quick_config("scaffold", "flower-simulation", cohort=4, min_clients=4, deadline=1.0)
    result = on_flower(config, tmp_path, {1000: no_answer})
    assert [line["answered"] for line in result.history] == [0, 0]
    assert distance(result.model, prepare(config, 0).task.init(0)) == 0
    assert result.summary["personal"] is None


def test_a_node_may_go_offline_between_rounds_and_rejoin(tmp_path: Path) -> None:
    config = quick_config("fedavg", "flower-simulation", cohort=4, rounds=3)
    seen: list[int] = []

    def leave_in_round_two(grid: InMemoryNodes) -> None:
        get = grid.get_node_ids

        def nodes() -> list[int]:
            seen.append(1)
            grid.gone = {1003} if len(seen) == 3 else set()
            return list(get())

        grid.get_node_ids = nodes  # type: ignore[method-assign]

    result = on_flower(config, tmp_path, prepare_grid=leave_in_round_two)
    assert [line["answered"] for line in result.history] == [4, 3, 4]
    assert result.folder is not None
    assert "node 'client-3' (1003) went offline" in (result.folder / LOG).read_text()


def test_a_short_connection_loss_drops_no_client(tmp_path: Path) -> None:
    def unsteady(grid: InMemoryNodes) -> None:
        for name in ("get_node_ids", "push_messages", "pull_messages"):
            setattr(grid, name, fails_now_and_then(getattr(grid, name)))

    def fails_now_and_then(call: Callable[..., object]) -> Callable[..., object]:
        calls = 0

        def unsteady_call(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls % 3 == 2:
                raise httpx.ConnectTimeout("no handshake")
            return call(*arguments)

        return unsteady_call

    config = quick_config("fedavg", "flower-simulation", cohort=4)
    whole = on_flower(config, tmp_path / "whole")
    assert distance(on_flower(config, tmp_path / "cut", prepare_grid=unsteady).model, whole.model) == 0


@pytest.mark.parametrize("name", ["scaffold", "fedem", "udp-fedavg"])
def test_a_killed_server_resumes_to_the_same_bits_and_charges(name: str, tmp_path: Path) -> None:
    """Also when it dies within a round: the clients' work in that round is discarded."""
    config = quick_config(name, "flower-simulation", rounds=4, checkpoint_every=2)
    whole = on_flower(config, tmp_path / "whole")

    class DyingServer:
        """Dies when so many orders have been answered."""

        def __init__(self, orders: int) -> None:
            self.orders = orders

        def __call__(self, message: Message, answer: Callable[[], Message]) -> Message:
            reply = answer()
            self.orders -= message.metadata.message_type.startswith("train")
            if self.orders == 0:
                raise KeyboardInterrupt
            return reply

    for orders in (1, 4, 6):
        with pytest.raises(KeyboardInterrupt):
            on_flower(config, tmp_path / "cut", dict.fromkeys(range(1000, 1004), DyingServer(orders)))
    resumed = on_flower(config, tmp_path / "cut")
    assert distance(whole.model, resumed.model) == 0
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4]
    assert resumed.folder is not None
    assert whole.folder is not None
    charged = len(Ledger(resumed.folder / "ledger.jsonl"))
    assert charged == len(Ledger(whole.folder / "ledger.jsonl")) > 0
