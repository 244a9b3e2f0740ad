"""Flower's SuperNode, which runs no code sent by the server.

Flower sends an application to the nodes and runs it there. Such an application could bypass the node's policy and read
its data and keys. So an application that contains any code, or names another client app than the installed fedveil's,
is refused before it is stored.

This file does not import fedveil and is run by its path, so that an idle node does not load torch.
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
MEMBERS = ("pyproject.toml", ".info/CONTENT")  # the files that `flwr run` writes for settings without code
MOST_BYTES = 1 << 20  # limit for all members together, packed and unpacked
log = logging.getLogger("flwr.fedveil")


class ForeignAppError(Exception):
    """An application other than fedveil's; `field` is the part of the bundle that is refused."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def require_own_app(fab: bytes) -> None:
    """Refuse a bundle with anything but settings, or with a client app other than fedveil's.

    Flower unpacks members in order, so a second member of the same path would replace the one checked here: the bundle
    must contain exactly `MEMBERS`, each once and under its plain name.
    """
    if len(fab) > MOST_BYTES:
        raise ForeignAppError(f"the application has {len(fab)} bytes, more than {MOST_BYTES}", "size")
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
        raise ForeignAppError(f"the application cannot be read ({type(error).__name__})", "bundle") from error
    if client != CLIENT_APP:
        raise ForeignAppError(f"the application's client is {client!r}, not {CLIENT_APP!r}", "clientapp")


def _require_members(members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse unknown and repeated members, and bundles that unpack to too many bytes."""
    names = [member.filename for member in members]
    for name in names:
        if name not in MEMBERS:
            raise ForeignAppError(f"the application contains {name!r}", "members")
        if names.count(name) > 1:
            raise ForeignAppError(f"the application contains {name!r} twice", "members")
    size = sum(member.file_size for member in members)
    if size > MOST_BYTES:
        raise ForeignAppError(f"the application unpacks to {size} bytes, more than {MOST_BYTES}", "size")


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

    # Flower calls this with every received bundle, before it stores it.
    if vars(internal).get(get_fused_config_from_fab.__name__) is not get_fused_config_from_fab:
        raise SystemExit("this version of Flower is not supported: foreign code could not be refused")
    vars(internal)[get_fused_config_from_fab.__name__] = checked
    timeouts = runpy.run_path(str(TIMEOUTS))
    timeouts["wait_longer"](in_memory_corestate)
    timeouts["ask_sooner"](internal)
    if sys.platform == "linux":  # elsewhere forking a process that has loaded torch may fail
        _start_own_superexec()
    flower_supernode()


def _start_own_superexec() -> None:
    """Make Flower's loop start `superexec.py` in place of `flower-superexec`."""
    if vars(internal).get("subprocess") is not subprocess:
        raise SystemExit("this version of Flower is not supported: processes could not be preloaded")

    def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-P", str(SUPEREXEC), *command[1:]])

    vars(internal)["subprocess"] = SimpleNamespace(Popen=start)


if __name__ == "__main__":
    main()
