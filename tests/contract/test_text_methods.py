"""Methods and defences on texts, through the same files as on images: they run, stack, and do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedveil import ArrayClients, Task, run
from fedveil.experiment.config import build_method, make_config, wrap_method
from fedveil.experiment.prepare import load_examples, prepare
from fedveil.experiment.run import run_seed
from fedveil.methods.fedem import FedEM, example_norm
from fedveil.methods.method import AnyMethod, At
from fedveil.models.registry import make_model
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams
from fedveil.task import cross_entropy
from fedveil.token_losses import IGNORED, next_token_loss
from fedveil.tree import with_axis
from tests.refusals import refuses

WORDS, LENGTH = 20, 5
SIZES = (3, 6, 4)
SIZE = {"width": 8, "layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "lstm": {"embedding": 8, "hidden": 6},
    "transformer": SIZE,
    "causal-lm": SIZE,
}
METHODS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "fedavg": ({"name": "fedavg", "batch_size": 2}, []),
    "udp-fedavg": ({"name": "udp-fedavg", "batch_size": 2, "noise_multiplier": 0.1}, []),
    "fedceo": ({"name": "fedceo", "batch_size": 2, "noise_multiplier": 0.1, "interval": 2}, []),
    "fedsgd": ({"name": "fedsgd", "batch_size": 2}, []),
    "fedem": ({"name": "fedem", "batch_size": 2, "rho_max": 2.0, "perturbation_steps": 2}, []),
    "dp-sgd": ({"name": "fedsgd", "batch_size": 2}, [{"name": "dp-sgd", "noise_multiplier": 0.1}]),
    "masking": ({"name": "fedsgd", "batch_size": 2}, [{"name": "gradient-masking"}]),
    "sign": ({"name": "fedsgd", "batch_size": 2}, [{"name": "sign-compression"}]),
    "pruning": ({"name": "fedsgd", "batch_size": 2}, [{"name": "gradient-pruning"}]),
    "gaussian": ({"name": "fedsgd", "batch_size": 2}, [{"name": "gradient-gaussian", "std": 0.01}]),
    "fedem+masking": (
        {"name": "fedem", "batch_size": 2, "perturbation_steps": 1},
        [{"name": "gradient-masking"}],
    ),
}


def method_of(name: str) -> AnyMethod:
    fields, wrap = METHODS[name]
    return wrap_method(build_method(fields), wrap)


def task_of(model: str) -> Task:
    outputs = WORDS if model == "causal-lm" else 2
    loss = next_token_loss if model == "causal-lm" else cross_entropy
    return Task(
        lambda: make_model(model, (LENGTH,), outputs, vocabulary=WORDS, **MODELS[model]).double(), loss=loss
    )


def texts(count: int, model: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    ids = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
    x = torch.where(torch.arange(LENGTH) < lengths, ids, 0)
    if model != "causal-lm":
        return x, (x.sum(1) % 2)
    after = torch.nn.functional.pad(x[:, 1:], (0, 1))
    return x, torch.where(after == 0, IGNORED, after)


def clients_of(model: str) -> ArrayClients:
    return ArrayClients.from_arrays([texts(n, model, seed) for seed, n in enumerate(SIZES)])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_every_method_runs_on_texts_and_stacked_equals_one_by_one(name: str, model: str) -> None:
    results = [
        run(
            task_of(model),
            clients_of(model),
            method_of(name),
            rounds=2,
            test=texts(6, model, 9),
            execution=execution,
            workers=1,
            noise="seeded",
        )
        for execution in ("stacked", "one-by-one")
    ]
    for leaf in results[0].model:
        torch.testing.assert_close(results[0].model[leaf], results[1].model[leaf], rtol=1e-7, atol=1e-9)
    before = task_of(model).init(0)
    assert any(not torch.equal(before[leaf], results[0].model[leaf]) for leaf in before)
    summary = results[0].summary
    assert ("perplexity" in summary) == (model == "causal-lm")
    assert ("mcc" in summary) == (model != "causal-lm")


@pytest.mark.parametrize("name", ["fedlap", "fedlap-dp", "feddm", "dsc", "psg"])
def test_methods_that_make_images_refuse_texts(name: str, tmp_path: Path) -> None:
    method, results = build_method({"name": name}), tmp_path / "run"
    with refuses("method.name"):
        run(task_of("lstm"), clients_of("lstm"), method, rounds=1, workers=1, results=results)
    assert not results.exists()


def test_fedem_perturbs_the_embeddings_of_tokens_within_its_radius() -> None:
    task, clients = task_of("lstm"), clients_of("lstm")
    method = FedEM(batch_size=3, rho_min=0.5, rho_max=1.0, perturbation_steps=2)
    data = clients.load([0])
    plan = Plan(3, 3, "all", 1, min(SIZES), max(SIZES))
    streams = ClientStreams(0, 1, (0,), 0)
    state = method.init_client(task, data, streams)
    assert state["delta"].shape == (
        1,
        4,
        LENGTH,
        8,
    )  # a last batch of one example is added to the one before it
    down = method.broadcast(At(plan, 1, 0), method.init_server(task.init(0), plan), [0])
    up, after = method.client_update(task, At(plan, 1, 0), down, data, state, streams)
    size = example_norm(after["delta"], "l2")
    assert float(size.min()) >= 0.5 - 1e-9
    assert float(size.max()) <= 1.0 + 1e-9
    order = streams.of_round("batches")[0].permutation(SIZES[0])
    padding = (data.x[0, order] == 0).unsqueeze(-1)
    assert bool(padding.any())
    assert float((after["delta"][0, : SIZES[0]] * padding).abs().max()) == 0
    assert up.gradient["output.weight"].abs().max() > 0


def test_fedem_without_a_radius_is_fedsgd_on_texts() -> None:
    fedem = build_method({"name": "fedem", "batch_size": 2, "rho_max": 0.0})
    models = [
        run(
            task_of("transformer"), clients_of("transformer"), method, rounds=2, workers=1, noise="seeded"
        ).model
        for method in (fedem, method_of("fedsgd"))
    ]
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=0)


def test_fedem_lowers_the_loss_on_what_it_shows() -> None:
    task, clients = task_of("transformer"), clients_of("transformer")
    batch = clients.load([1]).everything()
    w = with_axis(task.init(0))
    start = task.no_offset(batch.x, batch.y.shape[1])
    moved = start - 0.05 * task.input_grad(w, batch).sign()
    assert float(task.loss(w, task.perturbed(batch, moved))) < float(task.loss(w, batch))


def test_dp_sgd_without_noise_and_clip_is_fedsgd_on_texts() -> None:
    free = wrap_method(
        build_method({"name": "fedsgd", "batch_size": 2}),
        [{"name": "dp-sgd", "clip": 1e6, "noise_multiplier": 0.0}],
    )
    for model in MODELS:
        models = [
            run(task_of(model), clients_of(model), method, rounds=1, workers=1, noise="seeded").model
            for method in (free, method_of("fedsgd"))
        ]
        torch.testing.assert_close(models[0], models[1], rtol=1e-8, atol=1e-10)


def write_texts(folder: Path) -> tuple[Path, Path]:
    rows = [f"the {'good' if i % 2 else 'bad'} film number {i}\t{i % 2}" for i in range(40)]
    (folder / "films.tsv").write_text("\n".join(rows) + "\n")
    (folder / "plain.txt").write_text("\n".join(row.split("\t")[0] for row in rows) + "\n")
    return folder / "films.tsv", folder / "plain.txt"


def configuration(path: Path, model: str = "lstm", **changes: Any) -> dict[str, Any]:
    dataset = "text" if path.suffix == ".txt" else "labelled-text"
    task = {"dataset": dataset, "model": model, "data_options": {"path": str(path)}}
    task["model_options"] = MODELS.get(model, {})
    task |= {"text": {"length": 6, "size": 50}} | changes.pop("task", {})
    return {
        "task": task,
        "partition": {"clients": 3},
        "method": {"name": "fedavg"},
        "run": {"rounds": 1},
    } | changes


def test_a_text_run_records_its_vocabulary(tmp_path: Path) -> None:
    films, plain = write_texts(tmp_path)
    summary = run_seed(
        make_config(configuration(films, task={"text": {"length": 4, "size": 50}})),
        0,
        experiment="films",
        results=tmp_path / "results",
    ).summary
    assert summary["text"]["truncated"] == {"train": 32, "test": 8}
    assert "independent of all texts" in summary["text"]["vocabulary"]
    assert -1 <= summary["mcc"] <= 1
    found = run_seed(
        make_config(configuration(plain, "causal-lm", task={"text": {"length": 6, "vocabulary": "bytes"}})),
        0,
        experiment="plain",
        results=tmp_path / "results",
    ).summary
    assert found["perplexity"] == pytest.approx(torch.tensor(found["loss"]).exp().item(), rel=1e-5)
    assert len(found["partition"]) == 3


def test_a_configuration_of_images_keeps_its_identity() -> None:
    config = make_config({"task": {"dataset": "digits"}})
    assert "text" not in config.resolved()["task"]


@pytest.mark.parametrize(
    "changes, model, field",
    [
        ({"task": {"model": "mlp-2"}}, "lstm", "task.model"),
        ({"task": {"dataset": "digits", "data_options": {}}}, "lstm", "task.model"),
        ({"partition": {"kind": "dirichlet", "clients": 3}}, "causal-lm", "partition.kind"),
        ({}, "lstm-on-plain", "task.dataset"),
    ],
)
def test_impossible_combinations_are_refused(
    tmp_path: Path, changes: dict[str, Any], model: str, field: str
) -> None:
    films, plain = write_texts(tmp_path)
    path = plain if model in ("causal-lm", "lstm-on-plain") else films
    with refuses(field):
        prepare(make_config(configuration(path, model.removesuffix("-on-plain"), **changes)), 0)


def test_the_vocabulary_is_the_public_text_that_is_named(tmp_path: Path) -> None:
    films, plain = write_texts(tmp_path)
    text = {"length": 6, "vocabulary": "public", "path": str(plain), "size": 10}
    dataset = load_examples(make_config(configuration(films, task={"text": text})), None)
    assert dataset.tokens is not None
    assert dataset.tokens.vocabulary.size == 10
    assert "plain.txt" in dataset.tokens.vocabulary.made
