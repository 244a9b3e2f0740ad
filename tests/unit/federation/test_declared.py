"""What a node declares, and its data cut to that."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedveil.cli.deploy  # noqa: F401  its commands register themselves on the app
from fedveil.cli import app
from fedveil.data.dataset import Examples
from fedveil.errors import DataError
from fedveil.federation.declared import Declared, fit, made_up
from fedveil.federation.node import checked_node, open_node
from tests.unit.federation.makers import node_folder


def numbered(labels: list[int]) -> Examples:
    x = torch.arange(1.0, len(labels) + 1)[:, None].expand(-1, 3).contiguous()
    return Examples(x, torch.tensor(labels, dtype=torch.int64))


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=9),
    st.integers(0, 20),
    st.integers(0, 8),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_a_record_changes_one_example_and_never_their_number(
    labels: list[int], other: int, place: int, records: int, classes: int
) -> None:
    changed = list(labels)
    changed[place % len(labels)] = other
    one, two = (fit(numbered(held), records, classes) for held in (labels, changed))
    assert len(one) == len(two) == records
    assert int(one.y.max()) < classes
    differ = (one.y != two.y) | (one.x != two.x).any(1)
    assert int(differ.sum()) <= 1


def test_data_that_fits_is_used_as_it_is() -> None:
    examples = numbered([0, 1, 2, 1])
    fitted = fit(examples, 4, 3)
    assert torch.equal(fitted.x, examples.x)
    assert torch.equal(fitted.y, examples.y)
    assert fit(examples, 3, 3).y.tolist() == [0, 1, 2]
    assert fit(examples, 5, 2).y.tolist() == [0, 1, 0, 1, 0]
    assert fit(examples, 5, 2).x[:, 0].tolist() == [1, 2, 0, 4, 0]


def test_an_artificial_example_has_the_same_shape_and_is_not_from_the_data() -> None:
    for held in (numbered([3]), Examples(torch.tensor([[7, 8]]), torch.tensor([1]))):
        one = made_up(held)
        assert one.x.shape == held.x.shape
        assert one.x.dtype == held.x.dtype
        assert not torch.equal(one.x, held.x)


def test_a_node_that_declares_no_labels_counts_as_holding_all_classes() -> None:
    assert Declared(5).label_set(3) == (0, 1, 2)
    assert Declared(5, labels=(2, 0, 7)).label_set(3) == (0, 2)


@pytest.mark.parametrize(
    "declared", ["records = 13", "classes = 2", "labels = [0, 1]", "records = 13\nclasses = 2"]
)
def test_data_that_contradicts_its_declaration_is_visible_to_its_operator_only(
    declared: str, tmp_path: Path
) -> None:
    folder = node_folder(tmp_path, extra=declared + "\n")
    assert len(open_node(folder).held) == 12, "a running node does not refuse by its data"
    with pytest.raises(DataError):
        checked_node(folder)
    done = CliRunner().invoke(app, ["deploy", "check", str(folder)])
    assert done.exit_code != 0


def test_an_operator_checks_a_node_before_it_joins(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, extra="records = 10\nclasses = 3\nlabels = [0, 1, 2]\n")
    done = CliRunner().invoke(app, ["deploy", "check", str(folder), "--json"], catch_exceptions=False)
    declared = {
        "records": 10,
        "classes": 3,
        "labels": [0, 1, 2],
        "target": "classes",
        "rows_per_person": None,
    }
    assert json.loads(done.stdout) == {"node": "node-0", "examples": 12, "declared": declared}


def test_the_number_that_is_announced_and_charged_is_the_declared_one(tmp_path: Path) -> None:
    folder = node_folder(tmp_path, extra="records = 10\n")
    with np.load(folder / "data.npz") as held:
        np.savez(folder / "data.npz", x=held["x"][:11], y=held["y"][:11])
    assert open_node(folder).declared.records == 10
