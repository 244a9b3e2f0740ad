"""What the numbers amount to, in sentences that claim no more than was proven."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedveil.privacy.meaning import Level, grade
from fedveil.privacy.statement import show
from fedveil.report.files import number
from fedveil.report.groups import WHO, WHOM, Setting, Spread, rank, scored
from fedveil.report.measures import ACCURACY
from fedveil.report.run import Paper, Proof

_AGAINST = WHO | {"observer": "those who see only what is published"}


@dataclass(frozen=True)
class Verdict:
    level: Level
    text: str
    about: Setting | None = None
    """The setting that a headline recommends, or names as the best there is."""


def percent(spread: Spread) -> str:
    """Accuracy with its deviation over seeds: "84.96 ± 0.40 %"."""
    return ACCURACY.formatted(spread.mean, spread.deviation)


def result(setting: Setting) -> str:
    """The score with its name and its deviation over seeds: "84.96 ± 0.40 % accuracy"."""
    spread = setting.score
    return "no result" if spread is None else setting.measure.in_words(spread.mean, spread.deviation)


def small(value: float) -> str:
    """A delta: powers of ten as such, which no line break cuts in two."""
    power = round(math.log10(value)) if value > 0 else 0
    if power <= -3 and math.isclose(value, 10.0**power):
        return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:g}"


def level(row: Proof | None) -> Level:
    """The same scale as the privacy statement's words."""
    return "bad" if row is None else grade(row.epsilon, row.delta, row.units).level


def strength(row: Proof) -> str:
    return grade(row.epsilon, row.delta, row.units).word


def headline(settings: Sequence[Setting]) -> Verdict:
    """The whole report in a few sentences.

    A warning that noise can be removed stands first where it is about the model that is named, else last.
    """
    said = _headline(settings)
    seeded = [setting for setting in settings if any(run.removable for run in setting.runs)]
    if not seeded:
        return said
    whose, plural = ("its", "") if len(seeded) == 1 else ("their", "s")
    warning = (
        f"Do not publish the model{plural} of {_listed(seeded)}: {whose} privacy noise comes from a seed, and whoever "
        "knows the seed can remove it."
    )
    first = said.about in seeded or len(seeded) == len(settings)
    return replace(said, text=f"{warning} {said.text}" if first else f"{said.text} {warning}")


def _headline(settings: Sequence[Setting]) -> Verdict:
    broken = [setting for setting in settings if contradictions(setting)]
    if broken:
        return Verdict(
            "bad", f"An audit contradicts what is proven for {_listed(broken)}: do not rely on it."
        )
    if not any(run.finished for setting in settings for run in setting.runs):
        return Verdict("bad", "No run here is finished: nothing can be said yet.")
    done = scored(settings)
    if not done:
        return _untested([s for s in settings if s.first.finished])
    best = max(done, key=rank)
    protected = [setting for setting in done if _same_for_the_server(setting)]
    if protected and not _useless(pick := max(protected, key=rank)):
        return _protected(pick, best)
    proven = [setting for setting in done if setting.proof("observer") is not None]
    limited = [setting for setting in proven if _level(setting) != "bad"]
    if limited:
        pick = max(limited, key=rank)
        row = _published(pick)
        text = (
            f"{pick.name} reaches {result(pick)} with epsilon {show(_epsilon(pick))} proven "
            f"for {WHOM.get(row.unit, row.unit)} against {_AGAINST['observer']}: {strength(row)}."
        )
        return Verdict(level(row), text + _server(pick, row.unit) + _useless(pick) + _gap(best, pick), pick)
    if proven:
        pick = min(proven, key=_epsilon)
        row = _published(pick)
        text = (
            f"No run here proves protection. The smallest epsilon is {show(_epsilon(pick))}, "
            f"of {pick.name} with {result(pick)}: {strength(row)}."
        )
        return Verdict("bad", text + _useless(pick) + _gap(best, pick), pick)
    other = [s for s in done if s.proof("server") or s.proof("client")]
    if other:
        return Verdict(
            "weak", f"Nothing is proven against {_AGAINST['observer']}; see the privacy statement."
        )
    name = f"{best.name} reaches {result(best)}"
    return Verdict("bad", f"{name}, and proves no privacy at all: nothing hides what clients send.")


