"""Attack findings in a results folder: facts, pictures, texts and ROC curves, read defensively."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.attack_runs.verdict import AttackVerdict, attack_verdict
from fedveil.report.files import Problems, natural, number, read_bytes, read_json, why

_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST_PICTURE = 4 << 20
_MOST_PICTURES = 48


@dataclass(frozen=True)
class Picture:
    name: str
    png: bytes

    @property
    def width(self) -> int:
        """In pixels, as its header says."""
        return int.from_bytes(self.png[16:20], "big")


@dataclass(frozen=True)
class TextPair:
    """A client's text and its reconstruction."""

    original: str
    found: str
    rouge: tuple[float, ...]


@dataclass(frozen=True)
class Attack:
    """The finding of one attack: facts, pictures or texts and, for a membership attack, its ROC curve."""

    name: str
    target: str
    facts: tuple[tuple[str, str], ...]
    pictures: tuple[Picture, ...]
    roc: tuple[tuple[float, ...], tuple[float, ...]] | None
    texts: tuple[TextPair, ...] = ()
    verdict: AttackVerdict | None = None


def read_attacks(place: Path, problems: Problems) -> tuple[Attack, ...]:
    """The findings in this folder of attacks; unreadable files are added to `problems`."""
    return tuple(_attack(folder, place, problems) for folder in _attacks(place))


def _attacks(place: Path) -> list[Path]:
    """The folders of attacks: those with a finding or a curve, and those that should have one."""
    found = {path.parent for name in ("finding.json", "roc.json") for path in place.rglob(name)}
    found |= {folder for folder in _subfolders(place) if not any(folder in (f, *f.parents) for f in found)}
    return sorted(found, key=natural)


def _attack(folder: Path, place: Path, problems: Problems) -> Attack:
    name, *target = folder.relative_to(place).parts
    within = "/".join(("attacks", name, *target, ""))
    found = read_json(folder / "finding.json", problems, within=within)
    facts = tuple(_flat(found)) if isinstance(found, Mapping) else ()
    roc = None
    if (folder / "roc.json").exists():
        roc = _roc(read_json(folder / "roc.json", problems, within=within))
        if roc is None:
            problems.append(f"{within}roc.json holds no curve")
    pictures = tuple(p for p in read_pictures(folder, problems) if roc is None or p.name != "roc")
    texts: tuple[TextPair, ...] = ()
    if (folder / "texts.json").exists():
        texts = _text_pairs(read_json(folder / "texts.json", problems, within=within))
        if not texts:
            problems.append(f"{within}texts.json holds no texts")
    return Attack(name, " ".join(target), facts, pictures, roc, texts, attack_verdict(found))


def _text_pairs(found: Any) -> tuple[TextPair, ...]:
    pairs = []
    for row in found[:_MOST_PICTURES] if isinstance(found, list) else []:
        texts = [row.get(key) for key in ("original", "found")] if isinstance(row, Mapping) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            return ()
        scores = [number(row.get(key)) for key in ("rouge1", "rouge2", "rougeL")]
        original, read = map(str, texts)
        pairs.append(TextPair(original, read, tuple(score for score in scores if score is not None)))
    return tuple(pairs)


def _roc(found: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if not isinstance(found, Mapping):
        return None
    false, true = found.get("fpr"), found.get("tpr")
    if not isinstance(false, list) or not isinstance(true, list) or not 1 < len(false) == len(true):
        return None
    pairs = [(number(a), number(b)) for a, b in zip(false, true, strict=True)]
    whole = sorted((a, b) for a, b in pairs if a is not None and b is not None)
    if len(whole) != len(pairs):
        return None
    return tuple(a for a, _ in whole), tuple(b for _, b in whole)


def _flat(values: Mapping[str, Any], within: str = "", depth: int = 0) -> Iterable[tuple[str, str]]:
    """Facts as name and text; long lists and what is nested deep are not facts."""
    for key, value in values.items():
        name = str(key).replace("_", " ") + (f" ({within})" if within else "")
        if isinstance(value, Mapping) and set(value) == {"value", "low", "high"}:
            middle, low, high = (number(value[part]) for part in ("value", "low", "high"))
            if middle is not None and low is not None and high is not None:
                yield name, f"{middle:.3f} ({low:.3f} to {high:.3f})"
        elif isinstance(value, Mapping) and depth < 3:
            plain = key in ("metrics", "facts", "summary", "mean")
            yield from _flat(value, within if plain else str(key).replace("_", " "), depth + 1)
        elif isinstance(value, bool) or value is None:
            yield name, {True: "yes", False: "no", None: "none"}[value]
        elif isinstance(value, int | float):
            yield name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        elif isinstance(value, str):
            yield name, value if len(value) <= 400 else value[:399] + "…"
        elif isinstance(value, list) and 0 < len(value) <= 8 and all(number(v) is not None for v in value):
            yield name, ", ".join(f"{v:.4g}" for v in value)


def read_pictures(folder: Path, problems: Problems) -> tuple[Picture, ...]:
    """The PNG pictures of a folder, none where there is no such folder."""
    if not folder.is_dir():
        return ()
    paths = sorted(folder.glob("*.png"), key=natural)
    pictures = []
    for path in paths[:_MOST_PICTURES]:
        try:
            body = read_bytes(path, _LARGEST_PICTURE)
        except OSError as error:
            problems.append(f"{folder.name}/{path.name} {why(error)}")
            continue
        if not body.startswith(_PNG):
            problems.append(f"{folder.name}/{path.name} is no PNG picture")
            continue
        pictures.append(Picture(path.stem, body))
    if len(paths) > _MOST_PICTURES:
        problems.notes.append(f"{folder.name}: the first {_MOST_PICTURES} of {len(paths)} pictures are shown")
    return tuple(pictures)


def _subfolders(folder: Path) -> list[Path]:
    return (
        sorted((path for path in folder.iterdir() if path.is_dir()), key=natural) if folder.is_dir() else []
    )
