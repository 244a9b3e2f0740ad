"""Makes the pictures of the documentation: the demo's report as a browser shows it.

Run by `make figures` after the demo. Without a Chromium the picture is the report's accuracy figure instead.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from fedveil.figures.figure import save_figure
from fedveil.report.figures import accuracy_figure
from fedveil.report.groups import group
from fedveil.report.html import write_report
from fedveil.report.reading import read_runs

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WIDTH, _HEIGHT = 1180, 800
_LARGEST = 300_000  # bytes; a picture in a repository stays small


def screenshot(browser: str, page: Path, target: Path) -> None:
    """The top of the page, as it is on a desktop."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={_WIDTH},{_HEIGHT}",
                f"--screenshot={target}",
                page.resolve().as_uri(),
            ],
            check=True,
            timeout=120,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    with Image.open(target) as picture:
        opaque = picture.convert("RGB")
    opaque.save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="the demo's result folders")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    target = arguments.output / "report.png"
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print("no Chromium is installed: drawing the accuracy figure instead", file=sys.stderr)
        save_figure(accuracy_figure(group(read_runs(arguments.results))), target)
    else:
        with tempfile.TemporaryDirectory() as folder:
            screenshot(browser, write_report(arguments.results, Path(folder) / "report.html"), target)
    if target.stat().st_size > _LARGEST:
        sys.exit(f"{target} has {target.stat().st_size} bytes, more than {_LARGEST}")
    print(f"picture in {target}")


if __name__ == "__main__":
    main()
