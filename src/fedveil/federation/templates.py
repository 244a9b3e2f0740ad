"""The texts that `fedveil deploy init` writes."""

from __future__ import annotations

SERVER = """\
# The server. `names` are in its certificate, which ends after {days} days: to change or renew it, see README.md.
# Nodes may connect from anywhere; runs are submitted on this machine only.
# [clients]: the place of each node, by the name of its key in keys/. Whoever claims another is refused.
"""

NODE = """\
# This node, as its own operator wants it. The server neither sees nor changes this file.
# [data] says where the examples are and how they are read: see docs/deploy.md. Its keys records, classes and labels
# are public; without records, the number of examples is. `fedveil deploy check .` compares the data with them.
"""

POLICY = """\
# What this node agrees to. It refuses everything else, whatever the server says, and charges each round to its own
# ledger (state/ledger.jsonl) before it computes anything. A limit holds over all runs that ever were.
# Against the "server" a limit relies on nobody. Against an "observer" or a "client" it relies on the server
# publishing only the aggregate of as many nodes as it announced.
"""

START = """\
#!/bin/sh
# Runs in the foreground; stop it with Ctrl-C or `fedveil deploy stop`.
cd "$(dirname "$0")" && exec fedveil deploy {role} . "$@"
"""

UNIT = """\
# Expects this folder in /opt/fedveil/{name} and fedveil installed in /opt/fedveil/venv.
[Unit]
Description=fedveil {role} ({name})
After=network-online.target
Wants=network-online.target

[Service]
User=fedveil
WorkingDirectory=/opt/fedveil/{name}
Environment=PATH=/opt/fedveil/venv/bin:/usr/bin:/bin
ExecStart=/opt/fedveil/venv/bin/fedveil deploy {role} /opt/fedveil/{name}
Restart=on-failure
RestartSec=10
UMask=0077
NoNewPrivileges=true
PrivateTmp=true
PrivateDevices=true
ProtectHome=true
ProtectSystem=strict
ReadWritePaths=/opt/fedveil/{name}

[Install]
WantedBy=multi-user.target
"""

INSECURE = """
**Without TLS and node keys (`--insecure`): on this machine only, for trying things out. The keys and certificates in
these folders are not used.**
"""

README = """\
# A federation of {nodes} nodes
{warning}
| folder | goes to | secret in it |
|---|---|---|
| `authority/` | a safe place, offline: it is only needed for a new server certificate | `ca.key` |
| `server/` | the server, reached by the nodes as {address} | `server.key` |
| `nodes/node-0/` to `nodes/{last}/` | one to each node's operator | `node.key` |

Give each operator only its own folder, over a channel you trust. An operator who prefers to make the key on the node
runs `rm node.key node.pub; ssh-keygen -t ecdsa -b 384 -N "" -f node.key` in the node's folder and sends you
`node.key.pub`, which replaces `server/keys/NAME.pub`.

## Each node's operator

1. Install fedveil with its extra `flower`, the same version everywhere: `pip install ".[flower]"` in a clone of it.
2. Put the data at `{data}`, or change `[data]` in `node.toml`. Declare there what may be known of it (`records`,
   `classes`, `labels`) and compare: `fedveil deploy check .`
3. Read `policy.toml` and change it until you can answer for it: methods, minimum cohort, limits on epsilon.
4. `./start.sh` in the node's folder (or install the `.service` file). No port has to be opened: the node calls.
5. `fedveil deploy status .` shows what has been spent of each limit.

Keep `state/` and back it up: it records all releases. A node whose ledger is damaged refuses to work.

## The server's operator

1. Open the port of {address} to the nodes.
2. `./start.sh` in `server/` (or install the `.service` file). Only nodes with keys in `server/keys/` may connect.
3. `fedveil deploy submit server experiment.toml --results server/results` on the server starts a run once all nodes
   are online, or after ten minutes with those that are. The server writes the results, so give a folder where it may
   write; with the `.service` file submit as its user: `sudo -u fedveil`. `experiment.toml`: see `docs/deploy.md`.
4. The run's folder holds `federation.log`: who joined, who dropped out of a round, and why. Unregistered nodes are in
   the server's own log, by address and key (compare `ssh-keygen -lf node.pub`).
5. `fedveil deploy status server` lists nodes and runs, `fedveil deploy cancel server` cancels a run: its nodes charge
   nothing more. `fedveil deploy stop server` ends the server. A run that was interrupted resumes when it is submitted
   again.

The server's certificate ends after {days} days. Before that, or after a change of `names` in `server.toml`:
`fedveil deploy certificate authority server`, where both folders are, then restart the server. Nodes need nothing new.

To add a node later, make its folder like another node's, with a key, a name and a `client` number of its own, add its
public key to `server/keys/` as NAME.pub and `NAME = NUMBER` to `[clients]` in `server.toml`, and restart the server.
"""