def _same_for_the_server(setting: Setting) -> bool:
    """Whether the limit against the server is a meaningful one, for the same unit as that against the public."""
    row, public = setting.proof("server"), setting.proof("observer")
    if row is None or public is None or row.unit != public.unit:
        return False
    return level(row) != "bad"


def _protected(pick: Setting, best: Setting) -> Verdict:
    """A model that is useful and protected against the server, and so against those who see less."""
    row = pick.proof("server")
    assert row is not None
    text = (
        f"{pick.name} reaches {result(pick)} with epsilon {show(row.epsilon or 0)} proven for "
        f"{WHOM.get(row.unit, row.unit)} against {_AGAINST['server']}: {strength(row)}."
    )
    return Verdict(level(row), text + _gap(best, pick), pick)


def _untested(settings: Sequence[Setting]) -> Verdict:
    """Runs without test data are compared by their privacy alone."""
    proven = [setting for setting in settings if setting.proof("observer") is not None]
    if not proven:
        return Verdict("bad", f"No score was measured, and nothing is proven against {_AGAINST['observer']}.")
    pick = min(proven, key=_epsilon)
    row = _published(pick)
    text = (
        f"No score was measured. {pick.name} proves epsilon {show(_epsilon(pick))} for "
        f"{WHOM.get(row.unit, row.unit)} against {_AGAINST['observer']}: {strength(row)}."
    )
    return Verdict(level(row), text + _server(pick, row.unit), pick)


def lines(setting: Setting) -> list[Verdict]:
    """A sentence per setting, and one for each paper, budget and audit that bears on it."""
    out = [Verdict(_level(setting), _line(setting))]
    out += [
        Verdict("weak", f"Seed {run.seed} stopped after round {run.rounds}: {run.stopped}.")
        for run in setting.runs
        if run.stopped
    ]
    if (paper := against_paper(setting)) is not None:
        out.append(paper)
    out.extend(Verdict("bad", text) for text in contradictions(setting))
    return out


def _line(setting: Setting) -> str:
    spread = setting.score
    if not setting.first.finished:
        return "Not finished: no score yet."
    text = "No score was measured. "
    if spread is not None:
        seeds = f" over {spread.count} seeds" if spread.count > 1 else ""
        score = result(setting)
        text = f"{score[0].upper()}{score[1:]}{seeds}. "
    rows = [row for row in (setting.proof(adversary) for adversary in ("observer", "server")) if row]
    if not rows:
        return text + "Nothing is proven against anybody."
    unit = rows[0].unit
    said = ", ".join(
        f"epsilon {show(row.epsilon or 0)}{_other_unit(row.unit, unit)} against {_AGAINST[row.adversary]} "
        f"({strength(row)})"
        for row in rows
    )
    whom = WHOM.get(unit, unit)
    delta = "" if rows[0].delta is None else f" at delta {small(rows[0].delta)}"
    missing = [_AGAINST[a] for a in ("observer", "server") if setting.proof(a) is None]
    nothing = f"; nothing against {' or '.join(missing)}" if missing else ""
    return text + f"Proven for {whom}{delta}: {said}{nothing}."


def against_paper(setting: Setting) -> Verdict | None:
    """The mean beside the published number; None where the configuration names none."""
    paper = setting.first.paper
    spread = None if paper is None else setting.measured(paper.metric)
    if paper is None or paper.expected is None or spread is None:
        return None
    reduced = _scale(paper.scale)
    where = f"The paper ({paper.source}{', ' + paper.where if paper.where else ''}) states"
    if paper.metric not in ("accuracy", "personal"):
        return _other_metric(f"{where} {paper.metric} {paper.expected:g}", spread, paper, reduced)
    measured = 100 * spread.mean
    expected = paper.expected if paper.expected > 1 else 100 * paper.expected
    said = f"{where} {expected:.2f} %"
    if paper.metric == "personal":
        said += f"; the clients' own models reach {percent(spread)}"
    gap = measured - expected
    if paper.tolerance is None:
        return Verdict("fair", f"{said}; this is {gap:+.2f} points from it.{reduced}")
    tolerance = paper.tolerance if paper.expected > 1 else 100 * paper.tolerance
    if abs(gap) <= tolerance:
        return Verdict("good", f"{said}: met within {tolerance:g} points ({gap:+.2f}).{reduced}")
    return Verdict("weak", f"{said}: missed by {gap:+.2f} points, {tolerance:g} were allowed.{reduced}")


