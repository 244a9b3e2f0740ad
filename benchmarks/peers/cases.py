"""Rounds of methods that the other frameworks do not have in this form, beside a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fedveil
from fedveil import ArrayClients, Task
from fedveil.engines.simulation import Simulation
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.method import AnyMethod, At
from fedveil.streams import ServerStreams

LR, BATCH, CLIP, NOISE, RATE = 0.1, 8, 1.0, 1.0, 0.1


class MethodRounds:
    """Every call is one exchange of a method in the simulator."""

    def __init__(self, task: Task, clients: ArrayClients, method: AnyMethod, workers: int = 0) -> None:
        self._task, self._method = task, method
        self._plan = fedveil.make_plan(clients, rounds=1_000_000, sampler="all")
        self._engine = Simulation(task, clients, method, self._plan, seed=0, workers=workers)
        self._server = method.init_server(task.init(0), self._plan)
        self._cohort = range(len(clients.sizes))
        self._done = 0

    def __call__(self) -> None:
        per_round = self._method.exchanges(self._plan)
        number, exchange = divmod(self._done, per_round)
        self._done += 1
        at = At(self._plan, number + 1, exchange)
        down = self._method.broadcast(at, self._server, self._cohort)
        answers = self._engine.exchange(self._cohort, down, at)
        streams = ServerStreams(0, at.round, at.exchange)
        self._server = self._method.server_update(
            self._task, at, self._server, answers.clients, answers.up, streams
        )

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class Case:
    what: str
    peer: str
    ours: Callable[[], MethodRounds]
    plain: Callable[[], Callable[[], object]]


def images(clients: int, examples: int, shape: tuple[int, ...]) -> ArrayClients:
    generator = torch.Generator().manual_seed(0)
    count = clients * examples
    x = torch.rand(count, *shape, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)
    order = torch.randperm(count, generator=generator)  # as partitions of real data lie
    return ArrayClients(x, y, list(order.reshape(clients, -1)))


def _texts(clients: int, examples: int, length: int) -> ArrayClients:
    generator = torch.Generator().manual_seed(0)
    count = clients * examples
    x = torch.randint(1, 1000, (count, length), generator=generator)
    y = torch.randint(0, 2, (count,), generator=generator)
    return ArrayClients(x, y, list(torch.arange(count).reshape(clients, -1)))


def _fedsgd() -> MethodRounds:
    task = Task(lambda: fedveil.make_model("lenet-zhu", (1, 28, 28), 10))
    return MethodRounds(task, images(4, 3000, (1, 28, 28)), FedSGD(lr=LR, batch_size=BATCH))


def plain_fedsgd() -> Callable[[], object]:
    """One exchange: every client's gradient on its next batch, one step along their mean."""
    clients = images(4, 3000, (1, 28, 28))
    model = fedveil.make_model("lenet-zhu", (1, 28, 28), 10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    step = [0]

    def exchange() -> None:
        start = BATCH * (step[0] % (3000 // BATCH))
        step[0] += 1
        optimizer.zero_grad()
        for part in clients.parts:
            index = part[start : start + BATCH]
            loss = nn.functional.cross_entropy(model(clients.x[index]), clients.y[index]) / 4
            loss.backward()
        optimizer.step()

    return exchange


def _dp_sgd() -> MethodRounds:
    task = Task(lambda: fedveil.make_model("mlp-2", (784,), 10))
    method = DPFedAvg(unit="record", lr=LR, clip=CLIP, noise_multiplier=NOISE, record_rate=RATE, epochs=1)
    return MethodRounds(task, images(10, 600, (784,)), method)


def _opacus_round() -> Callable[[], object]:
    """Every client trains by Opacus' DP-SGD on Poisson batches of the same rate, then the models are averaged."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    clients = images(10, 600, (784,))
    start = fedveil.make_model("mlp-2", (784,), 10, seed=0).state_dict()

    def train(part: torch.Tensor) -> dict[str, torch.Tensor]:
        model = fedveil.make_model("mlp-2", (784,), 10)
        model.load_state_dict(start)
        wrapped = GradSampleModule(model.train())
        optimizer = DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=LR),
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            expected_batch_size=round(RATE * len(part)),
        )
        for _ in range(round(1 / RATE)):
            index = part[torch.rand(len(part)) < RATE]
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(clients.x[index]), clients.y[index]).backward()
            optimizer.step()
        return model.state_dict()

    def round_of_all() -> None:
        models: list[dict[str, Any]] = [train(part) for part in clients.parts]
        for name in start:
            torch.stack([model[name] for model in models]).mean(0)

    return round_of_all


def _lstm() -> nn.Module:
    return fedveil.make_model("lstm", (32,), 2, seed=0, vocabulary=1000, pad=0)


def _text() -> MethodRounds:
    return MethodRounds(Task(_lstm), _texts(10, 64, 32), FedAvg(lr=LR, batch_size=16, epochs=1))


def _plain_text() -> Callable[[], object]:
    clients, model = _texts(10, 64, 32), _lstm()
    start = {name: leaf.clone() for name, leaf in model.state_dict().items()}

    def round_of_all() -> None:
        models = []
        for part in clients.parts:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for index in part[torch.randperm(len(part))].split(16):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(clients.x[index]), clients.y[index]).backward()
                optimizer.step()
            models.append({name: leaf.clone() for name, leaf in model.state_dict().items()})
        for name in start:
            torch.stack([one[name] for one in models]).mean(0)

    return round_of_all


CASES = {
    "fedsgd": Case("FedSGD, 4 clients x 8 images, LeNetZhu", "plain", _fedsgd, plain_fedsgd),
    "dp-sgd": Case("DP-SGD, 10 clients x 600, MLP-2", "opacus", _dp_sgd, _opacus_round),
    "text": Case("LSTM, 10 clients x 64 texts of 32 tokens", "plain", _text, _plain_text),
}
