"""`fedveil list`: the registered methods, models, data sets and so on."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from fedveil.cli.app import AsJson, app, out
from fedveil.errors import InputError, known_name

if TYPE_CHECKING:
    from fedveil.methods.describe import Described


@app.command(
    "list", epilog="Examples: fedveil list methods; fedveil list methods fedceo; fedveil list sections run"
)
def list_(
    what: Annotated[
        Literal["methods", "wrappers", "datasets", "models", "attacks", "sections", "experiments", "results"],
        typer.Argument(
            metavar="WHAT",
            help="methods, wrappers, datasets, models, attacks, sections (of a configuration), experiments or results.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            help="One of them: what it takes, and the defaults. Of experiments and results: a folder."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what fedveil knows by name; or what one of them takes in a configuration.

    Experiments are the TOML files below experiments/, results the finished runs below results/, or below another
    folder.
    """
    if name is not None and what in _FOLDERS and not Path(name).is_dir():
        raise InputError("NAME", name, "no such folder", f"Give a folder that holds {what}.")
    rows = _FOLDERS[what](Path(name or what)) if what in _FOLDERS else _named(what, name)
    if as_json:
        print(json.dumps(rows))
        return
    if what in _FOLDERS:
        _print_folders(rows, f"no {what} below {name or what}")
        return
    table = Table(title=name or what, title_justify="left")
    columns = [key for key in rows[0] if key != "options"] if rows else ["name", "default"]
    for column in columns:
        # A path or a name that is cut off cannot be copied.
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    out.print(table)


def _print_folders(rows: Sequence[Mapping[str, Any]], none: str) -> None:
    """A line with the path, which one copies, and one with the rest: in a table the path would be cut."""
    for row in rows:
        shown = {
            key: value
            for key, value in row.items()
            if key not in ("path", "name") and value not in ("", None)
        }
        details = (
            f"{key} {value}" if key in ("accuracy", "epsilon") else str(value) for key, value in shown.items()
        )
        out.print(row["path"], soft_wrap=True)
        out.print(f"  {', '.join(details)}", soft_wrap=True)
    if not rows:
        out.print(none, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _named(what: str, name: str | None) -> list[dict[str, Any]]:
    return _LISTS[what]() if name is None else _fields(what, name)


def _experiments(folder: Path) -> list[dict[str, Any]]:
    """TOML files with a section [task] or [method]; others are not experiments."""
    rows = []
    for path in sorted(folder.rglob("*.toml")):
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue
        task, method, paper = (content.get(key, {}) for key in ("task", "method", "paper"))
        if not task and not method:
            continue
        rows.append(
            {
                "name": path.stem,
                "dataset": task.get("dataset", "digits"),
                "method": method.get("name", ""),
                "paper": paper.get("source", ""),
                "path": str(path),
            }
        )
    return rows


def _results(folder: Path) -> list[dict[str, Any]]:
    """Finished runs, the newest first, with the smallest proven epsilon and its adversary."""
    rows = []
    for path in folder.rglob("summary.json"):
        try:
            summary = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if not isinstance(summary, dict) or "method" not in summary:
            continue
        accuracy = summary.get("accuracy")
        date = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        rows.append(
            {
                "name": summary.get("experiment", ""),
                "method": summary["method"],
                "accuracy": None if accuracy is None else round(accuracy, 4),
                "epsilon": _epsilon(summary.get("privacy")),
                "date": date.isoformat(sep=" ", timespec="minutes"),
                "path": str(path.parent),
            }
        )
    return sorted(rows, key=lambda row: row["date"], reverse=True)


def _epsilon(privacy: Any) -> str:
    rows = privacy.get("proven", []) if isinstance(privacy, dict) else []
    known = [row for row in rows if row.get("epsilon") is not None]
    if not known:
        return "none proven"
    best = min(known, key=lambda row: float(row["epsilon"]))
    return f"{best['epsilon']:.3g} ({best['unit']}, against the {best['adversary']})"


_FOLDERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "experiments": _experiments,
    "results": _results,
}


def _fields(what: str, name: str) -> list[dict[str, Any]]:
    """The configuration keys of this entry, with their defaults."""
    return [
        {
            "name": field.name,
            "default": _in_json(field.default),
            "values": field.values,
            "meaning": field.meaning,
        }
        for field in _described(what, name)
    ]


def _described(what: str, name: str) -> list[Described]:
    from fedveil.methods.describe import describe_fields, describe_options

    if what == "models":
        from fedveil.models import options as of_models
        from fedveil.models.registry import model_entry, model_options

        return describe_options(model_entry(name).build, model_options(name), of_models.OPTIONS)
    if what == "datasets":
        from fedveil.data import options as of_data
        from fedveil.data.registry import dataset_loader, dataset_options

        return describe_options(dataset_loader(name), dataset_options(name), of_data.OPTIONS)
    known = _classes(what)
    return describe_fields(known[known_name("name", what.removesuffix("s"), name, known)])


def _in_json(value: Any) -> Any:
    """The value with infinities as text, since JSON has no infinity."""
    return str(value) if value == float("inf") else value


def _classes(what: str) -> Mapping[str, type[Any]]:
    """The classes with fields, by name; only the requested kind is imported."""
    if what == "methods":
        from fedveil.methods import METHODS

        return METHODS
    if what == "wrappers":
        from fedveil.methods.wrappers import WRAPPERS

        return WRAPPERS
    if what == "sections":
        from fedveil.experiment.sections import SECTIONS

        return SECTIONS
    from fedveil.attacks.membership.threat_model import MEMBERSHIP_ATTACKS
    from fedveil.attacks.registry import ATTACKS

    _attacks()  # imports and registers them
    return ATTACKS | MEMBERSHIP_ATTACKS


def _methods() -> list[dict[str, Any]]:
    from fedveil.methods import METHODS
    from fedveil.methods.secure import sums_securely

    return [
        {
            "name": name,
            "summary": METHODS[name].summary,
            "secure_aggregation": sums_securely(METHODS[name]),
        }
        for name in sorted(METHODS)
    ]


def _sections() -> list[dict[str, Any]]:
    from fedveil.experiment.sections import SECTIONS

    return [{"name": name, "summary": _first_line(kind.__doc__)} for name, kind in SECTIONS.items()]


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _wrappers() -> list[dict[str, Any]]:
    from fedveil.methods.wrappers import WRAPPERS

    return [{"name": name, "summary": WRAPPERS[name].summary} for name in sorted(WRAPPERS)]


def _datasets() -> list[dict[str, Any]]:
    from fedveil.data.registry import list_datasets

    return [
        {"name": d.name, "summary": d.summary, "kind": d.kind, "how_to_get": d.how_to_get}
        for d in list_datasets()
    ]


def _models() -> list[dict[str, Any]]:
    from fedveil.models.registry import list_models

    return [{"name": m.name, "summary": m.summary} for m in list_models()]


def _attacks() -> list[dict[str, Any]]:
    from fedveil.attacks.membership.all import list_membership_attacks
    from fedveil.attacks.registry import list_attacks

    inversion = [{"name": a.name, "summary": a.summary, "options": list(a.options)} for a in list_attacks()]
    return inversion + [{"name": a.name, "summary": a.summary} for a in list_membership_attacks()]


_LISTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "methods": _methods,
    "wrappers": _wrappers,
    "datasets": _datasets,
    "models": _models,
    "attacks": _attacks,
    "sections": _sections,
}
