"""FedCEO's `restart = "own"`: after smoothing, a client starts from its own last noisy upload, as in the authors' code.

The authors' clients keep their weights; here they keep their upload, which carries noise. In the round after
smoothing the mean of the uploads contains that earlier upload again, so against everybody but the server both are
accounted for as separate releases: two uploads, each with the noise of one. The starts disclose who participated, so
participation is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch
from fedveil.methods.disclosure import Earlier
from fedveil.privacy.releases import Release
from fedveil.tree import Params, State, concatenate, expand, per_row

if TYPE_CHECKING:
    from torch import Tensor

_KNOWN = "known"
_LAST = "last."


def is_restart(round: int, interval: int) -> bool:
    """Whether this round follows a smoothing round."""
    return round > 1 and (round - 1) % interval == 0


def nothing_sent(like: Params, count: int) -> State:
    """The clients' state before their first participation."""
    last = {_LAST + name: leaf.new_zeros(count, *leaf.shape) for name, leaf in like.items()}
    return last | {_KNOWN: torch.zeros(count, dtype=torch.bool)}


def sent(upload: Params) -> State:
    """The clients' state after sending the noisy models `[K, ...]`."""
    count = next(iter(upload.values())).shape[0]
    return {_LAST + name: leaf for name, leaf in upload.items()} | {
        _KNOWN: torch.ones(count, dtype=torch.bool)
    }


def own_start(state: State, shared: Params) -> Params:
    """The last upload of each client `[K, ...]`; the shared model for those that have not participated before."""
    known: Tensor = state[_KNOWN]
    return {
        name: torch.where(per_row(known, leaf).bool(), state[_LAST + name].to(leaf), leaf)
        for name, leaf in shared.items()
    }


def earlier_start(earlier: Earlier, shared: Params) -> Params:
    """The same, as the server knows it from earlier uploads."""
    rounds = earlier()
    every = expand(shared, len(rounds))
    rows = [
        seen[-1][1].params if seen else {name: leaf[k : k + 1] for name, leaf in every.items()}
        for k, seen in enumerate(rounds)
    ]
    return concatenate(rows)


def releases(upload: Release, averaged: Release, interval: int) -> Sequence[Release]:
    """The releases of a run, given those of an upload and of a mean."""
    twice = replace(
        upload,
        what="the last upload of each client, from which it restarts, and the upload after it",
        visible_to=("observer", "client"),
        accesses=2,
    )
    if interval == 1:
        return upload, twice
    seen = replace(averaged, participation="seen")
    return (
        upload,
        replace(twice, except_every=interval, following=True),
        replace(seen, every=interval),
        replace(seen, except_every=interval, following=False),
    )
