"""Attacks on the recommended image setting: what the server could rebuild of a record, and who was a member.

    python experiments/best/attacks.py inversion
    fedveil run experiments/best/server-mnist.toml --seed 0 --results results
    python experiments/best/attacks.py membership results/server-mnist/*/seed-0

Each writes a record to experiments/best/records/attacks.

Inversion is of the first round, in the case that is worst for a client: it has one record, and its update is scaled to
the same norm as everybody's. From zero weights every row of its update is a multiple of the record's features, so a
plain upload gives these away exactly. The attacker knows the label, and takes the row of that class; of a sum, the
attacker may also subtract what clients with public images would have sent. The better of both counts. The image is
then searched by gradient descent through the feature map, from the mean of public images of the class.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.atomic_files import write_atomically
from fedveil.attack_runs.membership import attack_result
from fedveil.data.client_data import ArrayClients
from fedveil.data.dataset import Dataset, Examples
from fedveil.data.registry import load_dataset
from fedveil.evaluation.image_quality import Brightness, psnr
from fedveil.experiment.config import Config, build_method, load_config
from fedveil.experiment.prepare import Prepared, prepare
from fedveil.features.feature_map import make_features
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.secure import SecurelyAggregated
from fedveil.numerics import NUMERICS
from fedveil.streams import ClientStreams

FOLDER = Path(__file__).resolve().parent
RECORDS = FOLDER / "records" / "attacks"
CONFIG = FOLDER / "server-mnist.toml"
TARGETS = 10
"""So many clients have one record each; they are attacked one after the other."""
CHUNK = 10
STEPS, STEP = 1000, 0.1
SMOOTHNESS = 0.003
EDGE = 0.02  # of brightness, from which descent can still move
NO_UPLOAD = "no upload: the mean of public images of the class"
MEMBERSHIP: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("loss-threshold", {}),
    ("ml-leaks", {}),
    ("lira", {"shadows": 16}),
)
FeaturesOf = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scene:
    """A federation before its first round, and what the attacker knows besides the uploads."""

    prepared: Prepared
    clients: ArrayClients
    public: ArrayClients
    """As many images for each as a client has, from the test split."""
    seed: int

    @property
    def at(self) -> At:
        return At(self.prepared.plan, 1, 0)


@dataclass(frozen=True)
class Score:
    """Means over the attacked records; cosines are of features, `psnr` of images, in dB."""

    cosine: float
    psnr: float


def scene_of(config: Config, seed: int = 0, targets: int = TARGETS) -> Scene:
    """The configured federation, whose first clients keep one record each."""
    prepared = prepare(config, seed)
    assert isinstance(prepared.clients, ArrayClients)
    parts = [part[:1] if k < targets else part for k, part in enumerate(prepared.clients.parts)]
    train, test = prepared.dataset.train, prepared.dataset.test
    size = max(len(part) for part in parts)
    shares = [torch.arange(start, start + size) for start in range(0, len(test.y) - size + 1, size)]
    public = ArrayClients(test.x, test.y, shares or [torch.arange(len(test.y))])
    return Scene(prepared, ArrayClients(train.x, train.y, parts), public, seed)


def updates(scene: Scene, method: AnyMethod, clients: ArrayClients) -> Tensor:
    """Each client's upload as a gradient `[K, classes, features]`, read as the server reads it."""
    return torch.cat([_gradient(scene, method, down, up) for down, up in _uploads(scene, method, clients)])


def update_of_sum(scene: Scene, method: SecurelyAggregated) -> Tensor:
    """What the server learns under secure aggregation: the mean of the updates `[classes, features]`, with noise."""
    found = list(_uploads(scene, method, scene.clients))
    up = type(found[0][1]).concatenate([up for _, up in found])
    return _gradient(scene, method, found[0][0], method.disclosed(up))[0]


def _uploads(scene: Scene, method: AnyMethod, clients: ArrayClients) -> Iterator[tuple[Any, Any]]:
    task, at = scene.prepared.task, scene.at
    server = method.init_server(task.init(scene.seed), scene.prepared.plan)
    for first in range(0, len(clients.parts), CHUNK):
        chosen = range(first, min(first + CHUNK, len(clients.parts)))
        data = clients.load(chosen)
        down = method.broadcast(at, server, list(range(scene.prepared.plan.clients)))
        up, _ = method.client_update(task, at, down, data, {}, ClientStreams(scene.seed, 1, tuple(chosen)))
        yield down, up


def _gradient(scene: Scene, method: AnyMethod, down: Any, up: Any) -> Tensor:
    reading = method.read_upload(scene.at, down, up)
    assert reading is not None
    assert reading.gradient is not None
    (leaf,) = reading.gradient.values()
    return leaf


def rebuilt(gradient: Tensor, labels: Tensor) -> Tensor:
    """The features of a single record of each label, of length 1: the negative row of its class."""
    row = -gradient[torch.arange(len(labels)), labels]
    return row / row.norm(dim=1, keepdim=True).clamp(min=1e-12)


