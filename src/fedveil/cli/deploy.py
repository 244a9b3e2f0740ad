"""`fedveil deploy`: set up and run a federation."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from fedveil.cli.app import AsJson, Changes, ConfigFile, DataDir, Results, Seed, app, notes, out
from fedveil.cli.run import run
from fedveil.errors import InputError
from fedveil.privacy.releases import Adversary

if TYPE_CHECKING:
    from fedveil.federation.create import Asked

deploy = typer.Typer(
    help="Run a federation over several machines: TLS, registered nodes, a privacy policy on every node.",
    no_args_is_help=True,
)
app.add_typer(deploy, name="deploy")

ServerFolder = Annotated[Path, typer.Argument(help="The server's folder (with server.toml).")]
NodeFolder = Annotated[Path, typer.Argument(help="The node's folder (with node.toml and policy.toml).")]
EitherFolder = Annotated[Path, typer.Argument(help="The folder of a server or of a node.")]

_ServerNames = Annotated[
    list[str] | None,
    typer.Option(
        help="The server's name or address; the first is what nodes dial. Default: 127.0.0.1. May be repeated."
    ),
]


def _check_epsilon(given: float | None) -> float | None:
    if given is not None and not 0 < given < math.inf:
        raise InputError("--epsilon", given, "is not a positive number", "Use an epsilon above 0.")
    return given


_Epsilon = Annotated[
    float | None,
    typer.Option(
        help="The policies' limit, over all runs. Default: what the experiment needs, or 8.",
        callback=_check_epsilon,
    ),
]

_Experiment = Annotated[
    Path | None,
    typer.Option(
        help="An experiment whose method, unit, delta and epsilon the policies allow. Default: the options."
    ),
]

_Classes = Annotated[
    str | None, typer.Option(help="For pictures and texts: their classes, separated by commas.")
]


def _tell(text: str) -> None:
    print(f"fedveil: {text}", file=sys.stderr, flush=True)


@deploy.command(
    "init",
    epilog="Example: fedveil deploy init federation --nodes 3 --server fl.example.org "
    "--config experiment.toml",
)
def init_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes.")],
    server: _ServerNames = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the server listens.")] = 8443,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method that the policies allow. Default: udp-fedavg. May be repeated."),
    ] = None,
    adversary: Annotated[Adversary, typer.Option(help="Against whom the policies limit epsilon.")] = "server",
    epsilon: _Epsilon = None,
    delta: Annotated[
        float | None, typer.Option(help="The delta of that limit. Default: the experiment's, or 1e-5.")
    ] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Write policies without a limit.")] = False,
    minimum_cohort: Annotated[int, typer.Option(min=1, help="The fewest clients in a round.")] = 2,
    reader: Annotated[
        Literal["npz", "table", "pictures", "texts"], typer.Option(help="How the nodes' data is read.")
    ] = "npz",
    schema: Annotated[Path | None, typer.Option(help="For tables: the schema that all nodes share.")] = None,
    config: _Experiment = None,
    classes: _Classes = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and node keys; only on loopback.")
    ] = False,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="Make the nodes' identities for secure aggregation here too."),
    ] = False,
) -> None:
    """Write certificates, keys, configurations, policies, scripts and instructions for a new federation."""
    from fedveil.federation.processes import require_flower

    require_flower()
    from fedveil.federation.create import Federation, init

    asked = _asked(config, method or [], nodes, adversary, epsilon, delta)
    federation = Federation(
        nodes=nodes,
        names=tuple(server or ["127.0.0.1"]),
        port=port,
        methods=asked.methods,
        sections=asked.sections,
        adversary=adversary,
        epsilon=None if no_limit else asked.epsilon,
        delta=asked.delta,
        minimum_cohort=minimum_cohort,
        reader=reader,
        schema=schema,
        classes=tuple(part.strip() for part in classes.split(",")) if classes else (),
        insecure=insecure,
        trial=trial,
    )
    made = init(folder, federation)
    out.print(f"{len(made)} nodes; read {folder / 'README.md'}", soft_wrap=True)


def _asked(
    config: Path | None,
    methods: Sequence[str],
    nodes: int,
    adversary: Adversary,
    epsilon: float | None,
    delta: float | None,
) -> Asked:
    """What the policies must allow: by the experiment, or by the options alone."""
    from fedveil.experiment.config import load_config
    from fedveil.federation.create import Asked, asked_by

    if config is None:
        limit, chance = 8.0 if epsilon is None else epsilon, 1e-5 if delta is None else delta
        return Asked(tuple(methods or ["udp-fedavg"]), {}, limit, chance)
    if methods:
        raise InputError(
            "--method", list(methods), "conflicts with the experiment's method", "Leave one of them out."
        )
    return asked_by(load_config(config), nodes, adversary, epsilon, delta)


@deploy.command("schema", epilog="Example: fedveil deploy schema public.csv --label ill --out schema.toml")
def schema_command(
    table: Annotated[Path, typer.Argument(help="A CSV or Parquet table of public or invented rows.")],
    label: Annotated[str, typer.Option(help="The column to predict.")],
    output: Annotated[Path, typer.Option("--out", "-o", help="Where the schema goes.")] = Path("schema.toml"),
    categorical: Annotated[
        list[str] | None, typer.Option(help="A category even if it looks like a number. May be repeated.")
    ] = None,
    numeric: Annotated[
        list[str] | None,
        typer.Option(help="A measurement even if it looks like an identifier. May be repeated."),
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Leave this column out. May be repeated.")] = None,
    missing: Annotated[
        Literal["refuse", "drop", "median", "category"], typer.Option(help="What missing cells become.")
    ] = "refuse",
    decimal: Annotated[str, typer.Option(help="The decimal mark, '.' or ','.")] = ".",
    target: Annotated[
        Literal["classes", "number", "survival"], typer.Option(help="What the label column is.")
    ] = "classes",
    event: Annotated[
        str | None, typer.Option(help="For survival times: the column that is 1 for an event, else 0.")
    ] = None,
    interval: Annotated[
        list[float] | None, typer.Option(help="For survival times: the end of an interval. May be repeated.")
    ] = None,
) -> None:
    """Write the schema that the nodes' tables share: columns, means, deviations, categories, classes."""
    from fedveil.data.columns import ColumnOptions, schema_of
    from fedveil.data.schema import write_schema

    mark: Any = decimal  # checked with the other options
    options = ColumnOptions(
        *(categorical or (), numeric or (), drop or (), missing, mark),
        target=target,
        event=event,
        intervals=interval or (),
    )
    made = schema_of(table, label, options)
    write_schema(made, output)
    said = f"{len(made.classes)} classes" if made.classes else f"target {target}"
    out.print(f"{len(made.columns)} columns, {said} in {output}", soft_wrap=True)
    notes.print("for a server without data: give this file as task.data_options.schema")


