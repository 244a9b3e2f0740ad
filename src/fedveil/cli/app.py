"""The command line: every command checks its input first, prints results to stdout and all else to stderr."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fedveil.cli.callbacks import RunCallbacks
from fedveil.errors import LARGEST_SEED, FedveilError, InputError, known_name
from fedveil.experiment.config import Config, load_config, load_experiment
from fedveil.experiment.prepare import (
    check_attacks,
    client_names,
    load_examples,
    result_folder,
    split_clients,
)
from fedveil.federation.launch import run_seed
from fedveil.plugins import load_plugins
from fedveil.privacy.releases import Plan
from fedveil.report.tables import results_table, text_notes
from fedveil.session.callbacks.progress import ShowProgress, progress_bar
from fedveil.session.loop import Callback

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done; 1 `audit` refuted something; 2 input to mend, or a run that failed; 130 interrupted.",
)
# What is printed is data, in which brackets and numbers mean nothing to the console.
notes = Console(stderr=True, markup=False, highlight=False)
out = Console(markup=False, highlight=False)

ConfigFile = Annotated[Path, typer.Argument(help="A TOML file, such as experiments/fedceo/digits.toml.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key: --set run.rounds=5. May be repeated.")
]
DataDir = Annotated[Path | None, typer.Option("--data", help="Folder of data sets (else $FEDVEIL_DATA).")]
Results = Annotated[Path, typer.Option(help="Where result folders go.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")]


def check_seed(given: int | list[int] | None) -> int | list[int] | None:
    """Refuse what no generator takes; said here, since a range of 19 digits leaves the help no room."""
    for seed in given if isinstance(given, list) else [given]:
        if seed is not None and not 0 <= seed <= LARGEST_SEED:
            raise InputError("--seed", seed, "is out of range", f"Use 0 to {LARGEST_SEED}.")
    return given


Seed = Annotated[int | None, typer.Option(help="Run this seed only.", callback=check_seed)]
PartitionSeed = Annotated[
    int | None, typer.Option(help="Of this seed; without it the configuration's first.", callback=check_seed)
]

SUMMARY_KEYS = ("accuracy", "loss", "rounds", "seconds", "bytes_up", "bytes_down", "privacy")
TEXT_KEYS = ("mcc", "perplexity", "text")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"fedveil {version('fedveil')}")
        raise typer.Exit


@app.callback()
def before_any_command(
    plugin: Annotated[
        list[Path] | None,
        typer.Option(help="A Python file with methods or models of your own. May be repeated."),
    ] = None,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Private federated learning: train over many clients' data, and know how private that was."""
    load_plugins(plugin or [])


