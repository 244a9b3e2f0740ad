"""Networks of convolution, group norm, ReLU and average pooling: their gradients, and how these move with the images.

Gradient matching moves images until their gradient `s(x)` is the wanted one: with `v` the gradient of a distance with
respect to `s`, it needs the gradient of `<v, s(x)>` with respect to `x`. That is the change of the loss' input gradient
when the weights move along `v`: one more pass forwards and one backwards, without a graph of the backward pass.

Symbols: `a` outputs of a convolution, centred by the mean of their group; `n = scale * a + shift` those of its norm;
`g_` gradients with respect to what follows, `d_` changes along `v`. The four positions of a pooled window are an axis
of their own. Norms keep their numbers for each image and channel, `[N, C]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.training.winograd import Winograd
from fedveil.tree import Params

Weights = list[Tensor]
"""Those of one block or of the output as they are computed with, or a gradient or direction of them."""


@dataclass(frozen=True)
class Gradient:
    """With respect to the weights of each block and of the output as they are computed with."""

    parts: list[Weights]

    def plus(self, other: Gradient) -> Gradient:
        """This gradient, to which the other was added in place."""
        for own, more in zip(self.parts, other.parts, strict=True):
            for leaf, leaf_more in zip(own, more, strict=True):
                leaf += leaf_more
        return self


class _Norm:
    """Group norm of `positions` centred values per channel."""

    def __init__(self, weight: Tensor, bias: Tensor, layer: nn.GroupNorm, positions: int) -> None:
        self.weight, self.bias = weight, bias
        self._groups, self._eps, self._positions = layer.num_groups, layer.eps, positions
        self.by_channel = layer.num_groups == layer.num_channels

    def over_groups(self, values: Tensor) -> Tensor:
        """Each channel's mean over its group."""
        if self.by_channel:
            return values
        grouped = values.view(values.shape[0], self._groups, -1)
        return grouped.mean(-1, keepdim=True).expand_as(grouped).reshape(values.shape)

    def forward(self, squares: Tensor) -> None:
        """From the mean squares of each channel."""
        self.inverse = (self.over_groups(squares) + self._eps).rsqrt()
        self.scale = self.weight * self.inverse

    def backward(self, of_shift: Tensor, of_scale: Tensor) -> Weights:
        """From `sum g_n` and `sum g_n a`: the gradients of weight and bias.

        After it, `g_a = scale * g_n + slope * a + offset`.
        """
        self._of_shift, self._of_scale = of_shift, of_scale
        self._pull = self.over_groups(self.weight * of_scale)
        self._cube = self.inverse.pow(3)
        self.slope = self._cube * self._pull / -self._positions
        self.offset = self.over_groups(self.scale * of_shift) / -self._positions
        return [(self.inverse * of_scale).sum(0), of_shift.sum(0)]

    def of_bias(self, found: Tensor) -> Tensor:
        """The gradient of the convolution's bias: nothing but rounding errors where it moves with the mean."""
        return torch.zeros_like(found) if self.by_channel else found

    def moved(self, squares: Tensor, d_weight: Tensor) -> None:
        """From the changes of the mean squares and of the weight."""
        self._d_weight = d_weight
        self._d_inverse = self.over_groups(squares) * self._cube / -2
        self.d_scale = d_weight * self.inverse + self.weight * self._d_inverse

    def moved_back(self, of_shift: Tensor, of_scale: Tensor) -> None:
        """From the changes of both sums: those of slope and offset."""
        pull = self.over_groups(self._d_weight * self._of_scale + self.weight * of_scale)
        steeper = 3 * self.inverse.square() * self._d_inverse * self._pull
        self.d_slope = (steeper + self._cube * pull) / -self._positions
        sums = self.over_groups(self.d_scale * self._of_shift + self.scale * of_shift)
        self.d_offset = sums / -self._positions


