"""The verdict on an attack's scores in words, for the command line and the report.

A score counts as a leak only if it exceeds the baseline without uploads by more than chance explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["leak", "unclear", "nothing"]
NO_PROOF = "A failed attack proves nothing: a stronger one may succeed."
_PSNR_MARGIN = 1.0  # dB: among many examples, some unrelated one is about as close by chance
_ROUGE_MARGIN = 0.05
_GUESSING = 0.5  # the AUC of a coin


@dataclass(frozen=True)
class AttackVerdict:
    """Whether an attack improved on the baseline, and a sentence about it."""

    level: Level
    text: str


def attack_verdict(finding: Any) -> AttackVerdict | None:
    """The verdict on a `finding.json` of images, texts or membership.

    Returns:
        None if its scores or their baseline are missing or not numbers.
    """
    judged = (_on_images(finding), _on_texts(finding), _on_membership(finding))
    return next((verdict for verdict in judged if verdict is not None), None)


def _on_images(finding: Any) -> AttackVerdict | None:
    found, baseline = _score(finding, "against_x", "mean", "psnr"), _score(finding, "mean_image_psnr")
    if found is None or baseline is None:
        return None
    numbers = f"{found:.1f} dB against {baseline:.1f} dB"
    if found > baseline + _PSNR_MARGIN:
        text = f"On average closer to the originals than the mean image or public ones are ({numbers}): "
        return AttackVerdict("leak", text + "an improvement over the baseline.")
    single = _scores(finding, "against_x", "per_image", "psnr")
    closer = [value for value in single if value > baseline]
    some = f"{len(closer)} of {len(single)} are closer, the best at {max(closer):.1f} dB" if closer else ""
    if found > baseline:
        text = f"On average within {_PSNR_MARGIN:g} dB of the mean image or public ones ({numbers}), "
        return AttackVerdict("unclear", f"{text}which chance explains{'; ' if some else ''}{some}.")
    text = f"On average no closer to the originals than the mean image or public ones are ({numbers})"
    if some:
        text += f", but {some}."
    else:
        text += (
            ", nor is any single one: by this measure no improvement over the baseline." if single else "."
        )
    return AttackVerdict("nothing", text)


def _on_texts(finding: Any) -> AttackVerdict | None:
    found, baseline = _score(finding, "metrics", "rouge1"), _score(finding, "public_text", "rouge1")
    if found is None or baseline is None:
        return None
    gain = found - baseline
    if gain <= _ROUGE_MARGIN:
        return AttackVerdict("nothing", "No better than a public text.")
    text = f"{100 * gain:.0f} points of ROUGE-1 above a public text: the uploads disclose texts."
    return AttackVerdict("leak", text)


def _on_membership(finding: Any) -> AttackVerdict | None:
    low = _score(finding, "auc", "low")
    if low is None:
        return None
    if low <= _GUESSING:
        return AttackVerdict("nothing", "No better than guessing (AUC 0.5).")
    text = "Better than guessing (AUC 0.5): the model discloses who was in its data."
    return AttackVerdict("leak", text)


def _score(finding: Any, *place: str) -> float | None:
    return _number(_at(finding, place))


def _scores(finding: Any, *place: str) -> list[float]:
    listed = _at(finding, place)
    known = [_number(value) for value in listed] if isinstance(listed, list) else []
    return [value for value in known if value is not None]


def _at(finding: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        finding = finding.get(key) if isinstance(finding, Mapping) else None
    return finding


def _number(value: Any) -> float | None:
    """A score from a file that may be damaged. Infinity is kept: it is the PSNR of equal images."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
