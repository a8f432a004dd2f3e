"""Products and convolutions whose results are summed over runs of 16 rows by the same kernel."""

from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.rewrites.partial_columns import sums_of_runs

from .convolutions import Conv
from .gemm_cases import HALF, case
from .kernel_cases import fuse


def sums(x, heights):
    """Sums over blocks of `heights`, as far as there are elements."""
    for d, height in enumerate(heights):
        n = x.shape[d]
        count = -(-n // height)
        x = np.pad(x, [(0, (count * height - n) * (d == i)) for i in range(x.ndim)])
        x = x.reshape(*x.shape[:d], count, height, *x.shape[d + 1 :]).sum(d + 1)
    return x


def emit_sums(bb, h, heights, view=None, order=None):
    """Sums of h and of its squares over blocks, in float32."""
    wide = bb.emit(op.astype(h, "float32"))
    wide = wide if view is None else bb.emit(op.reshape(wide, view))
    both = wide, bb.emit(op.multiply(wide, wide))
    return [bb.emit_te(sums_of_runs(heights, order), x) for x in both]


def product_case(name, images, n, k, stored=True, dtype=HALF):
    """relu(x @ w + b) of `images`, whose rows are summed up in runs of 16, and squares of them."""
    *lead, p, q = images
    view, heights = (*lead, p * q, n), (*(1 for _ in lead), 16, 1)

    def emit(bb, x, w, b):
        h = bb.emit(op.nn.relu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b))))
        return relax.Tuple([*([h] if stored else []), *emit_sums(bb, h, heights, view)])

    def reference(x, w, b):
        h = np.maximum(x @ w + b, 0)
        found = [sums(y.reshape(view), heights) for y in (h, h * h)]
        return [h, *found] if stored else found

    return case(name, emit, [(*images, k), (k, n), (n,)], reference, dtype)


@dataclass(frozen=True)
class ReducedConv:
    """A convolution whose results are summed over blocks of positions; `heights` has a number for
    each dimension of the results. They are `stored`, or nothing but the sums, whose dimensions may
    be in another `order`.
    """

    conv: Conv
    heights: tuple[int, ...]
    stored: bool = True
    order: tuple[int, ...] | None = None

    def func(self):
        """The fused PrimFunc."""

        def emit(bb, *inputs):
            h = bb.emit(self.conv.emit(bb, *inputs))
            found = emit_sums(bb, h, self.heights, order=self.order)
            return relax.Tuple([*([h] if self.stored else []), *found])

        shapes = [self.conv.data_shape, self.conv.weight_shape, *self.conv.extra]
        return fuse(emit, *((s, self.conv.dtype) for s in shapes))

    def expected(self, inputs):
        """Results in float64."""
        (h,) = self.conv.expected(inputs)
        found = [sums(y, self.heights) for y in (h, h * h)]
        found = found if self.order is None else [y.transpose(self.order) for y in found]
        return [h, *found] if self.stored else found
