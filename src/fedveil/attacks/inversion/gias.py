"""GIAS: gradient inversion with a generative prior, first in its latent space, then in its weights.

Jeon, Kim, Lee, Oh, Ok: Gradient Inversion with Generative Image Prior. NeurIPS 2021.

Deviations: the prior is a small autoencoder's decoder, trained here on public images with whitened codes, where
the paper takes a trained GAN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as record
from math import prod
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.inversion.inverting_gradients import Weight
from fedveil.attacks.inversion.labels import known_or_inferred
from fedveil.attacks.inversion.leakage import Restarts
from fedveil.attacks.inversion.matching import total_variation, upload_cosine
from fedveil.attacks.inversion.optimise import stacked_adam
from fedveil.attacks.inversion.restarts import Clock, Named, best_of, make_rows
from fedveil.attacks.registry import register_attack
from fedveil.attacks.view import Finding, ServerView, StepCallback
from fedveil.errors import InputError
from fedveil.lazy_torch import nn, torch
from fedveil.methods.fields import STRICT
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class Decoder:
    """Images from codes of mean 0 and variance 1; its weights may differ row by row."""

    module: nn.Module
    weights: Params
    latent: int
    error: float
    """The mean squared error on the public images, in units of their variance."""

    def images(self, codes: Tensor, weights: Params | None = None) -> Tensor:
        """`[N, B, ...]` from `codes [N, B, latent]`; `weights [N, ...]` are each row's own."""
        if weights is None:
            flat: Tensor = torch.func.functional_call(self.module, self.weights, (codes.flatten(0, 1),))
            return flat.reshape(*codes.shape[:2], *flat.shape[1:])
        made: Tensor = torch.func.vmap(lambda w, z: torch.func.functional_call(self.module, w, (z,)))(
            weights, codes
        )
        return made


def train_decoder(
    public: Tensor,
    box: tuple[Tensor, Tensor] | None,
    rng: np.random.Generator,
    *,
    latent: int,
    hidden: int,
    steps: int,
) -> Decoder:
    """An autoencoder's decoder on public images `[n, ...]`, the same for the same stream."""
    from fedveil.attacks.inversion.pixel_range import PixelRange

    shape = tuple(public.shape[1:])
    size = prod(shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(size, hidden),
            nn.ReLU(),
            nn.Linear(hidden, latent),
            nn.BatchNorm1d(latent, affine=False),
        )
        decoder = nn.Sequential(
            nn.Linear(latent, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, size),
            PixelRange(shape, box),
        )
    optimiser = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = public[torch.from_numpy(rng.integers(0, len(public), 64))]
        codes = encoder(batch)
        noise = 0.1 * torch.from_numpy(rng.standard_normal(tuple(codes.shape))).to(codes)
        loss = (decoder(codes + noise) - batch).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    decoder = decoder.eval().requires_grad_(False)
    weights = {name: leaf.detach() for name, leaf in decoder.named_parameters()}
    return Decoder(decoder, weights, latent, float(loss.detach() / public.var()))


@register_attack(
    "gias", "searches the latent space of a decoder trained on public images, then the decoder's weights"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GIAS(Named):
    latent_steps: Annotated[int, Field(ge=1, description="steps in the latent space")] = 800
    weight_steps: Annotated[int, Field(ge=0, description="steps in the decoder's weights")] = 800
    restarts: Restarts = 4
    latent: Annotated[int, Field(ge=1)] = 24
    """Dimensions of the decoder's latent space."""
    hidden: Annotated[int, Field(ge=1)] = 128
    """Width of the decoder's hidden layers."""
    decoder_steps: Annotated[int, Field(ge=1)] = 1500
    """Training steps of the decoder on public images."""
    latent_lr: Annotated[float, Field(gt=0)] = 0.05
    """Step size in the latent space."""
    weight_lr: Annotated[float, Field(gt=0)] = 2e-3
    """Step size of the decoder's weights."""
    prior: Weight = 1e-5
    """Weight of the squared norm of the codes."""
    tv: Weight = 1e-4
    """Weight of total variation, which prefers smooth images."""

    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        public = _public_images(view)
        decoder = train_decoder(
            public, view.box, rng, latent=self.latent, hidden=self.hidden, steps=self.decoder_steps
        )
        labels, notes = known_or_inferred(view, rng)
        rows = make_rows(view, self.restarts, labels)
        distance = upload_cosine(view, rows.observed, rows.labels, rows.orders)
        image = len(view.input_shape) == 3
        total = self.latent_steps + self.weight_steps

        def loss_of(x: Tensor) -> Tensor:
            loss = distance(x)
            return loss + self.tv / view.unit * total_variation(x) if image and self.tv else loss

        def in_latent(variables: Sequence[Tensor]) -> Tensor:
            codes = variables[0]
            return loss_of(decoder.images(codes)) + self.prior * codes.square().flatten(1).sum(1)

        codes = rows.spread(rng, view.examples, self.latent)
        first = stacked_adam(
            [codes], in_latent, steps=self.latent_steps, lr=self.latent_lr, callback=_part(callback, 0, total)
        )
        codes, loss = first.variables[0], first.loss
        path = [(step, decoder.images(z)) for step, z in first.path]
        images = path[-1][1]
        if self.weight_steps:
            names = list(decoder.weights)

            def in_weights(variables: Sequence[Tensor]) -> Tensor:
                return loss_of(decoder.images(codes, dict(zip(names, variables, strict=True))))

            starts = [leaf.expand(rows.count, *leaf.shape) for leaf in decoder.weights.values()]
            second = stacked_adam(
                starts,
                in_weights,
                steps=self.weight_steps,
                lr=self.weight_lr,
                callback=_part(callback, self.latent_steps, total),
            )
            loss = second.loss
            images = decoder.images(codes, dict(zip(names, second.variables, strict=True)))
            path.append((total, images))
        note = f"decoder trained on {len(public)} public images, {decoder.error:.0%} of their variance lost"
        return best_of(
            self, rows, images, loss, rows.labels, path, steps=total, clock=clock, notes=(*notes, note)
        )


def _public_images(view: ServerView) -> Tensor:
    if view.public is None or len(view.public) < 2:
        raise InputError(
            "public", None, "gias learns its prior from public images and has none", "Give public images."
        )
    if view.public.shape[1:] != torch.Size(view.input_shape):
        raise InputError(
            "public",
            list(view.public.shape[1:]),
            f"the model reads images of shape {list(view.input_shape)}",
            "Give public images of that shape.",
        )
    return view.public


def _part(callback: StepCallback | None, done: int, total: int) -> StepCallback | None:
    if callback is None:
        return None
    return lambda step, _steps, loss: callback(done + step, total, loss)
