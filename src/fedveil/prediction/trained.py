"""A trained model with its preprocessing: `fedveil.load(RESULT)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import overload

import torch
from torch import Tensor, nn

from fedveil.data.table_features import TableFeatures
from fedveil.errors import FedveilError, InputError, ResultError
from fedveil.features.feature_map import FeatureMap
from fedveil.losses import Target, survival_of
from fedveil.models.registry import make_model, model_entry
from fedveil.prediction.inputs import read_input, vocabulary_for
from fedveil.prediction.recipe import Recipe, read_recipe
from fedveil.session.results import ResultFolder
from fedveil.task import Task
from fedveil.tree import Params


class Scale(nn.Module):
    """Normalise brightness or other numbers: `(x - mean) / std`, per channel or feature."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        shape = (-1, *[1] * (len(recipe.input_shape) - 1))
        mean, std = torch.tensor(recipe.mean or (0.0,)), torch.tensor(recipe.std or (1.0,))
        self.register_buffer("mean", mean.reshape(shape))
        self.register_buffer("std", std.reshape(shape))

    mean: Tensor
    std: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.float32) - self.mean) / self.std


class ImageFeatures(nn.Module):
    """Brightness 0 to 1 as the features that the network reads."""

    def __init__(self, made: FeatureMap, image_shape: Sequence[int]) -> None:
        super().__init__()
        self._made = made
        self._of_block, _ = made.transform(image_shape)  # its constants are drawn here, not during export

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32).clamp(0, 1)
        # During export: for any number of images.
        if torch._C._get_tracing_state() or torch.compiler.is_compiling():
            return self._of_block(x)
        return self._made.compute(x)


@dataclass(frozen=True)
class Predictions:
    """One row per example `[n, columns]`.

    The probability of each class, a number, or the probability of no event up to the end of each interval (for Cox's
    model a risk).
    """

    target: Target
    columns: tuple[str, ...]
    values: Tensor
    classes: tuple[str, ...] = ()

    @property
    def predicted(self) -> tuple[str, ...]:
        """The most probable class of each example; empty where there are no classes."""
        return tuple(self.classes[k] for k in self.values.argmax(-1).tolist()) if self.classes else ()


class TrainedModel(nn.Module):
    """A network with preprocessing and postprocessing: from raw inputs to class probabilities.

    Attributes:
        recipe: Architecture, input and classes, from the results folder.
        preprocess: Converts raw inputs to the network's inputs.
        network: The trained network; its outputs are class scores (logits).

    `forward` takes, `[n, ...]`:
        for a table, its cells in the order of `recipe.schema.columns`: numbers, and categories by their index
        (`read` makes them from a file);
        for images, brightness from 0 to 1;
        for texts, token ids (`read` makes them from texts).
    """

    def __init__(self, recipe: Recipe, network: nn.Module) -> None:
        super().__init__()
        self.recipe = recipe
        self.preprocess = _preprocessing(recipe)
        self.network = network
        self.requires_grad_(False).eval()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.recipe.classes

    def forward(self, x: Tensor) -> Tensor:
        """Class probabilities `[n, classes]`; numbers in the units of the table; survival probabilities or risks."""
        scores: Tensor = self.network(self.preprocess(x))
        schema = self.recipe.schema
        if schema is None or schema.target == "classes":
            return torch.softmax(scores, dim=-1)
        if schema.target == "number":
            return scores * schema.label_std + schema.label_mean
        return survival_of(scores) if schema.intervals else scores

    def read(self, path: str | Path, data_dir: Path | None = None) -> Tensor:
        """The examples in a file as inputs of `forward`; a file that does not match the model is a DataError."""
        return read_input(self.recipe, Path(path), data_dir)

    def predict(self, path: str | Path, data_dir: Path | None = None, *, batch: int = 1000) -> Predictions:
        """The model's predictions for every example in a file."""
        x = self.read(path, data_dir)
        with torch.no_grad():
            parts = [self(x[start : start + batch]) for start in range(0, len(x), batch)]
        schema = self.recipe.schema
        target = "classes" if schema is None else schema.target
        return Predictions(target, _columns(self.recipe), torch.cat(parts), self.classes)


