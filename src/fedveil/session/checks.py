"""Checks before a run starts: data, test sets and methods must match the model and each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from fedveil.data.client_data import (
    Array,
    ArrayClients,
    ClientData,
    Clients,
    client_ids,
    first_not_finite,
    labels_of,
    tensor_of,
)
from fedveil.data.dataset import Examples
from fedveil.errors import DataError, InputError, within
from fedveil.evaluation.accuracy import evaluate
from fedveil.lazy_torch import torch
from fedveil.losses import WeightedCrossEntropy, target_of
from fedveil.messages import Record
from fedveil.methods.method import AnyMethod
from fedveil.privacy.releases import Plan
from fedveil.session.options import EarlyStopping, StopMetric
from fedveil.session.privacy_guard import is_private, unit_of
from fedveil.streams import named_stream, normal
from fedveil.task import Task, cross_entropy
from fedveil.tree import Params, with_axis

if TYPE_CHECKING:
    from torch import Tensor


def check_clients(task: Task, method: AnyMethod, plan: Plan, clients: Clients) -> None:
    """Refuse clients' data that the model cannot read, or that the method cannot train on or protect."""
    check_fit(task, clients)
    check_forgets(task, method, plan, clients)
    check_apart(task, method, plan, clients)
    method.check_clients(task, clients)


def check_fit(task: Task, clients: Clients) -> None:
    """Refuse examples that the model cannot read and labels without an output."""
    data = clients.load([_largest(clients)])
    if not data.largest:
        raise DataError("no client has an example. Give at least one client some data.", field="clients")
    labels = clients.y if isinstance(clients, ArrayClients) else data.y[0]
    _check_examples(task, data.x[0, :1], labels)


def check_forgets(task: Task, method: AnyMethod, plan: Plan, clients: Clients) -> None:
    """Refuse, where anything is protected, a model that keeps a trace of what it is applied to.

    A trace of one record or client, such as a running mean, affects the updates of others without clip or noise.
    """
    if not is_private(method, plan):
        return
    x, w = clients.load([_largest(clients)]).x[:, :1], with_axis(task.init(0))
    one = torch.ones_like(x).to(task.device)
    with torch.no_grad():
        task.outputs(w, one)
        before = _state(task.module)  # now with what is made once, in the first call
        task.outputs(w, 3 * one if one.is_floating_point() else one - 1)
    if (changed := _changed(before, _state(task.module))) is not None:
        raise InputError(
            "model",
            changed,
            "changes when the model is applied, so what one record or client leaves there reaches others without noise",
            "Compute it afresh in each call (torch.nn.GroupNorm does), or make it a constant.",
        )


def _state(module: torch.nn.Module) -> dict[str, Tensor | float]:
    """Buffers and attributes of all layers: tensors, numbers, and the sizes of collections."""
    found: dict[str, Tensor | float] = {}
    for name, layer in module.named_modules():
        for key, value in {**vars(layer), **dict(layer.named_buffers(recurse=False))}.items():
            place = f"{name}.{key}".lstrip(".")
            if isinstance(value, torch.Tensor):
                found[place] = value.clone()
            elif isinstance(value, int | float):
                found[place] = value
            elif isinstance(value, list | dict | set):
                found[place] = len(value)
    return found


def _changed(before: Mapping[str, Tensor | float], after: Mapping[str, Tensor | float]) -> str | None:
    """The first name with another value than before."""

    def same(old: Tensor | float | None, new: Tensor | float | None) -> bool:
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            return torch.equal(old, new)
        return not isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor) and old == new

    return next((name for name in {**before, **after} if not same(before.get(name), after.get(name))), None)


def check_apart(task: Task, method: AnyMethod, plan: Plan, clients: Clients) -> None:
    """Refuse, where records are protected, a model or loss that mixes them, since clipping then bounds no influence.

    Batch norm layers are refused by type elsewhere; this check finds any other forward pass that mixes examples.
    """
    if unit_of(method, plan) != "record":
        return
    if getattr(task.example_loss, "compares", False):
        raise InputError(
            "task.data_options.intervals",
            None,
            "without intervals the (Cox) loss compares records, so one record's influence cannot be bounded",
            "Give the ends of the intervals, such as [30, 90, 365]: hazards are a loss of single records.",
        )
    if not _is_apart(task, clients.load([_largest(clients)])):
        raise InputError(
            "model",
            type(task.module).__name__,
            "an example's loss depends on the others of its batch, so one record's influence cannot be bounded",
            "Normalise within an example (torch.nn.GroupNorm), or use a method that protects whole clients.",
        )


def _is_apart(task: Task, data: ClientData) -> bool:
    """Whether artificial examples have the same scores and losses alone and beside others, whatever their places.

    Initial weights may hide a mixture, such as a last layer that starts at zero, so moved ones are tried too.
    """
    y, shape = data.y[:, :1].to(task.device), data.x.shape[2:]
    if data.x.is_floating_point():
        x = torch.linspace(0, 1, math.prod(shape)).reshape(1, 1, *shape).to(task.device, data.x.dtype)
        other = 2 - x
    else:
        x = torch.ones_like(data.x[:, :1]).to(task.device)
        other = torch.zeros_like(x)
    w = with_axis(task.init(0))
    with torch.no_grad():
        classes = task.outputs(w, x).shape[-1]
        label = y + 1 if y.is_floating_point() else (y + 1) % classes
        return all(_are_apart(task, weights, (x, other), (y, label)) for weights in (w, _moved(w)))


