"""The first page of a report on one setting: the statement that an officer signs, in words and with odds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from fedveil.privacy.meaning import SCALE, grade, guess_accuracy, rounded_up
from fedveil.privacy.statement import SEES, needs_trust, odds_in_words, show
from fedveil.report.groups import ADVERSARIES, WHO, WHOM, Setting
from fedveil.report.markup import Cell, section, table
from fedveil.report.run import Person, Proof, Run
from fedveil.report.verdict import level, result, small

_REFERENCES = (
    (
        "Regulation (EU) 2016/679 (GDPR): recital 26 (anonymous information); articles 5 (principles), 25 (data "
        "protection by design and by default), 32 (security of processing), 35 (data protection impact assessment)",
        "eur-lex.europa.eu",
    ),
    (
        "EDPB, Opinion 28/2024 on certain data protection aspects related to the processing of personal data in the "
        "context of AI models, 17 December 2024: when a model is anonymous",
        "edpb.europa.eu",
    ),
    (
        "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees, March 2025",
        "doi.org/10.6028/NIST.SP.800-226",
    ),
)
_SAMPLERS = {
    "fixed": "{cohort} of {clients} clients, drawn at random in each round",
    "poisson": "in each round each client with the same probability, independently; {cohort} of {clients} expected",
    "all": "all clients in every round",
}

_ODDS = (
    "An adversary knows everything but whether one client (record) took part, and holds both for equally likely. "
    "Of what it sees it makes the best possible guess. If the guarantee is (ε, δ), the guess is right in at most "
    "(e^ε + δ) / (1 + e^ε) of all cases.",
    "Proof: (ε, δ) bounds every test. Its rate of false alarms a and of misses b satisfy a + e^ε b ≥ 1 - δ and "
    "e^ε a + b ≥ 1 - δ (Kairouz, Oh, Viswanath: The Composition Theorem for Differential Privacy, 2015, Theorem 2.1). "
    "The sum of both is a + b ≥ 2 (1 - δ) / (1 + e^ε), and the guess is right in 1 - (a + b) / 2 of all cases.",
    "In other words: it is as if everything were revealed with probability δ, and otherwise a suspicion of 50 % could "
    "rise to e^ε / (1 + e^ε) and no higher. A suspicion of p before becomes at most p e^ε / (1 - p + p e^ε).",
)
_AGGREGATION = {
    True: "secure: the server learns the sum of the clients' updates, and no single one",
    False: "not secure: the server receives the update of every client",
}

_DEPLOYED = "training on the nodes, which keep their data; aggregation, test and the ε below on the server"
_NOISE = {
    True: "from the run's seed: whoever knows the seed can remove it",
    False: "from the operating system: nobody can compute it again",
}


def first_page(settings: Sequence[Setting], *, public: bool) -> str:
    """The statement to sign; empty if several settings are compared or no run is finished."""
    if len(settings) != 1 or not settings[0].first.finished:
        return ""
    (setting,) = settings
    parts = [
        _outline(setting, public=public),
        _proven(setting),
        '<div class="pair">',
        _list("Not covered", _not_covered(setting)),
        _list("What the operator must do", _duties(setting)),
        "</div>",
        _identity(setting, public=public),
        _signature(),
        _references(),
    ]
    return section("statement", "Statement", *parts)


def _outline(setting: Setting, *, public: bool) -> str:
    run = setting.first
    plan = run.plan
    made = run.statement.get("made")
    drawn = _SAMPLERS.get(plan.get("sampler", ""), "").format_map(defaultdict(lambda: "?", plan))
    version = run.statement.get("version") or run.environment.get("fedveil", "")
    facts = [
        ("trained", f"{run.model or 'a model'} by {setting.name}, {run.rounds} rounds"),
        ("stopped", "; ".join(dict.fromkeys(f"{r.stopped}" for r in setting.runs if r.stopped))),
        ("aggregation", _AGGREGATION[_secure(run)] + _coalition(run)),
        ("on", _whose(run, public=public)),
        ("computed", _DEPLOYED if run.deployed else ""),
        ("participation", drawn),
        ("dropouts", _dropouts(setting.runs) if run.deployed else ""),
        ("noise", _noise(setting)),
        ("result", _measured(setting)),
        ("finished", str(made)[:16].replace("T", " ") + " UTC" if made else ""),
        ("by", f"fedveil {version}" if version else ""),
    ]
    items = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts if value)
    return f'<dl class="facts">{items}</dl>'


def _dropouts(runs: Sequence[Run]) -> str:
    """How many of the uploads that the server asked for it could not use."""
    points = [point for run in runs for point in run.history]
    rounds = [(p.invited, p.answered) for p in points if p.invited is not None and p.answered is not None]
    asked = sum(invited for invited, _ in rounds)
    missing = asked - sum(answered for _, answered in rounds)
    if not missing:
        return f"none in {len(rounds)} rounds" if rounds else ""
    empty = sum(answered == 0 < invited for invited, answered in rounds)
    missed = f"{missing} of {asked} uploads in {len(rounds)} rounds: federation.log says who and why"
    return missed + (f"; {empty} of the rounds had too few and changed nothing" if empty else "")


def _noise(setting: Setting) -> str:
    """Where the privacy noise comes from, if anything is proven by it."""
    if not any(row.epsilon is not None for row in setting.proofs()):
        return ""
    if any(run.removable for run in setting.runs):
        return _NOISE[True]
    return _NOISE[False] if all(run.noise == "entropy" for run in setting.runs) else ""


def _measured(setting: Setting) -> str:
    if setting.score is None:
        return "no score was measured"
    interval = setting.interval
    known = "" if interval is None else f" (95 % interval: {setting.measure.limits(interval)})"
    where = f"the server's test set ({setting.first.dataset})" if setting.first.deployed else "the test set"
    return f"{result(setting)} on {where}{known}"


def _secure(run: Run) -> bool:
    return "secure" in run.method.split("+")


def _coalition(run: Run) -> str:
    """The numbers of the configuration that the guarantee of a secure sum depends on."""
    section = run.config.get("aggregation")
    if not _secure(run) or not isinstance(section, Mapping):
        return ""
    threshold, colluders = section.get("threshold"), section.get("colluders")
    limits = f"; nothing if fewer than {threshold} answer" if threshold is not None else ""
    return limits + (f"; at most {colluders} may collude with it" if colluders is not None else "")


def _whose(run: Run, *, public: bool) -> str:
    """The data and its clients, by name if they have names."""
    count = run.plan.get("clients", "?")
    if run.deployed:
        holder = f"the own data of {count} nodes"
    else:
        holder = f"{run.dataset or 'data that the caller gave'}, held by {count} clients"
    if run.clients and not public:
        shown = ", ".join(run.clients[:8])
        holder += f" ({shown}{', ...' if len(run.clients) > 8 else ''})"
    return holder


def _proven(setting: Setting) -> str:
    proofs = sorted(setting.proofs(), key=lambda row: [*ADVERSARIES, row.adversary].index(row.adversary))
    seeded = any(run.removable for run in setting.runs)
    rows = [_row(proof, seeded=seeded) for proof in proofs if proof.epsilon is not None]
    rows += _unproven([proof for proof in proofs if proof.epsilon is None])
    if not rows:
        return "<p>Nothing is stated about privacy.</p>"
    guarantees = table(
        "What is proven",
        ["against", "protects", "ε", "δ", "grade", "in words"],
        rows,
        sortable=False,
        numeric_from=9,
        labels=("ε", "δ"),
    )
    scale = "; ".join(_step(place) for place in range(len(SCALE)))
    note = (
        f"Grades by epsilon: {escape(scale)}. δ: as if everything were revealed with this "
        "probability, and the odds held otherwise. "
        '<a href="#odds">Formula of the odds</a>; assumptions: <a href="#privacy">privacy statement</a>.'
    )
    return f'<div class="wordy">{guarantees}</div><p class="note">{note}</p>'


def odds(settings: Sequence[Setting], *, public: bool) -> str:
    """The derivation of the percentages from epsilon and delta; empty if there is no first page."""
    if not first_page(settings, public=public):
        return ""
    limits = [f"{rounded_up(guess_accuracy(step.limit, 0))} at epsilon {step.limit:g}" for step in SCALE[:-1]]
    explained = [*_ODDS, f"At the limits of the grades (with delta 0) these are {', '.join(limits)}."]
    return section("odds", "How the odds are computed", *(f"<p>{escape(text)}</p>" for text in explained))


def _step(place: int) -> str:
    step = SCALE[place]
    if place == len(SCALE) - 1:
        return f"above {SCALE[place - 1].limit:g} {step.word}"
    return f"up to {step.limit:g} {step.word}"


def _unproven(proofs: Sequence[Proof]) -> list[list[Cell]]:
    """A row for each adversary and reason, for all units together."""
    units: dict[tuple[str, str], list[str]] = {}
    for proof in proofs:
        units.setdefault((proof.adversary, proof.reason), []).append(WHOM.get(proof.unit, proof.unit))
    return [
        [
            escape(SEES.get(adversary, adversary)),
            escape("; ".join(whom)),
            ("none", float("inf")),
            "",
            "nothing proven",
            escape(f"Nothing is proven: {reason}."),
        ]
        for (adversary, reason), whom in units.items()
    ]


def _row(proof: Proof, *, seeded: bool) -> list[Cell]:
    whom = escape(WHOM.get(proof.unit, proof.unit))
    who = escape(SEES.get(proof.adversary, proof.adversary))
    assert proof.epsilon is not None
    delta = proof.delta or 0.0
    words = odds_in_words(proof.adversary, proof.unit, proof.adjacency, proof.epsilon, delta)
    if seeded:
        words = f"Only if the seed stays secret: {words[0].lower()}{words[1:]}"
    given = grade(proof.epsilon, delta, proof.units)
    return [
        who,
        whom,
        (show(proof.epsilon), proof.epsilon),
        small(delta),
        f'<span class="grade {given.level}">{escape(given.word)}</span>',
        escape(words),
    ]


def _not_covered(setting: Setting) -> list[str]:
    run = setting.first
    units = {row.unit for row in setting.proofs() if row.epsilon is not None}
    items = []
    if units == {"record"}:
        items.append("A person with several records: the statement is about one record.")
        items += _whole_persons(run.persons)
    prepared = "" if run.prepared else ", and how data is prepared"
    items += [
        *run.prepared,
        "Conclusions about people who did not take part, drawn from what the model learnt about everybody.",
        f"The number of clients and records, the plan, shape and initial weights of the model{prepared}: public.",
        "Other files of the run, and other runs on the same data: their epsilons add up.",
    ]
    if setting.score is not None:
        items.append("The examples of the test set: scores are measured on them without noise.")
    if setting.audited():
        items.append("Audits: a low bound does not prove privacy.")
    else:
        items.append("No audit has tested this run.")
    return items


def _whole_persons(persons: Sequence[Person]) -> list[str]:
    """What follows for a person with all the rows that one may have, in one sentence."""
    against: dict[str, list[str]] = {}
    for person in persons:
        bound = f"epsilon {show(person.epsilon)} at delta {small(person.delta)}"
        against.setdefault(bound, []).append(WHO.get(person.adversary, person.adversary))
    said = "; ".join(f"{bound} against {', '.join(who)}" for bound, who in against.items())
    return [f"For a person with all the rows that one may have (group privacy): {said}."] if said else []


def _duties(setting: Setting) -> list[str]:
    duties, secure = [_publishing(setting)], _secure(setting.first)
    proven = any(row.epsilon is not None for row in setting.proofs())
    if not proven:
        sees = "the sum of the updates" if secure else "every client's update"
        duties.append(
            f"Trust the server with the clients' data: it sees {sees}, and nothing bounds what that tells."
        )
    elif needs_trust(setting.proofs()):
        duties.append(
            "Trust the server, or make it trustworthy: the rows for others hold only if it does not share what it sees."
        )
    else:
        duties.append("No row depends on a trusted server.")
    if secure:
        duties.append(
            "Secure aggregation: have the clients compare their public keys by another channel, and make sure that no "
            "more of them collude with the server than the privacy statement assumes."
        )
    if proven:
        duties.append("Keep the ledger: every further run on the same data must be charged to it.")
        if setting.first.deployed:
            drawn = setting.first.plan.get("sampler") != "all"
            duties.append(
                "Ask the nodes' operators: each node charged this run to its own ledger, against its own limits "
                "(fedveil deploy status NODE)."
                + " That is more than this page says, since cohorts were drawn."
                * drawn
            )
        duties += [
            "Trust the clients to follow the protocol: one that adds no noise weakens noise that clients share.",
        ]
    return duties


def _publishing(setting: Setting) -> str:
    """What may leave the operator's hands: the model only where something is proven of it."""
    private = "Keep seeds and result folders private"
    if any(run.removable for run in setting.runs):
        return (
            "Do not publish this model: its noise comes from a seed, and whoever knows it can remove it. "
            f"{private}."
        )
    row = setting.proof("observer")
    if row is None:
        return f"Do not publish this model: nothing is proven against those who see it. {private}."
    if level(row) == "bad":
        return (
            "Do not publish this model on the strength of this page: what is proven against those who see it is no "
            f"protection. {private}."
        )
    return f"{private}; publish no more than the model, statement.json and a --public report."


