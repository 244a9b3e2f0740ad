"""What is compared: the simulator's workloads, and W5 at a size that Flower finishes."""

from __future__ import annotations

from dataclasses import replace

from simulator import WORKLOADS as _SIMULATOR

WORKLOADS = _SIMULATOR | {"W5-200": replace(_SIMULATOR["W5"], name="W5-200", clients=200)}
