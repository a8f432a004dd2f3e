"""Results of 16 queries of each warp leave from registers.

Two neighbouring columns are stored at once where they lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.model import Output
from ...gemm.hopper.epilogue import PAIRED_DTYPES
from ...gpu.access import affine_access
from ...gpu.product_frame import coordinates
from ...gpu.product_math import lower
from ...gpu.words import store_pair
from ...program.expr import bytes_of, convert
from .tiles import Tile, TiledKernel


class RowStores:
    """Emits the stores of a thread that holds `column` and the next of every 8 columns.

    `results` are its accumulators: element ``4 * i + 2 * half + v`` is of row `half` and column
    ``8 * i + column + v``.
    """

    def __init__(self, kernel: TiledKernel, results: Expr, lane: Expr, column: Expr):
        self.kernel, self.frame, self.results = kernel, kernel.frame, results
        self.attention, self.features = kernel.problem.attention, kernel.problem.features
        self.lane, self.column = lane, column

    def emit(self, tile: Tile, half: int, row: Expr, lse: Expr | None, whole: bool) -> None:
        """Emits the outputs of a row that exists; those over the features only if `whole`."""
        env = dict(tile.axes)
        env |= coordinates(self.attention.queries, row, self.frame)
        if lse is not None:
            env[self.attention.lse] = lse
        if self.attention.row_outputs:
            with T.If(self.lane % 4 == 0), T.Then():
                for output in self.attention.row_outputs:
                    value = lower(self.frame.rewrite(output.value, env), False)
                    indices = self.frame.place(output.indices, env)
                    target = self.frame.output(output.param)
                    T.buffer_store(target, convert(value, output.dtype), indices)
        if not whole:
            return
        for group in range(self.features // 8):
            column = group * 8 + self.column
            pair = [self._values(env, group, half, v, column + v) for v in range(2)]
            for position, output in enumerate(self.attention.outputs):
                self._store(output, env, column, [values[position] for values in pair])

    def _values(
        self, env: dict[Var, Expr], group: int, half: int, v: int, column: Expr
    ) -> list[Expr]:
        """The outputs of one element."""
        env = env | coordinates(self.attention.features, column, self.frame)
        env[self.attention.result] = T.Bind(self.results[group * 4 + half * 2 + v])
        outputs = self.attention.outputs
        halves = all(bytes_of(output.dtype) <= 2 for output in outputs)
        for binding in self.attention.output_bindings:
            env[binding.var] = T.Bind(lower(self.frame.rewrite(binding.value, env), halves))
        return [T.Bind(lower(self.frame.rewrite(o.value, env), halves)) for o in outputs]

    def _store(
        self, output: Output, env: dict[Var, Expr], column: Expr, pair: Sequence[Expr]
    ) -> None:
        target = self.frame.output(output.param)
        paired = self._is_paired(output)
        for v in range(1 if paired else 2):
            point = env | coordinates(self.attention.features, column + v, self.frame)
            indices = self.frame.place(output.indices, point)
            if paired:
                low, high = (convert(x, "float32") for x in pair)
                T.evaluate(store_pair(output.dtype, target.ptr_to(indices), low, high))
            else:
                T.buffer_store(target, convert(pair[v], output.dtype), indices)

    def _is_paired(self, output: Output) -> bool:
        """Whether columns 2 i and 2 i + 1 are one aligned access."""
        if output.dtype not in PAIRED_DTYPES:
            return False
        groups = {name: self.attention.groups[name] for name in ("batch", "m", "e")}
        shape = self.attention.params[output.param].shape
        access = affine_access(output.indices, shape, groups)
        return access is not None and access.aligned(2, "e")
