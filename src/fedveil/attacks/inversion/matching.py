"""The distance of candidates' gradients from the observed gradient, for many candidates at once.

N candidates are rows of one stack, as clients are. The model is the same for all, so convolutions process one batch of
N * B images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fedveil.attacks.view import ServerView
from fedveil.lazy_torch import functional, nn, torch
from fedveil.methods.disclosure import Adaptation
from fedveil.task import Task, cross_entropy
from fedveil.tree import Params, flat_rows, flatten

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.attacks.inversion.closed_form import NetworkCosine
    from fedveil.attacks.inversion.linear_matching import LinearMatching
    from fedveil.training.second_order import Network

Distance = Callable[[Params], "Tensor"]
UploadDistance = Callable[["Tensor"], "Tensor"]
WithGradient = Callable[["Tensor"], tuple["Tensor", "Tensor"]]
_WIDE = 20_000  # weights of convolutions above which grouped products are slower than one row after another
_NETWORKS: WeakKeyDictionary[Task, Network | None] = WeakKeyDictionary()


def candidate_gradients(view: ServerView, x: Tensor, y: Tensor, orders: Tensor | None = None) -> Params:
    """The upload of a client with `x [N, B, ...]`, `[N, ...]`, differentiable in `x` and in soft labels.

    `y` is `[N, B]` classes or `[N, B, C]` probabilities. Local training is repeated with the candidates, batch by
    batch in the order of `orders [N, passes, B]`, or in their own order: the client's order is unknown.
    """
    size = _rows_at_once(view.task.module)
    drift = None  # rows of one upload are adjacent
    if view.drift is not None:
        each = x.shape[0] // view.targets
        drift = {name: leaf.repeat_interleave(each, dim=0) for name, leaf in view.drift.items()}
    parts = [
        _sent(
            view,
            x[rows],
            y[rows],
            None if orders is None else orders[rows],
            None if drift is None else {name: leaf[rows] for name, leaf in drift.items()},
        )
        for rows in (slice(start, start + size) for start in range(0, x.shape[0], size))
    ]
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _sent(view: ServerView, x: Tensor, y: Tensor, orders: Tensor | None, drift: Params | None) -> Params:
    shared = {name: leaf.detach() for name, leaf in view.params.items()}
    local = view.local
    if local is None or (local.is_one_gradient(x.shape[1]) and drift is None):
        return _gradients(view, shared, x, y, own=False)
    w = {name: leaf.expand(x.shape[0], *leaf.shape) for name, leaf in shared.items()}
    start, velocity = w, {name: torch.zeros_like(leaf) for name, leaf in w.items()}
    batches = local.batches(x.shape[1])
    firsts = [0, *accumulate(batches)]
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    for step in range(local.count(x.shape[1])):
        number, place = divmod(step, len(batches))
        order = (
            torch.arange(x.shape[1], device=x.device).unsqueeze(0) if orders is None else orders[:, number]
        )
        batch = order[:, firsts[place] : firsts[place + 1]]
        g = _gradients(view, w, x[row, batch], y[row, batch], own=True)
        if drift is not None:
            g = {name: leaf + drift[name] for name, leaf in g.items()}
        if local.proximal:
            g = {name: leaf + local.proximal * (w[name] - start[name]) for name, leaf in g.items()}
        velocity = {
            name: local.momentum * velocity[name] + g[name] + local.weight_decay * w[name] for name in w
        }
        w = {name: leaf - local.lr * velocity[name] for name, leaf in w.items()}
    return {name: (start[name] - leaf) / local.lr for name, leaf in w.items()}


def _gradients(view: ServerView, w: Params, x: Tensor, y: Tensor, *, own: bool) -> Params:
    """The gradient of each row's mean loss; with `own` every row has its own model."""
    network = None if own else _closed_form(view.task)
    if network is not None:
        found = network.gradients(w, x, y)
        return {name: found[name] for name in w}
    module, example_loss = view.task.module, view.task.example_loss

    def loss(leaves: Params, xs: Tensor, ys: Tensor) -> Tensor:
        scores = torch.func.functional_call(module, leaves, (xs,))
        if ys.is_floating_point():
            return -(ys * functional.log_softmax(scores, dim=-1)).sum(-1).mean()
        return example_loss(scores, ys).mean()

    if x.shape[0] > 1:
        stacked: Params = torch.func.vmap(torch.func.grad(loss), in_dims=(0 if own else None, 0, 0))(w, x, y)
        return stacked
    leaves = {name: leaf[0] if own else leaf for name, leaf in w.items()}
    leaves = {name: leaf if leaf.requires_grad else leaf.requires_grad_() for name, leaf in leaves.items()}
    of_one = torch.autograd.grad(
        loss(leaves, x[0], y[0]), list(leaves.values()), create_graph=True, materialize_grads=True
    )
    return {name: g.unsqueeze(0) for name, g in zip(leaves, of_one, strict=True)}


