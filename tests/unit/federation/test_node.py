"""A node is opened from its own folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.data.columns import schema_of
from fedveil.data.schema import read_schema, write_schema
from fedveil.data.vocabulary import HashVocabulary
from fedveil.errors import DataError
from fedveil.features import normalise
from fedveil.features.feature_map import ScatteringFeatures
from fedveil.federation.node import NodeClients, open_node, unknown_in
from tests.refusals import refuses
from tests.unit.federation.makers import OPEN_POLICY, node_folder

TABLE = "age,kind,ill\n40,a,yes\n50,b,no\n60,a,no\n"


def test_arrays_are_read_as_they_are(tmp_path: Path) -> None:
    node = open_node(node_folder(tmp_path, client=3))
    with np.load(tmp_path / "data.npz", allow_pickle=False) as stored:
        torch.testing.assert_close(node.examples.x, torch.from_numpy(stored["x"]), rtol=0, atol=0)
    assert (node.name, node.client, node.directory) == ("node-3", 3, tmp_path)
    clients = NodeClients(node.client, node.examples, (0, 1, 2))
    data = clients.load([3])
    assert data.x.shape == (1, 12, 8)
    assert data.sizes.tolist() == [12]
    with refuses("clients"):
        clients.load([0])


def test_a_node_computes_features_from_brightness_and_keeps_them_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalise, "COUNT", 16)
    normalise.constants.cache_clear()
    made = ScatteringFeatures(depth=1, angles=2)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8), dtype=np.uint8)
    pictures, arrays = tmp_path / "pictures", tmp_path / "arrays"
    for folder, data in (
        (pictures, 'reader = "pictures"\nclasses = ["a"]\nchannels = 1'),
        (arrays, 'reader = "npz"'),
    ):
        folder.mkdir()
        (folder / "node.toml").write_text(f'name = "n"\nclient = 0\n[data]\npath = "data"\n{data}\n')
        (folder / "policy.toml").write_text(OPEN_POLICY)
    (pictures / "data" / "a").mkdir(parents=True)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(pictures / "data" / "a" / f"{number}.png")
    with (arrays / "data").open("wb") as file:
        np.savez(file, x=(pixels[:, None] / 255).astype(np.float32), y=np.zeros(2, np.int64))
    one, other = (open_node(folder).features(made) for folder in (pictures, arrays))
    assert one.x.shape == (2, *made.shape((1, 8, 8)))
    torch.testing.assert_close(one.x, other.x, atol=2e-3, rtol=0)
    for folder in (pictures, arrays):
        assert len(list((folder / "state" / "features").iterdir())) == 1


def test_noise_is_entropy_unless_the_nodes_own_file_declares_a_test(tmp_path: Path) -> None:
    assert open_node(node_folder(tmp_path / "a")).noise == "entropy"
    tested = node_folder(tmp_path / "b", extra="[testing]\nseeded_noise = true\n")
    assert open_node(tested).noise == "seeded"


def test_the_state_folder_is_private(tmp_path: Path) -> None:
    node = open_node(node_folder(tmp_path))
    assert node.state == tmp_path / "state"
    assert node.state.stat().st_mode & 0o077 == 0


def _table_node(folder: Path, table: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "data.csv").write_text(table)
    (folder / "node.toml").write_text(
        'name = "t"\nclient = 0\n[data]\nreader = "table"\npath = "data.csv"\nschema = "schema.toml"\n'
    )
    (folder / "policy.toml").write_text(OPEN_POLICY)
    return folder


def test_tables_follow_the_agreed_form_not_their_own_rows(tmp_path: Path) -> None:
    public = tmp_path / "public.csv"
    public.write_text(TABLE)
    schema = schema_of(public, "ill")
    node = _table_node(tmp_path / "node", "ill,age,kind\nno,50,b\nno,90,c\n")
    write_schema(schema, node / "schema.toml")
    assert read_schema(node / "schema.toml") == schema
    examples = open_node(node).examples
    std = float(np.std([40, 50, 60]))
    torch.testing.assert_close(examples.x, torch.tensor([[0.0, 0.0, 1.0], [40 / std, 0.0, 0.0]]))
    assert examples.y.tolist() == [0, 0], "the classes are the schema's: no, yes"


def test_an_operator_is_told_of_categories_that_the_schema_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "public.csv").write_text("ill,age,kind\nyes,70,a\nno,50,b\n")
    (tmp_path / "node").mkdir()
    write_schema(schema_of(tmp_path / "public.csv", label="ill"), tmp_path / "node" / "schema.toml")
    node = _table_node(tmp_path / "node", "kind;age;ill\nA;50;no\nb;90;no\nc;20;yes\n")
    assert unknown_in(open_node(node)) == {"kind": 2}
    done = CliRunner().invoke(app, ["deploy", "check", str(node), "--json"], catch_exceptions=False)
    assert json.loads(done.stdout)["unknown_categories"] == {"kind": 2}


def test_pictures_follow_the_agreed_classes(tmp_path: Path) -> None:
    folder = node_folder(tmp_path)
    (folder / "scans" / "ill").mkdir(parents=True)
    Image.new("L", (4, 4), 255).save(folder / "scans" / "ill" / "1.png")
    head = 'name = "p"\nclient = 0\n[data]\nreader = "pictures"\npath = "scans"\nchannels = 1\n'
    (folder / "node.toml").write_text(head + 'classes = ["healthy", "ill"]\n')
    examples = open_node(folder).examples
    assert examples.y.tolist() == [1]
    assert examples.x.tolist() == torch.ones(1, 1, 4, 4).tolist()
    (folder / "node.toml").write_text(head + 'classes = ["other"]\n')
    with refuses("data.classes", DataError):
        open_node(folder)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "node.toml: name"),
        ('name = "../a"\nclient = 0\n', "node.toml: name"),
        ('name = "a"\nclient = -1\n[data]\nreader = "npz"\npath = "x"', "node.toml: client"),
        ('name = "a"\nclient = 0\n[data]\nreader = "pickle"\npath = "x"', "node.toml: data.reader"),
        ('name = "a"\nclient = 0\n[data]\nreader = "table"\npath = "x"', "data.schema"),
        ('name = "a"\nclient = 0\n[data]\nreader = "pictures"\npath = "x"', "data.classes"),
        ('name = "a"\nclient = 0\nnoise = "seeded"\n[data]\nreader = "npz"\npath = "x"', "node.toml: noise"),
    ],
)
def test_an_invalid_node_file_is_refused(tmp_path: Path, text: str, field: str) -> None:
    folder = node_folder(tmp_path)
    (folder / "node.toml").write_text(text)
    with refuses(field):
        open_node(folder)


def test_a_folder_that_is_no_node_and_data_that_is_missing(tmp_path: Path) -> None:
    with refuses("file"):
        open_node(tmp_path)
    folder = node_folder(tmp_path)
    (folder / "data.npz").unlink()
    with refuses("data.path", DataError):
        open_node(folder)


def _text_node(folder: Path, lines: str) -> Path:
    node_folder(folder)
    (folder / "notes.tsv").write_text(lines)
    (folder / "node.toml").write_text(
        'name = "w"\nclient = 0\n[data]\nreader = "texts"\npath = "notes.tsv"\nclasses = ["well", "ill"]\n'
    )
    return folder


def test_texts_become_tokens_of_the_runs_vocabulary(tmp_path: Path) -> None:
    node = open_node(_text_node(tmp_path, "fever and cough\till\nfine\twell\n"))
    assert len(node.held) == 2
    examples = node.tokens(HashVocabulary(50), length=4, too_long="truncate")
    assert examples.y.tolist() == [1, 0], "the classes are those of node.toml, in its order"
    (expected,) = HashVocabulary(50).encode(["fever and cough"])
    assert examples.x[0].tolist() == [*expected, 0]
    with refuses("data.reader", value="texts"):
        _ = node.examples
    with refuses("data.reader", value="numbers"):
        open_node(node_folder(tmp_path / "n")).tokens(HashVocabulary(50), length=4, too_long="truncate")


@pytest.mark.parametrize(
    ("lines", "field", "line"),
    [
        ("a text\n", "line", 1),
        ("a text\tdead\n", "label", 1),
        ("a text\till\n \till\n", "line", 2),
    ],
)
def test_wrong_texts_are_named_by_line_and_never_quoted(
    lines: str, field: str, line: int, tmp_path: Path
) -> None:
    with refuses(field, DataError, value=line) as caught:
        open_node(_text_node(tmp_path, lines))
    assert "a text\t" not in str(caught.value)
