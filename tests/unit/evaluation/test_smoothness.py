"""Laplacian smoothness against the matrix form of its definition."""

from __future__ import annotations

import pytest
import torch

from fedveil.errors import InputError
from fedveil.evaluation.smoothness import laplacian_smoothness


@pytest.mark.parametrize("weighted", [False, True])
def test_shares_add_up_to_the_laplacian_form(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(6, 4, 5, generator=generator, dtype=torch.float64)
    graph = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    if weighted:
        graph = torch.rand(6, 6, generator=generator, dtype=torch.float64)
        graph = graph + graph.T
    laplacian = torch.diag(graph.sum(1)) - graph
    shares = laplacian_smoothness(stack, graph if weighted else None)
    assert shares.shape == (6, 4)
    for row in range(4):
        w = stack[:, row]
        expected = torch.trace(w.T @ laplacian @ w)
        torch.testing.assert_close(shares[:, row].sum(), expected, rtol=1e-10, atol=1e-12)


def test_one_odd_client_is_the_roughest() -> None:
    stack = torch.ones(5, 3, 4)
    stack[2, 1] = 3.0
    shares = laplacian_smoothness(stack)
    assert int(shares[:, 1].argmax()) == 2
    assert float(shares[:, 0].abs().max()) == 0


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="rows, columns"):
        laplacian_smoothness(torch.ones(3, 4))
    with pytest.raises(InputError, match="symmetric"):
        laplacian_smoothness(torch.ones(2, 3, 4), torch.tensor([[0.0, 1.0], [0.5, 0.0]]))
