"""`fedveil reproduce`: published tables, their rows run and judged beside the paper's numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as Grid

from fedveil.cli.app import AsJson, DataDir, Results, app, notes, out
from fedveil.engines.simulation import cores
from fedveil.errors import FedveilError, InputError, ResultError
from fedveil.experiment.compare import Cell
from fedveil.experiment.estimates import (
    LIMIT,
    LIMIT_BEFORE_RUNS,
    Estimate,
    Estimates,
    cost,
    duration,
    estimate,
    times_on_record,
    wall_time,
)
from fedveil.experiment.records import Records
from fedveil.experiment.reproduce import (
    Job,
    Outcome,
    choose,
    counted,
    number,
    only_missing,
    open_cells,
    report,
    run_job,
)
from fedveil.experiment.tables import PAPERS, PublishedTable, find_table, list_tables, tables_folder
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.progress import ShowProgress, progress_bar
from fedveil.session.loop import Callback

_Paper = Annotated[
    str | None, typer.Argument(help=f"{', '.join(PAPERS)}. Alone: its tables. None: all papers.")
]
_Table = Annotated[str | None, typer.Argument(help="A table of the paper, such as table-1-emnist.")]
_Rows = Annotated[
    list[str] | None, typer.Option("--rows", help="Rows with these words in their name. May be repeated.")
]
_Seeds = Annotated[
    int | None,
    typer.Option("--seeds", min=1, help="Run seeds 0 to N - 1. Default: as many as the table says."),
]
_Reduced = Annotated[
    bool, typer.Option("--reduced", help="Run the size that the table gives for small machines.")
]
_Missing = Annotated[bool, typer.Option("--missing", help="Run only what is not on record.")]
_Attacks = Annotated[
    bool, typer.Option(help="Whether to carry out and judge the attacks that are published.")
]
_Claims = Annotated[
    bool, typer.Option("--claims", help="Only account for the rows whose epsilon is claimed; nothing is run.")
]
_Only = Annotated[bool, typer.Option("--estimate", help="Only say how long it takes, from measured rounds.")]
_Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Runs at the same time. Default: one per core.")
]
_Tables = Annotated[
    Path | None, typer.Option("--tables", help="The folder of tables. Default: `experiments`.")
]
_RecordsTo = Annotated[
    Path | None, typer.Option("--records", help="Where records go. Default: TABLES/records.")
]
_Pages = Annotated[
    Path | None,
    typer.Option("--pages", help="Only write the reproduction pages of this docs folder from the records."),
]


@app.command(
    epilog='Examples: fedveil reproduce fedceo; fedveil reproduce fedceo table-1-emnist --rows "sigma 2.0" --seeds 1'
)
def reproduce(
    paper: _Paper = None,
    table: _Table = None,
    rows: _Rows = None,
    seeds: _Seeds = None,
    reduced: _Reduced = False,
    missing: _Missing = False,
    attacks: _Attacks = True,
    claims: _Claims = False,
    estimate_only: _Only = False,
    jobs: _Jobs = None,
    results: Results = Path("results"),
    data: DataDir = None,
    tables: _Tables = None,
    records: _RecordsTo = None,
    pages: _Pages = None,
    as_json: AsJson = False,
) -> None:
    """Run the rows of a published table and judge them beside the paper's numbers; finished runs are not run again."""
    folder = tables_folder(tables)
    kept = records or folder / "records"
    _only_one({"--pages": pages is not None, "--claims": claims, "--estimate": estimate_only})
    runs = {"--rows": rows, "--seeds": seeds, "--reduced": reduced, "--missing": missing, "--jobs": jobs}
    if pages is not None:
        _refuse_with("--pages", "writes the pages of all papers", {"PAPER": paper, **runs})
        _write_pages(folder, kept, pages)
        return
    if paper is None or table is None:
        of_table = runs | {"--claims": claims, "--estimate": estimate_only}
        _refuse_with("TABLE", "is missing, so only tables are listed", of_table)
        _list(folder, kept, [paper] if paper else PAPERS, as_json=as_json)
        return
    if claims:
        others = {option: value for option, value in runs.items() if option != "--rows"}
        _refuse_with("--claims", "accounts for the full scale and runs nothing", others)
    job = choose(find_table(folder, paper, table), rows or (), seeds, reduced=reduced)
    if missing:
        job = only_missing(job, kept, attacks=attacks)
    if claims:
        _account(job, kept, data, as_json=as_json)
        return
    lengths = _estimate(job, results, kept, data, jobs, needed=estimate_only)
    if estimate_only:
        if not job.reduced:
            _keep_estimates(job, lengths, kept)
        _show_estimate(job, lengths, jobs, as_json=as_json)
        return
    done = _run(job, results, kept, data, jobs, attacks=attacks)
    if as_json:
        print(json.dumps(report(job, done)))
    else:
        _show(job, done)
    if done.failed:
        raise ResultError(f"{len(done.failed)} of {len(job.cells())} runs failed. {_by_reason(done.failed)}")


