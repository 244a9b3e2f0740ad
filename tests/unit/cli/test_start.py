from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.cli.lazy import all_commands, summary_of
from fedveil.errors import InputError
from fedveil.experiment.changes import parse_value
from fedveil.experiment.config import load_config

ROOT = Path(__file__).resolve().parents[3]


def invoke(*arguments: str) -> str:
    answer = CliRunner().invoke(app, list(arguments))
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_the_summary_of_each_command_is_the_first_sentence_of_its_help() -> None:
    for name, command in all_commands().items():
        assert command.get_short_help_str(500) == summary_of(name), name


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["list", "results"], ["list", "experiments"]])
def test_commands_that_need_no_torch_do_not_import_it(arguments: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['fedveil', *{arguments}]\n"
        "from fedveil.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_completion_names_the_commands(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['fedveil']; from fedveil.cli import main; main()"
    environment = {"_FEDVEIL_COMPLETE": "complete_bash", "COMP_WORDS": "fedveil pre", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "", **environment},
        check=False,
    )
    assert "predict" in done.stdout


@pytest.mark.parametrize("template", ["table", "images", "text"])
def test_a_new_experiment_runs_from_any_folder(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "far" / "study"
    invoke("new", str(folder), "--template", template)
    config = str(folder / "experiment.toml")
    invoke("run", config, "--set", "run.rounds=2", "--results", str(tmp_path / "results"))
    (row,) = json.loads(invoke("list", "results", str(tmp_path / "results"), "--json"))
    assert Path(row["path"]).is_dir()
    if template == "table":
        invoke("predict", row["path"], str(folder / "new-patients.csv"), "-o", str(tmp_path / "out.csv"))
        assert (tmp_path / "out.csv").read_text().startswith("predicted,probability of no")


def test_the_federation_template_is_a_configuration(tmp_path: Path) -> None:
    invoke("new", str(tmp_path / "f"), "--template", "federation")
    assert load_config(tmp_path / "f" / "experiment.toml").run.engine == "flower"
    invoke("account", str(tmp_path / "f" / "experiment.toml"), "--records-per-client", "100")


def test_new_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    answer = CliRunner().invoke(app, ["new", str(tmp_path)])
    assert isinstance(answer.exception, InputError)
    assert answer.exception.field == "DIR"


@pytest.mark.parametrize("name", ["demo.toml", "demo-recommended.toml", "demo-secure.toml"])
def test_the_packaged_demo_is_that_of_the_repository(name: str) -> None:
    packaged = files("fedveil") / "templates" / "demo" / name
    assert packaged.read_text() == (ROOT / "experiments" / name).read_text()


def test_the_demo_writes_a_report_that_leads_with_the_recommended_model(tmp_path: Path) -> None:
    out, results = tmp_path / "demo.html", tmp_path / "results"
    words = ("--out", str(out), "--rounds", "1", "--steps", "2", "--results", str(results), "--json")
    answer = CliRunner().invoke(app, ["demo", *words])
    assert answer.exit_code == 0, answer.output
    runs = json.loads(answer.stdout)["runs"]
    assert "demo-recommended" in runs[0]["result"]
    assert len(runs) == 5
    assert "<html" in out.read_text()
    attacked = {found.parts[-5] for found in results.glob("*/*/seed-0/attacks/*")}
    assert attacked == {"demo"}


def test_experiments_are_listed_with_their_method() -> None:
    rows = json.loads(invoke("list", "experiments", str(ROOT / "experiments"), "--json"))
    assert {"name": "demo", "dataset": "digits", "method": "udp-fedavg", "paper": ""}.items() <= next(
        row for row in rows if row["name"] == "demo"
    ).items()


@pytest.mark.parametrize(
    ("text", "value"), [(".5", 0.5), ("5.", 5.0), ("-.5e1", -5.0), (".", "."), ("a.5", "a.5")]
)
def test_numbers_may_be_written_without_a_zero(text: str, value: object) -> None:
    assert parse_value(text) == value
