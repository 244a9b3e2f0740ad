"""A run from Python: results on disk, resuming, refusing, stopping."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import ArrayClients, LazyClients, PrivacySettings, Result, Task, run
from fedveil.data.dataset import Examples
from fedveil.errors import DataError, DivergedError, InputError, ResultError
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.session.loop import Callback
from fedveil.session.results import ResultFolder
from tests.contract.federation import StopsAfter, distance, make_clients, make_task
from tests.refusals import refuses

METHOD = UDPFedAvg(epochs=1, batch_size=4, noise_multiplier=2.0)


def go(folder: Path | None = None, **options: Any) -> Result:
    settings: dict[str, Any] = {"rounds": 4, "cohort": 3, "workers": 1, "checkpoint_every": 1}
    settings |= {"noise": "seeded"} | options
    return run(make_task(), make_clients(), settings.pop("method", METHOD), results=folder, **settings)


def test_the_folder_contains_the_designed_files(tmp_path: Path) -> None:
    result = go(tmp_path / "r", transcript=True)
    names = {path.name for path in (tmp_path / "r").iterdir() if not path.name.startswith(".")}
    assert names >= {
        "config.toml",
        "rounds.jsonl",
        "ledger.jsonl",
        "model.safetensors",
        "checkpoint",
        "transcript",
        "summary.json",
    }
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["rounds"] == 4
    assert {row["adversary"] for row in summary["privacy"]["proven"]} == {"server", "observer", "client"}
    assert len((tmp_path / "r" / "rounds.jsonl").read_text().splitlines()) == 4
    parameters = sum(leaf.numel() * leaf.element_size() for leaf in result.model.values())
    assert result.history[0]["bytes_up"] == result.history[0]["bytes_down"] == 3 * parameters


def test_a_finished_run_is_read_back_and_never_overwritten(tmp_path: Path) -> None:
    first = go(tmp_path / "r")
    before = {
        p: p.stat().st_mtime_ns for p in (tmp_path / "r").rglob("*") if p.name != ".lock" and p.is_file()
    }
    again = go(tmp_path / "r")
    assert distance(first.model, again.model) == 0
    assert again.summary == json.loads(json.dumps(first.summary))
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())


@pytest.mark.parametrize(
    "changed",
    [{"method": FedAvg()}, {"seed": 1}, {"rounds": 5}, {"cohort": 2}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_folder_of_another_configuration_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    go(tmp_path / "r")
    with refuses("configuration", ResultError):
        go(tmp_path / "r", **changed)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
def test_a_run_does_not_resume_with_other_data(tmp_path: Path, finished: bool) -> None:
    def go_on(
        x: torch.Tensor, y: torch.Tensor, parts: torch.Tensor, test: torch.Tensor, *callbacks: Callback
    ) -> Result:
        task, clients = Task(lambda: torch.nn.Linear(3, 2)), ArrayClients(x, y, list(parts))
        folder = tmp_path / "r"
        return run(
            task, clients, METHOD, rounds=2, results=folder, test=(test, y[:5]), callbacks=list(callbacks)
        )

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=generator), torch.tensor([0, 1] * 6)
    parts, test = torch.arange(12).reshape(3, 4), x[:5]
    if finished:
        go_on(x, y, parts, test)
    else:
        with pytest.raises(KeyboardInterrupt):
            go_on(x, y, parts, test, StopsAfter(1))
    changed = x.clone()
    changed[7, 1] += 1e-3
    for others in (
        (changed, y, parts, test),
        (x, y.flip(0), parts, test),
        (x, y, parts.T.reshape(3, 4), test),
        (x, y, parts, x[1:6]),
    ):
        with refuses("data", ResultError):
            go_on(*others)
    assert go_on(x, y, parts, test).summary["rounds"] == 2


def test_a_locked_folder_is_reported_even_with_an_incomplete_ledger(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "r", callbacks=[StopsAfter(3)])
    ledger = tmp_path / "r" / "ledger.jsonl"
    with ResultFolder(tmp_path / "r").held():
        ledger.write_text(ledger.read_text()[:-20])  # as it may be while a line is written
        with refuses("lock", ResultError):
            go(tmp_path / "r")


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "none"])
def test_a_damaged_checkpoint_is_not_used(tmp_path: Path, damage: str) -> None:
    whole = go(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "r", callbacks=[StopsAfter(3)])
    newest = max((tmp_path / "r" / "checkpoint").glob("*.ckpt"))
    data = newest.read_bytes()
    newest.write_bytes(
        {"cut": data[:-10], "flip": data[:60] + b"?" + data[61:], "empty": b"", "none": data}[damage]
    )
    assert distance(go(tmp_path / "r").model, whole.model) == 0


def test_a_torn_line_of_rounds_is_replayed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "r", callbacks=[StopsAfter(2)])
    with (tmp_path / "r" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "byt')
    assert [line["round"] for line in go(tmp_path / "r").history] == [1, 2, 3, 4]


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "r", callbacks=[StopsAfter(2)])
    with refuses("configuration", ResultError):
        go(tmp_path / "r", seed=1)


def _hold(folder: str, holding: Any) -> None:
    with ResultFolder(Path(folder)).held():
        holding.set()
        signal.pause()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    holding = fork.Event()
    other = fork.Process(target=_hold, args=(str(tmp_path / "r"), holding))
    other.start()
    assert holding.wait(60)
    try:
        with refuses("lock", ResultError):
            go(tmp_path / "r")
    finally:
        other.kill()
        other.join()
    assert go(tmp_path / "r").summary["rounds"] == 4


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses("results", ResultError):
        go(tmp_path / "file" / "r")


class Explodes(torch.nn.Module):
    """Finite until the weights have moved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        torch.nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * (1e30 * self.layer.weight.square().sum() + 1)
        return out


