"""Gradients of candidate texts given by their embeddings, for many candidates at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedveil.attacks.view import ServerView
from fedveil.lazy_torch import torch
from fedveil.task import Task
from fedveil.token_losses import next_token_loss
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.text_model import TextModel

TextLoss = Callable[["Tensor", "Tensor"], "Tensor"]
_AT_ONCE = 1 << 23  # largest number of gradient entries in memory


def text_model(task: Task) -> TextModel:
    """The text model of a task."""
    assert task.text is not None
    return task.text


def predicts_tokens(task: Task) -> bool:
    """Whether the targets are the next tokens, which the attacker searches and is never given."""
    return task.example_loss is next_token_loss


def soft_next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of each text `[B]` for `targets [B, L, V]`: probabilities of the next token at each
    position, all zero if there is none."""
    each = -(targets * torch.log_softmax(scores, dim=-1)).sum(-1)
    return each.sum(-1) / targets.sum(-1).sum(-1).clamp(min=1)


def text_gradients(view: ServerView, padding: Tensor, embedded: Tensor, targets: Tensor) -> Params:
    """The gradients of clients with these texts, `[N, ...]`, except for the embedding table.

    `embedded [N, B, L, E]` are the embeddings where `padding [N, B, L]` is False; `targets` are classes `[N, B]`, or
    probabilities `[N, B, L, V]` of next tokens. Differentiable in `embedded` and in probabilities.
    """
    model = text_model(view.task)
    soft = targets.is_floating_point()
    example_loss: TextLoss = soft_next_token_loss if soft else view.task.example_loss
    table = {name: leaf for name, leaf in view.params.items() if name == model.table}
    rest = {name: leaf.detach() for name, leaf in view.params.items() if name != model.table}
    ids = torch.where(padding, model.pad, model.pad + 1 if model.pad == 0 else 0)

    def loss(leaves: Params, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
        scores = torch.func.functional_call(model, {**table, **leaves}, (b, None, x))
        return example_loss(scores, y).mean()

    if model.stacks and embedded.shape[0] > 1:
        stacked: Params = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(
            rest, embedded, ids, targets
        )
        return stacked
    further = torch.is_grad_enabled() and (embedded.requires_grad or targets.requires_grad)
    found: list[dict[str, Tensor]] = []
    for x, b, y in zip(embedded, ids, targets, strict=True):
        leaves = {name: leaf.requires_grad_() for name, leaf in rest.items()}
        with torch.enable_grad():
            parts = torch.autograd.grad(
                loss(leaves, x, b, y), list(leaves.values()), create_graph=further, materialize_grads=True
            )
        found.append(dict(zip(leaves, parts, strict=True)))
    return {name: torch.stack([part[name] for part in found]) for name in rest}


def rows_at_once(view: ServerView) -> int:
    """The number of candidates compared at a time if no further derivative is needed."""
    size = sum(leaf.numel() for name, leaf in view.params.items() if name != text_model(view.task).table)
    return max(1, min(64, _AT_ONCE // max(size, 1)))
