"""T-tSVD and the tensor nuclear norm against oracles that share no code with them.

Two oracles: a NumPy complex SVD of all K slices, and block-circulant matrices, where the tensor nuclear norm
is an ordinary nuclear norm divided by K and no Fourier transform occurs at all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.errors import InputError
from fedveil.linalg import slice_singular_values, t_tsvd, tensor_nuclear_norm
from tests.refusals import refuses

Array = np.ndarray[Any, np.dtype[Any]]


def every_slice(stack: Array, threshold: float) -> Array:
    """Theorem 3.1 to the letter."""
    spectrum = np.fft.fft(stack.astype(np.float64), axis=0)
    out = np.zeros_like(spectrum)
    for j, matrix in enumerate(spectrum):
        left, sigma, right = np.linalg.svd(matrix, full_matrices=False)
        out[j] = (left * np.maximum(sigma - threshold, 0)) @ right
    back = np.fft.ifft(out, axis=0)
    assert np.abs(back.imag).max() <= 1e-12 * max(1.0, np.abs(stack).max())
    return np.asarray(back.real)


def soft_threshold(matrix: Array, threshold: float) -> Array:
    left, sigma, right = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray((left * np.maximum(sigma - threshold, 0)) @ right)


def block_circulant(stack: Array) -> Array:
    clients = stack.shape[0]
    return np.block([[stack[(i - j) % clients] for j in range(clients)] for i in range(clients)])


def fold(matrix: Array, shape: tuple[int, int, int]) -> Array:
    """The adjoint of `block_circulant`."""
    clients, d, h = shape
    blocks = matrix.reshape(clients, d, clients, h)
    out = np.zeros(shape)
    for i in range(clients):
        for j in range(clients):
            out[(i - j) % clients] += blocks[i, :, j]
    return out


def objective(stack: Array, noisy: Array, tau: float) -> float:
    nuclear = np.linalg.svd(block_circulant(stack), compute_uv=False).sum() / stack.shape[0]
    return float(tau * ((stack - noisy) ** 2).sum() + nuclear)


def solve_by_admm(noisy: Array, tau: float, rho: float = 1.0, steps: int = 3000) -> Array:
    """Minimise the objective by alternating directions over the block-circulant matrix."""
    shape = (noisy.shape[0], noisy.shape[1], noisy.shape[2])
    clients = shape[0]
    copy = block_circulant(noisy)
    dual = np.zeros_like(copy)
    stack = noisy
    for _ in range(steps):
        stack = (2 * tau * noisy + rho * fold(copy - dual, shape)) / (2 * tau + rho * clients)
        circulant = block_circulant(stack)
        copy = soft_threshold(circulant + dual, 1 / (clients * rho))
        dual = dual + circulant - copy
    return stack


def random_stack(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def relative(a: Tensor | Array, b: Array) -> float:
    a = np.asarray(a, dtype=np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))


@pytest.mark.parametrize("tau", [0.15, 0.5, 3.0])
@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 2, 6)])
def test_theorem_3_1_agrees_with_an_independent_solver(shape: tuple[int, int, int], tau: float) -> None:
    noisy = random_stack(*shape, seed=3)
    ours = t_tsvd(noisy, 1 / (2 * tau))
    assert relative(ours, solve_by_admm(noisy.numpy(), tau)) < 1e-5


@pytest.mark.parametrize("tau", [0.1, 0.4, 5.0])
def test_theorem_3_1_no_perturbation_lowers_the_objective(tau: float) -> None:
    noisy = random_stack(5, 6, 4, seed=7)
    ours = t_tsvd(noisy, 1 / (2 * tau)).numpy()
    best = objective(ours, noisy.numpy(), tau)
    generator = np.random.default_rng(1)
    directions = [generator.standard_normal(ours.shape) for _ in range(40)]
    directions += [noisy.numpy() - ours, ours, -ours]
    for direction in directions:
        for size in (1e-4, 1e-2, 1.0):
            assert objective(ours + size * direction, noisy.numpy(), tau) >= best - 1e-10


@pytest.mark.parametrize("shape", [(6, 8, 5), (5, 4, 9), (2, 3, 3)])
def test_proposition_3_2(shape: tuple[int, int, int]) -> None:
    """A threshold above slices 2..K leaves every client with the shrunken mean."""
    stack = 4.0 + random_stack(*shape, seed=11)
    spectrum = np.fft.fft(stack.numpy(), axis=0)
    sigma = np.linalg.svd(spectrum, compute_uv=False)
    threshold = 1.001 * float(sigma[1:].max())
    assert threshold < sigma[0].max()
    expected = soft_threshold(stack.numpy().mean(0), threshold / shape[0])
    for client in t_tsvd(stack, threshold):
        assert relative(client, expected) < 1e-9


def test_threshold_zero_is_the_identity_and_a_copy() -> None:
    stack = random_stack(4, 3, 2)
    out = t_tsvd(stack, 0.0)
    assert torch.equal(out, stack)
    assert out.data_ptr() != stack.data_ptr()


def test_one_client_is_matrix_soft_thresholding() -> None:
    stack = random_stack(1, 7, 4)
    assert relative(t_tsvd(stack, 0.8)[0], soft_threshold(stack[0].numpy(), 0.8)) < 1e-12


@pytest.mark.parametrize("threshold", [1e-7, 1e-4, 0.05, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("shape", [(10, 40, 12), (7, 12, 40), (8, 20, 20), (3, 1, 5), (4, 6, 1), (2, 90, 60)])
def test_exact_against_every_slice(shape: tuple[int, int, int], threshold: float) -> None:
    stack = random_stack(*shape, seed=5)
    plain = every_slice(stack.numpy(), threshold)
    assert relative(t_tsvd(stack, threshold), plain) < 1e-9
    single = stack.float()
    plain = every_slice(single.numpy(), threshold)
    assert relative(t_tsvd(single, threshold), plain) < 1e-4


@pytest.mark.parametrize("decades", [3, 8])
@pytest.mark.parametrize("position", [0.5, 0.9])
def test_exact_for_ill_conditioned_stacks(decades: int, position: float) -> None:
    """Singular values over many decades and a threshold among the small ones, where squaring loses digits."""
    generator = np.random.default_rng(2)
    left, _ = np.linalg.qr(generator.standard_normal((30, 16)))
    right, _ = np.linalg.qr(generator.standard_normal((16, 16)))
    base = (left * np.logspace(0, -decades, 16)) @ right
    stack = np.stack([(1 + 0.1 * k) * base for k in range(5)])
    threshold = 10.0 ** (-decades * position)
    plain = every_slice(stack, threshold)
    assert relative(t_tsvd(torch.from_numpy(stack), threshold), plain) < 1e-9
    assert relative(t_tsvd(torch.from_numpy(stack).float(), threshold), plain) < 1e-4


@pytest.mark.parametrize("share", [0.02, 0.05, 0.08, 0.3, 0.7])
def test_float32_is_right_relative_to_the_correction(share: float) -> None:
    """What is removed is right by itself, not only small against what stays."""
    stack = (random_stack(6, 60, 30, seed=9) + 1).float()
    threshold = share * float(slice_singular_values(stack)[0, 0])
    removed = stack.double().numpy() - every_slice(stack.numpy(), threshold)
    assert relative(stack.double() - t_tsvd(stack, threshold).double(), removed) < 1e-4


@pytest.mark.parametrize("dominant", [0.0, 0.5, 5.0, 50.0])
def test_float32_is_exact_for_small_thresholds(dominant: float) -> None:
    """Well conditioned slices take single precision, those that one direction dominates do not."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(120, 1, generator=generator) @ torch.randn(1, 40, generator=generator)
    stack = torch.randn(4, 120, 40, generator=generator) + dominant * shared
    for share in (1e-4, 1e-3, 4e-3, 1e-2, 3e-2):
        threshold = share * float(stack.norm())
        plain = every_slice(stack.double().numpy(), threshold)
        out = t_tsvd(stack, threshold).double()
        assert relative(out, plain) < 3e-5


