"""Membership attacks on a finished run: on its model, or on one client's upload in its transcript.

The truth is derived from the run's configuration and seed, which determine the partition; the attack gets only
models, uploads, the examples in question (members and non-members mixed) and the attacker's own examples.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.attack_runs.transcript import (
    StoredRun,
    answers_of,
    read_broadcast,
    read_exchange,
    read_upload,
    recorded_cohort,
    require_replayable,
    rounds_in_transcript,
)
from fedveil.attacks.membership import all as _known  # noqa: F401  (registers them)
from fedveil.attacks.membership.score import MembershipFinding, judge, save
from fedveil.attacks.membership.threat_model import (
    Examples,
    MembershipView,
    Recipe,
    make_membership_attack,
)
from fedveil.attacks.registry import attack_settings
from fedveil.data.client_data import ArrayClients, ClientData
from fedveil.errors import InputError, ResultError
from fedveil.experiment.config import load_config
from fedveil.experiment.prepare import Prepared, prepare
from fedveil.methods.method import At
from fedveil.session.results import ResultFolder
from fedveil.streams import ClientStreams, named_stream
from fedveil.tree import Params, sub, with_axis

Target = Literal["model", "upload"]
_MOST_EPOCHS = 100  # largest number of epochs of shadow models


@dataclass(frozen=True)
class Observed:
    """The target: models `[R, ...]`, and for an upload also the broadcast model and the gradient."""

    words: str
    place: str
    """As part of a folder's name."""
    models: Params
    members: Tensor
    start: Params | None = None
    sent: Params | None = None
    at: At | None = None
    """The exchange of the upload."""
    participations: int = 1
    """Number of rounds a member participated in, on average."""
    together: int = 1
    """The number of clients whose mean a round's model is."""


def attack_result(
    folder: Path,
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    target: Target = "model",
    examples: int = 500,
    round: int | None = None,
    client: int | None = None,
    exchange: int = 0,
    rounds_seen: int = 5,
    attack_seed: int = 0,
    data_dir: Path | None = None,
) -> MembershipFinding:
    """Attack a finished run and write a folder in `attacks/` beside its files.

    Its name contains the attack, the upload if one is attacked, and settings that are not the default. Up to `examples`
    members and as many non-members are attacked; non-members have the same labels as members, so that labels give no
    information. With a transcript, the models of the last `rounds_seen` rounds are observed too. Members of a model are
    the examples of the clients that participated, those of an upload the examples it was computed from.
    """
    attack = make_membership_attack(name, settings)
    if examples < 4:
        raise InputError("examples", examples, "are too few to evaluate an attack", "Use 4 or more.")
    result = ResultFolder(folder).read()
    seed = int(result.summary["seed"])
    config = load_config(folder / "config.toml")
    prepared = prepare(config, seed, data_dir, folder=folder)
    run = StoredRun(folder, seed, config, prepared)
    ResultFolder(folder).require_data(prepared.digest)
    rng = named_stream(attack_seed, "membership", name, target)
    _require_classes(prepared, name)
    if target == "model":
        participations = _participations(run, int(result.summary["rounds"]))
        observed = _final_model(run, result.model, rounds_seen, participations)
    else:
        observed = _one_upload(run, round, client, exchange)
    view, is_member = _question(run, observed, examples, rng)
    finding = judge(name, observed.words, attack(view, rng).numpy(), is_member, rng)
    settled = attack_settings(attack)
    identity = (
        "" if attack == make_membership_attack(name) and attack_seed == 0 else _short(settled, attack_seed)
    )
    asked_for = {"examples": examples, "rounds_seen": rounds_seen, "seed": attack_seed}
    finding = replace(finding, settings=settled | asked_for)
    save(finding, folder / "attacks" / f"{name}{observed.place}{identity}")
    return finding


def _question(
    run: StoredRun, observed: Observed, examples: int, rng: np.random.Generator
) -> tuple[MembershipView, np.ndarray]:
    """The attacker's view, members and non-members mixed, and separately which of them are members."""
    train, test = run.prepared.dataset.train, run.prepared.dataset.test
    picked = observed.members[torch.from_numpy(rng.permutation(len(observed.members))[:examples])]
    picked, others = _same_labels(picked, train.y, test.y, rng)
    asked = Examples(train.x[picked], train.y[picked]) + Examples(test.x[others], test.y[others])
    is_member = np.arange(len(asked)) < len(picked)
    order = rng.permutation(len(asked))
    left = torch.ones(len(test.y), dtype=torch.bool)
    left[others] = False
    view = MembershipView(
        run.prepared.task,
        observed.models,
        asked.take(torch.from_numpy(order)),
        Examples(test.x[left], test.y[left]),
        _recipe(run, observed),
        observed.start,
        observed.sent,
    )
    return view, is_member[order]


def _short(settings: Mapping[str, Any], seed: int) -> str:
    """A suffix that distinguishes folders of one attack with different settings."""
    text = json.dumps(dict(settings) | {"seed": seed}, sort_keys=True)
    return f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _participations(run: StoredRun, rounds: int) -> dict[int, int]:
    """Number of rounds each sampled client participated in. Clients never sampled are not members."""
    drawn: Counter[int] = Counter()
    for number in range(1, rounds + 1):
        cohort = recorded_cohort(run, number)
        if cohort is None:
            raise InputError(
                "run.noise",
                "entropy",
                f"the cohort of round {number} was drawn from entropy and is not recorded, so members are unknown",
                "Run it again with --set run.transcript=true, or with --set run.noise=seeded.",
            )
        drawn.update(cohort)
    return dict(sorted(drawn.items()))


