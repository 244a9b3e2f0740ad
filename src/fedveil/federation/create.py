"""`fedveil deploy init`: everything the operators of a server and its nodes need, in one folder to be distributed."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedveil.data.schema import read_schema
from fedveil.errors import InputError
from fedveil.experiment.config import Config, build_method
from fedveil.experiment.target import with_target_noise
from fedveil.federation import templates
from fedveil.federation.certificates import (
    SERVER_DAYS,
    make_authority,
    make_node_key,
    make_server_certificate,
    write_new,
)
from fedveil.federation.config import (
    HOST,
    NODE_FILE,
    POLICY_FILE,
    SERVER_FILE,
    NodeConfig,
    Reader,
    ServerConfig,
    is_loopback,
)
from fedveil.federation.identity_files import PUBLIC_FILE, ROSTER_FILE, change_roster, join, trust
from fedveil.federation.policy import Policy
from fedveil.methods.method import AnyMethod, field_names
from fedveil.privacy.accounting import Guarantee, account
from fedveil.privacy.releases import Adversary, Plan, Unit
from fedveil.session.privacy_guard import declared, unit_of
from fedveil.validation import parse_content


@dataclass(frozen=True)
class Federation:
    """The options of `deploy init`."""

    nodes: int
    names: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8443
    methods: tuple[str, ...] = ("udp-fedavg",)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The `[method]` sections of methods with given fields."""
    adversary: Adversary = "server"
    epsilon: float | None = 8.0
    """The initial limit of each node's policy; None writes policies without a limit."""
    delta: float = 1e-5
    minimum_cohort: int = 2
    reader: Reader = "npz"
    schema: Path | None = None
    classes: tuple[str, ...] = ()
    insecure: bool = False
    trial: bool = False
    """Also create the nodes' identities for secure sums. Whoever creates them can impersonate every node."""


@dataclass(frozen=True)
class Asked:
    """The policy settings that an experiment or the command line requires."""

    methods: tuple[str, ...]
    sections: Mapping[str, Mapping[str, Any]]
    epsilon: float | None
    delta: float


def asked_by(
    config: Config, nodes: int, adversary: Adversary, epsilon: float | None, delta: float | None
) -> Asked:
    """The method of an experiment, and the limit that one run of it needs; explicit options take precedence."""
    delta = config.privacy.delta if delta is None else delta
    cohort = nodes if config.run.sampler == "all" else min(nodes, config.run.cohort or nodes)
    plan = Plan(nodes, cohort, config.run.sampler, config.run.rounds, 1, 1)
    settled = with_target_noise(config, plan)
    method = build_method(settled.method)
    if epsilon is None:
        unit = unit_of(method, plan)
        rows = account(declared(method, plan, deployed=True), plan, delta)
        found = [r.epsilon for r in rows if r.unit == unit and r.adversary == adversary]
        # Rounded up to three digits, so that the limit allows the run.
        epsilon = None if not found or found[0] is None else _rounded_up(found[0])
        epsilon = 8.0 if epsilon is None else epsilon  # the method is refused below, with the reason
    return Asked((method.name.split("+")[0],), {method.name.split("+")[0]: settled.method}, epsilon, delta)


def _rounded_up(value: float) -> float:
    digits = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return float(f"{math.ceil(value / digits) * digits:.6g}")


def _sections(federation: Federation, name: str) -> list[Mapping[str, Any]]:
    """Candidate sections of a method: the experiment's; else the defaults, or record level if supported."""
    if name in federation.sections:
        return [federation.sections[name]]
    plain = {"name": name}
    return [plain, plain | {"unit": "record"}] if "unit" in field_names(build_method(plain)) else [plain]


def limited_units(federation: Federation) -> list[Unit]:
    """The units that the methods protect; refuses methods that prove nothing, since any limit refuses them."""
    units: dict[Unit, None] = {}
    plan = Plan(federation.nodes, federation.nodes, "all", 1, 1, 1)
    for name in federation.methods:
        meant = [build_method(section) for section in _sections(federation, name)]
        found = [(unit_of(method, plan), _row(federation, method, plan)) for method in meant]
        unit, row = next((pair for pair in found if pair[1] and pair[1].epsilon is not None), found[0])
        units[unit] = None
        if federation.epsilon is not None and (row is None or row.epsilon is None):
            reason = "nothing is declared" if row is None else row.reason
            raise InputError(
                "--method",
                name,
                f"proves nothing against the {federation.adversary}, so any limit refuses it: {reason}",
                "Choose another method or adversary, or write policies without a limit with --no-limit.",
            )
    if len(units) > 1 and federation.epsilon is not None:
        raise InputError(
            "--method",
            list(federation.methods),
            "they protect different units, and a limit is on one",
            "Give methods of one unit, or edit the policies afterwards.",
        )
    return list(units)


def _row(federation: Federation, method: AnyMethod, plan: Plan) -> Guarantee | None:
    """The guarantee of this method for its unit against the federation's adversary."""
    unit = unit_of(method, plan)
    rows = account(tuple(method.releases(plan)), plan, federation.delta)
    return next((r for r in rows if r.unit == unit and r.adversary == federation.adversary), None)


