"""Figure 3 on the embedded digits: DLG against FedAvg, UDP-FedAvg, and FedCEO's models after smoothing.

    python experiments/fedceo/leakage.py --out docs/figures

Ten clients hold one image each and take one step from the public start. The attacker has what such a step leaves: the
uploaded model (FedAvg, UDP-FedAvg), or the personal model that FedCEO's server sends back after smoothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

from fedveil.attacks.registry import make_attack
from fedveil.attacks.view import ServerView, image_box
from fedveil.data.client_data import ArrayClients
from fedveil.data.digits import load_digits
from fedveil.evaluation.image_quality import Brightness, psnr
from fedveil.figures.figure import save_figure
from fedveil.methods.fedceo import FedCEO
from fedveil.models.registry import make_model
from fedveil.session.callbacks.keep import KeepRounds
from fedveil.session.run import run
from fedveil.streams import named_stream
from fedveil.task import Task
from fedveil.tree import Params, concatenate, expand, rows, scale, sub, with_axis

sys.path.insert(0, str(Path(__file__).parent))

from drawing import leakage_figure

CLIENTS, ATTACKED = 10, 3
SIGMAS = (0.0001, 0.001, 0.01, 1.0)
LEARNING_RATE = 0.1


def updates(task: Task, data: ArrayClients, start: Params, sigma: float) -> tuple[Params, Params]:
    """One round's uploads and their smoothed models, each read as gradients `[K, ...]`."""
    watch = KeepRounds({1})
    method = FedCEO(lr=LEARNING_RATE, epochs=1, batch_size=1, noise_multiplier=sigma, interval=1)
    run(task, data, method, rounds=1, cohort=CLIENTS, workers=1, noise="seeded", callbacks=[watch])
    before, kept = expand(with_axis(start), CLIENTS), watch.found[1]
    uploaded, smoothed = (
        scale(sub(before, model), 1 / LEARNING_RATE) for model in (kept.up.params, kept.server.personal)
    )
    return uploaded, smoothed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--restarts", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits()
    task = Task(lambda: make_model("lenet-zhu", digits.input_shape, digits.num_classes))
    data = ArrayClients.from_arrays(
        [(digits.train.x[k : k + 1], digits.train.y[k : k + 1]) for k in range(CLIENTS)]
    )
    start = task.init(0)
    seen: dict[str, Params] = {"FedAvg": updates(task, data, start, 0.0)[0]}
    for sigma in SIGMAS:
        uploaded, smoothed = updates(task, data, start, sigma)
        seen[f"UDP-FedAvg, sigma {sigma:g}"] = uploaded
        seen[f"FedCEO smoothed, sigma {sigma:g}"] = smoothed
    view = ServerView(
        task,
        start,
        concatenate([rows(gradient, list(range(ATTACKED))) for gradient in seen.values()]),
        examples=1,
        input_shape=digits.input_shape,
        classes=digits.num_classes,
        box=image_box(digits.mean, digits.std),
    )
    attack = make_attack("dlg", {"steps": given.steps, "restarts": given.restarts})
    found = attack(view, named_stream(0, "attack")).images[:, 0]
    bright = Brightness(digits.mean, digits.std)
    originals = digits.train.x[:ATTACKED]
    pictures: dict[str, Tensor] = {"original": bright(originals)}
    scores: dict[str, list[float]] = {}
    for i, name in enumerate(seen):
        images = bright(found[i * ATTACKED : (i + 1) * ATTACKED].float())
        pictures[name] = images
        scores[name] = psnr(bright(originals), images.clamp(0, 1)).clamp(max=200).tolist()
        print(json.dumps({"seen": name, "psnr": scores[name], "mean": statistics.fmean(scores[name])}))
    given.out.mkdir(parents=True, exist_ok=True)
    save_figure(leakage_figure(pictures, scores), given.out / "fedceo-dlg.png")


if __name__ == "__main__":
    main()
