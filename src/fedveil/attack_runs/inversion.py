"""Attack the transcript of a run: build the server's view, run the attack on it, and score it against the truth."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from fedveil.atomic_files import write_atomically, writing
from fedveil.attack_runs.texts import ScoredTexts, describe_texts, score_texts, texts_content
from fedveil.attack_runs.transcript import (
    Exchange,
    StoredRun,
    Truth,
    open_run,
    pixel_scale,
    read_exchange,
    server_view,
    truth,
)
from fedveil.attacks.registry import attack_settings, make_attack
from fedveil.attacks.view import Attack, Finding, ServerView, StepCallback
from fedveil.errors import InputError, ResultError
from fedveil.evaluation.image_quality import Brightness, Quality, compare_images, match_images, psnr
from fedveil.methods.disclosure import Adaptation
from fedveil.streams import named_stream
from fedveil.task import Task
from fedveil.tree import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LabelMode = Literal["known", "inferred"]
_GUESSES = 8


@dataclass(frozen=True)
class Scored:
    """An attack's finding with its scores, images in the order of the client's own."""

    finding: Finding
    view: ServerView
    truth: Truth
    order: list[Tensor]
    against_x: Quality
    against_trained_on: Quality | None
    trivial_psnr: float
    """The baseline: the score of a guess without the uploads."""
    distortion_psnr: float | None
    """The similarity of perturbed inputs to the data: the score of a perfect inversion of a perturbed gradient."""
    classifier: str
    weaker: Scored | None = None
    """The result of the less successful of the adaptive and the non-adaptive attacker."""


def attack_exchange(
    run: StoredRun,
    attack: Attack,
    *,
    round: int,
    clients: Sequence[int],
    exchange: int = 0,
    labels: LabelMode = "known",
    examples: int | None = None,
    adaptive: bool = True,
    seed: int = 0,
    callback: StepCallback | None = None,
) -> tuple[Exchange, Scored | ScoredTexts]:
    """Attack these clients' uploads. With `labels = "known"` the server is assumed to know them, as in papers.

    The targets of a language model are the texts themselves, so they are never known. If an upload does not disclose
    its number of examples, the server is assumed to know it.

    Against a known defence (`adaptive`) of images both an adaptive and a non-adaptive attacker are tried, and the more
    successful one is reported, so that knowledge of a defence never weakens the attacker.
    """
    texts = run.prepared.dataset.tokens is not None
    if attack.of_texts != texts:
        raise InputError(
            "attack",
            attack.name,
            f"attacks {'texts' if attack.of_texts else 'images'}, which {run.prepared.dataset.name} does not contain",
            "Use lamp or embedding-rows." if texts else "See `fedveil list attacks`.",
        )
    recorded = read_exchange(run, round, exchange)
    held = truth(run, recorded, clients)
    if examples is not None and examples != held.x.shape[1]:
        raise InputError(
            "examples",
            examples,
            f"each of these uploads is computed from {held.x.shape[1]} examples, and a finding is scored by example",
            f"Use {held.x.shape[1]}.",
        )
    view_of = functools.partial(
        server_view,
        run,
        recorded,
        clients,
        labels=held.y if labels == "known" and not run.prepared.dataset.predicts_tokens else None,
        adaptive=adaptive,
        texts=held.x if texts else None,
    )
    try:
        view = view_of(examples=examples)
    except InputError as error:
        if error.field != "examples" or examples is not None:
            raise
        view = view_of(examples=held.x.shape[1])  # the server is assumed to know it
    if texts:
        rng = named_stream(seed, "attack", attack.name, round, exchange)
        return recorded, score_texts(run, view, attack(view, rng, callback), held)

    def carried_out(known: ServerView, on_step: StepCallback | None) -> Scored:
        rng = named_stream(seed, "attack", attack.name, round, exchange)
        return score(run, known, attack(known, rng, on_step), held)

    if view.adaptation.kind == "none":
        return recorded, carried_out(view, callback)
    adapting = carried_out(view, _half(callback, 0))
    plain = carried_out(replace(view, adaptation=Adaptation()), _half(callback, 1))
    weaker, stronger = sorted((plain, adapting), key=_closeness)
    return recorded, replace(stronger, weaker=weaker)


def _closeness(scored: Scored) -> float:
    """The mean PSNR; NaN counts as the worst."""
    value = scored.against_x.means()["psnr"]
    return -math.inf if value is None or math.isnan(value) else value


def _half(callback: StepCallback | None, done: int) -> StepCallback | None:
    """The progress of the first or second of two attacks of equal length."""
    if callback is None:
        return None
    return lambda step, steps, loss: callback(done * steps + step, 2 * steps, loss)


def attack_smallest(
    folder: Path,
    name: str,
    settings: Mapping[str, Any],
    *,
    data_dir: Path | None = None,
    callback: StepCallback | None = None,
) -> Path:
    """Attack the most exposed upload of the transcript's first round: that of the client with the fewest examples.

    An existing finding is not computed again.
    """
    attack = make_attack(name, settings)
    identity = attack_identity(attack, "known", True, 0)
    done = sorted((folder / "attacks").glob(f"{attack.name}-*-{identity}"))
    if done and (done[0] / "finding.json").exists():
        return done[0]
    run = open_run(folder, data_dir)
    first = min(int(p.name.removeprefix("round-")) for p in (run.folder / "transcript").glob("round-*"))
    sizes = run.prepared.clients.sizes
    taking_part = [client for client in read_exchange(run, first).clients if sizes[client]]
    chosen = [min(taking_part, key=lambda client: (sizes[client], client))]
    recorded, scored = attack_exchange(run, attack, round=first, clients=chosen, callback=callback)
    return write_finding(run, attack, recorded, chosen, scored, labels="known", adaptive=True, seed=0)


def score(run: StoredRun, view: ServerView, finding: Finding, held: Truth) -> Scored:
    """Score the finding against the clients' examples; images of a batch are matched by smallest squared error."""
    dataset = run.prepared.dataset
    brightness = Brightness(*pixel_scale(dataset))
    order = [match_images(found, x) for found, x in zip(finding.images, held.x, strict=True)]
    found = torch.cat([images[o] for images, o in zip(finding.images, order, strict=True)])
    x = held.x.flatten(0, 1)
    classifier, name = _classifier(run)
    trained_on, distortion = None, None
    if held.delta is not None:
        perturbed = (held.x + held.delta).flatten(0, 1)
        distortion = float(psnr(brightness(x), brightness(perturbed)).clamp(max=200.0).mean())
        trained_on = compare_images(perturbed, found, brightness, classifier)
    return Scored(
        finding,
        view,
        held,
        order,
        compare_images(x, found, brightness, classifier),
        trained_on,
        _without_uploads(dataset.test.x, held.x, brightness),
        distortion,
        name,
    )


