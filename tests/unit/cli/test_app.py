"""The command line as a user meets it: exit codes, what is on stdout and what is not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from fedveil.cli import main
from tests.unit.report.makers import write_run

CONFIG = """
[partition]
clients = 8
[method]
name = "udp-fedavg"
batch_size = 16
[run]
rounds = 4
cohort = 4
workers = 1
"""


# A shell that starts a job in the background has it ignore Ctrl-C; a person at a terminal does not.
START = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from fedveil.cli import main; main()"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def fedveil(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command line in this process, in an empty folder, without a data folder."""
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        text = capsys.readouterr()
        code = stop.value.code
        return Done(code if isinstance(code, int) else 0, text.out, text.err)

    return call


def test_run_ends_with_one_json_object(fedveil: Command, config: Path, tmp_path: Path) -> None:
    done = fedveil("run", config, "--json", "--seed", "3")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {
        "result",
        "accuracy",
        "loss",
        "rounds",
        "seconds",
        "bytes_up",
        "bytes_down",
        "privacy",
    }
    assert answer["rounds"] == 4
    assert (tmp_path / answer["result"] / "summary.json").exists()
    assert answer["result"].startswith("results/small/")
    assert answer["result"].endswith("/seed-3")
    again = fedveil("run", config, "--json", "--seed", "3")
    assert json.loads(again.stdout) == answer


def test_a_changed_experiment_is_not_held_against_the_paper(
    fedveil: Command, config: Path, tmp_path: Path
) -> None:
    config.write_text('[paper]\nsource = "x"\nexpected = 99.0\n' + CONFIG)
    for changes, kept in (
        (["run.workers=1"], True),
        (["method.clip=2.0"], False),
        (["method.clip=2.5", 'paper.scale="clip 2.5"'], True),
    ):
        options = [part for change in changes for part in ("--set", change)]
        answer = json.loads(fedveil("run", config, "--json", "--seed", "0", *options).stdout)
        summary = json.loads((tmp_path / answer["result"] / "summary.json").read_text())
        assert (summary.get("paper") is not None) == kept


def test_several_seeds_of_a_private_method_state_what_they_prove_together(
    fedveil: Command, config: Path
) -> None:
    """Each run's own epsilon says nothing of whoever sees all of them."""
    private = ["--set", "method.name=udp-fedavg", "--set", "method.noise_multiplier=4.0"]
    more = ["--set", "run.seeds=[0,1]", "--set", "run.rounds=1"]
    told = json.loads(fedveil("run", config, *private, *more, "--json").stdout)
    (together,) = told["together"]
    assert together["runs"] == 2
    assert all(row["epsilon"] > 0 for row in together["proven"])
    words = fedveil("run", config, *private, *more)  # finished: read from the folders
    assert "Together the 2 private runs" in " ".join(words.stderr.split())


def test_several_seeds_are_a_list_of_runs(fedveil: Command, config: Path) -> None:
    done = fedveil("run", config, "--set", "run.seeds=[0,1]", "--set", "run.rounds=1", "--json")
    assert len(json.loads(done.stdout)["runs"]) == 2


def test_a_person_gets_a_statement_and_a_table(fedveil: Command, config: Path) -> None:
    done = fedveil("run", config)
    assert "epsilon is" in " ".join(done.stderr.split())
    assert "udp-fedavg" in done.stdout
    assert "results in results/small/" in done.stdout


def test_rounds_without_participants_are_reported(fedveil: Command, config: Path) -> None:
    poisson = ["--set", "run.sampler=poisson", "--set", "run.cohort=1", "--set", "run.rounds=10"]
    done = fedveil("run", config, *poisson, "--json")
    folder = Path(json.loads(done.stdout)["result"])
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    empty = sum(line["cohort"] == 0 for line in rounds)
    assert empty > 0
    assert f"in {empty} of 10 rounds nobody" in " ".join(done.stderr.split())
    assert "nobody" not in fedveil("run", config, "--json").stderr


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "attacks"])
def test_lists_are_json_arrays_of_names(fedveil: Command, what: str) -> None:
    done = fedveil("list", what, "--json")
    rows = json.loads(done.stdout)
    assert isinstance(rows, list)
    assert all({"name", "summary"} <= set(row) for row in rows)
    if what == "methods":
        assert {"fedavg", "fedsgd", "fedprox", "scaffold", "udp-fedavg"} <= {row["name"] for row in rows}


