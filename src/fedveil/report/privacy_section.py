"""The part of the page about privacy: a chart of every epsilon, and the statements in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedveil.privacy.meaning import plain
from fedveil.privacy.statement import NO_AUDIT, show
from fedveil.report.files import number
from fedveil.report.groups import ADVERSARIES, WHO, WHOM, Setting
from fedveil.report.markup import NOTHING, Cell, section, table
from fedveil.report.privacy_chart import Mark, Row, privacy_chart
from fedveil.report.run import Proof
from fedveil.report.verdict import small, strength

_SHORT = {"observer": "published", "server": "server", "client": "participant"}
_TOLD = ("adversary", "lower_bound", "proven", "broken", "scope")  # in an audit's sentence
_KEYS = {
    "client": (
        '<svg class="key" viewBox="0 0 12 12" aria-hidden="true"><circle class="fink" cx="6" cy="6" r="5"/></svg>',
        "proven for one client's whole data",
    ),
    "record": (
        '<svg class="key" viewBox="0 0 12 12" aria-hidden="true"><circle class="hollow sink" cx="6" cy="6" r="4.5"/>'
        "</svg>",
        "proven for a single record",
    ),
    "audit": (
        '<svg class="key" viewBox="0 0 16 12" aria-hidden="true"><path class="audit" d="M2 0V12M2 6h12m-4 -4l4 4l-4 '
        '4"/></svg>',
        "an audit showed at least this, for one participation",
    ),
    "claim": (
        '<svg class="key" viewBox="0 0 14 14" aria-hidden="true"><path class="hollow claim" d="M7 1l6 6l-6 6l-6 -6Z"/>'
        "</svg>",
        "the paper's own claim",
    ),
}


def privacy(settings: Sequence[Setting]) -> str:
    rows = [row for setting in settings for row in _privacy_rows(setting)]
    chart = ""
    if rows:
        label = "Epsilon on a logarithmic scale. " + ". ".join(
            mark.note for row in rows for mark in row.marks if mark.value is not None
        )
        chart = _key(rows) + privacy_chart(rows, label=label)
    words = "".join(_words(setting, opened=len(settings) == 1) for setting in settings)
    lead = (
        "Three separate things: what a paper claims, what is proven for these runs, and what an audit measured. "
        "Epsilon bounds how much an adversary can learn about one person's data."
    )
    if any(setting.audited() for setting in settings):
        lead += " Rows named audit are about one participation, the others about all rounds."
    return section("privacy", "Privacy statement", chart, words, lead=lead)


def _key(rows: Sequence[Row]) -> str:
    """The meaning of the marks that occur."""
    kinds = {mark.kind for row in rows for mark in row.marks}
    items = "".join(
        f"<li>{drawn}{escape(said)}</li>" for kind, (drawn, said) in _KEYS.items() if kind in kinds
    )
    return f'<ul class="legend">{items}</ul>'


def _privacy_rows(setting: Setting) -> list[Row]:
    proofs = setting.proofs()
    if proofs and all(proof.epsilon is None for proof in proofs):
        mark = Mark("client", None, f"{setting.name}: nothing is proven against anybody")
        rows = [("anybody", "anybody", [mark])]
    else:
        rows = [
            (WHO[adversary].removeprefix("the "), _SHORT[adversary], marks)
            for adversary in ADVERSARIES
            if (marks := [_mark(setting, proof) for proof in proofs if proof.adversary == adversary])
        ]
    audits: dict[str, list[Mark]] = {}
    for audit in setting.audited():
        bound = number(audit.get("lower_bound"))
        if bound is not None:
            who = str(audit.get("adversary", ""))
            whom = f" against {WHO[who]}" if who in WHO else ""
            of = " of the bits" if audit.get("kind") == "reachable values" else ""
            said = (
                f"{setting.name}: an audit{of}{whom} showed epsilon of at least {show(bound)}{_scope(audit)}"
            )
            marks = audits.setdefault(who, [])
            marks.append(Mark("audit", bound, said))
            proven = number(audit.get("proven"))
            kind = "record" if audit.get("unit") == "record" else "client"
            if proven is not None and not any(mark.kind == kind for mark in marks):
                marks.append(
                    Mark(kind, proven, f"{setting.name}: epsilon {show(proven)} proven{_scope(audit)}")
                )
    for who, marks in audits.items():
        if who in WHO:
            rows.append((f"audit: {WHO[who].removeprefix('the ')}", f"audit: {_SHORT[who]}", marks))
        else:
            rows.append(("audit", "audit", marks))
    claim = setting.first.claim
    if isinstance(claim, float):
        mark = Mark("claim", claim, f"{setting.name}: the paper claims epsilon {show(claim)}")
        rows.append(("claim", "claim", [mark]))
    return [Row(setting.name if place == 0 else "", setting.look, *row) for place, row in enumerate(rows)]


def _mark(setting: Setting, proof: Proof) -> Mark:
    said = "nothing proven" if proof.epsilon is None else f"epsilon {show(proof.epsilon)} proven"
    whom = f"{WHOM.get(proof.unit, proof.unit)} against {WHO[proof.adversary]}"
    kind = "record" if proof.unit == "record" else "client"
    return Mark(kind, proof.epsilon, f"{setting.name}, {whom}: {said}")


def _scope(audit: Mapping[str, Any]) -> str:
    """The scope of the bound, if the audit states it."""
    scope = audit.get("scope")
    return f" for {scope}" if isinstance(scope, str) else ""


def _words(setting: Setting, *, opened: bool) -> str:
    run = setting.first
    rows: list[list[Cell]] = [
        [
            escape(WHO.get(proof.adversary, proof.adversary)),
            escape(WHOM.get(proof.unit, proof.unit)),
            (
                "none" if proof.epsilon is None else show(proof.epsilon),
                float("inf") if proof.epsilon is None else proof.epsilon,
            ),
            NOTHING if proof.delta is None else small(proof.delta),
            escape(strength(proof)),
            escape(plain(proof.theorem) if proof.epsilon is not None else proof.reason),
        ]
        for proof in setting.proofs()
    ]
    parts = []
    if rows:
        heads = ["against", "protects", "ε", "δ", "meaning", "by"]
        proven = table(
            f"Proven for {setting.name}", heads, rows, sortable=False, numeric_from=9, labels=("ε", "δ", "by")
        )
        parts.append(f'<div class="wordy">{proven}</div>')
    if run.words:
        words = run.words.removesuffix(NO_AUDIT) if setting.audited() else run.words
        parts.append(f'<div class="words">{_paragraphs(words.rstrip())}</div>')
    parts += [_audit(audit) for audit in setting.audited()]
    if not parts:
        parts = ["<p>This run has no statement yet: it is written when a run ends.</p>"]
    state = " open" if opened else ""
    return f"<details{state}><summary>In words: {escape(setting.name)}</summary>{''.join(parts)}</details>"


def _audit(audit: Mapping[str, Any]) -> str:
    """A sentence, and the other results of the audit on one line."""
    whom = WHO.get(str(audit.get("adversary", "")))
    bound, proven = number(audit.get("lower_bound")), number(audit.get("proven"))
    said = ""
    if bound is not None:
        beside = f"; {show(proven)} is proven" if proven is not None else ""
        end = "What is declared is refuted." if audit.get("broken") is True else "A low bound proves nothing."
        said = f"<p>Epsilon is at least {show(bound)}{escape(_scope(audit))}{beside}. {end}</p>"
    facts = [
        f"{str(key).replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"
        for key, value in audit.items()
        if key not in _TOLD and not isinstance(value, Mapping | list)
    ]
    rest = f'<p class="note">{escape("; ".join(facts))}</p>' if facts else ""
    return f"<h4>Audit{f' against {escape(whom)}' if whom else ''}</h4>{said}{rest}"


def _paragraphs(text: str) -> str:
    out = []
    for block in text.split("\n\n"):
        items: list[str] = []
        for line in block.splitlines():
            if line.startswith("  "):
                items.append(f"<li>{escape(line.strip())}</li>")
                continue
            if items:
                out.append(f"<ul>{''.join(items)}</ul>")
                items = []
            out.append(f"<p>{escape(line)}</p>")
        if items:
            out.append(f"<ul>{''.join(items)}</ul>")
    return "".join(out)
