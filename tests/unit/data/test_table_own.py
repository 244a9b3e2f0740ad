from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from fedveil.data.own import (
    clients_from_arrays,
    clients_from_folder,
    examples_from_arrays,
    examples_from_torch,
    load_client_folder,
    read_npz,
)
from fedveil.data.schema import Column, TableSchema
from fedveil.data.table import load_table
from fedveil.data.text import load_labelled_text
from fedveil.errors import DataError, InputError
from tests.refusals import refuses

CSV = "age,town,income,who,label\n" + "".join(
    f"{20 + k},{'north' if k % 3 else 'south'},{1000.5 * k},u{k % 4},{k % 2}\n" for k in range(40)
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "people.csv"
    path.write_text(CSV)
    return path


def test_numbers_are_standardised_with_the_training_split_and_categories_one_hot(table: Path) -> None:
    dataset = load_table(path=table, label="label", user="who")
    assert dataset.input_shape == (4,)  # age, north, south, income
    x = dataset.train.x.double()
    assert torch.allclose(x[:, [0, 3]].mean(0), torch.zeros(2).double(), atol=1e-6)
    assert torch.allclose(x[:, [0, 3]].std(0, correction=0), torch.ones(2).double(), atol=1e-6)
    assert torch.equal(x[:, 1] + x[:, 2], torch.ones(32).double())
    assert not torch.allclose(dataset.test.x[:, 0].mean(), torch.zeros(()), atol=1e-6)
    back = dataset.train.x[:, 0].double() * dataset.std[0] + dataset.mean[0]
    assert torch.allclose(back, back.round(), atol=1e-4)  # ages again
    assert dataset.mean[1:3] == (0.0, 0.0)
    assert dataset.std[1:3] == (1.0, 1.0)


def test_the_user_column_gives_ids_and_is_no_feature(table: Path) -> None:
    dataset = load_table(path=table, label="label", user="who")
    assert dataset.train.users is not None
    assert dataset.test.users is not None
    ages = (dataset.train.x[:, 0].double() * dataset.std[0] + dataset.mean[0]).round().long()
    people: dict[int, int] = {}
    for age, user in zip(ages.tolist(), dataset.train.users.tolist(), strict=True):
        assert people.setdefault((age - 20) % 4, user) == user
    assert sorted(people.values()) == [0, 1, 2, 3]
    assert load_table(path=table, label="label", drop=["who"]).input_shape == (4,)
    assert load_table(path=table, label="label", categorical=["age"], drop=["who"]).input_shape[0] > 30


def test_a_test_table_and_a_given_form_are_used_as_they_are(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "test.csv"
    other.write_text("age,town,income,who,label\n30,north,10,u9,1\n")
    schema = TableSchema(
        "label", ("0", "1"), (Column("age", None, 30.0, 10.0), Column("town", ("north", "south")))
    )
    dataset = load_table(path=table, label="label", test_path=other, schema=schema)
    assert dataset.test.x.tolist() == [[0.0, 1.0, 0.0]]
    assert dataset.train.x[0].tolist() == [-1.0, 0.0, 1.0]
    other.write_text("age,town,income,who,label\n30,north,10,u9,1\n30,west,10,u9,1\n")
    with refuses("town", DataError, value=1):  # counted from 0
        load_table(path=table, label="label", test_path=other, schema=schema)
    found = load_table(path=table, label="label", test_path=other)  # its own schema is of the training rows
    assert found.schema is not None
    assert len(found.test) == 2


def test_labels_are_sorted_as_numbers_or_as_names(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{k},{label}\n" for k, label in enumerate(["10", "9", "2"] * 5)))
    assert load_table(path=path, label="y").classes == ("2", "9", "10")
    path.write_text("a,y\n" + "".join(f"{k},{label}\n" for k, label in enumerate(["yes", "no"] * 5)))
    assert load_table(path=path, label="y").classes == ("no", "yes")


@pytest.mark.parametrize(
    "content, field",
    [
        ("a,b\n1,2\n", "label"),
        ("a,y\n1,0\n2\n", "csv"),
        ("a,y\n1,0\n2,1,3\n", "csv"),
        ("a,y\n", "rows"),
        ("a,a,y\n1,1,1\n", "header"),
        ("\n1,1\n", "header"),
        ("a,y\n1,3\n2,3\n", "y"),
        ("a,y\n1,0\nold,1\n3,1\n", "a"),
        ("a,y\n,0\n1,1\n", "missing"),
        ("a,y\nnan,0\n1,1\n", "missing"),
        ("a,y\ninf,0\n1,1\n", "a"),
        ("a,y\n1e300,0\n1,1\n", "a"),
        ("a,y\n1,0.5\n1,1\n", "y"),
        ("a,y\n1,\n1,1\n", "labels"),
        ("y\n0\n1\n", "columns"),
        ('a,y\n"1,0\n1,1\n', "csv"),
        ("a,y\n1,\udcff\n", "line"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, content: str, field: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with refuses(field, DataError):
        load_table(path=path, label="y", test_fraction=0.0)


@pytest.mark.parametrize("mark", ["NaN", "nan", "NA", "n/a", "<NA>", "null", " ", ""])
def test_a_missing_label_is_no_class(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "1,yes\n2,no\n" * 5 + f"3,{mark}\n" * 2)
    with refuses("labels", DataError, value=2):
        load_table(path=path, label="y")
    (tmp_path / "clients").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / "clients" / name).write_text(path.read_text())
    with refuses("labels", DataError, value=2):
        clients_from_folder(tmp_path / "clients", label="y")
    path.write_text("good\tyes\nbad\tno\n" * 5 + f"strange\t{mark or 'nan'}\n")
    with pytest.raises(DataError) as caught:
        load_labelled_text(path=path)
    assert (caught.value.field, caught.value.value) in (("labels", 1), ("line", 11))


def test_a_missing_label_in_parquet_is_no_class(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"a": [float(k) for k in range(12)], "y": [0.0, 1.0] * 5 + [float("nan"), None]}
    parquet.write_table(arrow.table(table), tmp_path / "t.parquet")
    with refuses("labels", DataError, value=2):
        load_table(path=tmp_path / "t.parquet", label="y")


def test_classes_that_are_declared_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "1,NA\n2,EU\n" * 5)
    schema = TableSchema("y", ("EU", "NA"), (Column("a", None),))
    assert load_table(path=path, label="y", schema=schema).classes == ("EU", "NA")


def test_a_row_without_a_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("who,a,y\n" + "u1,1,0\nu2,2,1\n" * 5 + " ,3,0\n")
    with refuses("missing", DataError):
        load_table(path=path, label="y", user="who")


def test_declared_codes_among_numbers_are_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("ward,y\n" + "1,0\n2,1\n3A,0\n" * 5)
    assert load_table(path=path, label="y", categorical=["ward"]).input_shape == (3,)


def test_the_row_that_is_named_is_the_files_and_so_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{k if k != 29 else ''},{k % 2}\n" for k in range(1, 41)))
    with refuses("missing", DataError):
        load_table(path=path, label="y")
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "a.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "clients" / "b.csv").write_text("a,y\n1,0\n,1\n")
    with refuses("missing", DataError):
        clients_from_folder(tmp_path / "clients", label="y")


def test_a_constant_column_becomes_zeros(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,y\n" + "7,1,0\n7,2,1\n" * 5)
    assert load_table(path=path, label="y").train.x[:, 0].tolist() == [0.0] * 8


def test_parquet_reads_as_csv(table: Path, tmp_path: Path) -> None:
    rows = [line.split(",") for line in CSV.strip().split("\n")]
    columns = {name: [row[k] for row in rows[1:]] for k, name in enumerate(rows[0])}
    made = pyarrow.table(
        {
            "age": [int(v) for v in columns["age"]],
            "town": columns["town"],
            "income": [float(v) for v in columns["income"]],
            "who": columns["who"],
            "label": [int(v) for v in columns["label"]],
        }
    )
    path = tmp_path / "people.parquet"
    pyarrow.parquet.write_table(made, path)
    a, b = load_table(path=path, label="label"), load_table(path=table, label="label")
    assert torch.equal(a.train.x, b.train.x)
    assert torch.equal(a.test.y, b.test.y)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0, None], "label": [0, 1]}), path)
    with refuses("missing", DataError):
        load_table(path=path, label="label", test_fraction=0.0)
    path.write_bytes(path.read_bytes()[:30])
    with refuses("parquet", DataError):
        load_table(path=path, label="label")


@pytest.mark.parametrize("kind", [np.float16, np.float64, ">f4", np.uint8, np.int64, np.longdouble, bool])
def test_arrays_of_any_number_become_examples(kind: Any) -> None:
    x = np.arange(6).reshape(3, 2).astype(kind)
    examples = examples_from_arrays(x, np.array([0, 1, 2], np.uint8), num_classes=3)
    assert examples.x.dtype == torch.float32
    assert np.array_equal(examples.x.numpy(), x.astype(np.float32))


@pytest.mark.parametrize(
    "x, y, field",
    [
        (np.zeros((2, 2)), np.array([0.5, 1.0]), "y"),
        (np.zeros((2, 2)), np.array([np.nan, 1.0]), "y"),
        (np.zeros((2, 2)), np.array([-1, 1]), "y"),
        (np.zeros((2, 2)), np.array([0, 3]), "y"),
        (np.zeros((2, 2)), np.array([0, 1, 2]), "y"),
        (np.zeros((2, 2)), np.array([[0], [1]]), "y"),
        (np.array([[1.0, np.inf]]), np.array([0]), "x"),
        (np.array([[1e300]]), np.array([0]), "x"),
        (np.array([["a"]]), np.array([0]), "dtype"),
        (np.array([[object()]]), np.array([0]), "dtype"),
        (torch.zeros(1, 1, dtype=torch.complex64), np.array([0]), "x"),
    ],
)
def test_wrong_arrays_are_refused(x: Any, y: Any, field: str) -> None:
    with refuses(field, DataError):
        examples_from_arrays(x, y, num_classes=3)


def test_clients_from_arrays() -> None:
    own = clients_from_arrays(
        [(np.ones((3, 2)), np.array([0, 1, 0])), (torch.zeros(1, 2), torch.tensor([4]))],
        test=(np.zeros((1, 2)), np.array([1])),
    )
    assert list(own.clients.sizes) == [3, 1]
    assert own.classes == ("0", "1", "2", "3", "4")
    data = own.clients.load([1, 0])
    assert data.sizes.tolist() == [1, 3]
    assert data.y[0, 0] == 4
    assert own.test is not None
    with refuses("clients", DataError, value="client 1"):
        clients_from_arrays([(np.ones((1, 2)), np.zeros(1)), (np.ones((1, 3)), np.zeros(1))])
    with refuses("clients", DataError, value="client 1"):
        clients_from_arrays([(np.ones((1, 2)), np.zeros(1)), (np.ones((0, 2)), np.zeros(0))])
    with refuses("clients"):
        clients_from_arrays([])


class Squares(torch.utils.data.Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_a_torch_dataset_becomes_examples() -> None:
    examples = examples_from_torch(Squares([(torch.ones(2) * k, k % 2) for k in range(4)]), num_classes=2)
    assert examples.x[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert examples.y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "items", [[], [1], [(torch.ones(2), 0), (torch.ones(3), 0)], [(torch.ones(2), [0, 1])], [("text", 0)]]
)
def test_a_wrong_torch_dataset_is_refused(items: list[Any]) -> None:
    with pytest.raises(DataError):
        examples_from_torch(Squares(items))
    with pytest.raises(InputError):
        examples_from_torch(iter([]))


def test_one_npz_per_client(tmp_path: Path) -> None:
    for name, n in (("ann", 2), ("bob", 3), ("test", 1)):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((n, 2)), y=np.arange(n))
    own = clients_from_folder(tmp_path)
    assert own.names == ("ann", "bob")
    assert list(own.clients.sizes) == [2, 3]
    assert own.test is not None
    assert len(own.test) == 1


def test_an_npz_with_objects_or_an_absurd_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([{}], dtype=object), y=np.zeros(1))
    with refuses("dtype", DataError, value="x"):
        read_npz(path)
    np.savez(path, x=np.ones(2))
    with refuses("y", DataError):
        read_npz(path)
    header = io.BytesIO()
    described = {"descr": "<f8", "fortran_order": False, "shape": (10**10, 10)}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", header.getvalue())
    with refuses("shape", DataError):
        read_npz(path)


