"""Runs that several tests attack."""

from __future__ import annotations

import pytest

from fedveil.attack_runs.transcript import StoredRun, open_run
from tests.unit.attack_runs.finished import finished


@pytest.fixture(scope="module")
def fedem(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    method = {"name": "fedem", "batch_size": 2, "perturbation_steps": 2, "rho_max": 0.5}
    return open_run(finished(tmp_path_factory.mktemp("fedem"), method))
