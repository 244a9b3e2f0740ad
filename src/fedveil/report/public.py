"""The public part of a report, for everybody who may see the model."""

from __future__ import annotations

from dataclasses import replace

from fedveil.report.run import Run


def published(run: Run) -> Run:
    """The run without values that have no noise; the rest may be shown to everybody who may see the model.

    Left out are scores and label counts of clients, attacks and pictures, cohort sizes, traffic and time (they show
    the size of hidden cohorts), the configuration with its seed and paths, the names of clients and folders, and how
    many records were used and left out.
    """
    return replace(
        run,
        name=f"{run.method}{'' if run.seed is None else f', seed {run.seed}'}",
        data="",
        personal=None,
        seconds=None,
        bytes_up=None,
        bytes_down=None,
        per_client=(),
        client_metrics={},
        partition=(),
        clients=(),
        attacks=(),
        synthetic=(),
        figures=(),
        config_text="",
        environment={},
        history=tuple(replace(point, bytes=0.0, invited=None, answered=None) for point in run.history),
        problems=(),
        notes=(),
        folder=None,
    )
