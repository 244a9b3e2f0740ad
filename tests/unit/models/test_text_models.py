"""Models of texts: against torch's own layers, blind to padding, stackable, and differentiable twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.refusals import refuses
from torch import Tensor, nn
from torch.nn import functional

from fedveil.models.causal_lm import CausalLM, causal_lm
from fedveil.models.frozen import freeze
from fedveil.models.lstm import LSTMClassifier, lstm
from fedveil.models.registry import make_model
from fedveil.models.transformer import Attention, transformer
from fedveil.task import Batch, Task, cross_entropy
from fedveil.text_model import TextModel
from fedveil.token_losses import IGNORED, next_token_loss, token_losses
from fedveil.tree import with_axis

WORDS, LENGTH = 30, 6
MODELS = ("lstm", "transformer", "causal-lm")


def build(name: str) -> TextModel:
    outputs = WORDS if name == "causal-lm" else 3
    size = {"hidden": 8, "embedding": 8, "layers": 2} if name == "lstm" else {"width": 8}
    model = make_model(name, (LENGTH,), outputs, seed=0, vocabulary=WORDS, **size)
    assert isinstance(model, TextModel)
    return model.double()


def texts(*shape: int) -> Tensor:
    """Texts of all lengths from 2 on, padded with zeros."""
    ids = torch.randint(1, WORDS, (*shape, LENGTH), generator=torch.Generator().manual_seed(3))
    lengths = 2 + torch.arange(ids[..., 0].numel()).reshape(shape) % (LENGTH - 1)
    return torch.where(torch.arange(LENGTH) < lengths.unsqueeze(-1), ids, 0)


def targets(name: str, ids: Tensor) -> Tensor:
    if name != "causal-lm":
        return ids.sum(-1) % 3
    after = functional.pad(ids[..., 1:], (0, 1))
    return torch.where(after == 0, IGNORED, after)


def task_of(name: str) -> Task:
    return Task(lambda: build(name), loss=next_token_loss if name == "causal-lm" else cross_entropy)


def test_lstm_is_torchs_lstm() -> None:
    model = lstm((LENGTH,), 3, vocabulary=WORDS, hidden=5, embedding=4, layers=2).double()
    theirs = nn.LSTM(4, 5, num_layers=2, batch_first=True).double()
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            getattr(theirs, f"weight_ih_l{number}").copy_(layer.weight_ih)
            getattr(theirs, f"weight_hh_l{number}").copy_(layer.weight_hh)
            getattr(theirs, f"bias_ih_l{number}").copy_(layer.bias)
            getattr(theirs, f"bias_hh_l{number}").zero_()
    ids = texts(7)
    packed = nn.utils.rnn.pack_padded_sequence(
        model.embed(ids), (ids != 0).sum(1), batch_first=True, enforce_sorted=False
    )
    _, (last, _) = theirs(packed)
    torch.testing.assert_close(model(ids), model.output(last[-1]), rtol=1e-12, atol=1e-12)


def test_an_lstm_can_read_the_mean_of_its_states() -> None:
    model = lstm((LENGTH,), 3, vocabulary=WORDS, pooling="mean").double()
    ids = texts(3)
    states = model.layers[0](model.embed(ids), ids != 0)
    means = [row[:count].mean(0) for row, count in zip(states, (ids != 0).sum(1).tolist(), strict=True)]
    torch.testing.assert_close(model(ids), model.output(torch.stack(means)))
    with refuses("pooling", value="first"):
        lstm((LENGTH,), 3, vocabulary=WORDS, pooling="first")  # type: ignore[arg-type]


def test_attention_is_torchs_attention() -> None:
    layer = Attention(8, 2).double()
    h = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1).expand(3, -1, -1)
    query, key, value = (
        part.reshape(3, 5, 2, 4).transpose(1, 2) for part in layer.query_key_value(h).chunk(3, dim=-1)
    )
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(layer(h, hidden), layer.output(expected.transpose(1, 2).reshape(3, 5, 8)))


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_from_embeddings_of_embed(name: str) -> None:
    model, ids = build(name), texts(4)
    embedded = model.embed(ids)
    torch.testing.assert_close(embedded, model.embedding_table()[ids])
    torch.testing.assert_close(model(ids), model.from_embeddings(embedded, ids))
    torch.testing.assert_close(model(ids, embedded=embedded + 1), model(ids, torch.ones_like(embedded)))


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name: str) -> None:
    model = build(name)
    short = texts(1)[:, :4].clamp(min=1)
    padded = functional.pad(short, (0, LENGTH - 4))
    plain, longer = model(short), model(padded)
    torch.testing.assert_close(longer[:, :4] if longer.dim() == 3 else longer, plain)
    moved = torch.zeros(1, LENGTH, 8, dtype=torch.float64)
    moved[:, 4:] = 5.0
    again = model(padded, moved)
    torch.testing.assert_close(again[:, :4] if again.dim() == 3 else again, plain)


def test_a_language_model_does_not_attend_to_later_tokens() -> None:
    model = build("causal-lm")
    ids = texts(1).clamp(min=1)
    other = ids.clone()
    other[:, 4:] = 1 + other[:, 4:] % (WORDS - 1)
    torch.testing.assert_close(model(ids)[:, :4], model(other)[:, :4])
    assert not torch.allclose(model(ids)[:, 4:], model(other)[:, 4:])


@pytest.mark.parametrize("name", MODELS)
def test_stacked_clients_equal_clients_one_by_one(name: str) -> None:
    task = task_of(name)
    generator = torch.Generator().manual_seed(5)
    w = {
        key: leaf + 0.1 * torch.randn(3, *leaf.shape[1:], dtype=leaf.dtype, generator=generator)
        for key, leaf in with_axis(task.init(0)).items()
    }
    ids = texts(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    offset = 0.1 * torch.randn(3, 4, LENGTH, 8, dtype=torch.float64, generator=generator)
    batch = task.perturbed(Batch(ids, targets(name, ids), mask), offset)
    together = task.loss(w, batch), task.grad(w, batch), task.input_grad(w, batch)
    task.stacks = False
    apart = task.loss(w, batch), task.grad(w, batch), task.input_grad(w, batch)
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-12)
    assert float(together[2][1, 2:].abs().max()) == 0  # examples that are padding
    assert float((together[2] * (ids == 0).unsqueeze(-1)).abs().max()) == 0  # tokens that are padding


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_in_the_input_space_is_that_of_finite_differences(name: str) -> None:
    task, ids = task_of(name), texts(1, 2)
    w = with_axis(task.init(0))
    batch = Batch(ids, targets(name, ids))
    found = task.input_grad(w, batch)
    direction = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(2))
    up, down = (float(task.loss(w, task.perturbed(batch, h * direction))) for h in (1e-5, -1e-5))
    assert float((found * direction).sum()) == pytest.approx((up - down) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_can_be_differentiated_once_more(name: str) -> None:
    model, ids = build(name), texts(2)
    embedded = model.embed(ids).detach().requires_grad_()
    loss = model.from_embeddings(embedded, ids).square().sum()
    used = [leaf for key, leaf in model.named_parameters() if key != model.table]
    first = torch.autograd.grad(loss, used, create_graph=True)
    (second,) = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), embedded)
    assert torch.isfinite(second).all()
    assert float(second.abs().max()) > 0


def test_offsets_live_where_tokens_are() -> None:
    task, ids = task_of("lstm"), texts(2, 3)
    offset = task.no_offset(ids, 3)
    assert offset.shape == (2, 3, LENGTH, 8)
    assert offset.dtype == torch.float64
    batch = Batch(ids, targets("lstm", ids))
    kept = task.within(batch, offset + 1)
    torch.testing.assert_close(kept.amax(-1), (ids != 0).double())
    twice = task.perturbed(task.perturbed(batch, kept), kept)
    assert twice.offset is not None
    torch.testing.assert_close(twice.offset, 2 * kept)


def test_the_loss_of_a_language_model_is_the_mean_over_its_own_targets() -> None:
    outputs = torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    y = torch.tensor([[1, 2, 3, 4], [5, 6, IGNORED, IGNORED]])
    expected = [
        functional.cross_entropy(outputs[0], y[0]),
        functional.cross_entropy(outputs[1, :2], y[1, :2]),
    ]
    torch.testing.assert_close(next_token_loss(outputs, y), torch.stack(expected))
    nothing = torch.full((1, 4), IGNORED)
    assert float(next_token_loss(outputs[:1], nothing)) == 0
    assert float(token_losses(outputs, y)[1, 2:].abs().max()) == 0


def test_what_is_frozen_is_no_parameter_but_still_used() -> None:
    plain = lstm((LENGTH,), 2, vocabulary=WORDS, embedding=8, hidden=8)
    before = plain(texts(2))
    freeze(plain, lambda name: name == plain.table)
    assert plain.table not in dict(plain.named_parameters())
    assert plain.table in dict(plain.named_buffers())
    torch.testing.assert_close(plain(texts(2)), before)
    frozen = lstm((LENGTH,), 2, vocabulary=WORDS, frozen_embedding=True)
    assert frozen.table not in dict(frozen.named_parameters())


def test_tying_halves_a_language_model() -> None:
    sizes = [
        sum(
            leaf.numel() for leaf in causal_lm((4,), WORDS, vocabulary=WORDS, width=8, tied=tied).parameters()
        )
        for tied in (True, False)
    ]
    assert sizes[1] - sizes[0] == WORDS * 8


def test_dropout_is_off_without_a_stream() -> None:
    model = lstm((LENGTH,), 2, vocabulary=WORDS, dropout=0.5)
    task = Task(lambda: model)
    w = with_axis(task.init(0))
    torch.testing.assert_close(task.outputs(w, texts(1, 3)), task.outputs(w, texts(1, 3)))


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: lstm((1, 28, 28), 2, vocabulary=WORDS), "input_shape"),
        (lambda: lstm((4,), 2, vocabulary=WORDS, pad=WORDS), "pad"),
        (lambda: lstm((4,), 2, vocabulary=0), "vocabulary"),
        (lambda: transformer((4,), 2, vocabulary=WORDS, width=6, heads=4), "heads"),
        (lambda: causal_lm((4,), 2, vocabulary=WORDS), "classes"),
    ],
)
def test_impossible_sizes_are_refused(make: Callable[[], object], field: str) -> None:
    with refuses(field):
        make()


def test_types() -> None:
    assert isinstance(build("lstm"), LSTMClassifier)
    assert isinstance(build("causal-lm"), CausalLM)
