"""The command line: `app` has every command, `main` is the entry point."""

# isort: off
# Each module registers its commands, and --help shows them in this order.
from fedveil.cli.app import app, main
from fedveil.cli import run, predict, listing, partition, attack, privacy, advise, report, deploy
# isort: on

__all__ = [
    "advise",
    "app",
    "attack",
    "deploy",
    "listing",
    "main",
    "partition",
    "predict",
    "privacy",
    "report",
    "run",
]
