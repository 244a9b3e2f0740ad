"""What DP-FedAGS's claimed epsilon is worth: audits of single uploads, and an attacker who knows the method.

    python experiments/dp_fedags/refute.py [--results results]

The attack is on one client's upload in the first round of a run on scikit-learn's digits (logistic regression, 40
clients of 36 examples): is each of its examples, and of as many others, behind the upload?
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from untouched import audit_untouched_client, audit_untouched_records

from fedveil.attack_runs.membership import attack_result
from fedveil.experiment.config import build_method, make_config
from fedveil.experiment.run import run_seed
from fedveil.methods.dp_fedags import printed_sigma
from fedveil.privacy.releases import Plan

PLAN = Plan(100, 10, "fixed", 200, 600, 600)
TRUST = 0.02


def audit(title: str, section: dict[str, Any], claimed: float, samples: int) -> None:
    method = build_method(section)
    clients = audit_untouched_client(method, PLAN, delta=1e-3, samples=samples)
    records = audit_untouched_records(method, PLAN, delta=1e-5)
    line = {
        "audit": title,
        "claimed": claimed,
        "clients": clients.lower_bound,
        "records": records.lower_bound,
        "confidence": clients.confidence,
        "refuted": clients.contradicts(claimed) and records.contradicts(claimed),
    }
    print(json.dumps(line), flush=True)


def attack(title: str, section: dict[str, Any], results: Path) -> None:
    config = make_config(
        {
            "task": {"dataset": "digits", "model": "logistic"},
            "partition": {"kind": "iid", "clients": 40},
            "method": {"lr": 0.5, "batch_size": 64} | section,
            "run": {"rounds": 1, "cohort": 4, "transcript": True, "workers": 1},
        }
    )
    for seed in (0, 1, 2):
        folder = run_seed(config, seed, experiment="refute", results=results).folder
        assert folder is not None
        for knowing in (False, True):
            settings = {"trust_below": TRUST} if knowing else {}
            found = attack_result(
                folder, "gradient-alignment", settings=settings, target="upload", examples=36
            )
            print(
                json.dumps({"attack": title, "seed": seed, "adaptive": knowing} | found.to_json()), flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--results", type=Path, default=Path("results"))
    given = parser.parse_args()
    for epsilon in (0.1, 0.2, 0.5):
        for kind in ("gaussian", "laplace"):
            section = {"name": "dp-fedags", "epsilon": epsilon, "noise_kind": kind}
            audit(f"dp-fedags, {kind}", section, epsilon, given.samples)
    proven = {"name": "dp-fedags-proven", "variant": "everywhere", "noise_multiplier": printed_sigma(0.1)}
    audit("dp-fedags-proven, everywhere", proven, 0.26, given.samples)
    attack("dp-fedags, epsilon 0.1", {"name": "dp-fedags", "epsilon": 0.1}, given.results)
    attack("dp-fedags-proven, everywhere, same sigma", proven, given.results)


if __name__ == "__main__":
    main()
