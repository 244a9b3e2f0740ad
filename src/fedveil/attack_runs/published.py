"""The attacks of a published row on its finished run, with the paper's attacker, not a stronger one.

Inversions are those of the configuration's `[[attack]]` sections, on the first client that answered, by an attacker who
knows the labels and does not adapt to a defence. Membership attacks are the ones whose accuracy is published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.attack_runs.inversion import attack_exchange, finding_folder, write_finding
from fedveil.attack_runs.membership import attack_result
from fedveil.attack_runs.transcript import StoredRun, open_run, read_exchange
from fedveil.attacks.registry import configured_attacks
from fedveil.attacks.view import Attack

Scores = dict[str, float]
# What papers call an attack, and its name here.
MEMBERSHIP = {"basic-mia": "loss-threshold", "ml-leaks": "ml-leaks", "white-box": "white-box"}


def attack_as_published(
    folder: Path, published: Mapping[str, float], data_dir: Path | None = None
) -> dict[str, Scores]:
    """The scores of all attacks for these published numbers, by attack; existing findings are loaded."""
    found = {
        name: _member_scores(folder, MEMBERSHIP[name], data_dir) for name in published if name in MEMBERSHIP
    }
    if published.keys() - MEMBERSHIP.keys():
        run = open_run(folder, data_dir)
        usual = "inverting-gradients" if run.prepared.dataset.tokens is None else "lamp"
        for attack, round_ in configured_attacks(run.config.attack, usual=usual):
            found[f"{attack.name}, round {round_}"] = _inversion_scores(run, attack, round_)
    return found


def _member_scores(folder: Path, name: str, data_dir: Path | None) -> Scores:
    path = folder / "attacks" / name / "finding.json"
    content = (
        json.loads(path.read_text())
        if path.exists()
        else attack_result(folder, name, data_dir=data_dir).to_json()
    )
    return {"accuracy": content["accuracy"]["value"], "auc": content["auc"]["value"]}


def _inversion_scores(run: StoredRun, attack: Attack, round_: int) -> Scores:
    exchange = read_exchange(run, round_, 0)
    clients = [min(exchange.clients)]
    folder = finding_folder(run, attack, exchange, clients, labels="known", adaptive=False, seed=0)
    if not (folder / "finding.json").exists():
        exchange, scored = attack_exchange(run, attack, round=round_, clients=clients, adaptive=False)
        write_finding(run, attack, exchange, clients, scored, labels="known", adaptive=False, seed=0)
    return inversion_scores(json.loads((folder / "finding.json").read_text()))


def inversion_scores(finding: Mapping[str, Any]) -> Scores:
    """The mean scores of images with the baseline's PSNR, or the overlap of texts in per cent."""
    if "against_x" in finding:
        scores = dict(finding["against_x"]["mean"]) | {"baseline_psnr": finding["mean_image_psnr"]}
    else:
        scores = {name: 100 * value for name, value in finding["metrics"].items() if name.startswith("rouge")}
    return {name: value for name, value in scores.items() if value is not None}
