"""From a run's folder: the server's view of one exchange, and separately the truth for scoring an attack."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedveil.attacks.view import UNKNOWN, ServerView, TextKnowledge, image_box
from fedveil.data.dataset import Dataset
from fedveil.errors import InputError, ResultError
from fedveil.experiment.config import Config, load_config
from fedveil.experiment.prepare import Prepared, prepare
from fedveil.messages import Message, MessageError
from fedveil.methods.disclosure import Adaptation, UploadReading
from fedveil.methods.method import At
from fedveil.privacy.sampling import draw_cohort
from fedveil.session.privacy_guard import unit_of
from fedveil.session.results import ResultFolder
from fedveil.streams import ClientStreams
from fedveil.tree import without_axis

_WIDE = 10.0  # a wider range between black and white indicates pixels stored as bytes


@dataclass(frozen=True)
class StoredRun:
    """A run on disk, with the objects built from its configuration."""

    folder: Path
    seed: int
    config: Config
    prepared: Prepared


@dataclass(frozen=True)
class Exchange:
    """One exchange of the transcript: rows of `up` are the answers of `clients`, or one row is their sum."""

    at: At
    clients: tuple[int, ...]
    down: Message
    up: Message


@dataclass(frozen=True)
class Truth:
    """The attacked clients' examples: `x [T, B, ...]`, `y [T, B]`, and their perturbation of `x`, if any."""

    x: Tensor
    y: Tensor
    delta: Tensor | None


def run_folder(path: Path) -> Path:
    """The folder of a run: this folder, or the only `seed-*` folder in it."""
    if (path / "config.toml").exists():
        return path
    seeds = sorted(path.glob("**/seed-*")) if path.is_dir() else []
    if len(seeds) != 1:
        found = f"it holds {len(seeds)} runs" if seeds else "it holds no run"
        raise ResultError(
            f"{path}: {found}. Give the folder of one run, results/.../seed-N.",
            field="results",
            value=str(path),
        )
    return seeds[0]


def open_run(path: Path, data_dir: Path | None = None) -> StoredRun:
    """Open the run in this folder (or in its only `seed-*` folder); its data is prepared from its configuration."""
    folder = run_folder(path)
    number = re.fullmatch(r"seed-(\d+)", folder.name)
    if number is None:
        raise ResultError(
            f"{folder}: its name does not contain the seed. Give a folder named seed-N.",
            field="seed",
            value=str(folder),
        )
    if not (folder / "transcript").is_dir():
        raise ResultError(
            f"{folder} has no transcript to attack. Run it again with --set run.transcript=true.",
            field="transcript",
            value=str(folder),
        )
    config = load_config(folder / "config.toml")
    prepared = prepare(config, int(number[1]), data_dir, folder=folder)
    # Otherwise the attack would be scored against other data.
    ResultFolder(folder).require_data(prepared.digest)
    return StoredRun(folder, int(number[1]), config, prepared)


def rounds_in_transcript(folder: Path, exchange: int = 0, *, answered: bool = False) -> list[int]:
    """The rounds whose transcript has this exchange, ascending; `answered`: only those with an upload."""
    needed = "up.bin" if answered else "clients.json"
    places = folder.glob(f"transcript/round-{6 * '[0-9]'}/exchange-{exchange:04d}/{needed}")
    return sorted(int(place.parent.parent.name.removeprefix("round-")) for place in places)


def read_broadcast(run: StoredRun, round: int, exchange: int = 0) -> Message:
    """The broadcast of an exchange of `rounds_in_transcript`; refuses damaged files."""
    return _read(_place_of(run.folder, round, exchange), "down.bin", run.prepared.method.down_type.from_bytes)


