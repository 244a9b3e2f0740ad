"""The sections of the page on attacks, on figures of methods, and on reproduction."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby, pairwise

from fedveil.report import charts
from fedveil.report.attack_files import Attack, TextPair
from fedveil.report.charts import Curve
from fedveil.report.groups import Setting
from fedveil.report.markup import named, picture, section
from fedveil.report.run import Run
from fedveil.report.svg import swatch

_WIDE_PICTURE = 400  # pixels; a whole figure, not one image
_SCORE = re.compile(
    r"(mean image )?(psnr|ssim|mse|lpips|kl|auc|accuracy|advantage|labels right|tpr|true positive|rouge[12L]|"
    r"tokens leaked|leaked tokens right)\b"
    r"(?! note)(?!.*per image)"
)


def attacks(settings: Sequence[Setting]) -> str:
    found = [(attack, s, run) for s in settings for run in s.runs for attack in run.attacks]
    found.sort(key=lambda item: _kind(item[0]))  # one attack on every setting, side by side
    cards = ""
    for name, members in groupby(found, key=lambda item: _kind(item[0])):
        shown = "".join(_attack(s, run, attack) for attack, s, run in members)
        cards += f'<h3>{escape(name)}</h3><div class="cards">{shown}</div>'
    curves: dict[str, list[Curve]] = {}  # a chart for each attack, so that a look names one setting
    for attack, s, run in found:
        if attack.roc is not None:
            curve = Curve(f"{s.name}, seed {run.seed}", s.look, attack.roc[0], *[attack.roc[1]] * 3)
            curves.setdefault(_in_words(attack.name), []).append(curve)
    roc = "".join(_roc(name, drawn) for name, drawn in curves.items())
    if roc:
        roc = (
            "<h3>Membership</h3>"
            '<p class="note">Can one tell who was in the data? The diagonal is guessing.</p>'
            f'<div class="pair">{roc}</div>'
        )
    lead = "What attacks on these runs achieved. A failed attack proves nothing; one that succeeds shows what leaks."
    return section("attacks", "Attacks", cards, roc, lead=lead)


def _roc(name: str, curves: Sequence[Curve]) -> str:
    areas = ". ".join(f"{c.name}: area {_area(c.x, c.y):.3f}" for c in curves)
    chart = charts.line_chart(
        curves,
        label=f"{name}: true against false positive rate. {areas}.",
        x_label="false positive rate",
        y_label="true positive rate",
        percent=False,
        rates=True,
    )
    items = "".join(
        f"<li>{swatch(c.look)}<span>{escape(c.name)} <small>area {_area(c.x, c.y):.3f}</small></span></li>"
        for c in curves
    )
    caption = f"<figcaption>{escape(name)}</figcaption>"
    return f'<figure>{caption}<ul class="legend">{items}</ul>{chart}</figure>'


def _attack(setting: Setting, run: Run, attack: Attack) -> str:
    labels_known = ("labels", "known") in attack.facts  # then that they are right is no success
    scores = [
        fact
        for fact in attack.facts
        if _SCORE.match(fact[0]) and fact[1] != "none" and not (labels_known and fact[0] == "labels right")
    ]
    scores = scores or list(attack.facts)
    rest = [fact for fact in attack.facts if fact not in scores]
    ordered = sorted(
        attack.pictures, key=lambda p: not any(w in p.name for w in ("original", "truth", "target"))
    )
    wide = any(item.width > _WIDE_PICTURE for item in ordered)
    shown = "".join(
        picture(
            item,
            f"{item.name}: {attack.name} on {setting.name}",
            kind="plate" if item.width > _WIDE_PICTURE else "tile",
        )
        for item in ordered
    )
    shown = f"<div class=tiles>{shown}</div>" if shown else _texts(attack.texts)
    target = _in_words(attack.name).partition(", ")[2] or _in_words(attack.target)
    where = f", {_by_name(target, run)}" if target else ""
    said = "" if attack.verdict is None else f"<p>{escape(attack.verdict.text)}</p>"
    more = f"<details><summary>All facts</summary>{_facts(rest)}</details>" if rest else ""
    return (
        f'<article class="card{" broad" if wide or attack.texts else ""}"><h4>{named(setting)}</h4>'
        f'<p class="note">seed {run.seed}{escape(where)}</p>'
        f"{shown}<div>{said}{_facts([(_spelt(name), value) for name, value in scores])}{more}</div>"
        "</article>"
    )


def _spelt(name: str) -> str:
    """`psnr (against x)` as `PSNR`."""
    plain = name.removesuffix(" (against x)").replace("(weaker attacker)", "(defence ignored)")
    plain = re.sub(r"^mean image (\w+)", r"\1 of the mean image", plain)
    plain = re.sub(r"^rouge([12L])", r"ROUGE-\1", plain)
    return re.sub(r"^(psnr|ssim|mse|lpips|kl|auc|tpr)", lambda word: word[0].upper(), plain)


def _texts(pairs: Sequence[TextPair]) -> str:
    """Each text above its reconstruction, with common words marked."""
    items = ""
    for pair in pairs:
        scores = ", ".join(
            f"ROUGE-{kind} {100 * score:.0f}" for kind, score in zip("12L", pair.rouge, strict=False)
        )
        items += (
            f"<dt>original</dt><dd>{escape(pair.original)}</dd>"
            f"<dt>reconstruction</dt><dd>{_marked(pair)}<small>{scores}</small></dd>"
        )
    return f'<dl class="texts">{items}</dl>' if items else ""


def _marked(pair: TextPair) -> str:
    """The reconstruction, with every word marked that the original holds as often."""
    left = Counter(re.findall(r"\w+", pair.original.lower()))
    out = []
    for part in re.split(r"(\w+)", pair.found):
        word = part.lower()
        if left[word] > 0:
            left[word] -= 1
            out.append(f"<mark>{escape(part)}</mark>")
        else:
            out.append(escape(part))
    return "".join(out)


def _in_words(name: str) -> str:
    """`dlg-round-1-client-46-50890df4` as `dlg, round 1, client 46`: no hash of the attack's settings."""
    plain = re.sub(r"-[0-9a-f]{8}$", "", name)
    plain = re.sub(
        r"-exchange-(\d+)", lambda found: f"-batch-{int(found[1]) + 1}" if int(found[1]) else "", plain
    )
    return re.sub(r"(^|-)(round|batch|client)-(\d+)", r", \2 \3", plain).removeprefix(", ")