def init(folder: Path, federation: Federation) -> list[Path]:
    """Write the folder; returns the folders of the nodes. If any setting is refused, nothing is written."""
    _check(folder, federation)
    units = limited_units(federation)
    server = _server(federation)
    parse_content(server, ServerConfig, Path(SERVER_FILE))
    policy = _policy(federation, units)
    parse_content(policy, Policy, Path(POLICY_FILE))
    contents = [_node(federation, number) for number in range(federation.nodes)]
    for content in contents:
        parse_content(content, NodeConfig, Path(NODE_FILE))

    _write_server(folder, federation, server)
    nodes = [_write_node(folder, federation, content, policy) for content in contents]
    if federation.trial:
        _write_roster(folder / "server", nodes)
    readme = templates.README.format(
        nodes=federation.nodes,
        warning=templates.INSECURE if federation.insecure else "",
        days=SERVER_DAYS,
        address=f"{federation.names[0]}:{federation.port}",
        last=nodes[-1].name,
        data=contents[0]["data"]["path"],
    )
    write_new(folder / "README.md", readme.encode())
    return nodes


def _check(folder: Path, federation: Federation) -> None:
    """Refuse settings that are inconsistent or would overwrite files."""
    if federation.nodes < federation.minimum_cohort:
        raise InputError(
            "--nodes",
            federation.nodes,
            f"the policies require a cohort of at least {federation.minimum_cohort}",
            f"Use at least {federation.minimum_cohort} nodes.",
        )
    if folder.exists() and any(folder.iterdir()):
        raise InputError(
            "DIR", str(folder), "is not empty", "Choose another folder; keys are never overwritten."
        )
    for name in federation.names:
        if not re.fullmatch(HOST, name):
            raise InputError(
                "--server",
                name,
                "is neither a host name nor an IPv4 address",
                "Use a name such as fl.example.org.",
            )
    if federation.schema is not None:
        read_schema(federation.schema)


def _server(federation: Federation) -> dict[str, Any]:
    local = all(is_loopback(name) for name in federation.names)
    return {
        "listen": "127.0.0.1" if local else "0.0.0.0",
        "port": federation.port,
        "names": list(federation.names),
        "insecure": federation.insecure,
        "clients": {f"node-{number}": number for number in range(federation.nodes)},
    }


def _write_server(folder: Path, federation: Federation, server: dict[str, Any]) -> None:
    """Write the authority and the server's folder, with a folder for the nodes' public keys."""
    authority, place = folder / "authority", folder / "server"
    for made in (authority, place, place / "keys"):
        made.mkdir(parents=True, mode=0o700)
    ca_key, ca = make_authority(authority)
    make_server_certificate(place, federation.names, ca_key, ca)
    shutil.copyfile(authority / "ca.crt", place / "ca.crt")
    settings = templates.SERVER.format(days=SERVER_DAYS).encode() + tomli_w.dumps(server).encode()
    write_new(place / SERVER_FILE, settings)
    _scripts(place, "server", "fedveil-server")


def _write_node(
    folder: Path, federation: Federation, content: dict[str, Any], policy: dict[str, Any]
) -> Path:
    """Write a node's folder, and its public key into the server's folder."""
    name = str(content["name"])
    own = folder / "nodes" / name
    own.mkdir(parents=True, mode=0o700)
    public = make_node_key(own)
    write_new(folder / "server" / "keys" / f"{name}.pub", public + b"\n")
    shutil.copyfile(folder / "authority" / "ca.crt", own / "ca.crt")
    if federation.schema is not None:
        shutil.copyfile(federation.schema, own / "schema.toml")
    write_new(own / NODE_FILE, templates.NODE.encode() + tomli_w.dumps(content).encode())
    write_new(own / POLICY_FILE, templates.POLICY.encode() + tomli_w.dumps(policy).encode())
    _scripts(own, "node", f"fedveil-{name}")
    return own


def _write_roster(server: Path, nodes: Sequence[Path]) -> None:
    """Write an identity for each node, and their roster to all folders; for trials run by one person."""
    for node in nodes:
        join(node)
    listed = change_roster(server / ROSTER_FILE, [node / PUBLIC_FILE for node in nodes])
    for node in nodes:
        trust(node, server / ROSTER_FILE, listed.digest)


def _node(federation: Federation, number: int) -> dict[str, Any]:
    paths = {"npz": "data.npz", "table": "data.csv", "pictures": "pictures", "texts": "data.tsv"}
    data: dict[str, object] = {"reader": federation.reader, "path": paths[federation.reader]}
    if federation.reader == "table":
        data["schema"] = "schema.toml"
    if federation.classes:
        data["classes"] = list(federation.classes)
    connection = {
        "address": f"{federation.names[0]}:{federation.port}",
        "ca": "ca.crt",
        "key": "node.key",
        "insecure": federation.insecure,
    }
    return {"name": f"node-{number}", "client": number, "data": data, "connection": connection}


def _policy(federation: Federation, units: Sequence[Unit]) -> dict[str, Any]:
    limits = [
        {
            "unit": unit,
            "adversary": federation.adversary,
            "epsilon": federation.epsilon,
            "delta": federation.delta,
        }
        for unit in units
        if federation.epsilon is not None
    ]
    return {
        "methods": list(federation.methods),
        "minimum_cohort": federation.minimum_cohort,
        "maximum_message": 256 << 20,
        "maximum_steps": 5_000_000,
        "limit": limits,
    }


def _scripts(folder: Path, role: str, service: str) -> None:
    write_new(folder / "start.sh", templates.START.format(role=role).encode(), 0o755)
    unit = templates.UNIT.format(role=role, name=folder.name)
    write_new(folder / f"{service}.service", unit.encode())
