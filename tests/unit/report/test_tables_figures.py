"""Tables for papers and figures in vector form."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedveil.figures.figure import new_figure, save_figure
from fedveil.figures.style import DARK, LIGHT, LOOKS, look
from fedveil.report.figures import accuracy_figure, save_figures, tradeoff_figure
from fedveil.report.groups import group
from fedveil.report.html import render
from fedveil.report.reading import read_runs
from fedveil.report.scales import exact, linear, logarithmic
from fedveil.report.sections import results
from fedveil.report.tables import compared, comparison_table, latex_table, markdown_table
from fedveil.session.tables import size
from tests.refusals import refuses
from tests.unit.report.makers import proof, write_everything, write_run


def test_markdown_has_mean_and_deviation(tmp_path: Path) -> None:
    text = markdown_table(group(read_runs([write_everything(tmp_path)])))
    lines = text.splitlines()
    assert len(lines) == 5
    assert "| fedavg | 2 | 91.00 ± 1.41 | none | none |" in lines[2]  # two seeds tell little
    assert "| 80.50 ± 0.71 | 4 | 20 |" in lines[3]
    assert "paper" not in lines[0]


def test_an_epsilon_is_shown_with_its_unit(tmp_path: Path) -> None:
    """One for single records and one for whole clients are not to be taken for rivals."""
    write_run(tmp_path / "a", "udp-fedavg", proven=[proof("observer", 4.0), proof("server", None)])
    lines = markdown_table(group(read_runs([tmp_path / "a"]))).splitlines()
    assert "| ε observer client | ε server client |" in lines[0]
    assert "| 4 | none |" in lines[2]
    record = [proof("observer", 2.0, "record"), proof("server", 9.0, "record")]
    write_run(tmp_path / "b", "dp-fedprox", accuracy=0.5, proven=record)
    settings = group(read_runs([tmp_path]))
    lines = markdown_table(settings).splitlines()
    assert "| ε observer | ε server |" in lines[0]
    assert "| 2 record | 9 record |" in lines[2]
    assert "| 4 client | none |" in lines[3]
    page = render(read_runs([tmp_path]))
    assert ">dp-fedprox (record)</text>" in page
    assert "else for whole clients: the two cannot be compared" in page


@pytest.mark.parametrize("deviation", [True, False])
def test_names_and_numbers_are_whole_in_80_columns(tmp_path: Path, deviation: bool) -> None:
    unit = [proof("observer", 17.86, "record"), proof("server", 153.1, "record")]
    for seed in range(2 if deviation else 1):
        write_run(tmp_path, "udp-fedavg", seed=seed, accuracy=0.6 + 0.2 * seed)
        paper = {"source": "x", "expected": 92.5}
        write_run(
            tmp_path, "dp-fedags-proven", seed=seed, accuracy=0.5 + 0.3 * seed, proven=unit, paper=paper
        )
    out = io.StringIO()
    settings = group(read_runs([tmp_path]))
    Console(file=out, width=80).print(comparison_table(settings))
    for text in ("dp-fedags-", "udp-fedavg", "17.86", "153.1", "record", "92.50"):
        assert text in out.getvalue()
    assert "…" not in out.getvalue()


def test_little_traffic_is_not_shown_as_none(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", bytes_up=400, bytes_down=4000)
    assert compared(group(read_runs([tmp_path])))[0].sent == "0.0044"
    assert "0.40 kB" in render(read_runs([tmp_path]))
    assert [size(count) for count in (0, 99_999, 100_000, 4.5e7, 1.2e9)] == [
        "0.00 kB",
        "100.00 kB",
        "0.10 MB",
        "45.00 MB",
        "1.20 GB",
    ]


def test_the_published_number_stands_beside(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", paper={"source": "x", "expected": 92.5})
    write_run(tmp_path, "scaffold")
    lines = markdown_table(group(read_runs([tmp_path]))).splitlines()
    assert lines[0].endswith("| paper % |")
    assert lines[2].endswith("| 92.50 |")
    assert lines[3].endswith("| - |")


@pytest.mark.parametrize(
    ("metric", "expected", "shown"),
    [
        ("mcc", 0.557, "0.557 (mcc)"),
        ("perplexity", 33.24, "33.24 (perplexity)"),
        ("personal", 0.5014, "50.14"),
    ],
)
def test_a_published_number_of_another_kind_is_no_per_cent(
    metric: str, expected: float, shown: str, tmp_path: Path
) -> None:
    write_run(tmp_path, "fedavg", paper={"source": "x", "metric": metric, "expected": expected})
    settings = group(read_runs([tmp_path]))
    assert markdown_table(settings).splitlines()[2].endswith(f"| {shown} |")
    assert f">{shown}" in results(settings)


@pytest.mark.parametrize(
    ("accuracy", "labels", "best"),
    [(0.90, 1000, [False, False]), (0.93, 1000, [False, False]), (0.93, 10_000, [False, True])],
)
def test_the_best_is_marked_only_if_intervals_do_not_overlap(
    tmp_path: Path, accuracy: float, labels: int, best: list[bool]
) -> None:
    write_run(tmp_path, "fedavg", accuracy=0.9, majority={"rate": 0.1, "labels": labels})
    write_run(tmp_path, "scaffold", accuracy=accuracy, majority={"rate": 0.1, "labels": labels})
    settings = group(read_runs([tmp_path]))
    assert [row.best for row in compared(settings)] == best
    assert ("**" in markdown_table(settings)) is any(best)


def test_the_best_of_several_seeds_is_marked_by_their_interval(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, "fedavg", seed=seed, accuracy=0.80 + 0.001 * seed)
        write_run(tmp_path, "scaffold", seed=seed, accuracy=0.90 + 0.001 * seed)
    assert [row.best for row in compared(group(read_runs([tmp_path])))] == [False, True]


def test_markup_in_names_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path, r"a|b_c%\d*<e>")
    settings = group(read_runs([tmp_path]))
    assert r"a\|b\_c%\\d\*\<e\>" in markdown_table(settings)
    assert r"a|b\_c\%\textbackslash{}d*$<$e$>$" in latex_table(settings)


def test_latex_is_a_booktabs_table(tmp_path: Path) -> None:
    text = latex_table(group(read_runs([write_everything(tmp_path)])))
    assert r"91.00 $\pm$ 1.41" in text
    assert text.count(r"\\") == 4
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")


def test_every_figure_is_written_as_pdf(tmp_path: Path) -> None:
    settings = group(read_runs([write_everything(tmp_path / "runs")]))
    paths = save_figures(settings, tmp_path / "pdf")
    assert [path.name for path in paths] == [
        "accuracy.pdf",
        "traffic.pdf",
        "trade-off-observer.pdf",
        "trade-off-server.pdf",
        "partition.pdf",
    ]
    assert all(path.read_bytes().startswith(b"%PDF") for path in paths)


def test_figures_name_units_and_seeds(tmp_path: Path) -> None:
    settings = group(read_runs([write_everything(tmp_path)]))
    axes = accuracy_figure(settings).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy, %")
    assert axes.get_legend_handles_labels()[1][0] == "fedavg (2 seeds)"
    axes = tradeoff_figure(settings, "observer").axes[0]
    assert axes.get_xlabel() == "proven ε against published results"
    assert axes.get_xlim() == (1.0, 10.0)


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_the_same_figure_is_the_same_file(suffix: str, tmp_path: Path) -> None:
    first, second = (tmp_path / f"{name}.{suffix}" for name in ("first", "second"))
    for path in (first, second):
        save_figure(new_figure(), path)
        time.sleep(1.1 if suffix == "pdf" else 0)  # its date has whole seconds
    assert first.read_bytes() == second.read_bytes()


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with refuses("path"):
        save_figure(accuracy_figure(group(read_runs([write_run(tmp_path)]))), tmp_path / "a.gif")


VALUES = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=20)


@given(VALUES)
def test_linear_scales_hold_their_values_between_round_ends(values: list[float]) -> None:
    scale = linear(values, 0.0, 100.0)
    hair = 1e-6 + 1e-8 * (max(values) - min(values))  # less than anybody sees
    assert scale.low <= min(values) + hair
    assert scale.high >= max(values) - hair
    assert 2 <= len(scale.ticks) <= 8
    assert scale(scale.low) == 0.0
    assert scale(scale.high) == 100.0


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_logarithmic_scales_end_at_powers_of_ten(values: list[float]) -> None:
    scale = logarithmic(values, 0.0, 1.0)
    assert scale.low <= min(values) * (1 + 1e-6)
    assert scale.high >= max(values) * (1 - 1e-6)
    assert 0.0 <= scale(values[0]) <= 1.0
    assert len(scale.ticks) <= 9


def test_exact_scales_keep_their_ends() -> None:
    scale = exact(1, 40, 0.0, 390.0, count=8)
    assert (scale(1), scale(40)) == (0.0, 390.0)
    assert all(1 <= tick <= 40 for tick in scale.ticks)


@pytest.mark.parametrize(("rounds", "ticks"), [(2, (1, 2)), (20, (3, 6, 9, 12, 15, 18))])
def test_rounds_are_counted_in_whole_numbers(rounds: int, ticks: tuple[int, ...]) -> None:
    assert exact(1, rounds, 0.0, 390.0, count=8, whole=True).ticks == ticks


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(a: str, b: str) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_has_enough_contrast_on_every_ground(theme: dict[str, str]) -> None:
    for ground in ("paper", "panel"):
        for ink in ("ink", "soft", "accent", "good", "fair", "weak", "bad"):
            assert _contrast(theme[ink], theme[ground]) >= 4.5


def test_lines_stand_out_and_stay_apart_in_grey() -> None:
    for item in LOOKS:
        assert _contrast(item.light, LIGHT["paper"]) >= 3
        assert _contrast(item.dark, DARK["paper"]) >= 3
    assert len({(item.dash, item.marker) for item in LOOKS}) == len(LOOKS)


def test_no_two_of_many_settings_look_alike() -> None:
    many = [look(number) for number in range(84)]
    assert len({(item.light, item.marker) for item in many}) == len(many)
    assert tuple(many[: len(LOOKS)]) == LOOKS
