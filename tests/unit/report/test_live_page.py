"""The live page is for this machine and for who has its address; other tools are optional."""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.cli.callbacks import RunCallbacks
from fedveil.messages import Record
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.report.live_page import Followed, LiveView
from fedveil.session.callbacks.trackers import MLflowLog, TensorBoardLog
from fedveil.session.loop import RoundEnd
from tests.refusals import refuses


def get(url: str, path: str, host: str | None = None) -> tuple[int, str]:
    address = url.split("/")[2]
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_it_follows_the_rounds_on_disk(tmp_path: Path) -> None:
    with LiveView() as live:
        token = live.url.split("/")[3]
        assert json.loads(get(live.url, f"/{token}/rounds")[1])["run"] is None
        (tmp_path / "rounds.jsonl").write_text('{"round": 1, "accuracy": 0.5, "seconds": 1}\n{"rou')
        live.follow(tmp_path, Followed("demo", 10, 3.0, 1e-5))
        state = json.loads(get(live.url, f"/{token}/rounds")[1])
        assert state["run"] == {"title": "demo", "rounds": 10, "budget": 3.0, "delta": 1e-5}
        assert [line["accuracy"] for line in state["rounds"]] == [0.5]
        assert not state["finished"]
        with (tmp_path / "rounds.jsonl").open("w") as file:
            file.write('{"round": 1}\n{"round": 2}\n')
        (tmp_path / "summary.json").write_text("{}")
        state = json.loads(get(live.url, f"/{token}/rounds")[1])
        assert [line["round"] for line in state["rounds"]] == [1, 2]
        assert state["finished"]


def test_only_this_machine_with_the_token_is_answered() -> None:
    with LiveView() as live:
        assert live.url.startswith("http://127.0.0.1:")
        token = live.url.split("/")[3]
        assert len(token) >= 32
        assert get(live.url, f"/{token}/")[0] == 200
        for path in (
            "/",
            "/rounds",
            f"/{token[:-1]}/rounds",
            f"/x{token}/",
            f"/{token}/../../etc/passwd",
            "/%ff/",
        ):
            assert get(live.url, path)[0] == 404
        assert get(live.url, f"/{token}/", host="evil.example:80")[0] == 404
        page = get(live.url, f"/{token}/")[1]
        assert "connect-src 'self'" in page
        assert token not in page
    with pytest.raises(OSError, match="refused"):
        get(live.url, f"/{token}/")


def test_two_views_have_different_tokens() -> None:
    with LiveView() as one, LiveView() as two:
        assert one.url.split("/")[3] != two.url.split("/")[3]


def _end(number: int, **metrics: Any) -> RoundEnd:
    plan = Plan(4, 2, "fixed", 3, 1, 1)
    return RoundEnd(At(plan, number), (0, 1), Record(), {"w": torch.zeros(1)}, number == 3, dict(metrics))


def test_tensorboard_gets_the_finite_numbers(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = TensorBoardLog(tmp_path)
    log.round_ends(_end(2, accuracy=0.5, epsilon=None, per_class=[1.0], loss=float("nan"), cohort=2))
    log.close()
    written = events.EventAccumulator(str(tmp_path)).Reload()
    assert sorted(written.Tags()["scalars"]) == ["accuracy", "cohort"]
    assert [(event.step, event.value) for event in written.Scalars("accuracy")] == [(2, 0.5)]


# The data base layer of MLflow uses what its own dependency has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_gets_a_run_of_its_own(tmp_path: Path) -> None:
    flow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for name in ("seed 0", "seed 1"):
        log = MLflowLog(store, "demo", name)
        log.round_ends(_end(1, accuracy=0.25, loss=float("inf")))
        log.round_ends(_end(2, accuracy=0.5))
        log.close()
    client = flow.tracking.MlflowClient(tracking_uri=store)
    place = client.get_experiment_by_name("demo").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([place])}
    assert sorted(runs) == ["seed 0", "seed 1"]
    assert all(run.info.status == "FINISHED" for run in runs.values())
    points = client.get_metric_history(runs["seed 1"].info.run_id, "accuracy")
    assert [(point.step, point.value) for point in points] == [(1, 0.25), (2, 0.5)]
    assert "loss" not in runs["seed 0"].data.metrics
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_an_unreachable_store_is_refused_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with refuses("--mlflow"):
        RunCallbacks(mlflow=f"unheard-of://{tmp_path}")


@pytest.mark.parametrize(
    ("module", "option", "value"),
    [("torch.utils.tensorboard", "tensorboard", Path("x")), ("mlflow", "mlflow", "file:x")],
)
def test_a_missing_package_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, module: str, option: str, value: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with refuses(f"--{option}", value=str(value)):
        RunCallbacks(**{option: value})
