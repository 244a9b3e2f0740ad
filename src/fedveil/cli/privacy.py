"""`fedveil account` and `fedveil audit`: the guarantees of a run, and an attempt to refute them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedveil.atomic_files import write_atomically
from fedveil.cli.app import AsJson, Changes, ConfigFile, DataDir, app, check_seed, notes, out, print_words
from fedveil.errors import InputError, ResultError
from fedveil.experiment.config import Config, load_config, load_experiment
from fedveil.experiment.target import calibrated, check_noise_counts, method_of, noise_source, with_noise
from fedveil.models.registry import model_entry
from fedveil.privacy.accounting import account, account_participation, epsilon_by_round
from fedveil.privacy.releases import ADVERSARIES, Adversary, Plan, Release
from fedveil.privacy.statement import show
from fedveil.session.privacy_guard import declared, privacy_statement
from fedveil.session.tables import guarantees_table


def _plan(config: Config, records: int | None, data: Path | None) -> Plan:
    """The plan of this configuration; with `records` no data is read."""
    seed = config.run.seeds[0]
    if records is None:
        from fedveil.experiment.prepare import check_method, prepare  # slow to import

        prepared = prepare(config, seed, data)
        check_method(prepared, seed)
        return prepared.plan
    plan = declared_plan(config, records)
    shape, classes = config.task.input_shape, config.task.classes
    if shape is not None and classes is not None and model_entry(config.task.model).reads == "numbers":
        from fedveil.experiment.prepare import model_shape, task_for
        from fedveil.session.checks import first_server

        # a federation's model does not depend on a data set
        task = task_for(config, model_shape(config, shape), classes)
        first_server(task, method_of(config, plan)[0], plan, seed)
    return plan


def declared_plan(config: Config, records: int) -> Plan:
    """The plan of a configuration whose clients all declare so many records; no data is read."""
    groups = config.partition.groups
    clients = config.partition.clients or (len(groups) if groups else None)
    if clients is None:
        raise InputError(
            "partition.clients",
            None,
            "is needed where no data is read",
            "Set partition.clients.",
        )
    cohort = clients if config.run.sampler == "all" else config.run.cohort or clients
    return Plan(clients, cohort, config.run.sampler, config.run.rounds, records, records)


@app.command(
    "account", epilog="Example: fedveil account experiments/demo.toml --target-epsilon 8 --what-if 0.5,1,2"
)
def account_command(
    config: ConfigFile,
    changes: Changes = None,
    records_per_client: Annotated[
        int | None,
        typer.Option(min=1, help="Records of each client, as declared. Default: counted in the data."),
    ] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Also find the noise multiplier for this epsilon.")
    ] = None,
    adversary: Annotated[
        Adversary | None, typer.Option(help="The adversary of --target-epsilon. Default: each of them.")
    ] = None,
    what_if: Annotated[
        str | None, typer.Option(help="Also show epsilon for these noise multipliers, separated by commas.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also write a figure of epsilon over rounds (PNG, PDF or SVG).")
    ] = None,
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run of this configuration would prove, without training."""
    loaded = load_experiment(config, changes or [])
    for line in loaded.unused():
        notes.print(line, soft_wrap=True)
    plan = _plan(loaded, records_per_client, data)
    method, target = method_of(loaded, plan)
    delta, ends = loaded.privacy.delta, loaded.run.ends
    deployed = loaded.run.engine == "flower"
    noise = noise_source(loaded, method, plan)
    statement = privacy_statement(method, plan, delta, noise=noise, deployed=deployed, ends=ends)
    releases = declared(method, plan, deployed=deployed)
    answer: dict[str, Any] = statement.to_json()
    if target is not None:
        answer["target"] = target.to_json()
        notes.print(target.in_words())
    if target_epsilon is not None or what_if is not None:
        check_noise_counts(loaded, plan)
    if target_epsilon is not None:
        wanted = ADVERSARIES if adversary is None else (adversary,)
        answer["target_epsilon"] = target_epsilon
        unit = loaded.privacy.budget_unit
        answer["calibrated"] = [
            calibrated(loaded, plan, target_epsilon, who, unit).to_json() for who in wanted
        ]
    if what_if is not None:
        answer["what_if"] = [_what_if(loaded, plan, text) for text in what_if.split(",")]
    if plot is not None:
        _save_curves(releases, plan, delta, ends, plot)
        notes.print(f"picture in {plot}", soft_wrap=True)
    if as_json:
        print(json.dumps(answer))
        return
    print_words(statement.in_words())
    _print_tables(answer, [row.to_json() for row in account_participation(releases, plan, delta)])


