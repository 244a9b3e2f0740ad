"""Cancelling one run of a federation, and following one that is still running."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import FedveilError, InputError
from fedveil.federation import launch, processes
from fedveil.federation.run_settings import PROBLEM, RUN, RunSettings
from tests.engines.configs import quick_config

ACTIVE = [{"run-id": 1, "status": "finished:completed"}, {"run-id": 2, "status": "running"}]


def flower_with(monkeypatch: pytest.MonkeyPatch, runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Flower's commands in place of a server: those that were given, besides the listing."""
    given: list[tuple[str, ...]] = []

    def flower(_folder: Path, *words: str) -> str:
        if words[0] != "list":
            given.append(words)
        return json.dumps({"runs": runs})

    monkeypatch.setattr(processes, "flower", flower)
    return given


def test_only_the_active_run_is_cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = flower_with(monkeypatch, ACTIVE)
    assert processes.cancel_run(tmp_path) == "2"
    assert [words[:2] for words in given] == [("stop", "2")]


@pytest.mark.parametrize(
    ("runs", "number"),
    [([], None), (ACTIVE, "1"), (ACTIVE, "7"), ([*ACTIVE, {"run-id": 3, "status": "pending"}], None)],
)
def test_what_is_over_unknown_or_ambiguous_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: list[dict[str, Any]], number: str | None
) -> None:
    given = flower_with(monkeypatch, runs)
    with pytest.raises(InputError) as refused:
        processes.cancel_run(tmp_path, number)
    assert refused.value.field == "RUN"
    assert given == []


def settings_in(folder: Path) -> RunSettings:
    return RunSettings(quick_config("fedavg", "flower", clients=2), 0, "test", folder)


def server_that_says(monkeypatch: pytest.MonkeyPatch, *statuses: str) -> list[tuple[str, ...]]:
    """Flower's command line with these statuses, one after the other: the commands it was given."""
    given: list[tuple[str, ...]] = []
    left = list(statuses)

    def flwr(_home: Path, *words: str) -> subprocess.CompletedProcess[str]:
        given.append(words)
        answer: dict[str, Any] = {"run-id": 5}
        if words[0] == "list":
            answer = {"runs": [{"status": left.pop(0) if len(left) > 1 else left[0]}]}
        return subprocess.CompletedProcess(words, 0, json.dumps(answer), "")

    monkeypatch.setattr(launch, "_flwr", flwr)
    monkeypatch.setattr(launch, "_ASK_EVERY", 0.0)
    monkeypatch.setattr(launch, "_LOOK_EVERY", 0.0)
    return given


def test_the_same_command_follows_an_active_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    given = server_that_says(monkeypatch, "running", launch.STOPPED)
    with pytest.raises(FedveilError):
        launch.submit(settings, tmp_path)
    kept = next(tmp_path.rglob(RUN))
    assert kept.read_text() == "5"
    given = server_that_says(monkeypatch, "running", "running", launch.STOPPED)
    with pytest.raises(FedveilError):
        launch.submit(settings, tmp_path)
    assert all(words[0] == "list" for words in given), "it is not submitted a second time"
    given = server_that_says(monkeypatch, launch.STOPPED)
    with pytest.raises(FedveilError):
        launch.submit(settings, tmp_path)
    assert any(words[0] == "run" for words in given), "what is over is submitted again"


def test_a_cancelled_run_is_reported_as_cancelled_to_its_submitter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_in(tmp_path)
    server_that_says(monkeypatch, launch.STOPPED)

    def ends_badly(*_: object) -> str:
        folder = next(tmp_path.rglob("seed-0"), None) or tmp_path / "x"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBLEM).write_text("Traceback (most recent call last)")
        return "5"

    submitted = launch._submit

    def submit(*arguments: Any) -> str:
        submitted(*arguments)
        return ends_badly()

    monkeypatch.setattr(launch, "_submit", submit)
    with pytest.raises(FedveilError) as told:
        launch.submit(settings, tmp_path)
    assert "cancelled" in str(told.value)
    assert "Traceback" not in str(told.value)
