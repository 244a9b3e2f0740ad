"""The configuration of an experiment: TOML with every key checked before anything starts."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, ValidationError, model_validator

from fedveil.errors import InputError, known_name, within
from fedveil.experiment.aggregation import AggregationSection
from fedveil.experiment.changes import apply_change
from fedveil.experiment.sections import (
    NO_DATASET,
    PaperSection,
    PartitionSection,
    PrivacySection,
    RunSection,
    TaskSection,
    TextSection,
)
from fedveil.experiment.statistics import statistics_release
from fedveil.features.feature_map import make_features
from fedveil.methods import METHODS
from fedveil.methods.beforehand import released_before
from fedveil.methods.method import AnyMethod, field_names
from fedveil.methods.secure import securely_aggregated
from fedveil.methods.wrappers import WRAPPERS, Wrapper
from fedveil.methods.wrappers.wrapper import wrapper_fields
from fedveil.models.registry import model_entry
from fedveil.validation import Section, known_keys, refused

VERSION = 1
# Newer keys, which at their default do not change a configuration's hash, so that earlier results stay valid.
_NEWER_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("task", "input_shape", None),
    ("task", "classes", None),
    ("task", "features", None),
    ("task", "feature_options", {}),
    ("task", "loss", None),
    ("task", "class_weights", None),
    ("run", "max_message", None),
    ("run", "noise", None),
    ("run", "early_stopping", None),
    ("method", "block", 1),
    ("method", "local_steps", None),
    ("method", "server_batch", None),
    ("method", "normalise", False),
    ("method", "last_batch", "keep"),  # what methods that send each batch did before they had the field
    ("privacy", "target_epsilon", None),
    ("privacy", "target_adversary", "server"),
    ("privacy", "target_unit", None),
)
# Keys that do not affect the result: runs that differ only in these are runs of the same setting.
WITHOUT_EFFECT = frozenset(
    {
        "paper",
        "run.seeds",
        "run.workers",
        "run.max_memory",
        "run.checkpoint_every",
        "run.federation",
        "run.address",
    }
)
_SAME_BITS = (
    "simulation",
    "ray",
)  # engines with identical results: a run can resume with another of them
_FOR_FEDERATIONS = {
    "run.deadline": "the simulator waits for every client",
    "run.max_message": "the simulator sends nothing",
    "run.federation": "there is no server",
    "task.input_shape": "it is determined by the data set",
    "task.classes": "it is determined by the data set",
}
_FOR_NODES = ("run.federation", "task.input_shape", "task.classes")  # simulated nodes do not need them either
_USUAL_LOSSES = ("squared", "hazard", "cox")  # losses that a table's target implies
_SIZES = ("run.max_memory", "run.max_message")  # bytes as a number, or text with a unit


class Config(Section):
    """One experiment."""

    version: int = VERSION
    paper: PaperSection | None = None
    task: TaskSection = TaskSection()
    partition: PartitionSection = PartitionSection()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    run: RunSection = RunSection()
    privacy: PrivacySection = PrivacySection()
    aggregation: AggregationSection = AggregationSection()
    wrap: list[dict[str, Any]] = Field(default_factory=list)
    attack: list[dict[str, Any]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.version != VERSION:
            raise InputError(
                "version", self.version, "this fedveil reads another version", f"Use version = {VERSION}."
            )
        clients, cohort = self.partition.clients, self.run.cohort
        if clients is not None and cohort is not None and cohort > clients:
            raise InputError(
                "run.cohort", cohort, f"there are only {clients} clients", f"Use 1 to {clients}."
            )
        if self.run.sampler == "all" and cohort is not None and clients is not None and cohort != clients:
            raise InputError(
                "run.cohort", cohort, 'sampler "all" takes every client', "Leave run.cohort out."
            )
        if self.run.min_clients and self.run.sampler == "poisson":
            raise InputError(
                "run.min_clients",
                self.run.min_clients,
                "dropping small Poisson rounds would disclose how many participate, which is not accounted for",
                "Leave it out, or use another sampler.",
            )
        self._require_shape()
        if self.run.address is not None and self.run.engine != "ray":
            raise InputError("run.address", self.run.address, 'is for engine = "ray"', "Leave it out.")
        self.aggregation.require_engine(self.run.engine)
        make_features(self.task.features, self.task.feature_options)
        self.build_method()
        return self

    def _require_shape(self) -> None:
        """Require the shape and the classes of the nodes' examples if the server has no data set."""
        task, deployed = self.task, self.run.engine == "flower"
        if task.dataset == NO_DATASET and not deployed:
            raise InputError(
                "task.dataset", task.dataset, "a simulation needs data", "See `fedveil list datasets`."
            )
        for key, value in (("input_shape", task.input_shape), ("classes", task.classes)):
            if value is None and task.dataset == NO_DATASET and "schema" not in task.data_options:
                remedy = f"Give task.{key}, or task.data_options.schema."
                raise InputError(f"task.{key}", value, "is needed without a data set", remedy)
        if task.classes == 1 and task.loss is None:
            remedy = "Give their number, or task.loss where numbers or survival times are predicted."
            raise InputError("task.classes", 1, "is too few for classification", remedy)
        if deployed and self.partition.clients is None:
            raise InputError("partition.clients", None, "is the number of nodes of a federation", "Give it.")

    def unused(self) -> list[str]:
        """The keys that this engine ignores, with reasons; one file can serve simulation and federation."""
        run, task, said = self.run, self.task, list[str]()
        for key, why in _FOR_FEDERATIONS.items():
            section, _, name = key.partition(".")
            there = getattr(run if section == "run" else task, name) is not None
            needs_flower = run.engine != "flower" if key in _FOR_NODES else run.engine in _SAME_BITS
            if there and needs_flower:
                said.append(f"{key} is not used by engine = {run.engine!r}: {why}")
        if run.noise == "seeded" and run.engine == "flower":
            said.append("run.noise is not used by deployed nodes: they draw their noise from entropy")
        if self.privacy.target_epsilon is not None and "noise_multiplier" in self.method:
            said.append("method.noise_multiplier is not used: privacy.target_epsilon chooses the noise")
        return said + self._unused_for_rounds()

    def _unused_for_rounds(self) -> list[str]:
        """Fields of the method that so few rounds do not reach: a note, since a first try has few rounds."""
        method = build_method(self.method)
        unused = method.unused_for(self.run.rounds)
        default = _values(
            build_method({key: value for key, value in self.method.items() if key not in unused})
        )
        return [
            f"method.{field} is not used in {self.run.rounds} rounds: {why}"
            for field, why in unused.items()
            if field in self.method and self.method[field] != default[field]
        ]

    def build_method(self) -> AnyMethod:
        """The method with its fields, its aggregation and its wrappers, each checked."""
        method = securely_aggregated(build_method(self.method), self.aggregation.settings())
        task = self.task
        release = statistics_release(task.data_options, task.dataset, self.run.engine)
        return released_before(wrap_method(method, self.wrap), release)

    def with_method(self, **fields: Any) -> Config:
        """The same experiment with these fields of its method changed."""
        return self.model_copy(update={"method": self.method | fields})

    def identity(self) -> str:
        """A short hash of everything that affects the result; the seed is separate in a result's path.

        The number of workers affects no bit. `max_memory` and the cores of the machine affect the grouping of clients,
        and with it the last digits, but are excluded so that a run that ran out of memory can resume with less, and
        anywhere.
        """
        content = distinguishing(self.resolved())
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def resolved(self) -> dict[str, Any]:
        """The whole configuration with every default written out."""
        content: dict[str, Any] = self.model_dump()
        if self.task.text is None:  # images and tables have no such section
            content["task"].pop("text")
        if self.aggregation.kind == "plain":
            content.pop("aggregation")
        else:
            content["aggregation"]["colluders"] = self.aggregation.assumed_colluders
        content["method"] = {"name": self.method["name"]} | _values(build_method(self.method))
        rules = [build_rule(section) for section in self.wrap]
        content["wrap"] = [
            {"name": rule.name} | {field: getattr(rule, field) for field in wrapper_fields(rule)}
            for rule in rules
        ]
        return content

    def to_toml(self) -> str:
        return tomli_w.dumps(_without_none(self.resolved()))


