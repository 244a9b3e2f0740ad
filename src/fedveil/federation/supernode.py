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
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.common.config import get_fused_config_from_fab
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal as internal
from flwr.supernode.cli.flower_supernode import flower_supernode

CLIENT_APP = "fedveil.federation.client_app:app"
TIMEOUTS = Path(__file__).with_name("timeouts.py")
SUPEREXEC = Path(__file__).with_name("superexec.py")
MEMBERS = ("pyproject.toml", ".info/CONTENT")  # what `flwr run` makes of settings without code
MOST_BYTES = 1 << 20  # of all members together, packed and unpacked
log = logging.getLogger("flwr.fedveil")


class ForeignAppError(Exception):
    """An application that is not fedveil's own."""


def require_own_app(fab: bytes) -> None:
    """Refuse a bundle that holds more than settings, or whose client is not this installation's.

    Flower unpacks every member in turn, so that a second one of the same place would replace the one that was read
    here: the bundle must hold exactly `MEMBERS`, each under its plain name and once.
    """
    if len(fab) > MOST_BYTES:
        raise ForeignAppError(f"the application has {len(fab)} bytes, more than {MOST_BYTES}")
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as bundle:
            _require_members(bundle.infolist())
            settings = tomllib.loads(bundle.read("pyproject.toml").decode())
        client = settings["tool"]["flwr"]["app"]["components"]["clientapp"]
    except (
        zipfile.BadZipFile,
        KeyError,
        TypeError,
        ValueError,
        NotImplementedError,
        RecursionError,
    ) as error:
        raise ForeignAppError(f"the application cannot be read ({type(error).__name__})") from error
    if client != CLIENT_APP:
        raise ForeignAppError(f"the application's client is {client!r}, not {CLIENT_APP!r}")


def _require_members(members: Sequence[zipfile.ZipInfo]) -> None:
    """Exactly the known members, none twice, and no more of them than a node may unpack."""
    names = [member.filename for member in members]
    for name in names:
        if name not in MEMBERS:
            raise ForeignAppError(f"the application brings {name!r}")
        if names.count(name) > 1:
            raise ForeignAppError(f"the application brings {name!r} twice")
    size = sum(member.file_size for member in members)
    if size > MOST_BYTES:
        raise ForeignAppError(f"the application unpacks to {size} bytes, more than {MOST_BYTES}")


def main() -> None:
    """`flower-supernode` with its own arguments."""

    def checked(fab: Path | bytes, run: Any) -> Any:
        try:
            require_own_app(fab if isinstance(fab, bytes) else fab.read_bytes())
        except ForeignAppError as error:
            node = os.environ.get("FEDVEIL_NODE", "?")
            log.error("node %s refuses run %s: %s", node, run.run_id, error)
            raise RunNotRunningException from error  # the message is dropped, the node keeps running
        return get_fused_config_from_fab(fab, run)

    # What Flower calls with every bundle it is sent, before it keeps it.
    if vars(internal).get(get_fused_config_from_fab.__name__) is not get_fused_config_from_fab:
        raise SystemExit("this version of Flower is not known: foreign code could not be refused")
    vars(internal)[get_fused_config_from_fab.__name__] = checked
    timeouts = runpy.run_path(str(TIMEOUTS))
    timeouts["wait_longer"](in_memory_corestate)
    timeouts["ask_sooner"](internal)
    if sys.platform == "linux":  # elsewhere a fork of a process that has loaded tensors may fail
        _start_own_superexec()
    flower_supernode()


def _start_own_superexec() -> None:
    """Flower's loop starts `superexec.py` where it would start `flower-superexec`."""
    if vars(internal).get("subprocess") is not subprocess:
        raise SystemExit("this version of Flower is not known: it would start every process anew")

    def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-P", str(SUPEREXEC), *command[1:]])

    vars(internal)["subprocess"] = SimpleNamespace(Popen=start)


if __name__ == "__main__":
    main()
