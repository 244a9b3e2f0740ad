"""Options of a run: checked where they are made, with the field named."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from fedveil.errors import InputError
from fedveil.session.options import AvailableData, RunOptions, SimulationOptions
from fedveil.session.run import run
from tests.contract.federation import make_clients, make_method, make_task

WRONG: list[tuple[str, Any]] = [
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("seed", True),
    ("seed", None),
    ("evaluate_every", 0),
    ("checkpoint_every", 0),
    ("min_clients", -1),
    ("transcript", 3),
    ("transcript", [0]),
    ("transcript", ["first"]),
    ("transcript_exchanges", 0),
]
WRONG_SIMULATION: list[tuple[str, Any]] = [
    ("workers", -1),
    ("workers", 0.5),
    ("execution", "parallel"),
    ("max_memory", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_option_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        RunOptions(**{name: value})
    assert refused.value.field == f"run.{name}"


def test_an_unknown_source_of_noise_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        RunOptions(noise_source="dice")  # type: ignore[arg-type]
    assert refused.value.field == "run.noise"


@pytest.mark.parametrize(("name", "value"), WRONG_SIMULATION)
def test_a_wrong_option_of_the_simulator_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        SimulationOptions(**{name: value})
    assert refused.value.field == f"run.{name}"


@pytest.mark.parametrize(("name", "value"), WRONG + WRONG_SIMULATION)
def test_a_run_from_python_refuses_the_same_options(name: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        run(make_task(), make_clients(), make_method("fedavg"), rounds=1, **{name: value})
    assert refused.value.field == f"run.{name}"


def test_options_are_frozen_and_hold_plain_numbers() -> None:
    options = RunOptions(seed=np.int64(3), transcript=[1, 2])  # type: ignore[arg-type]
    assert type(options.seed) is int
    assert options.transcript == (1, 2)
    with pytest.raises(FrozenInstanceError):
        options.seed = 4  # type: ignore[misc]


def test_clients_are_scored_on_held_out_examples_where_there_are_some() -> None:
    clients, held_out = make_clients(), make_clients((2, 2))
    assert AvailableData(clients=clients).scored_on is clients
    assert AvailableData(clients=clients, local_test=held_out).scored_on is held_out
    assert AvailableData(clients=clients, score_clients=False).scored_on is None
    assert AvailableData().scored_on is None
