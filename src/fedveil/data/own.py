"""Your own data as clients: arrays, a torch dataset, or a folder with one folder or one file per client.

A folder of clients may hold, for every client, either a folder of pictures (`<client>/<class>/*.png`) or one
file (`<client>.csv`, `.parquet` or `.npz` with arrays x and y), all of one kind. An entry named `test` is not
a client: it is held out.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fedveil.data.client_data import ArrayClients
from fedveil.data.columns import ColumnOptions, classes_of, fit_schema
from fedveil.data.dataset import (
    Dataset,
    Examples,
    check_fraction,
    images_from_bytes,
    labels_from,
    require_labels_below,
    stratified_split,
)
from fedveil.data.files import given_file
from fedveil.data.notes import Statistics, check_statistics, person_note, statistics_note
from fedveil.data.pictures import class_folders, given_folder, list_pictures, read_pictures
from fedveil.data.raw_table import joined, read_table
from fedveil.data.schema import Decimal, Missing, TableSchema, read_schema
from fedveil.data.table import table_examples
from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch
from fedveil.losses import Target

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = "np.ndarray | Tensor"
_TEST = "test"
_FILES = (".csv", ".parquet", ".npz")
_BOMB_RATIO = 1100  # deflate's most is 1032


@dataclass(frozen=True)
class OwnData:
    """Clients with their names in the order of the client axis, what was held out, and the classes."""

    clients: ArrayClients
    names: tuple[str, ...]
    classes: tuple[str, ...]
    test: Examples | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """`x * std + mean` is the value in the file, per feature or channel; empty where x is that already."""
    schema: TableSchema | None = None
    """Of tables."""


def examples_from_arrays(
    x: Array, y: Array, *, num_classes: int | None = None, field: str = "data"
) -> Examples:
    """Examples from NumPy or torch arrays: any real numbers for x, whole numbers from 0 on for y."""
    features = _tensor(x, f"{field}: x")
    if features.is_complex():
        raise DataError(f"{field}: x holds complex numbers.")
    with np.errstate(over="ignore"):
        features = features.to(torch.float32)
    labels = _whole_numbers(_tensor(y, f"{field}: y"), f"{field}: y")
    try:
        examples = Examples(features, labels)
    except DataError as error:
        raise DataError(f"{field}: {error}") from error
    if num_classes is not None:
        require_labels_below(labels, num_classes, field)
    return examples


def examples_from_torch(dataset: Any, *, num_classes: int | None = None) -> Examples:
    """Examples from a map-style `torch.utils.data.Dataset` whose items are (x, label).

    Args:
        dataset: The dataset.
        num_classes: Number of classes, where the labels do not show it.

    Returns:
        The examples in memory.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise InputError(
            "dataset", type(dataset).__name__, "has no length or items", "Use a map-style dataset."
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty.")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for position in range(len(dataset)):
        item = dataset[position]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"item {position} of the dataset is not a pair (x, label).")
        xs.append(_tensor(item[0], f"item {position}: x"))
        ys.append(_tensor(item[1], f"item {position}: label"))
        if xs[-1].shape != xs[0].shape or ys[-1].numel() != 1:
            raise DataError(
                f"item {position} has shape {list(xs[-1].shape)} where item 0 has {list(xs[0].shape)}, "
                "or more than one label."
            )
    return examples_from_arrays(
        torch.stack(xs), torch.stack([y.reshape(()) for y in ys]), num_classes=num_classes, field="dataset"
    )


def clients_from_arrays(
    clients: Sequence[tuple[Array, Array]],
    *,
    test: tuple[Array, Array] | None = None,
    names: Sequence[str] | None = None,
) -> OwnData:
    """One (x, y) pair of NumPy or torch arrays per client."""
    if names is None:
        names = [f"client {number}" for number in range(len(clients))]
    if len(names) != len(clients):
        raise InputError("names", list(names), f"there are {len(clients)} clients", "Give one name for each.")
    parts = [examples_from_arrays(x, y, field=name) for (x, y), name in zip(clients, names, strict=True)]
    held_out = None if test is None else examples_from_arrays(*test, field=_TEST)
    highest = max((int(e.y.max()) for e in [*parts, *([held_out] if held_out else [])] if len(e)), default=-1)
    return _own(parts, names, tuple(str(label) for label in range(highest + 1)), held_out)


