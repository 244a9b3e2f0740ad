"""Flower's SuperNode, which runs no code that the server sends.

Flower ships an application to the nodes and runs it there. A node that did so could not keep a policy of its own:
the application might read its data and its keys. So an application that brings any code, or names another client
than the one installed here with fedveil, is refused before it is stored.

This file imports nothing of fedveil and is run by its path: a node that waits needs no tensors.
"""

from __future__ import annotations

import io
import logging
import os
import runpy
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from flwr.common.config import get_fused_config_from_fab
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal as internal
from flwr.supernode.cli.flower_supernode import flower_supernode

CLIENT_APP = "fedveil.federation.client_app:app"
TIMEOUTS = Path(__file__).with_name("timeouts.py")
_HARMLESS = (".toml", ".md", ".json", "/CONTENT", "/LICENSE")
_MOST_BYTES = 1 << 20
log = logging.getLogger("flwr.fedveil")


class ForeignAppError(Exception):
    """An application that is not fedveil's own."""


def require_own_app(fab: bytes) -> None:
    """Refuse a bundle that holds more than settings, or whose client is not this installation's."""
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as bundle:
            for member in bundle.infolist():
                name = f"/{member.filename}"
                if not name.endswith(_HARMLESS) or member.file_size > _MOST_BYTES:
                    raise ForeignAppError(f"the application brings {member.filename!r}")
            settings = tomllib.loads(bundle.read("pyproject.toml").decode())
        client = settings["tool"]["flwr"]["app"]["components"]["clientapp"]
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise ForeignAppError(f"the application cannot be read ({type(error).__name__})") from error
    if client != CLIENT_APP:
        raise ForeignAppError(f"the application's client is {client!r}, not {CLIENT_APP!r}")


def main() -> None:
    """`flower-supernode` with its own arguments."""

    def checked(fab: Path | bytes, run: Any) -> Any:
        try:
            require_own_app(fab if isinstance(fab, bytes) else fab.read_bytes())
        except ForeignAppError as error:
            node = os.environ.get("FEDVEIL_NODE", "?")
            log.error("node %s refuses run %s: %s", node, run.run_id, error)
            raise RunNotRunningException from error  # the message is dropped, the node goes on
        return get_fused_config_from_fab(fab, run)

    # What Flower calls with every bundle it is sent, before it keeps it.
    if vars(internal).get(get_fused_config_from_fab.__name__) is not get_fused_config_from_fab:
        raise SystemExit("this version of Flower is not known: foreign code could not be refused")
    vars(internal)[get_fused_config_from_fab.__name__] = checked
    runpy.run_path(str(TIMEOUTS))["wait_longer"](in_memory_corestate)
    flower_supernode()


if __name__ == "__main__":
    main()
