"""`deploy init` writes folders that work, and refuses what would not be safe."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")
from cryptography import x509

from fedveil.cli import app
from fedveil.cli.deploy import deploy
from fedveil.errors import FedveilError, InputError
from fedveil.experiment.config import load_config, make_config
from fedveil.federation.config import SERVER_FILE, NodeConfig, ServerConfig
from fedveil.federation.create import Federation, init
from fedveil.federation.node import open_node
from fedveil.federation.policy import Policy, RefusedError
from fedveil.federation.processes import environment, node_command, server_command, write_connection
from fedveil.privacy.accounting import account
from fedveil.privacy.releases import Plan
from fedveil.session.privacy_guard import declared
from fedveil.validation import read_toml
from tests.refusals import refuses


def with_data(folder: Path, records: int = 5) -> Path:
    rng = np.random.default_rng(0)
    np.savez(
        folder / "data.npz", x=rng.normal(size=(records, 4)).astype(np.float32), y=np.arange(records) % 2
    )
    return folder


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["deploy", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_every_node_of_a_new_federation_opens(tmp_path: Path) -> None:
    nodes = init(tmp_path / "f", Federation(nodes=3, names=("fl.example.org",), epsilon=4.0))
    assert [node.name for node in nodes] == ["node-0", "node-1", "node-2"]
    for number, folder in enumerate(nodes):
        node = open_node(with_data(folder))
        assert (node.client, node.noise) == (number, "entropy")
        (limit,) = node.guard.policy.limit
        assert (limit.unit, limit.adversary, limit.epsilon, limit.delta) == ("client", "server", 4.0, 1e-5)
        assert node.guard.policy.methods == ("udp-fedavg",)
    keys = {(node / "node.pub").read_text() for node in nodes}
    assert len(keys) == 3
    assert keys == {path.read_text() for path in (tmp_path / "f" / "server" / "keys").iterdir()}


def test_only_secrets_are_secret_and_the_authority_stays_apart(tmp_path: Path) -> None:
    init(tmp_path / "f", Federation(nodes=2))
    secret = {
        path.relative_to(tmp_path / "f").as_posix()
        for path in (tmp_path / "f").rglob("*")
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) == 0o600
    }
    assert secret == {
        "authority/ca.key",
        "server/server.key",
        "nodes/node-0/node.key",
        "nodes/node-1/node.key",
    }
    for folder in ("authority", "server", "nodes/node-0"):
        assert stat.S_IMODE((tmp_path / "f" / folder).stat().st_mode) == 0o700


def test_the_server_runs_with_tls_and_registered_nodes_only(tmp_path: Path) -> None:
    init(tmp_path / "f", Federation(nodes=2, names=("fl.example.org",), port=9000))
    folder = tmp_path / "f" / "server"
    config = read_toml(folder / SERVER_FILE, ServerConfig)
    words = server_command(config, folder)
    assert "--enable-supernode-auth" in words
    assert "--insecure" not in words
    assert "--disable-runtime-dependency-installation" in words
    for option, name in (("--ssl-certfile", "server.crt"), ("--ssl-keyfile", "server.key")):
        assert words[words.index(option) + 1] == str(folder / name)
    assert words[words.index("--host") + 1] == "0.0.0.0"
    home = write_connection(config, folder)
    text = (home / "config.toml").read_text()
    assert f'root-certificates = "{folder / "ca.crt"}"' in text
    assert 'address = "127.0.0.1:9000"' in text
    (folder / "server.key").chmod(0o640)
    with pytest.raises(InputError) as caught:
        server_command(config, folder)
    assert caught.value.field == "server.key"
    (folder / "server.key").unlink()
    with refuses("file"):
        server_command(config, folder)


def test_a_node_checks_the_server_and_shows_its_key(tmp_path: Path) -> None:
    (folder, _) = init(tmp_path / "f", Federation(nodes=2, names=("fl.example.org",), port=9000))
    config = read_toml(folder / "node.toml", NodeConfig)
    words = node_command(config, folder, 1234)
    assert words[words.index("--superlink") + 1] == "fl.example.org:9000"
    assert words[words.index("--root-certificates") + 1] == str(folder / "ca.crt")
    assert words[words.index("--auth-supernode-private-key") + 1] == str(folder / "node.key")
    assert words[words.index("--node-config") + 1] == f'fedveil-node="{folder}"'
    assert "--insecure" not in words
    (folder / "node.key").chmod(0o644)
    with refuses("connection.key"):
        node_command(config, folder, 1234)


def test_insecure_is_for_loopback_only(tmp_path: Path) -> None:
    (folder, _) = init(tmp_path / "local", Federation(nodes=2, insecure=True))
    words = node_command(read_toml(folder / "node.toml", NodeConfig), folder, 1234)
    assert "--insecure" in words
    assert "--root-certificates" not in words
    assert "Without TLS" in (tmp_path / "local" / "README.md").read_text()
    with refuses("insecure"):
        init(tmp_path / "far", Federation(nodes=2, names=("fl.example.org",), insecure=True))
    assert not (tmp_path / "far").exists(), "nothing is written if anything is refused"
    server = tmp_path / "local" / "server" / SERVER_FILE
    server.write_text(server.read_text().replace('listen = "127.0.0.1"', 'listen = "0.0.0.0"'))
    with refuses("insecure"):
        read_toml(server, ServerConfig)


def test_telemetry_and_update_checks_are_off(tmp_path: Path) -> None:
    env = environment(tmp_path)
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert env["RAY_USAGE_STATS_ENABLED"] == "0"
    assert env["FLWR_HOME"] == str(tmp_path)


def test_a_method_that_proves_nothing_needs_no_limit(tmp_path: Path) -> None:
    with refuses("--method"):
        command("init", str(tmp_path / "f"), "--nodes", "2", "--method", "fedavg")
    command("init", str(tmp_path / "f"), "--nodes", "2", "--method", "fedavg", "--no-limit")
    assert open_node(with_data(tmp_path / "f" / "nodes" / "node-1")).guard.policy.limit == ()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--nodes", "1"], "--nodes"),
        (["--nodes", "2", "--method", "nonsense"], "method.name"),
        (["--nodes", "2", "--delta", "2"], "delta"),
        (["--nodes", "2", "--epsilon", "-1"], "--epsilon"),
        (["--nodes", "2", "--reader", "pictures"], "data.classes"),
        (["--nodes", "2", "--server", "not a name"], "--server"),
        (["--nodes", "2", "--server", "[2001:db8::1]"], "--server"),
        (["--nodes", "2", "--method", "udp-fedavg", "--method", "fedlap-dp"], "--method"),
        (["--nodes", "2", "--reader", "table", "--schema", "nowhere.toml"], "file"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[str], field: str
) -> None:
    with refuses(field, FedveilError):
        command("init", str(tmp_path / "f"), *arguments)
    assert not (tmp_path / "f").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with refuses("DIR"):
        command("init", str(tmp_path), "--nodes", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_tables_share_one_form(tmp_path: Path) -> None:
    public = tmp_path / "public.csv"
    public.write_text("a,b,y\n1,x,no\n3,z,yes\n")
    form = tmp_path / "schema.toml"
    assert "2 columns, 2 classes" in command("schema", str(public), "--label", "y", "--out", str(form))
    command("init", str(tmp_path / "f"), "--nodes", "2", "--reader", "table", "--schema", str(form))
    node = tmp_path / "f" / "nodes" / "node-0"
    (node / "data.csv").write_text("y,b,a\nyes,x,2\n")
    examples = open_node(node).examples
    assert examples.x.tolist() == [[0.0, 1.0, 0.0]]
    assert examples.y.tolist() == [1]


def test_scripts_and_units_are_well_formed(tmp_path: Path) -> None:
    (folder, _) = init(tmp_path / "f", Federation(nodes=2))
    assert os.access(folder / "start.sh", os.X_OK)
    subprocess.run(["sh", "-n", str(folder / "start.sh")], check=True)
    unit = (folder / "fedveil-node-0.service").read_text()
    assert "ExecStart=/opt/fedveil/venv/bin/fedveil deploy node /opt/fedveil/node-0" in unit
    assert "ReadWritePaths=/opt/fedveil/node-0" in unit
    readme = (tmp_path / "f" / "README.md").read_text()
    assert "127.0.0.1:8443" in readme
    assert "Without TLS" not in readme
    assert len(readme.splitlines()) < 50, "one page"
    named = {
        word
        for word in ("init", "server", "node", "submit", "status", "stop", "certificate")
        if f"deploy {word}" in readme
    }
    assert "certificate" in named
    known = {entry.name for entry in deploy.registered_commands}
    assert named <= known


def test_a_certificate_is_renewed_for_the_names_of_the_file_by_its_own_authority(tmp_path: Path) -> None:
    init(tmp_path / "f", Federation(nodes=2, names=("fl.example.org",)))
    init(tmp_path / "other", Federation(nodes=2))
    server = tmp_path / "f" / "server"
    before = {name: (server / name).read_bytes() for name in ("server.key", "server.crt")}
    with refuses("authority"):
        command("certificate", str(tmp_path / "other" / "authority"), str(server))
    with refuses("authority"):
        command("certificate", str(tmp_path), str(server))
    assert before == {name: (server / name).read_bytes() for name in before}
    (server / SERVER_FILE).write_text(
        (server / SERVER_FILE).read_text().replace("fl.example.org", "new.example.org")
    )
    said = command("certificate", str(tmp_path / "f" / "authority"), str(server))
    assert "new.example.org" in said
    made = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    made.verify_directly_issued_by(
        x509.load_pem_x509_certificate((tmp_path / "f" / "nodes" / "node-0" / "ca.crt").read_bytes())
    )
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["new.example.org", "localhost"]
    assert (server / "server.key").read_bytes() != before["server.key"]
    assert stat.S_IMODE((server / "server.key").stat().st_mode) == 0o600
    assert not list(server.glob("new-*"))


def test_the_experiment_on_the_page_is_one_that_new_policies_admit(tmp_path: Path) -> None:
    """And the page says what it costs, and how many rounds remain."""
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "deploy.md").read_text()
    found = re.search(r"```toml title=\"experiment.toml\"\n(\[task\].*?)```", page, re.DOTALL)
    assert found is not None
    config = make_config(tomllib.loads(found[1]) | {"partition": {"clients": 2}}, ['run.engine="flower"'])
    node = init(tmp_path / "fed", Federation(nodes=2))[0]
    np.savez(node / "data.npz", x=np.zeros((700, 4), np.float32), y=np.arange(700) % 10)
    guard = open_node(node).guard
    plan = Plan(2, 2, config.run.sampler, 100, 700, 700)
    method = config.build_method()
    for number in range(1, config.run.rounds + 1):
        guard.admit("run", number, method, plan)
    (spent,) = guard.spent()
    assert spent.epsilon is not None
    assert f"costs {spent.epsilon:.2f} of it" in page
    assert "three more rounds" in page
    for number in (4, 5, 6):
        guard.admit("run", number, method, plan)
    with pytest.raises(RefusedError):
        guard.admit("run", 7, method, plan)


def test_policies_follow_from_an_experiment(tmp_path: Path) -> None:
    experiment = tmp_path / "e.toml"
    experiment.write_text(
        '[task]\ndataset = "none"\nmodel = "logistic"\ninput_shape = [3]\nclasses = 2\n[partition]\nclients = 2\n'
        '[method]\nname = "dp-fedavg"\nunit = "record"\nrecord_rate = 0.5\nnoise_multiplier = 4.0\n'
        '[run]\nrounds = 3\nsampler = "all"\nengine = "flower"\n[privacy]\ndelta = 1e-4\n'
    )
    command("init", str(tmp_path / "f"), "--nodes", "2", "--config", str(experiment))
    policy = read_toml(next((tmp_path / "f").rglob("policy.toml")), Policy)
    (limit,) = policy.limit
    assert policy.methods == ("dp-fedavg",)
    assert (limit.unit, limit.delta) == ("record", 1e-4)
    plan = Plan(2, 2, "all", 3, 1, 1)
    method = load_config(experiment).build_method()
    rows = account(declared(method, plan, deployed=True), plan, 1e-4)
    needed = next(r.epsilon for r in rows if r.unit == "record" and r.adversary == "server")
    assert needed is not None
    assert needed <= limit.epsilon <= 1.02 * needed  # one run passes, two do not


def test_a_method_that_proves_records_only_is_limited_for_records(tmp_path: Path) -> None:
    command("init", str(tmp_path / "f"), "--nodes", "2", "--method", "dp-fedavg", "--epsilon", "3")
    (limit,) = read_toml(next((tmp_path / "f").rglob("policy.toml")), Policy).limit
    assert (limit.unit, limit.epsilon) == ("record", 3.0)
