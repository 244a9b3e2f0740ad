"""Accounting for rows whose epsilon a paper claims, from the configuration alone; nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.errors import FedveilError
from fedveil.experiment.prepare import prepare
from fedveil.experiment.records import Records
from fedveil.experiment.tables import PublishedTable, Row
from fedveil.experiment.verdicts import Proven
from fedveil.privacy.accounting import account
from fedveil.session.privacy_guard import declared


def account_claims(
    table: PublishedTable, rows: Sequence[Row], records: Path, data_dir: Path | None = None
) -> tuple[dict[str, Proven], dict[str, str]]:
    """Record and return the verdict of each row with a claim, and the reasons of rows that could not be prepared."""
    kept = Records(table, records)
    claimed = [row for row in rows if row.claim is not None]
    failed: dict[str, str] = {}
    for row in claimed:
        config = table.config(row)
        try:
            prepared = prepare(config, 0, data_dir)
        except FedveilError as error:
            failed[row.name] = str(error)
            continue
        releases = declared(prepared.method, prepared.plan, deployed=False)
        proven = account(releases, prepared.plan, config.privacy.delta)
        kept.add_accounted(row, {f"{one.unit} against {one.adversary}": one.epsilon for one in proven})
    if len(failed) < len(claimed):
        kept.write()
    return {row.name: kept.proven(row) for row in claimed if row.name not in failed}, failed
