"""What an installed wheel can do without the repository."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

NEW_EXAMPLES = {
    "table": "new-patients.csv",
    "images": "new-digit.png",
    "text": "new-texts.txt",
    "federation": None,
}
"""The templates, each with the examples that its model is to be used on."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_an_installed_wheel_has_the_demo_and_the_templates(tmp_path: Path) -> None:
    """The environment is fresh; what the wheel depends on is lent to it, so that nothing is downloaded."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("fedveil-*.whl")
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, env=clean
    )
    (own,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (own / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    fedveil = tmp_path / "fresh" / "bin" / "fedveil"

    def typed(*arguments: str) -> str:
        done = subprocess.run(
            [fedveil, *arguments], check=True, cwd=tmp_path, env=clean, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    for template, new in NEW_EXAMPLES.items():
        config = f"{template}/experiment.toml"
        typed("new", template, "--template", template)
        typed("account", config, *(["--records-per-client", "100"] if new is None else []))
        if new is not None:
            result = json.loads(typed("run", config, "--json"))["result"]
            typed("predict", result, f"{template}/{new}", "-o", f"{template}.csv")
            assert "predicted" in (tmp_path / f"{template}.csv").read_text()
    typed("demo", "--rounds", "1", "--steps", "2")
    where = subprocess.run(
        [python, "-c", "import fedveil; print(fedveil.__file__)"], check=True, env=clean, capture_output=True
    )
    assert str(own) in where.stdout.decode()
    assert "<html" in (tmp_path / "demo.html").read_text()
