"""The page: whole, self-contained, and safe whatever the names are."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedveil.report.charts import Dot, plane_chart
from fedveil.report.html import render, write_report
from fedveil.report.privacy_chart import Mark, Row, privacy_chart
from fedveil.report.reading import read_runs
from tests.refusals import refuses
from tests.unit.report.makers import proof, write_everything, write_picture, write_run

_VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Every start tag with its attributes; complains about tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:  # drawn shapes with a title reach here too, and close like any other
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def whole(tmp_path: Path) -> str:
    return write_report([write_everything(tmp_path)], tmp_path / "out" / "report.html").read_text()


def test_every_part_is_there(whole: str) -> None:
    anchors = [attributes["id"] for attributes in Page(whole).named("section")]
    assert anchors == [
        "results",
        "privacy",
        "learning",
        "trade-off",
        "classes",
        "clients",
        "partition",
        "attacks",
        "synthetic",
        "figures",
        "reproduce",
    ]
    links = [attributes["href"] for attributes in Page(whole).named("a")]
    assert [f"#{anchor}" for anchor in anchors] == links[1:]


def test_the_page_names_the_data(tmp_path: Path) -> None:
    write_run(tmp_path, dataset="cifar10", data="CIFAR-10, 20000 training examples from 2 of 5 batches")
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "<dt>data</dt><dd>cifar10: CIFAR-10, 20000 training examples from 2 of 5 batches</dd>" in page


def test_the_page_requests_nothing_and_its_policy_forbids_it(whole: str) -> None:
    page = Page(whole)
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#"))
    assert not re.search(r"@import|url\(", whole)
    policy = next(str(m["content"]) for m in page.named("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    script = re.search(r"<script>(.*?)</script>", whole, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_curves_carry_the_mean_and_the_band(whole: str) -> None:
    charts = [json.loads(str(d["data-chart"])) for d in Page(whole).named("div") if d.get("data-chart")]
    rounds = charts[0]
    assert rounds["series"][0]["name"] == "fedavg"
    assert rounds["series"][0]["y"][-1] == pytest.approx(91.0)
    assert rounds["series"][0]["low"][-1] == pytest.approx(90.0)
    assert rounds["series"][0]["high"][-1] == pytest.approx(92.0)
    traffic = charts[1]
    assert traffic["series"][0]["x"][-1] == pytest.approx(8.0)  # kB


def test_it_is_friendly_to_screen_readers(whole: str) -> None:
    page = Page(whole)
    assert page.named("html")[0]["lang"] == "en"
    assert all(attributes.get("alt") for attributes in page.named("img"))
    assert all(a.get("aria-label") or a.get("aria-hidden") == "true" for a in page.named("svg"))
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.named("th"))
    assert len(page.named("table")) == len(page.named("caption"))
    assert {a["aria-sort"] for a in page.named("th") if "aria-sort" in a} == {"none"}


def test_the_privacy_words_and_numbers_are_in_it(whole: str) -> None:
    text = " ".join(Page(whole).text)
    assert "the server sees everything." in text
    assert "an audit showed at least this, for one participation" in text
    assert "limited protection" in text
    assert "21.5" in text
    assert "area 0.875" in text


def test_an_audit_names_adversary_and_unit(whole: str) -> None:
    page = Page(whole)
    audited = "audit: server"
    assert audited in page.text
    assert "0.7" in page.text[page.text.index(audited) :][:5]  # the bound stands beside its mark
    assert (
        "<h4>Audit against the server</h4><p>Epsilon is at least 0.7 for one participation; 20 is proven. "
        "A low bound proves nothing.</p>" in whole
    )


def test_an_audited_run_is_not_called_untested(whole: str) -> None:
    parts = [part.split("</details>")[0] for part in whole.split("<summary>In words: ")[1:]]
    assert {"<h4>Audit" in part for part in parts} == {True, False}
    assert all(("<h4>Audit" in part) != ("No audit has tested" in part) for part in parts)


@pytest.mark.parametrize(
    ("psnr", "images", "words"),
    [
        (
            15.0,
            [15.0],
            "On average closer to the originals than the mean image or public ones are (15.0 dB against 11.5 dB)",
        ),
        (
            8.0,
            [],
            "no closer to the originals than the mean image or public ones are (8.0 dB against 11.5 dB).</p>",
        ),
        (
            8.0,
            [7.0, 9.0],
            "(8.0 dB against 11.5 dB), nor is any single one: by this measure no improvement over the baseline",
        ),
        (8.0, [5.0, 5.0, 14.0], "(8.0 dB against 11.5 dB), but 1 of 3 are closer, the best at 14.0 dB."),
    ],
)
def test_an_inversion_has_a_verdict_in_words(
    tmp_path: Path, psnr: float, images: list[float], words: str
) -> None:
    place = write_run(tmp_path) / "attacks" / "dlg-round-1-exchange-0-client-46-50890df4"
    place.mkdir(parents=True)
    found = {
        "labels": "known",
        "labels_right": 1.0,
        "mean_image_psnr": 11.5,
        "against_x": {"mean": {"psnr": psnr}, "per_image": {"psnr": images}},
    }
    (place / "finding.json").write_text(json.dumps(found))
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "<h3>dlg</h3>" in text
    assert "seed 0, round 1, client 46</p>" in text
    assert words in text
    card, facts = re.findall(r"<dl>(.*?)</dl>", text.split("<h3>dlg")[1])[:2]
    assert "<dt>PSNR</dt>" in card
    assert "<dt>PSNR of the mean image</dt>" in card
    assert "labels right" not in card  # the attacker was told them
    assert "labels right" in facts


EVIL = """<img src=x onerror=alert(1)>"><script>alert('x')</script>&amp;' onload='y"""