def _closed_form(task: Task) -> Network | None:
    """The model as a network with closed-form second derivatives; None if it is not supported."""
    if task not in _NETWORKS:
        from fedveil.training.second_order import Network

        plain = task.example_loss is cross_entropy and task.text is None
        _NETWORKS[task] = Network.recognise(task.module) if plain else None
    return _NETWORKS[task]


def _rows_at_once(module: nn.Module) -> int:
    wide = sum(
        layer.weight.numel()
        for layer in module.modules()
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    )
    return 1 if wide > _WIDE else 64


def upload_cosine(
    view: ServerView, observed: Params, labels: Tensor, orders: Tensor | None
) -> UploadDistance:
    """`cosine_distance` of what clients with `x [N, B, ...]` and `labels [N, B]` send, `[N]`.

    `observed` leaves are `[N, ...]`; `orders` as in `candidate_gradients`.
    """
    closed = _without_a_graph(view, observed, labels)
    if closed is not None:
        return closed
    distance = cosine_distance(observed, view.adaptation)
    return lambda x: distance(candidate_gradients(view, x, labels, orders))


def closed_gradient(distance: UploadDistance) -> WithGradient | None:
    """The distance together with its gradient, if it is known without autograd."""
    from fedveil.attacks.inversion.closed_form import NetworkCosine
    from fedveil.attacks.inversion.linear_matching import LinearMatching

    return distance.with_gradient if isinstance(distance, (LinearMatching, NetworkCosine)) else None


def _without_a_graph(
    view: ServerView, observed: Params, labels: Tensor
) -> LinearMatching | NetworkCosine | None:
    """The comparison of single gradients of a network with known derivatives; None for everything else."""
    from fedveil.attacks.inversion.closed_form import NetworkCosine

    local = view.local
    single = local is None or (local.is_one_gradient(view.examples) and view.drift is None)
    network = _closed_form(view.task)
    if network is None or not single or view.adaptation.kind != "none":
        return None
    if set(network.names) != observed.keys() or labels.shape[0] > _rows_at_once(view.task.module):
        return None
    linear = _linear_matching(view, observed, labels)
    return NetworkCosine(network, view.params, observed, labels) if linear is None else linear


def _linear_matching(view: ServerView, observed: Params, labels: Tensor) -> LinearMatching | None:
    """The comparison without gradients, of a linear network and few examples."""
    from fedveil.attacks.inversion.linear_matching import LinearMatching, linear_layers

    layers = linear_layers(view.task.module, view.input_shape)
    if layers is None:
        return None
    weights = [view.params[layer.names[0]] for layer in layers]
    inner = labels.shape[1] * sum(sum(weight.shape) for weight in weights)
    if inner > sum(weight.numel() for weight in weights):  # then gradients are smaller than inner products
        return None
    return LinearMatching(layers, view.params, observed, labels)


def cosine_distance(observed: Params, adaptation: Adaptation) -> Distance:
    """`1 - cos(candidate, observed)` of each row, over all parameters as one vector."""
    from fedveil.attacks.inversion.closed_form import Cosine

    change, weights = _adapted(observed, adaptation)
    if adaptation.kind == "sign":
        observed = {name: leaf.sign() for name, leaf in observed.items()}
    counts = flatten({name: weights[name] for name in observed})
    wanted = flatten(observed) * counts
    length = _norm([wanted])
    plain = bool((counts == 1).all())

    def distance(candidate: Params) -> Tensor:
        seen = flatten({name: change(candidate[name]) for name in observed})
        seen = seen if plain else seen * counts
        distances: Tensor = Cosine.apply(seen, wanted, length)  # type: ignore[no-untyped-call]
        return distances

    return distance


