"""FedLAP's figures show what they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fedveil.errors import InputError
from fedveil.figures.fedlap import Sets, images_figure
from fedveil.figures.figure import save_figure
from fedveil.methods.fedlap import ModelAndRadius, Server
from fedveil.methods.method import At
from fedveil.methods.synthetic import SyntheticSet
from fedveil.privacy.releases import Plan
from fedveil.session.loop import RoundEnd
from tests.unit.figures.keep import KeepRounds

PLAN = Plan(2, 2, "all", 3, 5, 5)


def sets() -> Sets:
    images = torch.arange(2 * 4 * 16, dtype=torch.float32).reshape(2, 4, 1, 4, 4) / 128
    return Sets(images, torch.tensor([[0, 0, 1, 1], [2, 2, -1, -1]]))


def test_recorded_rounds_equal_the_messages() -> None:
    watch = KeepRounds({2, 3})
    down = ModelAndRadius({"a": torch.ones(1, 3)}, torch.ones(1))
    for round_ in (1, 2, 3):
        at, up = At(PLAN, round_), SyntheticSet(sets().images + round_, sets().labels)
        watch.exchange_ends(at, (0, 1), down, None if round_ == 3 else up)
        up.images.zero_()  # the engine may use the memory again
        watch.round_ends(RoundEnd(at, (0, 1), Server({}, 0.0, round_), {}, last=round_ == 3))
    assert set(watch.found) == {2}
    kept = watch.found[2]
    assert (kept.at.round, kept.server.steps) == (2, 2)
    assert torch.equal(kept.up.images, sets().images + 2)
    assert torch.equal(kept.down.params["a"], torch.ones(1, 3))


def test_padding_is_not_shown() -> None:
    assert len(sets().of_class(2)) == 2


def test_pictures_are_written(tmp_path: Path) -> None:
    rounds = {1: sets(), 5: sets()}
    figure = images_figure(rounds, range(3), ["zero", "one", "two"], columns=2)
    save_figure(figure, tmp_path / "images.png")
    with Image.open(tmp_path / "images.png") as picture:
        assert min(picture.size) > 100


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InputError) as error:
        images_figure({}, [0], ["zero"])
    assert error.value.field == "rounds"
