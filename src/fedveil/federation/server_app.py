"""The ServerApp: fedveil's training loop, connected to the clients by Flower's grid."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.atomic_files import write_atomically
from fedveil.data.dataset import Dataset
from fedveil.data.notes import AGREED_NOTE, person_note
from fedveil.data.schema import TableSchema
from fedveil.engines.engine import Engine
from fedveil.engines.flower.engine import FlowerEngine, Limits
from fedveil.engines.flower.roster import Roster
from fedveil.engines.flower.secure_engine import SecureEngine
from fedveil.engines.flower.wire import LARGEST_MESSAGE, fingerprint
from fedveil.errors import FedveilError, InputError, within
from fedveil.experiment.config import Config
from fedveil.experiment.early_stopping import public_examples
from fedveil.experiment.prepare import (
    facts_of,
    load_examples,
    make_loss,
    model_shape,
    prepare,
    recipe_of,
    run_options,
    task_for,
    text_input,
)
from fedveil.experiment.sections import NO_DATASET
from fedveil.federation.client_app import STATES
from fedveil.federation.identity_files import server_roster
from fedveil.federation.members import registered_members
from fedveil.federation.parent_watch import end_with_parent
from fedveil.federation.run_settings import (
    LOG,
    PROBLEM,
    RunSettings,
    agreed_schema,
    persons_of,
    vocabulary_on_nodes,
)
from fedveil.methods.secure import secure_part
from fedveil.prediction.recipe import FeatureInput, Recipe
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.pictures import DrawPictures
from fedveil.session.checks import check_clients
from fedveil.session.options import AvailableData
from fedveil.session.results import Result
from fedveil.session.session import run_session

log = logging.getLogger("flwr.fedveil")
app = ServerApp()
FEDERATION = "federation.json"
GATHER_SECONDS = 600.0
RETURN_SECONDS = 120.0  # how long a restarted server waits for nodes to reconnect


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment; an error is written to its folder, for the process that waits for the result."""
    end_with_parent()
    settings = RunSettings.from_run_config(context.run_config)
    serve = serve_deployed if settings.config.run.engine == "flower" else serve_simulated
    try:
        with _logged(settings):
            serve(grid, settings)
    except FedveilError as error:
        _write_problem(settings, str(error))
        raise
    except Exception:
        _write_problem(settings, traceback.format_exc())
        raise


@contextmanager
def _logged(settings: RunSettings) -> Iterator[None]:
    """Also write log messages about nodes to the run's folder."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(settings.folder / LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def _write_problem(settings: RunSettings, problem: str) -> None:
    settings.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(settings.folder / PROBLEM, problem.encode())


def serve_simulated(grid: Grid, settings: RunSettings) -> Result:
    """A simulation on Flower: the data is on this machine, so the final model is scored on each client's data."""
    config, seed = settings.config, settings.seed
    prepared = prepare(config, seed, settings.data)
    task, method, plan = prepared.task, prepared.method, prepared.plan
    check_clients(task, method, plan, prepared.clients)

    def engine_of(run: str) -> Engine:
        roster = Roster(grid, fingerprint(task, method))
        roster.wait_for(plan.clients, GATHER_SECONDS)
        return FlowerEngine(
            grid,
            roster,
            task,
            method,
            plan,
            run=run,
            limits=_limits(settings),
            classes=prepared.dataset.num_classes,
            states=settings.folder / STATES,
        )

    facts = facts_of(config, settings.experiment, prepared)
    return run_session(
        engine_of,
        task,
        method,
        plan,
        run_options(
            config,
            seed,
            settings.folder,
            facts,
            settings.noise or prepared.noise,
            dataset=prepared.dataset,
        ),
        replace(
            prepared.data,
            public=public_examples(config, prepared.dataset.schema, prepared.dataset, settings.data),
        ),
        [DrawPictures(method, prepared.dataset, settings.folder)],
    )


