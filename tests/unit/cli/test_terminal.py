"""Every command's output can be written to a terminal of any encoding."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.cli.app import main
from fedveil.cli.terminal import plain

CONFIG = """
[partition]
clients = 4
[method]
name = "udp-fedavg"
batch_size = 16
noise_multiplier = 1.5
[run]
rounds = 1
sampler = "all"
transcript = true
"""
Command = Callable[..., str]


@pytest.fixture(params=["latin-1", "ascii"])
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line that must end well, and gives what a terminal of this encoding got."""
    (tmp_path / "small.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def go(*arguments: str) -> str:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=request.param) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        monkeypatch.setattr(sys, "argv", ["fedveil", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = ""
        for stream in streams:
            stream.flush()
            assert isinstance(stream.buffer, io.BytesIO)
            said += stream.buffer.getvalue().decode(request.param)
        assert not ended.value.code, said
        return said

    return go


def test_no_command_ends_in_a_traceback_on_a_terminal_without_greek_letters(command: Command) -> None:
    assert "eps" in command("account", "small.toml")
    assert "eps" in command("run", "small.toml")
    assert "eps" in command("compare", "small.toml", "--methods", "fedavg,udp-fedavg", "--jobs", "1")
    command("compare", "small.toml", "--markdown", "--jobs", "1")
    command("report", "results", "-o", "report.html")
    command("partition", "small.toml")
    run = next(path.parent for path in Path("results").rglob("model.safetensors"))
    command("attack", str(run), "--attack", "inverting-gradients", "--set", "steps=2", "--examples", "360")
    command("attack", str(run), "--attack", "loss-threshold")
    command("audit", "small.toml", "--samples", "200")
    for listed in ("methods", "datasets", "models", "attacks"):
        command("list", listed)
    command("deploy", "init", "federation", "--nodes", "2")
    command("--help")


def test_letters_are_replaced_by_those_of_the_encoding() -> None:
    assert plain("ε 1.5 ± 0.1 …", "ascii") == "eps 1.5 +- 0.1 ..."
    assert plain("ε ± é", "latin-1") == "eps ± é"
    assert plain("é ½ 語", "ascii") == "e 12 ?"
    assert plain("ε \udcff", "utf-8") == "ε ?"
