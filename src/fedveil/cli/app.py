"""The command line's app and what its commands share: every command checks its input first, prints results to stdout
and everything else to stderr."""

from __future__ import annotations

import logging
import os
import stat
import sys
import textwrap
from pathlib import Path
from typing import Annotated, TextIO

import typer

from fedveil.cli.lazy import LazyCommands
from fedveil.cli.terminal import TerminalConsole, write_plainly
from fedveil.errors import LARGEST_SEED, FedveilError, InputError
from fedveil.plugins import load_plugins

app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done; 1 `audit` or `verify` found a fault; 2 input to fix or a failed run; 130 interrupted.",
)
# Markup and highlighting are off: printed text is data.
notes = TerminalConsole(stderr=True, markup=False, highlight=False)
out = TerminalConsole(markup=False, highlight=False)

ConfigFile = Annotated[Path, typer.Argument(help="A TOML file, such as experiments/fedceo/digits.toml.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key: --set run.rounds=5. May be repeated.")
]


def check_folder(given: Path | None) -> Path | None:
    """Refuse a folder of data sets that is not there; files elsewhere must not stand in for it unnoticed."""
    if given is not None and not given.is_dir():
        raise InputError("--data", str(given), "no such folder", "Give the folder that holds the data sets.")
    return given


DataDir = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of data sets. Default: $FEDVEIL_DATA.", callback=check_folder),
]
Results = Annotated[Path, typer.Option(help="Where result folders go.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")]


def check_seed(given: int | list[int] | None) -> int | list[int] | None:
    """Refuse seeds out of range; checked here, since typer would show a range of 19 digits in the help."""
    for seed in given if isinstance(given, list) else [given]:
        if seed is not None and not 0 <= seed <= LARGEST_SEED:
            raise InputError("--seed", seed, "is out of range", f"Use 0 to {LARGEST_SEED}.")
    return given


Seed = Annotated[
    int | None,
    typer.Option(help="Run this seed only. Default: all of the configuration.", callback=check_seed),
]
SUMMARY_KEYS = ("accuracy", "loss", "rounds", "seconds", "bytes_up", "bytes_down", "privacy")


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


def print_words(text: str) -> None:
    """Print a privacy statement with indented continuation lines; to stderr if stdout is a file."""
    console = out if _is_file(sys.stdout) else notes
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        wrapped = textwrap.fill(
            line, notes.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        console.print(wrapped, soft_wrap=True)


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # no file descriptor at all
        return False


class _Notes(logging.Handler):
    """Prints what the library logs to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        notes.print(record.getMessage(), soft_wrap=True)


def _print_log() -> None:
    log = logging.getLogger("fedveil")
    log.setLevel(logging.INFO)
    log.addHandler(_Notes())


def main() -> None:
    """The entry point: errors that a user can fix are printed without traceback, with exit code 2."""
    write_plainly()
    _print_log()
    try:
        app()
    except FedveilError as error:
        print(f"fedveil: {error}", file=sys.stderr)
        sys.exit(2)
