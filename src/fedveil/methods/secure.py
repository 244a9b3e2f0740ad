"""Secure aggregation around a method whose server needs only a sum: `[aggregation] kind = "secure"`.

Clients send integers, each with a share of the noise (`privacy/secure_noise.py`). In a deployment they are masked
(`secure_sum/`); masks cancel in the sum, so a simulation omits them and gets the same bits. The server learns the sum
of the uploads of those who answered; if they are fewer than the threshold, it learns nothing and keeps the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import BoundedUpload, UploadReading
from fedveil.methods.method import METHODS, AnyMethod, At, ClientSum, Method
from fedveil.methods.wrappers.wrapper import Around
from fedveil.privacy.private_sum import NoisySum
from fedveil.privacy.releases import Plan, Release
from fedveil.privacy.secure_noise import RecordBatch, SecureNoise, group_of, modular_sum
from fedveil.secure_sum.settings import SecureSum
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State, scale

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.secure_sum.masks import Words


@dataclass(frozen=True)
class IntegerUpload(Message):
    values: Params
    """Integers modulo 2^32, as int32."""
    summed: int = 1
    """The number of uploads that a row sums."""

    def words(self) -> Words:
        """The single row as numbers modulo 2^32, leaf by leaf in the order of their names."""
        leaves = [self.values[name].reshape(-1).cpu() for name in sorted(self.values)]
        return torch.cat(leaves).contiguous().numpy().view(np.uint32)

    @classmethod
    def of_words(cls, words: Words, shapes: Mapping[str, torch.Size], summed: int) -> IntegerUpload:
        """The inverse of `words`, for a sum of `summed` uploads."""
        flat = torch.from_numpy(words.view(np.int32).copy())
        sizes = [shapes[name].numel() for name in sorted(shapes)]
        parts = zip(sorted(shapes), flat.split(sizes), strict=True)
        return cls({name: part.reshape(1, *shapes[name]) for name, part in parts}, summed)


def sums_securely(method: type[AnyMethod]) -> bool:
    """Whether a method of this kind can run under secure aggregation in at least one configuration."""
    return method.client_sum is not Method.client_sum


def secure_part(method: AnyMethod) -> SecurelyAggregated | None:
    """The secure aggregation of a method, inside its wrappers; None if the server observes single uploads."""
    while isinstance(method, Around):
        if isinstance(method, SecurelyAggregated):
            return method
        method = method.inner
    return None


def securely_aggregated(method: AnyMethod, settings: SecureSum | None) -> AnyMethod:
    """The method under secure aggregation; the method itself if there are no settings.

    Raises:
        InputError: Its server needs more than a sum.
    """
    return method if settings is None else SecurelyAggregated(method, settings)


@dataclass(frozen=True)
class SecurelyAggregated(Around[Record]):
    """A method whose server learns the sum of integer uploads and nothing else about them."""

    settings: SecureSum

    def __post_init__(self) -> None:
        self._parts()
        self.named(
            "secure", "the server learns only their sum", self.inner.server_type, up_type=IntegerUpload
        )
        object.__setattr__(self, "discloses_sum", True)

    def _parts(self) -> ClientSum[Any, Any]:
        parts = self.inner.client_sum()
        if parts is None:
            able = ", ".join(sorted(name for name, kind in METHODS.items() if sums_securely(kind)))
            raise InputError(
                "aggregation.kind",
                "secure",
                f"{self.inner.name} needs single uploads on the server, not only their sum",
                f'Use one of {able}, or kind = "plain".',
            )
        return parts

    def noise(self, plan: Plan) -> SecureNoise:
        """The noise that clients add; `releases` accounts for it. Refuses a plan that rules out a secure sum."""
        parts = self._parts()
        records = None
        if parts.record_rate is not None:
            records = RecordBatch(parts.record_rate, max(plan.largest_client, plan.records_per_client))
        return SecureNoise(parts.mechanism, group_of(self.settings, plan), records)

    def shapes(self, down: Message) -> dict[str, torch.Size]:
        """The shapes of one client's contribution to this broadcast."""
        shapes = self._parts().shapes
        if shapes is not None:
            return shapes(down)
        return {name: leaf.shape[1:] for name, leaf in (self.sent_model(down) or {}).items()}

    def init_server(self, params: Params, plan: Plan) -> Record:
        self.noise(plan)
        return super().init_server(params, plan)

    def client_update(
        self, task: Task, at: At, down: Message, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[IntegerUpload, State]:
        value, after = self._parts().contribution(task, at, down, data, state, rng)
        return IntegerUpload(self.noise(at.plan).encode(value, rng.noise())), after

    def disclosed(self, up: Message) -> IntegerUpload:
        assert isinstance(up, IntegerUpload)
        return IntegerUpload(modular_sum(up.values), up.summed * up.count)

    def single_uploads(self, up: Message, places: Sequence[int]) -> IntegerUpload:
        """Masked uploads, represented by masks alone.

        A masked upload is uniform and independent of the input and of the sum
        (`test_a_masked_upload_is_uniform_and_independent_of_the_input`).
        """
        assert isinstance(up, IntegerUpload)
        shapes = {name: leaf.shape[1:] for name, leaf in up.values.items()}
        length = sum(shape.numel() for shape in shapes.values())
        # Any uniform numbers will do; the key stream of real masks needs a package that simulations do without.
        streams = (hashlib.shake_256(f"masked upload {place}".encode()) for place in places)
        masks = [np.frombuffer(stream.digest(4 * length), dtype="<u4") for stream in streams]
        return IntegerUpload.concatenate([IntegerUpload.of_words(words, shapes, 1) for words in masks])

    def server_update(
        self,
        task: Task,
        at: At,
        server: Record,
        clients: Sequence[int],
        up: Message | None,
        rng: ServerStreams,
    ) -> Record:
        noise = self.noise(at.plan)
        if up is None or len(clients) < noise.group.threshold:
            return server
        total = noise.decode(self.disclosed(up).values)
        on_device = {name: leaf.to(task.device) for name, leaf in total.items()}
        after: Record = self._parts().update(at, server, NoisySum(on_device, len(clients)))
        return after

    def releases(self, plan: Plan) -> Sequence[Release]:
        return self.noise(plan).releases(self._parts().what, plan)

    def least_noise(self, plan: Plan, clients: Sequence[int], up: Message) -> tuple[Sequence[int], Message]:
        """t clients answer, and the last c of them collude: their uploads are known and subtracted."""
        group = self.noise(plan).group
        left = up.rows(range(group.threshold))

        def without_colluders(_: str, leaf: Tensor) -> Tensor:
            return torch.cat([leaf[: group.honest], torch.zeros_like(leaf[group.honest :])])

        return clients[: group.threshold], left.map(without_colluders)

    def noise_found(self, plan: Plan, answered: int) -> str | None:
        noise = self.noise(plan)
        # Completed rounds have at least `threshold` answers.
        return noise.actual_noise(max(answered, noise.group.threshold)) if noise.multiplier else None

    def bounded_upload(self, at: At, down: Message, up: Message) -> BoundedUpload | None:
        return None  # the server has no single upload whose norm it could check

    def read_upload(self, at: At, down: Message, up: Message) -> UploadReading | None:
        """The mean of the updates in a sum; None where it does not cover the whole model."""
        assert isinstance(up, IntegerUpload)
        sent = self.sent_model(down)
        if sent is None or set(sent) != set(up.values):
            return None
        mean = scale(self.noise(at.plan).decode(up.values), 1 / up.summed)
        mean = {name: leaf.to(sent[name]) for name, leaf in mean.items()}
        if (reading := self._parts().reading) is not None:
            return reading(at, sent, mean)
        return UploadReading.of_change(sent, mean, self.local_training(at))