@deploy.command(
    "certificate", epilog="Example: fedveil deploy certificate federation/authority federation/server"
)
def certificate_command(
    authority: Annotated[Path, typer.Argument(help="The authority's folder (with ca.key).")],
    folder: ServerFolder,
) -> None:
    """Create a new key and certificate of the server, for the names in server.toml; restart the server afterwards."""
    from fedveil.federation.certificates import SERVER_DAYS, renew_server_certificate
    from fedveil.federation.config import SERVER_FILE, ServerConfig
    from fedveil.validation import read_toml

    names = read_toml(folder / SERVER_FILE, ServerConfig).names
    renew_server_certificate(authority, folder, names)
    out.print(
        f"valid for {SERVER_DAYS} days as {', '.join(names)}; restart the server",
        soft_wrap=True,
    )


@deploy.command("server", epilog="Example: fedveil deploy server federation/server")
def server_command(folder: ServerFolder) -> None:
    """Run the server in the foreground; the nodes whose keys are in keys/ may connect."""
    from fedveil.federation.processes import run_server

    raise typer.Exit(run_server(folder, _tell))


@deploy.command("node", epilog="Example: fedveil deploy node nodes/node-0")
def node_command(folder: NodeFolder) -> None:
    """Run a node in the foreground, on its own data and under its own policy."""
    from fedveil.federation.processes import run_node

    run_node(folder, _tell)


