"""The distance between gradients of synthetic and of real data (FedLAP-DP, Eq. 16-17).

Symbols: `g` the (noisy) gradient on real data, `s` the gradient on synthetic data. Weights are seen as
matrices with one row per output node: a convolution `[o, i, kh, kw]` becomes `[o, i * kh * kw]`.

Deviations: vectors (biases, norm scales) are left out of the cosine term by default. A bias before a norm layer has a
zero gradient up to rounding, and the direction of rounding errors would affect the images. A row that is zero on
either side has cosine 0 and gradient 0.

Networks of linear layers match several clients in one product, as many as fit the cache together. Any other network
goes client by client and in pieces of a few images, because on a CPU the memory of large activations costs more time
than the work on them. Networks of convolution blocks need no graph (`training/conv_blocks.py`).
Beyond what is worth keeping, what a piece has left for the second derivative is computed again when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.linear_network import cross_entropy_gradient, mean_gradient
from fedveil.task import Batch, Task, cross_entropy
from fedveil.tree import Params, concatenate, rows, with_axis, without_axis

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedveil.training.conv_blocks import BlockNetwork, Model

_PIECE_BYTES = 6 * 2**20  # of the largest activation of a piece: more leaves the cache and costs page faults
_BLOCK_PIECE_BYTES = (
    10 * 2**20
)  # the same of networks of blocks, whose largest ones stay in the cache image by image
_STACK_BYTES = 2**20  # of the models or images of the clients that share a product: more leaves the cache
_KEPT_BYTES = 64 * 2**20  # of the largest activation of all pieces whose graphs are kept at a time
_LARGEST: WeakKeyDictionary[Task, dict[tuple[int, ...], int]] = WeakKeyDictionary()
_BLOCKS: WeakKeyDictionary[Task, BlockNetwork | None] = WeakKeyDictionary()


def matching_loss(
    real: Params,
    synthetic: Params,
    *,
    squared_weight: float = 0.1,
    reduce: Literal["sum", "mean"] = "sum",
    include_vectors: bool = False,
) -> Tensor:
    """`sum over layers of sum over rows (1 - cos(g_row, s_row)) + squared_weight * |g - s|^2`.

    `reduce` says whether the cosine term sums over a layer's rows (the paper) or averages them (its code).
    With `include_vectors` a vector joins the cosine term as a single row. The squared term covers every
    parameter. Twice differentiable where no row is zero; never NaN for finite input.
    """
    _check(real, synthetic, squared_weight, reduce)
    total = next(iter(synthetic.values())).new_zeros(())
    for name, s in synthetic.items():
        g = real[name].detach()
        if s.dim() > 1 or include_vectors:
            distance = 1 - _row_cosines(_as_rows(g), _as_rows(s))  # Eq. 17
            total = total + (distance.sum() if reduce == "sum" else distance.mean())
        if squared_weight:
            total = total + squared_weight * (g - s).square().sum()  # Eq. 16
    return total


@dataclass(frozen=True)
class Distance:
    """The fields of `matching_loss`."""

    squared_weight: float = 0.1
    reduce: Literal["sum", "mean"] = "sum"
    include_vectors: bool = False

    def gradient(self, real: Params, synthetic: Params) -> Params:
        """The gradient of each client's `matching_loss` with respect to its synthetic one; leaves are `[K, ...]`.

        In closed form: with unit rows u of g and v of s, -cos(g, s) has the gradient (cos(g, s) v - u) / |s|.
        """
        out: Params = {}
        for name, s in synthetic.items():
            g = real[name]
            pull = torch.zeros_like(s)
            if s.dim() > 2 or self.include_vectors:
                shape = (*s.shape[:2], -1) if s.dim() > 2 else (s.shape[0], 1, -1)
                (u, _), (v, inverse) = (_directions(rows.reshape(shape)) for rows in (g, s))
                if self.reduce == "mean":
                    inverse = inverse / v.shape[1]
                cosines = torch.linalg.vecdot(u, v).unsqueeze(-1)
                pull = v.mul_(cosines).sub_(u).mul_(inverse).reshape(s.shape)  # Eq. 17
            if self.squared_weight:
                pull = torch.add(pull, s - g, alpha=2 * self.squared_weight)  # Eq. 16
            out[name] = pull
        return out


def matching_gradient(
    task: Task, w: Params, real: Params, x: Tensor, y: Tensor, weights: Tensor, distance: Distance
) -> Tensor:
    """The gradient, with respect to the images `x [K, n, ...]`, of each client's distance to `real`.

    The synthetic gradient is that of `sum_i weights[k, i] * loss_i` at `w`; `w` and `real` are `[K, ...]`. Memory is
    bounded by the pieces: it does not grow with n beyond the images themselves. Without dropout.
    """
    together, of_some = 1, _matching_gradient_of_one
    if task.linear is not None:
        model = sum(leaf[0].numel() for leaf in w.values())
        largest = x.element_size() * max(1, model, x[0].numel())
        together, of_some = max(1, _STACK_BYTES // largest), _matching_gradient_of_stack
    elif _of_blocks(task, x):
        of_some = _matching_gradient_of_blocks
    found = []
    for first in range(0, x.shape[0], together):
        some = range(first, min(first + together, x.shape[0]))
        own = slice(some.start, some.stop)
        found.append(of_some(task, rows(w, some), rows(real, some), x[own], y[own], weights[own], distance))
    return torch.cat(found)


def _matching_gradient_of_stack(
    task: Task, w: Params, real: Params, x: Tensor, y: Tensor, weights: Tensor, distance: Distance
) -> Tensor:
    images = x.detach().requires_grad_()
    # In closed form: differentiated once, not twice.
    synthetic = _stacked_gradient(task, w, images, y, weights)
    return _through(synthetic, images, distance.gradient(real, _detached(synthetic)))


def _matching_gradient_of_blocks(
    task: Task, w: Params, real: Params, x: Tensor, y: Tensor, weights: Tensor, distance: Distance
) -> Tensor:
    model = _block_model(task, w, x)
    pieces = list(_pieces(task, w, x))
    keeps = largest_activation(task, w, x) * x.shape[1] <= _KEPT_BYTES
    total, kept = None, []
    for part in pieces:
        one, gradient = model.begin(x[0, part], y[0, part], weights[0, part])
        kept += [one] if keeps else []
        total = gradient if total is None else total.plus(gradient)
    assert total is not None
    pull = distance.gradient(real, with_axis(model.to_params(total)))
    v = model.weights(without_axis(pull))
    found = []
    for part in pieces:
        one = kept.pop(0) if keeps else model.begin(x[0, part], y[0, part], weights[0, part])[0]
        found.append(model.moved(one, v))
    return torch.cat(found).unsqueeze(0)


def _of_blocks(task: Task, x: Tensor) -> bool:
    """Whether `_block_model` knows the network and takes such examples `[K, n, ...]`."""
    if task not in _BLOCKS:
        from fedveil.training.conv_blocks import BlockNetwork  # loads torch

        plain = task.example_loss is cross_entropy
        _BLOCKS[task] = BlockNetwork.recognise(task.module) if plain else None
    network = _BLOCKS[task]
    return network is not None and x.dim() == 5 and x.shape[1] > 0 and network.fits(*x.shape[3:])


def _block_model(task: Task, w: Params, x: Tensor) -> Model:
    network = _BLOCKS[task]
    assert network is not None
    return network.at(without_axis(w), (x.shape[3], x.shape[4]))


def _matching_gradient_of_one(
    task: Task, w: Params, real: Params, x: Tensor, y: Tensor, weights: Tensor, distance: Distance
) -> Tensor:
    leaves = _leaves(w)
    pieces = list(_pieces(task, w, x))
    if largest_activation(task, w, x) * x.shape[1] <= _KEPT_BYTES:
        images = x.detach().requires_grad_()
        synthetic = _sum(
            _gradient(task, leaves, images[:, part], y[:, part], weights[:, part], graph=True)
            for part in pieces
        )
        return _through(synthetic, images, distance.gradient(real, _detached(synthetic)))
    pull = distance.gradient(real, weighted_gradient(task, w, x, y, weights))
    found = []
    for part in pieces:  # the synthetic gradient is a sum over the pieces
        images = x[:, part].detach().requires_grad_()
        share = _gradient(task, leaves, images, y[:, part], weights[:, part], graph=True)
        found.append(_through(share, images, pull))
    return torch.cat(found, dim=1)


def _through(synthetic: Params, images: Tensor, pull: Params) -> Tensor:
    """What pulls at the gradients, brought back to the images that they are the gradients of."""
    moved = [name for name, leaf in synthetic.items() if leaf.requires_grad]
    ends, pulls = [synthetic[name] for name in moved], [pull[name] for name in moved]
    return torch.autograd.grad(ends, images, pulls)[0]


def _detached(a: Params) -> Params:
    return {name: leaf.detach() for name, leaf in a.items()}


def weighted_gradient(task: Task, w: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
    """The gradient `[K, ...]` of each client's `sum_i weights[k, i] * loss_i`, without dropout."""
    if task.linear is not None:
        return _stacked_gradient(task, w, x, y, weights)
    found = []
    for k in range(x.shape[0]):
        one, own = rows(w, [k]), slice(k, k + 1)
        found.append(_weighted_gradient_of_one(task, one, x[own], y[own], weights[own]))
    return concatenate(found)