def _print_tables(answer: dict[str, Any], once: list[dict[str, Any]]) -> None:
    out.print(guarantees_table(answer["proven"]))
    out.print(guarantees_table(once, title="What one participation costs, where it is known"))
    for key, title in (
        ("calibrated", f"Noise for ε = {answer.get('target_epsilon')}"),
        ("what_if", "What if"),
    ):
        if key in answer:
            out.print(_rows(answer[key], title))


def _save_curves(releases: Sequence[Release], plan: Plan, delta: float, ends: int, path: Path) -> None:
    """Write the figure of epsilon over rounds."""
    from fedveil.figures.figure import save_figure
    from fedveil.report.figures import epsilon_figure

    save_figure(epsilon_figure(epsilon_by_round(releases, plan, delta / ends), delta), path)


def _what_if(config: Config, plan: Plan, text: str) -> dict[str, Any]:
    try:
        sigma = float(text)
    except ValueError as error:
        raise InputError("--what-if", text, "is not a number", "Write 0.5,1,2.") from error
    if not 0 <= sigma < float("inf"):
        raise InputError("--what-if", text, "is not a noise multiplier", "Use numbers from 0 on.")
    releases = declared(with_noise(config, sigma), plan, deployed=config.run.engine == "flower")
    rows = account(releases, plan, config.privacy.delta, ends=config.run.ends)
    return {"noise_multiplier": sigma} | {f"{row.adversary} ({row.unit})": row.epsilon for row in rows}


def _rows(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="left" if key in ("adversary", "unit") else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    return show(value) if isinstance(value, float) else str(value)


@app.command(
    "audit",
    epilog="Example: fedveil audit results/demo/0123456789ab/seed-0. Exit code 1: something is refuted.",
)
def audit_command(
    source: Annotated[Path, typer.Argument(help="A result folder (seed-N) or a configuration file.")],
    changes: Changes = None,
    samples: Annotated[int, typer.Option(min=200, help="Releases with and without the canary, each.")] = 4000,
    confidence: Annotated[float, typer.Option(help="The confidence of the lower bounds.")] = 0.95,
    seed: Annotated[
        int, typer.Option(help="The seed of the audit's own randomness.", callback=check_seed)
    ] = 0,
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Try to break the method's own code with canaries, and compare with what is proven."""
    from fedveil.audits.of_method import audit_method

    if not 0.5 < confidence < 1:
        raise InputError("--confidence", confidence, "is not a confidence", "Use a number such as 0.95.")
    folder = source if source.is_dir() else None
    if folder is not None and not (folder / "config.toml").exists():
        raise ResultError(
            f"{folder} contains no config.toml. Give a result folder (seed-N) or a TOML file.",
            field="config.toml",
        )
    loaded = load_config(source if folder is None else folder / "config.toml", changes or [])
    plan = _plan(loaded, None, data)
    method, _ = method_of(loaded, plan)
    deployed = loaded.run.engine == "flower"
    statement = privacy_statement(method, plan, loaded.privacy.delta, deployed=deployed, ends=loaded.run.ends)
    with notes.status("auditing"):
        found = audit_method(
            method, plan, delta=loaded.privacy.delta, seed=seed, samples=samples, confidence=confidence
        )
    rows = [audited.to_json() for audited in found]
    strongest = max(found, key=lambda a: a.finding.lower_bound, default=None)
    audit = None if strongest is None else strongest.to_json() | {"all": rows}
    answer = replace(statement, audit=audit).to_json()
    if folder is not None:
        (folder / "audits").mkdir(exist_ok=True)
        write_atomically(folder / "audits" / "audit.json", (json.dumps(answer, indent=2) + "\n").encode())
    if as_json:
        print(json.dumps(answer))
    else:
        for audited in found:
            title = f"against the {audited.adversary}, {audited.unit} level"
            out.print(f"{title}: {audited.finding.in_words(audited.proven)}")
            out.print(f"  proven for one participation: {_cell(audited.proven)}")
        if not found:
            out.print("nothing to audit: no release of this method is protected")
        elif not any(audited.broken for audited in found):
            out.print("nothing refuted")
    if any(audited.broken for audited in found):
        raise typer.Exit(1)
