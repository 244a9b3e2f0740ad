"""`fedveil attack`: what a curious server would have learnt from a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from fedveil.attack_runs.inversion import LabelMode, attack_exchange, describe, write_finding
from fedveil.attack_runs.membership import Target
from fedveil.attack_runs.texts import ScoredTexts
from fedveil.attack_runs.transcript import open_run, run_folder
from fedveil.attacks.membership.all import list_membership_attacks
from fedveil.attacks.registry import configured_attacks, list_attacks, make_attack
from fedveil.cli.app import AsJson, DataDir, app, notes, out
from fedveil.cli.membership import attack_membership, parse_settings
from fedveil.errors import InputError, known_name
from fedveil.session.callbacks.progress import progress_bar

_MOST_TEXTS = 8
_NOTHING = 0.05  # a gain of ROUGE-1 that chance explains


@app.command(
    "attack",
    epilog="Examples: fedveil attack results/demo/0123456789ab/seed-0 --attack inverting-gradients --client 46; "
    "fedveil attack results/demo/0123456789ab/seed-0 --attack lira --set shadows=16",
)
def attack_command(
    result: Annotated[
        Path,
        typer.Argument(
            help="The folder of a run: results/.../seed-0. What reads uploads needs its transcript (run.transcript)."
        ),
    ],
    attack: Annotated[
        str | None,
        typer.Option(
            help="Its name: see `fedveil list attacks`. Without it, every attack section of the configuration."
        ),
    ] = None,
    round_: Annotated[
        int | None,
        typer.Option("--round", min=1, help="Attack what was sent in this round; without it the first."),
    ] = None,
    exchange: Annotated[int, typer.Option(min=0, help="And in this exchange of the round.")] = 0,
    client: Annotated[
        list[int] | None,
        typer.Option(help="Attack this client's upload (else 0). May be repeated: one stack."),
    ] = None,
    labels: Annotated[LabelMode, typer.Option(help="Whether the server knows the labels.")] = "known",
    target: Annotated[
        Target, typer.Option(help="Of a membership attack: the final model, or one client's upload.")
    ] = "model",
    examples: Annotated[
        int | None,
        typer.Option(
            help="Images behind an upload that does not tell; members that a membership attack asks about."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the attack: --set steps=400. May be repeated."),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option(help="Whether the attacker makes use of knowing the defence.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the attacker's random starts.")] = 0,
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Reconstruct clients' data from what the server saw, or tell who was in it; writes a finding and what it found."""
    membership = {kind.name for kind in list_membership_attacks()}
    if attack is not None:  # a misspelt name is told before a missing transcript
        known_name("--attack", "attack", attack, membership | {kind.name for kind in list_attacks()})
    if attack in membership:
        attack_membership(
            run_folder(result),
            attack,
            settings=parse_settings(settings or []),
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
    clients = client or [0]
    if len(set(clients)) != len(clients):
        raise InputError("client", clients, "names a client twice", "Name each client once.")
    changes = parse_settings(settings or [])
    run = open_run(result, data)
    if attack is not None:
        planned = [(make_attack(attack, changes), round_ or 1)]
    else:
        usual = "inverting-gradients" if run.prepared.dataset.tokens is None else "lamp"
        planned = configured_attacks(run.config.attack, changes, round_, usual)
    found = []
    for chosen, number in planned:
        with progress_bar(notes) as progress:
            recorded, scored = attack_exchange(
                run,
                chosen,
                round=number,
                clients=clients,
                exchange=exchange,
                labels=labels,
                examples=examples,
                adaptive=adaptive,
                seed=seed,
                watch=ShowSteps(progress, f"{chosen.name} round {number}"),
            )
        folder = write_finding(
            run, chosen, recorded, clients, scored, labels=labels, adaptive=adaptive, seed=seed
        )
        content = describe(run, chosen, recorded, clients, scored, labels, seed)
        found.append({"finding": str(folder), **content})
        if not as_json:
            if isinstance(scored, ScoredTexts):
                _show_texts(content, scored)
            else:
                out.print(_table(content))
                notes.print(_verdict(content))
            out.print(f"finding in {folder}", soft_wrap=True)
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 else {"findings": found}))


