"""ROUGE against rouge-score, Matthews correlation against scikit-learn, perplexity against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import matthews_corrcoef
from tests.refusals import refuses

from fedveil.evaluation.text_overlap import Rouge, matthews, mean_rouge, perplexity, rouge, words_of
from fedveil.streams import named_stream

WORDS = ["the", "cat", "The", "sat", "on", "a", "mat.", "don't", "42", "--", "Ünder", "x_y"]


def test_rouge_is_that_of_the_reference_package() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    rng = named_stream(0, "rouge")
    for _ in range(300):
        a, b = (" ".join(rng.choice(WORDS, size=int(rng.integers(0, 14)))) for _ in range(2))
        wanted = scorer.score(a, b)
        found = rouge(a, b)
        for name, value in (("rouge1", found.rouge1), ("rouge2", found.rouge2), ("rougeL", found.rouge_l)):
            assert value == pytest.approx(wanted[name].fmeasure, abs=1e-12), (name, a, b)


def test_rouge_of_known_texts() -> None:
    assert rouge("John tries to meet not Mary.", "john tries to meet not mary") == Rouge(1.0, 1.0, 1.0)
    assert rouge("a b c", "a c b") == Rouge(1.0, 0.0, 2 / 3)
    assert rouge("", "a") == rouge("a", "") == rouge("", "") == Rouge(0.0, 0.0, 0.0)
    assert rouge("a a b", "a b b").rouge1 == pytest.approx(2 / 3)  # a word counts as often as both have it
    assert words_of("It's 5 o'clock!") == ["it", "s", "5", "o", "clock"]


def test_mean_rouge() -> None:
    assert mean_rouge([Rouge(1, 0, 0.5), Rouge(0, 0, 0.5)]) == Rouge(0.5, 0, 0.5)
    with refuses("scores"):
        mean_rouge([])


@pytest.mark.parametrize("classes", [2, 5])
def test_matthews_is_that_of_scikit_learn(classes: int) -> None:
    rng = named_stream(1, "matthews", classes)
    for agreement in (0.0, 0.3, 0.9, 1.0):
        y = rng.integers(0, classes, 400)
        guess = np.where(rng.random(400) < agreement, y, rng.integers(0, classes, 400))
        assert matthews(torch.from_numpy(y), torch.from_numpy(guess)) == pytest.approx(
            matthews_corrcoef(y, guess), abs=1e-12
        )


def test_matthews_of_one_class_is_zero() -> None:
    y = torch.tensor([0, 1, 1])
    assert matthews(y, torch.ones(3, dtype=torch.long)) == 0.0
    assert matthews(y, y) == pytest.approx(1.0)
    with refuses("predicted"):
        matthews(y, torch.ones(2, dtype=torch.long))


def test_perplexity_of_a_fair_die_is_its_sides() -> None:
    assert perplexity(math.log(6)) == pytest.approx(6.0, rel=1e-12)
    assert perplexity(1e4) == math.inf
