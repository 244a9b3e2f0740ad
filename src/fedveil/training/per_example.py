"""Per-example gradients and their clipped sum, for one client's model.

Book-keeping: one forward pass and one backward pass with respect to the layers' outputs only; the gradients follow in
closed form (`layer_gradients`), without a second backward pass. Modules with other parametrised layers, shared
parameters or layers used twice use `vmap(grad)`, or a plain loop if that is not possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from fedveil.errors import DivergedError, InputError
from fedveil.lazy_torch import nn, torch
from fedveil.privacy.clipping import hide
from fedveil.streams import Stream
from fedveil.training.layer_gradients import Explicit, Layer, Part, is_known, layer_parts
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[["Tensor", "Tensor"], "Tensor"]

_STORED_BYTES = 96 * 2**20  # per-example gradients in memory at a time
_ACTIVATION_BYTES = 8 * 2**20  # the largest output of a layer; above it memory allocation dominates the time
MARGIN = 2.0**-16  # the share of the clip that is reserved for rounding errors
_FIRST = 16  # examples of the first micro-batch, which measures the size of the outputs


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of every example, `[B]`."""
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def clipped_gradient_sum(
    module: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    clip: float,
    *,
    loss: Loss = cross_entropy,
    mask: Tensor | None = None,
    dropout: Stream | None = None,
) -> tuple[Params, Tensor]:
    """`sum_i min(1, clip / |g_i|) g_i` over the examples, and the norms `|g_i|` `[B]` before clipping.

    `g_i` is the gradient of `loss(module(x_i), y_i)` with respect to all of `params` as one vector (other parameters
    keep the module's values). Norms and the sum are in float64. The contribution of one example never exceeds
    `clip`. Examples where `mask` is false contribute nothing and have norm 0. Dropout masks are drawn from the stream
    `dropout`; without it there is no dropout. The module is not changed. A gradient that is not finite raises
    `DivergedError`, or counts as zero (`hidden_divergence`).
    """
    if isinstance(clip, bool) or not clip > 0:
        raise InputError("clip", clip, "must be above 0", "Use a positive norm, or infinity for no clipping.")
    chosen = torch.arange(x.shape[0], device=x.device)
    if mask is not None:
        if mask.shape != x.shape[:1]:
            raise InputError("mask", tuple(mask.shape), "is not one entry per example", "Give [B].")
        chosen = chosen[mask.to(torch.bool)]
        x, y = x.index_select(0, chosen), y.index_select(0, chosen)
    total = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in params.items()}
    norms = torch.zeros(
        mask.shape[0] if mask is not None else x.shape[0], dtype=torch.float64, device=x.device
    )
    for rows, parts in _parts(module, params, x, y, loss, dropout):
        squares = torch.stack([part.squares() for part in parts]).sum(0)
        part_norms = squares.sqrt()
        finite = torch.isfinite(part_norms)
        if not bool(finite.all()):
            bad = chosen[rows][~finite].tolist()
            if not hide(len(bad)):
                raise DivergedError(
                    f"the gradients of examples {bad[:5]} of the batch are not finite",
                    field="examples",
                    value=bad,
                )
            part_norms = part_norms.where(finite, 0)
            parts = [part.only(finite) for part in parts]
        norms[chosen[rows]] = part_norms
        factors = clip_factors(part_norms, clip)
        for part in parts:
            for name, leaf in part.weighted_sum(factors).items():
                total[name] += leaf
    return total, norms


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """The factors that scale gradients of these norms to at most `clip`.

    The margin covers the error of the norms, of the products and of the sum of up to 2^18 gradients in float64.
    """
    bound = clip * (1 - MARGIN)
    return torch.where(norms > bound, bound / norms, torch.ones_like(norms))


def per_example_gradients(
    module: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    *,
    loss: Loss = cross_entropy,
) -> Params:
    """The gradient of every example, leaves `[B, ...]` in the order of `params`."""
    found: dict[str, list[Tensor]] = {name: [] for name in params}
    for _, parts in _parts(module, params, x, y, loss):
        for part in parts:
            for name, leaf in part.gradients().items():
                found[name].append(leaf)
    return {
        name: torch.cat(found[name]) if found[name] else leaf.new_zeros(0, *leaf.shape)
        for name, leaf in params.items()
    }


_Parts = Iterator[tuple[slice, list[Part]]]


