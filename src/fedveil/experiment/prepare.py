"""Preparation of a run from its configuration: data, partition, model, method, plan and options."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.data.client_data import ArrayClients, Clients, digest_of
from fedveil.data.dataset import Dataset, TextDataset
from fedveil.data.files import places, state_of
from fedveil.data.registry import list_datasets, load_dataset
from fedveil.data.schema import TableSchema
from fedveil.data.tokens import tokenise
from fedveil.data.transformers_folder import DEFAULT
from fedveil.data.vocabulary import Vocabulary, make_vocabulary
from fedveil.errors import InputError, known_name, within
from fedveil.experiment.config import Config
from fedveil.experiment.sections import TextSection
from fedveil.experiment.statistics import standardised
from fedveil.experiment.target import Calibrated, method_of, noise_source
from fedveil.features.feature_map import as_features, make_features
from fedveil.lazy_torch import torch
from fedveil.losses import TARGETS, LossName, WeightedCrossEntropy, named_loss
from fedveil.methods.method import AnyMethod
from fedveil.models.registry import make_model, model_entry
from fedveil.partition.partition import Partition
from fedveil.partition.registry import make_partition
from fedveil.prediction.recipe import Recipe, TextInput, recipe_for
from fedveil.privacy.releases import Plan
from fedveil.session.checks import check_test, first_server
from fedveil.session.options import AvailableData, PrivacySettings, RunOptions
from fedveil.session.run import make_plan
from fedveil.streams import NoiseSource, named_stream
from fedveil.task import ExampleLoss, Task, cross_entropy
from fedveil.token_losses import next_token_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prepared:
    """Everything that one seed's run needs, loaded and checked."""

    task: Task
    dataset: Dataset
    partition: Partition
    clients: Clients
    local_test: Clients | None
    plan: Plan
    method: AnyMethod
    noise: NoiseSource
    target: Calibrated | None = None
    names: Sequence[str] | None = None
    """The names of the clients in the data."""

    @property
    def data(self) -> AvailableData:
        """The data that a session in this process can read."""
        return AvailableData(
            self.dataset.test,
            self.dataset.num_classes,
            self.clients,
            self.local_test,
            names=self.names,
        )

    @property
    def digest(self) -> str | None:
        """The digest of the data in a run's folder."""
        return digest_of(self.clients, check_test(self.task, self.dataset.test))


def load_examples(config: Config, data_dir: Path | None) -> Dataset:
    """The data of a configuration as model inputs: numbers with labels, or token ids."""
    options = json.dumps(config.task.data_options, sort_keys=True)
    known_name("task.dataset", "dataset", config.task.dataset, [known.name for known in list_datasets()])
    with within("task.data_options"):
        dataset = _load(config.task.dataset, data_dir, options, _state(config.task.data_options, data_dir))
    reads = model_entry(config.task.model).reads
    if isinstance(dataset, Dataset):
        if reads != "numbers":
            raise InputError(
                "task.model",
                config.task.model,
                f"reads {reads}, which {dataset.name} does not contain",
                "Choose another model.",
            )
        if config.task.text is not None:
            raise InputError(
                "task.text", "given", f"{dataset.name} contains no texts", "Leave the section out."
            )
        features = config.task.features
        options = json.dumps(config.task.feature_options, sort_keys=True)
        return dataset if features is None else _featured(dataset, features, options)
    if config.task.features is not None:
        raise InputError(
            "task.features",
            config.task.features,
            f"reads images, {dataset.name} contains texts",
            "Leave task.features out.",
        )
    if reads == "numbers":
        raise InputError(
            "task.model",
            config.task.model,
            f"reads images and tables, {dataset.name} contains texts",
            "Choose lstm, transformer, bert or a language model: see `fedveil list models`.",
        )
    section = _text_section(config)
    state = _state(section.model_dump(), data_dir)
    return _tokens(dataset, section.model_dump_json(), reads != "texts", data_dir, state)


def _state(options: Mapping[str, Any], data_dir: Path | None) -> Hashable:
    """A cache key: the data folder, and sizes and modification times of the user's own files; published data sets do
    not change."""
    named = [options[key] for key in ("path", "test_path", "schema") if isinstance(options.get(key), str)]
    return tuple(places(data_dir)), tuple(state_of(path, data_dir) for path in named)


