"""Labels from a gradient: the last layer discloses the classes in the batch.

Zhao, Mopuri, Bilen: iDLG: Improved Deep Leakage from Gradients. 2020 (one example). For several examples, the gradient
of the last bias is `mean(p_c) - n_c / B`, and p is estimated by the model's predictions for public examples, or for
random images if there are none. A trained model sums such gradients: they are divided by their number, and p is the
mean of the predictions before and after training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedveil.attacks.view import ServerView
from fedveil.errors import InputError
from fedveil.lazy_torch import nn, torch
from fedveil.tree import Params, with_axis

if TYPE_CHECKING:
    from torch import Tensor


def known_or_inferred(view: ServerView, rng: np.random.Generator) -> tuple[Tensor, tuple[str, ...]]:
    """The labels `[T, B]` of the view, or labels inferred from the gradient; and a note on their source."""
    if view.labels is not None:
        return view.labels, ("labels known",)
    return infer_labels(view, rng), ("labels inferred from the last layer",)


def infer_labels(view: ServerView, rng: np.random.Generator) -> Tensor:
    """The labels of each upload, `[T, B]`, in ascending order, since a gradient does not disclose their order."""
    pull = last_layer_pull(view)
    if view.examples == 1:
        return pull.argmin(1, keepdim=True)
    if view.local is not None:
        pull = pull / view.local.gradients(view.examples)
    counts = view.examples * (_expected_probabilities(view, rng) - pull)
    return torch.stack([_whole(row, view.examples) for row in counts])


def last_layer_pull(view: ServerView) -> Tensor:
    """The gradient of the scores averaged over the batch, `[T, classes]`, or only its sign without a bias."""
    linear = [(n, m) for n, m in view.task.module.named_modules() if isinstance(m, nn.Linear)]
    if not linear or linear[-1][1].out_features != view.classes:
        raise InputError(
            "labels",
            "inferred",
            f"the model does not end in a linear layer of {view.classes} classes, so they cannot be inferred",
            "Use known labels, or an attack that guesses them (dlg).",
        )
    name, layer = linear[-1]
    prefix = f"{name}." if name else ""
    if getattr(layer, "bias", None) is not None:
        return view.observed[f"{prefix}bias"]
    if view.examples > 1:
        raise InputError(
            "labels", "inferred", "a last layer without bias discloses only one label", "Use known labels."
        )
    return view.observed[f"{prefix}weight"].sum(2)


def _expected_probabilities(view: ServerView, rng: np.random.Generator) -> Tensor:
    """The mean probabilities of the classes over the training, `[1 or T, classes]`."""
    like = next(iter(view.params.values()))
    if view.public is not None:
        inputs = view.public[None, rng.permutation(len(view.public))[:64]]
        inputs = inputs.to(like) if inputs.is_floating_point() else inputs
    else:
        inputs = torch.from_numpy(rng.standard_normal((1, 64, *view.input_shape))).to(like)
    seen = _mean_answer(view, with_axis(view.params), inputs)
    if view.local is None or view.local.is_one_gradient(view.examples):
        return seen
    after = [
        {name: leaf - view.local.lr * view.observed[name][t] for name, leaf in view.params.items()}
        for t in range(view.targets)
    ]
    return (seen + torch.cat([_mean_answer(view, with_axis(w), inputs) for w in after])) / 2


def _mean_answer(view: ServerView, w: Params, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.softmax(view.task.outputs(w, inputs), dim=-1).mean(1)


def _whole(counts: Tensor, total: int) -> Tensor:
    """The integers nearest to `counts` that sum to `total`, as a list of labels."""
    floor = counts.clamp(min=0).floor()
    while int(floor.sum()) > total:
        over = torch.where(floor > 0, floor - counts, torch.full_like(counts, -torch.inf))
        floor[over.argmax()] -= 1
    for _ in range(total - int(floor.sum())):
        floor[(counts - floor).argmax()] += 1
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), floor.long())