def _without_uploads(public: Tensor, held: Tensor, brightness: Brightness) -> float:
    """The best score without uploads: of the mean of the public examples, or of as many draws as examples held.

    Draws are public examples or the normal numbers that attacks start from, matched like a finding. With few features
    every example has a near neighbour among them, so matching one is not evidence of leakage.
    """
    rng, x = named_stream(0, "guess"), held.flatten(0, 1)
    scores = [float(psnr(brightness(x), brightness(public.mean(0, keepdim=True).expand_as(x))).mean())]
    for _ in range(_GUESSES):
        drawn = [public[torch.from_numpy(rng.integers(0, len(public), len(rows)))] for rows in held]
        normal = [torch.from_numpy(rng.standard_normal(tuple(rows.shape))).to(rows) for rows in held]
        for guesses in (drawn, normal):
            pairs = zip(guesses, held, strict=True)
            matched = torch.cat([guess[match_images(guess, rows)] for guess, rows in pairs])
            scores.append(float(psnr(brightness(x), brightness(matched)).clamp(max=200.0).mean()))
    return max(scores)


def _classifier(run: StoredRun) -> tuple[tuple[Task, Params] | None, str]:
    """The run's final model as classifier, and its name for the finding, since it is not the VGG-16 of papers."""
    path = run.folder / "model.safetensors"
    if not path.is_file():
        return None, "none: the run is not finished"
    task = run.prepared.task
    try:
        model = safetensors.torch.load_file(path)
        if {n: p.shape for n, p in task.module.named_parameters()} != {n: p.shape for n, p in model.items()}:
            raise ValueError("its parameters are not those of the configured model")
        return (task, model), "the run's final model"
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ResultError(
            f"{path} is damaged: {error}. Restore it from a copy, or run it again.", field="model.safetensors"
        ) from error


