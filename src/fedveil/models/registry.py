"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar

from fedveil.errors import InputError, known_name, require_free
from fedveil.lazy_torch import nn, torch
from fedveil.models.shapes import check_count, check_shape

Reads = Literal["numbers", "texts", "texts without labels"]

BuildModel = TypeVar("BuildModel", bound=Callable[..., "nn.Module"])


@dataclass(frozen=True)
class ModelEntry:
    """A registered model.

    Its inputs are numbers (images, tables), texts with a label each, or texts without labels, whose next tokens it
    predicts.
    """

    name: str
    summary: str
    place: Callable[..., nn.Module] | str
    """The function that builds it, or its place below `fedveil.models`, imported when the model is built."""
    reads: Reads = "numbers"

    @property
    def build(self) -> Callable[..., nn.Module]:
        """The function that builds it."""
        if not isinstance(self.place, str):
            return self.place
        module, _, name = self.place.partition(":")
        found: Callable[..., nn.Module] = getattr(import_module(f"fedveil.models.{module}"), name)
        return found

    @property
    def options(self) -> tuple[str, ...]:
        """The keyword options of the model."""
        parameters = inspect.signature(self.build).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


_ENTRIES = {
    entry.name: entry
    for entry in (
        ModelEntry("mlp-2", "two linear layers without bias, 64 hidden units, dropout (FedCEO)", "mlp:mlp_2"),
        ModelEntry("logistic", "logistic regression: one linear layer", "mlp:logistic_regression"),
        ModelEntry("lenet-5", "LeNet-5: two 5x5 convolutions, three linear layers (FedCEO)", "lenet:lenet_5"),
        ModelEntry("lenet-zhu", "sigmoid LeNet of gradient-leakage work (DLG, FedEM)", "lenet:lenet_zhu"),
        ModelEntry(
            "convnet", "three convolution blocks of width 128 with group norm (FedLAP-DP)", "convnet:convnet"
        ),
        ModelEntry("convnet-64", "eight tanh convolutions of base width 64 (FedEM)", "convnet:convnet_64"),
        ModelEntry("alexnet", "AlexNet for 32x32 images (FedCEO)", "alexnet:alexnet"),
        ModelEntry("lstm", "LSTM that classifies texts (FedCEO)", "lstm:lstm", "texts"),
        ModelEntry(
            "transformer", "small transformer that classifies texts", "transformer:transformer", "texts"
        ),
        ModelEntry(
            "bert",
            "encoder from a transformers folder, MiniLM by default (FedEM)",
            "pretrained:bert",
            "texts",
        ),
        ModelEntry(
            "causal-lm",
            "small language model, from scratch (FedEM)",
            "causal_lm:causal_lm",
            "texts without labels",
        ),
        ModelEntry(
            "gpt", "language model from a transformers folder", "pretrained:gpt", "texts without labels"
        ),
    )
}


def list_models() -> list[ModelEntry]:
    """Every model, in a fixed order, with its summary."""
    return list(_ENTRIES.values())


def model_entry(name: str) -> ModelEntry:
    """The entry of this name."""
    return _ENTRIES[known_name("task.model", "model", name, _ENTRIES)]


def model_options(name: str) -> dict[str, object]:
    """The options of this model with their defaults, without those that follow from the vocabulary."""
    entry = model_entry(name)
    given = inspect.signature(entry.build).parameters
    return {
        key: "needed" if given[key].default is inspect.Parameter.empty else given[key].default
        for key in entry.options
        if key not in ("vocabulary", "pad")
    }


def make_model(
    name: str, input_shape: Sequence[int], classes: int, *, seed: int | None = None, **options: Any
) -> nn.Module:
    """Build the model of this name.

    Args:
        name: One of `fedveil list models`.
        input_shape: The shape of one input, without the batch axis.
        classes: Number of outputs.
        seed: The seed of the weights; torch's global generator is not changed. None: weights are drawn from the
            global generator.
        options: Options of the model. Models of texts need `vocabulary` and `pad`, the number of tokens and the id
            of padding.

    Returns:
        The module.
    """
    entry = model_entry(name)
    shape = check_shape(input_shape)
    check_count("classes", classes)
    for option, value in options.items():
        if option not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise InputError(option, value, f"is not an option of {name}", f"Its options: {known}.")
    if seed is None:
        return entry.build(shape, classes, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return entry.build(shape, classes, **options)


def register_model(
    name: str, summary: str, *, reads: Reads = "numbers"
) -> Callable[[BuildModel], BuildModel]:
    """Register a function `(input_shape, classes, *, options...) -> nn.Module` as a model under this name.

    A model that reads texts is a `TextModel` and takes the options `vocabulary` and `pad`.

    Args:
        name: The name in configurations and on the command line.
        summary: A description of one line.
        reads: The kind of its inputs.

    Returns:
        A decorator that returns the function unchanged.
    """

    def add(build: BuildModel) -> BuildModel:
        require_free("model", name, build, _ENTRIES[name].build if name in _ENTRIES else None)
        _ENTRIES[name] = ModelEntry(name, summary, build, reads)
        return build

    return add
