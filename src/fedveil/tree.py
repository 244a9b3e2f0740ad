"""Arithmetic on parameters: dictionaries of tensors, on clients with a leading client axis K."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


Params = dict[str, "Tensor"]
State = dict[str, "Tensor"]


def tree_map(f: Callable[..., Tensor], *trees: Params) -> Params:
    """`f` applied leaf by leaf.

    Args:
        f: A function of as many tensors as there are trees.
        trees: Trees with the same names.

    Returns:
        The tree of the results.
    """
    first = trees[0]
    return {name: f(*(tree[name] for tree in trees)) for name in first}


def add(a: Params, b: Params, scale: float = 1.0) -> Params:
    """`a + scale * b`, leaf by leaf.

    Args:
        a: A tree.
        b: A tree with the same names and shapes.
        scale: The factor of `b`.

    Returns:
        The sum.
    """
    return {name: torch.add(leaf, b[name], alpha=scale) for name, leaf in a.items()}


def moved(a: Params, b: Params, scale: float) -> Params:
    """`a + scale * b` computed in float64 and converted to the dtypes of `a`."""
    return {name: torch.add(leaf.double(), b[name], alpha=scale).to(leaf.dtype) for name, leaf in a.items()}


def sub(a: Params, b: Params) -> Params:
    """`a - b`, leaf by leaf.

    Args:
        a: A tree.
        b: A tree with the same names and shapes.

    Returns:
        The difference.
    """
    return tree_map(torch.sub, a, b)


def scale(a: Params, factor: float) -> Params:
    """`factor * a`, leaf by leaf.

    Args:
        a: A tree.
        factor: A number.

    Returns:
        The product.
    """
    return {name: leaf * factor for name, leaf in a.items()}


def per_row(values: Tensor, leaf: Tensor) -> Tensor:
    """`values` `[K]` shaped to multiply `leaf` `[K, ...]`."""
    return values.to(leaf.dtype).reshape(-1, *([1] * (leaf.dim() - 1)))


def zeros_like(a: Params) -> Params:
    return tree_map(torch.zeros_like, a)


def flat_rows(leaf: Tensor) -> Tensor:
    """`[K, d]`: all axes but the first flattened into one, which has size 1 where a row is a single number."""
    return leaf.unsqueeze(-1).flatten(1)


def norms(a: Params) -> Tensor:
    """The L2 norm of each client's parameters as one vector, `[K]`, accumulated in float64."""
    squares = [flat_rows(leaf).double().square().sum(1) for leaf in a.values()]
    return torch.stack(squares).sum(0).sqrt()


def flatten(a: Params) -> Tensor:
    """`[K, d]`, leaves in dictionary order.

    Args:
        a: Leaves `[K, ...]`.

    Returns:
        One row per client.
    """
    return torch.cat([flat_rows(leaf) for leaf in a.values()], dim=1)


def unflatten(flat: Tensor, like: Params) -> Params:
    """The inverse of `flatten` for parameters shaped as `like` (whose own client axis may differ).

    Args:
        flat: One row per client, `[K, d]`.
        like: A tree with the names and shapes.

    Returns:
        Leaves `[K, ...]`.
    """
    out: Params = {}
    start = 0
    for name, leaf in like.items():
        size = leaf[0].numel()
        out[name] = flat[:, start : start + size].reshape(flat.shape[0], *leaf.shape[1:])
        start += size
    return out


def own_memory(like: Params, k: int) -> Params:
    """Uninitialised parameters of k clients, shaped as `like` (whose own client axis may differ)."""
    return {name: leaf.new_empty(k, *leaf.shape[1:]) for name, leaf in like.items()}


def with_axis(a: Params) -> Params:
    """One model as a stack of one.

    Args:
        a: Leaves without a client axis.

    Returns:
        Leaves `[1, ...]`.
    """
    return {name: leaf.unsqueeze(0) for name, leaf in a.items()}


def without_axis(a: Params) -> Params:
    """The model of a stack of one.

    Args:
        a: Leaves `[1, ...]`.

    Returns:
        Leaves without the client axis.
    """
    return {name: leaf.squeeze(0) for name, leaf in a.items()}


def expand(a: Params, k: int) -> Params:
    """Broadcast a stack of one to a stack of k (a stack of k is returned unchanged).

    Args:
        a: Leaves `[1, ...]` or `[k, ...]`.
        k: Number of clients.

    Returns:
        Leaves `[k, ...]`, without a copy.
    """
    return {name: leaf.expand(k, *leaf.shape[1:]) for name, leaf in a.items()}


def rows(a: Params, index: Sequence[int]) -> Params:
    picked = torch.as_tensor(list(index), dtype=torch.long)
    return {name: leaf.index_select(0, picked.to(leaf.device)) for name, leaf in a.items()}


def concatenate(parts: Sequence[Params]) -> Params:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def mean(a: Params) -> Params:
    """The mean over the client axis.

    Args:
        a: Leaves `[K, ...]`.

    Returns:
        Leaves without the client axis.
    """
    return {name: leaf.mean(0) for name, leaf in a.items()}


def weighted_sum(a: Params, weights: Tensor) -> Params:
    """`sum_k weights[k] * a[k]`.

    Args:
        a: Leaves `[K, ...]`.
        weights: `[K]`.

    Returns:
        Leaves without the client axis.
    """
    return {name: torch.einsum("k,k...->...", weights.to(leaf.dtype), leaf) for name, leaf in a.items()}


def total(parts: Sequence[Params], like: Params) -> Params:
    """The sum of all parts, which have the names and shapes of `like`; zeros if there are no parts."""
    found = zeros_like(like)
    for part in parts:
        found = add(found, part)
    return found
