"""`engine = "ray"`: the simulator's bits from a cluster of three machines, one of which dies in the middle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass as record
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import METHODS, At, LazyClients, SecureSum, Task, run
from fedveil.data.client_data import ClientData, Clients
from fedveil.engines.ray_cluster import RayWorkers
from fedveil.engines.simulation import Simulation
from fedveil.engines.worker import ClientWorker
from fedveil.errors import DivergedError, FedveilError, InputError
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.methods.fedavg import FedAvg, TrainedModel
from fedveil.methods.method import AnyMethod
from fedveil.methods.scaffold import Changes, ModelAndControl, Scaffold
from fedveil.methods.shared_model import Model
from fedveil.session.loop import Callback
from fedveil.streams import ClientStreams
from fedveil.tree import Params, State
from tests.contract.federation import StopsAfter, distance, make_clients, make_method, make_plan, make_task
from tests.engines.configs import quick_config
from tests.engines.loopback import wait_until
from tests.unit.test_plugins import METHOD, TWO_RUNS

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # a cluster of three takes 20 s to start
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
SIZES = (5, 9, 1, 12, 7, 3, 8, 4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three machines of one core each; this process is connected to the first.

    Their files are in a folder of their own: Ray's programs of anybody else on this machine would join them.
    """
    place = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are limited
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = place
    made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    ray.init(made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    os.environ.pop("RAY_TMPDIR")
    if before is not None:
        os.environ["RAY_TMPDIR"] = before
    shutil.rmtree(place, ignore_errors=True)


def train(method: AnyMethod, clients: Clients, cluster: str | None = None, **options: Any) -> Params:
    usual: dict[str, Any] = {"noise": "seeded", "cohort": 6}
    result = run(
        make_task(),
        clients,
        method,
        rounds=2,
        seed=3,
        workers=1,
        cluster=cluster,
        **(usual | options),
    )
    return result.model


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_cluster_gives_the_simulators_bits(name: str) -> None:
    method, clients = make_method(name), make_clients(SIZES)
    assert distance(train(method, clients), train(method, clients, "auto")) == 0


def test_a_secure_sum_on_the_cluster_has_the_simulators_bits() -> None:
    method, clients = make_method("udp-fedavg"), make_clients(SIZES)
    secure = SecureSum(threshold=6, colluders=1)
    options = {"aggregation": secure, "cohort": len(SIZES), "sampler": "all"}
    alone, together = (train(method, clients, cluster, **options) for cluster in (None, "auto"))
    assert distance(alone, together) == 0
    assert distance(alone, train(method, clients)) > 0


class ReadsUploads(Callback):
    def __init__(self) -> None:
        self.rows: set[int] = set()

    def exchange_ends(self, at: At, cohort: Any, down: Any, up: Any) -> None:
        self.rows.add(up.count)


class CountsRows(ReadsUploads):
    """A callback that is content with sums."""

    @property
    def reads_uploads(self) -> bool:
        return False


SUMMED = ("udp-fedavg", "ppsgd", "centaur", "cpsgd", "dp-fedags-proven")


@pytest.mark.parametrize("name", SUMMED)
def test_chunks_send_sums_where_no_callback_reads_single_uploads(name: str) -> None:
    method, clients = make_method(name), make_clients(SIZES)
    summed, single = CountsRows(), ReadsUploads()
    found = [train(method, clients, "auto", callbacks=[callback]) for callback in (summed, single)]
    assert (summed.rows, single.rows) == ({2}, {6})
    assert distance(*found) == 0
    assert distance(found[0], train(method, clients)) == 0


def test_an_inexact_sum_is_not_used() -> None:
    callback = CountsRows()
    train(make_method("udp-fedavg", noise_multiplier=0.0), make_clients(SIZES), "auto", callbacks=[callback])
    assert callback.rows == {6}


def test_a_summed_run_reports_the_bytes_of_every_upload() -> None:
    method, clients = make_method("udp-fedavg"), make_clients(SIZES)
    here, there = (
        run(make_task(), clients, method, rounds=1, noise="seeded", workers=1, cluster=place)
        for place in (None, "auto")
    )
    assert here.summary["bytes_up"] == there.summary["bytes_up"]


class Watched(RayWorkers):
    """Notes which replies left their tensors in memory and which sent them."""

    left: bool = False
    sent: bool = False

    def _put(self, reply: Any, number: int, orders: Any) -> None:
        self.left, self.sent = self.left or not reply.sent, self.sent or bool(reply.sent)
        super()._put(reply, number, orders)


@record(frozen=True)
class TakesItsTime(Scaffold):
    """Tasks so long that the machine of the run cannot do all of them before the others begin."""

    def client_update(
        self, task: Task, at: At, down: ModelAndControl, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Changes, State]:
        time.sleep(0.2)
        return Scaffold.client_update(self, task, at, down, data, state, rng)


def test_workers_beside_the_run_leave_uploads_in_memory_and_others_send_them() -> None:
    method, task = TakesItsTime(batch_size=4), make_task()
    clients, plan = make_clients(SIZES), make_plan(SIZES, cohort=8)
    down = method.broadcast(At(plan, 1), method.init_server(task.init(0), plan), range(8))
    chunks = [[3], [0, 1], [7, 2], [5], [4, 6]]
    found = {}
    for capacity in (0, 64, 1 << 20):  # none, too little for anything, enough
        workers = Watched(ClientWorker(task, clients, method, 0), "auto", capacity)
        for number in range(1, 5):
            computed = workers.run(range(8), chunks, down, {}, At(plan, number))
            leaves = {**computed.up.tensors(), **computed.states}
            found[capacity, number] = {name: leaf.clone() for name, leaf in leaves.items()}
            assert all(workers.holds(leaf) for leaf in leaves.values())
        assert workers.sent
        assert workers.left == (capacity > 64)
        workers.close()
    for capacity in (64, 1 << 20):
        assert all(distance(found[0, number], found[capacity, number]) == 0 for number in range(1, 5))


@record(frozen=True)
class ChangesItsMind(FedAvg):
    """From round 2 on clients upload more than before."""

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        up, state = FedAvg.client_update(self, task, at, down, data, state, rng)
        if at.round < 2:
            return up, state
        extra = torch.tensor(rng.clients, dtype=torch.float32).reshape(-1, 1)
        return TrainedModel({"extra": extra, **up.params}, up.size), state


def test_an_exchange_whose_uploads_changed_shape_is_done_again() -> None:
    method, task = ChangesItsMind(batch_size=4), make_task()
    clients, plan = make_clients(SIZES), make_plan(SIZES, cohort=8)
    down = method.broadcast(At(plan, 1), method.init_server(task.init(0), plan), range(8))
    workers = RayWorkers(ClientWorker(task, clients, method, 0), "auto", 1 << 20)
    plain = ClientWorker(task, clients, method, 0)
    for number in (1, 2, 3):
        up = workers.run(range(8), [[0, 1], [2, 3, 4], [5, 6, 7]], down, {}, At(plan, number)).up
        assert isinstance(up, TrainedModel)
        if number >= 2:
            assert up.params["extra"][:, 0].tolist() == list(range(8))
        for rows in ([0, 1], [2, 3, 4], [5, 6, 7]):
            alone, _ = plain.update(rows, down.rows(rows), {}, At(plan, number))
            assert isinstance(alone, TrainedModel)
            assert distance({name: leaf[rows] for name, leaf in up.params.items()}, alone.params) == 0
    workers.close()


def make_one(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = make_clients(SIZES).load([client])
    return data.x[0], data.y[0]


def test_clients_made_when_they_take_part_are_made_on_the_cluster() -> None:
    method, lazy = make_method("scaffold"), LazyClients(SIZES, make_one)
    assert distance(train(method, lazy, "auto"), train(method, make_clients(SIZES))) == 0


@record(frozen=True)
class Waiting(FedAvg):
    """Leaves a note of every client that is computed, then waits until it may continue."""

    notes: str = ""

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        place = Path(self.notes)
        node = ray.get_runtime_context().get_node_id()
        for client in rng.clients:
            (place / f"{client}-{node}-{os.getpid()}").touch()
        while not (place / "go").exists():
            time.sleep(0.05)
        return FedAvg.client_update(self, task, at, down, data, state, rng)


def test_chunks_of_a_machine_that_dies_are_computed_again(cluster: Any, tmp_path: Path) -> None:
    victim = cluster.add_node(num_cpus=2)
    method = Waiting(batch_size=4)
    object.__setattr__(method, "notes", str(tmp_path))
    task, clients, plan = make_task(), make_clients(SIZES), make_plan(SIZES, cohort=8)

    def noted_on(node: str) -> list[Path]:
        return list(tmp_path.glob(f"*-{node}-*"))

    def kill() -> None:
        try:
            wait_until(lambda: bool(noted_on(victim.node_id)), 60)
            cluster.remove_node(victim, allow_graceful=False)
        finally:
            (tmp_path / "go").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    engine = Simulation(task, clients, method, plan, seed=0, execution="one-by-one", cluster="auto")
    down = method.broadcast(At(plan, 1), method.init_server(task.init(0), plan), range(8))
    try:
        up = engine.exchange(range(8), down, At(plan, 1)).up
    finally:
        killer.join()
        engine.close()
    assert isinstance(up, TrainedModel)
    lost = {path.name.split("-")[0] for path in noted_on(victim.node_id)}
    again = {path.name.split("-")[0] for path in tmp_path.glob("*-*") if path not in noted_on(victim.node_id)}
    assert lost
    assert lost <= again
    plain = Simulation(
        task, clients, FedAvg(batch_size=4), plan, seed=0, execution="one-by-one", workers=1
    ).exchange(range(8), down, At(plan, 1))
    assert isinstance(plain.up, TrainedModel)
    assert distance(up.params, plain.up.params) == 0


@record(frozen=True)
class Failing(FedAvg):
    how: str = "error"

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        if self.how == "error":
            raise DivergedError("client 3 has a problem")
        if self.how == "crash":
            raise ZeroDivisionError("a bug")
        os._exit(9)


@pytest.mark.parametrize(
    ("how", "kind"), [("error", DivergedError), ("crash", RuntimeError), ("die", FedveilError)]
)
def test_errors_on_the_cluster_are_reported(how: str, kind: type[Exception]) -> None:
    method = Failing(batch_size=4)
    object.__setattr__(method, "how", how)
    with pytest.raises(kind):
        train(method, make_clients(SIZES), "auto")


def test_other_versions_on_a_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method("fedavg")
    monkeypatch.setattr(type(method), "numerics", 0)
    with pytest.raises(FedveilError, match="numerics 0"):
        train(method, make_clients(SIZES), "auto")


def test_a_run_begun_here_resumes_on_the_cluster(tmp_path: Path) -> None:
    method, clients = make_method("scaffold"), make_clients(SIZES)
    with pytest.raises(KeyboardInterrupt):
        train(method, clients, results=tmp_path / "run", callbacks=[StopsAfter(1)])
    resumed = train(method, clients, "auto", results=tmp_path / "run")
    assert distance(resumed, train(method, clients)) == 0


def test_a_configuration_names_the_cluster(tmp_path: Path) -> None:
    here, there = quick_config("scaffold"), quick_config("scaffold", "ray")
    assert here.identity() == there.identity(), "the engine changes no bit, so both are one experiment"
    whole = run_seed(here, 0, experiment="here", results=tmp_path)
    assert distance(whole.model, run_seed(there, 0, experiment="there", results=tmp_path).model) == 0


def test_workers_of_a_cluster_that_a_run_starts_have_its_own_priority(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from fedveil import METHODS, LazyClients, Task, make_model, run
import torch

def example(client):
    Path({str(tmp_path)!r}, f"{{os.getpid()}}-{{os.nice(0)}}").touch()
    return torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)

task = Task(lambda: make_model("logistic", (3,), 2))
run(task, LazyClients((2, 2), example), METHODS["fedavg"](), rounds=1, cohort=2, cluster="local")
print(os.getpid(), os.nice(0))
"""
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    ).stdout
    process, priority = told.split()
    others = [path.name.split("-", 1) for path in tmp_path.glob("*-*") if not path.name.startswith(process)]
    assert others
    assert {found for _, found in others} == {priority}


def test_workers_know_the_methods_of_plugins(tmp_path: Path) -> None:
    plugin, config = tmp_path / "plugged_on_ray.py", tmp_path / "plugged.toml"
    plugin.write_text(METHOD.replace("plugged-method", "plugged-elsewhere"))
    config.write_text(TWO_RUNS + 'engine = "ray"\naddress = "local"\n')
    command = [
        "--plugin",
        str(plugin),
        "run",
        str(config),
        "--seed",
        "0",
        "--results",
        str(tmp_path / "results"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    subprocess.run(
        [sys.executable, "-m", "fedveil", *command],
        env=environment,
        check=True,
        capture_output=True,
        timeout=180,
    )
    assert list((tmp_path / "results").glob("*/*/seed-0/summary.json"))


def test_the_engine_works_on_processors_only() -> None:
    task = make_task()
    task.device = torch.device("meta")
    with pytest.raises(InputError) as refused:
        Simulation(task, make_clients(), FedAvg(), make_plan(), seed=0, cluster="auto")
    assert refused.value.field == "run.device"


def test_the_address_is_for_ray_alone() -> None:
    with pytest.raises(InputError) as refused:
        make_config({"run": {"address": "auto"}})
    assert refused.value.field == "run.address"


def test_workers_are_ray_workers() -> None:
    engine = Simulation(make_task(), make_clients(), FedAvg(), make_plan(), seed=0, cluster="auto")
    assert isinstance(engine._workers, RayWorkers)
    engine.close()
    assert ray.is_initialized(), "a connection that the caller made stays"
