"""The command line: `app` has every command, `main` is the entry point."""

from fedveil.cli import attack, deploy, privacy, report
from fedveil.cli.app import app, main

__all__ = ["app", "attack", "deploy", "main", "privacy", "report"]
