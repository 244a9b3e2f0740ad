"""From a run's folder to a server's view of one exchange, and, apart from it, to the truth that scores an attack."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedveil.attacks.knowledge import adaptation_to, innermost
from fedveil.attacks.uploads import as_gradient
from fedveil.attacks.view import UNKNOWN, Adaptation, ServerView, TextKnowledge, image_box
from fedveil.config import Config, load_config
from fedveil.errors import InputError, ResultError
from fedveil.experiment import Prepared, prepare
from fedveil.messages import Message, MessageError
from fedveil.methods.fedem import FedEM
from fedveil.methods.fedsgd import FedSGD, batch_in_step
from fedveil.methods.method import At
from fedveil.streams import ClientStreams
from fedveil.tree import Params, without_axis


@dataclass(frozen=True)
class RecordedRun:
    """A run whose transcript is on disk, with everything its configuration leads to."""

    folder: Path
    seed: int
    config: Config
    prepared: Prepared


@dataclass(frozen=True)
class Exchange:
    """What was on the wire in one exchange: rows of `up` are the answers of `clients`."""

    at: At
    clients: tuple[int, ...]
    down: Message
    up: Message


@dataclass(frozen=True)
class Truth:
    """What the attacked clients held: `x [T, B, ...]`, `y [T, B]`, and FedEM's perturbation if there is one."""

    x: Tensor
    y: Tensor
    delta: Tensor | None


def run_folder(path: Path) -> Path:
    """The folder of a run: this one, or the only `seed-*` folder in it."""
    if (path / "config.toml").exists():
        return path
    seeds = sorted(path.glob("**/seed-*")) if path.is_dir() else []
    if len(seeds) != 1:
        found = f"it holds {len(seeds)} runs" if seeds else "it holds no run"
        raise ResultError(f"{path}: {found}. Give the folder of one run, results/.../seed-N.")
    return seeds[0]


def open_run(path: Path, data_dir: Path | None = None) -> RecordedRun:
    """The run in this folder (or in its only `seed-*` folder); its data are prepared again from its configuration."""
    folder = run_folder(path)
    number = re.fullmatch(r"seed-(\d+)", folder.name)
    if number is None:
        raise ResultError(f"{folder}: its name does not tell the seed. Give a folder named seed-N.")
    if not (folder / "transcript").is_dir():
        raise ResultError(
            f"{folder} has no transcript to attack. Run it again with --set run.transcript=true."
        )
    config = load_config(folder / "config.toml")
    return RecordedRun(folder, int(number[1]), config, prepare(config, int(number[1]), data_dir))


def read_exchange(run: RecordedRun, round: int, exchange: int = 0) -> Exchange:
    """One recorded exchange; a round or exchange that was not recorded is refused with those that were."""
    transcript = run.folder / "transcript"
    place = transcript / f"round-{round:06d}"
    if not place.is_dir():
        known = sorted(int(p.name.removeprefix("round-")) for p in transcript.glob("round-" + 6 * "[0-9]"))
        have = f"rounds {known[0]} to {known[-1]}" if known else "no round"
        raise InputError("round", round, f"the transcript holds {have}", "Choose a recorded round.")
    place = place / f"exchange-{exchange:04d}"
    if not (place / "clients.json").is_file():
        count = len(list(place.parent.glob("exchange-*")))
        raise InputError(
            "exchange", exchange, f"round {round} has exchanges 0 to {count - 1}", "Choose one of these."
        )
    if not (place / "up.bin").is_file():
        raise InputError("round", round, "nobody answered in this exchange", "Choose another round.")
    method = run.prepared.method
    try:
        clients = tuple(int(client) for client in json.loads((place / "clients.json").read_text()))
        down = method.down_type.from_bytes((place / "down.bin").read_bytes())
        up = method.up_type.from_bytes((place / "up.bin").read_bytes())
    except (OSError, TypeError, ValueError, OverflowError, RecursionError, MessageError) as error:
        raise ResultError(
            f"{place} is damaged: {error}. Choose another round, or record it again."
        ) from error
    if up.count != len(clients):
        raise ResultError(f"{place} is damaged: {len(clients)} clients, but {up.count} answers.")
    return Exchange(At(run.prepared.plan, round, exchange), clients, down, up)