def test_one_table_per_client_shares_one_form(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("v,colour,y\n1,red,0\n3,blue,1\n")
    (tmp_path / "b.csv").write_text("v,colour,y\n5,red,1\n")
    (tmp_path / "test.csv").write_text("v,colour,y\n3,red,0\n")
    (tmp_path / "readme.md").write_text("ignored")
    own = clients_from_folder(tmp_path, label="y")
    x = own.clients.load([0, 1]).x
    assert x[:, :, 0].tolist()[0] == pytest.approx([-1.2247449, 0.0])
    assert float(x[1, 0, 0]) == pytest.approx(1.2247449)
    assert own.test is not None
    assert own.test.x.tolist() == [[0.0, 0.0, 1.0]]
    with refuses("label"):
        clients_from_folder(tmp_path)
    (tmp_path / "b.csv").write_text("w,colour,y\n5,red,1\n")
    with refuses("columns", DataError):
        clients_from_folder(tmp_path, label="y")


def test_one_folder_of_pictures_per_client(tmp_path: Path) -> None:
    for name in ("ann/cat/1.png", "ann/dog/1.png", "bob/dog/1.png", "test/cat/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.new("L", (4, 4), 255).save(tmp_path / name)
    own = clients_from_folder(tmp_path, channels=1)
    assert (own.names, own.classes) == (("ann", "bob"), ("cat", "dog"))
    data = own.clients.load([0, 1])
    assert data.y[1, 0] == 1
    assert set(data.x[0].flatten().tolist()) == {1.0}
    (tmp_path / "carl.csv").write_text("a,y\n1,0\n")
    with refuses("folder", DataError):
        clients_from_folder(tmp_path)


def test_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    with refuses("folder", DataError):
        clients_from_folder(tmp_path)
    with refuses("folder", DataError):
        clients_from_folder(tmp_path / "none")
    np.savez(tmp_path / "test.npz", x=np.ones((1, 1)), y=np.zeros(1))
    with refuses("folder", DataError):
        clients_from_folder(tmp_path)


def test_whole_numbers_with_decimals_are_the_same_classes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,0.0\n2,1.000\n3,1\n4,0\n5,1.0\n6,0\n")
    data = load_table(path=tmp_path / "t.csv", label="y", test_fraction=0.34)
    assert data.classes == ("0", "1")
    assert sorted([*data.train.y.tolist(), *data.test.y.tolist()]) == [0, 0, 0, 1, 1, 1]


def test_a_bad_cell_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    """Also where the rows were split, or put together from several files, before they are looked at."""
    rows = [f"{k % 19},{k % 2}" for k in range(40)]
    path = tmp_path / "t.csv"
    for bad in (3, 17, 38):
        path.write_text("\n".join(["a,y", *(f"inf,{k % 2}" if k == bad else rows[k] for k in range(40))]))
        with refuses("a", DataError):
            load_table(path=path, label="y")
    folder = tmp_path / "clients"
    folder.mkdir()
    (folder / "north.csv").write_text("\n".join(["a,y", *rows]))
    (folder / "south.csv").write_text("a,y\n1,0\ninf,1\n")
    with refuses("a", DataError, value=41):
        clients_from_folder(folder, label="y")


def write_clients(folder: Path, *, test: bool) -> None:
    folder.mkdir()
    for number, name in enumerate(["north", "south", "west", *(["test"] if test else [])]):
        cells = [f"{10 * number + k},{k % 2}" for k in range(10)]
        (folder / f"{name}.csv").write_text("\n".join(["a,y", *cells]))


def test_a_folder_of_clients_has_a_name_and_its_users_are_the_clients(tmp_path: Path) -> None:
    write_clients(tmp_path / "split", test=False)
    dataset = load_client_folder(path=tmp_path / "split", label="y", numeric=["a"])
    assert dataset.train.users is not None
    assert dataset.train.users.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert dataset.user_names == ("north", "south", "west")
    written = (dataset.train.x[:, 0].double() * dataset.std[0] + dataset.mean[0]).round().long()
    assert torch.equal(written // 10, dataset.train.users)
    assert len(dataset.test) == 6
    write_clients(tmp_path / "given", test=True)
    given = load_client_folder(path="given", data_dir=tmp_path, label="y", numeric=["a"])
    assert (len(given.train), len(given.test)) == (30, 10)


def test_a_folder_of_arrays_or_pictures_is_a_dataset_too(tmp_path: Path) -> None:
    (tmp_path / "arrays").mkdir()
    for name in ("a", "b"):
        np.savez(tmp_path / "arrays" / f"{name}.npz", x=np.ones((5, 1, 4, 4)), y=np.arange(5) % 2)
    arrays = load_client_folder(path=tmp_path / "arrays")
    assert arrays.input_shape == (1, 4, 4)
    assert (arrays.mean, arrays.std) == ((0.0,), (1.0,))
    for client in ("a", "b"):
        for label in ("cat", "dog"):
            (tmp_path / "pictures" / client / label).mkdir(parents=True)
            for k in range(3):
                Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / client / label / f"{k}.png")
    pictures = load_client_folder(path=tmp_path / "pictures")
    assert pictures.classes == ("cat", "dog")
    assert pictures.mean == (0.5, 0.5, 0.5)
    with refuses("path", DataError):
        load_client_folder(path=tmp_path / "nowhere")
