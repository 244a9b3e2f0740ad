"""What a stranger meets in the first hour: examples of the help, near names, where words go."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from typer.testing import CliRunner

import fedveil.cli.attack
import fedveil.cli.listing
import fedveil.cli.report
import fedveil.cli.run  # noqa: F401  commands register themselves on the app
from fedveil.cli import app
from fedveil.cli.lazy import all_commands
from fedveil.errors import InputError
from fedveil.experiment.changes import parse_value
from fedveil.experiment.config import load_config
from fedveil.methods import METHODS
from tests.engines.configs import quick_config
from tests.refusals import refuses

# Uploads that are images of their own, or of which the server lacks the head of the model: nothing to invert.
NOT_INVERTED = {"dsc", "feddm", "fedlap", "fedlap-dp", "psg", "centaur"}
ROOT = Path(__file__).parents[3]


def typed(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedveil", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_attack_of_the_help_needs_no_client_and_no_number_of_examples(name: str, tmp_path: Path) -> None:
    config = quick_config(name, rounds=1, transcript=True)
    config = config.with_method(block=1) if name == "fedem" else config
    (tmp_path / "quick.toml").write_text(config.to_toml())
    words = ["run", str(tmp_path / "quick.toml"), "--results", str(tmp_path / "results"), "--json"]
    result = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)["result"]
    attack = ["attack", result, "--attack", "inverting-gradients", "--set", "steps=2"]
    if name in NOT_INVERTED:
        with pytest.raises(InputError) as refused:
            CliRunner().invoke(app, attack, catch_exceptions=False)
        assert refused.value.field == "method"
        return
    done = CliRunner().invoke(app, attack, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "finding in" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["lst"],
        ["run", "x.toml", "--resuls", "y"],
        ["list", "methods", "fedaveg"],
        ["run", ROOT / "experiments" / "demo.toml", "--set", "run.round=3"],
        ["run", ROOT / "experiments" / "demo.toml", "--set", "method.name=fedaveg"],
    ],
    ids=str,
)
def test_a_near_name_is_suggested_once(words: list[str | Path], tmp_path: Path) -> None:
    done = typed(tmp_path, *words)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert said.count("Did you mean") + said.count("Possible options") == 1, said


WRONG = [
    (["run", "demo", "--data", "nowhere"], "--data"),
    (["list", "results", "nowhere"], "NAME"),
    (["deploy", "init", "fed", "--nodes", "2", "--epsilon", "-1"], "--epsilon"),
    (["deploy", "init", "fed", "--nodes", "2", "--epsilon", "nan"], "--epsilon"),
    (["deploy", "init", "fed", "--nodes", "2", "--delta", "0"], "delta"),
    (["run", "demo", "--tensorboard", "a-file"], "--tensorboard"),
    (["run", "demo", "--mlflow", "http://127.0.0.1:9"], "--mlflow"),
]


@pytest.mark.parametrize(("words", "field"), WRONG, ids=lambda part: str(part))
def test_wrong_input_is_refused_by_its_field(
    words: list[str], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {"--tensorboard": "tensorboard", "--mlflow": "mlflow", "init": "flwr"}
    for package in [package for word, package in needed.items() if word in words]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    (tmp_path / "demo").write_text("[run]\nrounds = 1\n")
    with pytest.raises(InputError) as refused:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert refused.value.field == field
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "demo"]


def test_a_key_without_its_section_is_found_in_it(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("")
    with refuses("rounds") as refused:
        load_config(tmp_path / "demo.toml", ["rounds=5"])
    assert "run.rounds" in str(refused.value)


def test_an_entry_of_a_list_is_named_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("[run]\ntranscript = [1, 0]\n")
    with refuses("run.transcript.1", value=0):
        load_config(tmp_path / "demo.toml")


def test_worded_statements_go_to_a_file_with_the_results(tmp_path: Path) -> None:
    words = ["account", str(ROOT / "experiments" / "demo.toml"), "--records-per-client", "100"]
    with (tmp_path / "out.txt").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "fedveil", *words], stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert "Against the server:" in (tmp_path / "out.txt").read_text()
    assert "Against the server:" not in done.stderr
    piped = typed(tmp_path, *words)
    assert "Against the server:" in piped.stderr, "a program that reads stdout gets the tables alone"


@pytest.mark.parametrize(
    ("text", "value"),
    [(".5", 0.5), ("-.5", -0.5), ("5.", 5.0), (".5e-3", 0.0005), ("1e-3", 0.001), (".", ".")],
)
def test_a_point_without_a_digit_before_it_makes_a_number(text: str, value: object) -> None:
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


def test_every_command_has_the_short_help_option() -> None:
    runner = CliRunner()
    for name, command in all_commands().items():
        inner = getattr(command, "commands", {})
        for words in [[name], *([name, one] for one in inner)]:
            done = runner.invoke(app, [*words, "-h"])
            assert done.exit_code == 0, words
            assert "Usage:" in done.output


def _leaf_commands() -> dict[str, click.Command]:
    """Every command and every command of a group, by what is typed."""
    leaves: dict[str, click.Command] = {}
    for name, command in all_commands().items():
        inner = getattr(command, "commands", None)
        leaves |= {name: command} if inner is None else {f"{name} {one}": inner[one] for one in inner}
    return leaves


@pytest.mark.parametrize("words", _leaf_commands())
def test_every_option_says_what_holds_without_it(words: str) -> None:
    """A flag is off, a shown default is taken, a repeatable option has no value; all others say it in words."""
    for option in _leaf_commands()[words].params:
        help_text = getattr(option, "help", None)
        assert help_text, option.name
        assert help_text.endswith("."), option.name
        if not isinstance(option, click.Option) or option.is_flag or option.required:
            continue
        if option.multiple:
            assert "May be repeated." in help_text, option.name
        elif option.default is None:
            assert re.search(r"Default: |^(Also|Only|For) ", help_text), option.name


@pytest.mark.parametrize("words", _leaf_commands())
def test_every_command_has_an_example(words: str) -> None:
    assert f"fedveil {words} " in (_leaf_commands()[words].epilog or ""), words


def test_a_method_is_listed_with_meaning_values_and_default_of_each_field() -> None:
    rows = json.loads(CliRunner().invoke(app, ["list", "methods", "fedceo", "--json"]).stdout)
    assert {"name", "default", "values", "meaning"} == set(rows[0])
    assert all(row["meaning"] and row["values"] for row in rows)


def test_a_comparison_writes_its_figures_as_pdf(tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text(quick_config("fedavg").to_toml())
    words = ["compare", str(tmp_path / "quick.toml"), "--jobs", "1", "--pdf", str(tmp_path / "figures")]
    done = CliRunner().invoke(app, [*words, "--results", str(tmp_path / "results")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written = list((tmp_path / "figures").glob("*.pdf"))
    assert written
    assert all(path.read_bytes().startswith(b"%PDF") for path in written)
