"""The recipe for using a run's model, stored with the weights: architecture, input and classes.

It is the section `prediction` of `summary.json`, so it exists exactly if the run is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedveil.data.dataset import Dataset
from fedveil.data.schema import TableSchema, schema_from_json
from fedveil.errors import InputError, ResultError
from fedveil.features.feature_map import FeatureMap, make_features
from fedveil.validation import Section, parse_content

FORMAT = 1
"""Version of the section; other versions are refused."""


@dataclass(frozen=True)
class TextInput:
    """The conversion of texts to token ids: the keys of `[task.text]` with the resolved vocabulary."""

    vocabulary: Literal["hash", "bytes", "public", "tokenizer"]
    size: int
    path: str | None
    length: int


@dataclass(frozen=True)
class FeatureInput:
    """The feature map of images before the network: `[task] features` and `[task.feature_options]`."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Everything that prediction needs besides the weights."""

    model: str
    options: Mapping[str, Any]
    input_shape: tuple[int, ...]
    """The shape of an original example, for images before any feature map."""
    outputs: int
    classes: tuple[str, ...]
    schema: TableSchema | None = None
    """The schema of a table; else None."""
    text: TextInput | None = None
    """The input of texts; else None."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """For images and numbers: the model reads `(x - mean) / std`, per channel or feature; empty: `x` itself."""
    features: FeatureInput | None = None

    @property
    def network_shape(self) -> tuple[int, ...]:
        """The shape of the network's input."""
        made = self.feature_map()
        return self.input_shape if made is None else made.shape(self.input_shape)

    def feature_map(self) -> FeatureMap | None:
        """The feature map of images; None if the network reads images."""
        return None if self.features is None else make_features(self.features.name, self.features.options)

    @property
    def kind(self) -> Literal["table", "texts", "numbers"]:
        return "table" if self.schema is not None else "texts" if self.text is not None else "numbers"

    def to_json(self) -> dict[str, Any]:
        """The input of `read_recipe`."""
        return {
            "format": FORMAT,
            "fedveil": metadata.version("fedveil"),
            "model": self.model,
            "options": dict(self.options),
            "input_shape": list(self.input_shape),
            "outputs": self.outputs,
            "classes": list(self.classes),
            "schema": None if self.schema is None else self.schema.to_json(),
            "text": None if self.text is None else dict(vars(self.text)),
            "mean": list(self.mean),
            "std": list(self.std),
            "features": None
            if self.features is None
            else {"name": self.features.name, "options": dict(self.features.options)},
        }


def recipe_for(
    model: str,
    options: Mapping[str, Any],
    dataset: Dataset,
    text: TextInput | None = None,
) -> Recipe:
    """The recipe for a model trained on this dataset."""
    facts = dataset.features
    scaled = dataset.schema is None and text is None and facts is None
    return Recipe(
        model,
        options,
        dataset.example_shape,
        dataset.num_classes,
        dataset.classes,
        dataset.schema,
        text,
        dataset.mean if scaled else (),
        dataset.std if scaled else (),
        None if facts is None else FeatureInput(facts.name, facts.options),
    )


class _Text(Section):
    vocabulary: Literal["hash", "bytes", "public", "tokenizer"]
    size: int
    path: str | None
    length: Annotated[int, Field(ge=1)]


class _Features(Section):
    name: str
    options: dict[str, Any]


class _Recipe(Section):
    format: int
    fedveil: str
    model: str
    options: dict[str, Any]
    input_shape: tuple[Annotated[int, Field(ge=1)], ...]
    outputs: Annotated[int, Field(ge=1)]
    classes: tuple[str, ...]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")]
    text: _Text | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    features: _Features | None = None


def read_recipe(summary: Mapping[str, Any], folder: Path) -> Recipe:
    """The recipe in a run's summary; `folder` is for errors.

    Raises:
        ResultError: There is none, it is damaged, or another version of fedveil wrote it.
    """
    content = summary.get("prediction")
    if content is None:
        raise ResultError(
            f"{folder}: summary.json does not say which model this is: the run was started from Python, or by an "
            "older fedveil. Give the model: fedveil.load(folder, model=...).",
            field="prediction",
        )
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, Mapping) else None
        written = content.get("fedveil") if isinstance(content, Mapping) else None
        raise ResultError(
            f"{folder}: summary.json describes its model in format {found!r} (fedveil {written}); this fedveil reads "
            f"format {FORMAT}. Use the version that trained it, or train it again.",
            field="prediction.format",
            value=found,
        )
    path = folder / "summary.json"
    try:
        read = parse_content(content, _Recipe, path)
        schema = None if read.schema_ is None else schema_from_json(read.schema_, path)
        _require_lengths(read, path)
        if read.features is not None:
            make_features(read.features.name, read.features.options)
    except InputError as error:
        raise ResultError(f"{folder} is damaged: {error}", field="prediction") from error
    text = None if read.text is None else TextInput(**read.text.model_dump())
    return Recipe(
        read.model,
        read.options,
        read.input_shape,
        read.outputs,
        read.classes,
        schema,
        text,
        read.mean,
        read.std,
        None if read.features is None else FeatureInput(read.features.name, read.features.options),
    )


def _require_lengths(read: _Recipe, path: Path) -> None:
    width = read.input_shape[0] if read.input_shape else 1
    for name, values in (("mean", read.mean), ("std", read.std)):
        if values and len(values) != width:
            raise InputError(
                f"{path.name}: {name}", list(values), f"has not {width} entries", "Restore the file."
            )