def images_of(features: Tensor, transform: FeaturesOf, start: Tensor, steps: int) -> Tensor:
    """Images of brightness 0 to 1 whose features are close to these, found by gradient descent from `start`."""
    free = start.clamp(EDGE, 1 - EDGE).logit().requires_grad_()
    optimiser = torch.optim.Adam([free], lr=STEP)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        image = free.sigmoid()
        distance = 1 - (transform(image) * features).sum(1)
        rough = image.diff(dim=-1).abs().flatten(1).mean(1) + image.diff(dim=-2).abs().flatten(1).mean(1)
        optimiser.zero_grad()
        (distance + SMOOTHNESS * rough).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        decay.step()
    return free.sigmoid().detach()


def inversion(config: Config, *, steps: int = STEPS, seed: int = 0, targets: int = TARGETS) -> dict[str, Any]:
    """Scores of a plain upload, of the sum without and with noise, and of a guess without uploads."""
    scene = scene_of(config, seed, targets)
    records = torch.stack([scene.clients.parts[k][0] for k in range(targets)])
    y, secure = scene.prepared.dataset.train.y[records], scene.prepared.method
    assert isinstance(secure, SecurelyAggregated)
    bare = without_noise(config)
    single = updates(scene, bare, scene.clients)
    others = updates(scene, bare, scene.public).mean(0)

    def of_sum(mean: Tensor) -> list[Tensor]:
        return [rebuilt(one.expand(targets, -1, -1), y) for one in (mean, mean - others)]

    views = {
        "plain upload, no noise": [rebuilt(single[:targets], y)],
        "sum of all clients, no noise": of_sum(single.mean(0)),
        "sum of all clients, as recommended": of_sum(update_of_sum(scene, secure)),
        NO_UPLOAD: [_in_common(scene.prepared.dataset.test, y)],
    }
    return {
        "targets": targets,
        "clients": len(scene.clients.parts),
        "steps": steps,
        "seed": seed,
        "epsilon": None if scene.prepared.target is None else scene.prepared.target.epsilon,
        "views": _scored(config, scene, records, views, steps),
    }


def _scored(
    config: Config, scene: Scene, records: Tensor, views: Mapping[str, Sequence[Tensor]], steps: int
) -> dict[str, dict[str, float]]:
    """The scores of the features that are closest to the records' own, and of the images found for these."""
    pictures = load_dataset(config.task.dataset)
    assert isinstance(pictures, Dataset)
    made = make_features(config.task.features, config.task.feature_options)
    assert made is not None
    transform, _ = made.transform(pictures.input_shape)
    x, y = scene.prepared.dataset.train.x[records], pictures.train.y[records]
    brightness = Brightness(pictures.mean, pictures.std)
    truth, mean = brightness(pictures.train.x[records]), brightness(_mean_of(pictures.test, y))
    scores = {}
    for name, found in views.items():
        features = max(found, key=lambda one: float((one * x).sum()))
        images = mean if name == NO_UPLOAD else images_of(features, transform, mean, steps)
        score = Score(float((features * x).sum(1).mean()), float(psnr(images, truth).mean()))
        scores[name] = {key: round(value, 4) for key, value in asdict(score).items()}
    return scores


def _mean_of(public: Examples, labels: Tensor) -> Tensor:
    """The mean of the public examples of each label."""
    return torch.stack([public.x[public.y == label].mean(0) for label in labels])


def _in_common(public: Examples, labels: Tensor) -> Tensor:
    """The mean features of the public images of each label, of length 1."""
    means = _mean_of(public, labels)
    return means / means.norm(dim=1, keepdim=True).clamp(min=1e-12)


def without_noise(config: Config) -> AnyMethod:
    """The method with plain uploads and no noise: what the attack has to work on."""
    return build_method(config.method | {"noise_multiplier": 0.0})


def membership(folder: Path, examples: int) -> dict[str, Any]:
    """The attacks on the final model of a finished run, each with its chance level 0.5."""
    summary = json.loads((folder / "summary.json").read_text())
    found = [
        attack_result(folder, name, settings=settings, examples=examples) for name, settings in MEMBERSHIP
    ]
    return {
        "config": load_config(folder / "config.toml").identity(),
        "seed": summary["seed"],
        "attacks": [
            {"attack": one.attack, "members": one.members, "others": one.others, "auc": one.auc.to_json()}
            for one in found
        ],
    }


def _write(name: str, content: Mapping[str, Any], command: str) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, "numerics": NUMERICS, **content}, indent=1) + "\n"
    write_atomically(RECORDS / f"{name}.json", text.encode())
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inversion")
    asked = commands.add_parser("membership")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--examples", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "inversion":
        config = load_config(CONFIG)
        command = "python experiments/best/attacks.py inversion"
        _write("inversion", {"config": config.identity()} | inversion(config), command)
        return
    found = membership(given.folder, given.examples)
    place = f"results/{CONFIG.stem}/{found['config']}/seed-{found['seed']}"
    _write("membership", found, f"python experiments/best/attacks.py membership {place}")


if __name__ == "__main__":
    main()
