"""The audit of a secure sum looks at what t answers leave to a server with c accomplices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fedveil import Plan
from fedveil.audits.bits import KIND
from fedveil.audits.of_method import Audited, audit_method
from fedveil.data.client_data import ClientData
from fedveil.messages import Message
from fedveil.methods.dp_fedsgd import DPFedSGD
from fedveil.methods.method import At
from fedveil.methods.secure import IntegerUpload, SecurelyAggregated
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.secure_noise import SecureNoise
from fedveil.secure_sum.settings import SecureSum
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.tree import State

PLAN = Plan(5, 5, "all", 3)
METHOD = UDPFedAvg(noise_multiplier=0.5)


class ForgetfulClient(SecurelyAggregated):
    """Client 1, which has nothing to send, adds no noise."""

    def client_update(
        self, task: Task, at: At, down: Message, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[IntegerUpload, State]:
        up, after = super().client_update(task, at, down, data, state, rng)
        return up.map(lambda _, leaf: leaf.index_fill(0, torch.tensor([1]), 0)), after


class IgnoredThreshold(SecurelyAggregated):
    """The sum is revealed although only one honest client answers."""

    def least_noise(self, plan: Plan, clients: Sequence[int], up: Message) -> tuple[Sequence[int], Message]:
        answered, left = super().least_noise(plan, clients, up)
        few = left.map(lambda _, leaf: leaf * (leaf.new_tensor([1, 0, 0, 0])[:, None, None]))
        return answered, few


class SharesOfAll(SecurelyAggregated):
    """Shares are divided among all n, as if all always answered and nobody colluded."""

    def client_update(
        self, task: Task, at: At, down: Message, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[IntegerUpload, State]:
        parts = self._parts()
        value, after = parts.contribution(task, at, down, data, state, rng)
        sound = self.noise(at.plan)
        small = SecureNoise(
            UDPFedAvg(noise_multiplier=0.5 * (3 / 5) ** 0.5).client_sum().mechanism, sound.group
        )
        noisy = small.decode(small.encode(value, rng.noise()))
        return IntegerUpload({name: (leaf / sound.step).round().int() for name, leaf in noisy.items()}), after


def findings(method: SecurelyAggregated, samples: int = 2000) -> dict[str, Audited]:
    found = audit_method(method, PLAN, delta=1e-5, samples=samples)
    return {audited.adversary: audited for audited in found if audited.finding.kind != KIND}


def test_a_sound_secure_sum_stays_below_what_is_proven() -> None:
    found = findings(SecurelyAggregated(METHOD, SecureSum()))
    assert set(found) == {"server", "observer"}
    for audited in found.values():
        assert not audited.broken
        assert audited.proven is not None
        assert audited.finding.lower_bound <= audited.proven


@pytest.mark.parametrize("kind", [ForgetfulClient, IgnoredThreshold, SharesOfAll])
def test_missing_shares_are_detected(kind: type[SecurelyAggregated]) -> None:
    assert findings(kind(METHOD, SecureSum()))["server"].broken


RECORDS = DPFedSGD(noise_multiplier=0.6, record_rate=1.0, lr=0.5)


def of_records(method: SecurelyAggregated) -> Audited:
    found = audit_method(method, PLAN, delta=1e-5, samples=400)
    return next(audited for audited in found if audited.finding.kind != KIND)


def test_a_sound_secure_sum_of_records_stays_below_what_is_proven() -> None:
    audited = of_records(SecurelyAggregated(RECORDS, SecureSum()))
    assert (audited.unit, audited.adversary) == ("record", "server")
    assert not audited.broken
    assert audited.finding.lower_bound > 0


class NobodyAddsNoise(SecurelyAggregated):
    """Sums of clipped gradients on the right grid, without shares of noise."""

    def client_update(
        self, task: Task, at: At, down: Message, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[IntegerUpload, State]:
        value, after = self._parts().contribution(task, at, down, data, state, rng)
        step = self.noise(at.plan).step
        return IntegerUpload({name: (leaf / step).round().int() for name, leaf in value.items()}), after


def test_missing_shares_are_detected_in_a_sum_of_records() -> None:
    quiet = replace(RECORDS, noise_multiplier=5.0)
    assert not of_records(SecurelyAggregated(quiet, SecureSum())).broken
    assert of_records(NobodyAddsNoise(quiet, SecureSum())).broken
