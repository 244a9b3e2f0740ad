"""One verdict on an attack: the page of a report and the command line say the same of the same finding."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

import pytest

from fedveil.attack_runs.verdict import NO_PROOF, attack_verdict
from fedveil.cli.findings import verdict_lines
from fedveil.report.html import write_report
from fedveil.report.reading import read_folder
from tests.unit.report.makers import write_run

BASELINE = 11.5
NAN = math.nan
GAINS = (-5.0, -0.001, 0.0, 0.001, 0.5, 0.9999, 1.0, 1.0004, 1.5, 20.0, math.inf)


def images(psnr: Any, baseline: Any = BASELINE, single: Any = ()) -> dict[str, Any]:
    return {
        "mean_image_psnr": baseline,
        "against_x": {"mean": {"psnr": psnr}, "per_image": {"psnr": list(single)}},
    }


def texts(gain: float) -> dict[str, Any]:
    return {"metrics": {"rouge1": 0.2 + gain}, "public_text": {"rouge1": 0.2}}


def membership(low: Any) -> dict[str, Any]:
    return {"auc": {"value": 0.7, "low": low, "high": 0.9}}


FINDINGS: list[Any] = [
    *(images(BASELINE + gain) for gain in GAINS),
    *(images(BASELINE + gain, single=(10.0, 12.0, 30.0)) for gain in GAINS),
    *(images(BASELINE + gain, single=(5.0,)) for gain in GAINS),
    *(texts(gain) for gain in (-0.1, 0.0, 0.04, 0.06, 0.5, NAN)),
    *(membership(low) for low in (0.1, 0.5, 0.5001, 0.8, NAN, None)),
    images(NAN),
    images(12.0, NAN),
    images(None),
    images(12.0, None),
    images(math.inf, math.inf),
    images(True, False),
    images("15", "11"),
    images(10**400),
    {"against_x": None, "mean_image_psnr": 3.0},
    {"against_x": [1]},
    {},
    [],
    None,
]


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: str(finding)[:60])
def test_page_and_command_line_give_the_same_verdict(tmp_path: Path, finding: Any) -> None:
    run = write_run(tmp_path)
    place = run / "attacks" / "some-attack"
    place.mkdir(parents=True)
    (place / "finding.json").write_text(json.dumps(finding))
    verdict = attack_verdict(finding)
    (read,) = [attack for attack in read_folder(run).attacks if attack.name == "some-attack"]
    assert read.verdict == verdict
    shown = write_report([run], tmp_path / "report.html").read_text()
    told = "\n".join(verdict_lines(finding))
    if verdict is None:
        assert told == ""
        return
    assert f"<p>{escape(verdict.text)}</p>" in shown
    assert told in (verdict.text, f"{verdict.text} {NO_PROOF}")
    assert (NO_PROOF in told) == (verdict.level != "leak")


@pytest.mark.parametrize(
    ("gain", "level"),
    [
        (-5.0, "nothing"),
        (0.0, "nothing"),
        (0.001, "unclear"),
        (1.0, "unclear"),
        (1.0004, "leak"),
        (9.0, "leak"),
    ],
)
def test_images_leak_only_beyond_what_chance_explains(gain: float, level: str) -> None:
    verdict = attack_verdict(images(BASELINE + gain))
    assert verdict is not None
    assert verdict.level == level


@pytest.mark.parametrize(("gain", "level"), [(-0.1, "nothing"), (0.04, "nothing"), (0.06, "leak")])
def test_texts_leak_only_beyond_what_chance_explains(gain: float, level: str) -> None:
    verdict = attack_verdict(texts(gain))
    assert verdict is not None
    assert verdict.level == level


@pytest.mark.parametrize(("low", "level"), [(0.1, "nothing"), (0.5, "nothing"), (0.51, "leak")])
def test_members_leak_only_where_the_interval_is_above_guessing(low: float, level: str) -> None:
    verdict = attack_verdict(membership(low))
    assert verdict is not None
    assert verdict.level == level


@pytest.mark.parametrize("psnr", [NAN, None, "15", True])
def test_scores_that_are_not_numbers_have_no_verdict(psnr: Any) -> None:
    assert attack_verdict(images(psnr)) is None
    assert attack_verdict(images(15.0, psnr)) is None
