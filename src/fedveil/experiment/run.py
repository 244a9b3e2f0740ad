"""One seed of an experiment: prepare it, and run it with the configured engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedveil.data.dataset import Examples
from fedveil.experiment.config import Config
from fedveil.experiment.early_stopping import public_examples
from fedveil.experiment.prepare import (
    Prepared,
    facts_of,
    prepare,
    result_folder,
    run_options,
)
from fedveil.session.callbacks.pictures import DrawPictures
from fedveil.session.loop import CallbacksFor
from fedveil.session.options import SimulationOptions
from fedveil.session.results import Result
from fedveil.session.run import simulate


def run_seed(
    config: Config,
    seed: int,
    *,
    experiment: str,
    results: Path,
    data_dir: Path | None = None,
    callbacks_for: CallbacksFor = lambda _plan: (),
) -> Result:
    """Run one seed with results in `results/<experiment>/<config hash>/seed-<seed>`.

    Engines are chosen only here. A finished run is loaded.
    """
    engine = config.run.engine
    if engine in ("simulation", "ray"):
        folder = result_folder(config, seed, experiment, results)
        prepared = prepare(config, seed, data_dir, folder=folder)
        public = public_examples(config, prepared.dataset.schema, prepared.dataset, data_dir)
        return _simulate(config, seed, experiment, folder, prepared, public, callbacks_for)

    from fedveil.federation import launch  # slow to import
    from fedveil.federation.run_settings import RunSettings

    launch.require_flower(engine)
    data = None if data_dir is None else data_dir.absolute()
    settings = RunSettings(config, seed, experiment, results.absolute(), data)
    if engine == "flower":
        return launch.submit(settings, launch.server_home(config), callbacks_for)
    return launch.simulate(settings, prepare(config, seed, data_dir), callbacks_for)


def _simulate(
    config: Config,
    seed: int,
    experiment: str,
    folder: Path,
    prepared: Prepared,
    public: Examples | None,
    callbacks_for: CallbacksFor,
) -> Result:
    """Run in this process. The method's figures are saved in the folder, for the report."""
    section = config.run
    pictures = DrawPictures(prepared.method, prepared.dataset, folder)
    return simulate(
        prepared.task,
        prepared.clients,
        prepared.method,
        prepared.plan,
        run_options(
            config,
            seed,
            folder,
            facts_of(config, experiment, prepared),
            prepared.noise,
            dataset=prepared.dataset,
        ),
        SimulationOptions(section.execution, section.workers, section.max_memory, section.cluster),
        replace(prepared.data, public=public),
        [pictures, *callbacks_for(prepared.plan)],
    )
