"""The scripts that measure what stands beside the published tables."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from experiments.fedceo import measure

from fedveil.linalg import t_tsvd

ROOT = Path(__file__).parents[3]
RECORDS = sorted((ROOT / "experiments" / "records").glob("fed*-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_the_script_that_makes_it(path: Path) -> None:
    paper, name = path.stem.split("-", 1)
    python, script, *words = shlex.split(json.loads(path.read_text())["command"])
    assert python == "python"
    assert script == f"experiments/{paper}/measure.py"
    assert f'"{name}"' in (ROOT / script).read_text() or path.name in (ROOT / script).read_text()
    if script == "experiments/fedceo/measure.py":
        assert words[0] == name
        assert name in measure.COMMANDS


def test_the_edge_is_where_the_singular_values_of_noise_end() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(10, 64, 200, generator=generator, dtype=torch.float64)
    end = measure.edge(0.3, noise.shape)
    assert float(t_tsvd(noise, 1.1 * end).abs().max()) == 0
    assert float(t_tsvd(noise, 0.9 * end).abs().max()) > 0


def test_a_threshold_of_zero_leaves_the_stack() -> None:
    stack = {"w": torch.randn(10, 8, 12, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(measure.smoothed(stack, 0.1, 0.0)["w"], stack["w"])
    assert not torch.equal(measure.smoothed(stack, 0.1, 1.0)["w"], stack["w"])


@pytest.mark.parametrize("clients", measure.CLIENTS)
def test_clients_of_the_papers_size_are_the_papers_setting_otherwise(clients: int) -> None:
    plain = measure.AUTHORS | {"noise_multiplier": 2.0, "interval": 61}
    found = measure.config(60, clients=clients, evaluate_every=1, **plain)
    assert found.partition.clients == clients
    assert found.method["unit"] == "record"
    assert (found.method["epochs"], found.method["batch_size"], found.run.cohort) == (30, 64, 10)
    assert found.run.rounds < found.method["interval"], "no round smooths"
