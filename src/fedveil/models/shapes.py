"""Checks of input shapes and sizes that every model makes before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedveil.errors import InputError
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import nn


def check_shape(input_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one example as a tuple of positive sizes."""
    shape = tuple(input_shape)
    if not shape or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
        raise InputError(
            "input_shape", shape, "is not the shape of one example", "Give positive sizes, e.g. (1, 28, 28)."
        )
    return shape


def check_image(model: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """`(channels, height, width)`; refuses any other shape."""
    shape = check_shape(input_shape)
    if len(shape) != 3:
        raise InputError(
            "input_shape",
            shape,
            f"{model} is made for images",
            "Give (channels, height, width), or use mlp-2 or logistic for flat features.",
        )
    return shape[0], shape[1], shape[2]


def check_count(field: str, value: int) -> int:
    """A whole number of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(field, value, "must be a whole number of at least 1", f"Set {field} to 1 or more.")
    return value


def check_rate(value: float) -> float:
    """A dropout rate: at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise InputError(
            "dropout", value, "is not a dropout rate", "Use a number from 0 (no dropout) to below 1."
        )
    return float(value)


def flat_features(model: str, layers: nn.Module, shape: tuple[int, int, int], remedy: str) -> int:
    """The number of features that `layers` compute from one image; refuses images that are too small."""
    was_training = layers.training
    layers.eval()
    try:
        with torch.no_grad():
            return int(layers(torch.zeros(1, *shape)).numel())
    except RuntimeError as error:
        raise InputError("input_shape", shape, f"{model} shrinks this image to nothing", remedy) from error
    finally:
        layers.train(was_training)


def check_text(model: str, input_shape: Sequence[int], vocabulary: int, pad: int) -> int:
    """The number of tokens of one text; refuses a padding id outside the vocabulary."""
    shape = check_shape(input_shape)
    if len(shape) != 1:
        raise InputError(
            "input_shape", shape, f"{model} reads texts", "Give (tokens,), or choose a model for images."
        )
    check_count("vocabulary", vocabulary)
    if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < vocabulary:
        raise InputError(
            "pad", pad, f"is not one of the {vocabulary} token ids", f"Use 0 to {vocabulary - 1}."
        )
    return shape[0]


def check_next_tokens(classes: int, vocabulary: int) -> None:
    """Refuse a number of outputs other than the size of the vocabulary."""
    if classes != vocabulary:
        raise InputError(
            "classes", classes, "a language model has one output for each token", f"Use {vocabulary}."
        )
