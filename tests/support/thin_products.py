"""Products of few terms and columns over many positions, as 1 x 1 convolutions of MobileNet and
EfficientNet are behind `AssignLayouts`: with scale and shift, then a residual or a relu.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.relax import op

from .kernel_cases import fuse, numpy_dtype


@dataclass(frozen=True)
class Thin:
    """``x (32 x size x size positions of terms) w``; weights lie by terms, or by columns."""

    size: int
    terms: int
    columns: int
    residual: bool = False
    batch: int = 32
    dtype: str = "float16"
    by_columns: bool = False

    @property
    def name(self) -> str:
        more = " + residual" if self.residual else ""
        return f"{self.size} {self.terms}-{self.columns}{more}"

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.size, self.size, self.columns)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of data, weights, scale, shift, and what is added."""
        weights = (self.terms, self.columns)
        found = [
            (self.batch, self.size, self.size, self.terms),
            weights[::-1] if self.by_columns else weights,
            (self.columns,),
            (self.columns,),
        ]
        return [*found, self.output_shape] if self.residual else found

    def emit(self, bb, x, w, scale, shift, *more):
        """The graph."""
        if self.by_columns:
            w = bb.emit(op.permute_dims(w))
        y = bb.emit(op.multiply(bb.emit(op.matmul(x, w)), scale))
        y = bb.emit(op.add(y, shift))
        return bb.emit(op.add(y, more[0]) if more else op.nn.relu(y))

    def func(self) -> tirx.PrimFunc:
        """The fused PrimFunc."""
        return fuse(self.emit, *((s, self.dtype) for s in self.shapes))

    def arrays(self) -> list[np.ndarray]:
        """Inputs, equal in every run."""
        rng = np.random.default_rng(0)
        found = [rng.standard_normal(s) for s in self.shapes]
        found[1] *= self.terms**-0.5
        return [a.astype(numpy_dtype(self.dtype)) for a in found]

    def expected(self, arrays):
        """The results in float64, of arrays or of tensors."""
        x, w, scale, shift, *more = arrays
        y = x @ (w.T if self.by_columns else w) * scale + shift
        return y + more[0] if more else y.clip(0)


THIN = tuple(
    Thin(*numbers)
    for numbers in (
        *((112, 16, 16, True), (112, 16, 64), (112, 32, 16), (112, 16, 96), (56, 64, 24)),
        *((56, 24, 72), (56, 72, 24, True), (56, 96, 24), (56, 24, 144), (56, 144, 24, True)),
        *((28, 72, 40), (28, 40, 120), (28, 120, 40, True), (28, 40, 240), (28, 240, 40, True)),
        *((56, 64, 64), (14, 80, 480), (14, 480, 80, True)),
    )
)

WIDE = (Thin(56, 64, 256), Thin(56, 64, 256, True), Thin(28, 128, 512, True))
"""Those that end blocks of ResNet-50: few terms, many columns."""
