"""What the forms of transposing kernels share: values of one row, conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import then
from ..gpu.scope import Point, RowScope


def row_values(
    scope: RowScope,
    column: Expr,
    width: int,
    registers: Callable[[int], Mapping[Var, Expr]],
) -> list[list[Expr]]:
    """The `width` columns from `column` on of each output, in the row that `scope` knows.

    `registers` gives, for the number of a column, the loads that are in registers.
    """
    values = [output.value for output in scope.program.outputs]
    scope.prepare_values(values)
    prepared = [scope.prepare(value) for value in values]
    results: list[list[Expr]] = [[] for _ in prepared]
    for lane in range(width):
        point = Point(scope, column + lane, registers(lane).get)
        for lanes, expr in zip(results, prepared, strict=True):
            lanes.append(T.Bind(point.evaluate(expr)))
    return results


@contextmanager
def when(*conditions: Expr | None) -> Iterator[None]:
    """Statements under those of the conditions that are not None."""
    with ExitStack() as stack:
        for condition in conditions:
            if condition is not None:
                stack.enter_context(then(condition))
        yield
