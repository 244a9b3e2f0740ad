from __future__ import annotations

import contextlib
import hashlib
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import FedveilError, InputError
from fedveil.experiment.config import load_config, load_experiment, make_config
from tests.refusals import ANY, refuses

BASE: dict[str, Any] = {
    "partition": {"clients": 10},
    "method": {"name": "udp-fedavg", "lr": 0.2, "clip": 2.0},
    "run": {"rounds": 3, "cohort": 5},
}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        (["run.cohrt=3"], "run.cohrt", 3),
        (["runn.rounds=3"], "runn", {"rounds": 3}),
        (["run.rounds=0"], "run.rounds", 0),
        (["run.rounds=abc"], "run.rounds", "abc"),
        (["run.rounds=2.5"], "run.rounds", 2.5),
        (["run.rounds='2'"], "run.rounds", "2"),
        (["run.rounds=true"], "run.rounds", True),
        (["run.rounds=2.0"], "run.rounds", 2.0),
        (["run.seeds=[1, '2']"], "run.seeds.1", "2"),
        (["run.seeds=[9223372036854775808]"], "run.seeds.0", 9223372036854775808),
        (["privacy.delta='0.1'"], "privacy.delta", "0.1"),
        (["method.epochs=true"], "method.epochs", True),
        (["method.lr='0.1'"], "method.lr", "0.1"),
        (["method.lr=inf"], "method.lr", math.inf),
        (["method.noise_multiplier=inf"], "method.noise_multiplier", math.inf),
        (["method.weight_decay=inf"], "method.weight_decay", math.inf),
        (["wrap=[{name='model-average', decay='0.5'}]"], "wrap.decay", "0.5"),
        (["run.x=3"], "run.x", 3),
        (["run.cohort=11"], "run.cohort", 11),
        (["partition.clients=0"], "partition.clients", 0),
        (["run.sampler=some"], "run.sampler", "some"),
        (["run.seeds=[]"], "run.seeds", []),
        (["run.seeds=[1,1]"], "run.seeds", [1, 1]),
        (["run.max_memory=lots"], "run.max_memory", "lots"),
        (["run.max_memory=-1"], "run.max_memory", -1),
        (["run.sampler=all"], "run.cohort", 5),
        (["method.name=fedavgg"], "method.name", "fedavgg"),
        (["method.clip=0"], "method.clip", 0),
        (["method.clip=nan"], "method.clip", ANY),
        (["method.noise_multiplier=-1"], "method.noise_multiplier", -1),
        (["method.lrr=1"], "method.lrr", 1),
        (["privacy.delta=1"], "privacy.delta", 1),
        (["run.sampler=poisson", "run.min_clients=2"], "run.min_clients", 2),
        (["task.dataset=none"], "task.dataset", "none"),
        (["task.dataset=none", "task.input_shape=[4]"], "task.dataset", "none"),
        (["version=2"], "version", 2),
        (["run=3"], "run", 3),
        (["run.seeds=3"], "run.seeds", 3),
        (["task.model=3"], "task.model", 3),
        (["partition.allow_empty=3"], "partition.allow_empty", 3),
        (["run.transcript=3"], "run.transcript", 3),
        (["method.name=fedceo", "method.lam=some"], "method.lam", "some"),
        (["paper.table='2'"], "paper.source", None),
        (["run"], "--set", "run"),
        (["run.rounds.x=1"], "--set", "run.rounds.x=1"),
    ],
)
def test_bad_input_names_the_field_and_a_remedy(changes: list[str], field: str, value: object) -> None:
    with refuses(field, value=value) as caught:
        make_config(BASE, changes)
    assert isinstance(caught.value, InputError)
    assert caught.value.remedy
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("changes", "field", "near"),
    [
        (["run.cohrt=3"], "run.cohrt", "cohort"),
        (["runn.rounds=3"], "runn", "run"),
        (["method.name=fedavgg"], "method.name", "fedavg"),
        (["method.lrr=1"], "method.lrr", "lr"),
    ],
)
def test_misspelt_names_are_answered_by_the_nearest(changes: list[str], field: str, near: str) -> None:
    with refuses(field) as caught:
        make_config(BASE, changes)
    assert isinstance(caught.value, InputError)
    assert near in caught.value.remedy.split("?")[0].split()


DEPLOYMENT = {"deadline": 5.0, "max_message": "1MiB", "federation": "somewhere"}


def test_federation_keys_are_reported_as_unused_in_a_simulation() -> None:
    plain = make_config(BASE)
    task = dict(BASE.get("task", {})) | {"input_shape": [1, 8, 8], "classes": 10}
    both = make_config(BASE | {"task": task, "run": dict(BASE.get("run", {})) | DEPLOYMENT})
    assert plain.unused() == []
    assert [line.split()[0] for line in both.unused()] == [
        "run.deadline",
        "run.max_message",
        "run.federation",
        "task.input_shape",
        "task.classes",
    ]
    assert both.identity() == plain.identity()
    deployed = make_config(
        both.resolved() | {"paper": None} | {"run": both.resolved()["run"] | {"engine": "flower"}}
    )
    assert deployed.unused() == []


