"""The ClientApp: one node, one client.

A node that was started with `fedveil-node` in its node configuration is deployed: its data, its policy and its ledger
are its own, whatever the server says. A node without it takes part in a simulation: it is client `partition-id` of the
experiment's own partition, and its state is a file in the result folder.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedveil.data.dataset import require_labels_below
from fedveil.data.vocabulary import Vocabulary
from fedveil.engines.flower.node import Node, admit_all, refused_by
from fedveil.engines.flower.wire import LARGEST_MESSAGE, Order, RefusalError, read_hello
from fedveil.engines.worker import ClientWorker
from fedveil.errors import InputError
from fedveil.experiment.config import Config, TextSection
from fedveil.experiment.prepare import Prepared, model_bytes, model_shape, prepare, task_for
from fedveil.features.feature_map import make_features
from fedveil.federation.node import NodeClients, open_node
from fedveil.federation.policy import RefusedError
from fedveil.federation.run_settings import RunSettings, parse_config, vocabulary_on_nodes
from fedveil.messages import Message as Downlink

log = logging.getLogger("flwr.fedveil")
app = ClientApp()
STATES = "clients"  # where a simulation keeps its clients' states, in the result folder


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say which client this is."""
    try:
        read_hello(message.content)
        return Message(node_of(context).introduction(), reply_to=message)
    except Exception as error:  # Flower would send the server its text, which may speak of data
        return Message(refused_by(error, _name(context)), reply_to=message)


@app.train("exchange")
def exchange(message: Message, context: Context) -> Message:
    """One exchange of this client."""
    try:
        return Message(node_of(context).answer(message.content), reply_to=message)
    except Exception as error:
        return Message(refused_by(error, _name(context)), reply_to=message)


def _name(context: Context) -> str:
    """Of a node that may not even be able to read its own files."""
    folder = context.node_config.get("fedveil-node")
    return f"client-{context.node_config.get('partition-id')}" if folder is None else Path(str(folder)).name


def node_of(context: Context) -> Node:
    """The client that this node is, in the run of this context."""
    settings = RunSettings.from_run_config(context.run_config)
    folder = context.node_config.get("fedveil-node")
    return _simulated(settings, context) if folder is None else _deployed(settings, str(folder))


def _deployed(settings: RunSettings, folder: str) -> Node:
    """From the server's settings: the model, the method, the public seed. Everything else is the node's own."""
    home = open_node(folder)
    config = settings.config
    classes = config.task.classes
    if classes is None:
        raise RefusalError("message", "the run does not say how many classes there are")
    vocabulary = vocabulary_on_nodes(config)
    if vocabulary is None:
        examples = home.examples
    else:
        text = config.task.text or TextSection()
        examples = home.tokens(vocabulary, length=text.length, too_long=text.too_long)
    require_labels_below(examples.y, classes, home.name)
    limit = home.guard.policy.maximum_message
    shape = model_shape(config, examples.x.shape[1:])
    _require_room(config, shape, classes, vocabulary, limit)
    if (made := make_features(config.task.features, config.task.feature_options)) is not None:
        examples = home.features(made)
    task, method = task_for(config, shape, classes, vocabulary), config.build_method()

    def admit(order: Order, down: Downlink) -> None:
        at = order.at
        told = {"announced": int(down.scalars().get("cohort", 0)), "seed": settings.seed}
        try:
            home.guard.admit(order.run, at.round, method, at.plan, exchange=at.exchange, **told)
        except RefusedError as error:
            raise RefusalError("policy", str(error)) from error

    clients = NodeClients(home.client, examples)
    worker = ClientWorker(task, clients, method, settings.seed, home.noise)
    return Node(home.name, home.client, len(examples), worker, home.state / "clients", admit, limit)


def _require_room(
    config: Config, shape: Sequence[int], classes: int, vocabulary: Vocabulary | None, most: int
) -> None:
    """Refuse a model that no message this node reads could hold, before any memory is taken for it."""
    try:
        size = model_bytes(config, shape, classes, vocabulary)
    except (RuntimeError, OverflowError) as error:  # more elements than can be counted
        raise RefusalError("size", "the model cannot be built") from error
    if size > most:
        raise RefusalError(
            "size", f"a model of {size} bytes, more than a message may hold (maximum_message = {most})"
        )


def _simulated(settings: RunSettings, context: Context) -> Node:
    if settings.config.run.engine == "flower":
        raise InputError(
            "node-config",
            dict(context.node_config),
            "names no node folder",
            "Start it by `fedveil deploy node`.",
        )
    client = int(str(context.node_config.get("partition-id", -1)))
    prepared = _prepared(settings.config.to_toml(), settings.seed, settings.data)
    if not 0 <= client < prepared.plan.clients:
        raise InputError("partition-id", client, "is no client", f"Use 0 to {prepared.plan.clients - 1}.")
    worker = ClientWorker(prepared.task, prepared.clients, prepared.method, settings.seed)
    limit = settings.config.run.max_message or LARGEST_MESSAGE
    size = prepared.clients.sizes[client]
    return Node(
        f"client-{client}", client, size, worker, settings.folder / STATES / str(client), admit_all, limit
    )


@functools.lru_cache(maxsize=1)
def _prepared(text: str, seed: int, data: Path | None) -> Prepared:
    """A worker of a simulation plays many clients in turn: it loads their data once."""
    return prepare(parse_config(text), seed, data)
