"""Draws FedCEO's figures: the idea from a short run on the embedded digits, accuracies from the sweep's results.

python experiments/fedceo/figures.py --results results/fedceo --out docs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedveil.experiment.config import load_config
from fedveil.experiment.prepare import prepare
from fedveil.figures.fedceo import spectrum_figure
from fedveil.figures.figure import save_figure
from fedveil.methods.fedceo import FedCEO
from fedveil.session.callbacks.keep import KeepRounds
from fedveil.session.run import run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from drawing import accuracy_figure, class_accuracy, smoothness_and_accuracy_figure  # noqa: E402
from generate import NAMES, SIGMAS, TABLE_1  # noqa: E402
from sweep import Case, fedceo, scores, table  # noqa: E402


def idea(out: Path) -> None:
    """Figures 1 and 5 on the digits: ten clients, after their last smoothing round."""
    changes = ["wrap=[]", "method.noise_multiplier=0.6", "method.lam=0.42", "method.theta=1.0"]
    changes += ["method.interval=20", "run.rounds=20"]
    config = load_config(HERE / "digits.toml", changes)
    prepared = prepare(config, 0)
    method = config.build_method()
    assert isinstance(method, FedCEO)
    watch = KeepRounds({config.run.rounds})
    run(
        prepared.task,
        prepared.clients,
        method,
        rounds=config.run.rounds,
        cohort=10,
        workers=1,
        noise="seeded",
        callbacks=[watch],
    )
    test = prepared.dataset.test
    kept = watch.found[config.run.rounds]
    before, after = kept.up.params, kept.server.personal
    accuracies = tuple(class_accuracy(prepared.task, models, test.x, test.y, 8) for models in (before, after))
    last = list(before)[-1]
    figure = smoothness_and_accuracy_figure(before[last], after[last], accuracies, label="8")
    save_figure(figure, out / "methods" / "fedceo-smoothness.png")
    first = next(iter(before))
    threshold = method.threshold(kept.at.round, method.noise_std(kept.at), *before[first].shape)
    figure = spectrum_figure(before[first], after[first], threshold)
    save_figure(figure, out / "methods" / "fedceo-spectrum.png")


def reproduction(results: Path, out: Path) -> None:
    """Figure 4 and Table 3's sweep, from what the sweep has finished."""
    names = {
        "UDP-FedAvg": "udp-fedavg",
        "FedCEO theta=1": "fedceo-theta-1",
        "FedCEO theta>1": "fedceo",
        "FedCEO auto": "",
    }
    found: dict[str, dict[float, list[float]]] = {name: {} for name in names}
    for case, _ in table("emnist", "iid", 0):
        if case.method in names:
            found[case.method][case.sigma] = [s["accuracy"] for s in scores(case, results)]
    paper = {
        NAMES[key].replace(" = ", "=").replace(" > ", ">"): {
            s: v / 100 for s, v in zip(SIGMAS, row, strict=True)
        }
        for key, row in TABLE_1["emnist-letters", "mlp-2"].items()
        if key in names.values()
    }
    save_figure(
        accuracy_figure(found, x="noise multiplier", published=paper),
        out / "reproduction" / "fedceo-sigma.png",
    )
    noise = "method.noise_multiplier=1.0"
    sweep: dict[float, list[float]] = {}
    for interval in (3, 4, 5, 6, 7):
        changes = (*fedceo("emnist", 1.0, theta=True), f"method.interval={interval}", noise)
        if interval == 6:
            changes = (*fedceo("emnist", 1.0, theta=True), noise)
        case = Case("emnist", "variants", f"FedCEO I={interval}", 1.0, changes)
        sweep[interval] = [s["accuracy"] for s in scores(case, results)]
    plain = Case("emnist", "iid", "UDP-FedAvg", 1.0, ("method.name=udp-fedavg", noise))
    level = [s["accuracy"] for s in scores(plain, results)]
    seeds = min(len(values) for values in (level, *sweep.values()))  # of the same seeds everywhere
    lines = {
        "FedCEO theta>1, sigma 1.0": {value: found[:seeds] for value, found in sweep.items()},
        "UDP-FedAvg": dict.fromkeys(sweep, level[:seeds]),
    }
    save_figure(accuracy_figure(lines, x="interval I (rounds)"), out / "reproduction" / "fedceo-interval.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, help="the sweep's results; without it only the idea is drawn")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    idea(arguments.out)
    if arguments.results is not None:
        reproduction(arguments.results, arguments.out)


if __name__ == "__main__":
    main()
