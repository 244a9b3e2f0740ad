"""The similarity of the clients' parameters: the Laplacian smoothness of FedCEO's Figure 1.

With a graph of weights A between clients and its Laplacian L, a stack W is smooth where
`tr(W^T L W) = 1/2 sum_ij A_ij |W_i - W_j|^2` is small. Here every two clients are neighbours of weight 1/K, and the
sum is split over the clients and the rows (classes) it comes from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.errors import InputError


def laplacian_smoothness(stack: Tensor) -> Tensor:
    """Client k's share of `tr(W^T L W)` for each row, `[K, rows]`, of a stack `[K, rows, columns]`.

    Smaller is smoother; equal clients give zeros. Its sum is `tr(W^T L W)`.
    """
    if stack.dim() != 3 or 0 in stack.shape:
        raise InputError(
            "stack",
            tuple(stack.shape),
            "is not a stack of matrices",
            "Give [K, rows, columns], such as a last layer.",
        )
    clients = stack.shape[0]
    rows = stack.transpose(0, 1)  # [rows, K, columns]
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()  # [rows, K, K]
    share: Tensor = 0.5 * (distances * (1 / clients)).sum(2).T
    return share
