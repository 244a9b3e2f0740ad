"""Sentences of a small grammar, and what a server would see of a client that holds some of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedveil.attacks.view import UNKNOWN, ServerView, TextKnowledge
from fedveil.data.vocabulary import WordVocabulary
from fedveil.models.registry import make_model
from fedveil.streams import named_stream
from fedveil.task import Batch, Task
from fedveil.token_losses import IGNORED, next_token_loss
from fedveil.tree import expand, with_axis

LENGTH = 12
DETERMINERS = ["the", "a", "this", "every", "no", "one"]
ADJECTIVES = ["red", "old", "quiet", "small", "green", "strange", "tall", "wet"]
NOUNS = ["dog", "girl", "book", "river", "house", "teacher", "train", "letter", "bird", "stone"]
VERBS = ["sees", "likes", "finds", "leaves", "paints", "follows", "hears", "wants"]
PLACES = ["near", "behind", "under", "without", "after", "beside"]
WORDS = [*DETERMINERS, *ADJECTIVES, *NOUNS, *VERBS, *PLACES]
VOCABULARY = WordVocabulary(WORDS, "the words of a small grammar")


def sentence(rng: np.random.Generator) -> str:
    """Six to ten words: somebody does something to something, somewhere."""

    def thing() -> list[str]:
        adjective = [str(rng.choice(ADJECTIVES))] if rng.random() < 0.5 else []
        return [str(rng.choice(DETERMINERS)), *adjective, str(rng.choice(NOUNS))]

    first = [*thing(), str(rng.choice(VERBS)), *thing()]
    return " ".join([*first, str(rng.choice(PLACES)), *thing()][:10])


def sentences(count: int, purpose: str) -> list[str]:
    rng = named_stream(0, "grammar", purpose)
    return [sentence(rng) for _ in range(count)]


def encode(texts: list[str]) -> torch.Tensor:
    rows = VOCABULARY.encode(texts)
    return torch.tensor([ids + [VOCABULARY.pad] * (LENGTH - len(ids)) for ids in rows])


def make_task(model: str = "transformer", **options: Any) -> Task:
    token = model == "causal-lm"

    def build() -> torch.nn.Module:
        classes = VOCABULARY.size if token else 2
        return make_model(
            model, (LENGTH,), classes, vocabulary=VOCABULARY.size, pad=VOCABULARY.pad, **options
        )

    return Task(build, loss=next_token_loss) if token else Task(build)


def text_view(
    targets: int, examples: int, *, model: str = "transformer", double: bool = False, **options: Any
) -> tuple[ServerView, torch.Tensor]:
    """The view of clients that hold sentences, and those sentences `[T, B, L]`."""
    task = make_task(model, **options)
    params = task.init(3)
    if double:
        params = {name: leaf.double() for name, leaf in params.items()}
    ids = encode(sentences(targets * examples, f"private {model}")).reshape(targets, examples, LENGTH)
    if model == "causal-lm":
        following = torch.cat([ids[..., 1:], torch.full_like(ids[..., :1], VOCABULARY.pad)], dim=-1)
        y = torch.where(following == VOCABULARY.pad, IGNORED, following)
        labels = None
    else:
        y = torch.arange(targets * examples).reshape(targets, examples) % 2
        labels = y
    observed = task.grad(expand(with_axis(params), targets), Batch(ids, y))
    public = encode(sentences(400, "public"))
    known = torch.where(ids == VOCABULARY.pad, VOCABULARY.pad, UNKNOWN)
    text = TextKnowledge(
        known,
        VOCABULARY.size,
        tuple(sorted(VOCABULARY.special())),
        VOCABULARY.decode,
        tuple(tuple(ids) for ids in VOCABULARY.encode(sentences(400, "public"))),
        "the same grammar",
    )
    view = ServerView(task, params, observed, examples, (LENGTH,), 2, labels=labels, public=public, text=text)
    return view, ids
