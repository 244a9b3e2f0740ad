"""experiments/best/attacks.py: the attacks work on undefended linear models, so what they miss is really protected."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedveil.attack_runs.membership import attack_result
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed
from tests.scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "best"
DIGITS = {"dataset": "digits", "features": "scattering", "feature_options": {"depth": 1, "whitening": 0.0}}
LINEAR = {"model": "logistic", "model_options": {"bias": False, "zero": True}}


@pytest.fixture(scope="module")
def attacks() -> ModuleType:
    return load_script("experiments/best/attacks.py")


def recommended(epsilon: float = 3.0) -> Config:
    """The recommended setting for the embedded digits: 20 clients under secure aggregation."""
    update = {"lr": 20.0, "local_steps": 5, "batch_size": 1000, "clip": 1.0, "normalise": True}
    return make_config(
        {
            "task": DIGITS | LINEAR,
            "partition": {"clients": 20},
            "method": {"name": "udp-fedavg"} | update,
            "aggregation": {"kind": "secure", "threshold": 18, "colluders": 1},
            "run": {"rounds": 5, "sampler": "all"},
            "privacy": {"target_epsilon": epsilon, "target_unit": "client"},
        }
    )


def test_inversion_is_exact_on_a_plain_upload_and_below_a_guess_on_the_noisy_sum(attacks: ModuleType) -> None:
    views = attacks.inversion(recommended(), steps=200, targets=4)["views"]
    plain, bare, noisy, guess = views.values()
    assert plain["cosine"] == pytest.approx(1.0, abs=1e-3)
    assert plain["psnr"] > guess["psnr"] + 2
    assert plain["cosine"] > bare["cosine"] > noisy["cosine"]
    assert noisy["cosine"] < guess["cosine"]


def test_the_sum_that_is_attacked_is_the_mean_of_the_uploads(attacks: ModuleType) -> None:
    """With so little noise that only the rounding to integers is left."""
    config = recommended(epsilon=1e6)
    scene = attacks.scene_of(config, targets=2)
    wanted = attacks.updates(scene, attacks.without_noise(config), scene.clients).mean(0).flatten()
    found = attacks.update_of_sum(scene, scene.prepared.method).flatten()
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.99


def test_membership_attacks_work_on_an_undefended_linear_model(tmp_path: Path) -> None:
    """A linear model on features that was fitted to 60 digits without noise discloses them."""
    config = make_config(
        {
            "task": DIGITS | LINEAR | {"data_options": {"max_train": 60}},
            "partition": {"clients": 2},
            "method": {"name": "fedavg", "lr": 20.0, "local_steps": 50, "batch_size": 1000},
            "run": {"rounds": 10, "sampler": "all", "evaluate_every": 10, "workers": 1},
        }
    )
    folder = run_seed(config, 0, experiment="undefended", results=tmp_path).folder
    assert folder is not None
    assert attack_result(folder, "loss-threshold").auc.low > 0.55
