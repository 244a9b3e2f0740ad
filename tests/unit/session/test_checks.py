"""What is refused before a run starts, and before an interrupted one resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import Task, run
from fedveil.errors import LedgerError
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.methods.dp_fedprox import DPFedProx
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.method import AnyMethod
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.methods.wrappers.defences import DPSGD
from tests.contract.federation import StopsAfter, make_clients, make_task
from tests.refusals import refuses


class Centred(torch.nn.Module):
    """Takes the mean of the batch off its features, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x.flatten(1))
        scores: torch.Tensor = self.last(h - h.mean(0, keepdim=True))
        return scores


@pytest.mark.parametrize("method", [DPFedProx(epochs=1), DPFedAvg(unit="record"), DPSGD().around(FedSGD())])
def test_records_are_not_protected_in_a_model_that_mixes_them(method: AnyMethod) -> None:
    task = Task(lambda: Centred().double())
    with refuses("model"):
        run(task, make_clients(), method, rounds=1)
    assert len(run(task, make_clients(), UDPFedAvg(), rounds=1).history) == 1, "whole clients are"


class Shared(torch.nn.Module):
    """Divides its scores by the number of examples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(x.flatten(1)) / len(x)
        return scores


def by_labels_of_the_batch(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores, y, reduction="none") * y.double().mean()


class Cumulative(torch.nn.Module):
    """Adds up its features along the batch, so that the first record never sees the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.first(x.flatten(1)).cumsum(0))
        return scores


def centred_behind_zeros() -> torch.nn.Module:
    """Mixes records, but its last layer starts at zero, so that all records have the same scores at first."""
    model = Centred()
    torch.nn.init.zeros_(model.last.weight)
    return model.double()


@pytest.mark.parametrize("build", [lambda: Cumulative().double(), centred_behind_zeros])
def test_no_way_of_mixing_records_passes_by_its_order_or_by_initial_weights(
    build: Callable[[], torch.nn.Module],
) -> None:
    with refuses("model"):
        run(Task(build), make_clients(), DPFedProx(epochs=1), rounds=1)


def test_a_model_that_starts_at_zero_and_keeps_records_apart_is_accepted() -> None:
    def build() -> torch.nn.Module:
        last = torch.nn.Linear(8, 3)
        torch.nn.init.zeros_(last.weight)
        layers = torch.nn.Flatten(), torch.nn.Linear(6, 8), torch.nn.GroupNorm(2, 8), last
        return torch.nn.Sequential(*layers).double()

    assert len(run(Task(build), make_clients(), DPFedProx(epochs=1), rounds=1).history) == 1


def test_no_way_of_mixing_records_passes_by_the_choice_of_the_data() -> None:
    grey = make_clients()
    for part in grey.parts:
        grey.x[part[0]] = 0.5  # the record that is its own complement
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)).double()
    for task in (
        Task(lambda: Centred().double()),
        Task(lambda: Shared().double()),
        Task(plain, loss=by_labels_of_the_batch),
    ):
        with refuses("model"):
            run(task, grey, DPFedProx(epochs=1), rounds=1)


class Remembers(torch.nn.Module):
    """Subtracts a mean of all that it has seen: so slow that one more example hardly shows."""

    mean: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(4, 2)
        self.how = how
        self.seen: list[torch.Tensor] = []
        self.register_buffer("mean", torch.zeros(4))
        self.plain = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "list":
            self.seen.append(x.detach())
        elif self.how == "buffer":
            self.mean.add_(1e-6 * x.detach().mean(0))
        elif self.how == "attribute":
            self.plain = self.plain + 1e-6 * x.detach().mean(0)
        past = torch.cat(self.seen).mean(0) * 1e-6 if self.seen else 0.0
        scores: torch.Tensor = self.scores(x - self.mean - self.plain - past)
        return scores


@pytest.mark.parametrize("how", ["list", "buffer", "attribute"])
@pytest.mark.parametrize("method", [UDPFedAvg(), DPFedAvg(unit="record"), DPFedAvg()])
def test_a_model_that_remembers_what_it_is_applied_to_protects_nobody(how: str, method: AnyMethod) -> None:
    clients = [(torch.rand(6, 4), torch.tensor([0, 1] * 3)) for _ in range(3)]
    with refuses("model"):
        run(Task(lambda: Remembers(how)), clients, method, rounds=1, execution="one-by-one", workers=1)


def test_a_model_that_remembers_is_accepted_where_nothing_is_protected() -> None:
    clients = [(torch.rand(6, 4), torch.tensor([0, 1] * 3)) for _ in range(3)]
    task = Task(lambda: Remembers("attribute"))
    run(task, clients, FedAvg(), rounds=1, execution="one-by-one", workers=1)


class Lazy(torch.nn.Module):
    """Makes a constant in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Linear(4, 2)
        self.middle: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.middle is None:
            self.middle = torch.full((4,), 0.5)
        scores: torch.Tensor = self.scores(x - self.middle)
        return scores


def test_a_constant_that_is_made_in_the_first_call_is_no_memory() -> None:
    clients = [(torch.rand(6, 4), torch.tensor([0, 1] * 3)) for _ in range(3)]
    run(Task(Lazy), clients, UDPFedAvg(), rounds=1, execution="one-by-one", workers=1)


def test_rounds_after_the_last_checkpoint_stay_on_the_ledger_of_a_run_with_secret_noise(
    tmp_path: Path,
) -> None:
    """A killed process leaves no newer checkpoint; what it released must not vanish with a restored ledger."""
    options: dict[str, Any] = {"rounds": 3, "cohort": 3, "noise": "entropy", "results": tmp_path / "r"}
    with pytest.raises(KeyboardInterrupt):
        run(make_task(), make_clients(), UDPFedAvg(), **options, callbacks=[StopsAfter(2)])
    shutil.rmtree(tmp_path / "r" / "checkpoint")
    assert len((tmp_path / "r" / "rounds.jsonl").read_text().splitlines()) >= 1
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        (tmp_path / "r" / name).unlink()
    with pytest.raises(LedgerError):
        run(make_task(), make_clients(), UDPFedAvg(), **options)