def attack_identity(attack: Attack, labels: LabelMode, adaptive: bool, seed: int) -> str:
    settings = attack_settings(attack) | {"labels": labels, "adaptive": adaptive, "seed": seed}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def describe(
    run: StoredRun,
    attack: Attack,
    exchange: Exchange,
    clients: Sequence[int],
    scored: Scored | ScoredTexts,
    labels: LabelMode,
    seed: int,
) -> dict[str, Any]:
    """The finding as JSON: what was attacked, with which knowledge, and the results."""
    finding, view = scored.finding, scored.view
    known = {
        "attack": attack.name,
        "settings": attack_settings(attack),
        "method": run.prepared.method.name,
        "defences": list(run.prepared.method.defences()),
        "round": exchange.at.round,
        "exchange": exchange.at.exchange,
        "clients": list(clients),
        "examples": view.examples,
        "seed": seed,
        "labels": "the texts themselves" if run.prepared.dataset.predicts_tokens else labels,
        "adaptation": vars(view.adaptation),
        "local_steps": None if view.local is None else vars(view.local),
        "steps": finding.steps,
        "seconds": finding.seconds,
        "losses": finding.losses.double().nan_to_num(posinf=1e30).tolist(),
        "notes": list(finding.notes),
    }
    if not run.prepared.dataset.predicts_tokens:
        known["labels_right"] = labels_right(finding.labels, scored.truth.y)
    if isinstance(scored, ScoredTexts):
        return known | describe_texts(scored)
    return known | {
        "against_x": scored.against_x.to_json(),
        "against_trained_on": None
        if scored.against_trained_on is None
        else scored.against_trained_on.to_json(),
        "weaker_attacker": None
        if scored.weaker is None
        else {
            "adaptation": scored.weaker.view.adaptation.kind,
            "mean": scored.weaker.against_x.means(),
        },
        "mean_image_psnr": scored.trivial_psnr,
        "distortion_psnr": scored.distortion_psnr,
        "classifier": scored.classifier,
    }


def labels_right(found: Tensor, truth: Tensor) -> float:
    """The share of true labels that were found, regardless of order."""
    shared = [(Counter(a) & Counter(b)).total() for a, b in zip(found.tolist(), truth.tolist(), strict=True)]
    return sum(shared) / truth.numel()


def finding_folder(
    run: StoredRun,
    attack: Attack,
    exchange: Exchange,
    clients: Sequence[int],
    *,
    labels: LabelMode,
    adaptive: bool,
    seed: int,
) -> Path:
    """The folder for the finding of such an attack."""
    who = "-".join(str(client) for client in clients)
    place = f"{attack.name}-round-{exchange.at.round}-exchange-{exchange.at.exchange}-client-{who}"
    return run.folder / "attacks" / f"{place}-{attack_identity(attack, labels, adaptive, seed)}"


def write_finding(
    run: StoredRun,
    attack: Attack,
    exchange: Exchange,
    clients: Sequence[int],
    scored: Scored | ScoredTexts,
    *,
    labels: LabelMode,
    adaptive: bool,
    seed: int,
) -> Path:
    """Write `attacks/<attack, target, settings>/` with finding.json, images.safetensors and picture.png.

    For texts, texts.json replaces images and picture, if the texts may be shown.
    """
    folder = finding_folder(run, attack, exchange, clients, labels=labels, adaptive=adaptive, seed=seed)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    content = describe(run, attack, exchange, clients, scored, labels, seed)
    if isinstance(scored, ScoredTexts):
        if scored.quotable:
            shown = json.dumps(texts_content(scored), indent=2, ensure_ascii=False)
            write_atomically(folder / "texts.json", (shown + "\n").encode())
        write_atomically(folder / "finding.json", (json.dumps(content, indent=2) + "\n").encode())
        return folder
    tensors = {
        "original": scored.truth.x.contiguous(),
        "reconstruction": torch.stack(
            [images[o] for images, o in zip(scored.finding.images, scored.order, strict=True)]
        ),
    }
    if scored.truth.delta is not None:
        tensors["perturbation"] = scored.truth.delta.contiguous()
    write_atomically(folder / "images.safetensors", safetensors.torch.save(tensors))
    if len(scored.view.input_shape) == 3:
        from fedveil.figures.figure import save_figure

        save_figure(_figure(run, attack, content, scored), folder / "picture.png")
    write_atomically(folder / "finding.json", (json.dumps(content, indent=2) + "\n").encode())
    return folder


def _figure(run: StoredRun, attack: Attack, content: dict[str, Any], scored: Scored) -> Figure:
    from fedveil.attacks.picture import Strip, reconstruction_figure

    dataset = run.prepared.dataset
    held = scored.truth
    strips = []
    for t, order in enumerate(scored.order):
        for i in range(held.x.shape[1]):
            trained_on = None if held.delta is None else held.x[t, i] + held.delta[t, i]
            path = [images[t, order[i]] for _, images in scored.finding.path]
            strips.append(Strip(held.x[t, i], trained_on, path))
    mean = scored.against_x.means()
    title = f"{attack.name} against {content['method']} on {dataset.name}"
    batch = f", batch {content['exchange'] + 1}" if content["exchange"] else ""
    names = run.prepared.names
    who = ", ".join(str(client) if names is None else names[client] for client in content["clients"])
    subtitle = (
        f"round {content['round']}{batch}, client {who}; {content['examples']} examples, labels {content['labels']}; "
        f"mean PSNR {mean['psnr']:.1f} dB (the mean image: {content['mean_image_psnr']:.1f} dB)"
    )
    return reconstruction_figure(
        strips,
        [step for step, _ in scored.finding.path],
        scored.against_x,
        Brightness(*pixel_scale(dataset)),
        title=title,
        subtitle=subtitle,
    )
