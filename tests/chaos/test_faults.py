"""Each fault of `make chaos` once; the many random repetitions are that command's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from .faults import FAULTS, Laboratory, NotSurvivedError, killed


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child hangs on the threads of its parent
    yield Laboratory(tmp_path_factory.mktemp("chaos"))
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_survives(name: str, lab: Laboratory) -> None:
    try:
        FAULTS[name][0](lab, np.random.default_rng(len(name)))
    except PermissionError as error:
        pytest.skip(str(error))  # a small disk cannot be mounted here


def test_a_round_that_was_not_charged_is_noticed(lab: Laboratory) -> None:
    folder = _finished(lab)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 99}\n')
    with pytest.raises(NotSurvivedError, match=r"\[99\] were released"):
        lab.finishes_the_same(folder)


def test_another_model_is_noticed(lab: Laboratory) -> None:
    folder = _finished(lab)
    lab.model, kept = b"other", lab.model
    try:
        with pytest.raises(NotSurvivedError, match="differs"):
            lab.finishes_the_same(folder)
    finally:
        lab.model = kept


def _finished(lab: Laboratory) -> Path:
    killed(lab, np.random.default_rng(1))
    return max(lab.place.glob("fault-*"), key=lambda path: int(path.name.removeprefix("fault-")))
