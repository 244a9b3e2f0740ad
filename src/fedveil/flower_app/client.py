"""The ClientApp: one node, one client.

A node that was started with `fedveil-node` in its node configuration is deployed: its data, its policy and its ledger
are its own, whatever the server says. A node without it takes part in a simulation: it is client `partition-id` of the
experiment's own partition, and its state is a file in the result folder.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedveil.engines.flower.node import Node, admit_all, refused_by
from fedveil.engines.flower.wire import LARGEST_MESSAGE
from fedveil.engines.worker import ClientWorker
from fedveil.errors import FedveilError, InputError
from fedveil.experiment import Prepared, prepare, result_folder
from fedveil.flower_app.settings import RunSettings, parse_config

log = logging.getLogger("flwr.fedveil")
app = ClientApp()
STATES = "clients"  # where a simulation keeps its clients' states, in the result folder


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say which client this is."""
    try:
        return Message(node_of(context).introduction(), reply_to=message)
    except FedveilError as error:
        return Message(refused_by(error, None), reply_to=message)


@app.train("exchange")
def exchange(message: Message, context: Context) -> Message:
    """One exchange of this client."""
    try:
        return Message(node_of(context).answer(message.content), reply_to=message)
    except FedveilError as error:
        return Message(refused_by(error, None), reply_to=message)


def node_of(context: Context) -> Node:
    """The client that this node is, in the run of this context."""
    settings = RunSettings.from_run_config(context.run_config)
    return _simulated(settings, context)


def _simulated(settings: RunSettings, context: Context) -> Node:
    if settings.config.run.engine == "flower":
        raise InputError(
            "node-config", dict(context.node_config), "names no node folder", "Start it by `fedveil deploy node`."
        )
    client = int(str(context.node_config.get("partition-id", -1)))
    prepared = _prepared(settings.config.to_toml(), settings.seed, settings.data)
    if not 0 <= client < prepared.plan.clients:
        raise InputError("partition-id", client, "is no client", f"Use 0 to {prepared.plan.clients - 1}.")
    worker = ClientWorker(prepared.task, prepared.clients, prepared.method, settings.seed)
    folder = result_folder(settings.config, settings.seed, settings.experiment, settings.results)
    limit = settings.config.run.max_message or LARGEST_MESSAGE
    size = prepared.clients.sizes[client]
    return Node(client, size, worker, folder / STATES / str(client), admit_all, limit)


@functools.lru_cache(maxsize=1)
def _prepared(text: str, seed: int, data: Path | None) -> Prepared:
    """A worker of a simulation plays many clients in turn: it loads their data once."""
    return prepare(parse_config(text), seed, data)
