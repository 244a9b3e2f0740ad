"""An attack's finding on the terminal: tables on stdout, the verdict and notes on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from fedveil.attack_runs.inversion import Scored
from fedveil.attack_runs.texts import ScoredTexts
from fedveil.attack_runs.verdict import NO_PROOF, attack_verdict
from fedveil.attacks.membership.score import MembershipFinding
from fedveil.cli.app import notes, out

_MOST_TEXTS = 8


def show_inversion(content: Mapping[str, Any], scored: Scored | ScoredTexts) -> None:
    """Show the content of a `finding.json` and the texts, if they may be shown."""
    if isinstance(scored, ScoredTexts):
        _show_texts(content, scored)
    else:
        out.print(_quality_table(content))
        notes.print("\n".join([*_attacker(content), *verdict_lines(content), *_alternatives(content)]))


def show_membership(finding: MembershipFinding) -> None:
    out.print(_membership_table(finding))
    notes.print("\n".join(verdict_lines(finding.to_json())))


def verdict_lines(content: Mapping[str, Any]) -> list[str]:
    """The verdict as a line; none if the scores are not numbers."""
    verdict = attack_verdict(content)
    if verdict is None:
        return []
    return [verdict.text if verdict.level == "leak" else f"{verdict.text} {NO_PROOF}"]


def _quality_table(content: Mapping[str, Any]) -> Table:
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


def _attacker(content: Mapping[str, Any]) -> list[str]:
    return [
        f"LPIPS: {content['against_x']['lpips_note']}; KL by {content['classifier']}.",
        f"The attacker: {'; '.join(content['notes'])}.",
    ]


def _alternatives(content: Mapping[str, Any]) -> list[str]:
    """The scores of the other attacker and of a perfect inversion."""
    lines = []
    other = content["weaker_attacker"]
    if other is not None:
        kept, left = (
            "does not adapt" if kind == "none" else f"adapts to the defence ({kind})"
            for kind in (content["adaptation"]["kind"], other["adaptation"])
        )
        lines.append(
            f"Shown is the attacker who {kept}; the one who {left} reaches {_number(other['mean']['psnr'])} dB."
        )
    if content["distortion_psnr"] is not None:
        lines.append(
            f"The perturbed inputs are within {content['distortion_psnr']:.1f} dB of the data: the score of a perfect "
            "inversion."
        )
    return lines


def _show_texts(content: Mapping[str, Any], scored: ScoredTexts) -> None:
    """Show leaked tokens, the scores, and every text with its reconstruction, if texts may be shown."""
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
    for note in (*content["notes"], *verdict_lines(content)):
        notes.print(note)


def _membership_table(finding: MembershipFinding) -> Table:
    title = f"{finding.attack} on {finding.target}: {finding.members} members, {finding.others} others"
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value")
    table.add_column("95 % interval")
    found = {"AUC": finding.auc, "accuracy on held-out pairs": finding.accuracy}
    for name, value in (found | finding.named_rates()).items():
        table.add_row(name, f"{value.value:.3f}", f"{value.low:.3f} to {value.high:.3f}")
    return table