def test_divergence_names_round_client_and_layer_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    clients = make_clients()
    clients.x = clients.x.float()
    with refuses("upload", DivergedError) as caught:
        run(
            Task(Explodes),
            clients,
            FedAvg(lr=10.0, batch_size=4),
            rounds=50,
            cohort=3,
            results=tmp_path / "r",
            workers=1,
            noise="seeded",
            checkpoint_every=1,
        )
    assert caught.value.value in [(client, "params/layer.weight") for client in range(5)]
    assert not (tmp_path / "r" / "summary.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_update_that_cannot_be_clipped_names_the_round_and_a_remedy(workers: int) -> None:
    clients = make_clients()
    clients.x = clients.x.float()
    with refuses("update", DivergedError):
        run(Task(Explodes), clients, UDPFedAvg(lr=1e30), rounds=5, cohort=3, workers=workers, noise="seeded")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cohort": 6}, "run.cohort"),
        ({"cohort": 0}, "run.cohort"),
        ({"rounds": 0}, "run.rounds"),
        ({"rounds": 1.5}, "run.rounds"),
        ({"rounds": True}, "run.rounds"),
        ({"seed": -1}, "run.seed"),
        ({"seed": 2**63}, "run.seed"),
        ({"evaluate_every": 0}, "run.evaluate_every"),
        ({"checkpoint_every": 0}, "run.checkpoint_every"),
        ({"workers": -1}, "run.workers"),
        ({"execution": "both"}, "run.execution"),
    ],
)
def test_impossible_plans_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    with refuses(field):
        go(tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()


def test_no_clients_are_refused() -> None:
    with refuses("clients"):
        run(make_task(), [], METHOD, rounds=1)


def test_pairs_of_arrays_are_clients_too() -> None:
    clients = make_clients()
    pairs = [(clients.x[part], clients.y[part]) for part in clients.parts]
    options: dict[str, Any] = {"rounds": 2, "cohort": 2, "workers": 1, "noise": "seeded"}
    assert (
        distance(
            run(make_task(), pairs, METHOD, **options).model,
            run(make_task(), clients, METHOD, **options).model,
        )
        == 0
    )


def as_pairs(clients: ArrayClients) -> list[tuple[Any, Any]]:
    return [(clients.x[part], clients.y[part]) for part in clients.parts]


class Listed(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return self.x[place], int(self.y[place])


def test_numpy_arrays_examples_and_torch_datasets_are_clients_too() -> None:
    clients = make_clients()
    clients.x = clients.x.float()
    task = Task(lambda: torch.nn.Sequential(torch.nn.Linear(6, 3)))
    forms: list[Callable[[Any, Any], Any]] = [
        lambda x, y: (x, y),
        lambda x, y: (x.double().numpy(), y.numpy().astype("uint8")),
        lambda x, y: (x, y.to(torch.int32)),
        Examples,
        Listed,
    ]
    held_out = (clients.x.double().numpy(), clients.y.numpy())
    results = [
        run(
            task,
            [form(x, y) for x, y in as_pairs(clients)],
            FedAvg(batch_size=4),
            rounds=2,
            workers=1,
            noise="seeded",
            test=held_out,
        )
        for form in forms
    ]
    assert all(distance(results[0].model, other.model) == 0 for other in results[1:])
    assert len({result.accuracy for result in results}) == 1


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        # One label too few here and one too many there: no total shows that examples and labels are shifted.
        (
            lambda p: [(p[0][0], p[0][1][:-1]), (p[1][0], torch.cat([p[1][1], p[1][1][:1]])), *p[2:]],
            "y",
            0,
        ),
        (lambda p: [*p[:2], (p[2][0][:, :4], p[2][1]), *p[3:]], "x", 2),
        (lambda p: [*p[:3], (p[3][0].float(), p[3][1]), *p[4:]], "x", 3),
        (lambda p: [(x, y.double()) for x, y in p], "y", "float64 of shape []"),
        (lambda p: [(x, y[:, None]) for x, y in p], "y", "int64 of shape [1]"),
        (lambda p: [(x.numpy().astype(str), y) for x, y in p], "dtype", "<U32"),
    ],
)
def test_pairs_that_do_not_fit_together_are_refused(
    change: Callable[[Any], Any], field: str, value: object
) -> None:
    with refuses(field, DataError, value=value):
        run(make_task(), change(as_pairs(make_clients())), METHOD, rounds=1)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda x, y: (x, y + 3), 5),  # a label without output
        (lambda x, y: (x * float("nan"), y), 0),  # the first example that is not finite
        (lambda x, y: (x[:, :4], y), [4]),  # a shape that the model cannot read
        (lambda x, y: (x, y[1:]), (34, 33)),
    ],
)
def test_test_examples_are_checked_before_anything_is_written(
    tmp_path: Path, change: Callable[[Any, Any], Any], value: object
) -> None:
    clients = make_clients()
    with refuses("test", DataError, value=value):
        go(tmp_path / "r", test=change(clients.x, clients.y))
    assert not (tmp_path / "r").exists()


