"""`fedveil advise`: noise and methods for a plan, without reading data."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table

from fedveil.cli.app import AsJson, Changes, ConfigFile, app, out
from fedveil.cli.privacy import declared_plan
from fedveil.experiment.advice import advice
from fedveil.experiment.config import load_config
from fedveil.privacy.statement import show


@app.command(
    "advise", epilog="Example: fedveil advise experiments/best/record-mnist.toml --records-per-client 12000"
)
def advise_command(
    config: ConfigFile,
    changes: Changes = None,
    records_per_client: Annotated[
        int | None,
        typer.Option(min=1, help="Records of each client, as declared. Default: `method.records`, if given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this plan makes possible: noise for epsilon 1, 3 and 8, signal to noise, and what suits.

    Reads no data.
    """
    loaded = load_config(config, changes or [])
    records = records_per_client or loaded.method.get("records")
    answer = advice(loaded, declared_plan(loaded, records or 1), records)
    if as_json:
        print(json.dumps(answer))
        return
    size = "unknown" if answer["parameters"] is None else answer["parameters"]
    out.print(
        f"{answer['clients']} clients, {answer['cohort']} in a round ({answer['sampler']}), {answer['rounds']} rounds, "
        f"{size} parameters, delta {answer['delta']:g}"
    )
    out.print(_noise_table(answer["noise"]))
    out.print(
        "Signal to noise of a round: the largest sum of clipped contributions, over the norm of its noise."
    )
    if records is None and any(row["unit"] == "record" for row in answer["noise"]):
        out.print("No signal to noise without the clients' sizes: give --records-per-client.")
    for found in answer["suggested"]:
        start = ", ".join(f"{key} = {_value(value)}" for key, value in found["start"].items())
        out.print(f"{found['method']}, {found['aggregation']}")
        out.print(Padding(f"{found['why']}\nstart with: {start}", (0, 0, 0, 2)))


def _value(value: Any) -> str:
    return json.dumps(value)


def _noise_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Noise of this method", title_justify="left")
    reasons = any(row["why"] for row in rows)
    for name in ("against", "unit", "ε", "noise multiplier", "signal to noise", *["why not"] * reasons):
        table.add_column(name)
    for row in rows:
        noise, ratio = row["noise_multiplier"], row["signal_to_noise"]
        table.add_row(
            row["adversary"],
            row["unit"],
            f"{row['epsilon']:g}",
            "none" if noise is None else f"{noise:g}",
            "-" if ratio is None else show(ratio),
            *[row["why"] or ""] * reasons,
        )
    return table
