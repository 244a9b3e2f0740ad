"""What an upload amounts to is what the server makes of it."""

from __future__ import annotations

import torch

from fedveil.methods.fedsgd import FedSGD, Gradient
from fedveil.methods.method import At
from fedveil.methods.shared_model import Model
from fedveil.privacy.releases import Plan
from fedveil.task import Task


def test_a_gradient_amounts_to_a_step_at_the_rate_of_its_round() -> None:
    task = Task(lambda: torch.nn.Linear(3, 2))
    method = FedSGD(lr=0.5, lr_schedule="cosine")
    w = {name: leaf.unsqueeze(0) for name, leaf in task.init(0).items()}
    gradient = {name: torch.randn(1, *leaf.shape[1:]) for name, leaf in w.items()}
    up = Gradient(gradient, torch.tensor([4]))
    for round in (1, 9):
        at = At(Plan(10, 10, "all", 10), round)
        read = method.read_upload(at, Model(w), up)
        assert read is not None
        expected = method.aggregate(task, at, task.init(0), up)
        for name, leaf in read.models.items():
            torch.testing.assert_close(read.start[name], w[name])
            torch.testing.assert_close(leaf[0], expected[name])
