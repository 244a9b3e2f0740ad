"""Nodes with identities and a roster, in this process: what tests of secure sums over Flower start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedveil.experiment.config import Config, make_config
from fedveil.federation.client_app import app as client_app
from fedveil.federation.config import ROSTER
from fedveil.federation.identity_files import PUBLIC_FILE, ROSTER_FILE, change_roster, join, trust
from fedveil.federation.launch import with_shape
from fedveil.federation.run_settings import RunSettings
from fedveil.federation.server_app import app as server_app
from fedveil.methods import METHODS
from fedveil.session.results import Result, ResultFolder
from tests.engines.configs import quick_config
from tests.engines.grid import Fault, InMemoryNodes
from tests.engines.test_deployed_nodes import write_nodes

NODES = 5


def secure_config(
    name: str = "udp-fedavg", engine: str = "flower", **changes: Mapping[str, object]
) -> Config:
    content = quick_config(name, engine, clients=NODES, cohort=NODES).model_dump(exclude_none=True)
    content["run"] |= {"sampler": "all"} | dict(changes.get("run", {}))
    content["aggregation"] = {"kind": "secure"} | dict(changes.get("aggregation", {}))
    for section in ("method", "partition", "task"):
        content[section] |= dict(changes.get(section, {}))
    if "partition" in changes:
        content["run"]["cohort"] = content["partition"]["clients"]
    return make_config(content)


def write_secure_nodes(
    place: Path, *, seeded: bool = True, colluders: int = 1, count: int = NODES
) -> list[Path]:
    """A folder for each node with the simulator's examples, an identity of its own and the roster of all."""
    policy = {"methods": sorted(METHODS), "minimum_cohort": 1, "colluders": colluders}
    folders = write_nodes(place, seeded=seeded, policies=dict.fromkeys(range(count), policy), count=count)
    for folder in folders:
        join(folder)
    listed = change_roster(place / ROSTER_FILE, [folder / PUBLIC_FILE for folder in folders])
    for folder in folders:
        trust(folder, place / ROSTER_FILE, listed.digest)
    return folders


def grid_of(
    config: Config, folders: Sequence[Path], results: Path, faults: Mapping[int, Fault] | None = None
) -> tuple[InMemoryNodes, RunSettings]:
    settings = RunSettings(with_shape(config, None), 0, "test", results, None, "seeded")
    nodes = [{"fedveil-node": str(folder)} for folder in folders]
    return InMemoryNodes(client_app, nodes, settings.to_run_config(), faults), settings


def run_securely(
    config: Config,
    folders: Sequence[Path],
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    faults: Mapping[int, Fault] | None = None,
    watch: Callable[[InMemoryNodes], None] = lambda _grid: None,
) -> Result:
    monkeypatch.setenv(ROSTER, str(folders[0].parent / ROSTER_FILE))
    grid, settings = grid_of(config, folders, results, faults)
    watch(grid)
    server_app(grid, Context(1, 1, {}, RecordDict(), dict(settings.to_run_config())))
    return ResultFolder(settings.folder).read()