def clients_from_folder(
    folder: str | Path,
    *,
    label: str | None = None,
    categorical: Sequence[str] = (),
    numeric: Sequence[str] = (),
    drop: Sequence[str] = (),
    missing: Missing = "refuse",
    decimal: Decimal = ".",
    target: Target = "classes",
    event: str | None = None,
    intervals: Sequence[float] = (),
    schema: TableSchema | None = None,
    channels: int = 3,
) -> OwnData:
    """Read the clients in a folder, in rising order of their names; see this module for the layouts.

    Args:
        folder: The folder.
        label: The column of the labels; tables need it.
        categorical: Columns whose values are categories.
        numeric: Columns whose values are numbers.
        drop: Columns that are left out.
        missing: What becomes of missing cells.
        decimal: The decimal mark of numbers.
        target: What tables predict: "classes", a "number", or "survival", whose label is a time.
        event: Of survival, the column that is 1 where the time is that of an event, 0 where it is censored.
        intervals: Of survival, the ends of the intervals of discrete-time hazards; without them Cox's loss is used.
        schema: Public scales and categories. Without one, columns are standardised over all clients' rows together,
            which suits a simulation: real clients would have to agree on a schema first.
        channels: Of pictures, which are normalised to -1..1.

    Returns:
        The clients, their names and their classes.
    """
    root = Path(folder)
    try:
        entries = sorted(inner for inner in root.iterdir() if inner.name[0] != ".")
    except OSError as error:
        raise DataError(f"{root}: cannot be read as a folder ({error.strerror}).") from error
    entries = [entry for entry in entries if entry.is_dir() or entry.suffix.lower() in _FILES]
    kinds = {"folder" if entry.is_dir() else entry.suffix.lower() for entry in entries}
    if len(kinds) != 1:
        problem = "holds no client" if not kinds else f"mixes {' and '.join(sorted(kinds))}"
        raise DataError(
            f"{root}: {problem}. Use one folder per client or one file per client ({', '.join(_FILES)})."
        )
    clients = [entry for entry in entries if entry.stem != _TEST]
    held_out = [entry for entry in entries if entry.stem == _TEST]
    if not clients:
        raise DataError(f"{root}: holds a test entry but no client.")
    names = [entry.stem if entry.is_file() else entry.name for entry in clients]
    kind = kinds.pop()
    if kind == "folder":
        return _from_pictures(clients, held_out, names, channels)
    if kind == ".npz":
        arrays = [read_npz(path) for path in clients]
        return clients_from_arrays(arrays, test=read_npz(held_out[0]) if held_out else None, names=names)
    if label is None:
        raise InputError("label", None, "tables need it", "Name the column to predict.")
    options = ColumnOptions(
        categorical, numeric, drop, missing, decimal, target=target, event=event, intervals=intervals
    )
    return _from_tables(clients, held_out, names, label, options, schema)