@functools.lru_cache(maxsize=1)
def _load(name: str, data_dir: Path | None, options: str, _state: Hashable) -> Dataset | TextDataset:
    """Load data, cached for the seeds of an experiment while its files do not change."""
    return load_dataset(name, data_dir=data_dir, **json.loads(options))


@functools.lru_cache(maxsize=1)
def _featured(dataset: Dataset, name: str, options: str) -> Dataset:
    """Compute features, cached for the seeds of an experiment."""
    return as_features(dataset, name, **json.loads(options))


def model_shape(config: Config, example_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the model's input, for examples of this shape."""
    made = make_features(config.task.features, config.task.feature_options)
    return tuple(example_shape) if made is None else made.shape(example_shape)


def _text_section(config: Config) -> TextSection:
    """The text section of this configuration, with the vocabulary resolved."""
    section = config.task.text or TextSection()
    if section.vocabulary != "auto":
        return section
    options = config.task.model_options
    folder = (
        options.get("path", DEFAULT)
        if config.task.model in ("bert", "gpt")
        else options.get("embedding_path")
    )
    if folder is None:
        return section.model_copy(update={"vocabulary": "hash"})
    return section.model_copy(update={"vocabulary": "tokenizer", "path": section.path or str(folder)})


def vocabulary_of(config: Config) -> Vocabulary | None:
    """The vocabulary of this configuration's model; None for a model of images and tables."""
    if model_entry(config.task.model).reads == "numbers":
        return None
    return _vocabulary(_text_section(config), None)


def _vocabulary(section: TextSection, data_dir: Path | None) -> Vocabulary:
    assert section.vocabulary != "auto"
    return make_vocabulary(section.vocabulary, size=section.size, path=section.path, data_dir=data_dir)


@functools.lru_cache(maxsize=1)
def _tokens(
    dataset: TextDataset, section: str, next_token: bool, data_dir: Path | None, _state: Hashable
) -> Dataset:
    text = TextSection.model_validate_json(section)
    return tokenise(
        dataset,
        _vocabulary(text, data_dir),
        length=text.length,
        next_token=next_token,
        too_long=text.too_long,
        empty=text.empty,
        pack=text.pack,
    )


def make_task(config: Config, dataset: Dataset, device: str | torch.device = "cpu") -> Task:
    """The task of a configuration for this data: model and loss."""
    vocabulary = None if dataset.tokens is None else dataset.tokens.vocabulary
    loss = loss_for(config, dataset.schema, len(dataset.classes))
    return task_for(config, dataset.input_shape, dataset.num_classes, vocabulary, device, loss)


def loss_for(config: Config, schema: TableSchema | None, classes: int) -> ExampleLoss:
    """The loss for the prediction target: `task.loss` and `task.class_weights`, or the default."""
    scale = 1.0 if schema is None else schema.label_std
    return make_loss(config, loss_name(config, schema), classes, scale)


def loss_name(config: Config, schema: TableSchema | None) -> LossName | None:
    """The name of the loss for the target of this data; None for classes."""
    asked, usual = config.task.loss, None if schema is None else schema.usual_loss
    target = "classes" if schema is None else schema.target
    if asked is None:
        return usual
    if TARGETS[asked] != target:
        problem = f"is for a target of {TARGETS[asked]}, the target is {target}"
        raise InputError("task.loss", asked, problem, "Leave it out.")
    if target == "survival" and asked != usual:
        problem = "needs intervals" if asked == "hazard" else "has no intervals, and the table has some"
        raise InputError("task.loss", asked, problem, f'Use "{usual}", or change the intervals.')
    return asked


def make_loss(config: Config, name: LossName | None, classes: int, scale: float = 1.0) -> ExampleLoss:
    """The loss of this name; for classes with the configuration's weights, for numbers with `scale`."""
    weights = config.task.class_weights
    if weights is not None and (name is not None or len(weights) != classes):
        problem = f"there are {classes} classes" if name is None else f"the target is {TARGETS[name]}"
        raise InputError("task.class_weights", weights, problem, "Give one weight for each class.")
    if name is not None:
        return named_loss(name, scale)
    return cross_entropy if weights is None else WeightedCrossEntropy(tuple(weights))


def task_for(
    config: Config,
    input_shape: Sequence[int],
    classes: int,
    vocabulary: Vocabulary | None = None,
    device: str | torch.device = "cpu",
    loss: ExampleLoss | None = None,
) -> Task:
    """The task of a configuration for examples of this shape, on which server and nodes agree.

    The task contains no data: attacks get it, so nothing private may be reachable from it.
    """
    build = _builder(config, input_shape, classes, vocabulary)
    if model_entry(config.task.model).reads == "texts without labels":
        loss = next_token_loss
    elif loss is None:
        loss = make_loss(config, config.task.loss, classes)
    return Task(build, loss=loss, device=device)


def model_bytes(
    config: Config, input_shape: Sequence[int], classes: int, vocabulary: Vocabulary | None = None
) -> int:
    """The size of the parameters of a configuration's model, computed without allocating them."""
    with torch.device("meta"):
        model = _builder(config, input_shape, classes, vocabulary)()
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _builder(
    config: Config, input_shape: Sequence[int], classes: int, vocabulary: Vocabulary | None
) -> Callable[[], torch.nn.Module]:
    options = dict(config.task.model_options)
    if vocabulary is not None:
        options |= {"vocabulary": vocabulary.size, "pad": vocabulary.pad}
    return functools.partial(make_model, config.task.model, tuple(input_shape), classes, **options)


def split_clients(config: Config, dataset: Dataset, seed: int) -> Partition:
    """The share of each client, from the seed's own stream."""
    section = config.partition
    clients = section.clients
    if dataset.predicts_tokens and section.kind not in ("iid", "user"):
        raise InputError(
            "partition.kind", section.kind, f"needs labels, which {dataset.name} does not have", 'Use "iid".'
        )
    if clients is None and section.kind not in ("user",) and section.groups is None:
        clients = 10
    with within("partition"):
        return make_partition(
            section.kind,
            dataset.labels,
            clients,
            named_stream(seed, "partition"),
            alpha=1.0 if section.kind == "dirichlet" and section.alpha is None else section.alpha,
            classes_per_client=section.classes_per_client,
            shards_per_client=section.shards_per_client,
            groups=section.groups,
            users=dataset.train.users,
            min_size=section.min_size,
            allow_empty=section.allow_empty,
        )


def check_attacks(config: Config) -> None:
    """Refuse `[[attack]]` sections that could not be run after training."""
    if config.attack:
        from fedveil.attacks.registry import configured_attacks  # slow to import

        configured_attacks(config.attack)


def client_names(config: Config, dataset: Dataset) -> list[str] | None:
    """The names of the clients in the data; None if clients are not single named users."""
    users = dataset.train.users
    if config.partition.kind != "user" or config.partition.clients is not None or users is None:
        return None
    return [dataset.user_names[user] for user in users.unique().tolist()] if dataset.user_names else None


def prepare(
    config: Config, seed: int, data_dir: Path | None = None, *, folder: Path | None = None
) -> Prepared:
    """Load and check everything; nothing is written except private statistics of a table.

    They are stored in the run's `folder`; without a folder the table is scaled by its bounds.
    """
    device = _device(config.run.device)
    dataset = load_examples(config, data_dir)
    partition = split_clients(config, dataset, seed)
    parts, held = _hold_out(partition.parts, config.partition.holdout, seed)
    clients = ArrayClients(dataset.train.x, dataset.train.y, parts)
    plan = make_plan(clients, rounds=config.run.rounds, cohort=config.run.cohort, sampler=config.run.sampler)
    method, target = method_of(config, plan)
    noise = noise_source(config, method, plan)
    if dataset.cells is not None and folder is not None:
        level = float(config.task.data_options["statistics_noise"])
        guard_of = (method, plan, privacy_settings(config, dataset))
        dataset = standardised(dataset, parts, level, folder, guard_of, seed, noise)
    x, y = dataset.train.x, dataset.train.y
    clients = ArrayClients(x, y, parts)
    local_test = ArrayClients(x, y, held) if held else _test_of_users(config, dataset)
    task = make_task(config, dataset, device)
    names = client_names(config, dataset)
    return Prepared(task, dataset, partition, clients, local_test, plan, method, noise, target, names)


def _test_of_users(config: Config, dataset: Dataset) -> ArrayClients | None:
    """The test examples of each client, if clients are the data's users and the test split has user ids too."""
    users, test = dataset.train.users, dataset.test.users
    if (
        config.partition.kind != "user"
        or config.partition.clients is not None
        or users is None
        or test is None
    ):
        return None
    parts = [torch.nonzero(test == user).flatten() for user in users.unique()]
    return ArrayClients(dataset.test.x, dataset.test.y, parts) if any(map(len, parts)) else None


def check_method(prepared: Prepared, seed: int) -> None:
    """Make a run's checks of the method against its clients and model."""
    prepared.method.check_clients(prepared.task, prepared.clients)
    first_server(prepared.task, prepared.method, prepared.plan, seed)


def facts_of(config: Config, experiment: str, prepared: Prepared) -> dict[str, Any]:
    """The entries of a summary about the experiment, besides its results."""
    dataset = prepared.dataset
    facts = {
        "experiment": experiment,
        "dataset": dataset.name,
        "data": dataset.summary,
        "model": config.task.model,
        "classes": list(dataset.classes),
        "partition": prepared.partition.counts(dataset.labels, len(dataset.label_names)).tolist(),
        "client_names": client_names(config, dataset),
        "paper": None if config.paper is None else config.paper.model_dump(),
        "prediction": recipe_of(config, dataset).to_json(),
    }
    if prepared.target is not None:
        facts["target"] = prepared.target.to_json()
    if dataset.features is not None:
        facts["features"] = dataset.features.to_json()
    return facts if dataset.tokens is None else facts | {"text": dataset.tokens.to_json()}


def recipe_of(config: Config, dataset: Dataset) -> Recipe:
    """The recipe for using the model that this configuration trains."""
    return recipe_for(config.task.model, config.task.model_options, dataset, text_input(config))


def text_input(config: Config) -> TextInput | None:
    """The text input of this configuration's model; None for a model of images and tables."""
    if model_entry(config.task.model).reads == "numbers":
        return None
    section = _text_section(config)
    assert section.vocabulary != "auto"
    return TextInput(section.vocabulary, section.size, section.path, section.length)


def run_options(
    config: Config,
    seed: int,
    results: Path,
    facts: Mapping[str, Any],
    noise: NoiseSource,
    *,
    deployed: bool = False,
    dataset: Dataset | None = None,
) -> RunOptions:
    """The options of one seed's run with its results in this folder, for every engine.

    `dataset` is the training data, for the notes of the privacy statement.
    """
    return RunOptions(
        seed=seed,
        results=results,
        config=config.to_toml(),
        facts=facts,
        privacy=privacy_settings(config, dataset),
        evaluate_every=config.run.evaluate_every,
        checkpoint_every=config.run.checkpoint_every,
        transcript=config.run.transcript,
        transcript_exchanges=config.run.transcript_exchanges,
        min_clients=config.run.min_clients,
        noise_source=noise,
        deployed=deployed,
        early_stopping=config.run.stopping,
    )


def privacy_settings(config: Config, dataset: Dataset | None) -> PrivacySettings:
    """The settings of `[privacy]`, with the statement's facts about this dataset."""
    section = config.privacy
    return PrivacySettings(
        section.delta,
        section.budget,
        section.budget_adversary,
        section.budget_unit,
        None if section.ledger is None else Path(section.ledger),
        () if dataset is None else dataset.notes,
        None if dataset is None else dataset.rows_per_person,
        config.run.ends,
    )


def result_folder(config: Config, seed: int, experiment: str, results: Path) -> Path:
    return results / experiment / config.identity() / f"seed-{seed}"


def _hold_out(parts: Sequence[Tensor], fraction: float, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Each client's training examples and its held-out test examples (an empty list for fraction 0)."""
    if fraction == 0:
        return list(parts), []
    kept: list[Tensor] = []
    held: list[Tensor] = []
    for client, part in enumerate(parts):
        order = torch.from_numpy(named_stream(seed, "holdout", client).permutation(len(part)))
        count = int(len(part) * fraction)
        held.append(part[order[:count]])
        kept.append(part[order[count:]])
    return kept, held


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("run.device", name, "is not a device", 'Use "cpu" or "cuda".') from error
    if device.type not in ("cpu", "cuda"):
        raise InputError("run.device", name, "is not a device to train on", 'Use "cpu" or "cuda".')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError("run.device", name, "this machine has no such CUDA device", 'Use "cpu".')
    return device