def server_view(
    run: RecordedRun,
    exchange: Exchange,
    clients: Sequence[int],
    *,
    labels: Tensor | None = None,
    examples: int | None = None,
    adaptive: bool = True,
    texts: Tensor | None = None,
) -> ServerView:
    """What the server sees of these clients' answers; the test split stands for public examples.

    Of `texts [T, B, L]` only the lengths are looked at, which the server is taken to know.
    """
    places = [_place(exchange, client) for client in clients]
    down, up = exchange.down.rows(places), exchange.up.rows(places)
    sent = _parameters(run, down)
    observed, local = as_gradient(run.prepared.method, exchange.at, sent, down, up)
    first = {name: leaf[:1] for name, leaf in sent.items()}
    if any(not torch.equal(leaf[:1].expand_as(leaf), leaf) for leaf in sent.values()):
        raise InputError(
            "clients", list(clients), "they were sent different models", "Attack them one after another."
        )
    count = _examples(up, examples)
    dataset = run.prepared.dataset
    image = len(dataset.input_shape) == 3
    parameters = sum(leaf[0].numel() for leaf in observed.values())
    return ServerView(
        run.prepared.task,
        without_axis(first),
        observed,
        count,
        dataset.input_shape,
        dataset.num_classes,
        image_box(dataset.mean, dataset.std) if image else None,
        labels,
        local,
        adaptation_to(run.prepared.method, exchange.at, parameters, count) if adaptive else Adaptation(),
        dataset.test.x,
        None if texts is None else _text_knowledge(run, texts),
    )


def _text_knowledge(run: RecordedRun, texts: Tensor) -> TextKnowledge:
    """Padding from the lengths of the texts, and the special tokens that a classifier's vocabulary puts around them."""
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


def truth(run: RecordedRun, exchange: Exchange, clients: Sequence[int]) -> Truth:
    """The examples behind these clients' answers, each client replayed on its own. Never part of a view."""
    parts = [_client_truth(run, exchange, client) for client in clients]
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


def _client_truth(run: RecordedRun, exchange: Exchange, client: int) -> Truth:
    _place(exchange, client)  # refuses one who did not answer
    method = innermost(run.prepared.method)
    data = run.prepared.clients.load([client])
    at = exchange.at
    if not isinstance(method, (FedSGD, FedEM)):
        return Truth(data.x[0], data.y[0], None)
    if isinstance(method, FedEM) and method.block > 1:
        raise InputError(
            "method.block", method.block, "an upload sums several batches", "Record a run with block = 1."
        )
    streams = ClientStreams(run.seed, at.round, (client,), at.exchange)
    batch = batch_in_step(data, method.batch_size, at.exchange, streams)
    count = batch.y.shape[1] if batch.mask is None else int(batch.mask.sum())
    if count == 0:
        raise InputError(
            "exchange", at.exchange, f"client {client} had run out of examples", "Choose an earlier exchange."
        )
    delta = None
    if isinstance(method, FedEM):
        delta = _replayed_delta(run, exchange, client)[:count]
    return Truth(batch.x[0, :count], batch.y[0, :count], delta)


def _replayed_delta(run: RecordedRun, exchange: Exchange, client: int) -> Tensor:
    """The client's perturbation in this exchange: it begins anew in each round, so the round is replayed."""
    method = run.prepared.method
    data = run.prepared.clients.load([client])
    state = method.init_client(run.prepared.task, data, ClientStreams(run.seed, 0, (client,)))
    for number in range(exchange.at.exchange + 1):
        past = exchange if number == exchange.at.exchange else read_exchange(run, exchange.at.round, number)
        down = past.down.rows([_place(past, client)])
        streams = ClientStreams(run.seed, past.at.round, (client,), number)
        _, state = method.client_update(run.prepared.task, past.at, down, data, state, streams)
    return state["delta"][0]


def _place(exchange: Exchange, client: int) -> int:
    if client not in exchange.clients:
        raise InputError(
            "client",
            client,
            "did not answer in this exchange",
            f"Choose one of {', '.join(map(str, exchange.clients))}.",
        )
    return exchange.clients.index(client)


def _parameters(run: RecordedRun, down: Message) -> Params:
    params = getattr(down, "params", None)
    if not isinstance(params, dict):
        raise InputError(
            "method", run.prepared.method.name, "its broadcast holds no model", "Attack another method."
        )
    missing = [name for name, _ in run.prepared.task.module.named_parameters() if name not in params]
    if missing:
        raise InputError(
            "method",
            run.prepared.method.name,
            f"the server never holds {', '.join(missing)}, so it cannot compute a candidate's gradient",
            "Attack a method whose server holds the whole model.",
        )
    return params


def _examples(up: Message, given: int | None) -> int:
    if given is not None:
        return given
    size = getattr(up, "size", None)
    if not isinstance(size, Tensor):
        raise InputError(
            "examples",
            None,
            "the upload does not say how many examples it stands for",
            "Give --examples N.",
        )
    counts = sorted(set(size.flatten().tolist()))
    if len(counts) > 1:
        raise InputError(
            "clients", counts, "their uploads stand for different numbers of examples", "Attack them apart."
        )
    return int(counts[0])
