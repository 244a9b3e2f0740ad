"""`fedveil run`: an experiment's seeds, one after the other."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
from fedveil.experiment.config import Config, load_experiment
from fedveil.experiment.prepare import check_attacks, result_folder
from fedveil.experiment.run import run_seed
from fedveil.experiment.target import Calibrated
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.progress import ShowProgress, progress_bar
from fedveil.session.loop import Callback
from fedveil.session.tables import results_table, text_notes

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
    as_json: AsJson = False,
) -> None:
    """Run an experiment: every seed of its configuration, or the one given."""
    loaded = load_experiment(config, changes or [])
    check_attacks(loaded)
    for line in loaded.unused():
        notes.print(line, soft_wrap=True)
    with RunCallbacks(live=live, tensorboard=tensorboard, mlflow=mlflow) as callbacks:
        if callbacks.url is not None:
            notes.print(f"live at {callbacks.url}", soft_wrap=True)
        summaries = _run_all(loaded, config.stem, results, data, seed, callbacks)
    if as_json:
        shown = [
            {"result": s["result"]} | {key: s[key] for key in SUMMARY_KEYS + MORE_KEYS if key in s}
            for s in summaries
        ]
        print(json.dumps(shown[0] if len(shown) == 1 else {"runs": shown}))
        return
    for line in text_notes(summaries[-1].get("text")):
        notes.print(line)
    if (note := (summaries[-1].get("features") or {}).get("note")) is not None:
        notes.print(note)
    if (target := summaries[-1].get("target")) is not None:
        notes.print(Calibrated(**target).in_words())
    print_words(summaries[-1]["privacy_in_words"])
    out.print(results_table(summaries))
    for summary in summaries:
        out.print(f"results in {summary['result']}", soft_wrap=True)


def _run_all(
    config: Config,
    experiment: str,
    results: Path,
    data: Path | None,
    seed: int | None,
    callbacks: RunCallbacks,
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
                    callbacks_for=partial(
                        _callbacks,
                        progress,
                        callbacks,
                        result_folder(config, number, experiment, results),
                        config,
                    ),
                )
        except KeyboardInterrupt as stop:
            print("fedveil: interrupted; the same command resumes from here.", file=sys.stderr)
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


def _callbacks(
    progress: Progress, others: RunCallbacks, folder: Path, config: Config, plan: Plan
) -> list[Callback]:
    """The callbacks of one run: its progress bar, and whatever else the command asked for."""
    title = f"run {folder.name.replace('-', ' ')}"
    return [ShowProgress(progress, title, plan.rounds), *others.of_run(folder, config, plan)]
