"""Every example's own gradient, one call for each: what closed forms are compared with."""

from __future__ import annotations

import torch

from fedveil import Task
from fedveil.task import Batch
from fedveil.tree import Params


def example_gradients(task: Task, w: Params, batch: Batch) -> Params:
    """The gradient of each example's loss, `[K, B, ...]`."""
    each = [
        task.grad(w, Batch(batch.x[:, i : i + 1], batch.y[:, i : i + 1])) for i in range(batch.y.shape[1])
    ]
    return {name: torch.stack([one[name] for one in each], dim=1) for name in w}
