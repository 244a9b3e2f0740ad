"""Membership attacks on a finished run: on its model, or on one client's upload in its transcript.

The truth comes from the run's own configuration and seed, which say whose examples were whose; the attack is
shown only models, uploads, the examples in question (members and others mixed) and examples of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.membership import all as _known  # noqa: F401  (registers them)
from fedveil.attacks.membership.score import MembershipFinding, judge, save
from fedveil.attacks.membership.view import (
    Examples,
    MembershipView,
    Recipe,
    make_membership_attack,
)
from fedveil.config import load_config
from fedveil.data.client_data import ArrayClients
from fedveil.errors import InputError, ResultError
from fedveil.experiment import Prepared, prepare
from fedveil.messages import Message
from fedveil.methods.fields import LocalTraining
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.uploads import uploaded_models
from fedveil.results import ResultFolder
from fedveil.streams import named_stream
from fedveil.tree import Params, rows, scale, sub, with_axis

Target = Literal["model", "upload"]
_MOST_EPOCHS = 100  # shadows that imitate long runs stop here


@dataclass(frozen=True)
class Seen:
    """What is attacked: models `[R, ...]`, and for an upload the model it answers and the gradient sent."""

    words: str
    place: str
    """As part of a folder's name."""
    models: Params
    members: Tensor
    start: Params | None = None
    sent: Params | None = None


def attack_result(
    folder: Path,
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    target: Target = "model",
    examples: int = 500,
    round: int | None = None,
    client: int | None = None,
    rounds_seen: int = 5,
    attack_seed: int = 0,
    data_dir: Path | None = None,
) -> MembershipFinding:
    """Attack a finished run and write a folder of `attacks/` beside its files.

    It is named by the attack, the upload where one was attacked, and settings other than the default ones.
    Up to `examples` members and as many others are asked about; others have the members' labels, so that labels
    say nothing. Of a transcript, the models of the last `rounds_seen` rounds are seen too.
    """
    attack = make_membership_attack(name, settings)
    if examples < 4:
        raise InputError("examples", examples, "too few to judge an attack", "Use 4 or more.")
    result = ResultFolder(folder).read()
    seed = int(result.summary["seed"])
    prepared = prepare(load_config(folder / "config.toml"), seed, data_dir)
    rng = named_stream(attack_seed, "membership", name, target)
    if target == "model":
        seen = _final_model(folder, prepared, result.model, rounds_seen)
    else:
        seen = _one_upload(folder, prepared, round, client)
    train, test = prepared.dataset.train, prepared.dataset.test
    picked = seen.members[torch.from_numpy(rng.permutation(len(seen.members))[:examples])]
    picked, others = _same_labels(picked, train.y, test.y, rng)
    asked = Examples(train.x[picked], train.y[picked]) + Examples(test.x[others], test.y[others])
    is_member = np.arange(len(asked)) < len(picked)
    order = rng.permutation(len(asked))
    left = torch.ones(len(test.y), dtype=torch.bool)
    left[others] = False
    view = MembershipView(
        prepared.task,
        seen.models,
        asked.take(torch.from_numpy(order)),
        Examples(test.x[left], test.y[left]),
        _recipe(prepared, target, len(seen.members)),
        seen.start,
        seen.sent,
    )
    finding = judge(name, seen.words, attack(view, rng).numpy(), is_member[order], rng)
    settled = {field.name: getattr(attack, field.name) for field in fields(cast(Any, attack))}
    identity = (
        "" if attack == make_membership_attack(name) and attack_seed == 0 else _short(settled, attack_seed)
    )
    asked_for = {"examples": examples, "rounds_seen": rounds_seen, "seed": attack_seed}
    finding = replace(finding, settings=settled | asked_for)
    save(finding, folder / "attacks" / f"{name}{seen.place}{identity}")
    return finding


