"""Two-layer wavelet scattering of images, vectorised over images and angles.

Bruna, Mallat: Invariant Scattering Convolution Networks. TPAMI 2013. Oyallon, Mallat: Deep Roto-Translation
Scattering for Object Classification. CVPR 2015. Filters, padding and the order of paths are those of kymatio 0.3.0
(Andreux et al., JMLR 2020), which the tests compare with.

Symbols: J `depth`, L `angles`, psi the Morlet wavelets (scale j, angle theta), phi the Gaussian low-pass of scale J,
U the moduli |x * psi|, S the averages U * phi, one in 2^J along each axis.

phi is a product of two Gaussians, so `* phi`, subsampling, cropping and pooling are one small matrix for each axis.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.errors import InputError
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNED = 16  # float32 numbers of a line of the processor's cache
_COPIES = 2  # of a filter on each side of the image: what lies further away is below 1e-12
_CHUNK = 1 << 14  # pixels of a block of images


@dataclass(frozen=True)
class Scattering:
    """Scattering of images `[n, height, width]`: `[n, paths, *map_shape]`.

    Args:
        height: Of the images, in pixels.
        width: Of the images, in pixels.
        depth: J, the number of scales; S averages over about 2^J pixels.
        angles: L, the number of orientations.
        pooling: The side of the maps after average pooling; 0 leaves them as they are.
    """

    height: int
    width: int
    depth: int = 2
    angles: int = 8
    pooling: int = 0

    def __post_init__(self) -> None:
        for field, value in (("depth", self.depth), ("angles", self.angles)):
            if value < 1:
                raise InputError(field, value, "is not a positive number", "Use 2 scales and 8 angles.")
        smallest = 2**self.depth
        if min(self.height, self.width) < smallest:
            raise InputError(
                "depth",
                self.depth,
                f"images of {self.height}x{self.width} pixels are too small for it",
                f"Images need at least {smallest}x{smallest} pixels: use a smaller depth.",
            )
        if not 0 <= self.pooling <= min(self._unpooled):
            raise InputError(
                "pooling",
                self.pooling,
                f"the maps are {self._unpooled[0]}x{self._unpooled[1]}",
                f"Use 1 to {min(self._unpooled)}, or 0 for no pooling.",
            )

    @property
    def paths(self) -> int:
        """1 + J L + L^2 J (J - 1) / 2."""
        return 1 + self.depth * self.angles + self.angles**2 * self.depth * (self.depth - 1) // 2

    @property
    def map_shape(self) -> tuple[int, int]:
        return (self.pooling, self.pooling) if self.pooling else self._unpooled

    @property
    def _unpooled(self) -> tuple[int, int]:
        return self.height // 2**self.depth, self.width // 2**self.depth

    @property
    def _padded(self) -> tuple[int, int]:
        step = 2**self.depth
        return (self.height // step + 2) * step, (self.width // step + 2) * step

    @property
    def block(self) -> int:
        """How many images are best worked on at a time: their intermediate maps stay in the processor's cache."""
        return max(1, _CHUNK // (self._padded[0] * self._padded[1]))

    def mirrored(self) -> list[int]:
        """Where the path lies that a mirror image has in place of each path: its angles are negative."""
        turned = [
            (2 * (self.angles - self.angles // 2 - 1) - theta) % self.angles for theta in range(self.angles)
        ]
        order = [0]
        for _ in range(self.depth):
            order += [len(order) + theta for theta in turned]
        for j1 in range(self.depth):
            start, scales = len(order), self.depth - 1 - j1
            order += [
                start + (theta1 * scales + j2) * self.angles + theta2
                for theta1 in turned
                for j2 in range(scales)
                for theta2 in turned
            ]
        return order

    def __call__(self, images: Tensor) -> Tensor:
        """Each image on its own: the others of the batch change nothing but the last digits."""
        filters = _filters(self, images.dtype)
        spare = [padded - size for padded, size in zip(self._padded, (self.height, self.width), strict=True)]
        margins = (spare[1] // 2, spare[1] - spare[1] // 2, spare[0] // 2, spare[0] - spare[0] // 2)
        x = torch.nn.functional.pad(images, margins, mode="reflect")
        spectrum = _spectrum(x)
        first, second = [filters.average(x[:, None], 0)], []
        for j1 in range(self.depth):
            u1 = _moduli(spectrum[:, None], filters.psi[j1][0], j1)
            first.append(filters.average(u1, j1))
            if j1 + 1 == self.depth:
                break
            spectrum1 = _spectrum(u1)[:, :, None]
            rows = [
                filters.average(_moduli(spectrum1, filters.psi[j2][j1], j2 - j1), j2)
                for j2 in range(j1 + 1, self.depth)
            ]
            second.append(torch.cat(rows, 2).flatten(1, 2))
        return torch.cat(first + second, 1)


@dataclass(frozen=True)
class _Filters:
    """psi[j][r] `[L, h, w, 2]`: the Fourier transform at resolution r, twice; low[r]: the matrices of the two axes.

    These are filled up with zeros beyond the `size` of the maps, so that the results of all images of a block begin
    at addresses of the same kind: products are rounded otherwise where they do not.
    """

    psi: list[list[Tensor]]
    low: list[tuple[Tensor, Tensor]]
    size: tuple[int, int]

    def average(self, maps: Tensor, resolution: int) -> Tensor:
        """`maps * phi`, subsampled, without the padding, pooled."""
        rows, columns = self.low[resolution]
        flat = maps.flatten(0, -3)
        once = torch.bmm(flat, columns.expand(flat.shape[0], -1, -1))
        pooled = torch.bmm(rows.expand(flat.shape[0], -1, -1), once)[:, : self.size[0], : self.size[1]]
        return pooled.reshape(*maps.shape[:-2], *self.size)


def _moduli(spectrum: Tensor, psi: Tensor, halvings: int) -> Tensor:
    """|x * psi| at one in 2^halvings places of each axis, from the spectrum `[..., h, w, 2]` of x.

    Subsampling folds the spectrum: its parts are multiplied and summed without the whole product in memory.
    """
    parts = 2**halvings
    h, w = psi.shape[-3] // parts, psi.shape[-2] // parts
    folded: Tensor | None = None
    for top in range(0, h * parts, h):
        for left in range(0, w * parts, w):
            part = spectrum[..., top : top + h, left : left + w, :]
            filter_part = psi[:, top : top + h, left : left + w]
            folded = part * filter_part if folded is None else folded.addcmul_(part, filter_part)
    assert folded is not None
    return _modulus(folded)


def _spectrum(x: Tensor) -> Tensor:
    """The Fourier transform of maps `[..., h, w]`, real and imaginary parts as the last axis."""
    if not torch.compiler.is_exporting():
        return torch.view_as_real(torch.fft.fft2(x))
    (rc, rs), (cc, cs) = (_waves(size, x.dtype) for size in x.shape[-2:])  # ONNX has no complex numbers
    real, imaginary = x @ cc, -(x @ cs)
    return torch.stack([rc @ real + rs @ imaginary, rc @ imaginary - rs @ real], -1)


def _modulus(spectrum: Tensor) -> Tensor:
    """The absolute values of the maps that have this spectrum `[..., h, w, 2]`."""
    if not torch.compiler.is_exporting():
        waves: Tensor = torch.fft.ifft2(torch.view_as_complex(spectrum))
        return waves.abs()
    h, w = spectrum.shape[-3:-1]
    (rc, rs), (cc, cs) = (_waves(size, spectrum.dtype) for size in (h, w))
    real, imaginary = spectrum[..., 0], spectrum[..., 1]
    real, imaginary = real @ cc - imaginary @ cs, imaginary @ cc + real @ cs
    real, imaginary = rc @ real - rs @ imaginary, rc @ imaginary + rs @ real
    return torch.sqrt(real.square() + imaginary.square()) / (h * w)


def _waves(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a Fourier transform of this length, as matrices."""
    place = torch.arange(size)
    angle = 2 * math.pi * ((place[:, None] * place) % size).double() / size
    return angle.cos().to(dtype), angle.sin().to(dtype)


@functools.lru_cache(maxsize=8)
def _filters(shape: Scattering, dtype: torch.dtype) -> _Filters:
    """Computed in double precision; the mean over the parts of a folded spectrum is in psi already."""
    j_max, angles, padded = shape.depth, shape.angles, shape._padded
    psi = []
    for j in range(j_max):
        waves = torch.stack([_morlet(padded, 0.8 * 2**j, theta, j, angles) for theta in range(angles)])
        fourier = torch.fft.fft2(waves).real  # the imaginary part is zero
        levels = [_cropped(_cropped(fourier, r, -1), r, -2) / 4 ** (j - r) for r in range(j + 1)]
        psi.append([torch.stack([level, level], -1).to(dtype) for level in levels])
    low = []
    for r in range(j_max):
        rows, columns = (
            (_pool(size, pooled) @ _low_pass(length, r, j_max)).to(dtype)
            for length, size, pooled in zip(padded, shape._unpooled, shape.map_shape, strict=True)
        )
        low.append((_filled(rows), _filled(columns).T.contiguous()))
    return _Filters(psi, low, shape.map_shape)


def _filled(lines: Tensor) -> Tensor:
    """Zero lines after these, up to a multiple of 16."""
    return torch.nn.functional.pad(lines, (0, 0, 0, -len(lines) % _ALIGNED))


def _morlet(size: tuple[int, int], sigma: float, theta: int, j: int, angles: int) -> Tensor:
    """A Gabor wavelet without its mean: a wave of frequency (3/4) pi / 2^j in an ellipse of slant 4 / L."""
    angle, slant = (angles - angles // 2 - 1 - theta) * math.pi / angles, 4 / angles
    wave = _gabor(size, sigma, angle, 0.75 * math.pi / 2**j, slant)
    envelope = _gabor(size, sigma, angle, 0.0, slant)
    return wave - wave.sum() / envelope.sum() * envelope


def _gabor(size: tuple[int, int], sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """The wave in its Gaussian window, wrapped around the borders."""
    c, s = math.cos(angle), math.sin(angle)
    along, across = (
        torch.arange(-_COPIES * n, (_COPIES + 1) * n, dtype=torch.float64).reshape(shape)
        for n, shape in zip(size, ((-1, 1), (1, -1)), strict=True)
    )
    u, v = c * along + s * across, c * across - s * along
    window = -(u.square() + (slant * v).square()) / (2 * sigma**2)
    wave = torch.exp(torch.complex(window, frequency * u))
    copies = 2 * _COPIES + 1
    return wave.reshape(copies, size[0], copies, size[1]).sum((0, 2)) * slant / (2 * math.pi * sigma**2)


def _cropped(fourier: Tensor, halvings: int, axis: int) -> Tensor:
    """A filter at a lower resolution: the lowest 1 / 2^halvings of its frequencies along this axis."""
    n = fourier.shape[axis]
    size = n // 2**halvings
    low = int(n * 2.0 ** (-halvings - 1))
    kept = [*range(low), *range(n - (size - low), n)]
    return fourier.index_select(axis, torch.tensor(kept))


def _low_pass(padded: int, resolution: int, depth: int) -> Tensor:
    """What takes a line at this resolution to its averages, one in 2^J, without the padding's two."""
    sigma = 0.8 * 2 ** (depth - 1)
    x = torch.arange(-_COPIES * padded, (_COPIES + 1) * padded, dtype=torch.float64)
    window = torch.exp(-x.square() / (2 * sigma**2)).reshape(-1, padded).sum(0) / (
        math.sqrt(2 * math.pi) * sigma
    )
    line: Tensor = torch.fft.ifft(_cropped(torch.fft.fft(window).real, resolution, 0)).real
    index = torch.arange(len(line))
    circulant = line[(index[:, None] - index) % len(line)]
    return circulant[:: 2 ** (depth - resolution)][1:-1]


def _pool(size: int, pooled: int) -> Tensor:
    """Average pooling of a line as a matrix; the identity where nothing is pooled."""
    lines = torch.eye(size, dtype=torch.float64)
    pooled_lines: Tensor = torch.nn.functional.adaptive_avg_pool1d(lines.unsqueeze(0), pooled)[0]
    return pooled_lines.T
