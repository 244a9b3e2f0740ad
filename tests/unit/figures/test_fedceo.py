"""FedCEO's pictures show what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fedveil import run
from fedveil.evaluation.smoothness import laplacian_smoothness
from fedveil.figures.fedceo import smoothness_figure, spectrum_figure
from fedveil.figures.figure import save_figure
from fedveil.linalg import slice_singular_values
from fedveil.methods.fedceo import FedCEO
from fedveil.tree import Params
from tests.contract.federation import make_clients, make_task
from tests.unit.figures.keep import KeepRounds


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
    figure = smoothness_figure(before["4.weight"], after["4.weight"])
    drawn: Any = figure.axes[0].images[0].get_array()
    expected = laplacian_smoothness(before["4.weight"]).T
    torch.testing.assert_close(torch.as_tensor(drawn.data), expected)
    spectrum = spectrum_figure(before["1.weight"], after["1.weight"], 0.25)
    line = spectrum.axes[0].lines[0].get_ydata()
    torch.testing.assert_close(torch.tensor(line), slice_singular_values(before["1.weight"])[0])
    for number, one in enumerate((figure, spectrum)):
        path = tmp_path / f"{number}.png"
        save_figure(one, path)
        with Image.open(path) as picture:
            assert picture.width > 600
