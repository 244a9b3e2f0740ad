"""Every option of data sets and feature maps takes effect or is refused; so do keys that need another key.

An option is changed in each configuration below. Either the data set changes somewhere, or the change is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image

from fedveil import ArrayClients
from fedveil.data.dataset import Dataset, TextDataset
from fedveil.data.registry import dataset_options, list_datasets, load_dataset
from fedveil.errors import FedveilError, InputError
from fedveil.experiment.config import load_experiment
from fedveil.features.feature_map import ScatteringFeatures
from fedveil.session.run import make_plan
from tests.contract.test_ignored_fields import choices, same
from tests.refusals import refuses

SCHEMA = """label = "ill"
classes = ["no", "yes"]
[[column]]
name = "age"
low = 0
high = 100
[[column]]
name = "size"
mean = 170
std = 10
[[column]]
name = "ward"
categories = ["a", "b"]
"""
TABLE = ("person", "site", "age", "size", "ward", "days", "died", "ill")


def table(path: Path, rows: int = 60) -> Path:
    stream = np.random.default_rng(rows)
    lines = [",".join(TABLE)]
    for k in range(rows):
        age, size = stream.integers(20, 90), stream.normal(170, 10)
        days, died = stream.integers(1, 99), stream.integers(0, 2)
        cells = (f"p{k // 2}", f"s{k % 3}", age, f"{size:.1f}", "ab"[k % 2], days, died, ("no", "yes")[k % 2])
        lines.append(",".join(map(str, cells)))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def pictures(root: Path) -> Path:
    stream = np.random.default_rng(len(str(root.name)))
    for name in ("one", "two"):
        (root / name).mkdir(parents=True)
        for k in range(10):
            Image.fromarray(stream.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(root / name / f"{k}.png")
    return root


def arrays(path: Path) -> None:
    stream = np.random.default_rng(3)
    path.parent.mkdir(exist_ok=True)
    np.savez(path, x=stream.normal(size=(20, 3)), y=np.arange(20) % 2)


def a_table(here: Path) -> dict[str, Any]:
    return {"path": table(here / "t.csv"), "label": "ill", "drop": ["person", "site"]}


def a_table_with_gaps(here: Path) -> dict[str, Any]:
    options = a_table(here)
    options["path"].write_text(options["path"].read_text().replace(",b,", ",,"))
    return options | {"missing": "median"}


def a_table_with_a_test(here: Path) -> dict[str, Any]:
    return a_table(here) | {"test_path": table(here / "test.csv", 20)}


def a_table_of_persons(here: Path) -> dict[str, Any]:
    return a_table_with_a_test(here) | {"person": "person", "rows_per_person": 1, "drop": ["site"]}


def a_table_with_a_schema(here: Path) -> dict[str, Any]:
    (here / "schema.toml").write_text(SCHEMA)
    return {"path": table(here / "t.csv"), "label": "ill", "schema": here / "schema.toml"}


def survival(here: Path) -> dict[str, Any]:
    more = {"label": "days", "target": "survival", "event": "died", "intervals": [20.0, 50.0]}
    return a_table(here) | more | {"drop": ["person", "site", "ill"]}


def clients_of_tables(here: Path) -> dict[str, Any]:
    table(here / "all" / "n.csv"), table(here / "all" / "s.csv", 40)
    return {"path": here / "all", "label": "ill", "drop": ["person", "site"]}


def clients_of_tables_with_a_test(here: Path) -> dict[str, Any]:
    table(here / "all" / "test.csv", 30)
    return clients_of_tables(here)


def clients_of_tables_with_a_schema(here: Path) -> dict[str, Any]:
    (here / "schema.toml").write_text(SCHEMA)
    return clients_of_tables(here) | {"schema": here / "schema.toml"}


def clients_of_pictures(here: Path) -> dict[str, Any]:
    pictures(here / "all" / "n"), pictures(here / "all" / "south")
    return {"path": here / "all"}


def clients_of_arrays(here: Path) -> dict[str, Any]:
    arrays(here / "all" / "n.npz")
    arrays(here / "all" / "s.npz")
    return {"path": here / "all"}


def one_folder(here: Path) -> dict[str, Any]:
    return {"path": pictures(here / "all")}


def two_folders(here: Path) -> dict[str, Any]:
    pictures(here / "all" / "train"), pictures(here / "all" / "test")
    return {"path": here / "all"}


def texts(here: Path) -> dict[str, Any]:
    (here / "t.txt").write_text("".join(f"word {k} is here\n" for k in range(40)))
    return {"path": here / "t.txt"}


def labelled_texts(here: Path) -> dict[str, Any]:
    (here / "t.tsv").write_text("".join(f"word {k} is here\t{'ab'[k % 2]}\n" for k in range(40)))
    return {"path": here / "t.tsv"}


def nothing(_: Path) -> dict[str, Any]:
    return {}


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], ...]] = {
    "digits": (nothing,),
    "table": (
        a_table,
        a_table_with_gaps,
        a_table_with_a_test,
        a_table_of_persons,
        a_table_with_a_schema,
        survival,
    ),
    "client-folder": (
        clients_of_tables,
        clients_of_tables_with_a_test,
        clients_of_tables_with_a_schema,
        clients_of_pictures,
        clients_of_arrays,
    ),
    "image-folder": (one_folder, two_folders),
    "text": (texts,),
    "labelled-text": (labelled_texts,),
}
"""Configurations of the data sets that need no download."""
OTHERS: dict[str, tuple[Any, ...]] = {
    "label": ("ward", "age"),
    "user": ("site",),
    "person": ("person", "site"),
    "categorical": (["died"], ["age"]),
    "numeric": (["ward"], ["age"]),
    "drop": (["person", "site", "size"], ["age"]),
    "missing": ("median", "drop", "category"),
    "decimal": (",",),
    "limit": (0.5,),
    "unit_norm": (True,),
    "target": ("number", "survival"),
    "event": ("ill",),
    "intervals": ([30.0, 60.0],),
    "statistics": ("public", "private"),
    "statistics_noise": (5.0,),
    "test_fraction": (0.5,),
    "seed": (7,),
    "normalise": ("unit",),
    "pad_to": (12,),
    "channels": (1,),
}
FILES = ("path", "schema", "test_path")  # others are other data
COMPLETE = tuple(
    case for case in (*CASES["table"], *CASES["client-folder"][:3]) if case is not a_table_with_gaps
)
"""Tables where no cell is missing, so that it makes no difference how missing cells are treated."""


def seen(value: Any) -> Any:
    """What a data set is, for a comparison."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [seen(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        return [seen(one) for one in value]
    return value


