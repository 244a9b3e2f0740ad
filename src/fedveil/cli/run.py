"""`fedveil run`: run the seeds of an experiment."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from fedveil.cli.app import (
    SUMMARY_KEYS,
    AsJson,
    Changes,
    ConfigFile,
    DataDir,
    Results,
    Seed,
    app,
    notes,
    out,
    print_words,
)
from fedveil.cli.callbacks import RunCallbacks
from fedveil.cli.published import (
    attack_published,
    beside_the_paper,
    check_published_attacks,
    load_run,
    show_attacks,
    show_paper,
)
from fedveil.experiment.config import Config
from fedveil.experiment.prepare import check_attacks, result_folder
from fedveil.experiment.run import run_seed
from fedveil.experiment.target import Calibrated
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.progress import ShowProgress, progress_bar
from fedveil.session.loop import Callback
from fedveil.session.results import Result
from fedveil.session.tables import results_table, text_notes

if TYPE_CHECKING:
    from fedveil.experiment.compare import Composition

MORE_KEYS = ("mcc", "perplexity", "text", "target", "features")


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
    row: Annotated[
        str | None,
        typer.Option(help="For a published table: the name of the row to run, or words of it."),
    ] = None,
    attacks: Annotated[
        bool, typer.Option("--attacks", help="Also carry out the attacks that are published for the row.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: every seed of its configuration, or the one given."""
    experiment = load_run(config, changes or [], row)
    loaded = experiment.config
    check_attacks(loaded)
    if attacks:
        check_published_attacks(loaded)
    for line in loaded.unused():
        notes.print(line, soft_wrap=True)
    with RunCallbacks(live=live, tensorboard=tensorboard, mlflow=mlflow) as callbacks:
        if callbacks.url is not None:
            notes.print(f"live at {callbacks.url}", soft_wrap=True)
        done = _run_all(loaded, experiment.name, results, data, seed, callbacks)
    summaries = [result.summary | {"result": str(result.folder)} for result in done]
    beside = beside_the_paper(experiment, done)
    found = attack_published(loaded, done, data) if attacks else []
    together = _together(done)
    if as_json:
        papers = [beside_the_paper(experiment, [one]) for one in done] if beside else []
        print(json.dumps(_answer(summaries, papers, found, together)))
        return
    for line in text_notes(summaries[-1].get("text")):
        notes.print(line)
    if (note := (summaries[-1].get("features") or {}).get("note")) is not None:
        notes.print(note)
    if (target := summaries[-1].get("target")) is not None:
        notes.print(Calibrated(**target).in_words())
    print_words(summaries[-1]["privacy_in_words"])
    out.print(results_table(summaries))
    for one in together:
        print_words(one.in_words())
    if beside is not None:
        show_paper(beside, attacked=attacks)
    if found:
        show_attacks(beside["published_attack"] if beside else {}, found)
    for summary in summaries:
        out.print(f"results in {summary['result']}", soft_wrap=True)


def _answer(
    summaries: Sequence[Mapping[str, Any]],
    papers: Sequence[Mapping[str, Any] | None],
    attacks: Sequence[Mapping[str, Any]],
    together: Sequence[Composition],
) -> dict[str, Any]:
    """The JSON object of a run, or of several and of what they prove together."""
    shown = [
        {"result": s["result"]} | {key: s[key] for key in SUMMARY_KEYS + MORE_KEYS if key in s}
        for s in summaries
    ]
    for number, one in enumerate(shown):
        one |= {"paper": papers[number]} if papers else {}
        one |= {"attacks": attacks[number]} if attacks else {}
    if len(shown) == 1:
        return shown[0]
    return {"runs": shown} | ({"together": [one.to_json() for one in together]} if together else {})


def _together(done: Sequence[Result]) -> list[Composition]:
    """What several seeds on the same data prove together; nothing for one."""
    if len(done) < 2:
        return []
    from fedveil.experiment.compare import compositions  # slow to import

    return compositions([result.folder for result in done if result.folder is not None])


def _run_all(
    config: Config,
    experiment: str,
    results: Path,
    data: Path | None,
    seed: int | None,
    callbacks: RunCallbacks,
) -> list[Result]:
    done = []
    for number in config.run.seeds if seed is None else [seed]:
        try:
            with progress_bar(notes) as progress:
                result = run_seed(
                    config,
                    number,
                    experiment=experiment,
                    results=results,
                    data_dir=data,
                    callbacks_for=partial(
                        _callbacks,
                        progress,
                        callbacks,
                        result_folder(config, number, experiment, results),
                        config,
                    ),
                )
        except KeyboardInterrupt as stop:
            print(f"fedveil: {_after_interrupt(config)}", file=sys.stderr)
            raise typer.Exit(130) from stop
        if result.summary["stopped"]:
            notes.print(f"stopped after round {result.summary['rounds']}: {result.summary['stopped']}")
        if empty := sum(line.get("cohort") == 0 for line in result.history):
            notes.print(
                f"in {empty} of {len(result.history)} rounds nobody participated: a method with noise on its "
                "aggregate released noise alone, and the round is charged like any other",
            )
        done.append(result)
    return done


def _after_interrupt(config: Config) -> str:
    """The state of an interrupted run, and how to continue."""
    if config.run.engine != "flower":
        return "interrupted; the same command resumes from here."
    server = shlex.quote(str(config.run.federation))
    return (
        "interrupted; the run continues on the server. Follow it with the same command, show it with "
        f"`fedveil deploy status {server}`, cancel it with `fedveil deploy cancel {server}`."
    )


def _callbacks(
    progress: Progress, others: RunCallbacks, folder: Path, config: Config, plan: Plan
) -> list[Callback]:
    """The callbacks of one run: its progress bar, and those requested by options."""
    title = f"run {folder.name.replace('-', ' ')}"
    return [ShowProgress(progress, title, plan.rounds), *others.of_run(folder, config, plan)]