def test_a_multiplier_beside_a_target_is_named_as_unused() -> None:
    method = {"name": "udp-fedavg", "noise_multiplier": 1.0}
    assert make_config(BASE | {"method": method}).unused() == []
    made = make_config(BASE | {"method": method, "privacy": {"target_epsilon": 8.0}})
    assert [line.split()[0] for line in made.unused()] == ["method.noise_multiplier"]
    del method["noise_multiplier"]
    assert make_config(BASE | {"method": method, "privacy": {"target_epsilon": 8.0}}).unused() == []


def test_seeded_noise_is_named_as_unused_by_deployed_nodes() -> None:
    given = {"partition": {"clients": 3}, "run": {"engine": "flower", "noise": "seeded"}}
    made = make_config(given)
    assert [line.split()[0] for line in made.unused()] == ["run.noise"]
    assert (
        made.identity() == make_config({"partition": {"clients": 3}, "run": {"engine": "flower"}}).identity()
    )


def test_unknown_keys_are_refused_for_every_engine() -> None:
    for engine in ("simulation", "flower"):
        with pytest.raises(InputError) as refused:
            make_config({"partition": {"clients": 3}, "run": {"engine": engine, "dead_line": 5}})
        assert refused.value.field == "run.dead_line"


RECORD = '[method]\nname = "dp-fedavg"\nunit = "record"\n'


@pytest.mark.parametrize(
    ("text", "changes", "field"),
    [
        (RECORD + "batch_size = 7\n", [], "method.batch_size"),
        (RECORD, ["method.batch_size=7"], "method.batch_size"),
        (RECORD + 'noise_scope = "local"\n', [], "method.noise_scope"),
        ('[method]\nname = "dp-fedavg"\nrecord_rate = 0.5\n', [], "method.record_rate"),
        ('[method]\nname = "dp-fedags-proven"\nthreshold = 0.2\n', [], "method.threshold"),
        ('[method]\nname = "dp-fedags-proven"\n', ["method.selection_share=0.3"], "method.selection_share"),
        ('[method]\nname = "psg"\nclasses_per_client = 2\n', [], "method.classes_per_client"),
        (
            '[method]\nname = "dp-fedags-proven"\nunit = "record"\nvariant = "everywhere"\nbatch_size = 7\n',
            [],
            "method.batch_size",
        ),
        (
            '[method]\nname = "fedavg"\n',
            ["method.name=dp-fedavg", "method.unit=record", "method.batch_size=7"],
            "method.batch_size",
        ),
    ],
)
def test_fields_that_a_method_does_not_use_are_refused(
    text: str, changes: list[str], field: str, tmp_path: Path
) -> None:
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(InputError) as refused:
        load_experiment(tmp_path / "e.toml", changes)
    assert refused.value.field == field


def test_a_written_out_configuration_and_another_methods_fields_are_not_refused(tmp_path: Path) -> None:
    made = make_config({"method": {"name": "dp-fedavg", "unit": "record"}})
    (tmp_path / "config.toml").write_text(made.to_toml())
    assert load_experiment(tmp_path / "config.toml").identity() == made.identity()
    (tmp_path / "other.toml").write_text('[method]\nname = "fedavg"\nbatch_size = 7\n')
    load_experiment(tmp_path / "other.toml", ["method.name=dp-fedavg", "method.unit=record"])


def test_a_federation_requires_its_number_of_nodes() -> None:
    with refuses("partition.clients"):
        make_config({"run": {"engine": "flower"}})
    assert make_config({"run": {"engine": "flower"}, "partition": {"clients": 3}}).partition.clients == 3


def test_newer_keys_at_their_default_leave_the_hash_as_it_was() -> None:
    """Runs recorded before a key existed are still found."""
    fedem = make_config({"method": {"name": "fedem"}})
    assert fedem.identity() == make_config({"method": {"name": "fedem", "block": 1}}).identity()
    assert fedem.identity() != make_config({"method": {"name": "fedem", "block": 2}}).identity()
    before = json.loads(json.dumps(fedem.resolved()))
    for section, key in (
        ("task", "input_shape"),
        ("task", "classes"),
        ("task", "features"),
        ("task", "feature_options"),
        ("task", "loss"),
        ("task", "class_weights"),
        ("run", "max_message"),
        ("run", "noise"),
        ("run", "early_stopping"),
        ("privacy", "target_epsilon"),
        ("privacy", "target_adversary"),
        ("privacy", "target_unit"),
        ("method", "block"),
    ):
        del before[section][key]
    for key in ("seeds", "workers", "max_memory", "checkpoint_every", "federation", "address"):
        del before["run"][key]
    del before["paper"]
    expected = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:12]
    assert fedem.identity() == expected