def test_markup_in_any_name_is_shown_not_obeyed(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path,
        EVIL,
        identity="evil",
        fields={"note": EVIL},
        experiment=EVIL,
        dataset=EVIL,
        model=EVIL,
        stopped=EVIL,
        classes=[EVIL, "b", "c"],
        per_client_on=EVIL,
        privacy_in_words=f"{EVIL}\n  {EVIL}",
        environment={EVIL: EVIL},
        plan={"clients": EVIL, "cohort": EVIL},
        paper={"source": EVIL, "table": EVIL, "expected": 0.5, "scale": EVIL},
        privacy={
            "paper_claim": EVIL,
            "proven": [
                proof("observer", 2.0) | {"theorem": EVIL, "unit": EVIL},
                proof("server", None) | {"reason": EVIL},
            ],
            "audit": {"lower_bound": 0.1, EVIL: EVIL},
        },
    )
    attack = folder / "attacks" / "<b>bold&"
    write_picture(attack / "original<i>.png")
    (attack / "finding.json").write_text(json.dumps({EVIL: EVIL, "metrics": {EVIL: 1.0}}))
    (attack / "roc.json").write_text(json.dumps({"fpr": [0, 1], "tpr": [0, 1]}))
    write_run(tmp_path, EVIL, identity="evil2", seed=1, fields={"note": "other"})
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    page = Page(text)
    assert len(page.named("script")) == 1
    assert not page.named("i")
    assert not page.named("b")
    assert all(str(a["src"]).startswith("data:image/png;base64,") for a in page.named("img"))
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert EVIL in "".join(page.text)


def test_unfinished_and_damaged_runs_are_shown_with_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg")
    write_run(tmp_path, "scaffold", finished=False)
    broken = write_run(tmp_path, "fedprox")
    (broken / "summary.json").write_text("{")
    (tmp_path / "empty").mkdir()
    text = write_report([tmp_path, tmp_path / "empty"], tmp_path / "report.html").read_text()
    said = " ".join(Page(text).text)
    assert "What is missing" in said
    assert "2 of 4 rounds" in said
    assert "summary.json is damaged" in said
    assert "There is no run in" in said
    assert "90.00 %" in said


def test_a_run_with_nothing_to_show_still_makes_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "demo" / "x" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "rounds.jsonl").write_text("")
    text = write_report([folder], tmp_path / "report.html").read_text()
    assert "No run here is finished" in " ".join(Page(text).text)


@pytest.mark.parametrize("clients", [1, 45, 300])
def test_the_partition_is_drawn_for_few_and_many_clients(tmp_path: Path, clients: int) -> None:
    write_run(
        tmp_path, partition=[[client % 5, 0, 1] for client in range(clients)], per_client=[0.5] * clients
    )
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert f"{clients} clients share" in text
    assert ("The first 200" in text) == (clients > 200)


def test_the_same_runs_make_the_same_page(tmp_path: Path) -> None:
    write_everything(tmp_path / "runs")
    pages = [write_report([tmp_path / "runs"], tmp_path / f"{i}.html").read_bytes() for i in range(2)]
    assert pages[0] == pages[1]


def test_a_folder_is_no_place_for_a_page(tmp_path: Path) -> None:
    write_run(tmp_path)
    with refuses("-o"):
        write_report([tmp_path], tmp_path)