def loaded(name: str, options: dict[str, Any]) -> Any:
    """The data set, or None if it is refused."""
    try:
        found = load_dataset(name, **options)
    except FedveilError:
        return None
    assert isinstance(found, Dataset | TextDataset)
    return seen(found)


EXAMINED = [
    pytest.param(name, case, option, id=f"{case.__name__}-{option}")
    for name, cases in CASES.items()
    for case in cases
    for option in dataset_options(name)
    if option not in FILES and not (option == "missing" and case in COMPLETE)
]


@pytest.mark.parametrize(("name", "case", "option"), EXAMINED)
def test_no_option_of_a_data_set_is_ignored_silently(
    name: str, case: Callable[[Path], dict[str, Any]], option: str, tmp_path: Path
) -> None:
    options = case(tmp_path)
    plain = loaded(name, options)
    assert plain is not None
    values = (
        [3] if option in ("max_train", "max_test", "max_per_class", "rows_per_person") else OTHERS[option]
    )
    others = [loaded(name, options | {option: value}) for value in values]
    assert any(other is None or not same(plain, other) for other in others)


def test_every_data_set_of_ones_own_is_examined() -> None:
    own = {"table", "client-folder", "image-folder", "text", "labelled-text"}
    assert own <= set(CASES) <= {info.name for info in list_datasets()}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ScatteringFeatures)])
def test_no_option_of_the_scattering_is_ignored_silently(field: str) -> None:
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    kind = get_type_hints(ScatteringFeatures, include_extras=True)[field]
    start: dict[str, Any] = {"angles": 4}
    now = getattr(ScatteringFeatures(**start), field)
    numbers: dict[str, list[Any]] = {"depth": [1], "angles": [3], "pooling": [2], "whitening": [0.0]}
    others = choices(kind) or numbers[field]
    plain = ScatteringFeatures(**start).compute(images)
    for other in others:
        found = ScatteringFeatures(**start | {field: other}).compute(images)
        assert same(plain, found) == (other == now or {other, now} == {"auto", "strokes"})


def test_a_cohort_of_a_sampler_that_takes_all_is_refused() -> None:
    pairs = [(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)) for _ in range(4)]
    clients = ArrayClients.from_arrays(pairs)
    assert make_plan(clients, rounds=1, cohort=4, sampler="all").cohort == 4
    with refuses("run.cohort", InputError, value=2):
        make_plan(clients, rounds=1, cohort=2, sampler="all")


@pytest.mark.parametrize(
    ("model", "text", "field"),
    [
        ("mlp-2", "length = 5", "task.text"),
        ("lstm", 'vocabulary = "bytes"\nsize = 99', "task.text.size"),
        ("lstm", "pack = false", "task.text.pack"),
        ("lstm", 'vocabulary = "hash"\nsize = 99\nlength = 5', None),
        ("causal-lm", "pack = false", None),
    ],
)
def test_keys_of_texts_that_are_not_read_are_refused(
    model: str, text: str, field: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[task]\nmodel = "{model}"\n[task.text]\n{text}\n')
    if field is None:
        load_experiment(path)
        return
    with refuses(field, InputError):
        load_experiment(path)
