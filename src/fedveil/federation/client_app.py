"""The ClientApp: one node, one client.

A node that was started with `fedveil-node` in its node configuration is deployed: its data, policy and ledger come from
its own folder, never from the server. A node without it belongs to a simulation: it is client `partition-id` of the
experiment's partition, and its state is a file in the results folder.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedveil.data.client_data import Clients
from fedveil.data.dataset import Examples
from fedveil.data.vocabulary import Vocabulary
from fedveil.engines.flower.node import Node, admit_all, refused_by
from fedveil.engines.flower.secure_node import SecureNode
from fedveil.engines.flower.wire import LARGEST_MESSAGE, Order, RefusalError, read_hello
from fedveil.engines.worker import ClientWorker
from fedveil.errors import FedveilError, InputError, within
from fedveil.experiment.config import Config
from fedveil.experiment.prepare import (
    Prepared,
    loss_name,
    make_loss,
    model_bytes,
    model_shape,
    prepare,
    task_for,
)
from fedveil.experiment.sections import TextSection
from fedveil.features.feature_map import PretrainedFeatures, make_features
from fedveil.federation.config import POLICY_FILE
from fedveil.federation.declared import Declared, fit, made_up
from fedveil.federation.membership import open_membership, roster_digest
from fedveil.federation.node import Node as OwnNode
from fedveil.federation.node import NodeClients, open_node
from fedveil.federation.policy import Policy, RefusedError
from fedveil.federation.resources import require_affordable, require_counted
from fedveil.federation.run_settings import RunSettings, parse_config, persons_of, vocabulary_on_nodes
from fedveil.losses import labels_end
from fedveil.messages import Message as Downlink
from fedveil.methods.method import AnyMethod
from fedveil.methods.secure import secure_part
from fedveil.privacy.releases import Plan
from fedveil.session.checks import check_clients, first_server
from fedveil.task import ExampleLoss, Task
from fedveil.validation import read_toml

log = logging.getLogger("flwr.fedveil")
app = ClientApp()
STATES = "clients"  # the folder of a simulation's client states, in the results folder


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Introduce this client to the server."""
    try:
        read_hello(message.content)
        return Message(node_of(context).introduction(), reply_to=message)
    except Exception as error:  # Flower would send its text to the server, which may contain data
        return Message(refused_by(error, _name(context)), reply_to=message)


@app.train("exchange")
def exchange(message: Message, context: Context) -> Message:
    """One exchange of this client."""
    try:
        return Message(node_of(context).answer(message.content), reply_to=message)
    except Exception as error:
        return Message(refused_by(error, _name(context)), reply_to=message)


@app.train("leg")
def leg(message: Message, context: Context) -> Message:
    """One leg of a secure sum."""
    try:
        node, limit = secure_node_of(context)
        return Message(node.answer(message.content, limit), reply_to=message)
    except Exception as error:
        return Message(refused_by(error, _name(context)), reply_to=message)


def secure_node_of(context: Context) -> tuple[SecureNode, int]:
    """The node's half of secure sums in the run of this context, and the largest message that it reads."""
    settings = RunSettings.from_run_config(context.run_config)
    method = secure_part(settings.config.build_method())
    folder = context.node_config.get("fedveil-node")
    if method is None or folder is None:
        raise RefusalError("configuration", "this run has no secure sums", "aggregation.kind")
    place = Path(str(folder)).absolute()
    limit = read_toml(place / POLICY_FILE, Policy).maximum_message
    return SecureNode(open_membership(place), method, lambda: _deployed(settings, str(place))), limit


def _name(context: Context) -> str:
    """The node's name, also if its files cannot be read."""
    folder = context.node_config.get("fedveil-node")
    return f"client-{context.node_config.get('partition-id')}" if folder is None else Path(str(folder)).name


def node_of(context: Context) -> Node:
    """The client that this node is, in the run of this context."""
    settings = RunSettings.from_run_config(context.run_config)
    folder = context.node_config.get("fedveil-node")
    return _simulated(settings, context) if folder is None else _deployed(settings, str(folder))


