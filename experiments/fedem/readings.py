"""Other ways to read FedEM's Algorithm 1: does any of them protect as the paper's tables say?

    python experiments/fedem/readings.py --data data --seeds 3 --accuracy

Each reading departs from `fedveil.methods.fedem` in one point. As in tables.py FedSGD trains for three rounds, client 0
answers the broadcast model of a round under every reading, and all answers are attacked as one stack. Uploads taken at
theta_u are with `--unrolled` also inverted by an attacker who knows of it. With `--accuracy` FedEM is trained under
those readings that its configuration can express.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from one_model import attack_answers, numbers
from rows import ROWS, config_of, make_parser
from torch import Tensor

from fedveil.attack_runs.transcript import StoredRun, Truth, read_exchange, truth
from fedveil.attacks.inversion.inverting_gradients import InvertingGradients
from fedveil.attacks.inversion.labels import known_or_inferred
from fedveil.attacks.inversion.matching import candidate_gradients, cosine_distance, total_variation
from fedveil.attacks.inversion.optimise import stacked_adam
from fedveil.attacks.inversion.restarts import Clock, best_images, make_rows
from fedveil.attacks.view import Finding, ServerView, StepCallback
from fedveil.experiment.run import run_seed
from fedveil.methods.disclosure import LocalSteps
from fedveil.methods.fedem import FedEM, Norm, project_to_shell
from fedveil.methods.fedsgd import batch_in_step
from fedveil.models.registry import make_model
from fedveil.streams import ClientStreams, named_stream, normal
from fedveil.task import Task
from fedveil.tree import Params, add, expand, sub, with_axis
from tables import shown, trained

METHOD = FedEM()
SCORES = ("mse", "psnr", "ssim", "psnr_to_trained_on", "distortion_psnr", "mean_image_psnr")


@dataclass(frozen=True)
class Reading:
    """How delta is bounded and learnt, and what is uploaded; the defaults are the method's.

    unit      what the radius counts in: normalised pixels, or brightness from 0 to 1
    towards   whether delta lowers the loss or raises it
    learnt_on which network delta is learnt on: the broadcast one, or another that is freshly drawn
    upload_at where the uploaded gradient is taken: at theta (line 14), or at theta_u after its N steps
    restart   whether delta starts anew in each of the N steps
    """

    radius: int
    norm: Norm = "l2"
    unit: Literal["normalised", "brightness"] = "normalised"
    towards: Literal["lower", "higher"] = "lower"
    learnt_on: Literal["theta", "other"] = "theta"
    upload_at: Literal["theta", "theta_u"] = "theta"
    restart: bool = False

    def bound(self, std: float) -> float:
        return self.radius / 255 / (std if self.unit == "brightness" else 1.0)

    def fields(self, std: float) -> dict[str, Any] | None:
        """The method's own configuration of this reading, if it has one."""
        own = replace(Reading(self.radius), norm=self.norm, unit=self.unit)
        return {"name": "fedem", "rho_max": self.bound(std), "norm": self.norm} if self == own else None


READINGS: dict[str, Reading | None] = {
    "fedsgd": None,
    "l2-8": Reading(8),
    "l2-8-brightness": Reading(8, unit="brightness"),
    "l2-255-brightness": Reading(255, unit="brightness"),
    "linf-8": Reading(8, "linf"),
    "linf-8-brightness": Reading(8, "linf", "brightness"),
    "linf-32": Reading(32, "linf"),
    "linf-255": Reading(255, "linf"),
    "l2-8-higher-loss": Reading(8, towards="higher"),
    "l2-8-restarted": Reading(8, restart=True),
    "l2-8-other-network": Reading(8, learnt_on="other"),
    "l2-8-upload-at-theta-u": Reading(8, upload_at="theta_u"),
    "no-delta-upload-at-theta-u": Reading(0, upload_at="theta_u"),
}


def answer(run: StoredRun, reading: Reading | None, round: int) -> tuple[Params, Truth]:
    """What client 0 sends under this reading, and what it held."""
    exchange = read_exchange(run, round)
    held = replace(truth(run, exchange, [0]), delta=None)
    task = run.prepared.task
    batch = batch_in_step(run.prepared.clients.load([0]), 8, 0, ClientStreams(run.seed, round, (0,)))
    theta = expand(exchange.down.params, 1)  # type: ignore[attr-defined]
    if reading is None:
        return task.grad(theta, batch), held
    bound = reading.bound(run.prepared.dataset.std[0])

    def inside(delta: Tensor) -> Tensor:
        return project_to_shell(delta, 0.0, bound, reading.norm, lambda: delta)

    def drawn(step: int) -> Tensor:
        stream = named_stream(run.seed, "reading", round, step)
        return inside(normal([stream], batch.x.shape[1:], batch.x) * bound)

    teacher, theta_u = _teacher(run, reading, task, theta)
    delta = drawn(0)
    sign = -1.0 if reading.towards == "lower" else 1.0
    for step in range(METHOD.perturbation_steps):
        delta = drawn(step) if reading.restart else delta
        slope = teacher.input_grad(theta_u, teacher.perturbed(batch, delta)).sign()
        delta = inside(delta + sign * METHOD.perturbation_lr * slope)
        theta_u = add(theta_u, teacher.grad(theta_u, teacher.perturbed(batch, delta)), scale=-METHOD.lr)
    at = theta_u if reading.upload_at == "theta_u" else theta
    return task.grad(at, task.perturbed(batch, delta)), replace(held, delta=delta)


