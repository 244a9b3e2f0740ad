"""`fedveil attack RESULT --attack lira`: who was in the training data of a finished run?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.attack_runs.membership import Target, attack_result
from fedveil.cli.app import out
from fedveil.cli.findings import show_membership
from fedveil.errors import InputError
from fedveil.experiment.changes import parse_value


def attack_membership(
    result: Path,
    attack: str,
    *,
    settings: dict[str, Any],
    target: Target,
    examples: int | None,
    round_: int | None,
    client: int | None,
    exchange: int,
    seed: int,
    data: Path | None,
    as_json: bool,
) -> None:
    """Attack a finished run; writes a finding and its ROC curve beside the run."""
    finding = attack_result(
        result,
        attack,
        settings=settings,
        target=target,
        examples=500 if examples is None else examples,
        round=round_,
        client=client,
        exchange=exchange,
        attack_seed=seed,
        data_dir=data,
    )
    if as_json:
        print(json.dumps(finding.to_json()))
        return
    show_membership(finding)
    out.print(f"finding in {result / 'attacks'}", soft_wrap=True)


def parse_settings(changes: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs, values as in TOML."""
    found: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise InputError("--set", change, "is not a setting", "Write --set shadows=32.")
        found[key.strip()] = parse_value(text)
    return found
