"""The form of a table as a file: agreed on by all nodes before a run, so that their features mean the same.

A form computed from private rows discloses something about them; compute it from public or invented rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import Field

from fedveil.atomic_files import write_atomically
from fedveil.data.table import Column, TableForm, class_names, fit_form, read_table
from fedveil.federation.config import Section, read_toml


class _Column(Section):
    name: str
    mean: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    categories: tuple[str, ...] | None = None


class _Form(Section):
    label: str
    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    column: Annotated[tuple[_Column, ...], Field(min_length=1)]


def read_form(path: Path) -> TableForm:
    """The form in this file; columns that it does not name are not read from a table."""
    form = read_toml(path, _Form)
    columns = tuple(Column(c.name, c.categories, c.mean, c.std) for c in form.column)
    return TableForm(form.label, form.classes, columns)


def write_form(form: TableForm, path: Path) -> None:
    """Write what `read_form` reads."""
    columns = [
        {"name": c.name, "mean": c.mean, "std": c.std}
        if c.categories is None
        else {"name": c.name, "categories": list(c.categories)}
        for c in form.columns
    ]
    content = {"label": form.label, "classes": list(form.classes), "column": columns}
    write_atomically(path, tomli_w.dumps(content).encode())


def form_of(
    path: Path, label: str, *, categorical: Sequence[str] = (), drop: Sequence[str] = ()
) -> TableForm:
    """The form that standardises the rows of this table."""
    table = read_table(path)
    classes = class_names([table], label)
    return fit_form(table, label=label, classes=classes, categorical=categorical, drop=drop)