def _short(settings: Mapping[str, Any], seed: int) -> str:
    """What tells the folders of one attack with different settings apart."""
    text = json.dumps(dict(settings) | {"seed": seed}, sort_keys=True)
    return f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _final_model(folder: Path, prepared: Prepared, model: Params, rounds_seen: int) -> Seen:
    clients = prepared.clients
    assert isinstance(clients, ArrayClients)
    steps = _exchanges(folder)
    models = [_down(prepared.method, step).tensors() for step in steps[-rounds_seen:]]
    named = [
        {k.removeprefix("params/"): v for k, v in one.items() if k.startswith("params/")} for one in models
    ]
    stack = [one for one in named if one.keys() == model.keys() and next(iter(one.values())).shape[0] == 1]
    whole = [*stack, with_axis(model)]
    return Seen(
        "the final model" + (f" and {len(stack)} model{'s' * (len(stack) > 1)} before it" if stack else ""),
        "",
        {name: torch.cat([one[name] for one in whole]) for name in model},
        torch.cat(clients.parts),
    )


def _one_upload(folder: Path, prepared: Prepared, round: int | None, client: int | None) -> Seen:
    clients = prepared.clients
    assert isinstance(clients, ArrayClients)
    steps = [step for step in _exchanges(folder) if (step / "up.bin").exists()]
    if round is not None:
        steps = [step for step in steps if step.parent.name == f"round-{round:06d}"]
    if not steps:
        raise ResultError(
            f"{folder} has no transcript of uploads to attack. Run it with --set run.transcript=true."
        )
    step = steps[-1]
    number = int(step.parent.name.removeprefix("round-"))
    cohort: Sequence[int] = json.loads((step / "clients.json").read_text())
    if client is None:
        client = max(cohort, key=lambda k: len(clients.parts[k]))
    if client not in cohort:
        raise InputError("client", client, f"did not take part in round {number}", f"Use one of {cohort}.")
    method = prepared.method
    down = _down(method, step)
    up = method.up_type.from_bytes((step / "up.bin").read_bytes())
    at = At(prepared.plan, number)
    row = [cohort.index(client)]
    start, model = (rows(both, row) for both in uploaded_models(method, at, down, up))
    lr = method.lr_at(at) if isinstance(method, LocalTraining) else 1.0
    sent = scale(sub(start, model), 1 / lr)
    words, place = (
        f"the upload of client {client} in round {number}",
        f"-upload-round-{number}-client-{client}",
    )
    return Seen(words, place, model, clients.parts[client], start, sent)


def _recipe(prepared: Prepared, target: Target, examples: int) -> Recipe:
    """The public configuration of the target's training."""
    method, plan = prepared.method, prepared.plan
    if not isinstance(method, LocalTraining):
        return Recipe(float(getattr(method, "lr", 0.1)), int(getattr(method, "batch_size", 64)), 20, examples)
    participations = max(1, round(plan.rounds * plan.rate)) if target == "model" else 1
    epochs = method.epochs
    if method.local_steps is not None:
        epochs = ceil(method.local_steps / ceil(plan.records_per_client / method.batch_size))
    recipe = Recipe(method.lr, method.batch_size, epochs * participations, examples)
    return replace(
        recipe,
        epochs=min(_MOST_EPOCHS, recipe.epochs),
        momentum=method.momentum,
        weight_decay=method.weight_decay,
    )


def _same_labels(
    members: Tensor, train_y: Tensor, test_y: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """As many test examples as members of each label; members of labels that run out are left out.

    At most half of the test examples of a label are taken: the attacker needs the rest.
    """
    ins, outs = [], []
    for label in sorted(set(train_y[members].tolist())):
        mine = members[train_y[members] == label]
        there = (test_y == label).nonzero()[:, 0]
        count = min(len(mine), len(there) // 2)
        ins.append(mine[:count])
        outs.append(there[torch.from_numpy(rng.permutation(len(there))[:count])])
    return torch.cat(ins), torch.cat(outs)


def _exchanges(folder: Path) -> list[Path]:
    """The exchanges on record, in their order."""
    return sorted((folder / "transcript").glob("round-*/exchange-*"))


def _down(method: AnyMethod, step: Path) -> Message:
    return method.down_type.from_bytes((step / "down.bin").read_bytes())
