"""LeNet-5 of FedCEO (ICML 2025, appendix C.1) and the sigmoid LeNet of gradient-leakage work (DLG, 2019).

Deviations: the appendix prints no activation between LeNet-5's convolutions; without one, two convolutions
would be linear up to the max-pool, so ReLU is used by default (`conv_relu=False` removes it). It is applied
after the max-pool, which gives the same result as before it at a quarter of the cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from fedveil.errors import InputError
from fedveil.models.shapes import check_count, check_image, flat_features

_SMALLEST_UNPADDED = 16  # smaller images have no pixels left after two 5x5 convolutions and two max-pools


class LeNet5(nn.Sequential):
    """Conv(32, 5), max-pool, Conv(64, 5), max-pool, then linear layers of 512, 512 and `classes`."""

    channels_last: ClassVar[bool] = True  # max-pool is several times faster in this layout


def lenet_5(
    input_shape: Sequence[int],
    classes: int,
    *,
    conv_relu: bool = True,
    hidden: int = 512,
    padding: int | None = None,
) -> LeNet5:
    """LeNet-5 sized for the input: 1600 features at 32x32.

    `padding` of the convolutions is 0, as printed, where the image has 16 pixels a side or more, and 2 below.
    """
    shape = check_image("lenet-5", input_shape)
    check_count("hidden", hidden)
    if padding is None:
        padding = 0 if min(shape[1:]) >= _SMALLEST_UNPADDED else 2
    if isinstance(padding, bool) or not isinstance(padding, int) or not 0 <= padding <= 4:
        raise InputError("padding", padding, "is not a padding of a 5x5 convolution", "Use 0 to 4.")
    layers = OrderedDict[str, nn.Module]()
    layers["conv1"] = nn.Conv2d(shape[0], 32, 5, padding=padding)
    layers["pool1"] = nn.MaxPool2d(2)
    if conv_relu:
        layers["relu1"] = nn.ReLU()
    layers["conv2"] = nn.Conv2d(32, 64, 5, padding=padding)
    layers["pool2"] = nn.MaxPool2d(2)
    if conv_relu:
        layers["relu2"] = nn.ReLU()
    features = flat_features(
        "lenet-5",
        nn.Sequential(layers),
        shape,
        "Use padding = 2 and at least 4x4 pixels, or 16x16 without padding.",
    )
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(features, hidden)
    layers["relu3"] = nn.ReLU()
    layers["fc2"] = nn.Linear(hidden, hidden)
    layers["relu4"] = nn.ReLU()
    layers["fc3"] = nn.Linear(hidden, classes)
    return LeNet5(layers)


class LeNetZhu(nn.Sequential):
    """Three sigmoid convolutions of 12 channels (5x5, strides 2, 2, 1) and one linear layer."""

    channels_last: ClassVar[bool] = False


def lenet_zhu(input_shape: Sequence[int], classes: int, *, width: int = 12) -> LeNetZhu:
    """The smooth network with large initial weights on which gradient-leakage attacks are usually demonstrated.

    Weights and biases are drawn from U(-0.5, 0.5). 588 features at 28x28, 768 at 32x32.
    """
    shape = check_image("lenet-zhu", input_shape)
    check_count("width", width)
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(shape[0], width, 5, stride=2, padding=2),
        sigmoid1=nn.Sigmoid(),
        conv2=nn.Conv2d(width, width, 5, stride=2, padding=2),
        sigmoid2=nn.Sigmoid(),
        conv3=nn.Conv2d(width, width, 5, stride=1, padding=2),
        sigmoid3=nn.Sigmoid(),
    )
    features = flat_features("lenet-zhu", nn.Sequential(layers), shape, "Use larger images.")
    layers["flatten"] = nn.Flatten()
    layers["output"] = nn.Linear(features, classes)
    model = LeNetZhu(layers)
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.uniform_(-0.5, 0.5)
    return model
