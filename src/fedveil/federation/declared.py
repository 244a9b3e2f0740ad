"""Declared facts about a node's data, so that nothing visible to the server depends on a record.

A server chooses its requests, so refusals that depended on the data would disclose it. Number of records, classes and
label sets are therefore declared by the operator in `node.toml`. Whether the data matches is checked on the node,
before it joins; data that does not match is truncated or padded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.data.dataset import Examples, TextExamples, require_labels_below
from fedveil.errors import DataError
from fedveil.losses import Target


@dataclass(frozen=True)
class Declared:
    """Public facts about a node's data.

    Attributes:
        records: Number of examples that it trains on.
        classes: Number of classes; None to accept the server's.
        labels: The classes of its examples; None if not declared.
        target: The kind of its labels.
        rows_per_person: The largest number of records of one person; None if the data does not identify persons.
    """

    records: int
    classes: int | None = None
    labels: tuple[int, ...] | None = None
    target: Target = "classes"
    rows_per_person: int | None = None

    def label_set(self, classes: int) -> tuple[int, ...]:
        """The declared classes of this node, in a run of so many; all of them if it declares none."""
        return tuple(k for k in range(classes) if self.labels is None or k in self.labels)


def fit(examples: Examples, records: int, end: int | None) -> Examples:
    """Exactly `records` examples with labels below `end`, where labels are not numbers.

    Further examples are left out; missing ones and ones with another label become empty (zeros, class 0).

    **Guarantees** A changed record changes at most one example and never their number
    (`tests/unit/federation/test_declared.py::test_a_record_changes_one_example_and_never_their_number`).
    """
    x, y = examples.x[:records], examples.y[:records]
    known = torch.ones_like(y, dtype=torch.bool) if end is None else y < end
    if len(y) == records and bool(known.all()):
        return Examples(x, y)
    fitted = x.new_zeros(records, *x.shape[1:])
    labels = y.new_zeros(records)
    fitted[: len(y)][known] = x[known]
    labels[: len(y)][known] = y[known]
    return Examples(fitted, labels)


def made_up(like: Examples) -> Examples:
    """An artificial example with the shape and dtype of these, for checks whose outcome is visible to the server."""
    if not like.x.is_floating_point():
        return Examples(torch.ones_like(like.x[:1]), like.y.new_zeros(1))
    shape = like.x.shape[1:]
    return Examples(torch.linspace(0, 1, math.prod(shape)).reshape(1, *shape), like.y.new_zeros(1))


def check_held(held: Examples | TextExamples, declared: Declared, where: str) -> None:
    """Refuse data that does not match the declaration. For the node's operator only: the message contains data."""
    if len(held) < declared.records:
        raise DataError(
            f"{where}: {len(held)} examples where data.records declares {declared.records}. "
            "Add examples, or declare fewer.",
            field="data.records",
            value=len(held),
        )
    labels = _labels(held)
    if declared.classes is not None and declared.target == "classes":
        require_labels_below(labels, declared.classes, where)
    if declared.labels is None:
        return
    other = sorted(set(labels.tolist()) - set(declared.labels))
    if other:
        raise DataError(
            f"{where}: there are examples of class {other[0]}, which data.labels does not declare. "
            "Declare it, or remove them.",
            field="data.labels",
            value=other[0],
        )


def _labels(held: Examples | TextExamples) -> Tensor:
    labels = held.labels if isinstance(held, TextExamples) else held.y
    return torch.zeros(0, dtype=torch.int64) if labels is None else labels