def _only_one(given: Mapping[str, bool]) -> None:
    chosen = [option for option, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise InputError(
            chosen[1], True, f"does nothing beside {chosen[0]}", f"Leave out one of {', '.join(chosen)}."
        )


def _refuse_with(what: str, why: str, options: Mapping[str, object]) -> None:
    """Refuse options that would silently do nothing."""
    for option, value in options.items():
        if value:
            remedy = "Name a table." if what == "TABLE" else f"Leave out {option}, or {what}."
            raise InputError(option, value, f"does nothing: {what} {why}", remedy)


def _account(job: Job, records: Path, data: Path | None, *, as_json: bool) -> None:
    from fedveil.experiment.claims import account_claims

    if not any(row.claim for row in job.rows):
        notes.print("no epsilon is claimed for these rows")
    found, failed = account_claims(job.table, job.rows, records, data)
    kept = Records(job.table, records)
    rows: list[dict[str, Any]] = [
        {
            "row": row.name,
            "claimed": row.claim.model_dump(),
            "proven": dict(kept.epsilons(row)[0]),
            "verdict": found[row.name],
        }
        for row in job.rows
        if row.claim is not None and row.name in found
    ]
    if as_json:
        print(json.dumps({"table": job.table.name, "claims": rows}))
    else:
        for one in rows:
            claimed = f"{one['claimed']['unit']} {one['claimed']['epsilon']:g}"
            out.print(f"{one['row']}: claimed {claimed}, {one['verdict']}", soft_wrap=True)
    if failed:
        raise ResultError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))


def _estimate(
    job: Job, results: Path, records: Path, data: Path | None, jobs: int | None, *, needed: bool
) -> dict[str, Estimate]:
    """Say how long the unfinished runs take: if not `needed`, by the times on record where every row has one.

    Where no round can be measured, the runs themselves say why.
    """
    cells = open_cells(job, results)
    if not cells:
        known = len(job.on_record)
        finished = f"finished: {counted(len(job.cells()), 'run')}"
        notes.print(f"{finished}; on record: {known} more" if known else finished)
        return {}
    lengths = {} if needed else _on_record(job, cells, records)
    source = "the times on record" if lengths else "a measured round"
    if not lengths:
        try:
            with notes.status("measuring a round of each kind of row"):
                lengths = estimate(cells, data, limit=LIMIT if needed else LIMIT_BEFORE_RUNS)
        except FedveilError:
            if needed:
                raise
            return {}
    bound = any(one.lower_bound for one in lengths.values())
    time = duration(wall_time(list(lengths.values()), jobs))
    notes.print(
        f"{counted(len(cells), 'run')} of {counted(len(job.rows), 'row')}: {'more than' if bound else 'about'} {time} "
        f"on {counted(min(jobs or cores(), len(cells)), 'core')} (from {source})"
    )
    return lengths


def _on_record(job: Job, cells: Sequence[Cell], records: Path) -> dict[str, Estimate]:
    """How long these runs take by their titles, if the records know it of every one."""
    known = {} if job.reduced else times_on_record(job.table, job.rows, records)
    rows = {cell.title: name for (name, _), cell in job.cells().items()}
    if not all(rows[cell.title] in known for cell in cells):
        return {}
    return {cell.title: known[rows[cell.title]] for cell in cells}


def _run(
    job: Job, results: Path, records: Path, data: Path | None, jobs: int | None, *, attacks: bool
) -> Outcome:
    from fedveil.attack_runs.published import attack_as_published

    cells = job.cells().values()
    total = sum(cell.config.run.rounds for cell in cells)
    with progress_bar(notes) as progress:
        together: list[Any] = []

        def callbacks_for(title: str, plan: Plan) -> list[Callback]:
            return [ShowProgress(progress, title, plan.rounds)]

        def on_progress(rounds: int, runs: int) -> None:
            if not together:
                together.append(progress.add_task("all rounds", total=total, status=""))
            progress.update(together[0], completed=rounds, status=f"{runs} of {len(cells)} runs done")

        try:
            return run_job(
                job,
                results,
                records,
                data_dir=data,
                jobs=jobs,
                callbacks_for=callbacks_for,
                on_progress=on_progress,
                attack=attack_as_published if attacks else None,
            )
        except KeyboardInterrupt as stop:
            progress.stop()
            print("fedveil: interrupted; the same command resumes from here.", file=sys.stderr)
            raise typer.Exit(130) from stop


def _by_reason(failed: Mapping[str, str]) -> str:
    """Runs that failed for the same reason, such as missing data, with the reason once."""
    titles: dict[str, list[str]] = {}
    for title, reason in failed.items():
        titles.setdefault(reason, []).append(title)
    return "\n".join(f"{'; '.join(of)}: {reason}" for reason, of in titles.items())


