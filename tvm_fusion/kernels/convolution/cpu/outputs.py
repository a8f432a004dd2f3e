"""What stands behind the sums of a convolution, and how it is stored.

    sums[position, filter]                             a block of positions, vectors of filters
    y[n, f, y, x] = relu(sums * scale[f] + shift[f])   vectors along what y is contiguous in

Where results are contiguous along positions, squares of sums are transposed in registers first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ...contraction.model import INDEX, Simplifier
from ...cpu.loops import Loop, seq
from ...cpu.nests.emit_transpose import transposed
from ...cpu.nests.scope import Scope, allocate, new_buffer
from ...cpu.stages.resolve import Point, Resolve
from ...cpu.stages.stages import offset
from ...program.expr import constant, convert, number, substitute
from ..geometry import Convolution

Env = Mapping[Var, Expr]


def along_filters(convolution: Convolution) -> bool:
    """Whether the first output is contiguous along filters rather than along positions."""
    if convolution.filters is None:
        return False
    output = convolution.segment.outputs[0]
    buffer = convolution.contraction.params[output.param].var
    at = offset(buffer, list(output.indices))
    axes = convolution.segment.space
    here = {a.var: constant(0, INDEX) for a in axes}
    simplify = Simplifier(axes)
    ends = ({**here, convolution.filters.var: constant(n, INDEX)} for n in (0, 1))
    first, second = (number(simplify(substitute(at, end))) for end in ends)
    return second - first == 1


class Outputs:
    """Writes what is computed of sums."""

    def __init__(self, convolution: Convolution, scope: Scope) -> None:
        self.convolution = convolution
        self.scope, self.loops = scope, scope.loops

    def point(self, env: Env, total: Expr, lane: Loop | None) -> list:
        """The stores of one result (a vector of them along `lane`); `env` has all axes."""
        segment = self.convolution.segment
        point = Point(lane)
        resolve = Resolve(self.scope, dict(env), point)
        product = self.convolution.product
        resolve.env[product.accumulator] = resolve.bind("total", convert(total, product.dtype))
        for binding in segment.bindings:
            resolve.env[binding.var] = resolve.bind(binding.var.name, resolve(binding.value))
        for output in segment.outputs:
            buffer = self.convolution.contraction.params[output.param].var
            value = convert(resolve(output.value), output.dtype)
            indices = [self.loops.simplify(resolve(i)) for i in output.indices]
            point.ops.append(tirx.BufferStore(buffer, value, indices))
        return point.ops


def transpose_sums(
    loops,
    lanes: int,
    count: int,
    dtype: str,
    load: Callable[[Expr, Expr], Expr],
    store: Callable[[Expr, Expr, Expr], tirx.Stmt],
) -> tirx.Stmt:
    """Transpose a vector of filters of `count` positions, square by square.

    Parameters
    ----------
    load : callable
        The sum of a position and a lane.
    store : callable
        Stores a value: its lane, its position.
    """
    square = loops.new("square", -(-count // lanes))
    first = square.value * loops.imm(lanes)
    rows = [new_buffer("row", [loops.imm(lanes)], dtype) for _ in range(lanes)]

    def vector(body: Callable[[Expr], tirx.Stmt]) -> tirx.Stmt:
        lane = loops.new("v", lanes, ForKind.VECTORIZED)
        return lane.around(body(lane.value))

    def read(r: int) -> tirx.Stmt:
        at = loops.simplify(first + loops.imm(r))
        return vector(lambda v: tirx.BufferStore(rows[r], load(at, v), [v]))

    def write(r: int) -> tirx.Stmt:
        return vector(
            lambda v: store(tirx.BufferLoad(rows[r], [v]), loops.imm(r), loops.simplify(first + v))
        )

    body = seq(
        *map(allocate, rows),
        *map(read, range(lanes)),
        transposed(rows),
        *map(write, range(lanes)),
    )
    return square.around(body)
