"""`fedveil attack`: what an honest-but-curious server can learn from a recorded run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TaskID

from fedveil.attack_runs.inversion import LabelMode, attack_exchange, describe, write_finding
from fedveil.attack_runs.membership import Target
from fedveil.attack_runs.transcript import StoredRun, open_run, read_exchange, run_folder
from fedveil.attacks.membership.all import list_membership_attacks
from fedveil.attacks.registry import configured_attacks, list_attacks, make_attack
from fedveil.attacks.view import Attack
from fedveil.cli.app import AsJson, DataDir, app, notes, out
from fedveil.cli.findings import show_inversion
from fedveil.cli.membership import attack_membership, parse_settings
from fedveil.errors import InputError, known_name
from fedveil.session.callbacks.progress import progress_bar

_Result = Annotated[
    Path,
    typer.Argument(
        help="The folder of a run: results/.../seed-0. What reads uploads needs its transcript (run.transcript)."
    ),
]
_AttackName = Annotated[
    str | None,
    typer.Option(
        help="An attack of `fedveil list attacks`. Default: the attack sections of the run's configuration, if any."
    ),
]
_Round = Annotated[
    int | None,
    typer.Option(
        "--round", min=1, help="The round whose messages are attacked. Default: the attack section's, or 1."
    ),
]
_Exchange = Annotated[int, typer.Option(min=0, help="The exchange of that round.")]
_Clients = Annotated[
    list[int] | None,
    typer.Option(
        help="The client whose upload is attacked. Default: the first that answered. May be repeated."
    ),
]
_Labels = Annotated[LabelMode, typer.Option(help="Whether the server knows the labels.")]
_Target = Annotated[
    Target,
    typer.Option(help="What a membership attack looks at: the final model, or one client's upload."),
]
_Examples = Annotated[
    int | None,
    typer.Option(
        help="Inversion: the number of examples behind the upload. Default: as if the server knew it. "
        "Membership: the number of members to ask about. Default: 500."
    ),
]
_Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the attack: --set steps=400. May be repeated."),
]
_Adaptive = Annotated[bool, typer.Option(help="Whether the attacker uses its knowledge of the defence.")]
_Seed = Annotated[int, typer.Option(min=0, help="The seed of the attacker's random starts.")]


@dataclass(frozen=True)
class _Uploads:
    """The uploads that an inversion attacks, and the attacker's knowledge about them."""

    clients: list[int]
    exchange: int
    labels: LabelMode
    examples: int | None
    adaptive: bool
    seed: int


@app.command(
    "attack",
    epilog="Examples: fedveil attack results/demo/0123456789ab/seed-0 --attack inverting-gradients; "
    "fedveil attack results/demo/0123456789ab/seed-0 --attack lira --set shadows=16",
)
def attack_command(
    result: _Result,
    attack: _AttackName = None,
    round_: _Round = None,
    exchange: _Exchange = 0,
    client: _Clients = None,
    labels: _Labels = "known",
    target: _Target = "model",
    examples: _Examples = None,
    settings: _Settings = None,
    adaptive: _Adaptive = True,
    seed: _Seed = 0,
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Attack a finished run: reconstruct clients' data from what the server observed, or infer who was in it."""
    membership = {kind.name for kind in list_membership_attacks()}
    if attack is not None:  # report a misspelt name before a missing transcript
        known_name("--attack", "attack", attack, membership | {kind.name for kind in list_attacks()})
    changes = parse_settings(settings or [])
    if attack in membership:
        attack_membership(
            run_folder(result),
            attack,
            settings=changes,
            target=target,
            examples=examples,
            round_=round_,
            client=client[0] if client else None,
            exchange=exchange,
            seed=seed,
            data=data,
            as_json=as_json,
        )
        return
    if client is not None and len(set(client)) != len(client):
        raise InputError("client", client, "names a client twice", "Give each client once.")
    run = open_run(result, data)
    planned = _planned(run, attack, changes, round_)
    found = [
        _invert(
            run,
            chosen,
            number,
            _Uploads(
                client or _first_that_answered(run, number, exchange),
                exchange,
                labels,
                examples,
                adaptive,
                seed,
            ),
            quiet=as_json,
        )
        for chosen, number in planned
    ]
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 else {"findings": found}))


def _first_that_answered(run: StoredRun, round_: int, exchange: int) -> list[int]:
    """The client with the lowest number whose upload is in the transcript."""
    return [min(read_exchange(run, round_, exchange).clients)]


def _planned(
    run: StoredRun, attack: str | None, changes: Mapping[str, Any], round_: int | None
) -> list[tuple[Attack, int]]:
    """The named attack, or those of the run's configuration, each with its round."""
    if attack is not None:
        return [(make_attack(attack, changes), round_ or 1)]
    usual = "inverting-gradients" if run.prepared.dataset.tokens is None else "lamp"
    return list(configured_attacks(run.config.attack, changes, round_, usual))


def _invert(run: StoredRun, attack: Attack, round_: int, uploads: _Uploads, *, quiet: bool) -> dict[str, Any]:
    """Attack these uploads, write the finding and, unless `quiet`, show it."""
    clients, labels, adaptive, seed = uploads.clients, uploads.labels, uploads.adaptive, uploads.seed
    with progress_bar(notes) as progress:
        recorded, scored = attack_exchange(
            run,
            attack,
            round=round_,
            clients=clients,
            exchange=uploads.exchange,
            labels=labels,
            examples=uploads.examples,
            adaptive=adaptive,
            seed=seed,
            callback=ShowSteps(progress, f"{attack.name} round {round_}"),
        )
    folder = write_finding(
        run, attack, recorded, clients, scored, labels=labels, adaptive=adaptive, seed=seed
    )
    content = describe(run, attack, recorded, clients, scored, labels, seed)
    if not quiet:
        show_inversion(content, scored)
        out.print(f"finding in {folder}", soft_wrap=True)
    return {"finding": str(folder), **content}


class ShowSteps:
    """Shows an attack's steps on a progress bar, from the first step, so that errors before it show no bar."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title
        self._bar: TaskID | None = None

    def __call__(self, step: int, steps: int, loss: float) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task(self._title, total=steps, status="")
        self._progress.update(self._bar, completed=step, total=steps, status=f"loss {loss:.3g}")
