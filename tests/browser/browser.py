"""A headless Chromium spoken to over two pipes: no driver, no package, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


_KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
}


def find_browser() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; collects what goes wrong in it and what it asks of the network."""

    def __init__(self, command: int, answers: int, seconds: float = 60.0) -> None:
        self._command = command
        self._answers = answers
        self._seconds = seconds
        self._buffer = b""
        self._next = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go there and wait until it has loaded."""
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + self._seconds
        while not self.value(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)

    def size(self, width: int, height: int, *, dark: bool = False, paper: bool = False) -> None:
        """Show the page as on a screen of this size, or as it is printed."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])

    def move(self, x: float, y: float) -> None:
        """The pointer, to this place."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        """Press it."""
        number, text = _KEYS[name]
        more = {"key": name, "code": name, "windowsVirtualKeyCode": number}
        self._call("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **more)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, or of what is on the screen."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pages(self) -> int:
        """How many pages of A4 it prints."""
        answer = self._call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return len(re.findall(rb"/Type\s*/Page\b(?!s)", base64.b64decode(answer["data"])))

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._next += 1
        number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._command, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._seconds
        while True:
            answer = self._read(end)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        first, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(first)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])


@contextmanager
def browse(path: str) -> Iterator[Page]:
    """A browser with one page and a profile of its own, both removed afterwards."""
    read_commands, command = os.pipe()
    answers, write_answers = os.pipe()

    def third_and_fourth() -> None:  # the browser expects its pipes there
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read_commands, write_answers)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=third_and_fourth,
            pass_fds=(3, 4),
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Page(command, answers)
        finally:
            os.close(command)
            os.close(answers)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
