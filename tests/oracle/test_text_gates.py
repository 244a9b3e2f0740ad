"""LAMP must recover texts where nothing defends them, else its failures against a defence would mean nothing.

Undefended tiny transformers on sentences of a small grammar; the control holds the same findings against other texts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.attacks.texts import VOCABULARY, text_view
from torch import Tensor

from fedveil.attacks.text.lamp import Lamp
from fedveil.evaluation.text_overlap import Rouge, mean_rouge, rouge
from fedveil.streams import named_stream


def overlap(found: Tensor, ids: Tensor) -> Rouge:
    """The mean over texts, each matched with the nearest found text of its batch."""
    scores = []
    for batch, texts in zip(found.tolist(), ids.tolist(), strict=True):
        for text in texts:
            told = [rouge(VOCABULARY.decode(text), VOCABULARY.decode(guess)) for guess in batch]
            scores.append(max(told, key=lambda score: score.rouge1 + score.rouge_l))
    return mean_rouge(scores)


def test_lamp_recovers_texts_of_an_undefended_transformer() -> None:
    view, ids = text_view(4, 1)
    finding = Lamp(steps=20, starts=20, swaps=20, polish=400, prior="n-gram")(view, named_stream(1, "gate"))
    assert overlap(finding.images, ids).rouge1 > 0.7
    assert overlap(finding.images, ids).rouge_l > 0.7
    others = ids.roll(1, 0)  # the control: another client's text
    assert overlap(finding.images, others).rouge1 < 0.45


def test_unperturbed_embeddings_disclose_more_than_a_wrong_gradient() -> None:
    """Without the rows of the embedding gradient, as for a frozen table."""
    view, ids = text_view(2, 1)
    attack = Lamp(steps=150, starts=20, swaps=20, polish=300, prior="n-gram", use_leak=False)
    right = overlap(attack(view, named_stream(1, "gate")).images, ids)
    swapped = replace(view, observed={name: leaf.flip(0) for name, leaf in view.observed.items()})
    wrong = overlap(attack(swapped, named_stream(1, "gate")).images, ids)
    assert right.rouge1 > 0.5 > wrong.rouge1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "examples", "steps", "gate"),
    [(20, 1, 100, 0.9), (5, 2, 100, 0.7), (3, 4, 1000, 0.7)],  # 300 steps on four texts reach 0.69 to 0.78
)
def test_lamp_recovers_many_texts_and_batches(targets: int, examples: int, steps: int, gate: float) -> None:
    view, ids = text_view(targets, examples)
    finding = Lamp(steps=steps, prior="n-gram")(view, named_stream(2, "gate"))
    assert overlap(finding.images, ids).rouge1 > gate
