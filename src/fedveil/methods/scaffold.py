"""SCAFFOLD: control variates correct the drift between clients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
ICML 2020, Algorithm 1 with option II for c_i.

Symbols: x model, c and c_i `control`, eta_l `lr`, eta_g `server_lr`, K local steps.

Deviations: none. With momentum the divisor K * eta_l of option II would be wrong, so momentum is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import Earlier, LocalSteps, TrainingStart, UploadReading
from fedveil.methods.fields import (
    STRICT,
    BatchSize,
    Epochs,
    LearningRate,
    LearningRateSchedule,
    LocalStepCount,
    ServerLearningRate,
    unused_epochs,
)
from fedveil.methods.method import At, Method, register, unprotected
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.training.batching import LastBatch
from fedveil.training.local_sgd import local_sgd, scheduled_lr
from fedveil.tree import Params, State, add, concatenate, mean, per_row, sub, total, with_axis, zeros_like


@record(frozen=True)
class Server(Record):
    params: Params
    control: Params


@record(frozen=True)
class ModelAndControl(Message):
    params: Params
    control: Params


@record(frozen=True)
class Changes(Message):
    params: Params
    control: Params


@register(
    "scaffold", "control variates take out client drift", server=Server, down=ModelAndControl, up=Changes
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Scaffold(Method[Server, ModelAndControl, Changes]):
    lr: LearningRate = 0.1
    epochs: Epochs = 1
    batch_size: BatchSize = 64
    lr_schedule: LearningRateSchedule = "constant"
    local_steps: LocalStepCount | None = None
    last_batch: LastBatch = "merge"
    """The remainder of an epoch that is smaller than a batch: "keep" trains on it as a batch, "drop" leaves it out,
    "merge" adds it to the previous batch if it is less than half of one."""
    server_lr: ServerLearningRate = 1.0

    def unused_fields(self) -> Mapping[str, str]:
        return unused_epochs(self.local_steps)

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params, zeros_like(params))

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        shapes = task.init(0)
        return {name: leaf.new_zeros(data.count, *leaf.shape) for name, leaf in shapes.items()}

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> ModelAndControl:
        return ModelAndControl(with_axis(server.params), with_axis(server.control))

    def client_update(
        self, task: Task, at: At, down: ModelAndControl, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Changes, State]:
        lr = scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)
        drift = sub(down.control, state)  # line 10: y <- y - eta_l (g(y) - c_i + c)
        trained = local_sgd(
            task,
            down.params,
            data,
            rng,
            lr=lr,
            batch_size=self.batch_size,
            epochs=self.epochs,
            steps=self.local_steps,
            last_batch=self.last_batch,
            correction=drift,
        )
        moved = sub(trained.params, down.params)
        scale = -1.0 / (lr * trained.steps.clamp(min=1).double())
        change = {  # line 12, option II: c_i+ - c_i = -c + (x - y) / (K eta_l)
            name: torch.where(
                per_row(trained.steps, leaf) > 0, leaf * per_row(scale, leaf) - down.control[name], 0.0
            )
            for name, leaf in moved.items()
        }
        return Changes(moved, change), add(state, change)

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: Changes | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None:
            return server
        share = len(clients) / at.plan.clients
        return Server(  # lines 16-17
            add(server.params, mean(up.params), scale=self.server_lr),
            add(server.control, mean(up.control), scale=share),
        )

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the model and control changes of each client", "no noise is added")

    def local_training(self, at: At) -> LocalSteps:
        lr = scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)
        return LocalSteps(
            lr, self.batch_size, self.epochs, steps=self.local_steps, last_batch=self.last_batch
        )

    def read_upload(self, at: At, down: ModelAndControl, up: Changes) -> UploadReading:
        return UploadReading.of_change(down.params, up.params, self.local_training(at))

    def training_start(self, at: At, down: ModelAndControl, earlier: Earlier) -> TrainingStart:
        """The drift c - c_i, which the server knows, since c_i is the sum of the changes that a client has sent."""
        own = [total([up.control for _, up in rounds], down.control) for rounds in earlier()]
        drift = sub(down.control, concatenate(own))
        return TrainingStart(down.params, drift if any(bool(leaf.any()) for leaf in drift.values()) else None)
