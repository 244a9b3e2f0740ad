"""Inversion attacks: eight images attacked as one stack against eight attacked one after another, in one run.

    python benchmarks/inversion.py            # LeNetZhu on 28x28 images

The peer is the plain loop that attack code is usually written as: one image, one backward pass with a graph, one
step of Adam. Both sides do the same steps from the same starts, interleaved, and their losses are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from fedveil.attacks.inversion.inverting_gradients import InvertingGradients
from fedveil.attacks.view import ServerView, image_box
from fedveil.models.registry import make_model
from fedveil.streams import named_stream
from fedveil.task import Batch, Task
from fedveil.tree import expand, with_axis

SHAPE = (1, 28, 28)
CLASSES = 10
TV = 1e-4


def make_view(model: str, targets: int) -> ServerView:
    """Gradients of random images: the cost does not depend on what they show."""
    task = Task(lambda: make_model(model, SHAPE, CLASSES))
    params = task.init(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(targets, 1, *SHAPE, generator=generator)
    y = torch.randint(CLASSES, (targets, 1), generator=generator)
    observed = task.grad(expand(with_axis(params), targets), Batch(x, y))
    return ServerView(task, params, observed, 1, SHAPE, CLASSES, image_box((0.0,), (1.0,)), y)


def plain_loop(view: ServerView, target: int, start: Tensor, steps: int) -> float:
    """Inverting Gradients on one image as a plain loop; the loss before the last step."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in view.params.items()}
    wanted = [view.observed[name][target] for name in leaves]
    length = torch.sqrt(sum((g.square().sum() for g in wanted), torch.zeros(())))
    assert view.labels is not None
    assert view.box is not None
    label = view.labels[target]
    x = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.1)
    marks = [int(steps * part) for part in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, marks, gamma=0.1)
    loss = torch.zeros(())
    for _ in range(steps):
        optimiser.zero_grad()
        scores = functional_call(view.task.module, leaves, (x,))
        found = torch.autograd.grad(
            torch.nn.functional.cross_entropy(scores, label), list(leaves.values()), create_graph=True
        )
        product = sum(((a * b).sum() for a, b in zip(found, wanted, strict=True)), torch.zeros(()))
        size = torch.sqrt(sum((g.square().sum() for g in found), torch.zeros(())))
        down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
        across = (x[..., :, 1:] - x[..., :, :-1]).abs().mean()
        loss = 1 - product / (size * length) + TV * (down + across)
        loss.backward()
        assert x.grad is not None
        x.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(*view.box)
    return float(loss.detach())


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()  # one thread: what other programs do does not count
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Stacked inversion against one image after another.")
    parser.add_argument("--model", default="lenet-zhu")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--single-steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    view = make_view(arguments.model, arguments.images)
    attack = InvertingGradients(steps=arguments.steps, tv=TV)
    starts = torch.from_numpy(named_stream(0, "bench").standard_normal((arguments.images, 1, *SHAPE))).float()
    attack(view, named_stream(0, "bench"))  # warm
    plain_loop(view, 0, starts[0], 3)
    stacked, single = [], []
    for _ in range(arguments.repeats):
        stacked.append(seconds(lambda: attack(view, named_stream(0, "bench"))))
        single.append(
            seconds(
                lambda: [plain_loop(view, t, starts[t], arguments.steps) for t in range(arguments.images)]
            )
        )
    ratio = sorted(b / a for a, b in zip(stacked, single, strict=True))[len(stacked) // 2]
    print(f"{arguments.images} images, {arguments.steps} steps, {arguments.model}, one thread")
    print(f"  one stack            {min(stacked):7.2f} s")
    print(f"  one after another    {min(single):7.2f} s   {ratio:.2f} times as long")
    one = make_view(arguments.model, 1)
    alone = InvertingGradients(steps=arguments.single_steps, tv=TV)
    ours, plain = [], []
    for _ in range(arguments.repeats):
        ours.append(seconds(lambda: alone(one, named_stream(0, "bench"))))
        plain.append(seconds(lambda: plain_loop(one, 0, starts[0], arguments.single_steps)))
    ratio = sorted(b / a for a, b in zip(ours, plain, strict=True))[len(ours) // 2]
    print(f"one image, {arguments.single_steps} steps")
    print(f"  fedveil              {1e3 * min(ours) / arguments.single_steps:7.2f} ms a step")
    print(
        f"  plain loop           {1e3 * min(plain) / arguments.single_steps:7.2f} ms a step   {ratio:.2f} times"
    )


if __name__ == "__main__":
    main()
