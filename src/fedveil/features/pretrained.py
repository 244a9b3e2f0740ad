"""An image encoder from a transformers folder on this machine, as a feature map.

Nothing is downloaded, no code of the folder is run, and weights are read as safetensors only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import InputError, install
from fedveil.lazy_torch import nn, torch

if TYPE_CHECKING:
    from torch import Tensor

_SIDE = 224
_READ = 1 << 20


@dataclass(frozen=True)
class Encoder:
    """Converts images `[n, C, H, W]` of brightness 0 to 1 to vectors of unit norm `[n, d]`, independently."""

    module: nn.Module
    side: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str

    def width(self, image_shape: Sequence[int]) -> int:
        """The dimension of the features; refuses images with another number of channels."""
        if image_shape[0] not in (1, self.channels):
            raise InputError(
                "path",
                self.digest[:12],
                f"the encoder reads {self.channels} channels, the images have {image_shape[0]}",
                "Choose another encoder.",
            )
        return int(self(torch.zeros(1, *image_shape)).shape[1])

    def __call__(self, images: Tensor) -> Tensor:
        if images.shape[1] != self.channels:
            images = images.expand(-1, self.channels, -1, -1)
        if tuple(images.shape[2:]) != (self.side, self.side):
            size = (self.side, self.side)
            images = nn.functional.interpolate(images, size, mode="bilinear", antialias=True)
        mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (self.mean, self.std))
        with torch.no_grad():
            flat = _vectors(self.module(pixel_values=(images - mean) / std)).flatten(1).float()
        lengths: Tensor = flat.norm(dim=1, keepdim=True)
        return flat / lengths.clamp(min=1e-12)


def _vectors(outputs: Any) -> Tensor:
    """The pooled output; else the mean of the last layer over positions or tokens."""
    pooled = getattr(outputs, "pooler_output", None)
    if isinstance(pooled, torch.Tensor):
        return pooled
    last: Tensor = outputs.last_hidden_state
    return last.mean((2, 3)) if last.dim() == 4 else last.mean(1)


def load_encoder(path: str) -> Encoder:
    """The encoder in this folder.

    Raises:
        InputError: There is none, it does not read images, or transformers is not installed.
    """
    folder = Path(path).expanduser().absolute()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InputError(
            "path",
            path,
            "is not a transformers folder with safetensors",
            "Give a folder with config.json and model.safetensors.",
        )
    return _loaded(folder, _digest(folder))


def _digest(folder: Path) -> str:
    """A digest of everything that determines the encoder's outputs."""
    whole = hashlib.sha256()
    for path in sorted(
        [*folder.glob("*.safetensors"), folder / "config.json", folder / "preprocessor_config.json"]
    ):
        if path.is_file():
            whole.update(path.name.encode())
            with path.open("rb") as file:
                while part := file.read(_READ):
                    whole.update(part)
    return whole.hexdigest()


@functools.lru_cache(maxsize=2)
def _loaded(folder: Path, digest: str) -> Encoder:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError("task.features", "pretrained", "needs transformers", install("text")) from error
    try:
        module = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise InputError("path", str(folder), f"cannot be read ({first})", "Give another folder.") from error
    if getattr(module, "main_input_name", "") != "pixel_values":
        raise InputError("path", str(folder), "does not read images", "Give an image encoder.")
    facts = module.config.to_dict()
    scaling: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        scaling = json.loads((folder / "preprocessor_config.json").read_text())
    channels = int(facts.get("num_channels", 3))
    side = facts.get("image_size") or _SIDE
    mean, std = (tuple(scaling.get(key) or (0.5,) * channels) for key in ("image_mean", "image_std"))
    module.requires_grad_(False).eval()
    return Encoder(module, int(side), channels, mean, std, digest)
