"""Linear networks as plain `nn.Sequential`, whose layers the stacked kernel recognises.

MLP-2 is the two-layer network of FedCEO (ICML 2025, appendix C.1); its softmax is part of the loss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from fedveil.lazy_torch import nn
from fedveil.models.shapes import check_count, check_rate, check_shape


def mlp_2(
    input_shape: Sequence[int], classes: int, *, hidden: int = 64, dropout: float = 0.5, bias: bool = False
) -> nn.Sequential:
    """Flatten, Linear(d, hidden), Dropout, ReLU, Linear(hidden, classes)."""
    inputs = prod(check_shape(input_shape))
    check_count("hidden", hidden)
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            flatten=nn.Flatten(),
            hidden=nn.Linear(inputs, hidden, bias=bias),
            dropout=nn.Dropout(check_rate(dropout)),
            relu=nn.ReLU(),
            output=nn.Linear(hidden, classes, bias=bias),
        )
    )


def logistic_regression(
    input_shape: Sequence[int], classes: int, *, bias: bool = True, zero: bool = False
) -> nn.Sequential:
    """Flatten, Linear(d, classes). `zero` initialises with zeros, so noisy steps need not undo a random start."""
    inputs = prod(check_shape(input_shape))
    output = nn.Linear(inputs, classes, bias=bias)
    if zero:
        for parameter in output.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(OrderedDict[str, nn.Module](flatten=nn.Flatten(), output=output))
