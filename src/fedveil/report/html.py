"""The report: one self-contained HTML file.

It fetches nothing (its own policy forbids the browser to), reads in light and dark, on paper and on a phone, and with
keyboard and screen reader. Everything that comes from result folders is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib import metadata, resources
from pathlib import Path

from fedveil.atomic_files import write_atomically
from fedveil.errors import InputError
from fedveil.figures import style
from fedveil.report import attack_sections, sections
from fedveil.report.first_page import first_page, odds
from fedveil.report.groups import Setting, group, mixed
from fedveil.report.privacy_section import privacy
from fedveil.report.public import published
from fedveil.report.reading import read_runs, run_folders
from fedveil.report.run import Run
from fedveil.report.scores import scores
from fedveil.session.results import Result

_TITLES = re.compile(r'<section id="([a-z-]+)"[^>]*><h2[^>]*>(.*?)</h2>')


def write_report(
    results: Sequence[Path | str | Result],
    path: Path | str,
    notes: Sequence[str] = (),
    *,
    public: bool = False,
) -> Path:
    """Write the report on these runs and return its path.

    Unfinished and damaged runs are shown as far as they can be read; the report says what is missing.

    Args:
        results: Result folders, or folders of them.
        path: The HTML file.
        notes: Shown at the top.
        public: Leave out everything that carries no noise; without it the report has an INTERNAL banner.
    """
    target = Path(path)
    return write_page(read_runs(results), target, notes, missing=empty_folders(results), public=public)


def write_page(
    runs: Sequence[Run],
    target: Path,
    notes: Sequence[str] = (),
    *,
    missing: Sequence[str] = (),
    public: bool = False,
) -> Path:
    """Write the report on loaded runs; `missing` is reported with the files that cannot be read."""
    if target.is_dir():
        raise InputError("-o", str(target), "is a folder", "Give the path of a file, such as report.html.")
    body = render(runs, notes, missing=missing, public=public)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, body.encode("utf-8", "replace"))  # a folder's name may be no text
    except OSError as error:
        raise InputError(
            "-o", str(target), f"cannot be written: {error.strerror}", "Choose another."
        ) from error
    return target


def empty_folders(results: Sequence[Path | str | Result]) -> list[str]:
    """The folders without a run."""
    places = [Path(item) for item in results if not isinstance(item, Result)]
    return [f"There is no run in {place}." for place in places if not run_folders(place)]


def render(
    runs: Sequence[Run], notes: Sequence[str] = (), *, missing: Sequence[str] = (), public: bool = False
) -> str:
    """The page; `public` leaves out everything without noise."""
    shown = [published(run) for run in runs] if public else runs
    settings = group(shown)
    body = "".join(
        (
            sections.problems(shown, missing),
            sections.notes([*notes, *mixed(settings)]),
            sections.results(settings),
            privacy(settings),
            sections.learning(settings),
            sections.tradeoff(settings),
            scores(settings),
            sections.per_class(settings),
            sections.per_client(settings),
            sections.partition(settings),
            attack_sections.attacks(settings),
            attack_sections.pictures(settings),
            odds(settings, public=public),
            attack_sections.reproduce(settings),
        )
    )
    signed = first_page(settings, public=public)
    links = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in _TITLES.findall(body))
    title = " and ".join(dict.fromkeys(run.experiment for run in runs if run.experiment)) or "Report"
    content = (
        '<a class="skip" href="#main">Skip to the report</a>'
        f"{_banner(public)}"
        f'<header><p class="kicker">fedveil report</p><h1>{escape(title)}</h1>{_outline(settings)}</header>'
        f'<main id="main">{sections.verdict(settings)}{signed}'
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>{body}</main>'
        f"<footer><p>Made by fedveil {escape(metadata.version('fedveil'))} from the result folders alone.</p></footer>"
        '<div class="tip" role="status" aria-live="polite" hidden></div>'
    )
    return document(f"{title}: fedveil report", content, asset("page.js"))


def _banner(public: bool) -> str:
    if public:
        return '<p class="banner">PUBLIC: what is shown of clients and training data carries noise.</p>'
    return (
        '<p class="banner internal" role="note"><strong>INTERNAL</strong> This report shows values without noise '
        "(label counts and scores of clients, attacks). Do not publish it; use <code>--public</code>.</p>"
    )


def document(title: str, content: str, script: str, *, connect: str = "'none'") -> str:
    """A page with the project's look that may run this script only and load nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style.css()}{_series_css()}{asset('page.css')}</style></head>\n"
        f"<body>{content}<script>{script}</script></body></html>\n"
    )


def asset(name: str) -> str:
    return resources.files("fedveil.report").joinpath(name).read_text(encoding="utf-8")


def _series_css() -> str:
    return (
        "".join(f".s{n}{{stroke:var(--s{n})}}.f{n}{{fill:var(--s{n})}}" for n in range(len(style.LOOKS)))
        + "\n"
    )


def _outline(settings: Sequence[Setting]) -> str:
    """What was trained on what; all values where the settings differ."""
    firsts = [setting.first for setting in settings]
    facts = {
        "data": [_data(run) for run in firsts],
        "model": [run.model for run in firsts],
        "clients": [run.plan.get("clients", "") for run in firsts],
        "clients in a round": [_cohort(run) for run in firsts],
        "rounds": [run.plan.get("rounds", "") for run in firsts],
    }
    outline = {
        name: " or ".join(dict.fromkeys(value for value in values if value)) for name, values in facts.items()
    }
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in outline.items() if value
    )
    return f'<dl class="outline">{cells}</dl>' if cells else ""


def _data(run: Run) -> str:
    """What was trained on; of a federation the server knows only what it tests on."""
    name = f"{run.dataset}: {run.data}" if run.data else run.dataset
    return f"the nodes' own, tested on {name}" if run.deployed else name


def _cohort(run: Run) -> str:
    """How many clients train in a round, and how they are drawn."""
    sampler, cohort = run.plan.get("sampler", ""), run.plan.get("cohort", "")
    if sampler == "poisson":
        return f"about {cohort}, drawn independently"
    return {"all": "all", "fixed": f"{cohort}, drawn at random"}.get(sampler, cohort)
