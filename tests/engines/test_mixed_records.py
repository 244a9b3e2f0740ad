"""A node refuses a model that mixes its records, as the simulator does: clipping then bounds nobody's influence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr")
from fedveil.errors import InputError
from fedveil.experiment.config import make_config
from fedveil.models import registry
from fedveil.models.registry import register_model
from fedveil.session.checks import check_clients
from tests.engines.test_refusals import (
    CLASSES,
    DECLARED,
    OPEN,
    PLAN,
    SHAPE,
    Question,
    config_of,
    heard,
    write_node,
)


class Centred(nn.Module):
    """Subtracts the mean of the batch: no layer of batch norm, and yet no record stands alone."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.scores = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(x - x.mean(0, keepdim=True))
        return scores


class Normed(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features, track_running_stats=False, affine=False)
        self.scores = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.norm(x))
        return scores


@pytest.fixture
def mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    @register_model("centred", "subtracts the mean of its batch")
    def centred(input_shape: Sequence[int], classes: int) -> nn.Module:
        return Centred(input_shape[0], classes)

    @register_model("normed", "normalises by its batch")
    def normed(input_shape: Sequence[int], classes: int) -> nn.Module:
        return Normed(input_shape[0], classes)


RECORD_LEVEL = (
    {"name": "dp-fedavg", "unit": "record", "record_rate": 1.0},
    {"name": "fedlap-dp", "ipc": 1, "trajectories": 1, "max_steps": 1, "real_batches": 1},
    {"name": "dp-fedprox", "epochs": 1},
)


@pytest.mark.usefixtures("mixing")
@pytest.mark.parametrize("model", ["centred", "normed"])
@pytest.mark.parametrize("method", RECORD_LEVEL, ids=lambda method: method["name"])
def test_a_model_that_mixes_records_is_refused_before_anything_is_charged(
    model: str, method: dict[str, object], tmp_path: Path
) -> None:
    folder = write_node(tmp_path / "node-2", "plain", DECLARED, OPEN)
    *_, said, charges = heard(folder, Question(config_of(method, model=model), PLAN))
    assert isinstance(said, dict)
    assert (said["kind"], said["reason"]) == ("refusal", "configuration")
    assert charges == []


@pytest.mark.usefixtures("mixing")
def test_whole_clients_may_be_protected_with_such_a_model(tmp_path: Path) -> None:
    folder = write_node(tmp_path / "node-2", "plain", DECLARED, OPEN)
    *_, said, charges = heard(folder, Question(config_of({"name": "udp-fedavg"}, model="centred"), PLAN))
    assert isinstance(said, dict)
    assert said["kind"] == "reply"
    assert charges


@pytest.mark.usefixtures("mixing")
def test_the_simulator_refuses_it_by_the_same_check() -> None:
    from fedveil.data.client_data import ArrayClients
    from fedveil.experiment.prepare import task_for
    from fedveil.privacy.releases import Plan

    config = make_config(config_of(RECORD_LEVEL[0], model="centred"))
    clients = ArrayClients(torch.randn(6, *SHAPE), torch.zeros(6, dtype=torch.int64), [torch.arange(6)])
    with pytest.raises(InputError) as caught:
        check_clients(
            task_for(config, SHAPE, CLASSES), config.build_method(), Plan(1, 1, "all", 1, 6, 6), clients
        )
    assert caught.value.field == "model"
