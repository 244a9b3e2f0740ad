"""IDX, the format of MNIST: two zero bytes, type, number of axes, sizes, then the bytes."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from fedveil.data.files import open_content
from fedveil.errors import DataError

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, *, axes: int, sha256: str | None = None) -> np.ndarray:
    """An IDX file of unsigned bytes with so many axes, plain or compressed.

    The declared size is compared with the file before memory is allocated; a wrong, truncated or overlong file is a
    DataError.
    """
    with open_content(path) as content:
        zero, kind, found_axes = struct.unpack(">HBB", content.read(4))
        if zero != 0 or kind != _UNSIGNED_BYTE:
            raise DataError(
                f"{path}: is not an IDX file of unsigned bytes (its first bytes are wrong). Get it again.",
                field="header",
                value=str(path),
            )
        if found_axes != axes:
            raise DataError(
                f"{path}: has {found_axes} axes where {axes} are expected. Get it again.",
                field="axes",
                value=found_axes,
            )
        shape = struct.unpack(f">{axes}I", content.read(4 * axes))
        if 0 in shape:
            raise DataError(
                f"{path}: contains no examples, its shape is {list(shape)}. Get it again.",
                field="shape",
                value=list(shape),
            )
        values = content.read(math.prod(shape))
        content.end()
        content.require_sha256(sha256)
    return np.frombuffer(values, np.uint8).reshape(shape)


def read_idx_pair(
    images: Path, labels: Path, *, images_sha256: str | None = None, labels_sha256: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, H, W]` and labels `[n]` that belong together."""
    pixels = read_idx(images, axes=3, sha256=images_sha256)
    y = read_idx(labels, axes=1, sha256=labels_sha256)
    if len(pixels) != len(y):
        raise DataError(
            f"{images} has {len(pixels)} images but {labels} has {len(y)} labels. Get both files again.",
            field="labels",
            value=(len(pixels), len(y)),
        )
    return pixels, y
