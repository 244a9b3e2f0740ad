"""Uploads in shared memory: trained where they will be read, and never where something else lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from fedveil import ArrayClients, At, Task
from fedveil.engines.pool import Pool, can_fork
from fedveil.engines.shared_memory import SharedMemory
from fedveil.engines.simulation import Simulation
from fedveil.engines.upload_tables import Expected, UploadTables
from fedveil.engines.worker import ClientWorker
from fedveil.messages import Message
from fedveil.methods.fedavg import FedAvg, TrainedModel
from fedveil.methods.shared_model import Model
from fedveil.tree import Params, State, own_memory, with_axis
from tests.contract.federation import make_clients, make_plan, make_task

ALIGNED = {"w": torch.zeros(1, 4, 16)}  # 256 bytes a row
CROOKED = {"w": torch.zeros(1, 3, 5)}  # 60 bytes a row


def filled(tables: UploadTables, like: Params, rows: Sequence[int], expected: Expected | None) -> Params:
    """What a method trains: every client's parameters are its row's number."""
    tables.open(rows, expected)
    trained = tables.lend(like, len(rows))
    for name, leaf in trained.items():
        leaf.copy_(torch.tensor(rows).view(-1, *[1] * (leaf.dim() - 1)).expand_as(leaf))
        assert leaf.shape == (len(rows), *like[name].shape[1:])
    return trained


def learnt(tables: UploadTables, like: Params) -> Expected:
    first = filled(tables, like, [0, 1], None)
    told = tables.put({"up/w": first["w"]}, total=4)
    assert told is not None
    assert told.trained == {"w": "up/w"}
    return told


def test_once_the_tables_are_known_training_is_lent_their_rows() -> None:
    memory = SharedMemory(1 << 16)
    tables = UploadTables(memory)
    expected = learnt(tables, ALIGNED)
    trained = filled(tables, ALIGNED, [2, 3], expected)
    assert memory.holds(trained["w"])
    again = tables.put({"up/w": trained["w"]}, total=4)
    assert again == expected
    assert memory.view(expected.leaves[0])[:, 0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("like", "rows"),
    [(CROOKED, [2, 3]), (ALIGNED, [1, 3])],
    ids=["rows that lie otherwise than alone", "rows apart"],
)
def test_what_cannot_be_lent_is_copied(like: Params, rows: list[int]) -> None:
    memory = SharedMemory(1 << 16)
    tables = UploadTables(memory)
    expected = learnt(tables, like)
    trained = filled(tables, like, rows, expected)
    assert not memory.holds(trained["w"])
    assert tables.put({"up/w": trained["w"]}, total=4) is not None
    assert memory.view(expected.leaves[0])[rows, 0, 0].tolist() == rows


def test_memory_is_lent_once_a_chunk() -> None:
    memory = SharedMemory(1 << 16)
    tables = UploadTables(memory)
    expected = learnt(tables, ALIGNED)
    tables.open([2, 3], expected)
    first, second = tables.lend(ALIGNED, 2), tables.lend(ALIGNED, 2)
    assert memory.holds(first["w"])
    assert not memory.holds(second["w"])


def test_lent_memory_that_is_uploaded_as_something_else_arrives_whole() -> None:
    memory = SharedMemory(1 << 16)
    tables = UploadTables(memory)
    like = {name: torch.zeros(1, 16) for name in ("a", "b")}
    first = filled(tables, like, [0, 1], None)
    expected = tables.put({"up/a": first["a"], "up/b": first["b"]}, total=4)
    assert expected is not None
    tables.open([2, 3], expected)
    lent = tables.lend(like, 2)
    lent["a"].fill_(7)
    lent["b"].fill_(8)
    tables.put({"up/a": lent["b"], "up/b": lent["a"]}, total=4)
    found = [memory.view(leaf)[2:] for leaf in expected.leaves]
    assert [int(table.unique()) for table in found] == [8, 7]


def test_tables_for_another_number_of_clients_do_not_overlap() -> None:
    expected = learnt(UploadTables(SharedMemory(1 << 16)), ALIGNED).for_rows(9)
    assert [leaf.rows for leaf in expected.leaves] == [9]
    assert Expected.from_json(expected.to_json()) == expected


def test_uploads_of_another_shape_than_expected_are_refused() -> None:
    tables = UploadTables(SharedMemory(1 << 16))
    expected = learnt(tables, ALIGNED)
    trained = filled(tables, ALIGNED, [2, 3], expected)
    assert tables.put({"up/w": trained["w"][:, :2]}, total=4) is None


class ChangesItsMind(ClientWorker):
    """From round 2 on clients upload more than before, from memory that was lent."""

    def update(
        self, ids: Sequence[int], down: Message, known: Mapping[int, State], at: At
    ) -> tuple[Message, State]:
        trained = self.task.memory(ALIGNED, len(ids))
        trained["w"].copy_(torch.tensor(ids).view(-1, 1, 1).expand(-1, 4, 16))
        sizes = torch.tensor(ids)
        params: Params = {"extra": 10.0 + sizes[:, None], **trained} if at.round >= 2 else trained
        return TrainedModel(params, sizes), {}


@pytest.mark.skipif(not can_fork(), reason="needs forked worker processes")
def test_an_exchange_whose_uploads_changed_shape_is_done_again() -> None:
    plan = make_plan(cohort=5)
    pool = Pool(ChangesItsMind(make_task(), make_clients(), FedAvg(), 0), count=2, capacity=1 << 20)
    clients = [4, 2, 0, 1, 3]
    try:
        for round in (1, 2, 3):
            up = pool.run(clients, [[0, 1], [2, 3], [4]], Model(ALIGNED), {}, At(plan, round)).up
            assert isinstance(up, TrainedModel)
            assert up.params["w"][:, 3, 15].tolist() == clients
            assert up.size.tolist() == clients
            if round >= 2:
                assert up.params["extra"][:, 0].tolist() == [10 + client for client in clients]
    finally:
        pool.close()


@pytest.mark.skipif(not can_fork(), reason="needs forked worker processes")
@pytest.mark.parametrize("width", [16, 5])
@pytest.mark.parametrize("examples", [8, 24])
def test_lent_memory_changes_no_bit(width: int, examples: int) -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, width, bias=False), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 3)
        )

    generator = torch.Generator().manual_seed(0)
    count = 6 * examples
    x, y = torch.randn(count, 16, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    clients = ArrayClients(x, y, list(torch.arange(count).reshape(6, -1)))
    method, plan = FedAvg(batch_size=10, epochs=2), make_plan((examples,) * 6, cohort=6)
    ends: list[list[Tensor]] = []
    for workers in (1, 2, 3):
        task = Task(net)
        engine = Simulation(task, clients, method, plan, seed=0, workers=workers, execution="stacked")
        server = method.init_server(task.init(0), plan)
        uploads: list[Tensor] = []
        try:
            for round in (1, 2, 3):
                at = At(plan, round)
                up = engine.exchange(range(6), method.broadcast(at, server, range(6)), at).up
                assert isinstance(up, TrainedModel)
                uploads += [leaf.clone() for leaf in up.params.values()]
        finally:
            engine.close()
        ends.append(uploads)
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))


def test_own_memory_has_the_requested_shapes() -> None:
    made = own_memory(with_axis({"w": torch.zeros(2, 3, dtype=torch.float64)}), 4)
    assert made["w"].shape == (4, 2, 3)
    assert made["w"].dtype == torch.float64
