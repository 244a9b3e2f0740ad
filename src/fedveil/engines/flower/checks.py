"""Checks of messages against the model: of broadcasts on nodes, and of uploads on the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedveil.engines.flower.wire import RefusalError
from fedveil.messages import Message
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.releases import Plan
from fedveil.task import Task
from fedveil.training.surrogate import PADDING

Signature = tuple[Any, ...]


def require_downlink(task: Task, down: Message) -> None:
    """Refuse a broadcast that is not one finite row with the model's shapes and types.

    The noise of an upload depends on rows and types, so a node does not trust the server's.
    """
    params = dict(task.module.named_parameters())
    for name, leaf in down.tensors().items():
        if leaf.dim() < 1 or leaf.shape[0] != 1:
            raise RefusalError("message", f"{name!r} has shape {list(leaf.shape)}, not one row")
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise RefusalError("message", f"{name!r} is not finite")
        like = params.get(name.partition("/")[2])
        if like is not None and (leaf.shape[1:] != like.shape or leaf.dtype != like.dtype):
            raise RefusalError("message", f"{name!r} is {_shown(leaf[0])}, the model's is {_shown(like)}")


def require_explained(method: AnyMethod, at: At, sent: Message, up: Message) -> None:
    """Refuse an upload whose norm exceeds what the method's clip and noise can explain."""
    try:
        bounded = method.bounded_upload(at, sent, up)
        if bounded is None:
            return
        length, longest = float(bounded.lengths()[0]), float(bounded.longest()[0])
    except Exception as error:  # a malicious upload may raise anything
        raise RefusalError("message", f"its upload cannot be read ({type(error).__name__})") from error
    if not length <= longest:
        raise RefusalError(
            "message", f"its upload has norm {length:.4g}, clip and noise explain at most {longest:.4g}"
        )


class UploadChecks:
    """Checks shapes against the model and between uploads, and indices against their range."""

    def __init__(self, task: Task, plan: Plan, classes: int | None) -> None:
        self._params = dict(task.module.named_parameters())
        self._plan = plan
        self._classes = classes
        self._usual: Signature | None = None

    def require_fit(self, sent: Message, up: Message) -> None:
        """Refuse an upload that does not match the model, or changes fields that it must repeat."""
        for name, leaf in up.tensors().items():
            key = name.partition("/")[2]
            like = self._params.get(key)
            if like is not None and (leaf.shape[1:] != like.shape or leaf.dtype != like.dtype):
                shown, wanted = (_shown(tensor) for tensor in (leaf[0], like))
                raise RefusalError("message", f"{name!r} is {shown}, the model's is {wanted}")
        given, repeated = sent.scalars(), up.scalars()
        for name in given.keys() & repeated.keys():
            if given[name] != repeated[name]:
                raise RefusalError(
                    "message", f"{name!r} is {repeated[name]!r:.40}, it was sent {given[name]!r}"
                )
        given, back = sent.tensors(), up.tensors()
        for name in given.keys() & back.keys():
            whole = not given[name].is_floating_point()
            if whole and (given[name].shape != back[name].shape or bool((given[name] != back[name]).any())):
                raise RefusalError("message", f"{name!r} is not what it was sent")
        self._require_range(back, "size", 0, self._plan.largest_client)
        if self._classes is not None:
            self._require_range(back, "labels", PADDING, self._classes - 1)

    def _require_range(self, leaves: Mapping[str, Tensor], name: str, low: int, high: int) -> None:
        leaf = leaves.get(name)
        if leaf is None or leaf.is_floating_point() or not leaf.numel():
            return
        if int(leaf.min()) < low or int(leaf.max()) > high:
            raise RefusalError("message", f"{name!r} is not between {low} and {high}")

    def mismatched(self, uploads: Mapping[int, Message]) -> dict[int, str]:
        """The clients whose upload has other shapes than the others', with the reason.

        The shapes of earlier uploads decide, else those of the majority; in a tie no upload is used, since it is
        unknown which are wrong.
        """
        forms = {client: _signature(up) for client, up in uploads.items()}
        if not forms:
            return {}
        count = Counter(forms.values())
        if self._usual in count:
            chosen = self._usual
        else:
            (first, most), *others = count.most_common(2)
            chosen = None if others and others[0][1] == most else first
        self._usual = chosen or self._usual
        problem = "its shapes are not those of the others" if chosen else "the uploads' shapes disagree"
        return {client: problem for client, form in forms.items() if form != chosen}


def _signature(up: Message) -> Signature:
    leaves = tuple((name, leaf.dtype, tuple(leaf.shape)) for name, leaf in up.tensors().items())
    return type(up).__name__, leaves, tuple(sorted(up.scalars().items()))


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