@app.command(
    epilog="Example: fedveil run experiments/demo.toml --set method.noise_multiplier=2.0 --seed 0 --live"
)
def run(
    config: ConfigFile,
    changes: Changes = None,
    seed: Seed = None,
    results: Results = Path("results"),
    data: DataDir = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve a page on this machine that follows the run.")
    ] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Also write to this TensorBoard folder.")] = None,
    mlflow: Annotated[str | None, typer.Option(help="Also write to this MLflow store (URI).")] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: every seed of its configuration, or the one given."""
    loaded = load_experiment(config, changes or [])
    check_attacks(loaded)
    with RunCallbacks(live=live, tensorboard=tensorboard, mlflow=mlflow) as watching:
        if watching.url is not None:
            notes.print(f"live at {watching.url}", soft_wrap=True)
        summaries = _run_all(loaded, config.stem, results, data, seed, watching)
    if as_json:
        shown = [
            {"result": s["result"]} | {key: s[key] for key in SUMMARY_KEYS + TEXT_KEYS if key in s}
            for s in summaries
        ]
        print(json.dumps(shown[0] if len(shown) == 1 else {"runs": shown}))
        return
    for line in text_notes(summaries[-1].get("text")):
        notes.print(line)
    print_words(summaries[-1]["privacy_in_words"])
    out.print(results_table(summaries))
    for summary in summaries:
        out.print(f"results in {summary['result']}", soft_wrap=True)


def print_words(text: str) -> None:
    """A privacy statement, its lines broken below their own beginning."""
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        wrapped = textwrap.fill(
            line, notes.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        notes.print(wrapped, soft_wrap=True)


def _run_all(
    config: Config,
    experiment: str,
    results: Path,
    data: Path | None,
    seed: int | None,
    watching: RunCallbacks,
) -> list[dict[str, Any]]:
    summaries = []
    for number in config.run.seeds if seed is None else [seed]:
        try:
            with progress_bar(notes) as progress:
                result = run_seed(
                    config,
                    number,
                    experiment=experiment,
                    results=results,
                    data_dir=data,
                    observe=partial(
                        _watch, progress, watching, result_folder(config, number, experiment, results), config
                    ),
                )
        except KeyboardInterrupt as stop:
            print("fedveil: interrupted; the same command goes on from here.", file=sys.stderr)
            raise typer.Exit(130) from stop
        if result.summary["stopped"]:
            notes.print(f"stopped after round {result.summary['rounds']}: {result.summary['stopped']}")
        if empty := sum(line.get("cohort") == 0 for line in result.history):
            notes.print(
                f"in {empty} of {len(result.history)} rounds nobody took part: where the method noises its "
                "aggregate the server released that noise alone, and the round is charged like any other",
            )
        summaries.append(result.summary | {"result": str(result.folder)})
    return summaries


def _watch(
    progress: Progress, watching: RunCallbacks, folder: Path, config: Config, plan: Plan
) -> list[Callback]:
    title = f"run {folder.name.replace('-', ' ')}"
    return [ShowProgress(progress, title, plan.rounds), *watching.observers(folder, config, plan)]


@app.command(
    "list", epilog="Examples: fedveil list methods; fedveil list methods fedceo; fedveil list attacks lira"
)
def list_(
    what: Annotated[
        Literal["methods", "wrappers", "datasets", "models", "attacks"],
        typer.Argument(metavar="WHAT", help="methods, wrappers, datasets, models or attacks."),
    ],
    name: Annotated[str | None, typer.Argument(help="One of them: what it takes, and the defaults.")] = None,
    as_json: AsJson = False,
) -> None:
    """List what fedveil knows by name; or what one of them takes in a configuration."""
    rows = _LISTS[what]() if name is None else _fields(what, name)
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=name or what, title_justify="left")
    columns = [key for key in rows[0] if key != "options"] if rows else ["name", "default"]
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    out.print(table)


def _fields(what: str, name: str) -> list[dict[str, Any]]:
    """The keys that this one takes in a configuration, with what they are if not given."""
    from fedveil.data.registry import dataset_options
    from fedveil.methods import METHODS
    from fedveil.methods.wrappers import WRAPPERS
    from fedveil.models.registry import model_options

    given: dict[str, Any]
    if what == "datasets":
        given = dataset_options(name)
    elif what == "models":
        given = model_options(name)
    else:
        known: Mapping[str, type[Any]] = METHODS if what == "methods" else WRAPPERS
        if what == "attacks":
            from fedveil.attacks.membership.threat_model import MEMBERSHIP_ATTACKS
            from fedveil.attacks.registry import ATTACKS

            _attacks()  # registers them
            known = ATTACKS | MEMBERSHIP_ATTACKS
        known_name("name", what.removesuffix("s"), name, known)
        given = {field.name: field.default for field in fields(known[name])}
    return [
        {"name": key, "default": str(value) if value == float("inf") else value}  # JSON has no infinity
        for key, value in given.items()
    ]


def _methods() -> list[dict[str, Any]]:
    from fedveil.methods import METHODS

    return [{"name": name, "summary": METHODS[name].summary} for name in sorted(METHODS)]


def _wrappers() -> list[dict[str, Any]]:
    from fedveil.methods.wrappers import WRAPPERS

    return [{"name": name, "summary": WRAPPERS[name].summary} for name in sorted(WRAPPERS)]


def _datasets() -> list[dict[str, Any]]:
    from fedveil.data.registry import list_datasets

    return [
        {"name": d.name, "summary": d.summary, "kind": d.kind, "how_to_get": d.how_to_get}
        for d in list_datasets()
    ]


def _models() -> list[dict[str, Any]]:
    from fedveil.models.registry import list_models

    return [{"name": m.name, "summary": m.summary} for m in list_models()]


def _attacks() -> list[dict[str, Any]]:
    from fedveil.attacks.membership.all import list_membership_attacks
    from fedveil.attacks.registry import list_attacks

    inversion = [{"name": a.name, "summary": a.summary, "options": list(a.options)} for a in list_attacks()]
    return inversion + [{"name": a.name, "summary": a.summary} for a in list_membership_attacks()]


_LISTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "methods": _methods,
    "wrappers": _wrappers,
    "datasets": _datasets,
    "models": _models,
    "attacks": _attacks,
}


@app.command(
    epilog="Example: fedveil partition experiments/demo.toml --set partition.alpha=0.1 --plot partition.png"
)
def partition(
    config: ConfigFile,
    changes: Changes = None,
    seed: PartitionSeed = None,
    data: DataDir = None,
    plot: Annotated[Path | None, typer.Option(help="Also write a picture (PNG, PDF or SVG).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which client gets how many examples of which class; nothing is trained."""
    from fedveil.partition.picture import counts_table, save_picture

    loaded = load_config(config, changes or [])
    dataset = load_examples(loaded, data)
    number = loaded.run.seeds[0] if seed is None else seed
    counts = split_clients(loaded, dataset, number).counts(dataset.labels, len(dataset.label_names))
    names = client_names(loaded, dataset)
    if plot is not None:
        save_picture(counts, plot, dataset.label_names)
    if as_json:
        known = {} if names is None else {"clients": names}
        print(json.dumps({"classes": list(dataset.label_names), **known, "counts": counts.tolist()}))
        return
    out.print(counts_table(counts, dataset.label_names, names))
    if plot is not None:
        out.print(f"picture in {plot}", soft_wrap=True)


def main() -> None:
    """The entry point: errors a user can mend are one line, exit code 2."""
    try:
        app()
    except FedveilError as error:
        print(f"fedveil: {error}", file=sys.stderr)
        sys.exit(2)
