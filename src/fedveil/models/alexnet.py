"""AlexNet at CIFAR size (FedCEO, ICML 2025, Table 6).

Deviations: the paper prints no layers. These are AlexNet's five convolutions (64, 192, 384, 256, 256
channels) with 3x3 kernels and a stride of 2 in the first, so that the classifier's input for a 32x32 image is
256x2x2. The two hidden layers have the same number of units (1024) instead of 4096, which `hidden=` restores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from fedveil.models.shapes import check_count, check_image, check_rate, flat_features


class AlexNet(nn.Sequential):
    """Five convolutions, three max-pools, three linear layers with dropout."""

    channels_last: ClassVar[bool] = True


def alexnet(input_shape: Sequence[int], classes: int, *, hidden: int = 1024, dropout: float = 0.5) -> AlexNet:
    """AlexNet for small images (at least 15x15)."""
    shape = check_image("alexnet", input_shape)
    check_count("hidden", hidden)
    check_rate(dropout)
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(shape[0], 64, 3, stride=2, padding=1),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(64, 192, 3, padding=1),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(192, 384, 3, padding=1),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(384, 256, 3, padding=1),
        relu4=nn.ReLU(),
        conv5=nn.Conv2d(256, 256, 3, padding=1),
        pool3=nn.MaxPool2d(2),
        relu5=nn.ReLU(),
    )
    features = flat_features("alexnet", nn.Sequential(layers), shape, "Use at least 15x15 pixels.")
    layers["flatten"] = nn.Flatten()
    layers["dropout1"] = nn.Dropout(dropout)
    layers["fc1"] = nn.Linear(features, hidden)
    layers["relu6"] = nn.ReLU()
    layers["dropout2"] = nn.Dropout(dropout)
    layers["fc2"] = nn.Linear(hidden, hidden)
    layers["relu7"] = nn.ReLU()
    layers["fc3"] = nn.Linear(hidden, classes)
    return AlexNet(layers)