def test_brackets_are_printed_as_they_are(fedveil: Command) -> None:
    """A console that takes them for a style leaves them out, and what is installed then is nothing."""
    assert '".[mnist]"' in fedveil("list", "datasets").stdout


def test_a_methods_fields_are_listed_with_their_defaults(fedveil: Command) -> None:
    rows = json.loads(fedveil("list", "methods", "udp-fedavg", "--json").stdout)
    (row,) = (row for row in rows if row["name"] == "noise_multiplier")
    assert row["default"] == 1.0
    assert row["values"] == "number >= 0"
    assert row["meaning"]
    assert "decay" in fedveil("list", "wrappers", "model-average").stdout
    assert "Known: centaur" in fedveil("list", "methods", "udp").stderr


@pytest.mark.parametrize(
    ("what", "name", "row"),
    [
        ("models", "mlp-2", {"name": "hidden", "default": 64}),
        ("datasets", "table", {"name": "label", "default": "needed"}),
        ("attacks", "lira", {"name": "shadows", "default": 16}),
        ("attacks", "inverting-gradients", {"name": "restarts", "default": 1}),
    ],
)
def test_so_are_the_options_of_models_data_and_attacks(
    fedveil: Command, what: str, name: str, row: dict[str, object]
) -> None:
    rows = json.loads(fedveil("list", what, name, "--json").stdout)
    assert row in [{key: found[key] for key in row} for found in rows]
    assert "Known: " in fedveil("list", what, "nope").stderr


@pytest.mark.parametrize(("attack", "field"), [("inverting-gradients", "steps"), ("lira", "shadows")])
def test_an_attacks_settings_are_listed_with_their_defaults(
    fedveil: Command, attack: str, field: str
) -> None:
    rows = json.loads(fedveil("list", "attacks", attack, "--json").stdout)
    assert field in {row["name"] for row in rows}


