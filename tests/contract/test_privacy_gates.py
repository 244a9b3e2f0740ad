"""Gates that no change may pass unnoticed: audits below proofs, noise that is never shared, views without data."""

from __future__ import annotations

import gc
import itertools
import json
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedveil.cli.privacy  # noqa: F401  its commands register themselves on the app
from fedveil import METHODS, Plan
from fedveil.attack_runs.transcript import StoredRun, open_run, read_exchange, server_view
from fedveil.attacks.membership.threat_model import MembershipView
from fedveil.attacks.view import ServerView
from fedveil.cli import app
from fedveil.data.client_data import ArrayClients, ClientData, LazyClients
from fedveil.data.dataset import Dataset
from fedveil.errors import InputError
from fedveil.experiment.config import make_config, wrap_method
from fedveil.experiment.prepare import Prepared, prepare
from fedveil.experiment.run import run_seed
from fedveil.methods.method import AnyMethod, field_names
from fedveil.methods.wrappers import WRAPPERS
from fedveil.privacy.releases import Unprotected
from fedveil.streams import ClientStreams, ServerStreams

PLAN = Plan(20, 5, "fixed", 3, 50, 80)


NEEDED = {"sparse-vector": {"upload_epsilon": 2.0}}
"""What a choice cannot do without."""


def protects(method: AnyMethod) -> bool:
    """Whether it states a guarantee, which could be wrong."""
    return any(r.costs and not isinstance(r.protection, Unprotected) for r in method.releases(PLAN))


def choices(kind: type[AnyMethod]) -> Iterator[dict[str, Any]]:
    """The defaults, and every other value of each field that has a few: its words, or yes and no."""
    yield {}
    for field, hint in typing.get_type_hints(kind).items():
        if field in field_names(kind):
            words = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            for value in (True, False) if hint is bool else words:
                yield {field: value} | NEEDED.get(value, {})


def private_forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method with a guarantee, in every form that it declares differently."""
    for name in sorted(METHODS):
        told: list[Any] = []
        for fields in choices(METHODS[name]):
            method = METHODS[name](**fields)
            releases = tuple(method.releases(PLAN))
            if releases not in told and protects(method):
                yield name, fields
            told.append(releases)


FORMS = list(private_forms())
PRIVATE = sorted({name for name, _ in FORMS})


def private_wrappers() -> Iterator[tuple[str, str]]:
    """Every wrapper that fits a method and has a guarantee, the method's or its own."""
    for wrapper, name in itertools.product(
        sorted(WRAPPERS), ("fedsgd", "udp-fedavg", "fedceo", "dp-fedprox")
    ):
        try:
            method = wrap_method(METHODS[name](), [{"name": wrapper}])
        except InputError:
            continue
        if protects(method):
            yield wrapper, name


def finished(place: Path, method: dict[str, Any], wrap: Sequence[str] = ()) -> Path:
    config = make_config(
        {
            "task": {"dataset": "digits", "model": "mlp-2"},
            "partition": {"kind": "iid", "clients": 20},
            "method": method,
            "wrap": [{"name": wrapper} for wrapper in wrap],
            "run": {"rounds": 1, "cohort": 5, "transcript": True},
        }
    )
    folder = run_seed(config, 0, experiment="gates", results=place).folder
    assert folder is not None
    return folder


def quick(name: str) -> dict[str, Any]:
    """The method's defaults, with as little training as will do."""
    small = {"epochs": 1, "ipc": 1, "trajectories": 1, "max_steps": 2, "real_batches": 1, "image_updates": 1,
             "server_steps": 2, "matching_steps": 2}  # fmt: skip
    known = field_names(METHODS[name])
    return {"name": name} | {key: value for key, value in small.items() if key in known}