class _Rectified:
    """ReLU and the mean over 2x2 windows, whose positions are the first axis."""

    def __init__(self, n: Tensor) -> None:
        self._on = n.clamp_(min=0)

    def pooled(self) -> Tensor:
        return self._on.mean(0)

    def moved(self, d_n: Tensor) -> Tensor:
        """From the change of the inputs, which is overwritten."""
        torch.ops.aten.threshold_backward.grad_input(d_n, self._on, 0, grad_input=d_n)
        return d_n.mean(0)

    def backward(self, g: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.threshold_backward((g / 4).unsqueeze(0), self._on, 0)
        return found


class _FirstBlock:
    """A block on images, which have few channels: its convolution is one product with their windows.

    With the windows' second moments a norm is a factor and a shift of each image's weights. Those are `[windows, C]`,
    the bias in the last row, in float64. What is computed at full resolution goes image by image through the cache.
    """

    def __init__(self, w: Weights, layer: nn.GroupNorm, size: tuple[int, int]) -> None:
        self._weight, self._size = w[0], size
        self._norm = _Norm(w[1], w[2], layer, size[0] * size[1])

    def forward(self, x: Tensor) -> Tensor:
        self._windows = _windows(x)
        wide = self._windows.double()
        self._moments = torch.bmm(wide, wide.transpose(1, 2)).div_(wide.shape[2])
        self._centred, self._spread = self._about_mean(self._weight)
        self._norm.forward((self._centred * self._spread).sum(1))
        shifted = self._centred * self._norm.scale.unsqueeze(1)
        shifted[:, -1] += self._norm.bias
        self._on = x.new_empty(len(x), 4, self._windows.shape[2] // 4, shifted.shape[2])
        pooled = torch.empty_like(self._on[:, 0])
        for windows, weight, on, mean in zip(
            self._windows, shifted.to(x.dtype), self._on, pooled, strict=True
        ):
            torch.mm(windows.T, weight, out=on.flatten(0, 1))
            torch.mean(on.clamp_(min=0), 0, out=mean)
        return pooled

    def backward(self, g: Tensor) -> tuple[Tensor, Weights]:
        self._g = g / 4  # far smaller than what it becomes at all positions
        products = torch.empty_like(self._spread, dtype=g.dtype)
        for windows, on, own, out in zip(self._windows, self._on, self._g, products, strict=True):
            torch.mm(windows, _where(on, own), out=out)
        self._products, norm = products.double(), self._norm
        own = norm.backward(self._products[:, -1], (self._products * self._centred).sum(1))
        found = self._products * norm.scale.unsqueeze(1)
        positions = self._windows.shape[2]
        found += self._spread * (positions * norm.slope).unsqueeze(1)
        found += self._moments[:, :, -1:] * (positions * norm.offset).unsqueeze(1)
        total = found.sum(0)
        total[-1] = norm.of_bias(total[-1])
        return g, [total, *own]

    def moved(self, dh: Tensor, v: Weights) -> Tensor:
        norm = self._norm
        self._d_centred, _ = self._about_mean(v[0])
        norm.moved(2 * (self._d_centred * self._spread).sum(1), v[1])
        shifted = self._centred * norm.d_scale.unsqueeze(1) + self._d_centred * norm.scale.unsqueeze(1)
        shifted[:, -1] += v[2]
        pooled = torch.empty_like(self._on[:, 0])
        for windows, weight, on, mean in zip(
            self._windows, shifted.to(pooled.dtype), self._on, pooled, strict=True
        ):
            values = torch.mm(windows.T, weight).view_as(on)
            torch.ops.aten.threshold_backward.grad_input(values, on, 0, grad_input=values)
            torch.mean(values, 0, out=mean)
        return pooled

    def moved_back(self, dg: Tensor, v: Weights) -> Tensor:
        norm, weight, along = self._norm, self._weight, v[0]
        scale, slope = norm.scale.unsqueeze(1), norm.slope.unsqueeze(1)
        # What reaches the windows through g_n and its change, and then through the centred values and theirs.
        straight = norm.d_scale.unsqueeze(1) * weight + scale * along
        products = torch.empty_like(self._spread, dtype=dg.dtype)
        found = torch.empty_like(self._windows[:, :-1])
        each = zip(
            self._windows,
            self._on,
            self._g,
            dg / 4,
            straight.to(dg.dtype),
            (scale * weight).to(dg.dtype),
            strict=True,
        )
        for one, (windows, on, g, d_g, of_g, of_d_g) in enumerate(each):
            d_g_n = _where(on, d_g)
            torch.mm(windows, d_g_n, out=products[one])
            torch.mm(of_d_g[:-1], d_g_n.T, out=found[one])
            found[one].addmm_(of_g[:-1], _where(on, g).T)
        wide = products.double()
        changed = (wide * self._centred + self._products * self._d_centred).sum(1)
        norm.moved_back(wide[:, -1], changed)
        values = self._centred * norm.d_slope.unsqueeze(1) + self._d_centred * slope
        bent = torch.matmul(values, weight.T) + torch.matmul(self._centred * slope, along.T)
        bent[:, -1] += norm.d_offset @ weight.T + norm.offset @ along.T
        found.baddbmm_(bent[:, :, :-1].to(dg.dtype).transpose(1, 2), self._windows)
        return _folded(found, self._size)

    def _about_mean(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Each image's weights of centred values, and the mean products of windows and centred values."""
        spread = self._moments @ weight
        mean = self._norm.over_groups(spread[:, -1])
        centred = weight.expand_as(spread).clone()
        centred[:, -1] -= mean
        return centred, spread.sub_(self._moments[:, :, -1:] * mean.unsqueeze(1))


class _Block:
    """A block on the pooled values `[N, pixels, C]` of another; the weights are transformed."""

    def __init__(self, w: Weights, layer: nn.GroupNorm, tiles: Winograd) -> None:
        self._weight, self._bias, self._tiles = w[0], w[3], tiles
        self._norm = _Norm(w[1], w[2], layer, tiles.pixels)

    def forward(self, h: Tensor) -> Tensor:
        self._inputs, norm = self._tiles.of_inputs(h), self._norm
        self._a = a = self._centred(torch.bmm(self._inputs, self._weight), self._bias)
        norm.forward(_sums(a * a) / self._tiles.pixels)
        self._relu = _Rectified(torch.addcmul(norm.bias, a, _each(norm.scale)))
        return self._tiles.to_pixels(self._relu.pooled())

    def backward(self, g: Tensor) -> tuple[Tensor, Weights]:
        norm, a = self._norm, self._a
        self._g = self._tiles.of_pixels(g)
        g_n = self._relu.backward(self._g)
        own = norm.backward(_sums(g_n), _sums(g_n * a))
        g_a = g_n.mul_(_each(norm.scale)).addcmul_(a, _each(norm.slope)).add_(_each(norm.offset))
        self._g_products = self._tiles.of_outputs(g_a)
        of_weight = torch.bmm(self._inputs.transpose(1, 2), self._g_products)
        found = [of_weight, *own, norm.of_bias(_sums(g_a).sum(0))]
        return self._tiles.to_inputs(torch.bmm(self._g_products, self._weight.transpose(1, 2))), found

    def moved(self, dh: Tensor, v: Weights) -> Tensor:
        norm, a = self._norm, self._a
        products = torch.bmm(self._tiles.of_inputs(dh), self._weight).baddbmm_(self._inputs, v[0])
        self._d_a = self._centred(products, v[3])
        norm.moved(_sums(a * self._d_a) * (2 / self._tiles.pixels), v[1])
        d_n = torch.addcmul(v[2], a, _each(norm.d_scale))
        d_n.addcmul_(self._d_a, _each(norm.scale))
        return self._tiles.to_pixels(self._relu.moved(d_n))

    def moved_back(self, dg: Tensor, v: Weights) -> Tensor:
        norm, a, d_a = self._norm, self._a, self._d_a
        d_g_n = self._relu.backward(self._tiles.of_pixels(dg))
        g_n = self._relu.backward(self._g)
        norm.moved_back(_sums(d_g_n), _sums((d_g_n * a).addcmul_(g_n, d_a)))
        d_g_a = d_g_n.mul_(_each(norm.scale)).addcmul_(g_n, _each(norm.d_scale))
        d_g_a.addcmul_(a, _each(norm.d_slope)).addcmul_(d_a, _each(norm.slope))
        products = self._tiles.of_outputs(d_g_a.add_(_each(norm.d_offset)))
        products = torch.bmm(products, self._weight.transpose(1, 2))
        return self._tiles.to_inputs(products.baddbmm_(self._g_products, v[0].transpose(1, 2)))

    def _centred(self, products: Tensor, bias: Tensor) -> Tensor:
        values = self._tiles.to_outputs(products)
        if not self._norm.by_channel:
            values += bias
        means = self._norm.over_groups(_sums(values) / self._tiles.pixels)
        return values.sub_(_each(means))


class _Output:
    """The linear layer and the weighted sum of cross-entropies."""

    def __init__(self, w: Weights, y: Tensor, weights: Tensor) -> None:
        self._weight, self._bias, self._y, self._each = w[0], w[1], y, weights.unsqueeze(1)

    def gradient(self, h: Tensor) -> tuple[Tensor, Weights]:
        self._h = h.flatten(1)
        self._p = torch.softmax(torch.addmm(self._bias, self._h, self._weight.T), dim=1)
        self._g = self._p - functional.one_hot(self._y, self._p.shape[1]).to(h.dtype)
        self._g *= self._each
        return (self._g @ self._weight).view(h.shape), [self._g.T @ self._h, self._g.sum(0)]

    def moved(self, dh: Tensor, v: Weights) -> Tensor:
        d_scores = torch.addmm(v[1], dh.flatten(1), self._weight.T).addmm_(self._h, v[0].T)
        d_g = self._p * (d_scores - (self._p * d_scores).sum(1, keepdim=True)) * self._each
        return (d_g @ self._weight).addmm_(self._g, v[0]).view(dh.shape)


@dataclass
class Pass:
    """What is kept of one pass over some images."""

    blocks: list[_FirstBlock | _Block]
    output: _Output


@dataclass(frozen=True)
class _Layer:
    """A block's convolution and norm by name."""

    convolution: str
    name: str
    norm: nn.GroupNorm

    @classmethod
    def recognise(cls, *parts: tuple[str, nn.Module]) -> _Layer | None:
        (convolution, conv), (name, norm), (_, relu), (_, pool) = parts
        if type(conv) is not nn.Conv2d or type(norm) is not nn.GroupNorm or type(relu) is not nn.ReLU:
            return None
        geometry = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
        if geometry != ((3, 3), (1, 1), (1, 1), (1, 1), 1) or conv.padding_mode != "zeros":
            return None
        if type(pool) is not nn.AvgPool2d or pool.divisor_override is not None:
            return None
        halves = [_pair(value) for value in (pool.kernel_size, pool.stride, pool.padding)]
        return cls(convolution, name, norm) if halves == [(2, 2), (2, 2), (0, 0)] else None


class BlockNetwork:
    """A `nn.Sequential` of such blocks, flatten and one linear layer to class scores, under the cross-entropy."""

    def __init__(self, layers: Sequence[_Layer], output: str) -> None:
        self._layers, self._output = tuple(layers), output

    @classmethod
    def recognise(cls, model: nn.Module) -> BlockNetwork | None:
        """The network of this model, or None if it is anything else."""
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            return None
        found = list(model.named_children())
        tied = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
        if len(found) != len(model) or len(found) < 6 or len(found) % 4 != 2 or tied:
            return None
        layers = [_Layer.recognise(*found[i : i + 4]) for i in range(0, len(found) - 2, 4)]
        known = [layer for layer in layers if layer is not None]
        (_, flatten), (output, linear) = found[-2:]
        flat = type(flatten) is nn.Flatten and (flatten.start_dim, flatten.end_dim) == (1, -1)
        if not flat or type(linear) is not nn.Linear or len(known) < len(layers):
            return None
        return cls(known, output)

    def fits(self, height: int, width: int) -> bool:
        """Whether no block leaves out a row or column of such images."""
        halved = 1 << len(self._layers)
        return height % halved == width % halved == 0

    def at(self, w: Params, size: tuple[int, int]) -> Model:
        """The network with these weights, for images of this size."""
        return Model(self._layers, self._output, w, size)


class Model:
    """The network at fixed weights; what depends on them alone is computed once."""

    def __init__(self, layers: Sequence[_Layer], output: str, w: Params, size: tuple[int, int]) -> None:
        self._layers, self._output, self._size, self._like = layers, output, size, w
        inner = [(size[0] >> depth, size[1] >> depth) for depth in range(1, len(layers))]
        self._tiles = [Winograd(*one, next(iter(w.values()))) for one in inner]
        self._w = self.weights(w, 1.0)

    def begin(self, x: Tensor, y: Tensor, weights: Tensor) -> tuple[Pass, Gradient]:
        """The gradient of `sum_i weights[i] * loss_i` for images `[N, C, H, W]`, and what `moved` needs of it."""
        norms = [layer.norm for layer in self._layers]
        kept = Pass([_FirstBlock(self._w[0], norms[0], self._size)], _Output(self._w[-1], y, weights))
        kept.blocks += map(_Block, self._w[1:-1], norms[1:], self._tiles)
        h = x
        for block in kept.blocks:
            h = block.forward(h)
        g, found = kept.output.gradient(h)
        parts = [found]
        for block in reversed(kept.blocks):
            g, found = block.backward(g)
            parts.insert(0, found)
        return kept, Gradient(parts)

    def moved(self, kept: Pass, v: list[Weights]) -> Tensor:
        """The gradient of `<v, gradient>` with respect to the images of a pass."""
        dh = v[0][0]  # images do not move: the first block has no use for it
        for block, own in zip(kept.blocks, v[:-1], strict=True):
            dh = block.moved(dh, own)
        dg = kept.output.moved(dh, v[-1])
        for block, own in zip(reversed(kept.blocks), reversed(v[:-1]), strict=True):
            dg = block.moved_back(dg, own)
        return dg

    def weights(self, w: Params, missing: float = 0.0) -> list[Weights]:
        """Weights, or a direction of them, as they are computed with; `missing` is the weight of norms without one."""
        found = []
        for depth, layer in enumerate(self._layers):
            weight = w[f"{layer.convolution}.weight"]
            zeros = weight.new_zeros(weight.shape[0])
            bias = w.get(f"{layer.convolution}.bias", zeros)
            scale = w.get(f"{layer.name}.weight", torch.full_like(zeros, missing))
            shift = w.get(f"{layer.name}.bias", zeros)
            if depth:
                found.append([self._tiles[depth - 1].of_weights(weight), scale, shift, bias])
            else:
                both = torch.cat([weight.flatten(1), bias.unsqueeze(1)], 1).T
                found.append([both.double(), scale.double(), shift.double()])
        weight = w[f"{self._output}.weight"]
        pixels_last = weight.view(weight.shape[0], -1, self._pixels).transpose(1, 2)
        return [
            *found,
            [pixels_last.flatten(1), w.get(f"{self._output}.bias", weight.new_zeros(len(weight)))],
        ]

    def to_params(self, gradient: Gradient) -> Params:
        """The same with respect to the model's parameters."""
        out: Params = {}
        for depth, (layer, own) in enumerate(zip(self._layers, gradient.parts[:-1], strict=True)):
            name = f"{layer.convolution}.weight"
            if depth:
                out[name], bias = self._tiles[depth - 1].to_weights(own[0]), own[3]
            else:
                out[name], bias = own[0][:-1].T.reshape(self._like[name].shape), own[0][-1]
            out[f"{layer.convolution}.bias"] = bias
            out[f"{layer.name}.weight"], out[f"{layer.name}.bias"] = own[1:3]
        of_output, out[f"{self._output}.bias"] = gradient.parts[-1]
        channels_last = of_output.view(of_output.shape[0], self._pixels, -1)
        out[f"{self._output}.weight"] = channels_last.transpose(1, 2).flatten(1)
        return {name: out[name].to(leaf.dtype) for name, leaf in self._like.items()}

    @property
    def _pixels(self) -> int:
        """Of the last block's pooled values."""
        return (self._size[0] >> len(self._layers)) * (self._size[1] >> len(self._layers))


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _sums(values: Tensor) -> Tensor:
    """Over the positions of `[4, S, N, tiles, C]`."""
    return values.sum(3).sum((0, 1))


def _where(on: Tensor, g: Tensor) -> Tensor:
    """What reaches one image's outputs `[positions, C]` of its pooled values."""
    found: Tensor = torch.ops.aten.threshold_backward(g.unsqueeze(0), on, 0)
    return found.flatten(0, 1)


def _each(numbers: Tensor) -> Tensor:
    """Numbers per image and channel beside `[4, S, N, tiles, C]`."""
    return numbers.unsqueeze(1)


def _windows(x: Tensor) -> Tensor:
    """The 3x3 windows of images `[N, C, H, W]` and a 1: `[N, 9 C + 1, pixels]`, by their place in a 2x2 tile."""
    n, channels, height, width = x.shape
    image, channel, row, pixel = (padded := functional.pad(x, (1, 1, 1, 1))).stride()
    shape = (n, channels, 3, 3, 2, 2, height // 2, width // 2)
    seen = padded.as_strided(shape, (image, channel, row, pixel, row, pixel, 2 * row, 2 * pixel))
    out = x.new_ones(n, 9 * channels + 1, height * width)
    out[:, :-1].view(shape).copy_(seen)
    return out


def _folded(windows: Tensor, size: tuple[int, int]) -> Tensor:
    """The adjoint of `_windows`, for windows without their 1."""
    n, height, width = windows.shape[0], *size
    parts = windows.view(n, -1, 2, 2, height // 2, width // 2).permute(0, 1, 4, 2, 5, 3)
    return functional.fold(parts.reshape(n, -1, height * width), size, 3, padding=1)