def _weighted_gradient_of_one(task: Task, w: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
    pieces = _pieces(task, w, x)
    if _of_blocks(task, x):
        model = _block_model(task, w, x)
        parts = (model.begin(x[0, part], y[0, part], weights[0, part])[1] for part in pieces)
        total = next(parts)
        for part in parts:
            total.plus(part)
        return with_axis(model.to_params(total))
    leaves = _leaves(w)
    return _sum(_gradient(task, leaves, x[:, p], y[:, p], weights[:, p], graph=False) for p in pieces)


def weighted_loss(task: Task, w: Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Each client's `sum_i weights[k, i] * loss_i`, `[K]`, in float64."""
    total = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    with torch.no_grad():
        for k in range(x.shape[0]):
            one, own = rows(w, [k]), slice(k, k + 1)
            for part in _pieces(task, one, x[own]):
                losses = task.losses(one, Batch(x[own, part], y[own, part]))
                total[k] += (losses * weights[own, part]).sum()
    return total


def largest_activation(task: Task, w: Params, x: Tensor) -> int:
    """The bytes of the largest output of any layer for one example of `x [K, n, ...]`."""
    known = _LARGEST.setdefault(task, {})
    shape = tuple(x.shape[2:])
    if shape not in known:
        sizes = [0]

        def look(_module: nn.Module, _inputs: tuple[Tensor, ...], out: object) -> None:
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel() * out.element_size())

        hooks = [layer.register_forward_hook(look) for layer in task.module.modules()]
        try:
            with torch.no_grad():
                task.outputs(rows(w, [0]), x.new_zeros(1, 1, *shape))
        finally:
            for hook in hooks:
                hook.remove()
        known[shape] = max(sizes)
    return known[shape]


def _pieces(task: Task, w: Params, x: Tensor) -> Iterator[slice]:
    """Parts of the images that are worked on together; at least one, even of no images."""
    count = x.shape[1]
    most = _BLOCK_PIECE_BYTES if _of_blocks(task, x) else _PIECE_BYTES
    size = count if task.linear is not None else most // max(1, largest_activation(task, w, x))
    size = max(1, min(size, count))
    for start in range(0, max(1, count), size):
        yield slice(start, start + size)


def _stacked_gradient(task: Task, w: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
    assert task.linear is not None
    scores, tape = task.linear.forward(w, x)
    factors = task.linear.backward(w, x, tape, cross_entropy_gradient(scores, y), None)
    gradient = mean_gradient(factors, weights)
    return {name: gradient[name] for name in w}


def _gradient(task: Task, leaves: Params, x: Tensor, y: Tensor, weights: Tensor, *, graph: bool) -> Params:
    total = (task.losses(leaves, Batch(x, y)) * weights).sum()
    found = torch.autograd.grad(
        total, list(leaves.values()), create_graph=graph, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def _leaves(w: Params) -> Params:
    return {name: leaf.detach().requires_grad_() for name, leaf in w.items()}


def _sum(parts: Iterator[Params]) -> Params:
    total = dict(next(parts))
    for part in parts:
        for name, leaf in part.items():
            total[name] = total[name] + leaf
    return total


def _as_rows(leaf: Tensor) -> Tensor:
    return leaf.flatten(1) if leaf.dim() > 1 else leaf.reshape(1, -1)


def _row_cosines(g: Tensor, s: Tensor) -> Tensor:
    """Cosines of the rows; 0, with gradient 0, where a row is zero."""
    unit = _unit_rows(g)
    scale = s.detach().abs().amax(1, keepdim=True)
    empty = scale == 0
    scaled = s / scale.masked_fill(empty, 1.0)  # squares of very small or large gradients stay in range
    length = scaled.square().sum(1, keepdim=True).masked_fill(empty, 1.0).sqrt()
    return (unit.masked_fill(empty, 0.0) * scaled / length).sum(1)


def _unit_rows(g: Tensor) -> Tensor:
    scale = g.abs().amax(1, keepdim=True)
    scaled = g / scale.masked_fill(scale == 0, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    unit: Tensor = scaled / length.masked_fill(length == 0, 1.0)
    return unit


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The unit rows of `[K, o, c]` and one over their lengths `[K, o, 1]`; both 0 where a row is zero."""
    # In double precision, where squares of very small or large gradients stay in range.
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
    most = torch.finfo(rows.dtype).max
    inverse = (1 / length).masked_fill(length == 0, 0.0).clamp(max=most).to(rows.dtype)
    return rows / length.masked_fill(length == 0, 1.0).to(rows.dtype), inverse


def _check(real: Params, synthetic: Params, squared_weight: float, reduce: str) -> None:
    if not synthetic or set(real) != set(synthetic):
        odd = sorted(set(real) ^ set(synthetic))
        raise InputError("synthetic", odd, "real and synthetic gradients differ in names", "Use one model.")
    for name, leaf in synthetic.items():
        if real[name].shape != leaf.shape:
            raise InputError(
                name, tuple(leaf.shape), f"differs from the real {tuple(real[name].shape)}", "Use one model."
            )
    if isinstance(squared_weight, bool) or not 0 <= squared_weight < float("inf"):
        raise InputError("squared_weight", squared_weight, "must be finite and not negative", "Use 0.1 or 0.")
    if reduce not in ("sum", "mean"):
        raise InputError("reduce", reduce, "is not a way to combine rows", "Use sum or mean.")
