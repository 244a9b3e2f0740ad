"""The feature map of a task: images become vectors, record by record, without looking at data.

`[task] features = "scattering"` with `[task.feature_options]`. Tramer, Boneh: Differentially Private Learning Needs
Better Features (or Much More Data). ICLR 2021: a linear model on scattering features learns more than a network does
under the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedveil.data.dataset import Dataset, Examples, FeatureFacts
from fedveil.errors import InputError, known_name, within
from fedveil.features.cache import cached, digest_of
from fedveil.features.normalise import constants, scatter_channels
from fedveil.features.scattering import Scattering
from fedveil.features.synthetic_images import SyntheticImages
from fedveil.validation import refused

_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ScatteringFeatures:
    """Wavelet scattering, constants from synthetic images, each record to unit norm.

    Args:
        depth: The number of scales J.
        angles: The number of orientations L.
        pooling: The side of the maps after average pooling; 0 for none.
        synthetic: What is drawn for the constants: "strokes" or "leaves". "auto" draws strokes for grey images and
            leaves for colour images.
        whitening: How far channels are decorrelated, from 0 to 1.
    """

    name: ClassVar[str] = "scattering"
    version: ClassVar[int] = 1
    depth: Annotated[int, Field(ge=1, le=6)] = 2
    angles: Annotated[int, Field(ge=1, le=32)] = 8
    pooling: Annotated[int, Field(ge=0)] = 0
    synthetic: SyntheticImages | Literal["auto"] = "auto"
    whitening: Annotated[float, Field(ge=0, le=1)] = 0.5

    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the features of images of this shape. Raises `InputError` for anything else."""
        channels, scattering = self._scattering(image_shape)
        height, width = scattering.map_shape
        return (channels * scattering.paths * height * width,)

    def _scattering(self, shape: Sequence[int]) -> tuple[int, Scattering]:
        if len(shape) != 3:
            raise InputError(
                "task.features",
                "scattering",
                f"reads images, not examples of shape {list(shape)}",
                "Leave task.features out, or use a data set of images.",
            )
        channels, height, width = shape
        with within("task.feature_options"):
            scattering = Scattering(height, width, self.depth, self.angles, self.pooling)
        return channels, scattering

    def features(self, brightness: Tensor, cache: Path) -> Tensor:
        """The features `[n, d]` of images `[n, C, H, W]` of brightness 0 to 1; values beyond are cut off."""
        shape = (len(brightness), *self.shape(brightness.shape[1:]))
        brightness = brightness.clamp(0, 1)
        return cached(
            cache,
            digest_of(f"{self.name} {self.version} {asdict(self)}", brightness),
            shape,
            lambda: self.compute(brightness),
        )

    def compute(self, brightness: Tensor) -> Tensor:
        """The features of images whose values lie between 0 and 1, computed now."""
        channels, scattering = self._scattering(brightness.shape[1:])
        synthetic = self.synthetic
        if synthetic == "auto":
            synthetic = "strokes" if channels == 1 else "leaves"
        normalise = constants(scattering, channels, synthetic, self.whitening)
        out = torch.empty(len(brightness), *self.shape(brightness.shape[1:]))
        for start in range(0, len(out), _CHUNK):
            part = slice(start, start + _CHUNK)
            out[part] = normalise(scatter_channels(scattering, brightness[part]))
        return out


FEATURES: dict[str, type[ScatteringFeatures]] = {ScatteringFeatures.name: ScatteringFeatures}


def make_features(name: str | None, options: Mapping[str, Any]) -> ScatteringFeatures | None:
    """The feature map of this name with its options checked; None where there is none."""
    if name is None:
        if options:
            raise InputError(
                "task.feature_options", dict(options), "there are no features", "Give task.features."
            )
        return None
    kind = FEATURES[known_name("task.features", "feature map", name, FEATURES)]
    try:
        return kind(**options)
    except ValidationError as error:
        raise refused(error, "task.feature_options", [field.name for field in fields(kind)]) from error


def examples_as_features(
    made: ScatteringFeatures, examples: Examples, mean: Sequence[float], std: Sequence[float], cache: Path
) -> Examples:
    """The features of examples whose brightness is `x * std + mean` in each channel."""
    made.shape(examples.x.shape[1:])  # refuses what is no image
    back = [torch.tensor(values).reshape(1, -1, 1, 1) for values in (mean, std)]
    return replace(examples, x=made.features(examples.x * back[1] + back[0], cache))


def dataset_as_features(made: ScatteringFeatures, dataset: Dataset, cache: Path) -> Dataset:
    """The data set with features for images."""
    train, test = (
        examples_as_features(made, examples, dataset.mean, dataset.std, cache)
        for examples in (dataset.train, dataset.test)
    )
    size = train.x.shape[1]
    facts = FeatureFacts(made.name, asdict(made), dataset.input_shape)
    return replace(dataset, train=train, test=test, mean=(0.0,) * size, std=(1.0,) * size, features=facts)
