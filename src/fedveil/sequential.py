"""Models that are plain sequences of layers with known derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedveil.lazy_torch import nn

Activation = Literal["relu", "sigmoid", "tanh"]


@dataclass(frozen=True)
class NamedLayer:
    module: nn.Module
    names: tuple[str, ...]
    """Of its parameters: the weight, then the bias if it has one."""


def sequential_layers(model: nn.Module) -> list[NamedLayer] | None:
    """The layers of this model in evaluation mode, or None if it is anything else than a `nn.Sequential` of them.

    Known are convolutions without groups, linear layers, activations and flatten; the last layer is linear.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return None
    layers: list[NamedLayer] = []
    for name, layer in model.named_children():
        if isinstance(layer, (nn.Dropout, nn.Identity)):
            continue
        known = type(layer) is nn.Linear or (type(layer) is nn.Conv2d and _is_plain(layer))
        flat = type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
        if not known and not flat and activation(layer) is None:
            return None
        layers.append(NamedLayer(layer, tuple(f"{name}.{part}" for part, _ in layer.named_parameters())))
    names = [name for layer in layers for name in layer.names]
    owned = {id(leaf) for name, leaf in model.named_parameters() if name in names}
    if {id(leaf) for leaf in model.parameters()} != owned or len(owned) != len(names):
        return None
    return layers if layers and type(layers[-1].module) is nn.Linear else None


def activation(layer: nn.Module) -> Activation | None:
    kinds: dict[type[nn.Module], Activation] = {nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}
    return kinds.get(type(layer))


def _is_plain(layer: nn.Conv2d) -> bool:
    zeros = layer.padding_mode == "zeros" and isinstance(layer.padding, tuple)
    return zeros and layer.groups == 1