def _final_model(run: StoredRun, model: Params, rounds_seen: int, drawn: Mapping[int, int]) -> Observed:
    clients = run.prepared.clients
    assert isinstance(clients, ArrayClients)
    sent = [read_broadcast(run, number) for number in rounds_in_transcript(run.folder)[-rounds_seen:]]
    models = [one for down in sent if (one := run.prepared.method.sent_model(down)) is not None]
    stack = [one for one in models if one.keys() == model.keys() and next(iter(one.values())).shape[0] == 1]
    whole = [*stack, with_axis(model)]
    return Observed(
        "the final model" + (f" and {len(stack)} model{'s' * (len(stack) > 1)} before it" if stack else ""),
        "",
        {name: torch.cat([one[name] for one in whole]) for name in model},
        torch.cat([clients.parts[client] for client in drawn] or [torch.zeros(0, dtype=torch.long)]),
        participations=max(1, round(sum(drawn.values()) / max(1, len(drawn)))),
        together=run.prepared.plan.cohort,
    )


def _one_upload(run: StoredRun, round: int | None, client: int | None, exchange: int) -> Observed:
    clients = run.prepared.clients
    assert isinstance(clients, ArrayClients)
    known = rounds_in_transcript(run.folder, exchange, answered=True)
    if not known or (round is not None and round not in known):
        raise ResultError(
            f"{run.folder} has no transcript of such uploads to attack. Run it with --set run.transcript=true, or "
            "choose a recorded round and exchange.",
            field="transcript",
            value=str(run.folder),
        )
    number = known[-1] if round is None else round
    recorded = read_exchange(run, number, exchange)
    cohort = recorded.clients
    if client is None:
        client = max(cohort, key=lambda k: len(clients.parts[k]))
    if client not in cohort:
        raise InputError(
            "client", client, f"did not participate in round {number}", f"Use one of {list(cohort)}."
        )
    reading = read_upload(run, recorded.at, *answers_of(run, recorded, [client]))
    sent = sub(reading.start, reading.models) if reading.gradient is None else reading.gradient
    of = f", exchange {exchange}" if exchange else ""
    words, place = (
        f"the upload of client {client} in round {number}{of}",
        f"-upload-round-{number}-client-{client}" + (f"-exchange-{exchange}" if exchange else ""),
    )
    behind = _behind(run, recorded.at, clients.parts[client], client)
    return Observed(words, place, reading.models, behind, reading.start, sent, at=recorded.at)


def _behind(run: StoredRun, at: At, part: Tensor, client: int) -> Tensor:
    """Which of a client's examples an upload was computed from."""
    require_replayable(run)
    numbers = ClientData(part.unsqueeze(0), part.unsqueeze(0), torch.tensor([len(part)]))
    streams = ClientStreams(run.seed, at.round, (client,), at.exchange)
    batches = run.prepared.method.batches_behind(at, numbers, streams)
    return torch.cat([batch.x[0] if batch.mask is None else batch.x[0, batch.mask[0]] for batch in batches])


def _recipe(run: StoredRun, observed: Observed) -> Recipe:
    """The public configuration of the target's training.

    The mean of K clients' models behaves like a model trained with batches of K times the size.
    """
    method, plan, examples = run.prepared.method, run.prepared.plan, len(observed.members)
    records = max(1, round(fmean(run.prepared.clients.sizes)))
    rounds = range(1, plan.rounds + 1) if observed.at is None else [observed.at.round]
    known = [one for number in rounds if (one := method.round_training(At(plan, number))) is not None]
    if not known:
        usual = method.shadow_training()
        return Recipe(usual.lr, usual.batch_size or max(1, examples), usual.epochs, examples)
    steps = known[0]
    passes = steps.epochs if steps.steps is None else steps.passes(records)
    one_gradient = observed.at is not None and method.local_training(observed.at) is None
    batch = max(1, examples) if one_gradient else steps.batch(records)
    return Recipe(
        fmean(one.lr for one in known) * steps.share,
        batch * observed.together,
        min(_MOST_EPOCHS, passes * observed.participations),
        examples,
        momentum=steps.momentum,
        weight_decay=steps.weight_decay,
    )


def _same_labels(
    members: Tensor, train_y: Tensor, test_y: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """As many test examples as members for each label; members without a counterpart are left out.

    At most half of the test examples of a label are used: the attacker needs the rest.
    """
    ins, outs = [], []
    for label in sorted(set(train_y[members].tolist())):
        mine = members[train_y[members] == label]
        there = (test_y == label).nonzero()[:, 0]
        count = min(len(mine), len(there) // 2)
        ins.append(mine[:count])
        outs.append(there[torch.from_numpy(rng.permutation(len(there))[:count])])
    return torch.cat(ins), torch.cat(outs)


def _require_classes(prepared: Prepared, attack: str) -> None:
    """Refuse data without classes: non-members are chosen by label, and most attacks use class probabilities."""
    if not prepared.dataset.has_classes:
        what = "tokens" if prepared.dataset.predicts_tokens else "numbers or times"
        raise InputError(
            "attack",
            attack,
            f"{prepared.dataset.name} has no classes, its model predicts {what}",
            "Attack a classifier, or use lamp or embedding-rows.",
        )
