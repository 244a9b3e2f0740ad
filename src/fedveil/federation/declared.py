"""What a node declares about its data, and its data cut to that: what the server is told never depends on a record.

A server chooses its questions, so a node that refuses by what it holds answers them. Number of records, classes and
label sets are therefore the operator's words in `node.toml`. Whether the data keeps to them is checked on the node,
before it joins.
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
    """Public facts of a node's data.

    Attributes:
        records: How many examples it trains on.
        classes: How many classes there are; None where the node leaves that to the server.
        labels: The classes it has examples of; None where it does not say.
        target: What its labels are.
        rows_per_person: How many records of one person there are at most; None where nothing names people.
    """

    records: int
    classes: int | None = None
    labels: tuple[int, ...] | None = None
    target: Target = "classes"
    rows_per_person: int | None = None

    def label_set(self, classes: int) -> tuple[int, ...]:
        """The classes that this node counts as holding, in a run of so many: all of them if it declares none."""
        return tuple(k for k in range(classes) if self.labels is None or k in self.labels)


def fit(examples: Examples, records: int, end: int | None) -> Examples:
    """Exactly `records` examples with labels below `end`, where labels are not numbers.

    What is beyond is left out; what is missing or has another label is an empty example (zeros, class 0).

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
    """One example of the shape and type of these that is not one of them, for checks whose outcome others learn."""
    if not like.x.is_floating_point():
        return Examples(torch.ones_like(like.x[:1]), like.y.new_zeros(1))
    shape = like.x.shape[1:]
    return Examples(torch.linspace(0, 1, math.prod(shape)).reshape(1, *shape), like.y.new_zeros(1))


def check_held(held: Examples | TextExamples, declared: Declared, where: str) -> None:
    """Refuse data that does not keep to what is declared. For the node's operator: the message speaks of the data."""
    if len(held) < declared.records:
        raise DataError(
            f"{where}: {len(held)} examples where data.records declares {declared.records}. "
            "Add examples, or declare fewer."
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
            "Declare it, or remove them."
        )


def _labels(held: Examples | TextExamples) -> Tensor:
    labels = held.labels if isinstance(held, TextExamples) else held.y
    return torch.zeros(0, dtype=torch.int64) if labels is None else labels
