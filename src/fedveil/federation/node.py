"""A node opened from its own folder: its data, its noise, its state and its policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedveil.data.client_data import ClientData
from fedveil.data.dataset import Examples, TextExamples, images_from_bytes, labels_from
from fedveil.data.own import examples_from_arrays, read_npz
from fedveil.data.persons import check_persons, limit_rows
from fedveil.data.pictures import list_pictures, read_pictures
from fedveil.data.raw_table import read_table
from fedveil.data.schema import TableSchema, read_schema
from fedveil.data.table import table_examples, unknown_categories
from fedveil.data.text import read_labelled_texts
from fedveil.data.tokens import TooLong, tokenise_texts
from fedveil.data.vocabulary import Vocabulary
from fedveil.errors import DataError, InputError
from fedveil.features.cache import FOLDER
from fedveil.features.feature_map import FeatureMap, examples_as_features
from fedveil.federation.config import NODE_FILE, POLICY_FILE, DataSection, NodeConfig
from fedveil.federation.declared import Declared, check_held
from fedveil.federation.policy import Policy, PolicyGuard
from fedveil.streams import NoiseSource
from fedveil.validation import read_toml


class NodeClients:
    """The single client of a node, under its index on the client axis.

    `declared` are the classes that it declares, regardless of its examples.
    """

    def __init__(self, client: int, examples: Examples, declared: tuple[int, ...]) -> None:
        self._client = client
        sizes = torch.tensor([len(examples)])
        self._data = ClientData(examples.x[None], examples.y[None], sizes, (declared,))

    @property
    def ids(self) -> Sequence[int]:
        return [self._client]

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
    """Everything that a node reads from its own folder. None of it comes from the server."""

    directory: Path
    name: str
    client: int
    noise: NoiseSource
    """The source of privacy noise: entropy, unless the node's own file declares a test."""
    state: Path
    """The node's private folder for state that persists across restarts."""
    held: Examples | TextExamples
    brightness: tuple[float, float]
    """The mean and standard deviation that convert pixel values back to brightness 0 to 1."""
    declared: Declared
    guard: PolicyGuard
    schema: TableSchema | None = None
    """The schema of a table."""

    @property
    def examples(self) -> Examples:
        """The node's training examples, for numeric data."""
        if isinstance(self.held, TextExamples):
            raise InputError(
                "data.reader",
                "texts",
                "this node holds texts, the model reads numbers",
                "Choose another model.",
            )
        return self.held

    def features(self, made: FeatureMap) -> Examples:
        """The node's training examples as features of its images; cached in its state folder."""
        mean, std = ((value,) * self.examples.x.shape[1] for value in self.brightness)
        return examples_as_features(made, self.examples, mean, std, self.state / FOLDER)

    def tokens(self, vocabulary: Vocabulary, *, length: int, too_long: TooLong) -> Examples:
        """The node's training examples for texts, one for each text."""
        if isinstance(self.held, Examples):
            raise InputError(
                "data.reader",
                "numbers",
                "this node holds numbers, the model reads texts",
                "Choose another model.",
            )
        made, _, _ = tokenise_texts(self.name, self.held, vocabulary, length=length, too_long=too_long)
        return made


def open_node(directory: Path | str) -> Node:
    """Open the node of this folder (`node.toml`, `policy.toml`): read its data and verify its ledger."""
    folder = Path(directory).absolute()
    config = read_toml(folder / NODE_FILE, NodeConfig)
    policy = read_toml(folder / POLICY_FILE, Policy)
    held = read_held(config.data, folder)
    if len(held) == 0:
        raise DataError(f"{folder / config.data.path}: contains no example. Add examples.", field="data.path")
    state = folder / config.state
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    declared = _declared(config.data, folder, len(held))
    guard = PolicyGuard(config.name, policy, state, declared.records)
    noise: NoiseSource = "seeded" if config.testing.seeded_noise else "entropy"
    # Pictures are read as (brightness - 1/2) / (1/2); arrays contain brightness where features are computed.
    brightness = (0.5, 0.5) if config.data.reader == "pictures" else (0.0, 1.0)
    schema = _schema(config.data, folder)
    return Node(folder, config.name, config.client, noise, state, held, brightness, declared, guard, schema)


def checked_node(directory: Path | str) -> Node:
    """Open the node of this folder and check its data against the declaration; for its operator, before it joins."""
    node = open_node(directory)
    check_held(node.held, node.declared, str(node.directory / NODE_FILE))
    return node


def unknown_in(node: Node) -> dict[str, int]:
    """The rows of the node's table with a category that the schema does not contain, by column.

    They are trained on as rows without a category, since a refusal would tell the server about them: for the node's
    operator, before it joins.
    """
    if node.schema is None:
        return {}
    config = read_toml(node.directory / NODE_FILE, NodeConfig)
    return unknown_categories(node.schema, read_table(node.directory / config.data.path))


def _declared(data: DataSection, folder: Path, held: int) -> Declared:
    classes = data.classes if isinstance(data.classes, int) else len(data.class_names) or None
    schema = _schema(data, folder)
    if schema is None:
        return Declared(data.records or held, classes, data.labels)
    most = check_persons(data.person, data.rows_per_person)
    return Declared(data.records or held, schema.outputs, data.labels, schema.target, most)


def _schema(data: DataSection, folder: Path) -> TableSchema | None:
    return None if data.schema_ is None else read_schema(folder / data.schema_)


def read_held(data: DataSection, folder: Path) -> Examples | TextExamples:
    """The examples that `[data]` describes."""
    path = folder / data.path
    if not path.exists():
        raise DataError(
            f"{path}: does not exist. Put this node's data there, or change [data] in {NODE_FILE}.",
            field="data.path",
            value=str(path),
        )
    if data.reader == "npz":
        return examples_from_arrays(*read_npz(path), field=str(path))
    classes = data.class_names
    if data.reader == "texts":
        texts = read_labelled_texts(path, classes)
        blank = next((place for place, text in enumerate(texts.texts, 1) if not text.strip()), None)
        if blank is not None:  # every text must be an example, with any vocabulary
            raise DataError(f"{path}: line {blank} has no text. Remove it.", field="line", value=blank)
        return texts
    if data.reader == "pictures":
        listed = list_pictures(path, classes)
        if not listed:
            raise DataError(
                f"{path}: contains no folder of any of the classes {', '.join(classes)}. Check data.classes.",
                field="data.classes",
                value=tuple(classes),
            )
        half = (0.5,) * data.channels
        pixels = read_pictures([picture for picture, _ in listed], data.channels)
        x, _, _ = images_from_bytes(pixels, half, half)
        return Examples(x, labels_from(np.array([label for _, label in listed])))
    schema, table = _schema(data, folder), read_table(path)
    assert schema is not None
    most = check_persons(data.person, data.rows_per_person)
    if data.person is not None and most is not None:
        table = limit_rows(table, data.person, most, seed=0)
    return table_examples(schema, table)
