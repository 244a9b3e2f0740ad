"""Every defence on the same model and the same batch: what is left of eight images once the server inverts the upload.

The model is the one that a FedSGD run broadcast in a round, and client 0 answers it under each defence in turn. All
answers are attacked as one stack from the same kind of random start, so rows differ in the defence alone. An adaptive
attacker makes use of knowing the defence; rows are then attacked one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from rows import ROWS
from torch import Tensor

from fedveil.attack_runs.inversion import Scored, score
from fedveil.attack_runs.transcript import StoredRun, Truth, read_exchange, server_view, truth
from fedveil.attacks.view import Attack
from fedveil.evaluation.image_quality import Brightness
from fedveil.experiment.config import make_config
from fedveil.methods.method import AnyMethod
from fedveil.streams import ClientStreams, named_stream
from fedveil.tree import Params, concatenate


def method_of(row: str) -> AnyMethod:
    fields, wrap = ROWS[row]
    return make_config({"method": {"lr": 0.1, "batch_size": 8} | fields, "wrap": wrap}).build_method()


def answer(run: StoredRun, row: str, round: int) -> tuple[Params, Truth]:
    """What client 0 sends under this defence, and what it held."""
    method = method_of(row)
    exchange = read_exchange(run, round)
    streams = ClientStreams(run.seed, round, (0,))
    data = run.prepared.clients.load([0])
    state = method.init_client(run.prepared.task, data, streams)
    up, after = method.client_update(run.prepared.task, exchange.at, exchange.down, data, state, streams)
    held = truth(run, exchange, [0])
    return up.gradient, replace(held, delta=after["delta"]) if "delta" in after else held


def attack_rows(
    run: StoredRun,
    names: Sequence[str],
    round: int,
    attack: Attack,
    *,
    adaptive: bool = False,
    seed: int = 0,
) -> list[Scored]:
    """The same batch inverted from what client 0 sends under each of these defences, and scored.

    Without adaptation all answers are one stack. With it they are attacked one after another, by an attacker who
    makes use of the defence.
    """
    answers = [answer(run, name, round) for name in names]
    if not adaptive:
        return attack_answers(run, answers, round, attack, seed=seed)
    exchange = read_exchange(run, round)
    one = server_view(run, exchange, [0], labels=answers[0][1].y, adaptive=False)
    found = []
    for (gradient, own), name in zip(answers, names, strict=True):
        size = sum(leaf.numel() for leaf in gradient.values())
        known = method_of(name).adaptation(exchange.at, size, one.examples)
        finding = attack(replace(one, observed=gradient, adaptation=known), named_stream(seed, "one model"))
        found.append(score(run, one, finding, own))
    return found


def attack_answers(
    run: StoredRun, answers: Sequence[tuple[Params, Truth]], round: int, attack: Attack, *, seed: int = 0
) -> list[Scored]:
    """The same batch inverted from each of these gradients as one stack, and scored."""
    held = answers[0][1]
    one = server_view(run, read_exchange(run, round), [0], labels=held.y, adaptive=False)
    stack = replace(
        one,
        observed=concatenate([gradient for gradient, _ in answers]),
        labels=held.y.expand(len(answers), -1),
    )
    found = attack(stack, named_stream(seed, "one model"))
    findings = [
        replace(
            found,
            images=found.images[t : t + 1],
            labels=found.labels[t : t + 1],
            losses=found.losses[t : t + 1],
            path=tuple((step, images[t : t + 1]) for step, images in found.path),
        )
        for t in range(len(answers))
    ]
    return [score(run, one, finding, own) for finding, (_, own) in zip(findings, answers, strict=True)]


def numbers(scored: Scored) -> dict[str, float | None]:
    """A row of the tables: scores against x, then how close the attack came to x + delta, and x + delta to x."""
    seen = scored.against_trained_on
    return {
        **scored.against_x.means(),
        "psnr_to_trained_on": None if seen is None else seen.means()["psnr"],
        "distortion_psnr": scored.distortion_psnr,
        "mean_image_psnr": scored.trivial_psnr,
        "loss": float(scored.finding.losses.min()),
    }


def draw(strips: list[tuple[str, Tensor]], brightness: Brightness, path: Path) -> None:
    """A row of images for each defence, named."""
    columns = strips[0][1].shape[0]
    figure = Figure(figsize=(1.5 + 0.8 * columns, 0.82 * len(strips)), dpi=150)
    grid = figure.add_gridspec(
        len(strips),
        columns,
        left=1.45 / (1.5 + 0.8 * columns),
        right=0.995,
        top=0.995,
        bottom=0.005,
        wspace=0.04,
        hspace=0.04,
    )
    for row, (name, images) in enumerate(strips):
        for column, image in enumerate(brightness(images).clamp(0, 1)):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(image.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
