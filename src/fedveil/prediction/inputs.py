"""New examples from a file, checked against the model's training data."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedveil.data.columns import TRAIN_WITH_GAPS
from fedveil.data.dataset import TextExamples
from fedveil.data.files import given_file, text_lines
from fedveil.data.own import read_npz_array
from fedveil.data.pictures import pictures_in, read_pictures
from fedveil.data.raw_table import read_table
from fedveil.data.schema import TableSchema
from fedveil.data.table import encode_cells
from fedveil.data.tokens import tokenise_texts
from fedveil.data.vocabulary import Vocabulary, make_vocabulary
from fedveil.errors import DataError
from fedveil.prediction.recipe import Recipe, TextInput


def read_input(recipe: Recipe, path: Path, data_dir: Path | None = None) -> Tensor:
    """The examples in this file as the model's preprocessing takes them, `[n, ...]`.

    A table is CSV or Parquet; texts are lines; images are a picture, a folder of pictures or an `.npz` file with an
    array x.
    """
    if recipe.schema is not None:
        return _cells(recipe.schema, given_file("FILE", path, data_dir))
    if recipe.text is not None:
        return _tokens(recipe.text, given_file("FILE", path, data_dir), data_dir)
    return _numbers(recipe, path, data_dir)


def vocabulary_for(text: TextInput, data_dir: Path | None = None) -> Vocabulary:
    """The vocabulary of the model."""
    return make_vocabulary(text.vocabulary, size=text.size, path=text.path, data_dir=data_dir)


def _cells(schema: TableSchema, path: Path) -> Tensor:
    table = read_table(path)
    missing = [column.name for column in schema.columns if column.name not in table.columns]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(schema.columns)} columns that the model was trained on are missing: "
            f"{', '.join(map(repr, missing[:10]))}. The file has: {', '.join(map(repr, list(table.columns)[:20]))}.",
            field="columns",
            value=missing,
        )
    return torch.from_numpy(encode_cells(schema, table, refuse_unknown=True, gaps=TRAIN_WITH_GAPS))


def _tokens(text: TextInput, path: Path, data_dir: Path | None) -> Tensor:
    lines = text_lines(path)
    if not lines:
        raise DataError(f"{path}: contains no line. Give one text per line.", field="lines", value=0)
    texts = TextExamples(tuple(lines), torch.zeros(len(lines), dtype=torch.int64))
    made, _, _ = tokenise_texts(str(path), texts, vocabulary_for(text, data_dir), length=text.length)
    return made.x


def _numbers(recipe: Recipe, path: Path, data_dir: Path | None) -> Tensor:
    shape = recipe.input_shape
    if path.is_dir() or not zipfile.is_zipfile(given_file("FILE", path, data_dir)):
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise DataError(
                f"{path}: the model reads numbers of shape {list(shape)}. Give an .npz file with an array x.",
                field="file",
                value=str(path),
            )
        pixels = read_pictures(pictures_in(path), shape[0])
        x = torch.from_numpy(pixels.astype(np.float32) / 255.0)
    else:
        x = torch.from_numpy(read_npz_array(given_file("FILE", path, data_dir), "x")).to(torch.float32)
    if tuple(x.shape[1:]) != shape:
        raise DataError(
            f"{path}: examples have shape {list(x.shape[1:])}, the model reads {list(shape)}. Change the examples.",
            field="x",
            value=list(x.shape[1:]),
        )
    if not bool(torch.isfinite(x).all()):
        raise DataError(f"{path}: x contains NaN or infinity. Clean it first.", field="x")
    return x
