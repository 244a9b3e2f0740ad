"""Attacks on what the server of a secure sum sees: masked uploads say nothing, the sum what a sum of K allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.attack_runs.inversion import Scored, attack_exchange
from fedveil.attack_runs.membership import attack_result
from fedveil.attack_runs.transcript import StoredRun, answers_of, open_run, read_exchange
from fedveil.attacks.registry import make_attack
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.methods.secure import IntegerUpload, SecurelyAggregated
from fedveil.secure_sum.settings import SecureSum
from tests.unit.secure_sum.in_process import Federation

CLIENTS = 5


def recorded(place: Path, kind: str, examples: int = 1) -> StoredRun:
    """One gradient step of clients with so many digits each, without noise: the easiest uploads to invert."""
    config = make_config(
        {
            "task": {
                "dataset": "digits",
                "model": "mlp-2",
                "model_options": {"dropout": 0.0},
                "data_options": {"max_train": CLIENTS * examples, "max_test": 200},
            },
            "partition": {"clients": CLIENTS},
            "method": {"name": "fedavg", "weighting": "uniform", "batch_size": 64, "lr": 0.1},
            "run": {"rounds": 1, "sampler": "all", "transcript": True, "workers": 1},
            "aggregation": {"kind": kind},
        }
    )
    found = run_seed(config, 0, experiment=kind, results=place)
    assert found.folder is not None
    return open_run(found.folder)


def improvement(run: StoredRun, clients: list[int], examples: int) -> float:
    """The attack's PSNR over the best guess without uploads."""
    attack = make_attack("inverting-gradients", {"steps": 200, "restarts": 1})
    _, scored = attack_exchange(run, attack, round=1, clients=clients, examples=examples)
    assert isinstance(scored, Scored)
    found = scored.against_x.means()["psnr"]
    assert found is not None
    return found - scored.trivial_psnr


def test_inversion_of_a_masked_upload_is_at_chance(tmp_path: Path) -> None:
    assert improvement(recorded(tmp_path, "plain"), [0], 1) > 10, "the attack works on single uploads"
    secure = recorded(tmp_path, "secure")
    assert all(improvement(secure, [client], 1) < 1 for client in range(CLIENTS))


def test_inversion_of_the_sum_is_that_of_all_clients_together(tmp_path: Path) -> None:
    run = recorded(tmp_path, "secure")
    everybody = list(range(CLIENTS))
    _, up = answers_of(run, read_exchange(run, 1), everybody)
    assert up.count == 1
    alone = improvement(recorded(tmp_path, "plain"), [0], 1)
    assert improvement(run, everybody, CLIENTS) < alone


@pytest.mark.parametrize("name", ["gradient-alignment"])
def test_membership_in_a_masked_upload_is_at_chance(tmp_path: Path, name: str) -> None:
    plain = attack_result(recorded(tmp_path, "plain", 20).folder, name, target="upload", client=0)
    secure = attack_result(recorded(tmp_path, "secure", 20).folder, name, target="upload", client=0)
    assert plain.auc.value > 0.8
    assert secure.auc.low < 0.5 < secure.auc.high


def test_the_representation_of_a_masked_upload_has_the_distribution_of_a_real_one() -> None:
    """The attack draws a mask of its own: real masked uploads have the same law, whatever is under them."""
    federation = Federation(CLIENTS, SecureSum(), length=4096)
    nodes = list(federation.nodes(federation.terms()).values())
    keys = [node.advertise() for node in nodes]
    shares = [share for node in nodes for share in node.share(keys)]
    real = (
        nodes[0]
        .upload([share for share in shares if share.receiver == nodes[0].node], np.zeros(4096, np.uint32))
        .values
    )
    method = SecurelyAggregated(make_config({}).build_method(), SecureSum())
    sums = IntegerUpload({"w": torch.zeros(1, 4096, dtype=torch.int32)})
    drawn = method.single_uploads(sums, [0]).values["w"].numpy().view(np.uint32)[0]
    for words in (real, drawn):
        counts = np.bincount(words.view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < 350  # 255 degrees of freedom
    assert abs(np.corrcoef(real.astype(float), drawn.astype(float))[0, 1]) < 0.08
