"""A trained model as one file for other programs, preprocessing included."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedveil.atomic_files import write_atomically
from fedveil.errors import FedveilError, InputError, install
from fedveil.prediction.trained import TrainedModel

Format = Literal["torchscript", "onnx", "pytorch"]
DESCRIPTION = "fedveil.json"
"""The name of the recipe (columns, categories and classes) in an exported file."""


def export(model: TrainedModel, form: Format, path: Path) -> None:
    """Write the model, from raw inputs to class probabilities.

    torchscript: for `torch.jit.load`, in C++ too; the recipe is the extra file `fedveil.json`.
    onnx: input `input`, output `probabilities`, any number of rows; the recipe is the metadata entry `fedveil.json`.
    pytorch: a dictionary for `torch.load(weights_only=True)` with `state_dict` and the recipe as JSON.

    Raises:
        InputError: The format's packages are not installed.
        FedveilError: The model uses an operation that the format does not have.
    """
    description = json.dumps(model.recipe.to_json())
    if form == "pytorch":
        body = io.BytesIO()
        torch.save({"state_dict": model.state_dict(), DESCRIPTION: description}, body)
        write_atomically(path, body.getvalue())
        return
    if form == "onnx":
        for module in ("onnx", "onnxscript"):
            if importlib.util.find_spec(module) is None:
                raise InputError("--format", form, f"{module} is not installed", install("onnx"))
    try:
        content = _torchscript(model, description) if form == "torchscript" else _onnx(model, description)
    except FedveilError:
        raise
    except Exception as error:  # converters may raise anything
        raise FedveilError(
            f"{model.recipe.model} cannot be written as {form} ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Use another format.",
            field="--format",
            value=form,
        ) from error
    write_atomically(path, content)


def _example(model: TrainedModel) -> Tensor:
    """Two rows of zeros; the traced model must not depend on the number of rows."""
    recipe = model.recipe
    if recipe.schema is not None:
        return torch.zeros(2, len(recipe.schema.columns), dtype=torch.float64)
    if recipe.text is not None:
        return torch.ones(2, recipe.text.length, dtype=torch.int64)
    return torch.zeros(2, *recipe.input_shape)


def _torchscript(model: TrainedModel, description: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides the deprecation of TorchScript, which the user chose
        traced = torch.jit.trace(model, _example(model))
        body = io.BytesIO()
        torch.jit.save(traced, body, _extra_files={DESCRIPTION: description.encode()})
    return body.getvalue()


def _onnx(model: TrainedModel, description: str) -> bytes:
    onnx = importlib.import_module("onnx")
    # It warns that torchvision, which is not needed, is not there.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (_example(model),),
            input_names=["input"],
            output_names=["probabilities"],
            dynamic_shapes=({0: torch.export.Dim("rows")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    made = program.model_proto
    onnx.helper.set_model_props(made, {DESCRIPTION: description})
    content: bytes = made.SerializeToString()
    return content
