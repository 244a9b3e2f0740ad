"""Networks of linear layers, all clients at once: batched products and the backward pass in closed form.

One pass yields, for every linear layer, its inputs `A [K, B, in]` and the gradients of each example's loss with
respect to its outputs `G [K, B, out]`. Everything else follows from these factors: the mean gradient `G^T A`,
a fused update of the weights, the norm `|a| |g|` of one example's gradient without forming it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedveil.lazy_torch import nn, torch
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Linear:
    weight: str
    bias: str | None


@dataclass(frozen=True)
class Activation:
    kind: Literal["relu", "sigmoid", "tanh"]


@dataclass(frozen=True)
class Dropout:
    index: int


@dataclass(frozen=True)
class Factors:
    """One linear layer's share of the gradient: example i contributes `outer(g[i], a[i])`."""

    layer: Linear
    a: Tensor
    g: Tensor


class LinearNetwork:
    """A `nn.Sequential` of flatten, linear, activation and dropout layers that ends in class scores."""

    def __init__(self, steps: Sequence[Linear | Activation | Dropout]) -> None:
        self.steps = tuple(steps)
        self.first = next(i for i, step in enumerate(self.steps) if isinstance(step, Linear))

    @classmethod
    def recognise(cls, model: nn.Module) -> LinearNetwork | None:
        """The linear network of this model; None if the model has any other layer."""
        if type(model) is not nn.Sequential:
            return None
        steps: list[Linear | Activation | Dropout] = []
        dropouts = 0
        for name, layer in model.named_children():
            if type(layer) is nn.Flatten and layer.start_dim == 1 and not steps:
                continue
            if type(layer) is nn.Linear:
                steps.append(Linear(f"{name}.weight", None if layer.bias is None else f"{name}.bias"))
            elif type(layer) is nn.ReLU:
                steps.append(Activation("relu"))
            elif type(layer) is nn.Sigmoid:
                steps.append(Activation("sigmoid"))
            elif type(layer) is nn.Tanh:
                steps.append(Activation("tanh"))
            elif isinstance(layer, nn.Dropout):
                steps.append(Dropout(dropouts))
                dropouts += 1
            elif type(layer) is not nn.Identity:
                return None
        linears = [step.weight for step in steps if isinstance(step, Linear)]
        shared = len({id(parameter) for parameter in model.parameters()}) != len(list(model.parameters()))
        if not linears or shared or not isinstance(steps[-1], Linear):
            return None
        return cls(steps)

    def forward(
        self, w: Params, x: Tensor, drop: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Class scores `[K, B, classes]` and the output of every step."""
        h = x.flatten(2)
        tape: list[Tensor] = []
        for step in self.steps:
            if isinstance(step, Linear):
                weight = w[step.weight].transpose(1, 2)
                # All clients share the weights: one large product, unless per-client gradients are needed.
                if step.bias is None and weight.stride(0) == 0 and not weight.requires_grad:
                    h = torch.matmul(h.flatten(0, 1), weight[0]).reshape(*h.shape[:2], -1)
                elif step.bias is None:
                    h = torch.bmm(h, weight)
                else:
                    h = torch.baddbmm(w[step.bias].unsqueeze(1), h, weight)
            elif isinstance(step, Activation):
                h = getattr(torch, step.kind)(h)
            elif drop is not None:
                h = h * drop[step.index]
            tape.append(h)
        return h, tape

    def backward(
        self, w: Params, x: Tensor, tape: Sequence[Tensor], g: Tensor, drop: Sequence[Tensor] | None
    ) -> list[Factors]:
        """The factors of every linear layer for the output gradient `g [K, B, classes]`."""
        factors: list[Factors] = []
        for i in range(len(self.steps) - 1, -1, -1):
            step = self.steps[i]
            if isinstance(step, Linear):
                factors.append(Factors(step, tape[i - 1] if i else x.flatten(2), g))
                if i == self.first:
                    break
                g = torch.bmm(g, w[step.weight])
            elif isinstance(step, Activation):
                out = tape[i]
                if step.kind == "relu":
                    g = torch.ops.aten.threshold_backward(g, out, 0)
                elif step.kind == "sigmoid":
                    g = g * out * (1 - out)
                else:
                    g = g * (1 - out * out)
            elif drop is not None:
                g = g * drop[step.index]
        return factors


def cross_entropy_gradient(scores: Tensor, y: Tensor) -> Tensor:
    """The gradient of each example's cross-entropy with respect to its scores: softmax minus one-hot."""
    g = torch.softmax(scores, dim=-1)
    ones = torch.full_like(y.unsqueeze(-1), -1, dtype=g.dtype)
    if g.requires_grad:  # autograd needs the softmax unchanged
        return g.scatter_add(-1, y.unsqueeze(-1), ones)
    return g.scatter_add_(-1, y.unsqueeze(-1), ones)


def mean_gradient(factors: Sequence[Factors], weights: Tensor) -> Params:
    """`sum_i weights[k, i] * gradient of example i`, per client."""
    out: Params = {}
    for factor in factors:
        g = factor.g * weights.unsqueeze(-1)
        out[factor.layer.weight] = torch.bmm(g.transpose(1, 2), factor.a)
        if factor.layer.bias is not None:
            out[factor.layer.bias] = g.sum(1)
    return out


def example_norms(factors: Sequence[Factors]) -> Tensor:
    """The norm of every example's gradient `[K, B]`, without forming the gradients."""
    squares = torch.zeros(factors[0].g.shape[:2], dtype=torch.float64, device=factors[0].g.device)
    for factor in factors:
        a = factor.a.double().square().sum(-1)
        if factor.layer.bias is not None:
            a = a + 1
        squares += a * factor.g.double().square().sum(-1)
    return squares.sqrt()