def read_exchange(run: StoredRun, round: int, exchange: int = 0) -> Exchange:
    """One exchange of the transcript; the error for a missing round or exchange names the recorded ones."""
    place = _place_of(run.folder, round, exchange)
    if not place.parent.is_dir():
        known = rounds_in_transcript(run.folder)
        have = f"rounds {known[0]} to {known[-1]}" if known else "no round"
        raise InputError("round", round, f"the transcript holds {have}", "Choose a round of the transcript.")
    if not (place / "clients.json").is_file():
        count = len(list(place.parent.glob("exchange-*")))
        raise InputError(
            "exchange", exchange, f"round {round} has exchanges 0 to {count - 1}", "Choose one of these."
        )
    if not (place / "up.bin").is_file():
        raise InputError("round", round, "nobody answered in this exchange", "Choose another round.")
    clients = _read(place, "clients.json", lambda data: tuple(int(client) for client in json.loads(data)))
    down = read_broadcast(run, round, exchange)
    up = _read(place, "up.bin", run.prepared.method.up_type.from_bytes)
    if up.count != (1 if run.prepared.method.discloses_sum else len(clients)):
        raise ResultError(
            f"{place} is damaged: {len(clients)} clients, but {up.count} answers.",
            field="transcript",
            value=str(place),
        )
    return Exchange(At(run.prepared.plan, round, exchange), clients, down, up)


def recorded_cohort(run: StoredRun, round: int) -> tuple[int, ...] | None:
    """The cohort of a round: drawn again from the seed, or read from the transcript; None if unknown."""
    plan = run.prepared.plan
    if run.prepared.noise == "seeded" or plan.sampler == "all":
        return draw_cohort(plan, run.seed, round)
    place = _place_of(run.folder, round, 0)
    if not (place / "clients.json").is_file():
        return None
    return _read(place, "clients.json", lambda data: tuple(int(client) for client in json.loads(data)))


def require_replayable(run: StoredRun) -> None:
    """Refuse to score an attack on batches that were drawn from entropy and not recorded."""
    prepared = run.prepared
    if prepared.noise == "entropy" and unit_of(prepared.method, prepared.plan) == "record":
        raise InputError(
            "run.noise",
            "entropy",
            "the records behind an upload were drawn from entropy, so a reconstruction cannot be scored",
            "Record a run with --set run.noise=seeded, and do not publish its model.",
        )


T = TypeVar("T")


def _read(place: Path, name: str, decode: Callable[[bytes], T]) -> T:
    try:
        return decode((place / name).read_bytes())
    except (OSError, TypeError, ValueError, OverflowError, RecursionError, MessageError) as error:
        raise ResultError(
            f"{place} is damaged: {error}. Choose another round, or record it again.",
            field="transcript",
            value=str(place),
        ) from error


def _place_of(folder: Path, round: int, exchange: int) -> Path:
    return folder / "transcript" / f"round-{round:06d}" / f"exchange-{exchange:04d}"


def is_sum(run: StoredRun, exchange: Exchange, clients: Sequence[int]) -> bool:
    """Whether the server observed exactly the sum of these clients' uploads and nothing else about them."""
    return run.prepared.method.discloses_sum and sorted(clients) == sorted(exchange.clients)


def answers_of(run: StoredRun, exchange: Exchange, clients: Sequence[int]) -> tuple[Message, Message]:
    """The broadcast to these clients, and what the server observed: their uploads, or the sum of all as one row."""
    places = [_place(exchange, client) for client in clients]
    if is_sum(run, exchange, clients):
        return exchange.down.rows(places[:1]), exchange.up
    return exchange.down.rows(places), run.prepared.method.single_uploads(exchange.up, places)


def server_view(
    run: StoredRun,
    exchange: Exchange,
    clients: Sequence[int],
    *,
    labels: Tensor | None = None,
    examples: int | None = None,
    adaptive: bool = True,
    texts: Tensor | None = None,
) -> ServerView:
    """The server's view of these clients' answers; the test split serves as public examples.

    Only the lengths of `texts [T, B, L]` are used, which the server is assumed to know.
    """
    down, up = answers_of(run, exchange, clients)
    method, at = run.prepared.method, exchange.at
    reading = read_upload(run, at, down, up)
    observed = reading.gradient
    if observed is None:
        raise _nothing_to_invert(run)
    earlier = _Earlier(run, exchange, clients)
    start = method.training_start(at, down, earlier)
    first = {name: leaf[:1] for name, leaf in start.params.items()}
    if any(not torch.equal(leaf[:1].expand_as(leaf), leaf) for leaf in start.params.values()):
        raise InputError(
            "clients", list(clients), "they start from different models", "Attack them separately."
        )
    count = _examples(method.disclosed_sizes(up), examples)
    dataset = run.prepared.dataset
    image = len(dataset.input_shape) == 3
    mean, std = pixel_scale(dataset)
    foreign = image and ((mean, std) != (dataset.mean, dataset.std) or 1 / min(std) > _WIDE)
    parameters = sum(leaf[0].numel() for leaf in observed.values())
    return ServerView(
        run.prepared.task,
        without_axis(first),
        observed,
        count,
        dataset.input_shape,
        dataset.num_classes,
        image_box(mean, std) if image else None,
        labels,
        method.local_training(at),
        method.adaptation(at, parameters, count) if adaptive else Adaptation(),
        dataset.test.x,
        None if texts is None else _text_knowledge(run, texts),
        start.drift,
        (*earlier.notes, *_unknown_dropout(run)),
        float(dataset.test.x.mean()) if foreign else 0.0,
        float(dataset.test.x.std()) if foreign else 1.0,
    )


