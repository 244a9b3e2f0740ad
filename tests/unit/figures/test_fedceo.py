"""FedCEO's figures show what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fedveil import run
from fedveil.errors import InputError
from fedveil.evaluation.smoothness import laplacian_smoothness
from fedveil.figures.fedceo import (
    accuracy_figure,
    class_accuracy,
    smoothness_figure,
    spectrum_figure,
)
from fedveil.figures.figure import save_figure
from fedveil.linalg import slice_singular_values
from fedveil.methods.fedceo import FedCEO
from fedveil.session.callbacks.keep import KeepRounds
from fedveil.tree import Params
from tests.contract.federation import make_clients, make_task


def smoothed() -> tuple[Params, Params]:
    """The uploads of the last smoothing round, and what the server made of them."""
    watch = KeepRounds({4})
    method = FedCEO(lam=2.0, interval=2, epochs=1, batch_size=4)
    run(make_task(), make_clients(), method, rounds=5, cohort=3, workers=1, callbacks=[watch])
    return watch.found[4].up.params, watch.found[4].server.personal


def test_a_smoothing_round_is_kept() -> None:
    before, after = smoothed()
    again = FedCEO(lam=2.0, interval=2).smooth(before, 4, 0.0)
    for name, leaf in again.items():
        torch.testing.assert_close(after[name], leaf, rtol=0, atol=1e-9)


def test_figures_of_a_smoothing_step(tmp_path: Path) -> None:
    before, after = smoothed()
    task, data = make_task(), make_clients()
    first, then = (class_accuracy(task, models, data.x, data.y, 1) for models in (before, after))
    assert len(first) == 3
    figure = smoothness_figure(before["4.weight"], after["4.weight"], (first, then), label="1")
    drawn: Any = figure.axes[0].images[0].get_array()
    expected = laplacian_smoothness(before["4.weight"]).T
    torch.testing.assert_close(torch.as_tensor(drawn.data), expected)
    assert "mean" in figure.axes[2].get_title(loc="right")
    spectrum = spectrum_figure(before["1.weight"], after["1.weight"], 0.25)
    line = spectrum.axes[0].lines[0].get_ydata()
    torch.testing.assert_close(torch.tensor(line), slice_singular_values(before["1.weight"])[0])
    for number, one in enumerate((figure, spectrum)):
        path = tmp_path / f"{number}.png"
        save_figure(one, path)
        with Image.open(path) as picture:
            assert picture.width > 600


def test_class_accuracy_is_of_that_class_and_client() -> None:
    task, data = make_task(), make_clients()
    models = [task.init(seed) for seed in (1, 2)]
    stack = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    found = class_accuracy(task, stack, data.x, data.y, 2)
    for value, model in zip(found, models, strict=True):
        chosen = data.x[data.y == 2]
        scores = task.outputs({name: leaf.unsqueeze(0) for name, leaf in model.items()}, chosen.unsqueeze(0))
        assert value == pytest.approx(float((scores[0].argmax(1) == 2).double().mean()))
    with pytest.raises(InputError, match="no example"):
        class_accuracy(task, stack, data.x, data.y, 9)


def test_accuracies_with_their_spread_beside_the_published() -> None:
    scores = {"A": {1.0: [0.5, 0.7], 2.0: [0.3]}, "B": {1.0: [0.4], 2.0: []}}
    figure = accuracy_figure(scores, x="noise", published={"A": {1.0: 0.8, 2.0: 0.6}})
    ours: Any
    paper: Any
    ours, paper = figure.axes
    assert ours.get_xlabel() == "noise"
    assert [text.get_text() for text in ours.get_legend().get_texts()] == ["A", "B"]
    assert list(ours.containers[0].lines[0].get_ydata()) == pytest.approx([60.0, 30.0])
    assert list(paper.containers[0].lines[0].get_ydata()) == pytest.approx([80.0, 60.0])
    with pytest.raises(InputError, match="nothing to draw"):
        accuracy_figure({"A": {1.0: []}}, x="noise")
