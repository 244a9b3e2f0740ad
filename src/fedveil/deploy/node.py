"""A node opened from its own folder: its data, its noise, its state and its policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedveil.data.client_data import ClientData
from fedveil.data.dataset import Examples, images_from_bytes, labels_from
from fedveil.data.own import examples_from_arrays, read_npz
from fedveil.data.pictures import list_pictures, read_pictures
from fedveil.data.table import read_table
from fedveil.deploy.config import NODE_FILE, POLICY_FILE, DataSection, NodeConfig, read_toml
from fedveil.deploy.form import read_form
from fedveil.deploy.policy import Policy, PolicyGuard
from fedveil.errors import DataError, InputError
from fedveil.streams import NoiseSource


class NodeClients:
    """The one client that lives here, under its index on the client axis. No other's data can be asked for."""

    def __init__(self, client: int, examples: Examples) -> None:
        self._client = client
        self._data = ClientData(examples.x[None], examples.y[None], torch.tensor([len(examples)]))

    @property
    def sizes(self) -> Sequence[int]:
        return [self._data.largest]

    def load(self, clients: Sequence[int]) -> ClientData:
        if list(clients) != [self._client]:
            raise InputError(
                "clients", list(clients), "this node holds one client only", f"Ask for [{self._client}]."
            )
        return self._data


@dataclass(frozen=True)
class Node:
    """Everything a node brings along. None of it comes from the server."""

    directory: Path
    name: str
    client: int
    noise: NoiseSource
    """Where privacy noise comes from: entropy, unless the node's own file says that this is a test."""
    state: Path
    """A folder, private to the node, that survives restarts."""
    examples: Examples
    guard: PolicyGuard

    @property
    def clients(self) -> NodeClients:
        return NodeClients(self.client, self.examples)


def open_node(directory: Path | str) -> Node:
    """The node of this folder (`node.toml`, `policy.toml`), its data read and its ledger verified."""
    folder = Path(directory).absolute()
    config = read_toml(folder / NODE_FILE, NodeConfig)
    policy = read_toml(folder / POLICY_FILE, Policy)
    examples = read_examples(config.data, folder)
    if len(examples) == 0:
        raise DataError(f"{folder / config.data.path}: there is no example in it.")
    state = folder / config.state
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    guard = PolicyGuard(config.name, policy, state, len(examples))
    noise: NoiseSource = "seeded" if config.testing.seeded_noise else "entropy"
    return Node(folder, config.name, config.client, noise, state, examples, guard)


def read_examples(data: DataSection, folder: Path) -> Examples:
    """The examples that `[data]` describes."""
    path = folder / data.path
    if data.reader == "npz":
        return examples_from_arrays(*read_npz(path), field=str(path))
    if data.reader == "pictures":
        classes = data.classes or ()
        listed = list_pictures(path, classes)
        if not listed:
            raise DataError(f"{path}: there is no folder of any of the classes {', '.join(classes)}.")
        half = (0.5,) * data.channels
        pixels = read_pictures([picture for picture, _ in listed], data.channels)
        x, _, _ = images_from_bytes(pixels, half, half)
        return Examples(x, labels_from(np.array([label for _, label in listed])))
    return read_form(folder / (data.form or "")).examples(read_table(path))