def test_without_a_test_example_there_is_no_accuracy() -> None:
    clients = make_clients()
    assert go(test=(clients.x[:0], clients.y[:0])).accuracy is None


def test_a_model_may_predict_a_class_that_no_test_example_has() -> None:
    y = torch.arange(12) % 3
    task = Task(lambda: torch.nn.Linear(3, 3))
    clients = [(torch.eye(3)[y], y)] * 3
    test = torch.eye(3)[[0, 2]], torch.tensor([0, 0])
    found = run(task, clients, FedAvg(lr=5.0, epochs=5), rounds=2, test=test)
    assert found.summary["metrics"]["all"]["confusion"] == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_a_client_made_with_another_number_of_examples_is_named() -> None:
    clients = make_clients()
    pairs = as_pairs(clients)
    lazy = LazyClients([5, 9, 1, 11, 7], pairs.__getitem__)
    with refuses("sizes", DataError, value=3):
        run(make_task(), lazy, METHOD, rounds=1, workers=1)


def test_nan_of_a_client_made_on_demand_names_the_client() -> None:
    pairs = as_pairs(make_clients())
    pairs[1] = (pairs[1][0].clone().index_fill_(0, torch.tensor([4]), float("nan")), pairs[1][1])
    lazy = LazyClients([5, 9, 1, 12, 7], pairs.__getitem__)
    with refuses("x", DataError, value=(1, 4)):
        run(make_task(), lazy, METHOD, rounds=1, workers=1)


