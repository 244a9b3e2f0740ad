"""The published model of a run: a safetensors file whose checksum is in the run's summary."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors

from fedveil.atomic_files import write_atomically
from fedveil.lazy_torch import safetensors_torch
from fedveil.tree import Params

MODEL = "model.safetensors"
CHECKSUM = "model_sha256"


def write_model(folder: Path, model: Params) -> str:
    """Write the model and return its checksum."""
    body = safetensors_torch.save({name: leaf.contiguous() for name, leaf in model.items()})
    write_atomically(folder / MODEL, body)
    return hashlib.sha256(body).hexdigest()


def model_problems(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """Problems with the model file of a finished run; without a checksum in the summary only its format is checked."""
    path = folder / MODEL
    if not path.is_file():
        return [f"{MODEL} is missing"]
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            file.keys()
        expected = summary.get(CHECKSUM)
        if expected is None:
            return []
        with path.open("rb") as body:
            found = hashlib.file_digest(body, "sha256").hexdigest()
    except (OSError, safetensors.SafetensorError) as error:
        return [f"{MODEL} is damaged: {error}"]
    return [] if found == expected else [f"{MODEL} is damaged: its checksum is not the one in summary.json"]
