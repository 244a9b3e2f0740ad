"""Configuration fields that several methods share, with their meaning and validation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.methods.disclosure import LocalSteps
from fedveil.methods.method import At
from fedveil.privacy.clipping import normalise_rows
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.training.batching import LastBatch
from fedveil.training.local_sgd import Schedule, Trained, local_sgd, scheduled_lr
from fedveil.tree import Params

STRICT = ConfigDict(extra="forbid", allow_inf_nan=True)

LearningRate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="step size of SGD")]
Epochs = Annotated[int, Field(ge=1, description="passes over a client's examples per round")]
LocalStepCount = Annotated[int, Field(ge=1, description="local steps per round, in place of epochs")]
BatchSize = Annotated[int, Field(ge=1, description="examples per local step")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LearningRateSchedule = Annotated[Schedule, Field(description="how `lr` changes over the rounds")]
ServerLearningRate = Annotated[PositiveFinite, Field(description="factor of the mean update at the server")]
Weighting = Annotated[
    Literal["size", "uniform"],
    Field(description="how clients are weighted in the mean: by their numbers of examples, or equally"),
]
Clip = Annotated[
    float, Field(gt=0, description="largest L2 norm of what a unit contributes; inf turns it off")
]
LARGEST_MULTIPLIER = 2.0**30


def _in_range(multiplier: float) -> float:
    """Refuse noise levels so large or small that floating point cannot represent update and noise together."""
    if multiplier != 0 and not 1 / LARGEST_MULTIPLIER <= multiplier <= LARGEST_MULTIPLIER:
        raise ValueError("use a number from 2^-30 to 2^30 (about 1e-9 to 1e9), or 0 for no noise")
    return multiplier


NoiseMultiplier = Annotated[
    float,
    Field(ge=0, allow_inf_nan=False, description="standard deviation of the noise over the clip"),
    AfterValidator(_in_range),
]
Normalise = Annotated[
    bool, Field(description="scale every update to a norm of exactly the clip, not only longer ones")
]


def bounded(update: Params, clip: float, normalise: bool) -> Params:
    """Clients' updates before clipping; scaled to the clip if `normalise`."""
    return normalise_rows(update, clip) if normalise else update


def unused_epochs(local_steps: int | None) -> Mapping[str, str]:
    """`epochs` where steps are counted instead, as `Method.unused_fields`."""
    return {} if local_steps is None else {"epochs": "Leave it out, or leave local_steps out."}


def refuse_endless_norm(clip: float, normalise: bool) -> None:
    if normalise and math.isinf(clip):
        raise InputError("method.clip", clip, "updates cannot be scaled to it", "Give a finite clip.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LocalTraining:
    """How clients train on their own examples."""

    lr: LearningRate = 0.1
    epochs: Epochs = 1
    batch_size: BatchSize = 64
    momentum: Fraction = 0.0
    """Momentum of local SGD."""
    weight_decay: NonNegative = 0.0
    """L2 penalty of local SGD."""
    lr_schedule: LearningRateSchedule = "constant"
    local_steps: LocalStepCount | None = None
    last_batch: LastBatch = "merge"
    """The remainder of an epoch that is smaller than a batch: "keep" trains on it as a batch, "drop" leaves it out,
    "merge" adds it to the previous batch if it is less than half of one."""

    def unused_fields(self) -> Mapping[str, str]:
        return unused_epochs(self.local_steps)

    def unused_for(self, rounds: int) -> Mapping[str, str]:
        return {"lr_schedule": "a schedule changes lr from round to round"} if rounds == 1 else {}

    def lr_at(self, at: At) -> float:
        return scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)

    def refuse_local_steps(self) -> None:
        """Refuse `local_steps` for units whose accounting is by epochs."""
        if self.local_steps is not None:
            raise InputError(
                "method.local_steps",
                self.local_steps,
                "record-level privacy is accounted for by epochs",
                "Use epochs.",
            )

    def train(
        self,
        task: Task,
        at: At,
        w: Params,
        data: ClientData,
        rng: ClientStreams,
        *,
        proximal: float = 0.0,
        track_loss: bool = False,
        epochs: int | None = None,
        trainable: Collection[str] | None = None,
    ) -> Trained:
        """Local SGD from `w` with these fields; `epochs`, if given, replaces their epochs or steps."""
        return local_sgd(
            task,
            w,
            data,
            rng,
            lr=self.lr_at(at),
            batch_size=self.batch_size,
            epochs=self.epochs if epochs is None else epochs,
            steps=self.local_steps if epochs is None else None,
            last_batch=self.last_batch,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            proximal=proximal,
            track_loss=track_loss,
            trainable=trainable,
        )

    def local_training(self, at: At) -> LocalSteps:
        """The local training of these fields, without clipping."""
        return LocalSteps(
            self.lr_at(at),
            self.batch_size,
            self.epochs,
            self.momentum,
            self.weight_decay,
            self.local_steps,
            last_batch=self.last_batch,
        )


def without_local_noise(scope: str, instead: str) -> None:
    """Refuse `noise_scope = "local"`: a secure sum divides the noise among the clients."""
    if scope == "local":
        raise InputError(
            "method.noise_scope",
            scope,
            "each client would add all of the noise; secure aggregation divides it among them",
            f'Use "{instead}".',
        )