def _parts(
    module: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    dropout: Stream | None = None,
) -> _Parts:
    """The gradients of the examples of each micro-batch; its size depends on memory and affects rounding only."""
    _check(module, params, x, y, dropout)
    if not params or x.shape[0] == 0:
        return
    layers = _book_keeping_layers(module, params)
    limit = size = _micro_batch(params, layers)
    if layers and any(not isinstance(one.module, nn.Linear) for one in layers):
        size = min(size, _FIRST)
    masks = _Dropout(dropout, x.shape[0])
    start = 0
    while start < x.shape[0]:
        rows = slice(start, min(start + size, x.shape[0]))
        found = None
        if layers is not None:
            found = _by_book_keeping(module, params, layers, x[rows], y[rows], loss, masks.rows(rows))
        if found is None:
            layers = None
            size = min(size, _micro_batch(params, None))
            rows = slice(start, min(start + size, x.shape[0]))
            yield rows, _by_vmap(module, params, x[rows], y[rows], loss, masks.rows(rows))
        else:
            parts, largest = found
            size = min(limit, max(1, _ACTIVATION_BYTES // max(1, largest)))
            yield rows, parts
        start = rows.stop


def _check(
    module: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    dropout: Stream | None,
) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            raise InputError(
                "model",
                name,
                "batch norm mixes examples, so per-example gradients are undefined",
                "Use nn.GroupNorm.",
            )
        odd = isinstance(layer, nn.modules.dropout._DropoutNd) and not isinstance(layer, nn.Dropout)
        if odd and dropout is not None:
            raise InputError("model", name, "is a kind of dropout that is not supported", "Use nn.Dropout.")
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, leaf in params.items():
        if name not in known or known[name].shape != leaf.shape:
            raise InputError("params", name, "is not a parameter of the model", "Use the model's own names.")
    if y.shape[:1] != x.shape[:1]:
        raise InputError("y", tuple(y.shape), f"does not match {x.shape[0]} examples", "Give one label each.")


@dataclass
class _Dropout:
    """Dropout masks of a whole batch, drawn once per layer, so that micro-batches do not change them."""

    stream: Stream | None
    examples: int
    whole: dict[nn.Module, Tensor] = field(default_factory=dict)
    part: slice = field(default_factory=lambda: slice(None))

    def rows(self, part: slice) -> _Dropout:
        return _Dropout(self.stream, self.examples, self.whole, part)

    def of(self, layer: nn.Dropout, like: Tensor) -> Tensor:
        if layer not in self.whole:
            assert self.stream is not None
            draws = torch.from_numpy(self.stream.random(self.examples * prod(like.shape[1:])))
            keep = (draws >= layer.p).reshape(self.examples, *like.shape[1:]).to(like)
            self.whole[layer] = keep / (1 - layer.p)
        return self.whole[layer][self.part]


def _book_keeping_layers(module: nn.Module, params: Params) -> list[Layer] | None:
    """The layers that own `params`, or None if some parameter is not in a supported layer."""
    every = list(module.named_parameters(remove_duplicate=False))
    if len({id(leaf) for _, leaf in every}) != len(every):
        return None  # a shared parameter
    layers = []
    owned: set[str] = set()
    for prefix, layer in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        wanted = {short: f"{dot}{short}" for short, _ in layer.named_parameters(recurse=False)}
        wanted = {short: name for short, name in wanted.items() if name in params}
        if not wanted:
            continue
        if not is_known(layer):
            return None
        assert isinstance(layer, (nn.Linear, nn.Conv2d, nn.GroupNorm))
        layers.append(Layer(layer, wanted.get("weight"), wanted.get("bias")))
        owned.update(wanted.values())
    return layers if owned == set(params) else None


def _micro_batch(params: Params, layers: list[Layer] | None) -> int:
    """The number of examples whose stored gradients fit into their share of memory."""
    held = list(params)
    if layers is not None:
        held = [layer.weight for layer in layers if layer.weight and not isinstance(layer.module, nn.Linear)]
    size = sum(params[name].numel() * params[name].element_size() for name in held)
    return max(1, _STORED_BYTES // max(1, size))


@contextmanager
def _prepared(module: nn.Module, mask_of: Callable[[nn.Dropout, Tensor], Tensor] | None) -> Iterator[None]:
    """Apply dropout from the given masks and disable in-place activations, during the block."""
    hooks = []
    in_place = [layer for layer in module.modules() if getattr(layer, "inplace", False) is True]
    drops = [layer for layer in module.modules() if isinstance(layer, nn.modules.dropout._DropoutNd)]
    training = [layer.training for layer in drops]
    try:
        for layer in in_place:
            layer.inplace = False  # type: ignore[assignment]
        for drop in drops:
            drop.training = False  # torch's own dropout draws from a global generator
            if mask_of is not None and isinstance(drop, nn.Dropout) and drop.p > 0:
                hooks.append(drop.register_forward_hook(_masking(mask_of)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for drop, flag in zip(drops, training, strict=True):
            drop.training = flag
        for layer in in_place:
            layer.inplace = True  # type: ignore[assignment]


def _masking(mask_of: Callable[[nn.Dropout, Tensor], Tensor]) -> Callable[..., Tensor]:
    def hook(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(layer, nn.Dropout)
        return output * mask_of(layer, output)

    return hook


@dataclass
class _Seen:
    """The input and output of a layer."""

    inputs: Tensor
    outputs: Tensor
    version: int


def _by_book_keeping(
    module: nn.Module,
    params: Params,
    layers: list[Layer],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    dropout: _Dropout,
) -> tuple[list[Part], int] | None:
    """The closed-form gradients, and the size of the largest layer output per example in bytes.

    None if the forward pass uses a layer in a way that the closed forms do not support.
    """
    seen: dict[nn.Module, _Seen] = {}
    twice = False

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal twice
        twice = twice or layer in seen
        if not output.requires_grad:
            output.requires_grad_()
        seen[layer] = _Seen(inputs[0].detach(), output, output._version)

    hooks = []
    try:
        hooks = [layer.module.register_forward_hook(record) for layer in layers]
        with _prepared(module, dropout.of if dropout.stream is not None else None), torch.enable_grad():
            outputs = torch.func.functional_call(module, _constants(module, params), (x.detach(),))
            losses = _checked_loss(loss, outputs, y)
    finally:
        for hook in hooks:
            hook.remove()
    if twice or any(one.outputs._version != one.version for one in seen.values()):
        return None
    used = [layer for layer in layers if layer.module in seen]
    largest = max((one.outputs.nbytes // x.shape[0] for one in seen.values()), default=0)
    if any(seen[layer.module].inputs.shape[:1] != x.shape[:1] for layer in used):
        return None  # examples were merged with another axis
    if not losses.requires_grad:
        used = []
    upstreams: dict[nn.Module, Tensor | None] = {}
    if used:
        wanted = [seen[layer.module].outputs for layer in used]
        found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        upstreams = {layer.module: one for layer, one in zip(used, found, strict=True)}
        del wanted, found  # free each layer's tensors as soon as possible
    del outputs, losses
    parts: list[Part] = []
    for layer in layers:
        upstream = upstreams.pop(layer.module, None)
        if upstream is None:  # the loss does not depend on this layer
            names = [name for name in (layer.weight, layer.bias) if name]
            zeros = {name: params[name].new_zeros(x.shape[0], *params[name].shape) for name in names}
            parts.append(Explicit(zeros))
        else:
            with torch.no_grad():
                parts.extend(layer_parts(layer, seen.pop(layer.module).inputs, upstream))
    return parts, largest


def _constants(module: nn.Module, params: Params) -> Params:
    every = {name: leaf.detach() for name, leaf in module.named_parameters()}
    return every | {name: leaf.detach() for name, leaf in params.items()}


def _checked_loss(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    losses = loss(outputs, y)
    if losses.shape != y.shape[:1]:
        raise InputError(
            "loss",
            tuple(losses.shape),
            "is not one value per example",
            'Use reduction="none" and sum per example.',
        )
    return losses


def _by_vmap(
    module: nn.Module, params: Params, x: Tensor, y: Tensor, loss: Loss, dropout: _Dropout
) -> list[Part]:
    """Any module: the gradient function mapped over examples, or a loop where mapping is not supported."""
    if dropout.stream is not None:
        with _prepared(module, dropout.of), torch.no_grad():
            torch.func.functional_call(module, _constants(module, params), (x,))  # draws missing masks
    drops = list(dropout.whole)
    masks = [dropout.whole[layer][dropout.part] for layer in drops]
    current: dict[nn.Module, Tensor] = {}

    def loss_of_one(leaves: Params, one_x: Tensor, one_y: Tensor, one_masks: list[Tensor]) -> Tensor:
        current.update({layer: mask.unsqueeze(0) for layer, mask in zip(drops, one_masks, strict=True)})
        outputs = torch.func.functional_call(
            module, _constants(module, params) | leaves, (one_x.unsqueeze(0),)
        )
        return _checked_loss(loss, outputs, one_y.unsqueeze(0)).sum()

    gradient = torch.func.grad(loss_of_one)
    leaves = {name: leaf.detach() for name, leaf in params.items()}
    x = x.detach()
    with _prepared(module, (lambda layer, _: current[layer]) if drops else None):
        try:
            mapped = torch.func.vmap(gradient, in_dims=(None, 0, 0, 0))(leaves, x, y, masks)
        except (RuntimeError, NotImplementedError):  # an operation without a batching rule
            rows = [gradient(leaves, x[i], y[i], [mask[i] for mask in masks]) for i in range(x.shape[0])]
            mapped = {name: torch.stack([row[name] for row in rows]) for name in leaves}
    return [Explicit({name: leaf.detach() for name, leaf in mapped.items()})]