def serve_deployed(grid: Grid, settings: RunSettings) -> Result:
    """A federation: the data is on the nodes; the server has at most a test set."""
    config, seed = settings.config, settings.seed
    dataset = None if config.task.dataset == NO_DATASET else load_examples(config, settings.data)
    shape, classes = config.task.input_shape, config.task.classes
    if shape is None or classes is None:
        raise InputError("task.classes", classes, "is not set for the nodes", "Submit the run with fedveil.")
    reads = model_shape(config, shape)
    schema = agreed_schema(config, settings.data) if dataset is None else dataset.schema
    loss = make_loss(config, config.task.loss, classes, 1.0 if schema is None else schema.label_std)
    task = task_for(config, reads, classes, vocabulary_on_nodes(config), config.run.device, loss)
    method = config.build_method()
    secure = secure_part(method)
    listed = None if secure is None else server_roster()
    agreed = None if listed is None else listed.digest
    roster = Roster(grid, fingerprint(task, method), registered_members(), agreed)
    plan = _agreed_plan(roster, settings)

    def engine_of(run: str) -> Engine:
        limits = _limits(settings)
        flower = FlowerEngine(grid, roster, task, method, plan, run=run, limits=limits, classes=classes)
        if secure is None or listed is None:
            return flower
        return SecureEngine(flower, secure, listed.roster, listed.clients, settings.folder)

    known = schema if dataset is None else dataset
    numbered = range(classes if config.task.loss is None else 0)
    names: Sequence[str] = [str(c) for c in numbered] if known is None else known.classes
    facts = {
        "experiment": settings.experiment,
        "dataset": config.task.dataset,
        "model": config.task.model,
        "classes": list(names),
        "paper": None if config.paper is None else config.paper.model_dump(),
        "prediction": _recipe(config, dataset, schema, shape, names).to_json(),
        **_nodes(),
    }
    noise = settings.noise or "entropy"
    options = run_options(config, seed, settings.folder, facts, noise, deployed=noise == "entropy")
    notes, most = _prepared_how(config, schema)
    options = replace(options, privacy=replace(options.privacy, notes=notes, rows_per_person=most))
    public = public_examples(config, schema, None, settings.data)
    data = AvailableData(None if dataset is None else dataset.test, classes, public=public)
    return run_session(engine_of, task, method, plan, options, data)


def _nodes() -> dict[str, object]:
    """That the data is the nodes' own, and their names by client number; nothing where nodes are simulated."""
    members = registered_members()
    if not members:
        return {}
    names = {member.client: member.name for member in members.values()}
    return {"deployed": True, "client_names": [names.get(k, f"client {k}") for k in range(max(names) + 1)]}


def _prepared_how(config: Config, schema: TableSchema | None) -> tuple[tuple[str, ...], int | None]:
    """Notes on the nodes' tables for the statement, and the largest number of rows per person.

    Nodes refuse a run that declares fewer rows than they train on.
    """
    with within("task.data_options"):
        person, most = persons_of(config)
    if schema is None and person is None:
        return (), None
    return (AGREED_NOTE, person_note(person, most)), most


def _recipe(
    config: Config,
    dataset: Dataset | None,
    schema: TableSchema | None,
    shape: Sequence[int],
    names: Sequence[str],
) -> Recipe:
    """The recipe for using the federation's model; without a test set or a schema, on the nodes' raw numbers."""
    if dataset is not None:
        return recipe_of(config, dataset)
    task = config.task
    features = None if task.features is None else FeatureInput(task.features, task.feature_options)
    return Recipe(
        task.model,
        task.model_options,
        tuple(shape),
        task.classes or len(names),
        tuple(names),
        schema,
        text_input(config),
        features=features,
    )


def _limits(settings: RunSettings) -> Limits:
    section = settings.config.run
    return Limits(section.deadline, section.max_message or LARGEST_MESSAGE, section.min_clients)


def _agreed_plan(roster: Roster, settings: RunSettings) -> Plan:
    """The plan of this run: made from the nodes online at the start, and kept when the run resumes."""
    path = settings.folder / FEDERATION
    section = settings.config.run
    clients = settings.config.partition.clients or 1
    if path.exists():
        roster.wait_for(clients, RETURN_SECONDS)
        return Plan(**json.loads(path.read_text()))
    roster.wait_for(clients, GATHER_SECONDS)
    for name, held in roster.other_rosters.items():
        raise InputError(
            "roster",
            f"{name}: {held[:16] or 'none'}",
            "this node's roster is missing or differs from the server's",
            "Run `fedveil deploy trust` on it with the server's roster.toml, and compare the digest.",
        )
    sizes = [who.size for client, who in roster.clients.items() if client < clients]
    needed = max(1, section.min_clients)
    if len(sizes) < needed:
        refused = "".join(f"\n{name} is refused: {why}" for name, why in roster.refusals.items())
        raise FedveilError(
            f"{len(sizes)} of {clients} nodes are online, {needed} are needed. Start the others.{refused}",
            field="nodes",
            value=len(sizes),
        )
    cohort = clients if section.cohort is None or section.sampler == "all" else section.cohort
    plan = Plan(clients, cohort, section.sampler, section.rounds, max(1, min(sizes)), max(1, max(sizes)))
    settings.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(plan.__dict__).encode())
    return plan
