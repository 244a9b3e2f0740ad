"""`fedveil compare` and `fedveil report`: several runs in one table or on one page."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.attack_runs.inversion import attack_smallest
from fedveil.attacks.membership.all import list_membership_attacks
from fedveil.attacks.registry import make_attack
from fedveil.cli.app import (
    SUMMARY_KEYS,
    AsJson,
    Changes,
    DataDir,
    Results,
    app,
    check_seed,
    notes,
    out,
    print_words,
)
from fedveil.cli.attack import ShowSteps
from fedveil.cli.membership import parse_settings
from fedveil.errors import InputError, ResultError, within
from fedveil.experiment.compare import Cell, compositions, plan_cells, run_cells, total_rounds
from fedveil.experiment.prepare import check_attacks
from fedveil.experiment.selection import SelectionSettings, plan_selection, run_selection
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.progress import ShowProgress, progress_bar
from fedveil.session.loop import Callback
from fedveil.session.results import ResultFolder

if TYPE_CHECKING:
    from fedveil.report.run import Run

Methods = Annotated[str | None, typer.Option(help="Methods, separated by commas. Default: each file's own.")]
Axes = Annotated[
    list[str] | None,
    typer.Option("--grid", help="Try every value: --grid method.clip=0.5,1.0. May be repeated."),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option("--seed", help="Run this seed only. May be repeated.", callback=check_seed),
]
Jobs = Annotated[int | None, typer.Option(help="Runs at the same time. Default: one per core.", min=1)]
AttackName = Annotated[
    str | None, typer.Option(help="Also try this inversion attack on each run; needs run.transcript.")
]
AttackChanges = Annotated[
    list[str] | None,
    typer.Option("--attack-set", help="A setting of the attack: --attack-set steps=400. May be repeated."),
]
PrivateSelection = Annotated[
    bool, typer.Option("--private-selection", help="Run a random number of trials; show only the best.")
]
PdfFolder = Annotated[
    Path | None, typer.Option(help="Also write its figures to this folder, as PDF for papers.")
]
SelectionChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--selection-set", help="A setting of the selection: --selection-set score=public. May be repeated."
    ),
]


@app.command(
    epilog="Example: fedveil compare experiments/demo.toml --methods fedavg,udp-fedavg --seed 0 --seed 1 "
    "--report report.html"
)
def compare(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="TOML files.")],
    methods: Methods = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(help="Another TOML file to compare with, run with its own method. May be repeated."),
    ] = None,
    changes: Changes = None,
    grid: Axes = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    results: Results = Path("results"),
    data: DataDir = None,
    attack: AttackName = None,
    attack_changes: AttackChanges = None,
    private_selection: PrivateSelection = False,
    selection_changes: SelectionChanges = None,
    report: Annotated[Path | None, typer.Option(help="Also write a report to this HTML file.")] = None,
    pdf: PdfFolder = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX (booktabs).")] = False,
    as_json: AsJson = False,
) -> None:
    """Run several methods or settings on the same task; finished runs are not run again.

    Fields that methods share keep the configuration's values.

    A --set or --grid of a method's field applies to those methods that have it.
    """
    formats = [("--markdown", markdown), ("--latex", latex), ("--json", as_json)]
    asked = [name for name, wanted in formats if wanted]
    if len(asked) > 1:
        raise InputError("format", " ".join(asked), "one format at a time", f"Leave out all but {asked[0]}.")
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    if methods is not None and not names:
        raise InputError("--methods", methods, "contains no name", "Give names separated by commas.")
    cells = plan_cells(
        configs, methods=names, changes=changes or (), grid=grid or (), seeds=seeds or (), also=also or ()
    )
    for cell in cells:
        check_attacks(cell.config)
    settings = parse_settings(attack_changes or [])
    if private_selection or selection_changes:
        shown = _select(cells, parse_settings(selection_changes or []), results, data, attack)
        show_together(shown, report, markdown=markdown, latex=latex, as_json=as_json)
        _save_figures(shown, pdf)
        return
    if attack is not None:
        _require_attackable(cells, attack, settings)
    done, failed = run_all_cells(cells, results, data, jobs)
    if attack is not None:
        attack_all(done, attack, settings, data)
    if done:
        show_together(done, report, markdown=markdown, latex=latex, as_json=as_json)
        _save_figures(done, pdf)
    raise_failed(failed, len(cells))


def run_all_cells(
    cells: Sequence[Cell], results: Path, data: Path | None = None, jobs: int | None = None
) -> tuple[list[Path], dict[str, str]]:
    """Run the cells with a progress bar; returns the finished folders, and the reasons of failures by title."""
    failed = _run(cells, results, data, jobs)
    kept = [cell.folder(results) for cell in cells if cell.title not in failed]
    return [folder for folder in kept if ResultFolder(folder).finished], failed


def raise_failed(failed: Mapping[str, str], count: int) -> None:
    """Raise one error that names every failed run."""
    if failed:
        reasons = "; ".join(f"{title}: {reason}" for title, reason in failed.items())
        raise ResultError(
            f"{len(failed)} of {count} runs failed: {reasons}", field="runs", value=dict(failed)
        )


def _select(
    cells: Sequence[Cell], given: Mapping[str, Any], results: Path, data: Path | None, attack: str | None
) -> list[Path]:
    """The folder of the best trial of a private selection."""
    if attack is not None:
        raise InputError("--attack", attack, "would disclose more than the selected run", "Leave it out.")
    with within("--selection-set"):
        settings = SelectionSettings.of(given)
    selection = plan_selection(cells, settings, data)
    with notes.status("running trials; their number is secret"):
        winner = run_selection(selection, results)
    if winner is None:
        raise ResultError(
            "The selection has no result: no trial was drawn, or none has a finite model. It stays charged.",
            field="trials",
        )
    return [winner]


def _run(cells: Sequence[Cell], results: Path, data: Path | None, jobs: int | None) -> dict[str, str]:
    with progress_bar(notes) as progress:
        together: list[Any] = []

        def callbacks_for(title: str, plan: Plan) -> list[Callback]:
            return [ShowProgress(progress, title, plan.rounds)]

        def on_progress(rounds: int, runs: int) -> None:
            if not together:
                together.append(progress.add_task("all rounds", total=total_rounds(cells), status=""))
            progress.update(together[0], completed=rounds, status=f"{runs} of {len(cells)} runs done")

        try:
            return run_cells(
                cells, results, data_dir=data, jobs=jobs, callbacks_for=callbacks_for, on_progress=on_progress
            )
        except KeyboardInterrupt as stop:
            progress.stop()
            print("fedveil: interrupted; the same command resumes from here.", file=sys.stderr)
            raise typer.Exit(130) from stop


def _require_attackable(cells: Sequence[Cell], attack: str, settings: Mapping[str, Any]) -> None:
    if attack in {kind.name for kind in list_membership_attacks()}:
        raise InputError(
            "--attack",
            attack,
            "is a membership attack, and this is for inversions",
            f"Compare without it, then run `fedveil attack RESULT --attack {attack}` on each result.",
        )
    make_attack(attack, settings)
    if any(not cell.config.run.transcript for cell in cells):
        raise InputError(
            "run.transcript", False, "an attack needs the transcript", "Add --set 'run.transcript=[1]'."
        )


def attack_all(
    folders: Sequence[Path], attack: str, settings: Mapping[str, Any], data: Path | None = None
) -> None:
    """Carry out an inversion attack on each result."""
    with progress_bar(notes) as progress:
        for folder in folders:
            summary = ResultFolder(folder).read().summary
            steps = ShowSteps(progress, f"{attack} on {summary['method']} seed {summary['seed']}")
            attack_smallest(folder, attack, settings, data_dir=data, callback=steps)


def show_together(
    folders: Sequence[Path],
    report: Path | None,
    *,
    markdown: bool = False,
    latex: bool = False,
    as_json: bool = False,
) -> None:
    """Print one table of these results, or JSON, and write the report."""
    from fedveil.report.groups import group
    from fedveil.report.html import write_report
    from fedveil.report.reading import read_runs
    from fedveil.report.tables import comparison_table, latex_table, markdown_table

    settings = group(read_runs(folders))
    together = compositions(folders)
    words = [one.in_words() for one in together]
    written = None if report is None else write_report(folders, report, words)
    if as_json:
        runs = []
        for folder in folders:
            summary = ResultFolder(folder).read().summary
            runs.append(
                {"result": str(folder)} | {key: summary[key] for key in ("method", "seed", *SUMMARY_KEYS)}
            )
        answer = {"runs": runs, "together": [one.to_json() for one in together]}
        print(json.dumps(answer | ({} if written is None else {"report": str(written)})))
        return
    if markdown or latex:
        print(markdown_table(settings) if markdown else latex_table(settings), end="")
    else:
        out.print(comparison_table(settings))
        for place in dict.fromkeys(folder.parents[1] for folder in folders):
            out.print(f"results in {place}", soft_wrap=True)
    for text in words:
        print_words(text)
    if written is not None:
        to = notes if markdown or latex else out
        to.print(f"report in {written}", soft_wrap=True)


def _save_figures(folders: Sequence[Path], pdf: Path | None, runs: Sequence[Run] | None = None) -> list[Path]:
    """Write the figures of these runs as PDF, if requested, and print their paths."""
    if pdf is None:
        return []
    from fedveil.report.figures import save_figures
    from fedveil.report.groups import group
    from fedveil.report.reading import read_runs

    written = save_figures(group(read_runs(folders) if runs is None else runs), pdf)
    for path in written:
        notes.print(f"figure in {path}", soft_wrap=True)
    return written


@app.command("report", epilog="Example: fedveil report results/demo -o report.html --pdf figures")
def report_command(
    results: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Result folders, at any depth.")],
    output: Annotated[Path, typer.Option("--out", "-o", "--output", help="Where the report goes.")] = Path(
        "report.html"
    ),
    pdf: PdfFolder = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Leave out values without noise: attacks, clients' scores and counts."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page about these runs.

    Damaged runs are shown as far as they can be read and listed on stderr; the exit code is then 2.
    """
    from fedveil.report.html import empty_folders, write_page
    from fedveil.report.reading import read_runs

    runs = read_runs(results)
    path = write_page(runs, output, missing=empty_folders(results), public=public)
    figures = _save_figures(results, pdf, runs)
    damaged = {str(run.folder): list(run.problems) for run in runs if run.problems}
    if as_json:
        print(
            json.dumps(
                {"report": str(path), "figures": [str(figure) for figure in figures], "damaged": damaged}
            )
        )
    else:
        out.print(f"report in {path}", soft_wrap=True)
    if damaged:
        listed = "; ".join(f"{folder}: {', '.join(problems)}" for folder, problems in damaged.items())
        raise ResultError(
            f"{len(damaged)} of {len(runs)} runs are damaged and shown as far as they can be read. {listed}. "
            "Restore these files from a copy, or remove the folders and run them again.",
            field="results",
            value=damaged,
        )