def layer_cosine_distance(observed: Params, adaptation: Adaptation) -> Distance:
    """One minus the mean over layers of `cos(candidate, observed)`, of each row.

    A layer's weight is the share of it that can be compared: zero if it is zero or dominated by noise.
    """
    change, weights = _adapted(observed, adaptation)
    if adaptation.kind == "sign":
        observed = {name: leaf.sign() for name, leaf in observed.items()}
    # Otherwise a layer's weights are all alike and cancel in its cosine.
    picks = adaptation.kind in ("mask", "small")
    wanted = {name: leaf * weights[name] if picks else leaf for name, leaf in observed.items()}
    lengths = {name: _norm([leaf]) for name, leaf in wanted.items()}
    shares = {
        name: flat_rows(weights[name]).mean(1) * flat_rows(leaf).any(1) for name, leaf in wanted.items()
    }
    total = torch.stack(list(shares.values())).sum(0).clamp(min=1e-30)

    def distance(candidate: Params) -> Tensor:
        similar = []
        for name, share in shares.items():
            seen = change(candidate[name])
            seen = seen * weights[name] if picks else seen
            product = flat_rows(seen * wanted[name]).sum(1)
            similar.append(share * product / (_norm([seen]) * lengths[name]).clamp(min=1e-30))
        return 1 - torch.stack(similar).sum(0) / total

    return distance


def squared_distance(observed: Params, adaptation: Adaptation, clip: float | None = None) -> Distance:
    """`|candidate - observed|^2` of each row; candidates are clipped to the norm `clip`, as the observed gradient was.

    If coordinates were zeroed, the remaining ones are clipped.
    """
    change, weights = _adapted(observed, adaptation)
    kept = weights if adaptation.kind == "mask" else {name: torch.ones(()) for name in weights}
    unit = min(1.0, clip or 1.0)  # the step length depends on the loss, which a small clip would make tiny
    if adaptation.kind == "sign":
        observed = {name: leaf.sign() for name, leaf in observed.items()}

    def distance(candidate: Params) -> Tensor:
        if clip is not None:
            norm = _norm([leaf * kept[name] for name, leaf in candidate.items()])
            cut = (clip / norm).clamp(max=1)
            candidate = {
                name: leaf * cut.reshape(-1, *([1] * (leaf.dim() - 1))) for name, leaf in candidate.items()
            }
        parts = [
            flat_rows((change(candidate[name]) - leaf) * weights[name]).square().sum(1)
            for name, leaf in observed.items()
        ]
        return torch.stack(parts).sum(0) / unit**2

    return distance


def _norm(leaves: Sequence[Tensor]) -> Tensor:
    return torch.stack([flat_rows(leaf).square().sum(1) for leaf in leaves]).sum(0).clamp(min=1e-30).sqrt()


def _adapted(observed: Params, adaptation: Adaptation) -> tuple[Callable[[Tensor], Tensor], Params]:
    """The transformation of candidates before the comparison, and the weight of each coordinate."""
    ones = {name: torch.ones_like(leaf) for name, leaf in observed.items()}
    if adaptation.kind == "mask":
        return _unchanged, {name: (leaf != 0).to(leaf.dtype) for name, leaf in observed.items()}
    if adaptation.kind == "small":
        return _unchanged, {
            name: (leaf.abs() <= adaptation.limit).to(leaf.dtype) for name, leaf in observed.items()
        }
    if adaptation.kind == "sign":
        return _soft_sign, ones
    if adaptation.kind == "noise":
        trust = _trust(observed, adaptation.noise)
        return _unchanged, {name: one * trust[name] for name, one in ones.items()}
    return _unchanged, ones


def _unchanged(leaf: Tensor) -> Tensor:
    return leaf


def _soft_sign(leaf: Tensor) -> Tensor:
    """`g / (|g| + mean |g|)`: a differentiable approximation of the sign."""
    size = flat_rows(leaf.detach().abs()).mean(1).reshape(-1, *([1] * (leaf.dim() - 1)))
    return leaf / (leaf.abs() + size + 1e-30)


def _trust(observed: Params, noise: float) -> Params:
    """The share of each layer's energy that is not noise, for each row, in units of the row's best layer.

    If noise dominates every layer, all layers have equal weights.
    """
    shares = {
        name: (1 - noise**2 / flat_rows(leaf).square().mean(1).clamp(min=1e-30)).clamp(min=0)
        for name, leaf in observed.items()
    }
    best = torch.stack(list(shares.values())).amax(0)
    relative = {
        name: torch.where(best > 0, share / best.clamp(min=1e-30), 1.0) for name, share in shares.items()
    }
    return {name: share.reshape(-1, *([1] * (observed[name].dim() - 1))) for name, share in relative.items()}


def total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels of each row, vertical plus horizontal."""
    from fedveil.attacks.inversion.closed_form import Variation

    variation: Tensor = Variation.apply(x)  # type: ignore[no-untyped-call]
    return variation
