"""Feature maps: the conversion of images to vectors, record by record and independent of all data.

`[task] features = "scattering"` or `"pretrained"` with `[task.feature_options]`. Tramer, Boneh: Differentially Private
Learning Needs Better Features (or Much More Data). ICLR 2021: a linear model on such features learns more than a
network does under the same noise.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fedveil.data.dataset import Dataset, Examples, FeatureFacts
from fedveil.data.files import user_cache
from fedveil.errors import InputError, known_name, within
from fedveil.features.blocks import in_blocks
from fedveil.features.cache import FOLDER, cached, digest_of
from fedveil.features.normalise import Centring, Maps, constants
from fedveil.features.pretrained import Encoder, load_encoder
from fedveil.features.scattering import Scattering
from fedveil.features.synthetic_images import SyntheticImages
from fedveil.lazy_torch import torch
from fedveil.validation import refused

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = ConfigDict(extra="forbid")
_IMAGES_AT_A_TIME = 16
_LOG = logging.getLogger(__name__)
LOG_SECONDS = 3.0
"""The first line of progress is logged after so long."""


class FeatureMap(ABC):
    """Converts images `[n, C, H, W]` of brightness 0 to 1 to vectors, each image independently."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    note: ClassVar[str | None] = None
    """A note on the map for readers of results."""

    @abstractmethod
    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the features of images of this shape. Raises `InputError` for anything else."""

    @abstractmethod
    def transform(self, image_shape: Sequence[int]) -> tuple[Callable[[Tensor], Tensor], int]:
        """The map of a block of images, and the best block size."""

    def digest(self) -> str:
        """A description that identifies the map."""
        return f"{self.name} {self.version} {self.options()}"

    def options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def compute(self, brightness: Tensor) -> Tensor:
        """The features of images with values between 0 and 1, without the cache."""
        transform, size = self.transform(brightness.shape[1:])
        return in_blocks(transform, brightness, size, _progress_of(len(brightness)))

    def features(self, brightness: Tensor, cache: Path) -> Tensor:
        """The features `[n, d]` of images of brightness 0 to 1; other values are clipped."""
        shape = (len(brightness), *self.shape(brightness.shape[1:]))
        brightness = brightness.clamp(0, 1)
        return cached(cache, digest_of(self.digest(), brightness), shape, lambda: self.compute(brightness))


def _progress_of(images: int) -> Callable[[int], None]:
    """Logs how many images are done after `LOG_SECONDS`, after twice that time, and so on."""
    begin, wait = time.monotonic(), LOG_SECONDS

    def log_when_due(done: int) -> None:
        nonlocal wait
        if time.monotonic() - begin >= wait:
            _LOG.info("features: %d of %d images; they are kept for later runs", done, images)
            wait *= 2

    return log_when_due


def _require_image(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 3:
        raise InputError(
            "task.features",
            name,
            f"reads images, not examples of shape {list(shape)}",
            "Leave task.features out, or use a data set of images.",
        )


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ScatteringFeatures(FeatureMap):
    """Wavelet scattering, constants from synthetic images, each record to unit norm.

    Args:
        depth: The number of scales J.
        angles: The number of orientations L.
        pooling: The side of the maps after average pooling; 0 for none.
        synthetic: What is drawn for the constants: "strokes" or "glyphs" for writing, "leaves" or "scenes" for
            photographs. "auto" draws strokes for grey images and leaves for colour images.
        whitening: How far channels are decorrelated, from 0 to 1.
        square_root: Whether the square root of every coefficient is taken, so that strong edges count for less.
        mirror: Whether maps and mirrored maps are averaged: half as many numbers, nearly the same for an image and its
            mirror image.
        centring: Whether the mean of each "channel" or of each "place" of a channel is subtracted.
    """

    name: ClassVar[str] = "scattering"
    version: ClassVar[int] = 2
    depth: Annotated[int, Field(ge=1, le=6)] = 2
    angles: Annotated[int, Field(ge=1, le=32)] = 8
    pooling: Annotated[int, Field(ge=0)] = 0
    synthetic: SyntheticImages | Literal["auto"] = "auto"
    whitening: Annotated[float, Field(ge=0, le=1)] = 0.5
    square_root: bool = False
    mirror: bool = False
    centring: Centring = "channel"

    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        channels, maps = self._maps(image_shape)
        height, width = maps.map_shape
        return (channels * maps.scattering.paths * height * width,)

    def _maps(self, shape: Sequence[int]) -> tuple[int, Maps]:
        _require_image(self.name, shape)
        channels, height, width = shape
        with within("task.feature_options"):
            scattering = Scattering(height, width, self.depth, self.angles, self.pooling)
        return channels, Maps(scattering, self.square_root, self.mirror)

    def transform(self, image_shape: Sequence[int]) -> tuple[Callable[[Tensor], Tensor], int]:
        channels, maps = self._maps(image_shape)
        synthetic = self.synthetic
        if synthetic == "auto":
            synthetic = "strokes" if channels == 1 else "leaves"
        normalise = constants(maps, channels, synthetic, self.whitening, self.centring)
        return lambda images: normalise(maps(images)), max(1, maps.scattering.block // channels)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class PretrainedFeatures(FeatureMap):
    """The output of an image encoder that somebody trained on public data, each record to unit norm.

    Args:
        path: A transformers folder on this machine: `config.json` and weights as safetensors.
    """

    name: ClassVar[str] = "pretrained"
    note: ClassVar[str | None] = (
        "The features come from an encoder that was trained before. What is proven says nothing about the data that "
        "it was trained on: they have to be public."
    )
    path: Annotated[str, Field(min_length=1)]

    def _encoder(self) -> Encoder:
        with within("task.feature_options"):
            return load_encoder(self.path)

    def shape(self, image_shape: Sequence[int]) -> tuple[int, ...]:
        _require_image(self.name, image_shape)
        with within("task.feature_options"):
            return (load_encoder(self.path).width(image_shape),)

    def digest(self) -> str:
        return f"{self.name} {self.version} {self._encoder().digest}"

    def transform(self, image_shape: Sequence[int]) -> tuple[Callable[[Tensor], Tensor], int]:
        return self._encoder(), _IMAGES_AT_A_TIME


FEATURES: dict[str, type[ScatteringFeatures] | type[PretrainedFeatures]] = {
    ScatteringFeatures.name: ScatteringFeatures,
    PretrainedFeatures.name: PretrainedFeatures,
}


def make_features(name: str | None, options: Mapping[str, Any]) -> FeatureMap | None:
    """The feature map of this name with validated options; None without a name."""
    if name is None:
        if options:
            raise InputError(
                "task.feature_options", dict(options), "needs a feature map", "Give task.features."
            )
        return None
    kind = FEATURES[known_name("task.features", "feature map", name, FEATURES)]
    try:
        return kind(**options)
    except ValidationError as error:
        raise refused(error, "task.feature_options", [field.name for field in fields(kind)]) from error


def examples_as_features(
    made: FeatureMap, examples: Examples, mean: Sequence[float], std: Sequence[float], cache: Path
) -> Examples:
    """The features of examples whose brightness is `x * std + mean` in each channel."""
    made.shape(examples.x.shape[1:])  # refuses what is no image
    back = [torch.tensor(values).reshape(1, -1, 1, 1) for values in (mean, std)]
    return replace(examples, x=made.features(examples.x * back[1] + back[0], cache))


def dataset_as_features(made: FeatureMap, dataset: Dataset, cache: Path) -> Dataset:
    """The data set with features in place of images."""
    train, test = (
        examples_as_features(made, examples, dataset.mean, dataset.std, cache)
        for examples in (dataset.train, dataset.test)
    )
    size = train.x.shape[1]
    facts = FeatureFacts(made.name, made.options(), dataset.input_shape, made.note)
    notes = dataset.notes if made.note is None else (*dataset.notes, made.note)
    return replace(
        dataset, train=train, test=test, mean=(0.0,) * size, std=(1.0,) * size, features=facts, notes=notes
    )


def as_features(dataset: Dataset, name: str, **options: Any) -> Dataset:
    """The data set with feature vectors in place of images, as `[task] features` has it.

    Args:
        dataset: A data set of images.
        name: "scattering" or "pretrained".
        options: As in `[task.feature_options]`.

    Returns:
        The same examples, each computed from its image alone.

    Raises:
        InputError: There is no such map or option, or the data set does not contain images that the map can read.
    """
    made = make_features(name, options)
    assert made is not None
    return dataset_as_features(made, dataset, user_cache() / FOLDER)