def pixel_scale(dataset: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std such that `x * std + mean` is brightness from 0 to 1.

    The user's arrays of images may contain any numbers: if the public ones are not between black and white, their
    minimum and maximum are used instead, since an attack with wrong bounds would fail for no good reason.
    """
    x = dataset.test.x
    if len(dataset.input_shape) != 3 or not len(x):
        return dataset.mean, dataset.std
    low, high = image_box(dataset.mean, dataset.std)
    slack = 0.01 * (high - low)
    if bool(((x >= low - slack) & (x <= high + slack)).all()):
        return dataset.mean, dataset.std
    least, most = float(x.min()), float(x.max())
    channels = len(dataset.mean)
    return (-least / (most - least),) * channels, (1 / (most - least),) * channels


def read_upload(run: StoredRun, at: At, down: Message, up: Message) -> UploadReading:
    """Read uploads as models and gradients; refuses uploads without a model, or of which the server lacks a part."""
    reading = run.prepared.method.read_upload(at, down, up)
    if reading is None:
        raise _nothing_to_invert(run)
    missing = [name for name, _ in run.prepared.task.module.named_parameters() if name not in reading.start]
    if missing:
        raise InputError(
            "method",
            run.prepared.method.name,
            f"the server never holds {', '.join(missing)}, so it cannot compute a candidate's gradient",
            "Attack a method whose server holds the whole model.",
        )
    return reading


def _nothing_to_invert(run: StoredRun) -> InputError:
    return InputError(
        "method",
        run.prepared.method.name,
        "its uploads carry no gradient and no trained model, so there is nothing to invert",
        "Attack a method that sends gradients or models, such as fedsgd, fedem or fedavg.",
    )


class _Earlier:
    """Reads each client's messages of earlier rounds; `notes` mention rounds that are not recorded."""

    def __init__(self, run: StoredRun, exchange: Exchange, clients: Sequence[int]) -> None:
        self._run, self._exchange, self._clients = run, exchange, clients
        self.notes: tuple[str, ...] = ()

    def __call__(self) -> list[list[tuple[Any, Any]]]:
        run, at = self._run, self._exchange.at
        found: list[list[tuple[Any, Any]]] = [[] for _ in self._clients]
        for number in range(1, at.round):
            cohort = recorded_cohort(run, number)
            if cohort is not None and not set(cohort) & set(self._clients):
                continue
            try:
                past = read_exchange(run, number, at.exchange)
            except InputError:
                self.notes = (
                    "uploads of rounds that are not recorded are assumed to be zero: record all rounds",
                )
                continue
            for rounds, client in zip(found, self._clients, strict=True):
                if client in past.clients:
                    place = [past.clients.index(client)]
                    rounds.append((past.down.rows(place), past.up.rows(place)))
        return found


def _unknown_dropout(run: StoredRun) -> tuple[str, ...]:
    layers = run.prepared.task.module.modules()
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in layers):
        return ("the client's dropout is unknown: candidates are compared without any",)
    return ()


