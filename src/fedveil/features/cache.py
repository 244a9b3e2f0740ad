"""A cache of features on disk, by a digest of their inputs.

Features disclose information about the records, and are trained on, so only the owner may read or write the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedveil.atomic_files import write_atomically
from fedveil.errors import ResultError
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "features"


def digest_of(description: str, values: Tensor) -> str:
    """A digest of the feature map and its inputs."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{description} {values.dtype} {list(values.shape)}".encode())
    digest.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def cached(folder: Path, digest: str, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
    """`compute()` rounded to half precision, as float32; read from the folder if it is cached.

    Values are rounded before writing, so that a result does not depend on whether it was cached. If the folder cannot
    be written or belongs to somebody else, or a file is damaged, features are computed again.
    """
    path = folder / f"{digest}.npy"
    if not _is_private(folder):
        return compute().half().float()
    with suppress(OSError, ValueError, EOFError), path.open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        own = (
            os.fstat(file.fileno()).st_uid == os.getuid()
        )  # not left there while the folder was open to others
        if own and stored.shape == shape and stored.dtype == np.float16:
            return torch.from_numpy(stored).float()
    rounded = compute().half()
    with suppress(OSError, ResultError):
        content = io.BytesIO()
        np.save(content, rounded.numpy(), allow_pickle=False)
        write_atomically(path, content.getvalue())
    return rounded.float()


def _is_private(folder: Path) -> bool:
    """Whether the folder is there and closed to everybody else, which is seen to here."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid != os.getuid():
            return False
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError:
        return False
    return True
