"""Flower's SuperLink, with its control interface restricted to this machine.

The SuperLink serves nodes and operators on one port, and by default lets anybody who can reach that port submit runs
and register nodes. Nodes connect from anywhere; operators work on the server.

This file does not import fedveil and is run by its path, so that an idle server does not load torch.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import logging
import os
import runpy
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Push = Callable[..., Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TIMEOUTS = Path(__file__).with_name("timeouts.py")
PARENT_WATCH = Path(__file__).with_name("parent_watch.py")
FLEET = "/v1/fleet/"
OPEN = (FLEET, "/health")
ENTRY = (f"{FLEET}activate-node", f"{FLEET}register-node")
log = logging.getLogger("flwr.fedveil")


def from_this_machine(scope: Scope) -> bool:
    """Whether a request comes over loopback, or from the same address at which it arrived."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server:
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback or client[0] == server[0]
    except ValueError:
        return False


def key_of(scope: Scope) -> str:
    """The fingerprint of a node's key, as `ssh-keygen -lf node.pub` prints it, in words."""
    shown = dict(scope.get("headers") or ()).get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode())
    if shown is None:
        return "without a key"
    try:
        key = serialization.load_pem_public_key(base64.b64decode(shown, validate=True))
        line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return "with a key that cannot be read"
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"with the key SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


class OnlyNodesFromOutside:
    """Restricts other machines to the interface for nodes, which authenticates them by their keys.

    Refused nodes are logged with address and key fingerprint. Until the file `ready` (if given) exists, nodes are asked
    to retry, so that a node whose key is about to be registered is not refused.
    """

    def __init__(self, app: App, ready: Path | None = None) -> None:
        self._app = app
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outside = scope["type"] in ("http", "websocket") and not from_this_machine(scope)
        if outside and not str(scope["path"]).startswith(OPEN):
            log.warning(
                "refused %s from %s: allowed on this machine only", scope["path"], scope.get("client")
            )
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await PlainTextResponse("only from the server itself\n", status_code=403)(scope, receive, send)
            return
        fleet = scope["type"] == "http" and str(scope["path"]).startswith(FLEET)
        if fleet and self._ready is not None and not self._ready.exists():
            await PlainTextResponse("not yet\n", status_code=503)(scope, receive, send)
            return
        await self._app(scope, receive, self._watched(scope, send) if fleet else send)

    @staticmethod
    def _watched(scope: Scope, send: Send) -> Send:
        async def watched(message: MutableMapping[str, Any]) -> None:
            status = message.get("status", 0)
            if status == 401 or (status >= 400 and str(scope["path"]).startswith(ENTRY)):
                place = (scope.get("client") or ("?",))[0]
                log.warning("refused a node at %s %s: it is not registered", place, key_of(scope))
            await send(message)

        return watched


def own_replies_only(push: Push) -> Push:
    """Refuse replies in another node's name; Flower authenticates the request, but not the sender of its messages."""

    def checked(request: Any, state: Any) -> Any:
        for message in request.messages_list:
            if message.metadata.src_node_id != request.node.node_id:
                log.warning("refused a reply in another's name from node %s", request.node.node_id)
                raise HTTPException(401, "a reply in another node's name")
        return push(request=request, state=state)

    return checked


def main() -> None:
    """`flower-superlink` with its own arguments."""
    fleet_handlers.push_messages = own_replies_only(fleet_handlers.push_messages)
    runpy.run_path(str(PARENT_WATCH))["end_with_parent"]()
    runpy.run_path(str(TIMEOUTS))["wait_longer"](in_memory_corestate, sql_corestate)
    named = os.environ.get("FEDVEIL_READY")
    ready = None if named is None else Path(named)
    extensions.get_middleware = lambda: (Middleware(OnlyNodesFromOutside, ready=ready),)
    flower_superlink()


if __name__ == "__main__":
    main()
