"""Laplacian smoothness against the matrix form of its definition."""

from __future__ import annotations

import pytest
import torch

from fedveil.errors import InputError
from fedveil.evaluation.smoothness import laplacian_smoothness


def test_shares_add_up_to_the_laplacian_form() -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(6, 4, 5, generator=generator, dtype=torch.float64)
    graph = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    laplacian = torch.diag(graph.sum(1)) - graph
    shares = laplacian_smoothness(stack)
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
    with pytest.raises(InputError) as error:
        laplacian_smoothness(torch.ones(3, 4))
    assert error.value.field == "stack"
