"""A simulated device: tensors that say they are on it, and that refuse to meet tensors of the processor.

There is no GPU where the tests run. Tensors on this device hold their numbers in the processor's memory, but as with
a GPU an operation on tensors of two devices fails, and NumPy cannot read them. Its name is "meta", the one that
torch's autograd runs without hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
_ACROSS = {"copy_", "_copy_from"}  # what copies from one device to another
_INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
}  # indices may be the processor's


class TwoDevicesError(RuntimeError):
    """An operation on tensors of two devices."""


class Elsewhere(Tensor):
    """A tensor on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.held = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _FromPython(TorchFunctionMode):
    """Numbers of Python become tensors below the level of operations, so that they are caught above it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            told = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(told)
        if func is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def other_device() -> Iterator[None]:
    """While this is entered, what is made on `DEVICE` is on a device of its own."""
    with _FromPython(), _Operations():  # type: ignore[no-untyped-call]
        yield


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the numbers, its result where its operands are, or where it was told."""
    name = func._schema.name.removeprefix("aten::")
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, Elsewhere)]
    here = [leaf for leaf in leaves if not isinstance(leaf, Elsewhere) and leaf.dim()]
    if name in _INDEXING and isinstance(args[0], Elsewhere):
        here = []
    if there and here and name not in _ACROSS:
        raise TwoDevicesError(f"{name}: tensors on the task's device and on the processor")
    told = kwargs.get("device")
    if told is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    place_there = bool(there) if told is None else torch.device(told) == DEVICE
    plain: Callable[[Any], Any] = lambda tree: tree_map_only(Elsewhere, lambda leaf: leaf.held, tree)  # noqa: E731
    with torch._C._DisableTorchDispatch():
        out = func(*plain(args), **plain(kwargs))
    if func._schema.is_mutable:
        return _written(func, args, kwargs, out)
    return tree_map_only(Tensor, Elsewhere, out) if place_there else out


def _written(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """What an operation that writes to its arguments returns: those arguments themselves."""
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    changed = [
        given[a.name]
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    if isinstance(out, tuple):
        return tuple(changed)
    return changed[0] if changed and isinstance(out, Tensor) else out
