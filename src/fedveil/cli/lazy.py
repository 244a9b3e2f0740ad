"""Commands by name, each imported when it is used, so that `fedveil --help` and shell completion import no torch."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click
from typer.core import TyperGroup
from typer.main import get_command_from_info, get_group_from_info

_MODULES: dict[str, tuple[str, str]] = {
    "demo": (
        "start",
        "Train a private model on built-in digits, compare it with other methods, attack them, and write a report.",
    ),
    "new": ("start", "Write a commented experiment with a small example of its data into a new folder."),
    "run": ("run", "Run an experiment: every seed of its configuration, or the one given."),
    "predict": ("predict", "Apply a run's model to new examples and write a CSV file."),
    "export": (
        "predict",
        "Write a run's model for other programs, with its preprocessing and its class names.",
    ),
    "list": ("listing", "List what fedveil knows by name; or what one of them takes in a configuration."),
    "partition": (
        "partition",
        "Show which client gets how many examples of which class; nothing is trained.",
    ),
    "attack": (
        "attack",
        "Attack a finished run: reconstruct clients' data from what the server observed, or infer who was in it.",
    ),
    "account": ("privacy", "Show what a run of this configuration would prove, without training."),
    "audit": (
        "privacy",
        "Try to break the method's own code with canaries, and compare with what is proven.",
    ),
    "advise": (
        "advise",
        "Show what this plan makes possible: noise for epsilon 1, 3 and 8, signal to noise, and what suits.",
    ),
    "compare": (
        "report",
        "Run several methods or settings on the same task; finished runs are not run again.",
    ),
    "reproduce": (
        "reproduce",
        "Run the rows of a published table and judge them beside the paper's numbers; finished runs are not run "
        "again.",
    ),
    "verify": (
        "verify",
        "Recompute every epsilon from the ledger; check the hashes of statement, model and records.",
    ),
    "report": ("report", "Write one self-contained page about these runs."),
    "deploy": (
        "deploy",
        "Run a federation over several machines: TLS, registered nodes, a privacy policy on every node.",
    ),
}
"""The module of each command and the first sentence of its help, in the order of `fedveil --help`."""


class LazyCommands(TyperGroup):
    """The group of all commands. Listing needs only their names and summaries."""

    _resolving = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        self._resolving = True
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:  # typer suggests only loaded commands
            near = difflib.get_close_matches(args[0], _MODULES, n=1)
            if not near or "Did you mean" in error.message:
                raise
            message = f"{error.message.rstrip('.')}. Did you mean {near[0]!r}?"
            raise click.UsageError(message, ctx) from error
        finally:
            self._resolving = False

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module, summary = _MODULES[cmd_name]
        return load_command(cmd_name, module) if self._resolving else click.Command(cmd_name, help=summary)


def load_command(name: str, module: str) -> click.Command:
    """The command that this module registers on the app under this name."""
    importlib.import_module(f"fedveil.cli.{module}")
    from fedveil.cli.app import app

    for info in app.registered_commands:
        assert info.callback is not None
        if (info.name or info.callback.__name__.replace("_", "-")) == name:
            return get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")
    (group,) = [group for group in app.registered_groups if group.name == name]
    return get_group_from_info(
        group, pretty_exceptions_short=True, suggest_commands=True, rich_markup_mode="rich"
    )


def all_commands() -> dict[str, click.Command]:
    """Every command, loaded."""
    return {name: load_command(name, module) for name, (module, _) in _MODULES.items()}


def summary_of(name: str) -> str:
    """The summary of a command in `fedveil --help`."""
    return _MODULES[name][1]
