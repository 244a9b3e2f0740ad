"""Tiny files in public formats, made here so that readers are tested without any download."""

from __future__ import annotations

import gzip
import lzma
import struct
from pathlib import Path

import numpy as np


def idx_bytes(values: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write(path: Path, content: bytes) -> Path:
    """Write, compressed as the ending asks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".xz":
        content = lzma.compress(content)
    path.write_bytes(content)
    return path


def tiles(rng: np.random.Generator, n: int, size: int = 28) -> np.ndarray:
    return rng.integers(0, 256, (n, size, size), dtype=np.uint8)


def cifar_bytes(pixels: np.ndarray, *labels: np.ndarray) -> bytes:
    columns = [label.astype(np.uint8)[:, None] for label in labels]
    return np.concatenate([*columns, pixels.reshape(len(pixels), -1)], axis=1).tobytes()