def test_a_slice_just_below_the_threshold_vanishes_and_just_above_does_not() -> None:
    stack = random_stack(1, 12, 8, seed=4)
    largest = float(np.linalg.svd(stack[0].numpy(), compute_uv=False)[0])
    assert torch.count_nonzero(t_tsvd(stack, largest * (1 + 1e-9))) == 0
    remaining = t_tsvd(stack, largest * (1 - 1e-6))
    assert math.isclose(float(torch.linalg.matrix_norm(remaining[0], 2)), 1e-6 * largest, rel_tol=1e-4)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_special_stacks(dtype: torch.dtype, bound: float) -> None:
    zeros = torch.zeros(3, 4, 5, dtype=dtype)
    assert torch.equal(t_tsvd(zeros, 0.3), zeros)
    equal = random_stack(1, 6, 4, dtype=dtype).expand(5, 6, 4)
    assert relative(t_tsvd(equal, 2.0), every_slice(equal.numpy(), 2.0)) < bound
    thin = random_stack(5, 9, 1, dtype=dtype) @ random_stack(5, 1, 7, dtype=dtype, seed=1)
    for threshold in (1e-8, 0.5):
        assert relative(t_tsvd(thin, threshold), every_slice(thin.numpy(), threshold)) < bound
    scalar = torch.tensor([[[2.0]]], dtype=dtype)
    assert float(t_tsvd(scalar, 0.5)) == pytest.approx(1.5, rel=1e-6)
    assert torch.count_nonzero(t_tsvd(equal, math.inf)) == 0


