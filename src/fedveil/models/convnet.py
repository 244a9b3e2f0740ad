"""ConvNet of FedLAP-DP (three blocks, group norm) and ConvNet-64 of FedEM (eight tanh convolutions).

Deviations: FedEM names "ConvNet-64" without printing it; this is the width-64 network that gradient-inversion
work uses under that name, with tanh and without its batch norms, which a federation cannot share safely.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from fedveil.errors import InputError
from fedveil.models.shapes import check_count, check_image, flat_features


class ConvNet(nn.Sequential):
    """`blocks` times [Conv3x3, GroupNorm, ReLU, AvgPool2], then one linear layer."""

    channels_last: ClassVar[bool] = (
        False  # group norm with one channel per group is slower in the other layout
    )


def convnet(
    input_shape: Sequence[int],
    classes: int,
    *,
    width: int = 128,
    blocks: int = 3,
    groups: int | None = None,
) -> ConvNet:
    """FedLAP-DP's network: 320,010 parameters for 3x32x32 and ten classes, 317,706 for 1x32x32.

    `groups` defaults to `width`: one channel per group.
    """
    shape = check_image("convnet", input_shape)
    check_count("width", width)
    check_count("blocks", blocks)
    groups = check_count("groups", width if groups is None else groups)
    if width % groups:
        raise InputError(
            "groups", groups, f"does not divide width = {width}", "Choose a divisor of the width."
        )
    layers = OrderedDict[str, nn.Module]()
    channels = shape[0]
    for block in range(1, blocks + 1):
        layers[f"conv{block}"] = nn.Conv2d(channels, width, 3, padding=1)
        layers[f"norm{block}"] = nn.GroupNorm(groups, width)
        layers[f"relu{block}"] = nn.ReLU()
        layers[f"pool{block}"] = nn.AvgPool2d(2)
        channels = width
    smallest = 2**blocks
    if min(shape[1:]) < smallest:  # checked here: the norms' own error for a single value names no field
        raise InputError(
            "input_shape",
            shape,
            f"convnet halves the image {blocks} times and shrinks this one to nothing",
            f"Use at least {smallest}x{smallest} pixels, or fewer blocks.",
        )
    features = flat_features("convnet", nn.Sequential(layers), shape, "Use larger images.")
    layers["flatten"] = nn.Flatten()
    layers["output"] = nn.Linear(features, classes)
    return ConvNet(layers)


class ConvNet64(nn.Sequential):
    """Eight 3x3 convolutions with tanh, two max-pools of 3, one linear layer."""

    channels_last: ClassVar[bool] = False


def convnet_64(input_shape: Sequence[int], classes: int, *, width: int = 64) -> ConvNet64:
    """FedEM's network for CIFAR-10: widths 1, 2, 2, 4, 4, 4, pool, 4, 4, pool (times `width`)."""
    shape = check_image("convnet-64", input_shape)
    check_count("width", width)
    layers = OrderedDict[str, nn.Module]()
    channels = shape[0]
    for number, factor in enumerate((1, 2, 2, 4, 4, 4, 4, 4)):
        layers[f"conv{number}"] = nn.Conv2d(channels, factor * width, 3, padding=1)
        layers[f"tanh{number}"] = nn.Tanh()
        if number in (5, 7):
            layers[f"pool{number // 6}"] = nn.MaxPool2d(3)
        channels = factor * width
    if min(shape[1:]) < 9:
        raise InputError(
            "input_shape",
            shape,
            "convnet-64 pools by 3 twice and shrinks this image to nothing",
            "Use at least 9x9 pixels.",
        )
    features = flat_features("convnet-64", nn.Sequential(layers), shape, "Use at least 9x9 pixels.")
    layers["flatten"] = nn.Flatten()
    layers["output"] = nn.Linear(features, classes)
    return ConvNet64(layers)