def test_a_server_step_that_overflows_stops_and_names_the_layer(tmp_path: Path) -> None:
    clients = make_clients()
    clients.x = 100 * clients.x.float()
    task = Task(lambda: torch.nn.Sequential(torch.nn.Linear(6, 3)))
    with refuses("model", DivergedError, value="0.weight"):
        run(task, clients, FedSGD(lr=3e38), rounds=1, workers=1, results=tmp_path / "r")
    assert not (tmp_path / "r" / "summary.json").exists()


def test_a_loss_that_overflows_is_still_json(tmp_path: Path) -> None:
    clients = make_clients()
    clients.x = clients.x.float()
    task = Task(lambda: torch.nn.Sequential(torch.nn.Linear(6, 3)))
    test = (clients.x * 1e37, clients.y)
    result = run(task, clients, FedAvg(lr=1000.0), rounds=1, workers=1, test=test, results=tmp_path / "r")
    assert result.summary["loss"] is None
    for name in ("rounds.jsonl", "summary.json"):
        text = (tmp_path / "r" / name).read_text()
        assert "NaN" not in text
        assert "Infinity" not in text


def test_clients_made_on_demand_are_made_only_when_they_take_part() -> None:
    made: list[int] = []
    clients = make_clients()

    def make(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(client)
        part = clients.parts[client % 5]
        return clients.x[part], clients.y[part]

    sizes = [len(clients.parts[k % 5]) for k in range(100_000)]
    result = run(
        make_task(),
        LazyClients(sizes, make),
        FedAvg(batch_size=4),
        rounds=3,
        cohort=4,
        workers=1,
        noise="seeded",
        score_clients=False,
    )
    assert result.summary["rounds"] == 3
    assert len(made) == 1 + 3 * 4  # one is looked at to see whether the model can read it


def test_the_budget_stops_before_it_is_exceeded(tmp_path: Path) -> None:
    settings = PrivacySettings(delta=1e-5, budget=12.0, budget_adversary="server")
    result = go(tmp_path / "r", rounds=50, privacy=settings)
    spent = next(row for row in result.privacy["proven"] if row["adversary"] == "server")
    assert 0 < result.summary["rounds"] < 50
    assert spent["epsilon"] <= 12.0
    assert "budget" in result.summary["stopped"]


def test_evaluation_scores_the_model(tmp_path: Path) -> None:
    clients = make_clients()
    result = go(
        tmp_path / "r",
        method=FedAvg(lr=0.5, batch_size=4),
        rounds=20,
        test=(clients.x, clients.y),
        evaluate_every=7,
    )
    assert result.accuracy is not None
    assert result.accuracy > 0.6
    assert [line["round"] for line in result.history if "accuracy" in line] == [7, 14, 20]
    assert len(result.summary["per_class"]) == 3
    assert len(result.summary["per_client"]) == 5


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (lambda c: c.y.fill_(3), "y", 3),
        (lambda c: c.y.fill_(-1), "y", -1),
        (lambda c: setattr(c, "x", c.x.float()), "x", [6]),
        (lambda c: setattr(c, "x", c.x[:, :4]), "x", [4]),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(
    change: Callable[[ArrayClients], Any], field: str, value: object
) -> None:
    clients = make_clients()
    change(clients)
    with refuses(field, DataError, value=value):
        run(make_task(), clients, METHOD, rounds=1)


def test_nan_is_refused_where_it_enters() -> None:
    clients = make_clients()
    clients.x[3, 2] = float("nan")
    with refuses("x", DataError, value=(0, 3)):
        ArrayClients(clients.x, clients.y, clients.parts)


def test_too_few_answers_count_as_none() -> None:
    for wrong in ({"min_clients": 4}, {"min_clients": 2, "sampler": "poisson"}):
        with pytest.raises(InputError) as error:
            go(**wrong)
        assert error.value.field == "run.min_clients"
    assert go(min_clients=3).history[0]["answered"] == 3
