"""Every tensor of a method is on the task's device: shown with the simulated device of `device.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedveil import METHODS, At, Task
from fedveil.data.client_data import Clients
from fedveil.engines.simulation import Execution, Simulation
from fedveil.methods.method import AnyMethod
from fedveil.streams import ServerStreams
from fedveil.task import Batch
from fedveil.tree import Params, with_axis
from tests.contract.device import DEVICE, Elsewhere, TwoDevicesError, other_device
from tests.contract.federation import (
    Wrapped,
    distance,
    make_clients,
    make_method,
    make_plan,
    network,
)


def trained(
    method: AnyMethod, task: Task, clients: Clients | None = None, execution: Execution = "auto"
) -> Params:
    """The model after two rounds."""
    plan, cohort = make_plan(), (0, 1, 3)
    engine = Simulation(task, clients or make_clients(), method, plan, seed=0, workers=1, execution=execution)
    server = method.init_server(task.init(0), plan)
    for number in (1, 2):
        for exchange in range(method.exchanges(plan)):
            at = At(plan, number, exchange)
            down = method.broadcast(at, server, cohort)
            answers = engine.exchange(cohort, down, at)
            streams = ServerStreams(0, number, exchange)
            server = method.server_update(task, at, server, answers.clients, answers.up, streams)
    return method.model(server)


@pytest.mark.parametrize("generic", [False, True], ids=["closed form", "autograd"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_make_every_tensor_on_the_tasks_device(name: str, generic: bool) -> None:
    model = Wrapped if generic else network
    with other_device():
        there = trained(make_method(name), Task(model, device=DEVICE))
    assert all(isinstance(leaf, Elsewhere) for leaf in there.values())


@pytest.mark.parametrize("name", ["fedavg", "fedsgd", "scaffold"])
def test_the_device_computes_what_the_processor_does(name: str) -> None:
    """Of methods without a grid, where a last digit can become a whole step."""
    with other_device():
        there = trained(make_method(name), Task(network, device=DEVICE))
    found = {key: leaf.held for key, leaf in there.items() if isinstance(leaf, Elsewhere)}
    assert distance(found, trained(make_method(name), Task(network))) < 1e-12


def test_a_loss_is_evaluated_on_the_tasks_device() -> None:
    with other_device():
        task = Task(network, device=DEVICE)
        data = make_clients().load([0])
        batch = Batch(data.x.to(DEVICE), data.y.to(DEVICE))
        assert isinstance(task.loss(with_axis(task.init(0)), batch), Elsewhere)


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with other_device():
        there = torch.zeros(3, device=DEVICE)
        with pytest.raises(TwoDevicesError):
            there + torch.ones(3)
        with pytest.raises(TwoDevicesError):
            nn.functional.linear(there, torch.ones(2, 3))
        with pytest.raises((TypeError, RuntimeError)):
            there.numpy()
        moved: Tensor = there.cpu() + torch.ones(3)
        assert moved.tolist() == [1, 1, 1]
        assert (there + 1).tolist() == [1, 1, 1]
