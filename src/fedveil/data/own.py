"""The user's own data as clients: arrays, a torch dataset, or a folder with one folder or one file per client.

A folder of clients contains, for every client, either a folder of pictures (`<client>/<class>/*.png`) or one
file (`<client>.csv`, `.parquet` or `.npz` with arrays x and y), all of the same kind. An entry named `test` is not
a client but the test set.
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
from fedveil.data.columns import ColumnOptions, classes_of, fit_schema, with_schema
from fedveil.data.dataset import (
    Dataset,
    Examples,
    check_fraction,
    images_from_bytes,
    labels_from,
    refuse_split,
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
_BOMB_RATIO = 1100  # above the largest ratio of deflate, 1032


@dataclass(frozen=True)
class OwnData:
    """Clients with their names in the order of the client axis, the test set, and the classes."""

    clients: ArrayClients
    names: tuple[str, ...]
    classes: tuple[str, ...]
    test: Examples | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """`x * std + mean` is the value in the file, per feature or channel; empty if x is not scaled."""
    schema: TableSchema | None = None
    """The schema of tables."""


def examples_from_arrays(
    x: Array, y: Array, *, num_classes: int | None = None, field: str = "data"
) -> Examples:
    """Examples from NumPy or torch arrays: any real numbers for x, whole numbers from 0 on for y."""
    features = _tensor(x, f"{field}: x")
    if features.is_complex():
        raise DataError(f"{field}: x has complex numbers. Give real numbers.", field="x", value="complex")
    with np.errstate(over="ignore"):
        features = features.to(torch.float32)
    labels = _whole_numbers(_tensor(y, f"{field}: y"), f"{field}: y")
    try:
        examples = Examples(features, labels)
    except DataError as error:
        raise DataError(f"{field}: {error}", field=error.field, value=error.value) from error
    if num_classes is not None:
        require_labels_below(labels, num_classes, field)
    return examples


def examples_from_torch(dataset: Any, *, num_classes: int | None = None) -> Examples:
    """Examples from a map-style `torch.utils.data.Dataset` whose items are (x, label).

    Args:
        dataset: The dataset.
        num_classes: Number of classes, if it cannot be derived from the labels.

    Returns:
        The examples in memory.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise InputError(
            "dataset", type(dataset).__name__, "has no length or items", "Use a map-style dataset."
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty. Give at least one example.", field="dataset")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for position in range(len(dataset)):
        item = dataset[position]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(
                f"item {position} of the dataset is not a pair (x, label). Return pairs.",
                field="dataset",
                value=position,
            )
        xs.append(_tensor(item[0], f"item {position}: x"))
        ys.append(_tensor(item[1], f"item {position}: label"))
        if xs[-1].shape != xs[0].shape or ys[-1].numel() != 1:
            raise DataError(
                f"item {position} has shape {list(xs[-1].shape)} where item 0 has {list(xs[0].shape)}, "
                "or more than one label. Give all items the same shape and one label.",
                field="dataset",
                value=position,
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
        raise InputError(
            "names", list(names), f"do not match the {len(clients)} clients", "Give one name for each."
        )
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
    """Read the clients in a folder, in ascending order of their names; see this module for the layouts.

    Args:
        folder: The folder.
        label: The column of the labels; tables need it.
        categorical: Columns whose values are categories.
        numeric: Columns whose values are numbers.
        drop: Columns that are left out.
        missing: How missing cells are treated.
        decimal: The decimal mark of numbers.
        target: The kind of label: "classes", a "number", or "survival" (a time).
        event: For survival, the column that is 1 if the time is that of an event, 0 if it is censored.
        intervals: For survival, the ends of the intervals of discrete-time hazards; without them Cox's loss is used.
        schema: Public scales and categories. Without one, columns are standardised over all clients' rows together,
            which is only possible in a simulation: real clients must agree on a schema first.
        channels: Number of channels of pictures, which are normalised to -1..1.

    Returns:
        The clients, their names and their classes.
    """
    root = Path(folder)
    try:
        entries = sorted(inner for inner in root.iterdir() if inner.name[0] != ".")
    except OSError as error:
        raise DataError(
            f"{root}: cannot be read as a folder ({error.strerror}). Give the path of a folder.",
            field="folder",
            value=str(root),
        ) from error
    entries = [entry for entry in entries if entry.is_dir() or entry.suffix.lower() in _FILES]
    kinds = {"folder" if entry.is_dir() else entry.suffix.lower() for entry in entries}
    if len(kinds) != 1:
        problem = "contains no client" if not kinds else f"mixes {' and '.join(sorted(kinds))}"
        raise DataError(
            f"{root}: {problem}. Use one folder per client or one file per client ({', '.join(_FILES)}).",
            field="folder",
            value=sorted(kinds),
        )
    clients = [entry for entry in entries if entry.stem != _TEST]
    held_out = [entry for entry in entries if entry.stem == _TEST]
    if not clients:
        raise DataError(
            f"{root}: contains a test entry but no client. Add clients.", field="folder", value=["test"]
        )
    names = [entry.stem if entry.is_file() else entry.name for entry in clients]
    kind = kinds.pop()
    options = ColumnOptions(
        categorical, numeric, drop, missing, decimal, target=target, event=event, intervals=intervals
    )
    if kind in ("folder", ".npz"):
        _refuse_options_of_tables(options, label=label, schema=schema)
    if kind != "folder" and channels != 3:
        raise InputError("channels", channels, "is for pictures", "Leave it out.")
    if kind == "folder":
        return _from_pictures(clients, held_out, names, channels)
    if kind == ".npz":
        arrays = [read_npz(path) for path in clients]
        return clients_from_arrays(arrays, test=read_npz(held_out[0]) if held_out else None, names=names)
    if label is None:
        raise InputError("label", None, "is required for tables", "Give the column to predict.")
    return _from_tables(clients, held_out, names, label, options, schema)


def _refuse_options_of_tables(options: ColumnOptions, **more: object) -> None:
    usual = vars(ColumnOptions())
    given = more | {name: value for name, value in vars(options).items() if value != usual[name]}
    for field, value in given.items():
        if value is not None:
            raise InputError(field, value, "is for tables", "Leave it out.")


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

    Without an entry named `test`, `test_fraction` of each client's examples, chosen by the seed, are the test set.
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
    if test is not None:
        refuse_split(test_fraction, seed, "the test examples have an entry of their own")
    else:
        kept, held = stratified_split(users.numpy(), test_fraction, seed, "client-folder")
        train, test = train.take(kept.sort().values), train.take(held.sort().values)
    width = train.x.shape[1] if train.x.dim() > 1 else 1
    mean, std = own.mean or (0.0,) * width, own.std or (1.0,) * width
    tables = own.schema is not None
    return Dataset(
        f"client-folder:{root.name}",
        train,
        test,
        own.classes,
        mean,
        std,
        f"{len(train)} + {len(test)} examples of {len(own.names)} clients",
        user_names=own.names,
        schema=own.schema,
        notes=(statistics_note(schema is not None, statistics), person_note(None, None)) if tables else (),
    )


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Arrays x and y of an .npz file."""
    return read_npz_array(path, "x"), read_npz_array(path, "y")


def read_npz_array(path: Path, name: str) -> np.ndarray:
    """One array of an .npz file. Pickled objects are refused, and so are arrays whose header declares more than the
    file can contain, before memory is allocated."""
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{name}.npy" not in archive.namelist():
                raise DataError(f"{path}: contains no array {name}. Add it.", field=name, value=str(path))
            _check_npy(archive, f"{name}.npy", path)
        with np.load(path, allow_pickle=False) as arrays:
            found: np.ndarray = arrays[name]
            return found
    except DataError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise DataError(
            f"{path}: is not a readable .npz file ({type(error).__name__}). Write it again.",
            field="file",
            value=str(path),
        ) from error


def _check_npy(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    member = archive.getinfo(name)
    if member.file_size > _BOMB_RATIO * max(member.compress_size, 1):
        raise DataError(
            f"{path}: array {name[0]} claims {member.file_size} bytes, more than it can contain. Write it again.",
            field="size",
            value=member.file_size,
        )
    with archive.open(name) as stream:
        version = np.lib.format.read_magic(stream)
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(stream)
    if dtype.hasobject or dtype.kind not in "fiub":
        raise DataError(
            f"{path}: array {name[0]} is not numeric. Write numbers.", field="dtype", value=name[0]
        )
    if math.prod(shape) * dtype.itemsize > member.file_size:
        raise DataError(
            f"{path}: array {name[0]} declares shape {list(shape)}, more than the file contains. Write it again.",
            field="shape",
            value=list(shape),
        )


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
        if odd := sorted(set(table.columns) ^ set(tables[0].columns)):
            raise DataError(
                f"{table.path}: has other columns than {tables[0].path}: {', '.join(map(repr, odd))} are in one of "
                "them only. Give all tables the same columns.",
                field="columns",
                value=str(table.path),
            )
    given = schema is not None
    options.check(tables[0])
    if schema is not None:
        with_schema(options, label, schema)
    else:
        classes = classes_of([*tables, *([test] if test else [])], label, options)
        everything = joined(tables, tables[0].path.parent)
        schema = fit_schema(everything, label=label, classes=classes, options=options)
    made = [table_examples(schema, table, refuse_unknown=given) for table in tables]
    held = None if test is None else table_examples(schema, test, refuse_unknown=given)
    own = _own(made, names, schema.classes, held)
    return replace(own, mean=schema.mean, std=schema.std, schema=schema)


def _own(
    parts: Sequence[Examples], names: Sequence[str], classes: tuple[str, ...], test: Examples | None
) -> OwnData:
    for name, examples in zip(names, parts, strict=True):
        if len(examples) == 0:
            raise DataError(f"{name}: has no example. Leave this client out.", field="clients", value=name)
        if examples.x.shape[1:] != parts[0].x.shape[1:]:
            raise DataError(
                f"{name}: examples of shape {list(examples.x.shape[1:])} where {names[0]} has "
                f"{list(parts[0].x.shape[1:])}. Give all clients the same shape.",
                field="clients",
                value=name,
            )
        if classes:
            require_labels_below(examples.y, len(classes), name)
    if test is not None and parts:
        if test.x.shape[1:] != parts[0].x.shape[1:]:
            raise DataError(
                f"{_TEST}: its examples have another shape than the clients'. Give them the same shape.",
                field=_TEST,
            )
        if classes:
            require_labels_below(test.y, len(classes), _TEST)
    clients = ArrayClients.from_arrays([(examples.x, examples.y) for examples in parts])
    return OwnData(clients, tuple(names), classes, test)


def _tensor(value: object, field: str) -> Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"{field} has the type {array.dtype}. Give numbers.", field="dtype", value=str(array.dtype)
        )
    if array.dtype.kind == "f" and array.dtype.itemsize not in (2, 4, 8):
        array = array.astype(np.float64)
    return torch.from_numpy(
        np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape)
    )


def _whole_numbers(values: Tensor, field: str) -> Tensor:
    if values.is_floating_point():
        if not bool((values == values.round()).all()) or not bool((values.abs() < 2**53).all()):
            raise DataError(f"{field} has labels that are not whole numbers. Use whole numbers.", field="y")
    elif values.is_complex():
        raise DataError(f"{field} has complex numbers. Use whole numbers.", field="y", value="complex")
    return values.to(torch.int64)