def _scale(scale: str) -> str:
    if scale == "full":
        return ""
    return f" Its scale: {scale}." if scale.startswith("full") else f" The run is reduced: {scale}."


def _other_metric(said: str, spread: Spread, paper: Paper, reduced: str) -> Verdict:
    """Correlations and perplexities are compared as they are, not in points of a per cent."""
    found = f"{said}; this is {spread.mean:.4g}"
    if paper.tolerance is None or paper.expected is None:
        return Verdict("fair", f"{found}.{reduced}")
    met = abs(spread.mean - paper.expected) <= paper.tolerance
    return Verdict("good" if met else "weak", f"{found}, {paper.tolerance:g} were allowed.{reduced}")


def contradictions(setting: Setting) -> list[str]:
    """Audits that refute: a lower bound above every epsilon proven, or a mechanism that is not the declared one."""
    proven = [row.epsilon for row in setting.proofs() if row.epsilon is not None]
    found = []
    for audit in setting.audited():
        bound = number(audit.get("lower_bound"))
        # The audit has compared with what is proven for its own scope.
        if isinstance(audit.get("broken"), bool):
            if audit["broken"]:
                against = WHO.get(str(audit.get("adversary")), "somebody")
                found.append(f"BROKEN: an audit refutes what is proven against {against}.")
            continue
        if bound is not None and proven and bound > max(proven):
            found.append(
                f"BROKEN: an audit shows epsilon of at least {show(bound)}, {show(max(proven))} was proven."
            )
        p_value, confidence = (number(audit.get(key)) for key in ("p_value", "confidence"))
        if p_value is not None and confidence is not None and p_value < 1 - confidence:
            found.append(f"BROKEN: an audit shows that noise is not as declared (p = {p_value:.1g}).")
    return found


def _server(setting: Setting, unit: str) -> str:
    """A limit against the public says nothing about who runs the federation."""
    row = setting.proof("server")
    if row is None:
        return " Against the server nothing is proven."
    other = _other_unit(row.unit, unit)
    return f" Against the server: epsilon {show(row.epsilon or 0)}{other}, {strength(row)}."


def _other_unit(unit: str, than: str) -> str:
    return "" if unit == than else f" for {WHOM.get(unit, unit)}"


def _useless(setting: Setting) -> str:
    """Privacy is easy for a model that knows nothing, so say so: it must beat a guess for sure."""
    guess, interval, measure = setting.guess, setting.interval, setting.measure
    if guess is None or interval is None or interval[0] > guess[0]:
        return ""
    value, how = guess
    shown = f"{100 * value:.1f} %" if measure.percent else f"{value:g}"
    return (
        f" But its {measure.name} is no better than {how} ({shown}; 95 % interval of the {measure.name}: "
        f"{measure.limits(interval)})."
    )


def _gap(best: Setting, pick: Setting) -> str:
    if best is pick or best.score is None or pick.score is None:
        return ""
    proof = best.proof("observer")
    without = "without any proof" if proof is None else f"with epsilon {show(_epsilon(best))}"
    return f" {best.name} reaches {result(best)} {without}."


def _published(setting: Setting) -> Proof:
    """What is proven against those who see only what is published, of a setting that has it."""
    row = setting.proof("observer")
    assert row is not None
    return row


def _level(setting: Setting) -> Level:
    return level(setting.proof("observer"))


def _epsilon(setting: Setting) -> float:
    row = setting.proof("observer")
    return float("inf") if row is None or row.epsilon is None else row.epsilon


def _listed(settings: Sequence[Setting]) -> str:
    return " and ".join(setting.name for setting in settings)
