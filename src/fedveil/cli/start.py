"""`fedveil demo` and `fedveil new`: the first minutes, without the repository."""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedveil.cli.app import AsJson, Results, app, notes, out
from fedveil.errors import InputError


@app.command(epilog="Example: fedveil demo --out demo.html")
def demo(
    report: Annotated[Path, typer.Option("--out", "-o", help="Where the report goes.")] = Path("demo.html"),
    results: Results = Path("results"),
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of every run. Default: 20 or 60, as the run needs.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the attack on each run.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Train a private model on built-in digits, compare it with other methods, attack them, and write a report.

    The first model is accurate and protected against the server. Takes a minute or two on a laptop and downloads
    nothing.
    """
    from fedveil.cli.report import attack_all, raise_failed, run_all_cells, show_together
    from fedveil.experiment.compare import plan_cells

    changes = [] if rounds is None else [f"run.rounds={rounds}"]
    with as_file(files("fedveil") / "templates" / "demo") as folder:
        lead = plan_cells([folder / "demo-recommended.toml"], changes=changes)
        others = plan_cells(
            [folder / "demo.toml"], methods=_METHODS, changes=changes, also=[folder / "demo-secure.toml"]
        )
    done, failed = run_all_cells([*lead, *others], results)
    attacked = {cell.folder(results) for cell in others}
    attack_all([one for one in done if one in attacked], "inverting-gradients", {"steps": steps})
    if done:
        show_together(done, report, as_json=as_json)
    raise_failed(failed, len(lead) + len(others))
    notes.print("Next: fedveil new my-study --template table", soft_wrap=True)


_METHODS = ("fedavg", "udp-fedavg", "fedceo")

Template = Literal["table", "images", "text", "federation"]


@app.command(epilog="Example: fedveil new my-study --template table && fedveil run my-study/experiment.toml")
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    template: Annotated[
        Template, typer.Option(help="table, images, text or federation (a table on several machines).")
    ] = "table",
    as_json: AsJson = False,
) -> None:
    """Write a commented experiment with a small example of its data into a new folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("DIR", str(folder), "exists already", "Give a new folder.")
    source = files("fedveil") / "templates" / template
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name):
        (folder / entry.name).write_bytes(entry.read_bytes())
        written.append(entry.name)
    if as_json:
        print(json.dumps({"folder": str(folder), "files": written}))
        return
    out.print(f"{', '.join(written)} in {folder}; read {folder / 'README.md'}", soft_wrap=True)
    if template != "federation":
        out.print(f"Start with: fedveil run {folder / 'experiment.toml'}", soft_wrap=True)