def _identity(setting: Setting, *, public: bool) -> str:
    items = ""
    for run in setting.runs:
        stated = run.statement
        if not stated:
            continue
        files, ledger = stated.get("files"), stated.get("ledger")
        head = ledger.get("head") if isinstance(ledger, dict) else None
        config = files.get("config.toml") if isinstance(files, dict) else None
        data = "none: the nodes keep their data" if run.deployed else stated.get("data_commitment")
        facts = [("run", stated.get("run")), ("configuration, sha256", None if public else config)]
        facts += [("data, commitment", data), ("ledger head", head)]
        items += "".join(f"<dt>{n}</dt><dd><code>{escape(str(v))}</code></dd>" for n, v in facts if v)
    if not items:
        return '<p class="note">statement.json is missing: this run cannot be verified.</p>'
    check = (
        "<p>Check it with <code>fedveil verify RESULT</code>: it recomputes ε from the ledger. It cannot detect "
        "that all files were replaced together: keep the ledger head above elsewhere.</p>"
    )
    return f'<h3>Identity</h3><dl class="facts hashes">{items}</dl>{check}'


def _signature() -> str:
    lines = "".join(f"<div><span></span>{name}</div>" for name in ("name", "date", "signature"))
    return f'<div class="signature">{lines}</div>'


def _references() -> str:
    items = "".join(f"<li>{escape(title)} ({where})</li>" for title, where in _REFERENCES)
    return f'<h3>References for the officer</h3><ul class="plain">{items}</ul>'


def _list(title: str, items: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<div><h3>{title}</h3><ul class="plain">{listed}</ul></div>'
