"""Published tables as data: one TOML per table or figure, one configuration per row.

`[table]` says what is published and how it is judged, `[base]` what all rows share, each `[[row]]` what sets it apart
and its published value, `[reduced]` what a small machine changes. A row's values come before the base's, the reduced
ones before both. Fields of `[base.method]` and `[reduced.method]` that a row's method does not have are left out there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedveil.errors import InputError, known_name, within
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.sections import Metric
from fedveil.methods import METHODS
from fedveil.methods.method import field_names
from fedveil.validation import known_keys, refused

PAPERS = ("fedceo", "fedlap-dp", "dp-fedags", "fedem")
Score = Literal["last", "best"]
Section = dict[str, Any]
_SECTIONS = ("task", "partition", "method", "run", "privacy")
_CLONE = Path(__file__).parents[3] / "experiments"  # beside `src`, where the package runs from a clone


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Header(_Part):
    """What was published, and how a row is judged."""

    source: str
    title: str
    metric: Metric = "accuracy"
    score: Score = "last"
    """Which round is compared: the last one, or the one with the best accuracy."""
    tolerance: Annotated[float, Field(gt=0)] = 0.03
    """How far a mean may be from the published value, in the metric's own unit."""
    seeds: Annotated[int, Field(ge=1)] = 3
    note: str = ""


class _Overrides(_Part):
    task: Section = Field(default_factory=dict)
    partition: Section = Field(default_factory=dict)
    method: Section = Field(default_factory=dict)
    run: Section = Field(default_factory=dict)
    privacy: Section = Field(default_factory=dict)
    wrap: list[Section] | None = None
    attack: list[Section] | None = None


class Reduced(_Overrides):
    """What a small machine changes, in words and as values."""

    scale: str


class Claim(_Part):
    """The epsilon that a paper states for a row, and for whom."""

    epsilon: Annotated[float, Field(gt=0)]
    unit: Literal["record", "client"]
    adversary: Literal["server", "observer", "client"] = "server"


class Row(_Overrides):
    """One published number."""

    name: str
    group: str = ""
    """Rows of one group are compared with each other: the published order is theirs."""
    reading: str = ""
    """Where a text can be read in several ways: which way this is. Each reading is judged by itself."""
    published: float | None = None
    published_attack: dict[str, float] = Field(default_factory=dict)
    claim: Claim | None = None
    metric: Metric | None = None


class Table(_Part):
    """A published table or figure."""

    table: Header
    base: _Overrides
    row: Annotated[list[Row], Field(min_length=1)]
    reduced: Reduced | None = None

    @model_validator(mode="after")
    def _distinct(self) -> Table:
        names = [row.name for row in self.row]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InputError("row.name", twice[0], "names two rows", "Give every row a name of its own.")
        return self


def readings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each reading of the paper's text, in the order in which readings first occur."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.reading, []).append(row)
    return found


@dataclass(frozen=True)
class PublishedTable:
    """A table with its names: `fedceo` and `table-1-emnist`."""

    paper: str
    name: str
    content: Table

    @property
    def experiment(self) -> str:
        """The folder of its results."""
        return f"{self.paper}-{self.name}"

    @property
    def rows(self) -> list[Row]:
        return self.content.row

    def metric(self, row: Row) -> Metric:
        return row.metric or self.content.table.metric

    def selected(self, texts: Sequence[str]) -> list[Row]:
        """The rows of these names, or with all words of one of these texts in their name; all rows without a text."""
        if not texts:
            return self.rows
        for text in texts:
            if not any(self._selects(text, row.name) for row in self.rows):
                names = "; ".join(row.name for row in self.rows)
                raise InputError("--rows", text, "no row has such a name", f"Known: {names}.")
        return [row for row in self.rows if any(self._selects(text, row.name) for text in texts)]

    def _selects(self, text: str, name: str) -> bool:
        if text in (row.name for row in self.rows):
            return text == name
        return all(word in name.lower() for word in text.lower().split())

    def config(self, row: Row, *, reduced: bool = False) -> Config:
        """The configuration of a row."""
        small = self.content.reduced
        if reduced and small is None:
            raise InputError("--reduced", self.name, "has no reduced scale", "Leave it out.")
        layers: list[_Overrides] = [self.content.base, row]
        if reduced and small is not None:
            layers.append(small)
        with within(f"{self.paper} {self.name} {row.name}"):
            return make_config(_merged(layers, row) | {"paper": self._paper(row, small if reduced else None)})

    def _paper(self, row: Row, small: Reduced | None) -> Section:
        head = self.content.table
        said: Section = {
            "source": head.source,
            "table": head.title,
            "row": row.name,
            "metric": self.metric(row),
            "tolerance": head.tolerance,
            "scale": "full" if small is None else small.scale,
        }
        if row.published is not None:
            said["expected"] = row.published
        return said | ({"attack": row.published_attack} if row.published_attack else {})


def _merged(layers: Sequence[_Overrides], row: Row) -> Section:
    name = next(layer.method["name"] for layer in reversed(layers) if "name" in layer.method)
    fields = {"name", *field_names(METHODS[name])} if name in METHODS else set()
    content: Section = {}
    for section in _SECTIONS:
        values: Section = {}
        for layer in layers:
            own: Section = getattr(layer, section)
            if section == "method" and fields and layer is not row:
                own = {key: value for key, value in own.items() if key in fields}
            values = _over(values, own)
        if values:
            content[section] = values
    for listed in ("wrap", "attack"):
        given = [value for layer in layers if (value := getattr(layer, listed)) is not None]
        if given and given[-1]:
            content[listed] = given[-1]
    return content


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> Section:
    """`above` over `below`, section by section."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def tables_folder(given: Path | None = None) -> Path:
    """Where tables are: the given folder, `experiments` here, or that of the clone which fedveil runs from."""
    if given is not None:
        return given
    here = Path("experiments")
    return here if any(here.glob("*/table-*.toml")) else _CLONE


def list_tables(folder: Path, paper: str) -> list[PublishedTable]:
    """All tables and figures of a paper, in the order of their numbers."""
    known_name("PAPER", "paper", paper, PAPERS)
    paths = [*(folder / paper).glob("table-*.toml"), *(folder / paper).glob("figure-*.toml")]
    if not paths:
        raise InputError(
            "--tables",
            str(folder),
            f"holds no table of {paper}",
            "Run it in a clone of fedveil, or give the path of its `experiments` folder.",
        )
    return [load_table(path) for path in sorted(paths, key=_number)]


def find_table(folder: Path, paper: str, name: str) -> PublishedTable:
    tables = {table.name: table for table in list_tables(folder, paper)}
    return tables[known_name("TABLE", "table", name, list(tables))]


def is_table(path: Path) -> bool:
    """Whether this file is a published table, and no experiment; what cannot be read is none."""
    try:
        return "table" in tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return False


def load_table(path: Path) -> PublishedTable:
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError("table", str(path), f"cannot be read: {error}", "Fix the file.") from error
    try:
        content = Table.model_validate(raw)
    except ValidationError as error:
        raise refused(error, path.name, known_keys(Table)) from error
    return PublishedTable(path.parent.name, path.stem, content)


def _number(path: Path) -> tuple[str, int, str]:
    kind, number, *rest = path.stem.split("-")
    return kind, int(number) if number.isdecimal() else 0, "-".join(rest)
