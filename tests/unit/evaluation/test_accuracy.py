"""Scores against counting by hand: over several batches, of tokens that count, of clients' own models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedveil import ArrayClients, Task
from fedveil.evaluation.accuracy import evaluate, evaluate_clients, evaluate_cohort, evaluate_personal
from fedveil.models.causal_lm import causal_lm
from fedveil.token_losses import IGNORED, next_token_loss
from fedveil.tree import Params, State


def linear() -> Task:
    return Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double())


def examples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (count,), generator=generator)


def test_a_classifier_is_scored_over_all_batches_and_by_class() -> None:
    task, (x, y) = linear(), examples(2500)
    w = task.init(0)
    scores = x @ w["1.weight"].T + w["1.bias"]
    right = scores.argmax(1) == y
    found = evaluate(task, w, x, y, classes=3)
    assert found.accuracy == float(right.double().mean())
    assert abs(found.loss - float(nn.functional.cross_entropy(scores, y))) < 1e-12
    assert found.per_class == [float(right[y == c].double().mean()) for c in (0, 1)] + [None]


def test_a_language_model_is_scored_on_the_tokens_that_count() -> None:
    task = Task(lambda: causal_lm((5,), 11, vocabulary=11, width=8), loss=next_token_loss)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 11, (7, 5), generator=generator)
    y = torch.randint(1, 11, (7, 5), generator=generator)
    y[:, -1] = IGNORED
    y[2, 1:] = IGNORED
    w = task.init(0)
    scores = torch.func.functional_call(task.module, w, (x,))
    counted = y != IGNORED
    found = evaluate(task, w, x, y)
    loss = float(nn.functional.cross_entropy(scores[counted], y[counted]))
    assert found.accuracy == float((scores.argmax(-1) == y)[counted].double().mean())
    assert abs(found.loss - loss) < 1e-5
    assert found.perplexity is not None
    assert abs(found.perplexity - float(torch.tensor(loss).exp())) < 1e-3


def test_clients_without_examples_have_no_accuracy() -> None:
    task, (x, y) = linear(), examples(6)
    clients = ArrayClients(x, y, [torch.arange(4), torch.arange(0), torch.arange(4, 6)])
    w = task.init(0)
    own = [evaluate(task, w, x[:4], y[:4]).accuracy, None, evaluate(task, w, x[4:], y[4:]).accuracy]
    assert evaluate_clients(task, w, clients, range(3)) == own


def test_a_cohorts_models_are_scored_one_by_one() -> None:
    task, test = linear(), examples(40)
    first, second = task.init(0), task.init(1)
    models = {name: torch.stack([leaf, second[name]]) for name, leaf in first.items()}
    found = evaluate_cohort(task, models, test)
    assert found is not None
    accuracies = [evaluate(task, w, *test).accuracy or 0.0 for w in (first, second)]
    assert (found.clients, found.test_accuracy) == (2, sum(accuracies) / 2)
    assert evaluate_cohort(task, None, test) is None


def test_personal_models_are_taken_from_all_over_the_federation() -> None:
    task, (x, y) = linear(), examples(50)
    asked: list[int] = []

    def personal(state: State) -> Params:
        asked.append(int(state["number"][0]))
        return {name: leaf.unsqueeze(0) for name, leaf in task.init(asked[-1]).items()}

    states = {client: {"number": torch.tensor(client)} for client in range(50)}
    clients = ArrayClients(x, y, list(torch.arange(50).split(1)))
    found = evaluate_personal(task, personal, states, (x, y), clients)
    assert asked == list(range(0, 50, 3))
    assert found is not None
    assert found.clients == 17
    on_test = [evaluate(task, task.init(k), x, y).accuracy or 0.0 for k in asked]
    on_own = [evaluate(task, task.init(k), x[k : k + 1], y[k : k + 1]).accuracy or 0.0 for k in asked]
    assert found.test_accuracy == sum(on_test) / 17
    assert found.own_accuracy == sum(on_own) / 17
