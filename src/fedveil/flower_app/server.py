"""The ServerApp: fedveil's own loop, with Flower's grid as its way to the clients."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.api import check_fit, run_on
from fedveil.engines.engine import Engine
from fedveil.engines.flower.engine import FlowerEngine, Limits
from fedveil.engines.flower.roster import Roster
from fedveil.engines.flower.wire import LARGEST_MESSAGE, fingerprint
from fedveil.errors import FedveilError
from fedveil.experiment import facts_of, options_of, prepare, result_folder
from fedveil.flower_app.client import STATES
from fedveil.flower_app.settings import RunSettings
from fedveil.results import Result

log = logging.getLogger("flwr.fedveil")
app = ServerApp()
PROBLEM = ".flower-problem"  # why the last attempt failed, for the command that waits for the result


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment to its end; a failure is left in its folder, for whoever waits for the result."""
    settings = RunSettings.from_run_config(context.run_config)
    folder = result_folder(settings.config, settings.seed, settings.experiment, settings.results)
    try:
        serve(grid, settings)
    except FedveilError as error:
        _leave(folder, str(error))
        raise
    except Exception:
        _leave(folder, traceback.format_exc())
        raise


def _leave(folder: Path, problem: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROBLEM).write_text(problem)


def limits_of(settings: RunSettings) -> Limits:
    section = settings.config.run
    return Limits(section.deadline, section.max_message or LARGEST_MESSAGE, section.min_clients)


def serve(grid: Grid, settings: RunSettings) -> Result:
    """A simulation on Flower: the data are on this machine, so the final model is scored on each client's own."""
    config, seed = settings.config, settings.seed
    prepared = prepare(config, seed, settings.data)
    task, method = prepared.task, prepared.method
    check_fit(task, prepared.clients)
    folder = result_folder(config, seed, settings.experiment, settings.results)

    def engine_of(run: str) -> Engine:
        roster = Roster(grid, fingerprint(task, method))
        roster.wait_for(prepared.plan.clients, timeout=600)
        return FlowerEngine(
            grid,
            roster,
            task,
            method,
            prepared.plan,
            run=run,
            limits=limits_of(settings),
            classes=prepared.dataset.num_classes,
            states=folder / STATES,
        )

    return run_on(
        engine_of,
        task,
        method,
        prepared.plan,
        seed=seed,
        test=prepared.dataset.test,
        classes=prepared.dataset.num_classes,
        scored_on=prepared.local_test or prepared.clients,
        held_out=prepared.local_test is not None,
        results=folder,
        facts=facts_of(config, settings.experiment, prepared),
        **options_of(config),
    )