def load_client_folder(
    *,
    path: str | Path,
    data_dir: Path | None = None,
    label: str | None = None,
    categorical: Sequence[str] = (),
    numeric: Sequence[str] = (),
    drop: Sequence[str] = (),
    missing: Missing = "refuse",
    decimal: Decimal = ".",
    target: Target = "classes",
    event: str | None = None,
    intervals: Sequence[float] = (),
    statistics: Statistics = "rows",
    schema: str | Path | None = None,
    channels: int = 3,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A folder of clients as a dataset whose users are the clients; `partition.kind = "user"` keeps them apart.

    Without an entry named `test` each client gives `test_fraction` of its examples, fixed by the seed.
    """
    root = given_folder(path, data_dir)
    check_fraction("test_fraction", test_fraction)
    check_statistics(statistics, None, schema is not None)
    own = clients_from_folder(
        root,
        label=label,
        categorical=categorical,
        numeric=numeric,
        drop=drop,
        missing=missing,
        decimal=decimal,
        target=target,
        event=event,
        intervals=intervals,
        schema=None if schema is None else read_schema(given_file("schema", schema, data_dir)),
        channels=channels,
    )
    users = torch.repeat_interleave(torch.tensor(own.clients.sizes))
    train, test = Examples(own.clients.x, own.clients.y, users), own.test
    if test is None:
        kept, held = stratified_split(users.numpy(), test_fraction, seed, "client-folder")
        train, test = train.take(kept.sort().values), train.take(held.sort().values)
    width = train.x.shape[1] if train.x.dim() > 1 else 1
    mean, std = own.mean or (0.0,) * width, own.std or (1.0,) * width
    summary = f"{len(train)} + {len(test)} examples of {len(own.names)} clients"
    name = f"client-folder:{root.name}"
    tables = own.schema is not None
    return Dataset(
        name,
        train,
        test,
        own.classes,
        mean,
        std,
        summary,
        user_names=own.names,
        schema=own.schema,
        notes=(statistics_note(schema is not None, statistics), person_note(None, None)) if tables else (),
    )


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Arrays x and y of an .npz file."""
    return read_npz_array(path, "x"), read_npz_array(path, "y")


def read_npz_array(path: Path, name: str) -> np.ndarray:
    """One array of an .npz file. Pickled objects are refused, and so is an array that its header declares
    larger than the file can hold, before memory is taken for it."""
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{name}.npy" not in archive.namelist():
                raise DataError(f"{path}: there is no array {name} in it.")
            _check_npy(archive, f"{name}.npy", path)
        with np.load(path, allow_pickle=False) as arrays:
            found: np.ndarray = arrays[name]
            return found
    except DataError:
        raise
    except Exception as error:  # a damaged archive can fail in any way at all
        raise DataError(f"{path}: not an .npz file that can be read ({type(error).__name__}).") from error


def _check_npy(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    member = archive.getinfo(name)
    if member.file_size > _BOMB_RATIO * max(member.compress_size, 1):
        raise DataError(f"{path}: array {name[0]} claims {member.file_size} bytes, more than it can hold.")
    with archive.open(name) as stream:
        version = np.lib.format.read_magic(stream)
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(stream)
    if dtype.hasobject or dtype.kind not in "fiub":
        raise DataError(f"{path}: array {name[0]} holds something other than numbers.")
    if math.prod(shape) * dtype.itemsize > member.file_size:
        raise DataError(f"{path}: array {name[0]} declares shape {list(shape)}, more than the file holds.")


def _from_pictures(
    clients: Sequence[Path], held_out: Sequence[Path], names: Sequence[str], channels: int
) -> OwnData:
    folders = [*clients, *held_out]
    classes = tuple(sorted({name for folder in folders for name in class_folders(folder)}))
    half = (0.5,) * channels
    made: list[Examples] = []
    for folder in folders:
        listed = list_pictures(folder, classes)
        pixels = read_pictures([picture for picture, _ in listed], channels)
        x, _, _ = images_from_bytes(pixels, half, half)
        made.append(Examples(x, labels_from(np.array([label for _, label in listed]))))
    own = _own(made[: len(clients)], names, classes, made[-1] if held_out else None)
    return replace(own, mean=half, std=half)


def _from_tables(
    clients: Sequence[Path],
    held_out: Sequence[Path],
    names: Sequence[str],
    label: str,
    options: ColumnOptions,
    schema: TableSchema | None,
) -> OwnData:
    tables = [read_table(path) for path in clients]
    test = read_table(held_out[0]) if held_out else None
    for table in tables[1:]:
        if set(table.columns) != set(tables[0].columns):
            raise DataError(f"{table.path}: has other columns than {tables[0].path}.")
    if schema is None:
        options.check(tables[0])
        classes = classes_of([*tables, *([test] if test else [])], label, options)
        everything = joined(tables, tables[0].path.parent)
        schema = fit_schema(everything, label=label, classes=classes, options=options)
    made = [table_examples(schema, table) for table in tables]
    own = _own(made, names, schema.classes, None if test is None else table_examples(schema, test))
    return replace(own, mean=schema.mean, std=schema.std, schema=schema)


def _own(
    parts: Sequence[Examples], names: Sequence[str], classes: tuple[str, ...], test: Examples | None
) -> OwnData:
    for name, examples in zip(names, parts, strict=True):
        if len(examples) == 0:
            raise DataError(f"{name}: has no example. Leave this client out.")
        if examples.x.shape[1:] != parts[0].x.shape[1:]:
            raise DataError(
                f"{name}: examples of shape {list(examples.x.shape[1:])} where {names[0]} has "
                f"{list(parts[0].x.shape[1:])}; clients must be alike."
            )
        if classes:
            require_labels_below(examples.y, len(classes), name)
    if test is not None and parts:
        if test.x.shape[1:] != parts[0].x.shape[1:]:
            raise DataError(f"{_TEST}: examples of another shape than the clients'.")
        if classes:
            require_labels_below(test.y, len(classes), _TEST)
    clients = ArrayClients.from_arrays([(examples.x, examples.y) for examples in parts])
    return OwnData(clients, tuple(names), classes, test)


def _tensor(value: object, field: str) -> Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{field} holds {array.dtype}, not numbers.")
    if array.dtype.kind == "f" and array.dtype.itemsize not in (2, 4, 8):
        array = array.astype(np.float64)
    return torch.from_numpy(
        np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape)
    )


def _whole_numbers(values: Tensor, field: str) -> Tensor:
    if values.is_floating_point():
        if not bool((values == values.round()).all()) or not bool((values.abs() < 2**53).all()):
            raise DataError(f"{field} holds labels that are not whole numbers.")
    elif values.is_complex():
        raise DataError(f"{field} holds complex numbers.")
    return values.to(torch.int64)