def distinguishing(content: Mapping[str, Any]) -> dict[str, Any]:
    """The identifying keys of a resolved configuration: no key without effect, no newer key at its default.

    The content may come from a damaged file: entries that are not sections are kept.
    """
    kept = {
        name: {key: value for key, value in section.items() if f"{name}.{key}" not in WITHOUT_EFFECT}
        if isinstance(section, Mapping)
        else section
        for name, section in content.items()
        if name not in WITHOUT_EFFECT
    }
    run, task = kept.get("run"), kept.get("task")
    if isinstance(run, dict) and run.get("engine") in _SAME_BITS:
        run["engine"] = "simulation"
        run |= {key: None for key in ("deadline", "max_message") if key in run}
    if isinstance(run, dict) and run.get("engine") == "flower":
        run["noise"] = None  # nodes have their own
    if isinstance(task, dict) and task.get("dataset") != NO_DATASET:  # determined by the dataset
        task.update(input_shape=None, classes=None)
        if task.get("loss") in _USUAL_LOSSES:
            task["loss"] = None
    privacy, method = kept.get("privacy"), kept.get("method")
    if isinstance(privacy, dict) and isinstance(method, dict) and privacy.get("target_epsilon") is not None:
        method.pop("noise_multiplier", None)  # determined by the target
    for name, key, default in _NEWER_KEYS:
        section = kept.get(name)
        if isinstance(section, dict) and section.get(key, default) == default:
            section.pop(key, None)
    return kept


