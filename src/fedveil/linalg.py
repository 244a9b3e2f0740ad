"""Low-rank smoothing across clients: the tensor singular value decomposition of FedCEO (ICML 2025).

Symbols: a stack `W` `[K, d, h]` of K clients; its frequency slices `W^(j)`, j = 0..K-1, are the unnormalised
DFT along the client axis; the tensor nuclear norm `||W||_*` is the mean over slices of the matrix
nuclear norm (Definition 2.2).

The stack is real, so slice K-j is the conjugate of slice j: half of them are enough. Singular values come
from the Gram matrix of the smaller side. Squaring costs accuracy in proportion to (largest singular value /
threshold)^2, or to (largest / smallest singular value)^2 where that is less, so each slice is computed in the
cheapest way that is exact enough for it: single precision, double precision, or a plain SVD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from fedveil.errors import InputError
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

_Piece = TypeVar("_Piece")
_CHUNK = 32_768  # numbers of one client that are transformed at a time: a fixed size keeps the bits fixed
_SINGLE_LIMIT = 1 / 16  # threshold / Frobenius norm above which float32 Gram matrices are exact to about 1e-5
_SINGLE_ERROR = 1e-4  # below that ratio: the error allowed in what is removed, relative to it
_ROUNDING = 2.0**-21  # error of a float32 eigendecomposition, relative to the trace: a few roundings
_DOUBLE_LIMIT = {
    "torch.float32": 1e-6,
    "torch.float64": 1e-5,
}  # below it a slice is computed by the plain SVD


def t_tsvd(stack: Tensor, threshold: float) -> Tensor:
    """The minimiser of `tau * ||W - stack||_F^2 + ||W||_*` for `tau = 1 / (2 * threshold)` (Theorem 3.1).

    The singular values of every frequency slice are lowered by `threshold`, those below it become zero. The
    result has the stack's shape, dtype and device and agrees with a complex SVD of all K slices to 1e-4
    (float32) or 1e-9 (float64) of its norm. Its bits do not depend on the number of threads. `stack` is not
    changed.

    Args:
        stack: One matrix per client, `[K, d, h]`.
        threshold: By how much singular values are lowered.

    Returns:
        The smoothed stack.
    """
    largest = _check_stack(stack)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
        raise InputError("threshold", threshold, "must not be negative", "Use 1 / (2 tau) with tau > 0.")
    if threshold == 0:
        return stack.detach().clone()
    with torch.no_grad():
        stack = stack.detach()
        if largest == 0:
            return torch.zeros_like(stack)
        # Scaling by a power of two is exact and prevents overflow and underflow of squares.
        unit = 2.0 ** math.floor(math.log2(largest))
        return _shrink_spectrum(stack / unit, threshold / unit).mul_(unit)


def tensor_nuclear_norm(stack: Tensor) -> Tensor:
    """`||stack||_*`: the mean over the K frequency slices of the sum of their singular values (Def. 2.2).

    Args:
        stack: One matrix per client, `[K, d, h]`.

    Returns:
        A scalar.
    """
    values = slice_singular_values(stack)
    clients = stack.shape[0]
    copies = torch.full((values.shape[0],), 2.0, dtype=values.dtype, device=values.device)
    copies[_real_slices(clients)] = 1.0  # every other slice also represents its conjugate
    norm: Tensor = (copies[:, None] * values).sum() / clients
    return norm


def slice_singular_values(stack: Tensor) -> Tensor:
    """Singular values of the frequency slices 0..K//2, `[K//2 + 1, min(d, h)]`, each row in descending order.

    Row 0 belongs to the sum over the clients; row j > 0 also describes slice K - j.

    Args:
        stack: One matrix per client, `[K, d, h]`.

    Returns:
        One row per slice.
    """
    _check_stack(stack)
    values: Tensor = torch.linalg.svdvals(torch.fft.rfft(stack.double(), dim=0))
    return values.to(stack.dtype)


def _check_stack(stack: Tensor) -> float:
    """The largest magnitude in the stack; refuses anything but a finite stack of matrices."""
    shape = tuple(stack.shape)
    if stack.dim() != 3 or 0 in shape:
        raise InputError(
            "stack", shape, "is not the shape of a stack of matrices", "Give [K, d, h] with K, d, h >= 1."
        )
    if str(stack.dtype) not in _DOUBLE_LIMIT:
        raise InputError("stack", stack.dtype, "is not a real floating type", "Use float32 or float64.")
    low, high = torch.aminmax(stack.detach())  # propagates NaN, so one pass also checks finiteness
    largest = max(-float(low), float(high))
    if not (math.isfinite(float(low)) and math.isfinite(float(high))):
        raise InputError(
            "stack", shape, "holds values that are not finite", "Leave diverged clients out of the cohort."
        )
    return largest


def _real_slices(clients: int) -> list[int]:
    """The frequencies whose slice is real: the sum and, for an even K, the alternating sum."""
    return [0] if clients % 2 else [0, clients // 2]


def _shrink_spectrum(stack: Tensor, threshold: float) -> Tensor:
    """DFT, soft-thresholding of the slices 0..K//2, inverse DFT."""
    clients, d, h = stack.shape
    kind = torch.complex64 if stack.dtype == torch.float32 else torch.complex128
    spectrum = torch.empty(clients // 2 + 1, d, h, dtype=kind, device=stack.device)
    result = torch.empty_like(stack, memory_format=torch.contiguous_format)
    real = _real_slices(clients)
    step = max(1, _CHUNK // h)
    pieces = [slice(start, start + step) for start in range(0, d, step)]

    def forward(piece: slice) -> None:
        spectrum[:, piece] = torch.fft.rfft(stack[:, piece], dim=0)

    def shrink(j: int) -> None:
        shrunk = _shrink(spectrum[j].real if j in real else spectrum[j], threshold)
        if shrunk is None:
            spectrum[j].zero_()
        else:
            spectrum[j].copy_(shrunk)

    def inverse(piece: slice) -> None:
        result[:, piece] = torch.fft.irfft(spectrum[:, piece], n=clients, dim=0)

    with _Threads(stack) as threads:
        threads.run(forward, pieces)
        threads.run(shrink, sorted(range(spectrum.shape[0]), key=lambda j: j in real))  # costly ones first
        threads.run(inverse, pieces)
    return result


class _Threads:
    """Runs pieces of work in parallel, each in a single thread, so that bits do not depend on the thread count."""

    def __init__(self, stack: Tensor) -> None:
        self._before = torch.get_num_threads()
        on_cpu = stack.device.type == "cpu"
        self._count = self._before if on_cpu and stack.numel() >= _CHUNK else 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> _Threads:
        torch.set_num_threads(1)
        if self._count > 1:
            self._pool = ThreadPoolExecutor(self._count, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        torch.set_num_threads(self._before)

    def run(self, work: Callable[[_Piece], None], pieces: Sequence[_Piece]) -> None:
        for _ in self._pool.map(work, pieces) if self._pool is not None else map(work, pieces):
            pass


def _shrink(matrix: Tensor, threshold: float) -> Tensor | None:
    """The matrix with singular values `max(0, s - threshold)`; None stands for a matrix of zeros."""
    matrix = matrix.contiguous()
    norm = float(torch.linalg.vector_norm(matrix, dtype=_wide(matrix.dtype)))
    if norm <= threshold:  # no singular value is larger than the Frobenius norm
        return None
    ratio = threshold / norm
    if ratio < _DOUBLE_LIMIT[str(matrix.real.dtype)]:
        return _shrink_by_svd(matrix, threshold)
    tall = matrix.shape[0] >= matrix.shape[1]
    gram = _gram(matrix if tall else matrix.mH)
    if ratio < _SINGLE_LIMIT and _needs_double(gram, norm, threshold):
        working = matrix.to(_wide(matrix.dtype))
        gram = _gram(working if tall else working.mH)
    if _all_below(gram, threshold):
        return None
    squares, vectors = torch.linalg.eigh(gram)
    sigma = squares.clamp_min(0).sqrt()
    kept = int((sigma > threshold).sum())  # eigenvalues rise: the kept ones are the last
    if kept == 0:
        return None
    size, other = gram.shape[0], max(matrix.shape)
    if 2 * other * kept < size * kept + size * other:
        top = vectors[:, size - kept :]
        scaled = (top * (1 - threshold / sigma[size - kept :])).to(matrix.dtype)
        top = top.to(matrix.dtype)
        low_rank: Tensor = (matrix @ scaled) @ top.mH if tall else top @ (scaled.mH @ matrix)
        return low_rank
    removed = (threshold / sigma.clamp_min(threshold)).to(vectors.dtype)
    correction = ((vectors * removed) @ vectors.mH).to(matrix.dtype)
    return torch.sub(matrix, matrix @ correction if tall else correction @ matrix)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _gram(tall: Tensor) -> Tensor:
    """`tall^H @ tall`, for complex matrices with three real products in place of four."""
    if not tall.is_complex():
        return tall.mT @ tall
    parts = torch.cat([tall.real, tall.imag])
    half = tall.shape[0]
    cross = parts[:half].mT @ parts[half:]
    return torch.complex(parts.mT @ parts, cross - cross.mT)


def _needs_double(gram: Tensor, norm: float, threshold: float) -> bool:
    """Whether single-precision errors could exceed the tolerance in what is removed.

    An error E of the Gram matrix moves the result by at most threshold / s^2 * |E|, where s is the smallest
    singular value or, if that is larger, the threshold; what is removed has norm threshold * sqrt(size).
    """
    if gram.dtype in (torch.float64, torch.complex128):
        return False
    root = math.sqrt(gram.shape[0])
    if threshold * root > norm / 2:  # the result may be small, and errors are relative to it
        return True
    error = _ROUNDING * norm**2
    least = error / (_SINGLE_ERROR * root)  # s^2 must be as large as this
    if least <= threshold**2:
        return False
    shifted = gram.clone()
    shifted.diagonal().sub_(max(least, 8 * error))
    return int(torch.linalg.cholesky_ex(shifted).info) != 0  # it exists if all eigenvalues are larger


def _all_below(gram: Tensor, threshold: float) -> bool:
    """Whether every singular value is below the threshold: then `threshold^2 I - gram` has a Cholesky factor.

    Far cheaper than the eigenvalues that it replaces; a factorisation that fails stops early.
    """
    square = threshold**2
    if float(gram.diagonal().real.max()) >= square:
        return False
    shifted = gram.neg()
    shifted.diagonal().add_(square)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


def _shrink_by_svd(matrix: Tensor, threshold: float) -> Tensor:
    left, sigma, right = torch.linalg.svd(matrix.to(_wide(matrix.dtype)), full_matrices=False)
    kept = (sigma - threshold).clamp_min(0).to(left.dtype)
    shrunk: Tensor = (left * kept) @ right
    return shrunk.to(matrix.dtype)