def _are_apart(task: Task, w: Params, x: Sequence[Tensor], y: Sequence[Tensor]) -> bool:
    """Whether none of the examples A, B, A is seen otherwise than alone, whatever its place."""

    def seen(*rows: int) -> list[Tensor]:
        outputs = task.outputs(w, torch.cat([x[i] for i in rows], 1))[0]
        losses = task.example_loss(outputs, torch.cat([y[i] for i in rows], 1)[0])
        return [torch.cat([outputs[i].flatten(), losses[i].reshape(1)]) for i in range(len(rows))]

    alone = [*seen(0), *seen(1)]
    return all(
        torch.allclose(
            alone[row], one, rtol=1e-3, atol=1e-5 * max(1.0, float(one.abs().max())), equal_nan=True
        )
        for row, one in zip((0, 1, 0), seen(0, 1, 0), strict=True)
    )


def _moved(w: Params) -> Params:
    """Other weights `[1, ...]`, with a step that keeps the magnitude of what each layer sends on."""
    stream = named_stream(0, "apart")

    def step(leaf: Tensor) -> Tensor:
        inputs = math.prod(leaf.shape[2:]) if leaf.dim() > 2 else 1
        return normal([stream], leaf.shape[1:], leaf) / math.sqrt(max(1, inputs))

    return {name: leaf + 0.5 * step(leaf) if leaf.is_floating_point() else leaf for name, leaf in w.items()}


def _largest(clients: Clients) -> int:
    """The client with the most examples."""
    sizes = dict(zip(client_ids(clients), clients.sizes, strict=True))
    return max(sizes, key=sizes.__getitem__)


def check_min_clients(min_clients: int, plan: Plan) -> None:
    """Refuse a minimum above the cohort, or one that would disclose the size of a Poisson cohort."""
    if min_clients > plan.cohort:
        raise InputError(
            "run.min_clients", min_clients, f"a cohort has {plan.cohort} clients", f"Use 0 to {plan.cohort}."
        )
    if min_clients and plan.sampler == "poisson":
        raise InputError(
            "run.min_clients",
            min_clients,
            "dropping small Poisson rounds would disclose how many participate, which is not accounted for",
            "Leave it out, or use another sampler.",
        )


def check_stopping(task: Task, rule: EarlyStopping, public: tuple[Tensor, Tensor] | None) -> None:
    """Refuse early stopping without public examples, or by a metric that the model does not have."""
    if public is None:
        raise InputError(
            "run.early_stopping.public", None, "there are no public examples", "Give some, or leave it out."
        )
    scored = evaluate(task, task.init(0), *public).metrics()
    if scored.get(rule.metric) is None:
        known = ", ".join(name for name in get_args(StopMetric) if scored.get(name) is not None)
        raise InputError(
            "run.early_stopping.metric", rule.metric, "this model has no such metric", f"Use one of {known}."
        )


def first_server(task: Task, method: AnyMethod, plan: Plan, seed: int) -> Record:
    """The server before the first round; names `method` in errors about fields that do not fit the model."""
    with within("method"):
        server: Record = method.init_server(task.init(seed), plan)
    return server


def check_test(task: Task, test: Examples | tuple[Array, Array] | None) -> tuple[Tensor, Tensor] | None:
    """The test examples as tensors; refuses those that do not fit the model. None if there are none."""
    if test is None:
        return None
    x, y = (test.x, test.y) if isinstance(test, Examples) else (tensor_of(test[0]), labels_of(test[1]))
    if len(x) != len(y):
        raise DataError(
            f"test: x has {len(x)} examples and y has {len(y)}; the numbers must be equal.",
            field="test",
            value=(len(x), len(y)),
        )
    if not len(x):
        return None
    if (bad := first_not_finite(x)) is not None:
        raise DataError(
            f"test: example {bad} contains NaN or infinity. Clean or drop it.", field="test", value=bad
        )
    try:
        _check_examples(task, x[:1], y)
    except DataError as error:
        raise DataError(f"test: {error}", field="test", value=error.value) from error
    return x, y


def _check_examples(task: Task, x: Tensor, labels: Tensor) -> None:
    try:
        with torch.no_grad():
            scores = task.outputs(with_axis(task.init(0)), x[None].to(task.device))
    except (RuntimeError, IndexError) as error:  # a token id outside the vocabulary is an IndexError
        needed = {str(p.dtype).removeprefix("torch.") for p in task.module.parameters()}
        raise DataError(
            f"the model cannot read examples of shape {list(x.shape[1:])} and type "
            f"{str(x.dtype).removeprefix('torch.')} (its parameters are {' and '.join(sorted(needed))}): {error}. "
            "Change the model or the examples.",
            field="x",
            value=list(x.shape[1:]),
        ) from error
    if target_of(task.example_loss) == "number" and scores.shape[1:] != (1, 1):
        raise DataError(
            f"the model has outputs of shape {list(scores.shape[2:])}; a number needs one. Change the model.",
            field="outputs",
            value=list(scores.shape[2:]),
        )
    if task.example_loss is not cross_entropy and not isinstance(task.example_loss, WeightedCrossEntropy):
        return
    if labels.is_floating_point() or labels.dim() != 1:
        kind = f"{str(labels.dtype).removeprefix('torch.')} of shape {list(labels.shape[1:])}"
        raise DataError(
            f"each label is {kind}; cross-entropy needs one whole number. Use y.long().flatten().",
            field="y",
            value=kind,
        )
    low, high, outputs = int(labels.min()), int(labels.max()), int(scores.shape[-1])
    if low < 0 or high >= outputs:
        wrong = low if low < 0 else high
        raise DataError(
            f"label {wrong} has no output: the model has outputs 0 to {outputs - 1}. Relabel, or use a wider model.",
            field="y",
            value=wrong,
        )