def test_a_name_never_stands_nearer_to_another_dot() -> None:
    close = [Dot(name, 0, 80.0, y, None, name) for name, y in (("low", 0.76), ("high", 0.79))]
    beside = Dot("elsewhere", 0, None, 0.8, None, "elsewhere")
    far = [Dot("far", 0, 2.0, y, None, "far") for y in (0.05, 0.99)]
    chart = plane_chart([*close, beside, *far], label="", x_label="", y_label="")
    named = re.findall(r'class="name" x="[^"]*" y="([^"]*)">(\w+)<', chart.split("</svg>")[0])
    heights = {name: float(y) for y, name in named}
    assert heights["high"] < heights["low"]
    assert "elsewhere" not in heights  # the only room is beside the other two; the legend has it


def test_membership_attacks_have_a_chart_each_and_no_hash(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    for name in ("lira-2aaf929c", "loss-threshold"):
        place = folder / "attacks" / name
        place.mkdir(parents=True)
        (place / "finding.json").write_text(json.dumps({"auc": 0.5}))
        (place / "roc.json").write_text(json.dumps({"fpr": [0.0, 1.0], "tpr": [0.0, 1.0]}))
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert re.findall(r"<figcaption>(lira|loss-threshold)</figcaption>", text) == ["lira", "loss-threshold"]
    assert "2aaf929c" not in text


def test_zones_of_proofs_do_not_grade_audits_and_claims() -> None:
    """A low bound from below in the zone of strong protection would read as one."""
    proven = Row("a", 0, "server", "server", [Mark("client", 4.0, "")])
    audited = Row("", 0, "audit: server", "audit: server", [Mark("audit", 0.2, "")])
    count = privacy_chart([proven], label="").count('class="gap"')
    assert privacy_chart([proven, audited], label="").count('class="gap"') == count + 2  # wide and narrow


def test_names_are_whole_on_a_phone() -> None:
    name = "udp-fedavg, clip 0.5, noise multiplier 1.5, rounds 10"
    narrow = privacy_chart([Row(name, 0, "server", "server", [Mark("client", 4.0, "")])], label="")
    _, _, narrow = narrow.partition('class="narrow"')
    assert "rounds 10</text>" in narrow


def test_a_number_of_a_table_is_called_one(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", paper={"source": "Li", "table": "2", "row": "iid", "expected": 92.5})
    assert "The paper (Li, Table 2, iid) states 92.50 %" in render(read_runs([tmp_path]))


def test_notes_on_a_comparison_are_not_called_missing(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg")
    write_run(tmp_path, "fedprox", model="logistic")
    said = " ".join(Page(write_report([tmp_path], tmp_path / "report.html").read_text()).text)
    assert "Before you compare" in said
    assert "different models (logistic, mlp-2)" in said
    assert "What is missing" not in said
    assert "logistic or mlp-2" in said or "mlp-2 or logistic" in said  # at the top


def test_attacks_name_clients_and_no_exchange(tmp_path: Path) -> None:
    folder = write_run(tmp_path, client_names=["Basel", "Bern"])
    for exchange in (0, 2):
        place = folder / "attacks" / f"dlg-round-1-exchange-{exchange}-client-1-50890df4"
        place.mkdir(parents=True)
        (place / "finding.json").write_text(json.dumps({"against_x": {"mean": {"psnr": 8.0}}}))
    said = " ".join(Page(write_report([tmp_path], tmp_path / "report.html").read_text()).text)
    assert "seed 0, round 1, client Bern" in said
    assert "seed 0, round 1, batch 3, client Bern" in said
    assert "exchange" not in said


def test_the_page_speaks_plainly(tmp_path: Path) -> None:
    rows = [
        proof("observer", 3.0)
        | {"theorem": "mixture over seen participation", "sampler": "fixed clients, poisson records"}
    ]
    folder = write_run(tmp_path, "udp-fedavg", proven=rows)
    place = folder / "attacks" / "dlg-round-1-exchange-0-client-1-50890df4"
    place.mkdir(parents=True)
    (place / "finding.json").write_text(json.dumps({"against_x": {"mean": {"psnr": 8.0}}}))
    said = " ".join(Page(write_report([tmp_path], tmp_path / "report.html").read_text()).text)
    for phrase in ("exchange 0", "mixture over", "poisson records", "what privacy and traffic buy"):
        assert phrase not in said
    assert "composition over rounds whose participants are visible" in said