def test_the_gate_sees_every_private_method() -> None:
    assert {str(sorted(fields.items())) for name, fields in FORMS if name == "fedceo"} == {
        "[]", "[('noise_scope', 'local')]", "[('restart', 'mean')]", "[('restart', 'own')]", "[('unit', 'record')]"
    }  # fmt: skip
    assert ("dp-fedags-proven", {"variant": "sparse-vector", "upload_epsilon": 2.0}) in FORMS
    assert ("dp-fedavg", {"unit": "record"}) in FORMS
    assert ("dp-sgd", "fedsgd") in list(private_wrappers())
    assert {"udp-fedavg", "fedceo", "dp-fedavg", "dp-fedprox", "fedlap-dp", "psg", "cpsgd", "ppsgd",
            "centaur", "dp-fedags-proven", "dp-fedsgd"} <= set(PRIVATE)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields"),
    FORMS,
    ids=lambda part: "-".join(map(str, part.values())) if isinstance(part, dict) else part,
)
def test_no_audit_of_a_run_on_digits_exceeds_what_is_proven(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    passes(finished(tmp_path, quick(name) | fields))


@pytest.mark.parametrize(("wrapper", "name"), list(private_wrappers()))
def test_no_audit_of_a_wrapped_method_exceeds_what_is_proven(wrapper: str, name: str, tmp_path: Path) -> None:
    passes(finished(tmp_path, quick(name), [wrapper]))


def passes(folder: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(folder), "--samples", "300", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["audit"]["all"]
    assert rows
    for row in rows:
        assert row["lower_bound"] <= row["proven"]
        assert not row["broken"]


def test_no_two_noise_streams_are_alike() -> None:
    """Between clients, rounds, exchanges, purposes, seeds, and client and server."""
    draws: dict[str, np.ndarray] = {}
    for seed, round_, exchange in itertools.product((0, 1), (1, 2), (0, 1)):
        place = f"seed {seed} round {round_} exchange {exchange}"
        clients = ClientStreams(seed, round_, (0, 1), exchange)
        server = ServerStreams(seed, round_, exchange)
        for purpose in ("noise", "mask"):
            for client, stream in enumerate(clients.noise(purpose)):
                draws[f"{place} client {client} {purpose}"] = stream.standard_normal(4000)
            draws[f"{place} server {purpose}"] = server.noise(purpose).standard_normal(4000)
        for client, stream in enumerate(clients.of_exchange("noise")):
            draws[f"{place} client {client} training"] = stream.standard_normal(4000)
    correlation = np.corrcoef(np.stack(list(draws.values()))) - np.eye(len(draws))
    # |r| of independent draws is below 5.5 / sqrt(4000) in all of the 2,000 pairs but once in 10,000 times.
    assert float(np.abs(correlation).max()) < 5.5 / 4000**0.5


def reachable(root: object) -> Iterator[object]:
    """Everything that can be reached from `root`, but not through modules and classes, which all code shares."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (types.ModuleType, type)):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, types.FunctionType):  # its globals are its module's
            waiting.extend(cell.cell_contents for cell in item.__closure__ or ())
            waiting.extend((item.__defaults__, item.__kwdefaults__))
            continue
        waiting.extend(gc.get_referents(item))


def holds_private(view: object, clients: ArrayClients) -> bool:
    """Whether the clients' examples, or a container of them, can be reached from an attack's view."""
    private = {clients.x.untyped_storage().data_ptr(), clients.y.untyped_storage().data_ptr()}
    for item in reachable(view):
        if isinstance(item, (ArrayClients, LazyClients, ClientData, Dataset, Prepared, StoredRun)):
            return True
        if isinstance(item, torch.Tensor) and item.untyped_storage().data_ptr() in private:
            return True
    return False


@pytest.mark.parametrize("name", ["fedavg", "udp-fedavg", "fedem", "fedsgd", "dp-fedags", "fedceo"])
def test_no_private_tensor_is_reachable_from_what_an_inversion_sees(name: str, tmp_path: Path) -> None:
    run = open_run(finished(tmp_path, quick(name)))
    clients = run.prepared.clients
    assert isinstance(clients, ArrayClients)
    exchange = read_exchange(run, 1)
    view = server_view(run, exchange, exchange.clients[:1], examples=4)
    assert not holds_private(view, clients)


def test_no_private_tensor_is_reachable_from_what_membership_inference_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about examples, members and others alike; it has no way to the clients."""
    import fedveil.attack_runs.membership as module

    seen: list[object] = []

    @dataclass(frozen=True)
    class Watches:  # an attack is a dataclass of its settings
        def __call__(self, view: object, _rng: object) -> torch.Tensor:
            seen.append(view)
            return torch.zeros(len(view.asked.y))  # type: ignore[attr-defined]

    attacked: list[Prepared] = []

    def watched(*arguments: Any, **options: Any) -> Prepared:
        attacked.append(prepare(*arguments, **options))
        return attacked[-1]

    monkeypatch.setattr(module, "prepare", watched)
    monkeypatch.setattr(module, "make_membership_attack", lambda *_: Watches())
    module.attack_result(finished(tmp_path, quick("fedavg")), "confidence", examples=20)
    (view,) = seen
    assert isinstance(view, MembershipView)
    clients = attacked[0].clients  # the very ones whose examples were at hand
    assert isinstance(clients, ArrayClients)
    assert not holds_private(view, clients)


def test_the_search_detects_violations(tmp_path: Path) -> None:
    run = open_run(finished(tmp_path, quick("fedavg")))
    clients = run.prepared.clients
    assert isinstance(clients, ArrayClients)
    assert holds_private({"deep": [lambda: clients.x]}, clients)
    assert holds_private([clients.x[3:5].view(-1)], clients)
    assert not holds_private([clients.x.clone()], clients)


@pytest.mark.parametrize("view", [ServerView, MembershipView])
def test_no_field_of_a_view_is_of_a_type_that_holds_clients(view: type) -> None:
    hidden = (ArrayClients, LazyClients, ClientData, Dataset, Prepared)
    names = {"Tensor": torch.Tensor}  # modules import it for type checkers only
    for kind in typing.get_type_hints(view, localns=names).values():
        parts = {kind, *typing.get_args(kind)}
        assert not any(isinstance(part, type) and issubclass(part, hidden) for part in parts - {Any})
