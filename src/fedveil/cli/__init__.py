"""The command line: a thin layer over the library. Commands are loaded when they are asked for."""

from fedveil.cli.app import app, main

__all__ = ["app", "main"]