def test_another_method_keeps_the_shared_fields() -> None:
    method = make_config(BASE, ["method.name=fedavg"]).method
    assert method == {"name": "fedavg", "lr": 0.2}
    proximal = make_config(BASE, ["method.name=fedprox", "method.proximal=0.5"]).build_method()
    assert proximal.proximal == 0.5  # type: ignore[attr-defined]
    local, shared = (["method.name=udp-fedavg", f"method.noise_scope={word}"] for word in ("local", "shared"))
    central = "method.name=dp-fedavg"  # which knows "local" too, but not "shared"
    assert make_config(BASE, [*local, central]).method["noise_scope"] == "local"
    assert "noise_scope" not in make_config(BASE, [*shared, central]).method


def test_changes_are_toml_values_or_plain_text() -> None:
    config = make_config(
        BASE, ["run.seeds=[1, 2]", "run.sampler=poisson", "method.clip=inf", "run.max_memory=2GiB"]
    )
    assert config.run.seeds == [1, 2]
    assert config.run.sampler == "poisson"
    assert config.run.max_memory == 2 << 30


def test_identity_is_of_what_changes_the_result() -> None:
    one = make_config(BASE).identity()
    assert make_config(BASE, ["run.seeds=[5]", "run.workers=2"]).identity() == one
    assert make_config(BASE, ["method.momentum=0.0"]).identity() == one  # a default written out
    assert make_config(BASE, ["method.momentum=0.1"]).identity() != one
    assert make_config(BASE, ["run.rounds=4"]).identity() != one


def test_a_metric_that_no_report_compares_is_refused() -> None:
    with refuses("paper.metric"):
        make_config({"paper": {"source": "A paper", "expected": 0.5, "metric": "acuracy"}})


def test_the_stored_configuration_loads_to_the_same_run(tmp_path: Path) -> None:
    config = make_config(BASE, ["method.clip=inf"])
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert load_config(path).identity() == config.identity()
    assert tomllib.loads(path.read_text())["method"]["epochs"] == 1


@pytest.mark.parametrize("content", [b"a = [", b"\xff\xfe", None])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with refuses("config", value=str(path)):
        load_config(path)


_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
)
_keys = st.sampled_from(
    [
        "version",
        "task",
        "partition",
        "method",
        "run",
        "privacy",
        "wrap",
        "rounds",
        "name",
        "clients",
        "cohort",
        "x",
    ]
)


@given(st.recursive(_scalars, lambda inner: st.dictionaries(_keys, inner, max_size=4), max_leaves=12))
def test_any_content_is_a_configuration_or_a_clear_error(content: Any) -> None:
    if not isinstance(content, dict):
        content = {"run": content}
    with contextlib.suppress(FedveilError):
        make_config(content).identity()


@pytest.mark.parametrize(
    ("alone", "together"),
    [
        ('privacy.budget_adversary="server"', "privacy.budget=3"),
        ('privacy.budget_unit="client"', "privacy.budget=3"),
        ('privacy.target_adversary="observer"', "privacy.target_epsilon=3"),
        ("run.transcript_exchanges=1", "run.transcript=true"),
    ],
)
def test_a_key_that_needs_another_is_refused_without_it(alone: str, together: str, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('[method]\nname = "udp-fedavg"\n[partition]\nclients = 4\n')
    with pytest.raises(InputError) as refused:
        load_experiment(path, [alone])
    assert refused.value.field == alone.partition("=")[0]
    (tmp_path / "again.toml").write_text(load_experiment(path, [alone, together]).to_toml())
    load_experiment(tmp_path / "again.toml")


@pytest.mark.parametrize(
    ("method", "rounds", "named"),
    [
        ({"name": "fedceo", "interval": 10, "lam": 0.5, "smooth_last": False}, 7, ["lam", "smooth_last"]),
        ({"name": "fedceo", "interval": 3, "lam": 0.5, "smooth_last": False}, 7, ["smooth_last"]),
        ({"name": "fedceo", "interval": 7, "lam": 0.5, "smooth_last": False}, 7, []),
        ({"name": "fedlap", "reinit": False}, 1, ["reinit"]),
        ({"name": "fedavg", "lr_schedule": "cosine"}, 1, ["lr_schedule"]),
        ({"name": "fedavg", "lr_schedule": "cosine"}, 2, []),
    ],
)
def test_fields_that_only_more_rounds_reach_are_named(
    method: dict[str, Any], rounds: int, named: list[str]
) -> None:
    """Not refused: a first try of an experiment has few rounds."""
    told = make_config({"method": method, "run": {"rounds": rounds}}).unused()
    assert [line.split()[0] for line in told] == [f"method.{field}" for field in named]
