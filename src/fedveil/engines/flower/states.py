"""A client's states on its own disk: one file per version, so that unused uploads have no effect.

The server names the version to continue from, the one after the client's last upload that was used. If a reply was
late, or the server repeats a round, the earlier state is still available.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

import safetensors
import safetensors.torch

from fedveil.atomic_files import write_atomically
from fedveil.engines.flower.wire import Version
from fedveil.tree import State


class StateStore:
    """The states of one client in one run."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder / hashlib.sha256(run.encode()).hexdigest()[:16]

    def load(self, version: Version) -> State | None:
        """The state of this version; None if it is missing or damaged."""
        try:
            held = safetensors.torch.load(self._path(version).read_bytes())
        except (OSError, safetensors.SafetensorError):
            return None
        return {name.partition("/")[2]: leaf for name, leaf in sorted(held.items())}

    def save(self, version: Version, state: State) -> None:
        """Store this state, including the order of its leaves."""
        self._folder.mkdir(parents=True, exist_ok=True)
        numbered = {f"{i:04d}/{name}": leaf.contiguous() for i, (name, leaf) in enumerate(state.items())}
        write_atomically(self._path(version), safetensors.torch.save(numbered))

    def forget(self, before: Version, needed: Collection[Version]) -> None:
        """Remove versions before this one, except those still needed."""
        kept = {self._path(version).name for version in (before, *needed)}
        for path in self._folder.glob("*.state"):
            if path.name < self._path(before).name and path.name not in kept:
                path.unlink(missing_ok=True)

    def _path(self, version: Version) -> Path:
        return self._folder / f"{version[0]:08d}-{version[1]:06d}.state"