def _text_knowledge(run: StoredRun, texts: Tensor) -> TextKnowledge:
    """Padding from the lengths of the texts, and the special tokens that a classifier's vocabulary adds."""
    dataset = run.prepared.dataset
    assert dataset.tokens is not None
    vocabulary = dataset.tokens.vocabulary
    known = torch.where(texts == vocabulary.pad, vocabulary.pad, UNKNOWN)
    if not dataset.predicts_tokens:
        lengths = (known == UNKNOWN).sum(-1)
        places = torch.arange(texts.shape[-1])
        for i, token in enumerate(vocabulary.prefix):
            known[..., i] = token
        for i, token in enumerate(reversed(vocabulary.suffix), 1):
            known[places == (lengths - i).unsqueeze(-1)] = token
    special = vocabulary.special()
    public = (tuple(token for token in text if token not in special) for text in dataset.test.x.tolist())
    return TextKnowledge(
        known,
        vocabulary.size,
        tuple(sorted(special)),
        vocabulary.decode if vocabulary.readable else None,
        tuple(text for text in public if text),
        f"the test split of {dataset.name}",
    )


def truth(run: StoredRun, exchange: Exchange, clients: Sequence[int]) -> Truth:
    """The examples behind these clients' answers, each client replayed separately. Never part of a view."""
    parts = [_client_truth(run, exchange, client) for client in clients]
    if is_sum(run, exchange, clients):  # the examples of all clients in the sum
        parts = [Truth(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), None)]
    sizes = sorted({len(part.y) for part in parts})
    if len(sizes) > 1:
        raise InputError(
            "clients",
            list(clients),
            f"their batches hold {sizes} examples",
            "Attack clients of one size together.",
        )
    deltas = [part.delta for part in parts if part.delta is not None]
    return Truth(
        torch.stack([part.x for part in parts]),
        torch.stack([part.y for part in parts]),
        torch.stack(deltas) if deltas else None,
    )


def _client_truth(run: StoredRun, exchange: Exchange, client: int) -> Truth:
    _place(exchange, client)  # refuses one who did not answer
    require_replayable(run)
    at, data = exchange.at, run.prepared.clients.load([client])
    streams = ClientStreams(run.seed, at.round, (client,), at.exchange)
    batch, *more = run.prepared.method.batches_behind(at, data, streams)
    if more:
        raise InputError(
            "method",
            run.prepared.method.name,
            f"an upload sums {1 + len(more)} batches",
            "Record a run with one batch per message.",
        )
    count = batch.y.shape[1] if batch.mask is None else int(batch.mask.sum())
    if count == 0:
        raise InputError(
            "exchange", at.exchange, f"client {client} had run out of examples", "Choose an earlier exchange."
        )
    delta = _replayed_perturbation(run, exchange, client)
    return Truth(batch.x[0, :count], batch.y[0, :count], None if delta is None else delta[0, :count])


def _replayed_perturbation(run: StoredRun, exchange: Exchange, client: int) -> Tensor | None:
    """The client's perturbation of its batch; it starts anew in each round, so the round is replayed."""
    method = run.prepared.method
    data = run.prepared.clients.load([client])
    state = method.init_client(run.prepared.task, data, ClientStreams(run.seed, 0, (client,)))
    if method.input_perturbation(state) is None:
        return None
    for number in range(exchange.at.exchange + 1):
        past = exchange if number == exchange.at.exchange else read_exchange(run, exchange.at.round, number)
        down = past.down.rows([_place(past, client)])
        streams = ClientStreams(run.seed, past.at.round, (client,), number)
        _, state = method.client_update(run.prepared.task, past.at, down, data, state, streams)
    return method.input_perturbation(state)


def _listed(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:12]))
    return f"{shown}, ... {clients[-1]}" if len(clients) > 12 else shown


def _place(exchange: Exchange, client: int) -> int:
    if client not in exchange.clients:
        raise InputError(
            "client",
            client,
            "did not answer in this exchange",
            f"Choose one of {_listed(exchange.clients)}.",
        )
    return exchange.clients.index(client)


def _examples(disclosed: Tensor | None, given: int | None) -> int:
    if given is not None:
        return given
    if disclosed is None:
        raise InputError(
            "examples",
            None,
            "the upload does not disclose its number of examples",
            "Give --examples N.",
        )
    counts = sorted(set(disclosed.flatten().tolist()))
    if len(counts) > 1:
        raise InputError(
            "clients", counts, "their uploads have different numbers of examples", "Attack them separately."
        )
    return int(counts[0])
