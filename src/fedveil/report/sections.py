"""The parts of the page. Each returns HTML, or nothing where the runs have nothing to show for it.

Text from result folders enters the page through `escape` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from typing import TypeVar

from fedveil.privacy.statement import show
from fedveil.report import charts
from fedveil.report.charts import Curve, Dot
from fedveil.report.files import number
from fedveil.report.groups import WHO, WHOM, Setting, Spread, best_of, scored, shared_measure
from fedveil.report.markup import NOTHING, Cell, legend, named, section, table
from fedveil.report.measures import Measure
from fedveil.report.partition_chart import MOST_BUBBLES, partition_chart
from fedveil.report.run import Proof, Run
from fedveil.report.verdict import headline, lines, result
from fedveil.session.tables import size

Shown = TypeVar("Shown")
_MOST_CLIENTS = 200  # rows of the per-client table and columns of the partition picture
_MOST_ROUNDS = 12  # rows of the table below the curves
_MOST_BARS = 5  # settings side by side in a table: more are cut off on paper


def verdict(settings: Sequence[Setting]) -> str:
    said = headline(settings)
    items = []
    for setting in settings:
        shown = lines(setting)
        if len(settings) == 1 and setting.first.finished:
            shown = shown[1:]  # the first is what the headline and the statement below say
        inner = "".join(f'<p class="{line.level}">{escape(line.text)}</p>' for line in shown)
        if inner:
            items.append(f"<li><h3>{named(setting)}</h3>{inner}</li>")
    listed = f'<ul class="verdicts">{"".join(items)}</ul>' if items else ""
    return f'<p class="verdict {said.level}">{escape(said.text)}</p>{listed}'


def problems(runs: Sequence[Run], missing: Sequence[str]) -> str:
    """Missing and damaged parts; empty if there are none."""
    items = [escape(text) for text in missing]
    for run in runs:
        items += [
            f"<strong>{escape(run.name)}</strong>: {escape(text)}" for text in (*run.problems, *run.notes)
        ]
    return _box("problems", "What is missing", items, "The rest of this page shows what could be read.")


def notes(texts: Sequence[str]) -> str:
    """Remarks on the comparison of the runs; empty if there are none."""
    return _box("notes", "Before you compare", [escape(text) for text in texts])


def _box(kind: str, title: str, items: Sequence[str], lead: str = "") -> str:
    if not items:
        return ""
    said = f"<p>{lead}</p>" if lead else ""
    listed = "".join(f"<li>{item}</li>" for item in items)
    return (
        f'<aside class="box {kind}" aria-labelledby="{kind}-title"><h2 id="{kind}-title">{title}</h2>'
        f"{said}<ul>{listed}</ul></aside>"
    )


def results(settings: Sequence[Setting]) -> str:
    with_paper = any(s.first.paper is not None and s.first.paper.expected is not None for s in settings)
    with_audit = any(s.audited() for s in settings)
    with_cost = any(run.seconds is not None or run.bytes_up is not None for s in settings for run in s.runs)
    measure = shared_measure(settings)
    heads = ["method", "ε published", "ε server", measure.name, "seeds"]
    heads += ["audit, one participation"] * with_audit
    heads += ["sent up", "sent down", "seconds"] * with_cost + ["paper"] * with_paper
    best = best_of(settings)
    rows = []
    for s in settings:
        row: list[Cell] = [named(s), *(_epsilon(s, adversary) for adversary in ("observer", "server"))]
        row += [_score(s, s is best), (str(len(s.runs)), float(len(s.runs)))]
        if with_audit:
            row.append(_strongest_audit(s))
        if with_cost:
            row += [_mean([r.bytes_up for r in s.runs], size), _mean([r.bytes_down for r in s.runs], size)]
            row.append(_mean([r.seconds for r in s.runs], "{:.1f}".format))
        if with_paper:
            paper = s.first.paper
            published = None if paper is None else paper.published
            row.append(
                (NOTHING, None) if paper is None or published is None else (escape(published), paper.expected)
            )
        rows.append(row)
    note = (
        f"{measure.title} on the test set: mean and sample deviation over seeds; bold if "
        "its 95 % interval overlaps with no other. ε: proven over all rounds, for the unit named; traffic and "
        "seconds: mean of a run."
    )
    if with_audit:
        note += " Audit: the most that was shown, beside what is proven for the same: one participation."
    return section("results", "Results", table("Results by method", heads, rows), lead=note)


def _strongest_audit(setting: Setting) -> Cell:
    """The largest bound beside the epsilon that is proven for the same disclosure."""
    found = [
        (bound, audit)
        for audit in setting.audited()
        if (bound := number(audit.get("lower_bound"))) is not None
    ]
    if not found:
        return NOTHING, None
    bound, audit = max(found, key=lambda item: item[0])
    proven = number(audit.get("proven"))
    beside = "" if proven is None else f" <small>of {show(proven)} proven</small>"
    return f"≥ {show(bound)}{beside}", bound


def _score(setting: Setting, best: bool) -> Cell:
    """Bold where it is the best of several for sure."""
    spread = setting.score
    if spread is None:
        return "no result", None
    score = setting.measure.formatted(spread.mean, spread.deviation)
    return f"<strong>{score}</strong>" if best else score, spread.mean


def _epsilon(setting: Setting, adversary: str) -> Cell:
    proof = setting.proof(adversary)
    if not setting.first.finished:  # what it will prove is not known yet
        return NOTHING, None
    if proof is None or proof.epsilon is None:
        return "none", float("inf")
    return f"{show(proof.epsilon)} <small>{escape(proof.unit)}</small>", proof.epsilon


def _mean(values: Sequence[float | None], written: Callable[[float], str]) -> Cell:
    spread = Spread.of(values)
    return (NOTHING, None) if spread is None else (written(spread.mean), spread.mean)


def learning(settings: Sequence[Setting]) -> str:
    measure = shared_measure(settings)
    curves = [Curve(s.name, s.look, *s.curve("round", measure.key)) for s in settings]
    drawn = [curve for curve in curves if curve.x]
    if not drawn:
        return ""
    ends = ". ".join(f"{curve.name} ends at {measure.formatted(curve.y[-1])}" for curve in drawn)
    title = f"{measure.title} over rounds"
    chart = charts.line_chart(
        drawn,
        label=f"{title}. {ends}.",
        x_label="round",
        y_label=measure.axis,
        percent=measure.percent,
        whole=True,
        span=measure.span,
    )
    bands = any(list(curve.low) != list(curve.high) for curve in drawn)
    lead = (
        "Mean over seeds; the band reaches from the worst seed to the best."
        if bands
        else "One seed per line."
    )
    return section("learning", title, legend(settings), chart, _values(drawn, measure), lead=lead)


def _values(curves: Sequence[Curve], measure: Measure) -> str:
    longest = max(curves, key=lambda curve: len(curve.x))
    step = max(1, -(-len(longest.x) // _MOST_ROUNDS))
    shown = sorted({*list(longest.x)[::step], longest.x[-1]})
    name = f"{measure.title}{' in percent' if measure.percent else ''}"
    body = ""
    for some in _side_by_side(curves):
        rows = []
        for at in shown:
            cells: list[Cell] = [f"{at:g}"]
            for curve in some:
                known = dict(zip(curve.x, curve.y, strict=True)).get(at)
                cells.append(NOTHING if known is None else measure.formatted(known).removesuffix(" %"))
            rows.append(cells)
        body += table(name, ["round", *(curve.name for curve in some)], rows, sortable=False)
    return f"<details><summary>The values as a table</summary>{body}</details>"


def tradeoff(settings: Sequence[Setting]) -> str:
    done, measure = scored(settings), shared_measure(settings)
    if not done:
        return ""
    planes = [_plane(done, adversary) for adversary in ("observer", "server")] if len(done) > 1 else []
    pair = f'<div class="pair">{"".join(planes)}</div>' if any(planes) else ""
    traffic = _traffic(settings)
    if not pair and not traffic:
        return ""
    good = "Up" if measure.higher else "Down"
    lead = (
        f"{good} is better; left is more private, or cheaper."
        if pair
        else f"{good} is better; left is cheaper."
    )
    if pair and any(s.score is not None and s.score.deviation is not None for s in done):
        lead += " Bars are one sample deviation over seeds."
    if len(_units(done, "observer") | _units(done, "server")) > 1:
        lead += (
            " Where a name ends in (record), epsilon is for single records, else for whole clients: "
            "the two cannot be compared."
        )
    against = " and ".join(what for what, part in (("privacy", pair), ("traffic", traffic)) if part)
    return section(
        "trade-off", f"{measure.title} against {against}", legend(settings), pair, traffic, lead=lead
    )


def _units(settings: Sequence[Setting], adversary: str) -> set[str]:
    return {proof.unit for s in settings if (proof := s.proof(adversary)) is not None}


def _plane(done: Sequence[Setting], adversary: str) -> str:
    """Scores against what is proven; nothing where nothing is proven for any of the settings."""
    units = _units(done, adversary)
    dots = [_dot(s, s.proof(adversary), mixed=len(units) > 1) for s in done]
    if all(dot.x is None for dot in dots):
        return ""
    same = [
        [i for i, s in enumerate(done) if s.method == method]
        for method in dict.fromkeys(s.method for s in done)
    ]
    whom = f" for {WHOM.get(next(iter(units)), '')}" if len(units) == 1 else ""
    measure = shared_measure(done)
    chart = charts.plane_chart(
        dots,
        label=f"{measure.title} against proven epsilon ({WHO[adversary]}). "
        + ". ".join(dot.note for dot in dots),
        x_label=f"ε proven against {WHO[adversary]} (logarithmic)",
        y_label=measure.axis,
        joined=same,
        percent=measure.percent,
        span=measure.span,
    )
    title = f"{measure.title} and what is proven{whom} against {WHO[adversary]}"
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def _dot(setting: Setting, proof: Proof | None, *, mixed: bool) -> Dot:
    """A finished setting; where units are `mixed`, its name says when epsilon is that of a record."""
    spread = setting.score
    assert spread is not None
    epsilon, said, unit = None, "nothing proven", ""
    if proof is not None and proof.epsilon is not None:
        epsilon = proof.epsilon
        said = f"epsilon {show(epsilon)} for {WHOM.get(proof.unit, proof.unit)}"
        unit = " (record)" if mixed and proof.unit == "record" else ""
    note = f"{setting.name}: {result(setting)}, {said}"
    return Dot(setting.name + unit, setting.look, epsilon, spread.mean, spread.deviation, note)


def _traffic(settings: Sequence[Setting]) -> str:
    measure = shared_measure(settings)
    curves = [Curve(s.name, s.look, *s.curve("bytes", measure.key)) for s in settings]
    known = [curve for curve in curves if curve.x and curve.x[-1] > 0]
    if not known:
        return ""
    factor, unit = (1e3, "kB") if max(curve.x[-1] for curve in known) < 1e6 else (1e6, "MB")
    sent = [replace(curve, x=[x / factor for x in curve.x]) for curve in known]
    chart = charts.line_chart(
        sent,
        label=f"{measure.title} against {unit} sent. "
        + ". ".join(f"{c.name}: {c.x[-1]:.2f} {unit}" for c in sent),
        x_label=f"{unit} sent, up and down, all clients",
        y_label=measure.axis,
        percent=measure.percent,
        span=measure.span,
    )
    return f"<figure><figcaption>{measure.title} and traffic</figcaption>{chart}</figure>"


def per_class(settings: Sequence[Setting]) -> str:
    known = [s for s in settings if s.first.per_class]
    if not known:
        return ""
    count = max(len(s.first.per_class) for s in known)
    names = max((s.first.classes for s in known), key=len)
    tables = []
    for some in _side_by_side(known):
        rows = []
        for label in range(count):
            cells: list[Cell] = [escape(names[label]) if label < len(names) else str(label)]
            for s in some:
                values = [run.per_class[label] for run in s.runs if label < len(run.per_class)]
                cells.append(_bar(Spread.of(values)))
            rows.append(cells)
        heads = ["class", *(s.name for s in some)]
        tables.append(table("Test accuracy per class, in percent", heads, rows))
    return section("classes", "Per class", *tables)


def per_client(settings: Sequence[Setting]) -> str:
    known = [s for s in settings if s.first.per_client]
    if not known:
        return ""
    count = max(len(s.first.per_client) for s in known)
    sizes = [sum(row) for row in known[0].first.partition]
    on = known[0].first.per_client_on or "their examples"
    caption = f"Accuracy of the shared model on each client's {on}, in percent"
    tables = []
    for some in _side_by_side(known):
        rows = []
        for client in range(min(count, _MOST_CLIENTS)):
            held = sizes[client] if client < len(sizes) else None
            cells: list[Cell] = [
                (escape(_client_name(known[0].first, client)), float(client)),
                (NOTHING if held is None else str(held), held),
            ]
            for s in some:
                values = [run.per_client[client] for run in s.runs if client < len(run.per_client)]
                cells.append(_bar(Spread.of(values)))
            rows.append(cells)
        tables.append(table(caption, ["client", "examples", *(s.name for s in some)], rows))
    extremes = []
    for s in known:
        scores = [score for score in s.first.per_client if score is not None]
        if scores:
            extremes.append(f"{s.name}: {100 * min(scores):.1f} to {100 * max(scores):.1f} %")
    cut = f" The first {_MOST_CLIENTS} of {count} clients." if count > _MOST_CLIENTS else ""
    lead = f"From the worst-served client to the best. {'; '.join(extremes)}.{cut}"
    body = f"<details><summary>All clients</summary>{''.join(tables)}</details>"
    return section("clients", "Per client", body, lead=lead)


def _client_name(run: Run, client: int) -> str:
    """The name of a client in the data, or its number."""
    return run.clients[client] if client < len(run.clients) else str(client)


def _side_by_side(items: Sequence[Shown]) -> list[Sequence[Shown]]:
    """The settings of each table: as few tables as hold them, of about the same width."""
    tables = -(-len(items) // _MOST_BARS)
    width = -(-len(items) // max(1, tables))
    return [items[start : start + width] for start in range(0, len(items), max(1, width))]


def _bar(spread: Spread | None) -> tuple[str, float | None]:
    if spread is None:
        return NOTHING, None
    deviation = "" if spread.deviation is None else f" <small>± {100 * spread.deviation:.1f}</small>"
    share = min(1.0, max(0.0, spread.mean))
    return (
        f'<span class="bar" style="--share:{share:.3f}">{100 * spread.mean:.1f}{deviation}</span>',
        spread.mean,
    )


def partition(settings: Sequence[Setting]) -> str:
    known = next((s.first for s in settings if s.first.partition and s.first.partition[0]), None)
    if known is None:
        return ""
    counts = known.partition[:_MOST_CLIENTS]
    sizes = [sum(row) for row in known.partition]
    cut = f" The first {_MOST_CLIENTS} are shown." if len(known.partition) > _MOST_CLIENTS else ""
    said = (
        f"{len(sizes)} clients share {sum(sizes):,} examples of {len(counts[0])} classes; "
        f"the smallest has {min(sizes)}, the largest {max(sizes)} (seed {known.seed}).{cut}"
    )
    chart = partition_chart(counts, known.classes, known.clients, label=f"Who holds what. {said}")
    how = "dots: their area" if len(counts) <= MOST_BUBBLES else "shades: their depth"
    note = f"Bars are the examples of a client. Below are those of each class as {how} is the count."
    return section("partition", "Who holds what", chart, f'<p class="note">{note}</p>', lead=said)