def _deployed(settings: RunSettings, folder: str) -> Node:
    """A deployed node. Only the model, the method and the public seed come from the server's settings."""
    home = _opened(folder)
    config = settings.config
    classes, loss = _agreed_classes(config, home.declared), _agreed_loss(config, home)
    _require_persons(config, home.declared)
    vocabulary, text = vocabulary_on_nodes(config), config.task.text or TextSection()
    # A server must not choose the files that a node reads.
    if config.task.features == PretrainedFeatures.name:
        raise RefusalError(
            "configuration", "the features are in a folder named by the server", "task.features"
        )
    shape = (text.length,) if vocabulary else model_shape(config, home.examples.x.shape[1:])
    policy, records = home.guard.policy, home.declared.records
    size = 0 if vocabulary else math.prod(shape) * home.examples.x.element_size()
    require_affordable(config, policy, records=records, classes=classes, example_bytes=size)
    _require_room(config, shape, classes, vocabulary, policy.maximum_message)
    held = _as_read(config, home, vocabulary, text)
    end = labels_end(loss, classes)
    examples = fit(held, records, end)
    # This depends on the data, so it is only logged here.
    if end is not None and (unfit := int((held.y >= end).sum())):
        log.warning("%d examples have no class among the run's %d and count as empty", unfit, classes)
    task, method = task_for(config, shape, classes, vocabulary, loss=loss), config.build_method()

    labels = home.declared.label_set(classes)
    probe = NodeClients(home.client, made_up(held), labels)

    def admit(order: Order, down: Downlink) -> None:
        at = order.at
        require_counted(at.plan, policy)
        _require_fit(task, method, at.plan, probe, settings.seed)
        announced = {"announced": int(down.scalars().get("cohort", 0)), "seed": settings.seed}
        try:
            home.guard.admit(order.run, at.round, method, at.plan, exchange=at.exchange, **announced)
        except RefusedError as error:
            raise RefusalError("policy", str(error)) from error

    clients = NodeClients(home.client, examples, labels)
    worker = ClientWorker(task, clients, method, settings.seed, home.noise, deployed=home.noise == "entropy")
    limit = policy.maximum_message
    digest = roster_digest(home.directory)
    return Node(home.name, home.client, records, worker, home.state / "clients", admit, limit, digest)


def _as_read(config: Config, home: OwnNode, vocabulary: Vocabulary | None, text: TextSection) -> Examples:
    """The node's examples in the form that the run's model reads, each converted independently."""
    if vocabulary is not None:
        return home.tokens(vocabulary, length=text.length, too_long=text.too_long)
    made = make_features(config.task.features, config.task.feature_options)
    return home.examples if made is None else home.features(made)


def _opened(folder: str) -> OwnNode:
    """The node of this folder. Any problem with its files gives the server the same reply."""
    try:
        return open_node(folder)
    except Exception as error:
        raise RefusalError("unavailable", f"{type(error).__name__}: {error}") from error


def _agreed_classes(config: Config, declared: Declared) -> int:
    """The server's number of classes, if it is at least the node's, or the number of its intervals."""
    classes = config.task.classes
    needed = declared.classes or 0
    other = declared.target != "classes" and classes != needed
    if classes is None or classes < needed or other:
        text = f"the run has {classes} classes, this node declares {declared.classes}"
        raise RefusalError("configuration", text, "task.classes")
    return classes


def _agreed_loss(config: Config, home: OwnNode) -> ExampleLoss:
    """The loss that the server declares, if it matches the target of this node's schema."""
    declared = config.task.loss
    try:
        if declared != (own := loss_name(config, home.schema)):
            raise RefusalError(
                "configuration", f"the run is for classes, this node's loss is {own}", "task.loss"
            )
        scale = 1.0 if home.schema is None else home.schema.label_std
        return make_loss(config, declared, config.task.classes or 1, scale)
    except InputError as error:
        raise RefusalError("configuration", str(error), error.field) from error


def _require_persons(config: Config, declared: Declared) -> None:
    """Refuse a run that declares fewer rows per person than this node trains on."""
    try:
        with within("task.data_options"):
            most = persons_of(config)[1]
    except InputError as error:
        raise RefusalError("configuration", str(error), error.field) from error
    if most is not None and (declared.rows_per_person is None or declared.rows_per_person > most):
        text = f"the run is for {most} rows per person, this node has {declared.rows_per_person} (None: not limited)"
        raise RefusalError("configuration", text, "task.data_options.rows_per_person")


def _require_fit(task: Task, method: AnyMethod, plan: Plan, probe: Clients, seed: int) -> None:
    """Make the simulator's checks before a run with a made-up example, so that they do not depend on records."""
    try:
        check_clients(task, method, plan, probe)
        first_server(task, method, plan, seed)
    except FedveilError as error:
        field = error.field if isinstance(error, InputError) else "task"
        raise RefusalError("configuration", str(error), field) from error


def _require_room(
    config: Config, shape: Sequence[int], classes: int, vocabulary: Vocabulary | None, most: int
) -> None:
    """Refuse a model larger than the node's largest message, before memory is allocated for it."""
    try:
        size = model_bytes(config, shape, classes, vocabulary)
    except (RuntimeError, OverflowError) as error:  # more elements than can be counted
        raise RefusalError("size", "the model cannot be built", "task.model") from error
    if size > most:
        text = f"a model of {size} bytes, more than a message may hold (maximum_message = {most})"
        raise RefusalError("size", text, "task.model")


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
        raise InputError("partition-id", client, "is not a client", f"Use 0 to {prepared.plan.clients - 1}.")
    noise = settings.noise or prepared.noise
    worker = ClientWorker(prepared.task, prepared.clients, prepared.method, settings.seed, noise)
    limit = settings.config.run.max_message or LARGEST_MESSAGE
    size = prepared.clients.sizes[client]
    return Node(
        f"client-{client}", client, size, worker, settings.folder / STATES / str(client), admit_all, limit
    )


@functools.lru_cache(maxsize=1)
def _prepared(text: str, seed: int, data: Path | None) -> Prepared:
    """The prepared experiment, cached: a worker of a simulation computes for many clients."""
    return prepare(parse_config(text), seed, data)
