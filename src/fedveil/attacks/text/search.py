"""The search for texts: free positions of candidates, their distance from an upload, and their decoding to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedveil.attacks.inversion.labels import known_or_inferred
from fedveil.attacks.inversion.matching import Distance, layer_cosine_distance
from fedveil.attacks.inversion.restarts import repeat
from fedveil.attacks.text.leak import TokenLeak, allowed_tokens, leaked_tokens
from fedveil.attacks.text.matching import predicts_tokens, rows_at_once, text_gradients, text_model
from fedveil.attacks.text.moves import Change, reorder, substitute
from fedveil.attacks.text.priors import LanguagePrior
from fedveil.attacks.view import UNKNOWN, ServerView
from fedveil.lazy_torch import functional, torch
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

_SHARP = 20.0  # sharpness of the softmax that assigns tokens to an embedding, if targets are derived from candidates
_CHOICES = 64  # if more tokens leaked, each position is restricted to the nearest few
_NEAREST = 8


@dataclass
class Search:
    """Rows t*R .. t*R+R-1 belong to upload t. Texts are cut to the longest; `free [N, B, L]` are unknown positions."""

    view: ServerView
    restarts: int
    prior: LanguagePrior
    prior_weight: float
    embeddings: Tensor
    leaks: tuple[TokenLeak, ...]
    allowed: Tensor
    known: Tensor
    labels: Tensor | None
    distances: list[Distance]
    stacked: Distance
    surprises: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pad = text_model(self.view.task).pad
        self.free = self.known == UNKNOWN
        self.padding = self.known == self.pad
        self.fixed = functional.embedding(self.known.clamp(min=0), self.embeddings)
        self.unit = functional.normalize(self.embeddings, dim=1)
        self.mean_norm = self.embeddings[self.allowed.any(0)].norm(dim=1).mean()

    @property
    def count(self) -> int:
        return int(self.known.shape[0])

    def per_target(self, values: Tensor) -> Tensor:
        """`[N]` as `[T, R]`."""
        return values.reshape(self.view.targets, self.restarts)

    def padded(self, tokens: Tensor) -> Tensor:
        """Texts `[.., B, L]` padded to their original width."""
        assert self.view.text is not None
        return functional.pad(tokens, (0, self.view.text.known.shape[2] - tokens.shape[-1]), value=self.pad)

    # From embeddings to distances

    def whole(self, x: Tensor, row: int | None = None) -> Tensor:
        """The embeddings with known tokens filled in."""
        free, fixed = (self.free, self.fixed) if row is None else (self.free[row], self.fixed[row])
        return torch.where(free.unsqueeze(-1), x, fixed)

    def distance(self, x: Tensor) -> Tensor:
        """The distances of the gradients of embeddings `[N, B, L, E]` from the uploads, `[N]`; differentiable."""
        embedded = self.whole(x)
        return self.stacked(text_gradients(self.view, self.padding, embedded, self._targets(embedded)))

    def norm_gap(self, x: Tensor) -> Tensor:
        """LAMP's prior: the squared difference of the mean norm from that of tokens, `[N]`."""
        norms = x.square().sum(-1).clamp(min=1e-12).sqrt() * self.free
        mean = norms.flatten(1).sum(1) / self.free.flatten(1).sum(1).clamp(min=1)
        gap: Tensor = mean - self.mean_norm
        return gap.square()

    def _targets(self, embedded: Tensor, row: int | None = None, tokens: Tensor | None = None) -> Tensor:
        if self.labels is not None:
            return self.labels if row is None else self.labels[row].expand(embedded.shape[0], -1)
        padding = self.padding if row is None else self.padding[row].expand(embedded.shape[:3])
        if tokens is not None:
            likely = functional.one_hot(tokens, len(self.embeddings)).to(embedded.dtype)
        else:
            allowed = self.allowed if row is None else self.allowed[row].expand(embedded.shape[0], -1)
            likely = self._likely(embedded, allowed)
            known = self.known if row is None else self.known[row].expand(embedded.shape[:3])
            certain = functional.one_hot(known.clamp(min=0), len(self.embeddings)).to(embedded.dtype)
            likely = torch.where((known == UNKNOWN).unsqueeze(-1), likely, certain)
        # The target of a position is the next token; padding is not a target.
        following = torch.cat([likely[:, :, 1:], torch.zeros_like(likely[:, :, :1])], dim=2)
        ended = torch.cat([padding[:, :, 1:], torch.ones_like(padding[:, :, :1])], dim=2)
        return following * (~ended).unsqueeze(-1)

    def _likely(self, embedded: Tensor, allowed: Tensor) -> Tensor:
        near = functional.normalize(embedded, dim=-1) @ self.unit.T
        return torch.softmax(_SHARP * near.masked_fill(~allowed[:, None, None], -torch.inf), dim=-1)

    def _row_distances(self, row: int, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The distances of many candidates `[C, B, L, E]` for one row, `[C]`."""
        size = rows_at_once(self.view)
        compare = self.distances[row // self.restarts]
        parts = []
        with torch.no_grad():
            for start in range(0, len(x), size):
                embedded = self.whole(x[start : start + size], row)
                some = None if tokens is None else tokens[start : start + size]
                padding = self.padding[row].expand(embedded.shape[:3])
                targets = self._targets(embedded, row, some)
                parts.append(compare(text_gradients(self.view, padding, embedded, targets)))
        return torch.cat(parts)

    # From embeddings to tokens

    def decode(self, x: Tensor) -> Tensor:
        """The nearest candidate token by cosine at each position `[N, B, L]`, and known tokens at theirs.

        A leaked token occurs, so each gets its best position; the remaining positions choose among all candidates.
        """
        rows = [self._decode(row, x[row : row + 1]) for row in range(self.count)]
        return torch.cat(rows)

    def _decode(self, row: int, x: Tensor) -> Tensor:
        from scipy.optimize import linear_sum_assignment

        choice = self.allowed[row].nonzero()[:, 0]
        near = functional.normalize(x[0][self.free[row]].detach(), dim=-1) @ self.unit[choice].T
        picked = near.argmax(-1)
        if self.leaks[row // self.restarts].tokens:
            tokens, places = linear_sum_assignment(near.T.double().nan_to_num(), maximize=True)
            picked[torch.from_numpy(places)] = torch.from_numpy(tokens)
        written = self.known[row].clone()
        written[self.free[row]] = choice[picked]
        return written.unsqueeze(0)

    def embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embeddings)

    def token_distance(self, tokens: Tensor) -> Tensor:
        """The distances of texts `[N, B, L]`, `[N]`."""
        return torch.cat(
            [
                self._row_distances(row, self.embed(tokens[row : row + 1]), tokens[row : row + 1])
                for row in range(self.count)
            ]
        )

    def token_scores(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Distance plus weighted surprise of texts `[N, B, L]`, and the distance alone.

        A nat of surprise has the weight `prior_weight` times the distance of the best restart, so the prior has more
        influence the worse the gradient is explained.
        """
        distance = self.token_distance(tokens)
        weight = self.prior_weight * self.per_target(distance).amin(1).repeat_interleave(self.restarts)
        return distance + weight * self.surprise(tokens).to(distance), distance

    def surprise(self, tokens: Tensor) -> Tensor:
        """The prior's mean surprise at the texts of each row, `[N]`; each distinct text is scored once."""
        texts = [[self._text(text) for text in batch] for batch in tokens.tolist()]
        new = list({text for batch in texts for text in batch if text not in self.surprises})
        if new:
            self.surprises.update(zip(new, self.prior.surprise(new), strict=True))
        return torch.tensor([np.mean([self.surprises[text] for text in batch]) for batch in texts])

    def _text(self, ids: Sequence[int]) -> tuple[int, ...]:
        assert self.view.text is not None
        hidden = {self.pad, *self.view.text.special}
        return tuple(token for token in ids if token not in hidden)

    # Starts and discrete changes

    def best_start(self, starts: int, rng: np.random.Generator) -> Tensor:
        """The start with the smallest distance for each row: random leaked tokens, or Gaussian if none leaked."""
        chosen = []
        for row in range(self.count):
            x = torch.cat([self._start(row, rng) for _ in range(starts)])
            chosen.append(x[self._row_distances(row, x).nan_to_num(nan=torch.inf).argmin()])
        return torch.stack(chosen)

    def _start(self, row: int, rng: np.random.Generator) -> Tensor:
        shape = (1, *self.fixed.shape[1:])
        leak = self.leaks[row // self.restarts]
        if not leak.tokens:
            noise = torch.from_numpy(rng.standard_normal(shape)).to(self.embeddings)
            start: Tensor = noise * (self.mean_norm / shape[-1] ** 0.5)
            return start
        places = self.free[row].nonzero()
        named = rng.permutation(leak.tokens)[: len(places)]
        rest = rng.choice(leak.tokens, len(places) - len(named))
        tokens = self.known[row].clamp(min=0).clone()
        tokens[places[:, 0], places[:, 1]] = torch.from_numpy(rng.permutation(np.concatenate([named, rest])))
        return self.embed(tokens).unsqueeze(0)

    def improve(self, x: Tensor, count: int, shortlist: int, rng: np.random.Generator) -> Tensor:
        """Each row `[B, L, E]` after its best discrete change, or unchanged if none is better."""
        return torch.stack(
            [self._improve_row(row, x[row], None, count, shortlist, rng)[0] for row in range(self.count)]
        )

    def improve_tokens(self, tokens: Tensor, count: int, shortlist: int, rng: np.random.Generator) -> Tensor:
        """The same for texts `[N, B, L]` of real tokens."""
        x = self.embed(tokens)
        return torch.stack(
            [
                self._improve_row(row, x[row], tokens[row], count, shortlist, rng)[1]
                for row in range(self.count)
            ]
        )

    def _improve_row(
        self,
        row: int,
        x: Tensor,
        tokens: Tensor | None,
        count: int,
        shortlist: int,
        rng: np.random.Generator,
    ) -> tuple[Tensor, Tensor]:
        now = self._decode(row, x.unsqueeze(0))[0] if tokens is None else tokens
        changes = self._changes(row, x, now, count, rng)
        places = self.free[row].nonzero()
        b, at = places[:, 0], places[:, 1]
        candidates = x.expand(len(changes) + 1, *x.shape).clone()
        written = now.expand(len(changes) + 1, *now.shape).clone()
        for i, change in enumerate(changes, 1):
            source = list(change.source)
            candidates[i, b, at] = x[b, at][source]
            written[i, b, at] = now[b, at][source]
            if change.place is not None and change.token is not None:
                place = places[change.place]
                candidates[i, place[0], place[1]] = self.embeddings[change.token]
                written[i, place[0], place[1]] = change.token
        distance = self._row_distances(row, candidates, None if tokens is None else written)
        distance = distance.nan_to_num(nan=torch.inf)
        near = distance.argsort()[:shortlist]
        # A change must improve on the unchanged row.
        near = torch.cat([torch.zeros(1, dtype=torch.long), near[near != 0]])
        weight = self.prior_weight * distance[0]
        total = distance[near] + weight * self.surprise(written[near]).to(distance)
        best = near[total.argmin()]
        return candidates[best], written[best]

    def _changes(
        self, row: int, x: Tensor, now: Tensor, count: int, rng: np.random.Generator
    ) -> list[Change]:
        places = self.free[row].nonzero()
        texts = [(places[:, 0] == b).nonzero()[:, 0].tolist() for b in range(now.shape[0])]
        content = now[self.free[row]].tolist()
        named = frozenset(self.leaks[row // self.restarts].tokens)
        choice = self.allowed[row].nonzero()[:, 0]
        if len(choice) <= _CHOICES:
            choices = [choice.tolist()] * len(content)
        else:
            near = functional.normalize(x[self.free[row]], dim=-1) @ self.unit[choice].T
            choices = choice[near.topk(_NEAREST, dim=-1).indices].tolist()
        made = []
        for _ in range(count):
            other = substitute(content, choices, named, rng) if rng.random() < 0.5 else None
            made.append(other or reorder(texts, len(content), rng))
        return made


def make_search(
    view: ServerView,
    restarts: int,
    prior: LanguagePrior,
    prior_weight: float,
    rng: np.random.Generator,
    *,
    use_leak: bool,
) -> Search:
    """The search for these uploads, with the tokens that leak from their embedding gradients."""
    assert view.text is not None
    model = text_model(view.task)
    known = view.text.known
    longest = int((known != model.pad).sum(2).max())
    known = known[:, :, :longest]
    ignored = sorted({model.pad, *known[known != UNKNOWN].tolist()})
    gradient = view.observed.get(model.table)
    leaks = tuple(
        leaked_tokens(None if gradient is None else gradient[t], int((known[t] == UNKNOWN).sum()), ignored)
        if use_leak
        else TokenLeak((), "the embedding gradient was not used")
        for t in range(view.targets)
    )
    allowed = torch.stack([allowed_tokens(leak, view.text.vocabulary, ignored) for leak in leaks])
    observed = {name: leaf for name, leaf in view.observed.items() if name != model.table}
    labels = None
    if not predicts_tokens(view.task):
        labels = repeat(known_or_inferred(view, rng)[0], restarts)
    stacked = {name: repeat(leaf, restarts) for name, leaf in observed.items()}
    table = view.params[model.table] if model.table in view.params else model.embedding_table()
    return Search(
        view,
        restarts,
        prior,
        prior_weight,
        table.detach(),
        leaks,
        repeat(allowed, restarts),
        repeat(known, restarts),
        labels,
        [layer_cosine_distance(_only(observed, t), view.adaptation) for t in range(view.targets)],
        layer_cosine_distance(stacked, view.adaptation),
    )


def _only(observed: Params, t: int) -> Params:
    return {name: leaf[t : t + 1] for name, leaf in observed.items()}
