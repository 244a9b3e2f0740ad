"""The pictures of FedEM's paper, made again at a size that a laptop finishes.

    python experiments/fedem/figures.py 3 --data data --output docs/figures/fedem-figure-3.png

Fig. 3  eight MNIST digits and what is reconstructed of them under FedSGD, PPFA, Gaussian noise and FedEM
Fig. 4  one CIFAR-10 image, the image trained on, and the perturbation stretched to be seen, after N steps
Fig. 6  seconds of a round of FedEM against N
Fig. 7  test accuracy over rounds, FedSGD and FedEM, MNIST and Fashion-MNIST
Fig. 8  scores over five seeds, from the numbers that tables.py has left in RESULTS/tables.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from one_model import attack_rows, draw, method_of
from rows import config_of

from fedveil.attacks.registry import make_attack
from fedveil.evaluation.image_quality import Brightness
from fedveil.experiment.prepare import prepare
from fedveil.experiment.run import run_seed
from fedveil.figures.figure import new_figure, save_figure
from fedveil.figures.style import matplotlib_line, matplotlib_style
from fedveil.methods.fedem import FedEM
from fedveil.methods.fedsgd import batch_in_step
from fedveil.methods.method import At
from fedveil.streams import ClientStreams
from tables import trained

ROWS = {"fedsgd": "FedSGD", "ppfa": "PPFA .995", "gaussian": "Gaussian 1/255", "fedem-8": "FedEM 8/255"}
PUBLISHED = {
    "mse": (1.5373, 0.0802),
    "psnr": (8.4544, 0.2084),
    "ssim": (0.0420, 0.0105),
    "lpips": (0.6618, 0.0260),
}


def figure_3(arguments: argparse.Namespace) -> None:
    run = trained(0, arguments)
    attack = make_attack("inverting-gradients", {"steps": arguments.steps, "tv": 1e-5})
    found = attack_rows(run, list(ROWS), 3, attack)
    strips = [("original", found[0].truth.x[0])]
    for name, scored in zip(ROWS.values(), found, strict=True):
        print(f"{name}: {scored.against_x.means()['psnr']:.2f} dB")
        strips.append((name, scored.finding.images[0][scored.order[0]]))
    draw(strips, Brightness(run.prepared.dataset.mean, run.prepared.dataset.std), arguments.output)


def figure_4(arguments: argparse.Namespace) -> Figure:
    """Client 0 answers the first model of a CIFAR-10 run; the perturbation starts from the same point for every N."""
    setting = argparse.Namespace(**(vars(arguments) | {"dataset": "cifar10", "examples": 16}))
    prepared = prepare(config_of("fedsgd", setting), 0, arguments.data)
    brightness = Brightness(prepared.dataset.mean, prepared.dataset.std)
    at = At(prepared.plan, 1)
    data = prepared.clients.load([0])
    task = prepared.task
    method = method_of(arguments.row)
    assert isinstance(method, FedEM)
    counts = (1, 5, 10, 15, 30, 50)
    figure = Figure(figsize=(1.25 * len(counts) + 0.8, 4.0), dpi=150)
    grid = figure.subplots(3, len(counts), gridspec_kw={"wspace": 0.05, "hspace": 0.05})
    figure.subplots_adjust(left=0.11, right=0.995, top=0.93, bottom=0.01)
    for column, count in enumerate(counts):
        one = replace(method, perturbation_steps=count)
        streams = ClientStreams(0, 1, (0,))
        server = one.init_server(task.init(0), prepared.plan)
        down = one.broadcast(at, server, [0])
        _, state = one.client_update(task, at, down, data, one.init_client(task, data, streams), streams)
        delta = state["delta"][0]
        x = batch_in_step(data, one.batch_size, 0, ClientStreams(0, 1, (0,))).x[0]
        change = delta[0]
        print(
            f"N = {count}: norm {float(change.norm()) * 255:.1f}/255, largest {float(change.abs().max()):.4f}"
        )
        stretched = 0.5 + change / (2 * change.abs().max().clamp(min=1e-12))
        shown = [brightness(x[:1])[0], brightness((x + delta)[:1])[0], stretched]
        for axes, image in zip(grid[:, column], shown, strict=True):
            axes.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
        grid[0, column].set_title(f"N = {count}", fontsize=9)
    for axes, name in zip(grid[:, 0], ("original", "trained on", "perturbation"), strict=True):
        axes.set_ylabel(name, fontsize=8)
    return figure


def figure_6(arguments: argparse.Namespace) -> Figure:
    prepared = prepare(config_of("fedsgd", arguments), 0, arguments.data)
    data = prepared.clients.load(list(range(arguments.clients)))
    method = method_of(arguments.row)
    assert isinstance(method, FedEM)
    seconds = {}
    for count in (0, 5, 10, 15, 20):
        one = replace(method, perturbation_steps=count, rho_max=method.rho_max if count else 0.0)
        seconds[count] = min(_round_seconds(one, prepared, data) for _ in range(2))
        print(f"N = {count}: {seconds[count]:.2f} s, {seconds[count] / seconds[0]:.1f} times FedSGD")
    with matplotlib.rc_context(matplotlib_style()):
        figure = new_figure(5.2, 3.4)
        axes = figure.add_subplot()
        axes.plot(list(seconds), list(seconds.values()), **matplotlib_line(0))
        axes.set_xticks(list(seconds))
        axes.set_xlabel("perturbation steps N (0: FedSGD)")
        axes.set_ylabel("seconds per round")
        axes.set_ylim(bottom=0)
    return figure


def _round_seconds(method: FedEM, prepared: Any, data: Any) -> float:
    task, plan = prepared.task, prepared.plan
    clients = list(range(data.count))
    server = method.init_server(task.init(0), plan)
    state = method.init_client(task, data, ClientStreams(0, 1, tuple(clients)))
    began = time.perf_counter()
    for exchange in range(method.exchanges(plan)):
        at, streams = At(plan, 1, exchange), ClientStreams(0, 1, tuple(clients), exchange)
        down = method.broadcast(at, server, clients)
        up, state = method.client_update(task, at, down, data, state, streams)
        server = method.server_update(task, at, server, clients, up, None)  # type: ignore[arg-type]  # it draws nothing
    return time.perf_counter() - began


def figure_7(arguments: argparse.Namespace) -> Figure:
    with matplotlib.rc_context(matplotlib_style()):
        names = arguments.datasets.split(",")
        figure = new_figure(4.2 * len(names), 3.4)
        for place, dataset in enumerate(names):
            axes = figure.add_subplot(1, len(names), place + 1)
            setting = argparse.Namespace(**(vars(arguments) | {"dataset": dataset, "evaluate_every": 1}))
            for line, row in enumerate(("fedsgd", "fedem-8", "fedem-255")):
                result = run_seed(
                    config_of(row, setting),
                    0,
                    experiment=f"figure-7-{dataset}-{row}",
                    results=arguments.results,
                    data_dir=arguments.data,
                )
                points = [
                    (p["round"], p["accuracy"]) for p in result.history if p.get("accuracy") is not None
                ]
                print(dataset, row, ", ".join(f"{accuracy:.4f}" for _, accuracy in points), flush=True)
                name = "FedSGD" if row == "fedsgd" else f"FedEM {row.removeprefix('fedem-')}/255"
                axes.plot(*zip(*points, strict=True), label=name, **matplotlib_line(line))
            axes.set_title(dataset)
            axes.set_xlabel("round")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_ylabel("test accuracy")
            axes.legend()
    return figure


def figure_8(arguments: argparse.Namespace) -> Figure:
    """FedEM with radius 255/255, attacked in round 1, between FedSGD and the paper's own mean and deviation."""
    known = json.loads((arguments.results / "tables.json").read_text())
    found: dict[tuple[str, str], list[float]] = {}
    for key, scores in known.items():
        row, dataset, clients, _, _, stage, adaptive, settings = json.loads(key)
        fits = (
            settings.get("steps") == arguments.steps and settings["tv"] == 1e-5 and settings["restarts"] == 1
        )
        if (dataset, clients, stage, adaptive) == ("mnist", 4, 1, False) and fits:
            for name in PUBLISHED:
                found.setdefault((row, name), []).append(scores[name])
    with matplotlib.rc_context(matplotlib_style()):
        figure = new_figure(8.4, 2.8)
        for place, (name, published) in enumerate(PUBLISHED.items()):
            axes = figure.add_subplot(1, len(PUBLISHED), place + 1)
            bars = [("FedSGD", found["fedsgd", name]), ("FedEM 255", found["fedem-255", name])]
            points = [(label, statistics.fmean(v), statistics.stdev(v)) for label, v in bars]
            points.append(("paper", *published))
            for at, (label, mean, spread) in enumerate(points):
                print(f"{name} {label}: {mean:.4f} +- {spread:.4f}")
                axes.errorbar(at, mean, spread, capsize=4, **(matplotlib_line(at) | {"linestyle": ""}))
            axes.set_xticks(range(3), [label for label, _, _ in points], fontsize=7)
            axes.set_xlim(-0.5, 2.5)
            axes.set_title({"mse": "MSE", "psnr": "PSNR, dB", "ssim": "SSIM", "lpips": "LPIPS"}[name])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("figure", type=int, choices=(3, 4, 6, 7, 8))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--datasets", default="mnist,fashion-mnist", help="of Fig. 7")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--row", default="fedem-8", help="of Fig. 4 and 6: whose radius")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    make = {3: figure_3, 4: figure_4, 6: figure_6, 7: figure_7, 8: figure_8}[arguments.figure]
    figure = make(arguments)
    if figure is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, arguments.output)


if __name__ == "__main__":
    main()
