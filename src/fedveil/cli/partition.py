"""`fedveil partition`: which client gets how many examples of which class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.app import AsJson, Changes, ConfigFile, DataDir, app, check_seed, out
from fedveil.experiment.config import load_config
from fedveil.experiment.prepare import client_names, load_examples, split_clients

PartitionSeed = Annotated[
    int | None,
    typer.Option(
        help="The seed of the partition. Default: the first of the configuration.", callback=check_seed
    ),
]


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
