from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from tests.refusals import refuses

from fedveil.partition.picture import counts_figure, counts_table, save_picture

COUNTS = torch.tensor([[5, 0, 100], [20, 30, 0]])


def shown(counts: torch.Tensor, **options: int) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(counts_table(counts, **options))  # type: ignore[arg-type]
    return console.export_text()


def test_clients_have_names_where_the_data_has() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(counts_table(COUNTS, clients=["north [b]", "a clinic with a very long name"]))
    text = console.export_text()
    assert ["north", "[b]", "5", "·", "100", "105"] in [line.split() for line in text.splitlines()]
    assert "a clinic with a ver…" in text


def test_the_table_shows_every_count_and_the_sums() -> None:
    lines = [line.split() for line in shown(COUNTS).splitlines()]
    assert ["client", "0", "1", "2", "all"] in lines
    assert ["0", "5", "·", "100", "105"] in lines
    assert ["1", "20", "30", "·", "50"] in lines
    assert ["all", "25", "30", "100", "155"] in lines


def test_numbers_are_never_cut_in_a_narrow_terminal() -> None:
    counts = torch.full((3, 10), 6000)
    text = shown(counts)
    assert text.count("6000 ") >= 30
    assert "18000 " in text
    assert "180000" in text


def test_many_classes_and_clients_are_summed_up() -> None:
    counts = torch.zeros(50, 62, dtype=torch.int64)
    counts[:, 7] = 3
    counts[:, 9] = 1
    text = shown(counts)
    assert "7 (75%)" in text
    assert "10 more" in text
    assert "200" in text


@pytest.mark.parametrize("clients, classes", [(1, 1), (10, 10), (31, 10), (100, 62)])
@pytest.mark.parametrize("ending", [".png", ".pdf"])
def test_pictures_are_written(tmp_path: Path, clients: int, classes: int, ending: str) -> None:
    counts = torch.arange(clients * classes).reshape(clients, classes)
    path = save_picture(counts, tmp_path / "new" / f"p{ending}")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == ".png" else b"%PDF")
    if ending == ".png":
        with Image.open(path) as picture:
            grey = np.asarray(picture.convert("L"))
        assert grey.min() < 80  # ink stays dark in grey
        assert grey.max() == 255


def test_axes_are_labelled_and_a_larger_count_is_a_larger_dot() -> None:
    figure = counts_figure(COUNTS, ["a", "b", "c"])
    top, main = figure.axes
    assert (main.get_xlabel(), main.get_ylabel(), top.get_ylabel()) == ("client", "class", "examples")
    assert [label.get_text() for label in main.get_yticklabels()] == ["a", "b", "c"]
    dots: Any = main.collections[0]
    spots, sizes = np.asarray(dots.get_offsets()).astype(int).tolist(), dots.get_sizes()
    where = {tuple(spot): float(size) for spot, size in zip(spots, sizes, strict=True)}
    assert set(where) == {(0, 0), (0, 2), (1, 0), (1, 1)}
    assert where[0, 2] / where[0, 0] == pytest.approx(20.0)  # area goes with the count
    bars: list[Any] = list(top.patches)
    assert [bar.get_height() for bar in bars] == [105.0, 50.0]


def test_drawing_leaves_no_state_behind() -> None:
    import matplotlib._pylab_helpers as helpers

    counts_figure(COUNTS)
    assert not helpers.Gcf.figs


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    with refuses("path"):
        save_picture(COUNTS, tmp_path / "p.jpg")
    with refuses("classes"):
        counts_table(COUNTS, ["only one"])
    with refuses("counts"):
        counts_figure(torch.zeros(0, 3))
