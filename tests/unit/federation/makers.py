"""Node folders for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

POLICY = """
methods = ["udp-fedavg", "fedavg", "fedsgd", "fedceo", "fedlap-dp"]
minimum_cohort = 2
[[limit]]
unit = "client"
adversary = "server"
epsilon = 20.0
delta = 1e-5
"""
OPEN_POLICY = 'methods = ["udp-fedavg", "fedavg", "fedsgd"]\nminimum_cohort = 2\n'


def node_folder(
    folder: Path, *, policy: str = POLICY, client: int = 0, records: int = 12, extra: str = ""
) -> Path:
    """A node with `records` examples of eight features in an .npz file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(client)
    x = rng.normal(size=(records, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=np.arange(records) % 3)
    (folder / "node.toml").write_text(
        f'name = "node-{client}"\nclient = {client}\n[data]\nreader = "npz"\npath = "data.npz"\n{extra}'
    )
    (folder / "policy.toml").write_text(policy)
    return folder