@pytest.mark.parametrize("unit", [2.0**-500, 2.0**-40, 2.0**500])
def test_extreme_units_do_not_overflow(unit: float) -> None:
    stack = random_stack(4, 6, 5)
    expected = t_tsvd(stack, 0.7)
    torch.testing.assert_close(t_tsvd(stack * unit, 0.7 * unit) / unit, expected, rtol=1e-12, atol=1e-12)


def test_denormal_float32_values_stay_finite() -> None:
    stack = torch.full((3, 4, 4), 1e-42)
    out = t_tsvd(stack, 1e-43)
    assert torch.isfinite(out).all()
    assert float(out.max()) <= 1e-42


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 9),
    d=st.integers(1, 12),
    h=st.integers(1, 12),
    rank=st.integers(1, 12),
    share=st.floats(0.0, 1.2),
    seed=st.integers(0, 10_000),
)
def test_any_shape(clients: int, d: int, h: int, rank: int, share: float, seed: int) -> None:
    stack = random_stack(clients, d, rank, seed=seed) @ random_stack(clients, rank, h, seed=seed + 1)
    before = stack.clone()
    threshold = share * float(slice_singular_values(stack).max())
    out = t_tsvd(stack, threshold)
    assert torch.equal(stack, before)
    assert out.shape == stack.shape
    assert out.dtype == stack.dtype
    assert not out.is_complex()
    gap = np.linalg.norm(out.numpy() - every_slice(stack.numpy(), threshold))
    assert gap <= 1e-9 * np.linalg.norm(stack.numpy())


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    stack = random_stack(6, 96, 600, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = t_tsvd(stack, 3.0)
        torch.set_num_threads(2)
        two = t_tsvd(stack, 3.0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


def test_layouts_and_gradients_of_the_input_do_not_matter() -> None:
    stack = random_stack(4, 5, 6)
    turned = stack.permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    out = t_tsvd(turned, 0.9)
    assert not out.requires_grad
    torch.testing.assert_close(out, t_tsvd(stack, 0.9), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(1, 3, 4), (4, 5, 3), (5, 2, 2), (2, 1, 1)])
def test_nuclear_norm_is_that_of_the_block_circulant_matrix(shape: tuple[int, int, int]) -> None:
    stack = random_stack(*shape, seed=6)
    expected = np.linalg.svd(block_circulant(stack.numpy()), compute_uv=False).sum() / shape[0]
    assert float(tensor_nuclear_norm(stack)) == pytest.approx(expected, rel=1e-12)
    assert tensor_nuclear_norm(stack.float()).dtype == torch.float32


@pytest.mark.parametrize("clients", [1, 4, 5])
def test_slice_singular_values(clients: int) -> None:
    stack = random_stack(clients, 6, 4, seed=8)
    expected = np.linalg.svd(np.fft.fft(stack.numpy(), axis=0), compute_uv=False)
    values = slice_singular_values(stack).numpy()
    assert values.shape == (clients // 2 + 1, 4)
    np.testing.assert_allclose(values, expected[: clients // 2 + 1], rtol=1e-10)
    np.testing.assert_allclose(expected[1:], expected[1:][::-1], rtol=1e-10)  # conjugates


@pytest.mark.parametrize(
    "stack, threshold, field",
    [
        (torch.zeros(3, 4), 1.0, "stack"),
        (torch.zeros(0, 3, 4), 1.0, "stack"),
        (torch.zeros(2, 0, 4), 1.0, "stack"),
        (torch.zeros(2, 3, 4, dtype=torch.int64), 1.0, "stack"),
        (torch.zeros(2, 3, 4, dtype=torch.complex64), 1.0, "stack"),
        (torch.full((2, 3, 4), math.nan), 1.0, "stack"),
        (torch.full((2, 3, 4), math.inf), 0.0, "stack"),
        (torch.zeros(2, 3, 4), -0.1, "threshold"),
        (torch.zeros(2, 3, 4), math.nan, "threshold"),
    ],
)
def test_a_stack_or_threshold_that_cannot_be_used_is_refused(
    stack: Tensor, threshold: float, field: str
) -> None:
    with refuses(field):
        t_tsvd(stack, threshold)


def test_norms_refuse_what_is_not_finite() -> None:
    with pytest.raises(InputError):
        tensor_nuclear_norm(torch.full((1, 1, 1), math.nan))