def _show(job: Job, done: Outcome) -> None:
    found = report(job, done)
    head = job.table.content.table
    grid = Grid(title=f"{head.source}: {head.title}" + (" (reduced)" if job.reduced else ""))
    for column in ("row", "paper", "here", "verdict"):
        grid.add_column(column, justify="left" if column in ("row", "verdict") else "right")
    for row in found["rows"]:
        shown = number(row["mean"], row["metric"]) or "-"
        if row["interval"] is not None:
            shown += f" ± {number(row['interval'], row['metric'])}"
        grid.add_row(row["row"], number(row["published"], row["metric"]) or "-", shown, row["verdict"] or "")
    out.print(grid)
    for reading, judged in found["readings"].items():
        _show_judged(f"{reading}: " if reading else "", judged)
    for score, attacked in found["attacks"].items():
        _show_attack(score, attacked)
    if head.note:
        out.print(head.note)
    if job.reduced and job.table.content.reduced is not None:
        scale = job.table.content.reduced.scale
        out.print(f"Reduced: {scale}. Such runs do not say whether the paper's numbers are reproduced.")


def _show_judged(reading: str, judged: dict[str, Any]) -> None:
    order = judged["order"]
    if order["tau"] is not None:
        interval = "" if order["interval"] is None else " ({:.2f} to {:.2f})".format(*order["interval"])
        said = "reproduced" if order["published_order_reproduced"] else "not reproduced"
        tau = f"Kendall's tau {order['tau']:.2f}{interval} over {counted(order['pairs'], 'pair')}"
        out.print(f"{reading}order: {said}, {tau}")
    if judged["rows_run"]:
        said = "reproduced" if judged["level_reproduced"] else "not reproduced"
        rows = counted(judged["rows_run"], "row")
        out.print(f"{reading}level: {said}, {judged['rows_at_level']} of {rows}")


def _show_attack(score: str, attacked: dict[str, Any]) -> None:
    if all(row["mean"] is None for row in attacked["rows"]):
        return
    grid = Grid(title=f"attacks: {score}")
    for column in ("row", "paper", "here", "verdict"):
        grid.add_column(column, justify="left" if column in ("row", "verdict") else "right")
    for row in attacked["rows"]:
        grid.add_row(
            row["row"], number(row["published"], score), number(row["mean"], score) or "-", row["verdict"]
        )
    out.print(grid)


def _show_estimate(job: Job, lengths: dict[str, Estimate], jobs: int | None, *, as_json: bool) -> None:
    found = {
        title: {"seconds": round(one.seconds, 1), "at_least": one.lower_bound}
        for title, one in lengths.items()
    }
    if as_json:
        wall = round(wall_time(list(lengths.values()), jobs), 1)
        print(json.dumps({"table": job.table.name, "wall_seconds": wall, "runs": found}))
        return
    grid = Grid()
    grid.add_column("run")
    grid.add_column("time on one core", justify="right")
    for title, one in lengths.items():
        grid.add_row(title, ("> " if one.lower_bound else "") + duration(one.seconds))
    out.print(grid)


def _list(folder: Path, records: Path, papers: Sequence[str], *, as_json: bool) -> None:
    """Tables with their rows, how many are on record, and how long they take by the records and estimates."""
    found = {paper: [_listed(table, records) for table in list_tables(folder, paper)] for paper in papers}
    if as_json:
        print(
            json.dumps(
                {"tables": [{"paper": paper} | one for paper, listed in found.items() for one in listed]}
            )
        )
        return
    for paper, listed in found.items():
        grid = Grid(title=f"fedveil reproduce {paper} TABLE")
        grid.add_column("TABLE", no_wrap=True)
        grid.add_column("what")
        grid.add_column("rows", justify="right")
        grid.add_column("run", justify="right")
        grid.add_column("not run would take", justify="right")
        for one in listed:
            grid.add_row(one["table"], one["title"], str(one["rows"]), str(one["on_record"]), one["open"])
        out.print(grid)
    out.print("Times: one seed on one core. More exactly on this machine: --estimate.")


def _listed(table: PublishedTable, records: Path) -> dict[str, Any]:
    kept = Records(table, records)
    rest = [row for row in table.rows if not kept.measured(row).values]
    whole, left = cost(table, table.rows, records), cost(table, rest, records, like=table.rows)
    return {
        "table": table.name,
        "title": table.content.table.title,
        "rows": len(table.rows),
        "on_record": len(table.rows) - len(rest),
        "seconds_per_seed": round(whole.seconds, 1) if whole.known else None,
        "seconds_not_run": round(left.seconds, 1) if left.known or not rest else None,
        "at_least": left.lower_bound,
        "open": left.in_words(),
    }


def _keep_estimates(job: Job, lengths: dict[str, Estimate], records: Path) -> None:
    kept = Estimates(job.table, records)
    titles = {cell.title: name for (name, _), cell in job.cells().items()}
    rows = {row.name: row for row in job.rows}
    for title, found in lengths.items():
        kept.add(rows[titles[title]], found)
    kept.write()


def _write_pages(folder: Path, records: Path, pages: Path) -> None:
    from fedveil.report.reproduction import write_pages

    if not pages.is_dir():
        raise InputError("--pages", str(pages), "is no folder", "Give the docs folder of a clone.")
    for path in write_pages(folder, records, pages):
        out.print(f"written {path}", soft_wrap=True)