def test_every_command_helps_with_an_example_in_80_columns(
    fedveil: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("run", "compare", "report", "account", "audit", "attack", "partition", "list"):
        text = fedveil(name, "--help").stdout
        assert f"fedveil {name} " in text.partition("Example")[2]
        assert "…" not in text
    assert "Exit codes" in fedveil("--help").stdout


def test_a_statement_is_broken_below_its_own_beginning(fedveil: Command, config: Path) -> None:
    told = fedveil("account", config).stderr.splitlines()
    start = next(place for place, line in enumerate(told) if line.startswith("Against the server:"))
    block = told[start + 1 : told.index("", start)]
    assert len(block) > 3
    assert all(line.startswith("  ") for line in block)


def test_partition_shows_and_draws(fedveil: Command, config: Path, tmp_path: Path) -> None:
    done = fedveil("partition", config, "--json", "--plot", tmp_path / "p.png")
    counts = json.loads(done.stdout)["counts"]
    assert sum(map(sum, counts)) == 1438
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_partition_names_the_users_of_a_table(fedveil: Command, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{'north' if k % 3 else 'south'},{k}.5,{k % 2}" for k in range(30)]
    table.write_text("\n".join(["who,a,y", *rows]) + "\n")
    config = tmp_path / "c.toml"
    config.write_text(
        f'[task]\ndataset = "table"\nmodel = "logistic"\n[task.data_options]\npath = "{table}"\n'
        f'test_path = "{table}"\nlabel = "y"\n'
        'user = "who"\n[partition]\nkind = "user"\n[method]\nname = "fedavg"\n'
    )
    found = json.loads(fedveil("partition", config, "--json").stdout)
    assert dict(zip(found["clients"], map(sum, found["counts"]), strict=True)) == {"north": 20, "south": 10}
    assert "north" in fedveil("partition", config).stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "run.cohort=9"], ["run.cohort = 9: "]),
        (["--set", "run.what=9"], ["run.what = 9: "]),
        (["--set", "task.dataset=mnist"], ["mnist", "train-images", "FEDVEIL_DATA"]),
        (["--set", "task.dataset=nothing"], ["task.dataset = 'nothing': "]),
        (["--set", "task.model=nothing"], ["task.model = 'nothing': "]),
        (["--set", "run.device=cuda"], ["run.device = 'cuda': "]),
        (["--set", "run.device=meta"], ["run.device = 'meta': "]),
        (["--set", "privacy.budget=1", "--set", "method.noise_multiplier=0"], ["privacy.budget = 1.0: "]),
        (["--set", "privacy.ledger=."], ["privacy ledger"]),
        (["--set", "partition.clients=2000"], ["partition.clients = 2000: "]),
        (["--set", "partition.kind=user"], ["partition.kind = 'user': "]),
        (["--set", "task.data_options.colour=1"], ["task.data_options.colour = 1: "]),
        (["--set", "attack=[{name='guess'}]"], ["attack.name = 'guess': "]),
        (["--set", "attack=[{name='dlg', stepps=1}]"], ["attack.stepps = 1: "]),
        (
            ["--set", "method.name=dp-fedags", "--set", "method.selections=1e9"],
            ["method.selections = 1000000000.0: "],
        ),
        (
            ["--set", "method.name=fedceo", "--set", "method.interval=2", "--set", "method.layers=['fc9']"],
            ["method.layers = ['fc9']: "],
        ),
        (["--set", "method.name=fedceo", "--set", "method.interval=0"], ["method.interval = 0: "]),
        (["--set", "method.name=centaur", "--set", "method.head=9"], ["method.head = 9: "]),
        (["--results", "small.toml"], ["small.toml"]),
        (["--results", "x" * 300], ["x" * 300]),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    fedveil: Command, config: Path, tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    done = fedveil("run", config, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("fedveil: ")  # the message alone, without a progress bar before it
    assert done.stdout == ""
    assert all(part in done.stderr for part in named), done.stderr
    assert not (tmp_path / "results").exists()


def test_a_picture_that_cannot_be_written_is_refused(fedveil: Command, config: Path) -> None:
    done = fedveil("partition", config, "--plot", config / "p.png")
    assert done.returncode == 2
    assert done.stderr.startswith("fedveil: path = ")


def test_the_version_is_that_of_the_package(fedveil: Command) -> None:
    done = fedveil("--version")
    assert (done.returncode, done.stdout) == (0, f"fedveil {metadata.version('fedveil')}\n")


def test_an_unknown_command_exits_2(fedveil: Command) -> None:
    done = fedveil("walk")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_ctrl_c_leaves_a_folder_that_resumes(config: Path, tmp_path: Path) -> None:
    long = ["run", str(config), "--set", "run.rounds=4000", "--set", "run.evaluate_every=4000", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *long],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        logs = list(tmp_path.glob("results/small/*/seed-0/rounds.jsonl"))
        if logs and logs[0].read_text().count("\n") >= 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the same command resumes" in errors
    (folder,) = tmp_path.glob("results/small/*/seed-0")
    assert list((folder / "checkpoint").glob("*.ckpt"))
    assert not (folder / "summary.json").exists()


def test_a_report_on_damaged_runs_shows_the_others_names_the_files_and_exits_2(
    fedveil: Command, tmp_path: Path
) -> None:
    good, bad = write_run(tmp_path, "fedavg"), write_run(tmp_path, "scaffold")
    write_run(tmp_path, "fedprox", finished=False)  # which is no damage
    assert fedveil("report", str(tmp_path), "-o", str(tmp_path / "whole.html")).returncode == 0
    (bad / "model.safetensors").write_bytes(b"")
    (bad / "rounds.jsonl").write_text("{")
    done = fedveil("report", str(tmp_path), "-o", str(tmp_path / "page.html"))
    assert done.returncode == 2
    for part in (str(bad), "model.safetensors", "rounds.jsonl"):
        assert part in done.stderr
    assert str(good) not in done.stderr
    assert "90.00 %" in (tmp_path / "page.html").read_text()
    done = fedveil("report", str(bad), "-o", str(tmp_path / "page.html"), "--json")
    assert done.returncode == 2
    assert list(json.loads(done.stdout)["damaged"]) == [str(bad)]
