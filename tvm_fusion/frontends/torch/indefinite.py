"""Factors of symmetric matrices that are not definite, and what is solved with them.

    linalg.ldl_factor(A)  ->  P L D L^T P^T, D with blocks of one or two rows on its diagonal

Bunch and Kaufman's pivots as LAPACK's `sytf2` and `sytrs` choose and apply them, of the lower
triangle (Golub and Van Loan, Matrix Computations, 4.4): a pivot above 0 is a row that was swapped
with this one, a pair of equal ones below 0 is a block of two rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .linalg import WIDE, Matrix, constant, copied, factorization, swap, swap_rows
from .loops import variable
from .operators import Converter

_ALPHA = (1 + math.sqrt(17)) / 8  # bounds how much elements grow in one step and in two


def _factor_shapes(args: dict, a: Sequence[int]) -> list[tuple[list[int], str]]:
    return [(list(a), WIDE), ([1, a[0]], "int32"), ([1, 1], "int32")]


def _factor(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    ((size, _),), (given,), (a, pivots, info) = extents, taken, made
    with T.serial(0, size) as i, T.serial(0, size) as j:
        a[i, j] = tirx.Select(j <= i, given[i, j], constant(0))
    info[0, 0] = _integer(0)
    k = variable("int32", 0)
    with T.While(k[0] < size):
        rows, other, largest = variable("int32", 1), variable("int32", k[0]), variable(WIDE, 0)
        _pivot(a, size, k[0], rows, other, largest)
        with T.If(tirx.Not(largest[0] > constant(0))):
            with T.Then(), T.If(info[0, 0] == 0), T.Then():
                info[0, 0] = k[0] + 1
            with T.Else():
                _swap_rows(a, size, k[0], rows[0], other[0])
                with T.If(rows[0] == 1):
                    with T.Then():
                        _eliminate(a, size, k[0])
                    with T.Else():
                        _eliminate_two(a, size, k[0])
        pivot = variable("int32", tirx.Select(rows[0] == 1, other[0] + 1, -other[0] - 1))
        pivots[0, k[0]] = pivot[0]
        with T.If(rows[0] == 2), T.Then():
            pivots[0, k[0] + 1] = pivot[0]
        k[0] = k[0] + rows[0]


def _pivot(a: Matrix, size: int, k: Expr, rows: Any, other: Any, largest: Any) -> None:
    """How many rows the block at k has, which row comes to its last, and the largest element of
    column k.
    """
    below, place = variable(WIDE, 0), variable("int32", k)
    with T.serial(k + 1, size) as i, T.If(tirx.abs(a[i, k]) > below[0]), T.Then():
        below[0] = tirx.abs(a[i, k])
        place[0] = i
    own = variable(WIDE, tirx.abs(a[k, k]))
    largest[0] = tirx.max(own[0], below[0])
    with T.If(own[0] < _ALPHA * below[0]), T.Then():
        across = variable(WIDE, 0)
        with T.serial(k, place[0]) as j:
            across[0] = tirx.max(across[0], tirx.abs(a[place[0], j]))
        with T.serial(place[0] + 1, size) as i:
            across[0] = tirx.max(across[0], tirx.abs(a[i, place[0]]))
        with T.If(own[0] * across[0] < _ALPHA * below[0] * below[0]), T.Then():
            other[0] = place[0]
            rows[0] = tirx.Select(
                tirx.abs(a[place[0], place[0]]) >= _ALPHA * across[0], _integer(1), _integer(2)
            )


def _swap_rows(a: Matrix, size: int, k: Expr, rows: Expr, other: Expr) -> None:
    """Rows and columns of the last row of a block and of another one, in the lower triangle."""
    last = variable("int32", k + rows - 1)
    with T.If(other != last[0]), T.Then():
        with T.serial(other + 1, size) as i:
            swap(a, (i, last[0]), (i, other))
        with T.serial(last[0] + 1, other) as i:
            swap(a, (i, last[0]), (other, i))
        swap(a, (last[0], last[0]), (other, other))
        with T.If(rows == 2), T.Then():
            swap(a, (k + 1, k), (other, k))


def _eliminate(a: Matrix, size: int, k: Expr) -> None:
    with T.serial(0, size - k - 1) as column:
        j = column + k + 1
        factor = variable(WIDE, a[j, k] / a[k, k])
        with T.serial(j, size) as i:
            a[i, j] = a[i, j] - a[i, k] * factor[0]
    with T.serial(k + 1, size) as i:
        a[i, k] = a[i, k] / a[k, k]


def _eliminate_two(a: Matrix, size: int, k: Expr) -> None:
    off = variable(WIDE, a[k + 1, k])
    lower, upper = variable(WIDE, a[k + 1, k + 1] / off[0]), variable(WIDE, a[k, k] / off[0])
    scale = variable(WIDE, 1.0 / (lower[0] * upper[0] - 1.0) / off[0])
    with T.serial(0, size - k - 2) as column:
        j = column + k + 2
        first = variable(WIDE, scale[0] * (lower[0] * a[j, k] - a[j, k + 1]))
        second = variable(WIDE, scale[0] * (upper[0] * a[j, k + 1] - a[j, k]))
        with T.serial(j, size) as i:
            a[i, j] = a[i, j] - a[i, k] * first[0] - a[i, k + 1] * second[0]
        a[j, k] = first[0]
        a[j, k + 1] = second[0]


def _integer(value: int) -> Expr:
    return tirx.const(value, "int32")


# ---- Solutions: P L, D, and L^T P^T one after the other.


def _solve_shapes(
    args: dict, a: Sequence[int], pivots: Sequence[int], b: Sequence[int]
) -> list[tuple[list[int], str]]:
    return [(list(b), WIDE)]


def _solve(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    (size, _), _, (_, columns) = extents
    (a, pivots, b), (x,) = taken, made
    copied(b, x, size, columns)
    k = variable("int32", 0)
    with T.While(k[0] < size):
        at, other = k[0], _swapped(pivots, k[0])
        with T.If(pivots[0, at] > constant(0)):
            with T.Then():
                swap_rows(x, at, other[0], columns)
                with T.serial(0, columns) as j:
                    with T.serial(at + 1, size) as i:
                        x[i, j] = x[i, j] - a[i, at] * x[at, j]
                    x[at, j] = x[at, j] / a[at, at]
                k[0] = k[0] + 1
            with T.Else():
                swap_rows(x, at + 1, other[0], columns)
                with T.serial(0, columns) as j:
                    with T.serial(at + 2, size) as i:
                        x[i, j] = x[i, j] - a[i, at] * x[at, j] - a[i, at + 1] * x[at + 1, j]
                    _solve_block(a, x, at, j)
                k[0] = k[0] + 2
    k[0] = _integer(size - 1)
    with T.While(k[0] >= 0):
        at, other = k[0], _swapped(pivots, k[0])
        rows = variable("int32", tirx.Select(pivots[0, at] > constant(0), _integer(1), _integer(2)))
        with T.serial(0, columns) as j, T.serial(0, rows[0]) as row, T.serial(at + 1, size) as i:
            x[at - row, j] = x[at - row, j] - a[i, at - row] * x[i, j]
        swap_rows(x, at, other[0], columns)
        k[0] = k[0] - rows[0]


def _swapped(pivots: Matrix, k: Expr) -> Any:
    """The row that a pivot names."""
    return variable("int32", tirx.Cast("int32", tirx.abs(pivots[0, k])) - 1)


def _solve_block(a: Matrix, x: Matrix, k: Expr, j: Expr) -> None:
    off = variable(WIDE, a[k + 1, k])
    upper, lower = variable(WIDE, a[k, k] / off[0]), variable(WIDE, a[k + 1, k + 1] / off[0])
    scale = variable(WIDE, 1.0 / (upper[0] * lower[0] - 1.0))
    first, second = variable(WIDE, x[k, j] / off[0]), variable(WIDE, x[k + 1, j] / off[0])
    x[k, j] = (lower[0] * first[0] - second[0]) * scale[0]
    x[k + 1, j] = (upper[0] * second[0] - first[0]) * scale[0]


CONVERTERS: dict[str, Converter] = {
    "linalg_ldl_factor_ex.default": factorization(1, _factor, _factor_shapes),
    "linalg_ldl_solve.default": factorization(3, _solve, _solve_shapes),
}
