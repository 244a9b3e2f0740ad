"""What is compared: the simulator's workloads, and W5 at sizes that suit Flower."""

from __future__ import annotations

from dataclasses import replace

from simulator import WORKLOADS as _SIMULATOR

WORKLOADS = _SIMULATOR | {
    f"W5-{clients}": replace(_SIMULATOR["W5"], name=f"W5-{clients}", clients=clients)
    for clients in (200, 2000)
}
