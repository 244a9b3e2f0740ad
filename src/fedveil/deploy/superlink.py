"""Flower's SuperLink, with its control interface closed to everybody but this machine.

The SuperLink serves nodes and operators on one port, and by itself lets whoever reaches that port submit runs and
register nodes. Nodes come from anywhere; operators work on the server.

This file imports nothing of fedveil and is run by its path: a server that waits needs no tensors.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/v1/fleet/", "/health")
log = logging.getLogger("flwr.fedveil")


def from_this_machine(scope: Scope) -> bool:
    """Whether a request comes over loopback, or from the very address it arrived at."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server:
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback or client[0] == server[0]
    except ValueError:
        return False


class OnlyNodesFromOutside:
    """Lets other machines use the interface of nodes, which asks for their keys, and nothing else."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outside = scope["type"] in ("http", "websocket") and not from_this_machine(scope)
        if outside and not str(scope["path"]).startswith(OPEN):
            log.warning("refused %s from %s: only this machine may", scope["path"], scope.get("client"))
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await PlainTextResponse("only from the server itself\n", status_code=403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def main() -> None:
    """`flower-superlink` with its own arguments."""
    extensions.get_middleware = lambda: (Middleware(OnlyNodesFromOutside),)
    flower_superlink()


if __name__ == "__main__":
    main()
