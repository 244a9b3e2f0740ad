"""The live page is for this machine and for who has its address; other tools are optional."""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fedveil.errors import InputError
from fedveil.live import Followed, LiveView
from fedveil.messages import Record
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.run import RoundEnd
from fedveil.tracking import MLflowLog, TensorBoardLog
from fedveil.watching import Watching


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


class Recorded:
    """Stands in for both packages' writers and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_more: self.told.append((name, *args))


def test_tensorboard_gets_the_finite_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("torch.utils.tensorboard")
    writer = Recorded()
    module.SummaryWriter = lambda _folder: writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = TensorBoardLog(tmp_path)
    log.round_ends(_end(2, accuracy=0.5, epsilon=None, per_class=[1.0], loss=float("nan"), cohort=2))
    log.close()
    assert writer.told == [
        ("add_scalar", "accuracy", 0.5, 2),
        ("add_scalar", "cohort", 2.0, 2),
        ("flush",),
        ("close",),
    ]


def test_mlflow_gets_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, str, float, int]] = []
    ended: list[str] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            assert tracking_uri == "file:store"

        def get_experiment_by_name(self, name: str) -> None:
            assert name == "demo"

        def create_experiment(self, _name: str) -> str:
            return "7"

        def create_run(self, place: str, run_name: str) -> Any:
            info = ModuleType("info")
            info.run_id = f"{place}/{run_name}"  # type: ignore[attr-defined]
            run = ModuleType("run")
            run.info = info  # type: ignore[attr-defined]
            return run

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            logged.append((run, name, value, step))

        def set_terminated(self, run: str) -> None:
            ended.append(run)

    module, tracking = ModuleType("mlflow"), ModuleType("mlflow.tracking")
    tracking.MlflowClient = Client  # type: ignore[attr-defined]
    module.tracking = tracking  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    log = MLflowLog("file:store", "demo", "seed 0")
    log.round_ends(_end(1, accuracy=0.25))
    log.close()
    assert logged == [("7/seed 0", "accuracy", 0.25, 1)]
    assert ended == ["7/seed 0"]


@pytest.mark.parametrize(
    ("module", "options"),
    [("torch.utils.tensorboard", {"tensorboard": Path("x")}), ("mlflow", {"mlflow": "file:x"})],
)
def test_a_missing_package_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, module: str, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"is not installed.*pip install"):
        Watching(**options)
