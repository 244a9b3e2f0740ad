"""3x3 convolutions as products per frequency, with up to four times fewer multiplications.

Images `[N, H, W, C]` are cut into overlapping tiles of m + 2 pixels for every m x m of outputs, m = 4, or 2 where a
side is no multiple of four. In the tiles' transforms `[F, N * tiles, C]` the convolution, its gradient with respect to
the weights and that with respect to the inputs are F = (m + 2)^2 products each, and they share the transforms. Outputs
are `[4, S, N, tiles, C]`: the positions of a pooled pixel apart, so that 2x2 pooling is a mean over the first axis,
then the S = (m / 2)^2 pooled pixels of a tile.

Lavin, Gray: Fast Algorithms for Convolutional Neural Networks (2016): the matrices B, G and A of F(2x2, 3x3) and
F(4x4, 3x3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_Matrix = Sequence[Sequence[float]]

_INPUTS: dict[int, _Matrix] = {
    2: [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
    4: [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ],
}
_WEIGHTS: dict[int, _Matrix] = {
    2: [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
    4: [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ],
}
_OUTPUTS: dict[int, _Matrix] = {
    2: [[1, 1, 1, 0], [0, 1, -1, -1]],
    4: [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
}


class Winograd:
    """The transforms of images of one size, for tensors like `like`."""

    def __init__(self, height: int, width: int, like: Tensor) -> None:
        self._outputs = m = 4 if height % 4 == 0 and width % 4 == 0 else 2
        self._size, self._tiles, self._side = (height, width), (height // m, width // m), m + 2
        self.pixels = height * width
        self._of_inputs = like.new_tensor(_INPUTS[m])
        self._of_weights = _twice(_WEIGHTS[m], like)
        by_place = _twice(_OUTPUTS[m], like).view(m // 2, 2, m // 2, 2, -1).permute(1, 3, 0, 2, 4)
        self._to_outputs = by_place.reshape(m * m, -1)

    def of_weights(self, weight: Tensor) -> Tensor:
        """The transform `[F, in, out]` of weights `[out, in, 3, 3]`."""
        out, channels = weight.shape[:2]
        taps = weight.permute(2, 3, 1, 0).reshape(9, -1)
        return (self._of_weights @ taps).view(-1, channels, out)

    def to_weights(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to weights, given that with respect to their transform."""
        channels, out = gradient.shape[1:]
        taps = self._of_weights.T @ gradient.view(gradient.shape[0], -1)
        return taps.view(3, 3, channels, out).permute(3, 2, 0, 1)

    def of_inputs(self, h: Tensor) -> Tensor:
        """The transform `[F, N * tiles, C]` of images `[N, pixels, C]` with a border of zeros."""
        (height, width), (down, across), side, m = self._size, self._tiles, self._side, self._outputs
        n, channels = h.shape[0], h.shape[-1]
        padded = h.new_zeros(n, height + 2, width + 2, channels)
        padded[:, 1:-1, 1:-1] = h.view(n, height, width, channels)
        image, row, pixel, one = padded.stride()
        seen = padded.as_strided(
            (side, side, n, down, across, channels), (row, pixel, image, m * row, m * pixel, one)
        )
        return _along_both(self._of_inputs, seen.reshape(side, -1)).view(side * side, -1, channels)

    def to_inputs(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to images, given that with respect to their transform."""
        side, channels = self._side, gradient.shape[-1]
        tiles = _along_both(self._of_inputs.T, gradient.view(side, -1))
        tiles = tiles.view(side, side, -1, *self._tiles, channels)
        return _overlapped(_overlapped(tiles.transpose(0, 1), 4), 2).flatten(1, 2)

    def to_outputs(self, products: Tensor) -> Tensor:
        """Outputs of products `[F, N * tiles, C]`."""
        flat = self._to_outputs @ products.view(products.shape[0], -1)
        tiles = self._tiles[0] * self._tiles[1]
        return flat.view(4, flat.shape[0] // 4, -1, tiles, products.shape[-1])

    def of_outputs(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to products, given that with respect to outputs."""
        flat = self._to_outputs.T @ gradient.view(self._to_outputs.shape[0], -1)
        return flat.view(flat.shape[0], -1, gradient.shape[-1])

    def to_pixels(self, pooled: Tensor) -> Tensor:
        """Pooled images `[N, pixels, C]` of their pixels by tile `[S, N, tiles, C]`."""
        if pooled.shape[0] == 1:
            return pooled[0]
        (down, across), (n, _, channels) = self._tiles, pooled.shape[1:]
        return pooled.view(2, 2, n, down, across, channels).permute(2, 3, 0, 4, 1, 5).reshape(n, -1, channels)

    def of_pixels(self, pooled: Tensor) -> Tensor:
        """The inverse of `to_pixels`."""
        if self._outputs == 2:
            return pooled.unsqueeze(0)
        (down, across), (n, _, channels) = self._tiles, pooled.shape
        return (
            pooled.view(n, down, 2, across, 2, channels).permute(2, 4, 0, 1, 3, 5).reshape(4, n, -1, channels)
        )


def _twice(matrix: _Matrix, like: Tensor) -> Tensor:
    """The same along rows and columns at once."""
    once = like.new_tensor(matrix)
    return torch.kron(once, once)


def _along_both(matrix: Tensor, tiles: Tensor) -> Tensor:
    """The transform along the rows, then the columns, of square tiles `[side, side * ...]`."""
    return matrix @ (matrix @ tiles).view(len(matrix), len(matrix), -1)


def _overlapped(places: Tensor, dim: int) -> Tensor:
    """The sum of tiles `[m + 2, ...]` where they lie along `dim` - 1 of the result, without the border."""
    side, tiles = places.shape[0], places.shape[dim]
    inner = places[1:-1].movedim(0, dim).contiguous()
    inner.select(dim, 0).narrow(dim - 1, 1, tiles - 1).add_(places[-1].narrow(dim - 1, 0, tiles - 1))
    inner.select(dim, side - 3).narrow(dim - 1, 0, tiles - 1).add_(places[0].narrow(dim - 1, 1, tiles - 1))
    return inner.flatten(dim - 1, dim)
