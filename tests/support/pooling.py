"""Convolutions whose results are pooled by the same kernel."""

from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from .convolutions import Conv
from .kernel_cases import fuse


@dataclass(frozen=True)
class PooledConv:
    """A convolution, channels last, whose results are pooled over windows of `window` positions
    that lie beside each other: by their maximum or their `mean`. The results are `stored`, too, or
    nothing but what is pooled, with its dimensions in another `order` and a function `behind` it.
    """

    conv: Conv
    window: tuple[int, ...]
    mean: bool = False
    stored: bool = False
    order: tuple[int, ...] | None = None
    behind: bool = False

    def emit(self, bb, *inputs):
        """The graph."""
        h = bb.emit(self.conv.emit(bb, *inputs))
        name = ("avg_pool" if self.mean else "max_pool") + f"{self.conv.rank}d"
        windows = self.window, self.window
        y = bb.emit(getattr(op.nn, name)(h, *windows, layout=self.conv.data_layout))
        if self.behind:
            y = bb.emit(op.multiply(op.tanh(y), relax.const(3.0, self.conv.dtype)))
        if self.order is not None:
            y = bb.emit(op.permute_dims(y, self.order))
        return relax.Tuple([h, y]) if self.stored else y

    @property
    def is_whole(self):
        """Whether each position is in a window."""
        pairs = zip(self.conv.output_sizes, self.window, strict=True)
        return all(n % height == 0 for n, height in pairs)

    @property
    def inputs(self):
        """Shapes and dtypes."""
        conv = self.conv
        shapes = [conv.data_shape, conv.weight_shape, *conv.extra, *conv.further_parts]
        return [(shape, conv.dtype) for shape in shapes]

    def func(self):
        """The fused PrimFunc."""
        return fuse(self.emit, *self.inputs)

    def expected(self, inputs):
        """Results in float64."""
        (h,) = self.conv.expected(inputs)
        y = pooled(h, (1, *self.window, 1), np.mean if self.mean else np.max)
        y = 3 * np.tanh(y) if self.behind else y
        y = y if self.order is None else y.transpose(self.order)
        return [h, y] if self.stored else [y]


def pooled(x, heights, reduce):
    """Blocks of `heights` reduced, those that there are whole."""
    counts = [n // height for n, height in zip(x.shape, heights, strict=True)]
    x = x[tuple(slice(n * height) for n, height in zip(counts, heights, strict=True))]
    x = x.reshape([n for pair in zip(counts, heights, strict=True) for n in pair])
    return reduce(x, axis=tuple(range(1, x.ndim, 2)))
