"""The report and the live page in a real browser."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedveil.report.groups import WHO
from fedveil.report.html import write_report
from fedveil.report.live_page import Followed, LiveView
from tests.browser.browser import Page
from tests.unit.report.makers import proof, write_everything, write_run

FIRST_COLUMN = "[...document.querySelectorAll('#results tbody tr')].map(row => row.cells[0].textContent)"
ACCURACY = "[...document.querySelectorAll('#results tbody tr')].map(row => row.cells[3].textContent)"
BUTTON = "document.querySelectorAll('#results thead button')[3]"
SORTED = "document.querySelectorAll('#results thead th')[3].getAttribute('aria-sort')"


@pytest.fixture
def report(tmp_path: Path, page: Page) -> str:
    path = write_report([write_everything(tmp_path)], tmp_path / "report.html")
    page.complaints.clear()
    page.requests.clear()
    page.size(1280, 900)
    page.open(path.as_uri())
    return path.as_uri()


def test_the_page_opens_without_errors_or_external_requests(page: Page, report: str) -> None:
    page.value("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    page.size(390, 844, dark=True)
    page.value("new Promise(done => setTimeout(done, 200))")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("data:")] == [report]


@pytest.mark.usefixtures("report")
def test_the_policy_stops_requests_and_foreign_scripts(page: Page) -> None:
    assert page.value("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    page.value(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.broken = 1'}))"
    )
    assert page.value("window.broken") is None


@pytest.mark.usefixtures("report")
def test_the_table_sorts_by_click_and_announces_it(page: Page) -> None:
    page.value(f"{BUTTON}.click()")
    assert page.value(SORTED) == "ascending"
    assert page.value(ACCURACY) == ["60.50 ± 0.71 %", "80.50 ± 0.71 %", "91.00 ± 1.41 %"]
    page.value(f"{BUTTON}.click()")
    assert page.value(SORTED) == "descending"
    assert page.value(FIRST_COLUMN)[0] == "fedavg"
    assert page.value("document.querySelectorAll('#results th[aria-sort=descending]').length") == 1


@pytest.mark.usefixtures("report")
def test_the_table_sorts_by_keyboard_and_shows_where_one_is(page: Page) -> None:
    page.value("document.querySelectorAll('#results thead button')[2].focus()")
    page.key("Tab")
    assert page.value(f"document.activeElement === {BUTTON}")
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.key("Enter")
    assert page.value(SORTED) == "ascending"


@pytest.mark.usefixtures("report")
def test_epsilon_sorts_as_numbers_with_nothing_proven_last(page: Page) -> None:
    page.value("document.querySelectorAll('#results thead button')[2].click()")
    cells = "[...document.querySelectorAll('#results tbody tr')].map(row => row.cells[2].textContent)"
    assert page.value(cells) == ["20 client", "20 client", "none"]


@pytest.mark.parametrize(("width", "size"), [(1280, "wide"), (390, "narrow")])
@pytest.mark.usefixtures("report")
def test_curves_draw_inside_their_charts(page: Page, width: int, size: str) -> None:
    page.size(width, 844)
    lines = f"document.querySelectorAll('#learning svg.{size} path.line')"
    assert page.value(f"{lines}.length") >= 3
    boxes = page.value(
        f"""[...document.querySelectorAll('#learning svg.{size} path.line[d*="L"]')].map(path => {{
            const line = path.getBoundingClientRect(), chart = path.ownerSVGElement.getBoundingClientRect();
            return [line.width, line.left >= chart.left - 1 && line.right <= chart.right + 1
                && line.top >= chart.top - 1 && line.bottom <= chart.bottom + 1];
        }})"""
    )
    assert all(inside for _, inside in boxes)
    assert max(wide for wide, _ in boxes) > width / 2
    other = "narrow" if size == "wide" else "wide"
    assert page.value(f"getComputedStyle(document.querySelector('#learning svg.{other}')).display") == "none"


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.usefixtures("report")
def test_no_width_makes_the_page_scroll_sideways(page: Page, width: int) -> None:
    page.size(width, 844)
    page.value("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert page.value("document.documentElement.scrollWidth") <= width


@pytest.mark.usefixtures("report")
def test_values_show_under_the_pointer_and_under_the_arrow_keys(page: Page) -> None:
    page.value(
        "document.querySelector('#learning svg.wide').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    box = page.value(
        "(svg => (b => [b.left, b.top, b.width, b.height])(svg.getBoundingClientRect()))"
        "(document.querySelector('#learning svg.wide'))"
    )
    page.move(box[0] + box[2] * 0.98, box[1] + box[3] / 2)
    assert page.value("document.querySelector('.tip').hidden") is False
    text = page.value("document.querySelector('.tip').textContent")
    assert "round 4" in text
    assert "fedavg: 91.00 % (90.00 to 92.00)" in text
    page.move(2, 2)
    assert page.value("document.querySelector('.tip').hidden") is True
    page.value("document.querySelector('#learning svg.wide').focus()")
    page.key("ArrowLeft")
    assert page.value("document.querySelector('.tip').hidden") is False
    page.key("Escape")
    assert page.value("document.querySelector('.tip').hidden") is True


@pytest.mark.usefixtures("report")
def test_dark_and_light_are_different_and_paper_is_light(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.value(ground) == "rgb(255, 255, 255)"
    page.size(1280, 900, dark=True)
    assert page.value(ground) == "rgb(17, 22, 28)"
    page.size(390, 844, dark=True, paper=True)
    assert page.value(ground) == "rgb(255, 255, 255)"
    shown = "getComputedStyle(document.querySelector('#learning svg.wide')).display"
    assert page.value(shown) == "block"
    assert page.value("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_the_live_page_follows_a_run(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path, finished=False)
    page.complaints.clear()
    page.requests.clear()
    with LiveView() as live:
        live.follow(folder, Followed("demo: fedavg, seed 0", 4, 3.0, 1e-5))
        page.size(1280, 900)
        page.open(live.url)
        page.wait("document.getElementById('status').textContent.startsWith('2 of 4 rounds.')")
        assert page.value("document.querySelectorAll('#score path.line').length") == 1
        with (folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps({"round": 3, "accuracy": 0.7, "epsilon": 1.5, "seconds": 0.1}) + "\n")
        page.wait(
            "document.getElementById('status').textContent.startsWith('3 of 4 rounds. Accuracy 70.00 %.')"
        )
        assert "Epsilon 1.5 of 3, 50 % of the budget." in page.value(
            "document.getElementById('status').textContent"
        )
        assert "budget 3" in page.value("document.getElementById('epsilon').textContent")
        page.open("about:blank#end")
    assert page.complaints == []
    assert all(url.startswith((live.url, "data:", "about:")) for url in page.requests)


def test_the_live_page_shows_the_score_that_the_run_has(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path, finished=False, accuracy=None)
    (folder / "rounds.jsonl").write_text(json.dumps({"round": 1, "accuracy": None, "r2": 0.5}) + "\n")
    with LiveView() as live:
        live.follow(folder, Followed("demo: fedavg, seed 0", 4, None, 1e-5))
        page.open(live.url)
        page.wait("document.getElementById('status').textContent.startsWith('1 of 4 rounds. R² 0.5.')")
        assert page.value("document.getElementById('measure').textContent") == "R² on the test set"
        page.open("about:blank#end")


@pytest.mark.parametrize("count", [5, 8])
def test_tables_of_many_settings_are_whole_on_paper(tmp_path: Path, page: Page, count: int) -> None:
    for place in range(count):
        for seed in range(2):
            accuracy = 0.5 + 0.1 * seed
            write_run(
                tmp_path,
                "udp-fedavg",
                identity=str(place),
                seed=seed,
                accuracy=accuracy,
                fields={"noise_multiplier": 1.0 + place},
            )
    path = write_report([tmp_path], tmp_path / "report.html")
    page.size(720, 900, paper=True)
    page.open(path.as_uri())
    page.value("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert page.value("document.documentElement.scrollWidth") <= 720


@pytest.fixture
def single(tmp_path: Path, page: Page) -> str:
    """The internal report of a run that has everything a report can show."""
    whole = write_everything(tmp_path / "all")
    proven = [proof("server", 20.0), proof("observer", 4.0), proof("client", 4.0)]
    folder = write_run(tmp_path / "one", "udp-fedavg", proven=proven)
    shutil.copytree(whole / "demo" / "fedavg" / "seed-0" / "attacks", folder / "attacks")
    path = write_report([folder], tmp_path / "single.html")
    page.size(1280, 900)
    page.open(path.as_uri())
    return path.as_uri()


@pytest.mark.usefixtures("single")
def test_a_single_run_prints_on_at_most_four_pages(page: Page) -> None:
    assert page.pages() <= 4


@pytest.mark.usefixtures("report")
def test_a_comparison_prints_on_at_most_ten_pages(page: Page) -> None:
    assert page.pages() <= 10


@pytest.mark.usefixtures("single")
def test_the_page_to_sign_is_one_page(page: Page) -> None:
    page.size(688, 1032, paper=True)  # A4 without its margins
    assert page.value("document.querySelector('#statement').getBoundingClientRect().bottom + scrollY") <= 1032


_PREPARED = [
    "Scales and categories of the columns were computed from the training rows without protection: the guarantee does "
    "not cover them. Give a schema of public constants, or declare them public.",
    "A record is one of at most 3 training rows of a person (column 'patient'). A person with rows at two clients is "
    "protected at each separately.",
]
_KINDS: dict[str, dict[str, Any]] = {
    "nothing proven": {"proven": [proof(w, None, u) for w in WHO for u in ("client", "record")]},
    "two units": {"proven": [proof(w, 2.0, u) for w in WHO for u in ("client", "record")]},
    "seeded": {
        "privacy": {"proven": [proof(w, 20.0) for w in WHO], "removable": True, "paper_claim": "none"}
    },
    "stopped": {
        "stopped": "the privacy budget of epsilon 3 (delta 1e-05, client level) does not allow round 3"
    },
    "a table": {
        "client_names": [f"Hospital of Basel-Landschaft {place}" for place in range(4)],
        "privacy": {
            "proven": [proof(w, 4.0, "record") for w in WHO],
            "data": _PREPARED,
            "persons": [{"adversary": w, "epsilon": 12.0, "delta": 1e-3} for w in WHO],
            "paper_claim": "none",
        },
    },
    "secure": {"proven": [proof(w, 4.0) for w in WHO]},
    "federation": {
        "deployed": True,
        "client_names": [f"Hospital of Basel-Landschaft {place}" for place in range(4)],
        "privacy": {
            "proven": [proof(w, 4.0) for w in WHO],
            "removable": False,
            "noise": "entropy",
            "paper_claim": "none",
        },
    },
}


@pytest.mark.parametrize("kind", _KINDS)
def test_the_page_to_sign_is_one_page_for_every_kind_of_run(tmp_path: Path, page: Page, kind: str) -> None:
    folder = write_run(tmp_path, f"udp-fedavg{'+secure' if kind == 'secure' else ''}", **_KINDS[kind])
    if kind == "federation":
        rounds = [{"round": 1, "cohort": 4, "answered": 3}, {"round": 2, "cohort": 4, "answered": 0}]
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    digest = "0123456789abcdef" * 4
    identity = {"run": "demo/0123456789ab/seed-0 0123456789ab", "files": {"config.toml": digest}}
    stated = identity | {"data_commitment": digest, "ledger": {"head": digest}, "made": "2026-01-02T03:04:05"}
    (folder / "statement.json").write_text(json.dumps(stated))
    path = write_report([folder], tmp_path / "report.html")
    page.size(688, 1032, paper=True)
    page.open(path.as_uri())
    assert page.value("document.querySelector('#statement').getBoundingClientRect().bottom + scrollY") <= 1032
    assert page.pages() <= 4


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.usefixtures("single")
def test_on_a_phone_epsilon_is_on_the_screen_and_grades_keep_their_names(page: Page, dark: bool) -> None:
    page.size(390, 844, dark=dark)
    right = "document.querySelectorAll('#results tbody td')[0].getBoundingClientRect().right"
    assert page.value(right) <= 390
    names = page.value(
        "[...document.querySelectorAll('#privacy svg.narrow .bandname')].map(name => name.textContent)"
    )
    assert {"strong", "moderate", "limited", "too large to protect"} <= set(names)
    boxes = page.value(
        "[...document.querySelectorAll('#privacy svg.narrow .bandname')].map(name => "
        "(b => [b.left, b.right, Math.round(b.top)])(name.getBoundingClientRect()))"
    )
    for line in {top for _, _, top in boxes}:
        row = sorted(box for box in boxes if box[2] == line)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(row)), "names overlap"


@pytest.mark.usefixtures("single")
def test_links_to_formula_and_assumptions_work_offline(page: Page) -> None:
    page.size(1280, 900)
    page.value("document.documentElement.style.scrollBehavior = 'auto'")
    for anchor in ("odds", "privacy"):
        page.value(f"document.querySelector('#statement a[href=\"#{anchor}\"]').click()")
        page.wait(f"Math.abs(document.querySelector('#{anchor}').getBoundingClientRect().top) < 200")
    assert page.complaints == []


@pytest.mark.usefixtures("single")
def test_on_a_phone_every_number_of_what_is_proven_has_its_name(page: Page) -> None:
    page.size(390, 844)
    cells = page.value(
        "[...document.querySelectorAll('#statement tbody tr')].map(row => [...row.cells].map(cell => "
        "[getComputedStyle(cell, '::before').content, cell.getBoundingClientRect().right <= 390]))"
    )
    assert cells
    for row in cells:
        assert [name for name, _ in row][2:4] == ['"ε "', '"δ "']
        assert all(inside for _, inside in row)


@pytest.mark.parametrize("kind", ["single", "report"])
def test_letters_of_charts_are_readable_on_paper(
    page: Page, request: pytest.FixtureRequest, kind: str
) -> None:
    """Six points, which is eight pixels, is small print; less is none."""
    request.getfixturevalue(kind)
    page.size(688, 1032, paper=True)  # A4 without its margins
    sizes = page.value(
        "[...document.querySelectorAll('.chart svg')].filter(svg => getComputedStyle(svg).display !== 'none')"
        ".map(svg => [svg.getBoundingClientRect().width / svg.viewBox.baseVal.width,"
        " svg.getBoundingClientRect().right])"
    )
    assert sizes
    for scale, right in sizes:
        assert 12 * scale >= 7.9
        assert right <= 690


@pytest.mark.usefixtures("report")
def test_accuracy_ends_at_100_percent(page: Page) -> None:
    ticks = page.value(
        "[...document.querySelectorAll('#learning svg.wide .tick[text-anchor=end]')].map(t => Number(t.textContent))"
    )
    assert max(ticks) <= 100


@pytest.mark.usefixtures("report")
def test_the_banner_is_the_first_thing_one_sees(page: Page) -> None:
    assert page.value("document.querySelector('.banner').getBoundingClientRect().top") < 120
    assert "INTERNAL" in page.value("document.querySelector('.banner').textContent")