def _columns(recipe: Recipe) -> tuple[str, ...]:
    schema = recipe.schema
    if schema is None or schema.target == "classes":
        return tuple(f"probability of {name}" for name in recipe.classes)
    if schema.target == "number":
        return (schema.label,)
    return tuple(f"no event until {end:g}" for end in schema.intervals) or ("risk",)


def _preprocessing(recipe: Recipe) -> nn.Module:
    made = recipe.feature_map()
    if made is not None:
        return ImageFeatures(made, recipe.input_shape)
    if recipe.schema is not None:
        return TableFeatures(recipe.schema)
    return nn.Identity() if recipe.text is not None else Scale(recipe)


@overload
def load(result: str | Path, *, model: None = None) -> TrainedModel: ...


@overload
def load(result: str | Path, *, model: nn.Module | Callable[[], nn.Module]) -> nn.Module: ...


def load(result: str | Path, *, model: nn.Module | Callable[[], nn.Module] | None = None) -> nn.Module:
    """The model of a finished run.

    Args:
        result: A result folder, such as `results/demo/1a2b3c/seed-0`; of a federation too.
        model: The architecture, if the run was started from Python: the weights are loaded into a copy of it, which
            is returned without preprocessing.

    Returns:
        A `TrainedModel` in evaluation mode; with `model`, a module of that architecture.

    Raises:
        ResultError: The folder holds no finished run, is damaged, or another version of fedveil wrote it.
    """
    folder = Path(result)
    if model is not None:
        folder = finished_run(folder)
        return _with_weights(model, ResultFolder(folder).read().model, folder)
    return load_trained(folder)


def finished_run(folder: Path) -> Path:
    """This run's folder, or that of the only finished run below, such as `results/NAME`.

    Raises:
        ResultError: There are several.
    """
    if (folder / "summary.json").exists():
        return folder
    below = sorted(path.parent for path in folder.rglob("summary.json"))
    if len(below) > 1:
        names = ", ".join(map(str, below[:5]))
        raise ResultError(
            f"{folder}: {len(below)} finished runs are below it. Name one, such as {names}.",
            field="RESULT",
            value=str(folder),
        )
    return below[0] if below else folder


def load_trained(folder: Path, data_dir: Path | None = None) -> TrainedModel:
    """The model of a finished run with its preprocessing."""
    folder = finished_run(folder)
    run = ResultFolder(folder).read()
    recipe = read_recipe(run.summary, folder)
    try:
        entry = model_entry(recipe.model)
    except InputError as error:
        raise ResultError(
            f"{folder}: its model is not known here. {error}", field="model", value=recipe.model
        ) from error
    if entry.reads == "texts without labels":
        raise ResultError(
            f"{folder}: {recipe.model} is a language model, which predicts tokens, not classes.",
            field="model",
            value=recipe.model,
        )
    options = dict(recipe.options)
    if recipe.text is not None:
        vocabulary = vocabulary_for(recipe.text, data_dir)
        options |= {"vocabulary": vocabulary.size, "pad": vocabulary.pad}
    build = partial(make_model, recipe.model, recipe.network_shape, recipe.outputs, **options)
    return TrainedModel(recipe, _with_weights(build, run.model, folder))


def _with_weights(model: nn.Module | Callable[[], nn.Module], weights: Params, folder: Path) -> nn.Module:
    """The architecture as in training, with its constants and these weights."""
    try:
        network = Task(model).module
    except FedveilError as error:
        raise ResultError(f"{folder}: its model cannot be built. {error}", field="model") from error
    own = {name: tuple(leaf.shape) for name, leaf in network.named_parameters()}
    stored = {name: tuple(leaf.shape) for name, leaf in weights.items()}
    if own != stored:
        names: Sequence[str] = [name for name in {**own, **stored} if own.get(name) != stored.get(name)]
        raise ResultError(
            f"{folder}: model.safetensors does not fit the model: {names[0]!r} has shape {stored.get(names[0])} in the "
            f"file and {own.get(names[0])} in the model. Use the version of fedveil and of the model that trained it.",
            field="model.safetensors",
            value=names[0],
        )
    network.load_state_dict(dict(weights), strict=False)  # the file does not contain constants
    return network
