"""One seed of an experiment: the engine is chosen here, and nothing starts before everything is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.errors import InputError
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.federation import launch


@pytest.mark.parametrize("engine", ["simulation", "flower-simulation"])
def test_a_field_that_does_not_fit_the_model_is_refused_before_any_engine_starts(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require_flower", lambda _engine: None)
    monkeypatch.setattr(launch, "_simulating", lambda *_: pytest.fail("Flower was started"))
    config = make_config({"method": {"name": "dp-fedags", "selections": 1e9}, "run": {"engine": engine}})
    with pytest.raises(InputError) as refused:
        run_seed(config, 0, experiment="test", results=tmp_path / "results")
    assert refused.value.field == "method.selections"
    assert not (tmp_path / "results").exists()