def build_rule(section: Mapping[str, Any]) -> Wrapper:
    """The wrapper of a `[[wrap]]` section."""
    name = known_name("wrap.name", "wrapper", section.get("name"), WRAPPERS)
    arguments = {key: value for key, value in section.items() if key != "name"}
    try:
        with within("wrap"):
            rule = WRAPPERS[name](**arguments)
    except ValidationError as error:
        raise refused(error, "wrap", wrapper_fields(WRAPPERS[name])) from error
    _require_types(arguments, rule, "wrap")
    return rule


def wrap_method(method: AnyMethod, sections: Sequence[Mapping[str, Any]]) -> AnyMethod:
    """The method inside these wrappers, the first of them innermost."""
    for section in sections:
        method = build_rule(section).around(method)
    return method


def build_method(section: Mapping[str, Any]) -> AnyMethod:
    """The method of a `[method]` section."""
    name = known_name("method.name", "method", section.get("name"), METHODS)
    arguments = {key: value for key, value in section.items() if key != "name"}
    try:
        with within("method"):
            method = METHODS[name](**arguments)
    except ValidationError as error:
        raise refused(error, "method", field_names(METHODS[name])) from error
    _require_types(arguments, method, "method")
    return method


def load_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """The configuration in this file, with `a.b=c` changes applied in order."""
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except FileNotFoundError as error:
        raise InputError("config", str(path), "no such file", "Give the path of a TOML file.") from error
    except IsADirectoryError as error:
        raise InputError("config", str(path), "is a folder", "Give the path of a TOML file.") from error
    except OSError as error:
        raise InputError("config", str(path), f"cannot be read: {error.strerror}", "Give a file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("config", str(path), f"is not TOML: {error}", "Fix the file.") from error
    except RecursionError as error:
        raise InputError("config", str(path), "is nested too deeply", "Fix the file.") from error
    return make_config(_with_paths(raw, path.parent), changes)


_PATHS = (
    ("task", "data_options", "path"),
    ("task", "data_options", "test_path"),
    ("task", "data_options", "schema"),
    ("task", "text", "path"),
    ("run", "early_stopping", "public"),
)


def _with_paths(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The content of a file in this folder, with relative paths of files beside it made absolute.

    Paths of files that do not exist there are kept: they may be in the folder of data sets.
    """
    content: dict[str, Any] = _copy(raw)
    for *sections, key in _PATHS:
        section: Any = content
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        given = section.get(key) if isinstance(section, dict) else None
        if isinstance(given, str) and given and not Path(given).is_absolute() and (folder / given).exists():
            section[key] = str((folder / given).resolve())
    return content


def load_experiment(path: Path, changes: Sequence[str] = ()) -> Config:
    """`load_config`, without the paper's value if the changes affect the result.

    The paper's value is for the file as written. A change of `paper` itself keeps it.
    """
    config = load_config(path, changes)
    require_used(config.method, changes)
    _require_read(config)
    about_it = any(change.strip().startswith("paper.") for change in changes)
    if config.paper is None or about_it or config.identity() == load_config(path).identity():
        return config
    return config.model_copy(update={"paper": None})


def _require_read(config: Config) -> None:
    """Refuse keys that are read only together with another key which is not set."""
    privacy, run = config.privacy, config.run
    alone = (
        ("privacy.budget_adversary", privacy.budget_adversary, privacy.budget is None, "observer", "budget"),
        (
            "privacy.target_adversary",
            privacy.target_adversary,
            privacy.target_epsilon is None,
            "server",
            "target_epsilon",
        ),
        ("privacy.target_unit", privacy.target_unit, privacy.target_epsilon is None, None, "target_epsilon"),
        ("privacy.budget_unit", privacy.budget_unit, privacy.budget is None, None, "budget"),
        ("run.transcript_exchanges", run.transcript_exchanges, not run.transcript, None, "transcript"),
    )
    for field, value, without, default, other in alone:
        if without and value != default:
            raise InputError(field, value, f"has no effect without {other}", f"Set {other}, or leave it out.")
    _require_read_of_texts(config)


def _require_read_of_texts(config: Config) -> None:
    text, usual = config.task.text, TextSection()
    if text is None:
        return
    reads = model_entry(config.task.model).reads
    if reads == "numbers" and text != usual:
        problem = f"the model {config.task.model} reads no texts"
        raise InputError("task.text", text.model_dump(exclude_defaults=True), problem, "Leave it out.")
    if text.size != usual.size and text.vocabulary in ("bytes", "tokenizer"):
        problem = f'is not used: vocabulary "{text.vocabulary}" has a size of its own'
        raise InputError("task.text.size", text.size, problem, "Leave it out.")
    if text.pack != usual.pack and reads == "texts":
        raise InputError("task.text.pack", text.pack, "is for texts without labels", "Leave it out.")


def require_used(section: Mapping[str, Any], changes: Sequence[str], *, only_changed: bool = False) -> None:
    """Refuse fields of a `[method]` section that have no effect in this configuration of the method.

    Fields with their default are accepted, since a run's own `config.toml` contains every field. If the changes name
    another method, only fields set by the changes count: the file's are for its own method. So do they with
    `only_changed`.
    """
    method = build_method(section)
    changed = {change.partition("=")[0].strip() for change in changes}
    unused = method.unused_fields()
    used = {key: value for key, value in section.items() if key not in unused}
    default = _values(build_method(used))
    for field, instead in unused.items():
        meant = f"method.{field}" in changed or not (only_changed or "method.name" in changed)
        if field in section and meant and section[field] != default[field]:
            problem = f"{method.name} does not use it in this configuration"
            raise InputError(f"method.{field}", section[field], problem, instead)


def make_config(raw: Mapping[str, Any], changes: Sequence[str] = ()) -> Config:
    content = _copy(raw)
    for change in changes:
        apply_change(content, change)
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        raise refused(error, "", known_keys(Config)) from error
    _require_types(content, config, "")
    return config


_TYPE_NAMES = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


def _require_types(given: Any, made: Any, place: str) -> None:
    """Refuse values that validation would convert to another type, such as "2" or true for a number."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            inner = made[key] if isinstance(made, Mapping) else getattr(made, key)
            _require_types(value, inner, f"{place}.{key}".lstrip("."))
    elif isinstance(given, list):
        for number, (value, inner) in enumerate(zip(given, made, strict=True)):
            _require_types(value, inner, f"{place}.{number}")
    elif type(given) is not type(made) and (type(given), type(made)) != (int, float):
        if isinstance(given, str) and place in _SIZES:
            return
        needed = _TYPE_NAMES.get(type(made), type(made).__name__)
        raise InputError(
            place, given, f"is {_TYPE_NAMES.get(type(given), 'something else')}", f"Give {needed}."
        )


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _values(method: AnyMethod) -> dict[str, Any]:
    return {name: getattr(method, name) for name in field_names(method)}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
