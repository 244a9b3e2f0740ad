"""From a configuration to a run: what is refused before it, and data that runs of one process share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedveil.data.dataset import Dataset
from fedveil.data.files import state_of
from fedveil.experiment.config import make_config
from fedveil.experiment.prepare import load_examples


def load(task: dict[str, Any], data: Path | None = None) -> Dataset:
    return load_examples(make_config({"task": task}), data)


def write(path: Path, text: str, tick: int) -> None:
    """The time is set, since two edits may fall into one tick of the clock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(tick, tick))


def table(value: int) -> str:
    return "x,y\n" + f"{value},no\n{value},yes\n" * 4


def of_table(path: str) -> dict[str, Any]:
    return {"dataset": "table", "model": "logistic", "data_options": {"path": path, "label": "y"}}


def test_seeds_share_one_copy_until_the_file_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write(path, table(1), tick=1)
    first = load(of_table(str(path)))
    assert load(of_table(str(path))) is first
    write(path, table(2), tick=2)  # of the same size
    assert load(of_table(str(path))).mean == (2.0,)


def test_a_relative_path_refers_to_the_file_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, folder in enumerate(("here", "there"), 1):
        write(tmp_path / folder / "table.csv", table(number), tick=1)
        monkeypatch.chdir(tmp_path / folder)
        assert load(of_table("table.csv")).mean == (float(number),)


def test_an_edited_vocabulary_is_read_again(tmp_path: Path) -> None:
    films, public = tmp_path / "films.tsv", tmp_path / "public.txt"
    write(films, "a good film\t1\na bad film\t0\n" * 5, tick=1)
    task = {"dataset": "labelled-text", "model": "lstm", "data_options": {"path": str(films)}}
    task["text"] = {"length": 4, "vocabulary": "public", "path": str(public)}
    sizes = []
    for tick, words in enumerate(("good bad film", "a good bad film"), 1):
        write(public, words + "\n", tick)
        facts = load(task).tokens
        assert facts is not None
        sizes.append(facts.vocabulary.size)
    assert sizes[1] == sizes[0] + 1


def test_a_folder_changes_with_any_file_below_it(tmp_path: Path) -> None:
    write(tmp_path / "set" / "cats" / "one.png", "1", tick=1)
    before = state_of(str(tmp_path / "set"))
    write(tmp_path / "set" / "cats" / "two.png", "2", tick=1)
    assert state_of("set", tmp_path) != before


@pytest.mark.parametrize("path", ["missing", "x" * 300, "~nobody-of-this-name/x", "with\0zero"])
def test_what_cannot_be_looked_at_has_no_state(path: str) -> None:
    assert state_of(path) == ()
