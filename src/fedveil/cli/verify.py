"""`fedveil verify`: check a result against its statement."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedveil.cli.app import AsJson, app, out
from fedveil.errors import ResultError


@app.command("verify", epilog="Example: fedveil verify results/demo. Exit code 1: something does not agree.")
def verify_command(
    results: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Result folders, at any depth.")],
    ledger: Annotated[
        Path | None, typer.Option(help="The shared ledger. Default: where the configuration says.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every epsilon from the ledger; check the hashes of statement, model and records."""
    from fedveil.report.reading import run_folders
    from fedveil.session.statement_file import verify

    folders = [folder for place in results for folder in run_folders(place)]
    if not folders:
        raise ResultError(
            f"no run in {', '.join(map(str, results))}. Give result folders, such as results/demo.",
            field="results",
        )
    found = {folder: verify(folder, ledger) for folder in folders}
    if as_json:
        runs = [
            {"result": str(folder), "checks": [asdict(check) for check in checks]}
            for folder, checks in found.items()
        ]
        print(
            json.dumps({"runs": runs, "verified": all(c.passed for checks in found.values() for c in checks)})
        )
    else:
        for folder, checks in found.items():
            out.print(Text(str(folder)), soft_wrap=True)
            for check in checks:
                mark = "ok    " if check.passed else "FAILED"
                out.print(Text(f"  {mark}  {check.name}: {check.found}"), soft_wrap=True)
    if not all(check.passed for checks in found.values() for check in checks):
        raise typer.Exit(1)
