"""Draws FedLAP-DP's figures from short runs on the embedded digits, with and without privacy.

python experiments/fedlap_dp/figures.py --out docs/methods
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedveil.experiment.config import Config, load_config
from fedveil.experiment.prepare import prepare
from fedveil.figures.fedlap import Sets, images_figure
from fedveil.figures.figure import save_figure
from fedveil.session.callbacks.keep import KeepRounds
from fedveil.session.run import run
from fedveil.task import Task
from fedveil.training.surrogate import measure_path
from fedveil.tree import Params

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from drawing import path_figure, pixels_figure  # noqa: E402

# The same settings without privacy: images follow exact gradients, and each client measures its radius.
PLAIN = ["method.name=fedlap", "method.radius=10.0", "method.radius_examples=50", "run.rounds=4"]
PRIVATE = ["run.rounds=4"]


def watched(config: Config, rounds: tuple[int, ...]) -> tuple[Task, dict[int, Sets], Params, float | None]:
    """A run's task, its synthetic sets, the model that the last of them were made for, and the accuracy."""
    prepared = prepare(config, 0)
    watch = KeepRounds(rounds)
    test = prepared.dataset.test
    result = run(
        prepared.task,
        prepared.clients,
        prepared.method,
        rounds=config.run.rounds,
        sampler="all",
        test=(test.x, test.y),
        classes=prepared.dataset.num_classes,
        callbacks=[watch],
        workers=1,
        noise="seeded",
    )
    found = {number: Sets(kept.up.images, kept.up.labels) for number, kept in watch.found.items()}
    return prepared.task, found, watch.found[rounds[-1]].down.params, result.accuracy


def draw(out: Path, name: str, changes: list[str]) -> None:
    config = load_config(HERE / "digits.toml", changes)
    rounds = (1, config.run.rounds // 2, config.run.rounds)
    task, found, model, accuracy = watched(config, rounds)
    print(f"{name}: accuracy {accuracy:.4f} after {config.run.rounds} rounds")
    prepared = prepare(config, 0)
    names = prepared.dataset.classes
    save_figure(images_figure(found, range(4), names), out / f"{name}-images.png")
    save_figure(pixels_figure(found), out / f"{name}-pixels.png")
    sets = found[rounds[-1]]
    everyone = prepared.clients.load(range(prepared.plan.clients))
    path = measure_path(task, model, sets.images, sets.labels, everyone, lr=0.05, radius=10.0, steps=60)
    save_figure(path_figure(path, 10.0), out / f"{name}-path.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/methods"))
    parser.add_argument("--only", choices=("fedlap", "fedlap-dp"))
    chosen = parser.parse_args()
    for name, changes in (("fedlap", PLAIN), ("fedlap-dp", PRIVATE)):
        if chosen.only in (None, name):
            draw(chosen.out, name, changes)


if __name__ == "__main__":
    main()
