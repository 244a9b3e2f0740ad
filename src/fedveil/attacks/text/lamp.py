"""LAMP with cosine distance: texts from gradients, with a language prior.

Balunovic, Dimitrov, Jovanovic, Vechev: LAMP: Extracting text from gradients with language model priors. NeurIPS 2022.

Symbols: n_c = `swap_every` steps of Adam between `swaps` = n_d discrete candidates, alpha_lm = `prior_weight`,
alpha_reg = `norm_weight`. Known to the attacker, as in the paper: labels, the length of every text, and the positions
of special tokens. The targets of a language model are its own tokens; they are never known, but derived from the
candidate.

Deviations:
- Tokens disclosed by the gradient of the embedding table (see `leak`) restrict the candidates, and starts are drawn
  from them if they are few. A discrete change may also replace a token by another of these, not only change the order.
- The prior scores only the `shortlist` discrete candidates with the smallest distance.
- The prior's weight is a share of the distance, so it has less influence the better the gradient is explained.
- `polish` discrete candidates follow on the decoded tokens, which finds a text exactly if its gradient matches.
- The learning rate is in units of the embeddings' root mean square, 0.05 for BERT: 0.2 is the published 0.01 there.
- Uploads and restarts run as one stack. A model trained over several local steps is treated as one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.inversion.leakage import Restarts
from fedveil.attacks.inversion.restarts import Clock, Named
from fedveil.attacks.registry import register_attack
from fedveil.attacks.text.leak import TokenLeak
from fedveil.attacks.text.priors import PriorName, make_prior
from fedveil.attacks.text.search import Search, make_search
from fedveil.attacks.view import Finding, ServerView, StepCallback
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT

if TYPE_CHECKING:
    from torch import Tensor

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]

_BURN_IN = 0.1  # share of the steps before the first discrete change
_EXACT = 1e-5  # a smaller distance means that the text was found exactly
_DECAY_EVERY = 50
_TURN = 16  # discrete candidates of which the best is taken, at the end: small turns make more changes


@register_attack(
    "lamp", "texts: embeddings by cosine distance of layers, discrete swaps scored by a language prior"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lamp(Named):
    of_texts = True

    steps: Count = 2000
    """Steps of Adam on the embeddings."""
    restarts: Restarts = 1
    lr: Annotated[float, Field(gt=0)] = 0.2
    """Step size, in units of the embeddings' root mean square."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.89
    """Factor of the step size, every 50 steps."""
    norm_weight: Weight = 1.0
    """Weight of the distance of the embeddings' mean norm from that of the table."""
    starts: Count = 500
    """Number of random starts, of which the best is used."""
    swap_every: Count = 75
    """Steps between two rounds of discrete changes."""
    swaps: Count = 200
    """Number of discrete candidates in each round."""
    shortlist: Count = 16
    """Number of candidates with the smallest distance that the language prior scores."""
    polish: Annotated[int, Field(ge=0)] = 3000
    """Number of discrete candidates on the decoded tokens at the end."""
    prior: PriorName = "auto"
    """The language model that scores texts."""
    prior_weight: Weight = 0.3
    """Weight of the prior, as a share of the distance."""
    use_leak: bool = True
    """Whether tokens disclosed by the gradient of the embedding table restrict the candidates."""

    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        if view.text is None:
            raise InputError("attack", self.name, "the run's data is not text", "Use an attack on images.")
        prior = make_prior(
            self.prior if self.prior_weight else "none",
            view.text.public,
            view.text.vocabulary,
            view.text.decode,
            view.text.source,
        )
        search = make_search(view, self.restarts, prior, self.prior_weight, rng, use_leak=self.use_leak)
        x = search.best_start(self.starts, rng)
        path = [(0, search.decode(x))]
        x, step = self._optimise(search, x, path, rng, callback)
        tokens = search.decode(x)
        for _ in range(0, self.polish, _TURN):
            if self._found(search, tokens):
                break
            tokens = search.improve_tokens(tokens, _TURN, self.shortlist, rng)
        if self.polish:
            path.append((step, tokens))
        return self._finding(search, tokens, path, step, clock, prior.description)

    def _optimise(
        self,
        search: Search,
        x: Tensor,
        path: list[tuple[int, Tensor]],
        rng: np.random.Generator,
        callback: StepCallback | None,
    ) -> tuple[Tensor, int]:
        """Adam on the embeddings with discrete changes in between; ends early if all texts are found exactly."""
        unit = search.embeddings.square().mean().sqrt()
        variable = (x / unit).requires_grad_()
        optimiser = torch.optim.Adam([variable], lr=self.lr)
        first = int(_BURN_IN * self.steps)
        step = 0
        for step in range(1, self.steps + 1):
            optimiser.param_groups[0]["lr"] = self.lr * self.decay ** (step // _DECAY_EVERY)
            distance = search.distance(variable * unit)
            objective = distance + self.norm_weight * search.norm_gap(variable * unit)
            # Rows share no variables, so the gradient of the sum has each row's own gradient.
            variable.grad = torch.autograd.grad(objective.sum(), variable)[0]
            optimiser.step()
            if callback is not None:
                callback(step, self.steps, float(distance.detach().min()))
            if step >= first and step % self.swap_every == 0:
                with torch.no_grad():
                    better = search.improve(variable.detach() * unit, self.swaps, self.shortlist, rng)
                    variable.copy_(better / unit)
                tokens = search.decode(better)
                path.append((step, tokens))
                if self._found(search, tokens):
                    break
        return variable.detach() * unit, step

    def _found(self, search: Search, tokens: Tensor) -> bool:
        """Whether every upload has a restart whose tokens explain it."""
        return bool((search.per_target(search.token_distance(tokens)).amin(1) < _EXACT).all())

    def _finding(
        self,
        search: Search,
        tokens: Tensor,
        path: list[tuple[int, Tensor]],
        steps: int,
        clock: Clock,
        prior: str,
    ) -> Finding:
        total, distance = search.token_scores(tokens)
        view = search.view
        table = search.per_target(torch.nan_to_num(total, nan=torch.inf))
        pick = torch.arange(view.targets) * self.restarts + table.argmin(1)
        labels = view.labels if view.labels is not None else torch.zeros(view.targets, 0, dtype=torch.long)
        notes = ["lengths and places of special tokens known", f"language prior: {prior}"]
        notes.append("targets follow the candidate" if view.labels is None else "labels known")
        notes += [f"upload {t}: {_named(leak)}" for t, leak in enumerate(search.leaks)]
        if view.local is not None:
            notes.append("compared as if trained in one step")
        return Finding(
            self.name,
            search.padded(tokens[pick]),
            labels,
            search.per_target(distance),
            tuple((step, search.padded(found[pick])) for step, found in path),
            steps,
            clock.seconds,
            tuple(notes),
            search.leaks,
        )


def _named(leak: TokenLeak) -> str:
    return f"{len(leak.tokens)} tokens leaked ({leak.how})" if leak.tokens else leak.how
