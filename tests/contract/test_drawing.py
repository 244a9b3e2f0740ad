"""What the experiments' scripts draw is what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fedveil.errors import InputError
from fedveil.figures.fedlap import Sets
from fedveil.figures.figure import save_figure
from fedveil.training.surrogate import Path as Walk
from tests.contract.federation import make_clients, make_task
from tests.contract.scripts import experiment_script

FEDCEO = experiment_script("fedceo/drawing.py")
FEDLAP = experiment_script("fedlap_dp/drawing.py")


def width(figure: Any, path: Path) -> int:
    save_figure(figure, path)
    with Image.open(path) as picture:
        return picture.width


def test_class_accuracy_is_of_that_class_and_client() -> None:
    task, data = make_task(), make_clients()
    models = [task.init(seed) for seed in (1, 2)]
    stack = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    found = FEDCEO.class_accuracy(task, stack, data.x, data.y, 2)
    for value, model in zip(found, models, strict=True):
        chosen = data.x[data.y == 2]
        scores = task.outputs({name: leaf.unsqueeze(0) for name, leaf in model.items()}, chosen.unsqueeze(0))
        assert value == pytest.approx(float((scores[0].argmax(1) == 2).double().mean()))
    with pytest.raises(InputError) as error:
        FEDCEO.class_accuracy(task, stack, data.x, data.y, 9)
    assert error.value.field == "label"


def test_accuracy_stands_below_roughness(tmp_path: Path) -> None:
    before, after = torch.rand(3, 4, 5), torch.rand(3, 4, 5)
    scores = ([0.5, 0.7, 0.9], [0.8, 0.8, 0.8])
    figure = FEDCEO.smoothness_and_accuracy_figure(before, after, scores, label="1")
    assert figure.axes[2].get_title(loc="right") == "mean 70 %, worst 50 %"
    assert width(figure, tmp_path / "both.png") > 600


def test_accuracies_with_their_spread_beside_the_published() -> None:
    scores = {"A": {1.0: [0.5, 0.7], 2.0: [0.3]}, "B": {1.0: [0.4], 2.0: []}}
    figure = FEDCEO.accuracy_figure(scores, x="noise", published={"A": {1.0: 0.8, 2.0: 0.6}})
    ours: Any
    paper: Any
    ours, paper = figure.axes
    assert ours.get_xlabel() == "noise"
    assert [text.get_text() for text in ours.get_legend().get_texts()] == ["A", "B"]
    assert list(ours.containers[0].lines[0].get_ydata()) == pytest.approx([60.0, 30.0])
    assert list(paper.containers[0].lines[0].get_ydata()) == pytest.approx([80.0, 60.0])
    with pytest.raises(InputError) as error:
        FEDCEO.accuracy_figure({"A": {1.0: []}}, x="noise")
    assert error.value.field == "scores"


def test_pixels_are_counted_without_the_padding(tmp_path: Path) -> None:
    images = torch.arange(2 * 4 * 16, dtype=torch.float32).reshape(2, 4, 1, 4, 4) / 128
    sets = Sets(images, torch.tensor([[0, 0, 1, 1], [2, 2, -1, -1]]))
    assert len(FEDLAP.pixels(sets)) == 6 * 16
    assert width(FEDLAP.pixels_figure({1: sets, 5: sets}), tmp_path / "pixels.png") > 100


def test_the_radius_is_marked_where_it_is() -> None:
    distance = torch.tensor([[0.5], [1.0], [1.5]], dtype=torch.float64)
    real = torch.tensor([[2.0], [1.0], [3.0]], dtype=torch.float64)
    axes = FEDLAP.path_figure(Walk(distance, real, real), 10.0).axes[0]
    assert axes.lines[-1].get_xdata() == [1.0, 1.0]
    assert axes.texts[0].get_text() == "$r_k$ = 1.00"
