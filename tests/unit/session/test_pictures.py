"""What a run leaves for the report is drawn, small, and shown on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fedveil.data.digits import load_digits
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.methods.fedceo import FedCEO, NoisyModel
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.report.html import write_report
from fedveil.session.callbacks.pictures import DrawPictures

FEDLAP = {
    "name": "fedlap",
    "ipc": 1,
    "labels": "own",
    "classes_per_client": 2,
    "real_batches": 1,
    "max_steps": 1,
    "image_updates": 1,
    "server_steps": 2,
    "batch_size": 16,
}
FEDCEO = {"name": "fedceo", "interval": 2, "epochs": 1, "lr": 0.1, "lam": 2.0}


def left(tmp_path: Path, method: dict[str, Any], **sections: Any) -> Path:
    groups = [[5, 6], [1, 2], [0, 8], [9, 3], [4, 7]]
    raw = {
        "task": {"dataset": "digits", "model": "logistic", "data_options": {"max_train": 200}},
        "partition": {"kind": "classes", "groups": groups},
        "method": method,
        "run": {"rounds": 5, "sampler": "all", "workers": 1},
    }
    result = run_seed(make_config(raw | sections), 0, experiment="left", results=tmp_path)
    assert result.folder is not None
    return result.folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


def test_synthetic_images_are_left_and_shown(tmp_path: Path) -> None:
    folder = left(tmp_path, FEDLAP)
    assert names(folder / "synthetic") == {"round-1.png", "round-3.png", "round-5.png"}
    assert not (folder / "figures").exists()
    for path in (folder / "synthetic").glob("*"):
        assert path.stat().st_size < 300_000
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert "Synthetic examples" in page
    assert page.count("round 3, ") >= 1
    assert "Figures of the methods" not in page


@pytest.mark.parametrize("wrap", [[], [{"name": "model-average"}]])
def test_spectra_and_smoothness_are_left_and_shown(tmp_path: Path, wrap: list[dict[str, str]]) -> None:
    folder = left(tmp_path, FEDCEO, wrap=wrap)
    kinds = ("spectrum", "smoothness")
    assert names(folder / "figures") == {f"{kind}-round-{r}.png" for kind in kinds for r in (2, 4)}
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert "Figures of the methods" in page
    assert "Synthetic examples" not in page


@pytest.mark.parametrize("method", [{"name": "fedavg"}, FEDCEO | {"restart": "mean"}])
def test_others_leave_nothing(tmp_path: Path, method: dict[str, Any]) -> None:
    folder = left(tmp_path, method, run={"rounds": 2, "workers": 1})
    assert not (folder / "synthetic").exists()
    assert not (folder / "figures").exists()


def test_a_single_upload_and_an_unanswered_round_are_no_trouble(tmp_path: Path) -> None:
    plan = Plan(1, 1, "all", 2, 5, 5)
    watch = DrawPictures(FedCEO(interval=2, lam=2.0), load_digits(), tmp_path)
    start = NoisyModel({"last.weight": torch.ones(1, 2, 3)}, torch.zeros(1, dtype=torch.long), 1)
    watch.exchange_ends(At(plan, 2), (), start, None)
    assert names(tmp_path) == set()
    watch.exchange_ends(At(plan, 2), (0,), start, start)
    with Image.open(tmp_path / "figures" / "smoothness-round-2.png") as picture:
        assert picture.width > 600
