"""The command line: `app` has every command, `main` is the entry point."""

# isort: off
# Each module registers its commands, and --help shows them in this order.
from fedveil.cli.app import app, main
from fedveil.cli import run, listing, partition, attack, privacy, verify, report, deploy
# isort: on

__all__ = ["app", "attack", "deploy", "listing", "main", "partition", "privacy", "report", "run", "verify"]