def _kind(attack: Attack) -> str:
    """The name of the attack alone, without what it was aimed at."""
    return _in_words(attack.name).partition(", ")[0]


def _by_name(text: str, run: Run) -> str:
    """Clients by the names that the data has for them."""

    def name(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"client {run.clients[number]}" if number < len(run.clients) else found[0]

    return re.sub(r"client (\d+)", name, text)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<dl>{items}</dl>" if items else ""


def _area(x: Sequence[float], y: Sequence[float]) -> float:
    pairs = list(zip(x, y, strict=True))
    return sum((b - a) * (c + d) / 2 for (a, c), (b, d) in pairwise(pairs))


def pictures(settings: Sequence[Setting]) -> str:
    """Synthetic examples, and every figure that a method left: spectra, smoothness and the like."""
    out = []
    for anchor, title, lead in (
        (
            "synthetic",
            "Synthetic examples",
            "Made by the method in place of clients' data, and sent or shown.",
        ),
        ("figures", "Figures of the methods", "What a method did, as it left it in the result folder."),
    ):
        parts = []
        for s in settings:
            for run in s.runs:
                parts += [
                    picture(
                        item,
                        f"{_in_words(item.name)}, {s.name}, seed {run.seed}",
                        kind="plate drawn" if anchor == "figures" else "plate",
                        caption=True,
                    )
                    for item in getattr(run, anchor)
                ]
        body = f'<div class="plates {anchor}">{"".join(parts)}</div>' if parts else ""
        out.append(section(anchor, title, body, lead=lead))
    return "".join(out)


def reproduce(settings: Sequence[Setting]) -> str:
    first = settings[0].first
    if not any(s.first.config_text or s.first.environment for s in settings):
        return ""
    facts = dict(first.environment)
    machine = [f"{facts.pop(key)}" for key in ("system", "machine") if key in facts]
    if "cores" in facts:
        machine.append(f"{facts.pop('cores')} cores")
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    if machine:
        listed += f"<dt>hardware</dt><dd>{escape(', '.join(machine))}</dd>"
    if first.parameters is not None:
        listed += f"<dt>parameters of the model</dt><dd>{first.parameters:,}</dd>"
    different = (
        len({tuple(sorted(run.environment.items())) for s in settings for run in s.runs if run.environment})
        > 1
    )
    note = (
        '<p class="note">The runs were made in different environments; this is the first one&#39;s.</p>'
        if different
        else ""
    )
    parts = [f'<dl class="facts">{listed}</dl>{note}' if listed else ""]
    parts += [
        f"<details><summary>{escape(s.name)}: configuration and command</summary>"
        f"<p>Save the configuration as <code>{escape(_file(s))}</code>, then:</p>"
        f"<pre><code>{escape(command(s))}</code></pre>"
        f"<pre><code>{escape(s.first.config_text.strip())}</code></pre></details>"
        for s in settings
        if s.first.config_text
    ]
    lead = "Same configuration, same seed, same version, same kind of machine: same result."
    if any(run.noise == "entropy" for s in settings for run in s.runs):
        lead += " Privacy noise from entropy is drawn anew each time, and the result varies with it."
    return section("reproduce", "Reproduce these runs", *parts, lead=lead)


def _file(setting: Setting) -> str:
    return f"{setting.first.experiment or 'experiment'}.toml"


def command(setting: Setting) -> str:
    """The shell command that makes these runs again from their configuration."""
    seeds = [run.seed for run in setting.runs if run.seed is not None]
    listed = f" --set {shlex.quote(f'run.seeds={seeds}')}" if seeds else ""
    return f"fedveil run {shlex.quote(_file(setting))}{listed}"
