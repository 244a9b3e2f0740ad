"""Result folders as a run leaves them, made without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch
from PIL import Image

from fedveil.session.model_file import CHECKSUM, write_model


def config_of(method: str, **fields: Any) -> dict[str, Any]:
    return {
        "task": {"dataset": "digits", "model": "mlp-2"},
        "method": {"name": method, "lr": 0.1, **fields},
        "run": {"rounds": 4, "cohort": 2, "seeds": [0]},
        "privacy": {"delta": 1e-5},
    }


def proof(adversary: str, epsilon: float | None, unit: str = "client") -> dict[str, Any]:
    row: dict[str, Any] = {
        "unit": unit,
        "adversary": adversary,
        "adjacency": "zero-out",
        "sampler": "fixed",
        "epsilon": epsilon,
        "delta": 1e-5,
        "theorem": "none" if epsilon is None else "composition",
    }
    return row if epsilon is not None else row | {"reason": "no noise is added"}


def summary_of(method: str, seed: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    proven = more.pop("proven", [proof("server", None), proof("observer", None), proof("client", None)])
    return {
        "method": method,
        "seed": seed,
        "experiment": "demo",
        "dataset": "digits",
        "model": "mlp-2",
        "accuracy": accuracy,
        "loss": 0.5,
        "rounds": 4,
        "seconds": 1.5,
        "bytes_up": 4000,
        "bytes_down": 4000,
        "stopped": None,
        "privacy": {"paper_claim": "none", "proven": proven, "audit": None},
        "privacy_in_words": "Against the server:\n  the server sees everything.\nNo audit has tested this run.",
        "per_class": [accuracy, 1.0, None],
        "per_client": [accuracy, 0.5, None, 1.0],
        "per_client_on": "training examples",
        "classes": ["zero", "one", "two"],
        "partition": [[3, 1, 0], [0, 2, 2], [0, 0, 0], [5, 0, 1]],
        "plan": {"clients": 4, "cohort": 2, "sampler": "fixed", "rounds": 4},
        "parameters": 42,
        "environment": {"fedveil": "1", "python": "3.11", "system": "Linux", "machine": "x86_64", "cores": 2},
        "paper": None,
    } | more


def write_run(
    root: Path,
    method: str = "fedavg",
    *,
    seed: int = 0,
    accuracy: float | None = 0.9,
    identity: str | None = None,
    fields: Mapping[str, Any] | None = None,
    finished: bool = True,
    **summary: Any,
) -> Path:
    """A folder `root/demo/<identity>/seed-N` with every file a run writes that the report reads."""
    folder = root / "demo" / (identity or method) / f"seed-{seed}"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(config_of(method, **(fields or {}))))
    lines = [
        {
            "round": t,
            "accuracy": None if accuracy is None else accuracy * t / 4,
            "loss": 1 / t,
            "bytes_up": 1000,
            "bytes_down": 1000,
            "seconds": 0.1,
        }
        for t in range(1, 5 if finished else 3)
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        told = summary_of(method, seed, accuracy, **summary) | {
            CHECKSUM: write_model(folder, {"weight": torch.ones(2)})
        }
        (folder / "summary.json").write_text(json.dumps(told))
    return folder


def write_picture(path: Path, shade: int = 128) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), shade).save(path)


def write_everything(root: Path) -> Path:
    """Three settings, two seeds, an audit, attacks, synthetic images and figures."""
    private = [
        proof("server", 20.0),
        proof("observer", 4.0),
        proof("client", 4.0),
        proof("observer", 2.0, "record"),
    ]
    for seed in (0, 1):
        write_run(root, "fedavg", seed=seed, accuracy=0.9 + 0.02 * seed)
        for sigma, shift in ((1.0, 0.0), (2.0, -0.2)):
            write_run(
                root,
                "udp-fedavg",
                seed=seed,
                accuracy=0.8 + shift + 0.01 * seed,
                identity=f"udp-{sigma}",
                fields={"noise_multiplier": sigma},
                proven=private,
            )
    first = root / "demo" / "fedavg" / "seed-0"
    nested = first / "attacks" / "inversion" / "round-1-client-0"
    write_picture(nested / "original.png")
    write_picture(nested / "reconstruction.png", 90)
    finding = {"kind": "inversion", "against_x": {"mean": {"psnr": 21.5}, "per_image": {"psnr": [1.0] * 20}}}
    (nested / "finding.json").write_text(json.dumps(finding))
    (first / "attacks" / "membership").mkdir()
    (first / "attacks" / "membership" / "finding.json").write_text(json.dumps({"auc": 0.75}))
    curve = {"fpr": [0.0, 0.0, 0.5, 1.0], "tpr": [0.0, 0.5, 1.0, 1.0]}
    (first / "attacks" / "membership" / "roc.json").write_text(json.dumps(curve))
    write_picture(first / "synthetic" / "round-4.png")
    write_picture(first / "figures" / "spectrum.png")
    audit = {"kind": "one run", "lower_bound": 0.7, "confidence": 0.95, "samples": 100, "delta": 1e-5}
    audit |= {"adversary": "server", "scope": "one participation", "proven": 20.0, "broken": False}
    (root / "demo" / "udp-1.0" / "seed-0" / "audits").mkdir()
    (root / "demo" / "udp-1.0" / "seed-0" / "audits" / "one-run.json").write_text(json.dumps(audit))
    return root