class ShowSteps:
    """Shows an attack's steps on a bar, which is there from the first on: what is refused before shows none."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title
        self._bar: TaskID | None = None

    def __call__(self, step: int, steps: int, loss: float) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task(self._title, total=steps, status="")
        self._progress.update(self._bar, completed=step, total=steps, status=f"loss {loss:.3g}")


def _table(content: dict[str, Any]) -> Table:
    table = Table(title=f"{content['attack']} against {content['method']}", title_justify="left")
    for column in ("compared with", "MSE", "PSNR dB", "SSIM", "LPIPS", "KL"):
        table.add_column(column, justify="left" if column == "compared with" else "right")
    for name, key in (("x, the clients' data", "against_x"), ("x + delta, trained on", "against_trained_on")):
        if content[key] is not None:
            mean = content[key]["mean"]
            table.add_row(name, *(_number(mean[score]) for score in ("mse", "psnr", "ssim", "lpips", "kl")))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _verdict(content: dict[str, Any]) -> str:
    gain = content["against_x"]["mean"]["psnr"] - content["mean_image_psnr"]
    lines = [
        f"LPIPS: {content['against_x']['lpips_note']}; KL by {content['classifier']}.",
        f"The attacker: {'; '.join(content['notes'])}.",
    ]
    if gain <= 1:
        lines.append(
            "On average no better than showing the mean image, or public ones. "
            "A failed attack proves nothing: a stronger one may succeed."
        )
    else:
        lines.append(
            f"{gain:.1f} dB better than showing the mean image, or public ones: the uploads give examples away."
        )
    other = content["weaker_attacker"]
    if other is not None:
        kept, left = (
            "does not adapt" if kind == "none" else f"adapts to the defence ({kind})"
            for kind in (content["adaptation"]["kind"], other["adaptation"])
        )
        lines.append(
            f"Shown is the attacker who {kept}; the one who {left} comes to {_number(other['mean']['psnr'])} dB."
        )
    if content["distortion_psnr"] is not None:
        lines.append(
            f"The perturbed inputs are within {content['distortion_psnr']:.1f} dB of the data: so much a perfect "
            "inversion would score."
        )
    return "\n".join(lines)


def _show_texts(content: dict[str, Any], scored: ScoredTexts) -> None:
    """The tokens that leaked, the scores, and every text beside what was found, where texts may be shown."""
    for leak in content["leaked_tokens"]:
        named = f"{leak['tokens']} tokens named by the gradient itself"
        right = f"{leak['precision']:.0%} of them right, {leak['recall']:.0%} of the text's tokens"
        notes.print(f"{named}: {right} ({leak['how']})")
    table = Table(title=f"{content['attack']} against {content['method']}", title_justify="left")
    table.add_column("")
    for column in ("ROUGE-1", "ROUGE-2", "ROUGE-L"):
        table.add_column(column, justify="right")
    for name, key in (("reconstruction", "metrics"), ("a public text", "public_text")):
        table.add_row(name, *(f"{100 * content[key][score]:.1f}" for score in ("rouge1", "rouge2", "rougeL")))
    out.print(table)
    if scored.quotable:
        for original, found in list(zip(scored.original, scored.found, strict=True))[:_MOST_TEXTS]:
            out.print(Text("original        ", style="dim") + Text(original, style="bold"))
            out.print(Text("reconstruction  ", style="dim") + Text(found))
    else:
        notes.print("The texts of this dataset are not shown, only their scores.")
    for note in content["notes"]:
        notes.print(note)
    gain = content["metrics"]["rouge1"] - content["public_text"]["rouge1"]
    notes.print(
        "No better than showing a public text. A failed attack proves nothing: a stronger one may succeed."
        if gain <= _NOTHING
        else f"{100 * gain:.0f} points of ROUGE-1 above a public text: the uploads give texts away.",
    )