def _teacher(run: StoredRun, reading: Reading, task: Task, theta: Params) -> tuple[Task, Params]:
    """The network that delta is learnt on, and its start."""
    if reading.learnt_on == "theta":
        return task, theta
    data = run.prepared.dataset
    other = Task(lambda: make_model("convnet-64", data.input_shape, data.num_classes, width=8))
    return other, with_axis(other.init(run.seed))


@dataclass(frozen=True)
class Unrolled:
    """Inverting Gradients by a server that knows gradients to be taken at theta_u: each candidate trains its own.

    The candidate stands for x + delta throughout, though delta changes a little while theta_u is trained.
    """

    plain: InvertingGradients

    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        labels, notes = known_or_inferred(view, rng)
        rows = make_rows(view, self.plain.restarts, labels)
        distance = cosine_distance(rows.observed, view.adaptation)
        steps = LocalSteps(METHOD.lr, view.examples, METHOD.perturbation_steps)
        before = replace(view, local=steps)
        after = replace(view, local=replace(steps, epochs=steps.epochs + 1))

        def objective(variables: Sequence[Tensor]) -> Tensor:
            x = variables[0]
            # Both are sums of gradients along one path; the last one of the longer path is theirs at theta_u.
            longer, shorter = (candidate_gradients(seen, x, rows.labels) for seen in (after, before))
            return distance(sub(longer, shorter)) + self.plain.tv * total_variation(x)

        found = stacked_adam(
            [rows.noise(rng)],
            objective,
            steps=self.plain.steps,
            lr=self.plain.lr,
            signed=self.plain.signed,
            box=view.box,
            callback=callback,
        )
        return best_images(self.plain, rows, found, steps=self.plain.steps, clock=clock, notes=notes)


def scores_of(arguments: argparse.Namespace) -> dict[tuple[str, int], list[dict[str, float | None]]]:
    attack = InvertingGradients(steps=arguments.steps, tv=arguments.tv)
    found: dict[tuple[str, int], list[dict[str, float | None]]] = {}
    for seed in range(arguments.seeds):
        run = trained(seed, arguments)
        for stage in arguments.stages:
            answers = [answer(run, READINGS[name], stage) for name in arguments.rows]
            scored = attack_answers(run, answers, stage, attack, seed=seed)
            for name, one in zip(arguments.rows, scored, strict=True):
                found.setdefault((name, stage), []).append(numbers(one))
            for name, own in zip(arguments.rows, answers, strict=True):
                reading = READINGS[name]
                if arguments.unrolled and reading is not None and reading.upload_at == "theta_u":
                    (one,) = attack_answers(run, [own], stage, Unrolled(attack), seed=seed)
                    found.setdefault((f"{name}, unrolled", stage), []).append(numbers(one))
    return found


def accuracy(name: str, std: float, arguments: argparse.Namespace) -> float | None:
    """The test accuracy after a few rounds under a reading that a configuration can express."""
    reading = READINGS[name]
    fields = {"name": "fedsgd"} if reading is None else reading.fields(std)
    if fields is None:
        return None
    ROWS[name] = (fields, [])
    result = run_seed(
        config_of(name, arguments),
        0,
        experiment=f"reading-{arguments.dataset}-{name}",
        results=arguments.results,
        data_dir=arguments.data,
    )
    return result.accuracy


def main() -> None:
    parser = make_parser(__doc__, READINGS)
    parser.add_argument("--unrolled", action="store_true")
    parser.add_argument("--accuracy", action="store_true")
    arguments = parser.parse_args()
    print("| reading | stage | MSE | PSNR | SSIM | PSNR to x+delta | x+delta to x | mean image PSNR |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, stage), seeds in scores_of(arguments).items():
        cells = " | ".join(shown([one[score] for one in seeds]) for score in SCORES)
        print(f"| {name} | E{stage} | {cells} |", flush=True)
    if arguments.accuracy:
        small = argparse.Namespace(**(vars(arguments) | {"examples": 96, "rounds": 5}))
        std = trained(0, arguments).prepared.dataset.std[0]
        for name in arguments.rows:
            found = accuracy(name, std, small)
            if found is not None:
                print(f"{name}: test accuracy {found:.4f}", flush=True)


if __name__ == "__main__":
    main()
