"""A page that follows a run: curves, epsilon against the budget, remaining time. Served to this machine only.

The server listens on the loopback address, answers only under a path that nobody can guess, and only to requests that
name this machine as their host, so that no other page in the browser can read it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from fedveil.report.html import asset, document
from fedveil.report.measures import ACCURACY, MEASURES
from fedveil.session.results import ResultFolder

_HOSTS = ("127.0.0.1", "localhost")
_KEPT = ("round", "loss", "epsilon", "seconds", "bytes_up", "bytes_down", *(m.key for m in MEASURES))


@dataclass(frozen=True)
class Followed:
    """The run that is shown."""

    title: str
    rounds: int
    budget: float | None
    delta: float


class LiveView:
    """Serves the page while it is open: `with LiveView() as live: print(live.url)`."""

    def __init__(self) -> None:
        self._token = secrets.token_urlsafe(24)
        self._run: Followed | None = None
        self._folder: Path | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="live view", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/{self._token}/"

    def follow(self, folder: Path, run: Followed) -> None:
        """Show this folder's `rounds.jsonl` from now on."""
        self._folder, self._run = folder, run

    def __enter__(self) -> LiveView:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def admits(self, path: str, host: str) -> bool:
        """Whether the request carries the token and comes to this machine by its own name."""
        token = path.lstrip("/").partition("/")[0]
        right = hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())
        return right and host.rpartition(":")[0] in _HOSTS

    def page(self) -> str:
        content = (
            '<header><p class="kicker">fedveil, live</p><h1 id="title">Waiting for the run</h1></header>'
            '<main><p class="verdict fair" id="status" role="status" aria-live="polite">Nothing yet.</p>'
            '<section><h2 id="measure">Score on the test set</h2><div class="chart" id="score"></div></section>'
            '<section><h2>Proven epsilon and its budget</h2><div class="chart" id="epsilon"></div></section>'
            '<section><h2>Test loss</h2><div class="chart" id="loss"></div></section></main>'
        )
        return document("fedveil, live", content, asset("live.js"), connect="'self'")

    def state(self) -> dict[str, Any]:
        """What the page asks for: the run and its rounds so far."""
        folder, run = self._folder, self._run
        if folder is None or run is None:
            return {"run": None, "rounds": [], "finished": False}
        place = ResultFolder(folder)
        rounds = [{key: line.get(key) for key in _KEPT} for line in place.rounds() if isinstance(line, dict)]
        known = (m for m in MEASURES if any(line[m.key] is not None for line in rounds))
        measure = next(known, ACCURACY)
        shown = {"key": measure.key, "title": measure.title, "axis": measure.axis, "factor": measure.factor}
        return {"run": asdict(run), "rounds": rounds, "finished": place.finished, "measure": shown}


def _handler(live: LiveView) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """The page, or the rounds as JSON."""
            path = self.path.partition("?")[0]
            if not live.admits(path, self.headers.get("Host", "")):
                self.send_error(404)
                return
            wanted = path.lstrip("/").partition("/")[2]
            if wanted == "":
                self._answer("text/html; charset=utf-8", live.page())
            elif wanted == "rounds":
                self._answer("application/json", json.dumps(live.state()))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the terminal shows the run."""

    return Handler