@deploy.command("join", epilog="Example: fedveil deploy join nodes/node-0")
def join_command(
    folder: NodeFolder,
    rotate: Annotated[bool, typer.Option("--rotate", help="Replace an existing identity.")] = False,
) -> None:
    """Make a node's identity for secure aggregation, on the node; identity.toml goes to the coordinator."""
    from fedveil.federation.identity_files import PUBLIC_FILE, join

    entry = join(folder, rotate=rotate)
    out.print(
        f"node {entry.name}: public key {entry.key.hex()}; give {folder / PUBLIC_FILE} to the coordinator",
        soft_wrap=True,
    )


@deploy.command("roster", epilog="Example: fedveil deploy roster server --add node-0.toml --add node-1.toml")
def roster_command(
    folder: ServerFolder,
    add: Annotated[list[Path] | None, typer.Option(help="A node's identity.toml. May be repeated.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option(help="A node that leaves or is revoked. May be repeated.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Allow another key for a registered node.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Collect the nodes' public keys for secure aggregation, and show the digest that operators compare."""
    from fedveil.federation.identity_files import ROSTER_FILE, change_roster, read_roster

    path = folder / ROSTER_FILE
    changed = bool(add or remove)
    listed = change_roster(path, add or (), remove or (), replace=replace) if changed else read_roster(path)
    nodes = [{"node": e.name, "client": e.client, "key": e.key.hex()} for e in listed.entries]
    if as_json:
        print(json.dumps({"digest": listed.digest, "nodes": nodes}))
        return
    out.print(_rows("roster", nodes))
    out.print(f"digest {listed.digest}", soft_wrap=True)


@deploy.command("trust", epilog="Example: fedveil deploy trust nodes/node-0 roster.toml --digest 3f0c...")
def trust_command(
    folder: NodeFolder,
    roster: Annotated[Path, typer.Argument(help="The coordinator's roster.toml.")],
    digest: Annotated[
        str, typer.Option(help="The digest that the operators agreed on, not through the server.")
    ],
) -> None:
    """Make this roster the node's own, if it has the digest; the node then joins secure sums of these nodes only."""
    from fedveil.federation.identity_files import trust

    listed = trust(folder, roster, digest)
    out.print(f"{len(listed.entries)} nodes, digest {listed.digest}", soft_wrap=True)


@deploy.command("check", epilog="Example: fedveil deploy check nodes/node-0")
def check_command(folder: NodeFolder, as_json: AsJson = False) -> None:
    """Check a node's data against the declaration in node.toml, without contacting the server."""
    from fedveil.federation.node import checked_node, unknown_in
    from fedveil.federation.processes import unknown_said

    node = checked_node(folder)
    declared, unknown = asdict(node.declared), unknown_in(node)
    answer = {"node": node.name, "examples": len(node.held), "declared": declared} | (
        {"unknown_categories": unknown} if unknown else {}
    )
    if as_json:
        print(json.dumps(answer))
        return
    said = ", ".join(f"{key} {value}" for key, value in declared.items() if value is not None)
    out.print(f"node {node.name}: {len(node.held)} examples, as declared ({said})", soft_wrap=True)
    for column, rows in unknown.items():
        out.print(unknown_said(column, rows), soft_wrap=True)


@deploy.command("submit", epilog="Example: fedveil deploy submit federation/server experiment.toml")
def submit_command(
    folder: ServerFolder,
    config: ConfigFile,
    changes: Changes = None,
    seed: Seed = None,
    results: Results = Path("results"),
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment on this server's nodes and wait for its result; run it on the server itself.

    The clients are the nodes, each with its own data: the configuration's data set is only the server's test data.
    """
    from fedveil.federation.config import SERVER_FILE
    from fedveil.federation.processes import running_process

    state = _state(folder)
    if not (folder / SERVER_FILE).exists() or running_process(state) is None:
        raise InputError(
            "folder", str(folder), "no server is running there", "Run `fedveil deploy server` first."
        )
    nodes = len(list((folder / "keys").glob("*.pub")))
    fixed = ['run.engine="flower"', f"run.federation={json.dumps(str(folder.absolute()))}"]
    run(
        config, [f"partition.clients={nodes}", *(changes or []), *fixed], seed, results, data, as_json=as_json
    )


@deploy.command("cancel", epilog="Example: fedveil deploy cancel federation/server")
def cancel_command(
    folder: ServerFolder,
    number: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Its number in `deploy status`; default: the only active one."),
    ] = None,
) -> None:
    """Cancel one run: its nodes charge nothing more for it. The server and the nodes continue."""
    from fedveil.federation.processes import cancel_run, running_process

    if running_process(_state(folder)) is None:
        raise InputError(
            "folder", str(folder), "no server is running there", "Run `fedveil deploy server` first."
        )
    cancelled = cancel_run(folder.absolute(), number)
    out.print(
        f"run {cancelled} is cancelled; charged rounds stay charged. Submitting it again resumes it.",
        soft_wrap=True,
    )


@deploy.command("stop", epilog="Example: fedveil deploy stop federation/server")
def stop_command(folder: EitherFolder) -> None:
    """Stop the server or node of this folder."""
    from fedveil.federation.processes import stop

    state = _state(folder)
    out.print("stopped" if stop(state) else "was not running")


@deploy.command("status", epilog="Example: fedveil deploy status nodes/node-0")
def status_command(folder: EitherFolder, as_json: AsJson = False) -> None:
    """Show the nodes and runs of a server, or what a node has spent of its limits."""
    from fedveil.federation.config import NODE_FILE

    answer = _node_status(folder) if (folder / NODE_FILE).exists() else _server_status(folder)
    if as_json:
        print(json.dumps(answer))
        return
    for key, value in answer.items():
        if isinstance(value, list) and value:
            out.print(_rows(key, value))
        elif not isinstance(value, list):
            out.print(f"{key}: {value}")


def _rows(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    return table


def _shown(value: object) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _state(folder: Path) -> Path:
    from fedveil.federation.config import NODE_FILE, SERVER_FILE, NodeConfig, ServerConfig
    from fedveil.validation import read_toml

    if (folder / NODE_FILE).exists():
        return folder / read_toml(folder / NODE_FILE, NodeConfig).state
    if (folder / SERVER_FILE).exists():
        return folder / read_toml(folder / SERVER_FILE, ServerConfig).state
    raise InputError(
        "folder",
        str(folder),
        "holds neither server.toml nor node.toml",
        "Give the folder of a server or a node.",
    )


def _node_status(folder: Path) -> dict[str, Any]:
    from fedveil.federation.node import open_node
    from fedveil.federation.processes import running_process

    node = open_node(folder)
    limits = [
        {
            "unit": spent.limit.unit,
            "adversary": spent.limit.adversary,
            "delta": spent.limit.delta,
            "limit": spent.limit.epsilon,
            "spent": spent.epsilon,
        }
        for spent in node.guard.spent()
    ]
    return {
        "node": node.name,
        "client": node.client,
        "running": running_process(node.state) is not None,
        "examples": len(node.held),
        "noise": node.noise,
        "releases": len(node.guard.ledger),
        "limits": limits,
    }


def _server_status(folder: Path) -> dict[str, Any]:
    from fedveil.federation.processes import listed_nodes, listed_runs, node_names, running_process

    state = _state(folder)
    folder = folder.absolute()
    if running_process(state) is None:
        return {"running": False}
    names = node_names(folder)
    nodes = [
        {
            "node": names.get(str(node["node-id"]), "?"),
            "id": str(node["node-id"]),
            "status": node["status"],
            "since": node["online-at"] if node["status"] == "online" else node["offline-at"],
        }
        for node in listed_nodes(folder)
    ]
    runs = [
        {"run": str(run["run-id"]), "status": run["status"], "started": run["running-at"]}
        for run in listed_runs(folder)
    ]
    return {"running": True, "nodes": nodes, "runs": runs}
