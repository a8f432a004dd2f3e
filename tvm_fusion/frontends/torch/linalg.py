"""Factorizations of matrices as loops, and what is computed with them.

    linalg.solve(A, B)  ->  LU, pivots = lu_factor(A);  P, L and U triangles of it
                            solve_triangular(U, solve_triangular(L, P^T B))

Each matrix of a batch by itself, in parallel, in float64; textbook loops (Golub and Van Loan,
Matrix Computations: 3.4 LU with partial pivoting, 4.2 Cholesky, 5.2 Householder, 8.5 and 8.6
Jacobi), for matrices of tens or hundreds of rows. Signs are those of LAPACK, but for vectors of
eigenvalues and of singular values, whose signs nobody gives.

Does not handle: singular vectors beyond the smaller extent, which are not determined; errors that
PyTorch raises of matrices that are singular.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...errors import FrontendError
from .importer import Importer, bound_arguments
from .loops import known_shape, loops, variable
from .operators import Converter

_aten = torch.ops.aten
Tensor = torch.Tensor
WIDE = "float64"
SWEEPS = 16  # of Jacobi's method; it converges quadratically, after some six


class Matrix:
    """A matrix in a flat buffer."""

    def __init__(self, buffer: Any, begin: Expr | int, columns: int) -> None:
        self._buffer, self._begin, self._columns = buffer, begin, columns

    def _place(self, at: tuple) -> Expr:
        return self._begin + at[0] * self._columns + at[1]

    def __getitem__(self, at: tuple) -> Expr:
        return self._buffer[self._place(at)]

    def __setitem__(self, at: tuple, value: Expr | float) -> None:
        self._buffer[self._place(at)] = value


def constant(value: float) -> Expr:
    return tirx.const(value, WIDE)


def copied(source: Matrix, to: Matrix, rows: int, columns: int) -> None:
    with T.serial(0, rows) as i, T.serial(0, columns) as j:
        to[i, j] = source[i, j]


def identity(to: Matrix, size: int) -> None:
    with T.serial(0, size) as i, T.serial(0, size) as j:
        to[i, j] = tirx.Select(i == j, constant(1), constant(0))


def swap(m: Matrix, first: tuple, second: tuple) -> None:
    kept = variable(WIDE, m[first])
    m[first] = m[second]
    m[second] = kept[0]


def swap_rows(m: Matrix, row: Expr, other: Expr, columns: int) -> None:
    """Two rows exchanged, if they are two."""
    with T.If(row != other), T.Then(), T.serial(0, columns) as j:
        swap(m, (row, j), (other, j))


Body = Callable[[dict, list, list, list], None]
Shapes = Callable[..., list[tuple[list[int], str]]]
VECTORS = ("tau", "LU_pivots", "pivots")  # arguments that are rows; the others are matrices


def factored(
    importer: Importer, node: fx.Node, count: int, body: Body, shapes: Shapes
) -> list[relax.Expr]:
    """What `body(arguments, extents, matrices, results)` writes for each matrix of a batch: the
    first `count` arguments are matrices, `shapes(arguments, *extents)` are those of the results.
    """
    args = bound_arguments(node)
    names = list(args)[:count]
    whole = [known_shape(args[name]) for name in names]
    rows = [[*s[:-1], 1, s[-1]] if n in VECTORS else s for n, s in zip(names, whole, strict=True)]
    extents, batch = [shape[-2:] for shape in rows], rows[0][:-2]
    if any(shape[:-2] != batch for shape in rows):
        raise FrontendError("matrices whose batches have to be broadcast: expand them")
    wanted, number = shapes(args, *extents), math.prod(batch)
    if any(0 in shape for shape in whole):
        return [
            importer.emit(relax.op.zeros(relax.ShapeExpr([*batch, *shape]), dtype))
            for shape, dtype in wanted
        ]

    def write(ins: list, outs: list) -> None:
        with T.parallel(0, number) as b:
            taken = [Matrix(x, b * (m * n), n) for x, (m, n) in zip(ins, extents, strict=True)]
            made = [
                Matrix(x, b * math.prod(shape), shape[-1])
                for x, (shape, _) in zip(outs, wanted, strict=True)
            ]
            body(args, extents, taken, made)

    inputs = [importer.operand(args[name], WIDE) for name in names]
    results = [([*batch, *shape], dtype) for shape, dtype in wanted]
    return loops(importer, node.target.__name__.split(".")[0], inputs, results, write)


def factorization(count: int, body: Body, shapes: Shapes) -> Converter:
    """An operator whose results are the first that `body` writes."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        return typed_results(importer, node, factored(importer, node, count, body, shapes))

    return convert


def typed_results(importer: Importer, node: fx.Node, found: Sequence[relax.Expr]) -> relax.Expr:
    """Results in the types and shapes of a node's."""
    values = node.meta["val"]
    likes = values if isinstance(values, tuple | list) else [values]

    def typed(x: relax.Expr, like: torch.Tensor) -> relax.Expr:
        if not like.numel():
            return importer._zeros(like)
        x = importer.cast(x, importer._convert_data_type(like.dtype))
        return importer.emit(relax.op.reshape(x, list(like.shape)))

    results = [typed(x, like) for x, like in zip(found, likes, strict=False)]
    return relax.Tuple(results) if isinstance(values, tuple | list) else results[0]


# ---- LU and Cholesky.


def _lu_shapes(args: dict, a: Sequence[int]) -> list[tuple[list[int], str]]:
    return [(list(a), WIDE), ([1, min(a)], "int32"), ([1, 1], "int32")]


def _lu(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    ((rows, columns),), (given,), (a, pivots, info) = extents, taken, made
    copied(given, a, rows, columns)
    info[0, 0] = tirx.const(0, "int32")
    with T.serial(0, min(rows, columns)) as k:
        best, place = variable(WIDE, tirx.abs(a[k, k])), variable("int32", tirx.Cast("int32", k))
        if args["pivot"]:
            with T.serial(k + 1, rows) as i, T.If(tirx.abs(a[i, k]) > best[0]), T.Then():
                best[0] = tirx.abs(a[i, k])
                place[0] = tirx.Cast("int32", i)
        pivots[0, k] = place[0] + 1
        swap_rows(a, k, place[0], columns)
        with T.If(a[k, k] == constant(0)):
            with T.Then(), T.If(info[0, 0] == 0), T.Then():
                info[0, 0] = tirx.Cast("int32", k) + 1
            with T.Else(), T.serial(k + 1, rows) as i:
                a[i, k] = a[i, k] / a[k, k]
                with T.serial(k + 1, columns) as j:
                    a[i, j] = a[i, j] - a[i, k] * a[k, j]


def _cholesky_shapes(args: dict, a: Sequence[int]) -> list[tuple[list[int], str]]:
    return [(list(a), WIDE), ([1, 1], "int32")]


def _cholesky(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    """The lower triangle, of the upper one's transpose where that is given."""
    ((size, _),), (given,), (triangle, info) = extents, taken, made
    upper = args["upper"]

    def at(i: Expr, j: Expr) -> tuple:
        return (j, i) if upper else (i, j)

    info[0, 0] = tirx.const(0, "int32")
    with T.serial(0, size) as i, T.serial(0, size) as j:
        triangle[i, j] = 0.0
    with T.serial(0, size) as j:
        total = variable(WIDE, given[j, j])
        with T.serial(0, j) as k:
            total[0] = total[0] - triangle[at(j, k)] * triangle[at(j, k)]
        with T.If(tirx.And(info[0, 0] == 0, total[0] <= constant(0))), T.Then():
            info[0, 0] = tirx.Cast("int32", j) + 1
        triangle[at(j, j)] = tirx.sqrt(total[0])
        with T.serial(j + 1, size) as i:
            total[0] = given[at(i, j)]
            with T.serial(0, j) as k:
                total[0] = total[0] - triangle[at(i, k)] * triangle[at(j, k)]
            triangle[at(i, j)] = total[0] / triangle[at(j, j)]


def _triangular_shapes(
    args: dict, a: Sequence[int], b: Sequence[int]
) -> list[tuple[list[int], str]]:
    return [(list(b), WIDE)]


def _triangular(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    """X of A X = B, of X A = B where `left` is not."""
    (size, _), (rows, columns) = extents
    (a, b), (x,) = taken, made
    left, upper = args["left"], args["upper"]
    copied(b, x, rows, columns)
    others = columns if left else rows

    def at(i: Expr, other: Expr) -> tuple:
        return (i, other) if left else (other, i)

    def factor(i: Expr, k: Expr) -> Expr:
        return a[i, k] if left else a[k, i]

    backwards = upper if left else not upper
    with T.serial(0, others) as other, T.serial(0, size) as step:
        i = size - 1 - step if backwards else step
        total = variable(WIDE, x[at(i, other)])
        with T.serial(0, step) as past:
            k = size - 1 - past if backwards else past
            total[0] = total[0] - factor(i, k) * x[at(k, other)]
        x[at(i, other)] = total[0] if args["unitriangular"] else total[0] / a[i, i]


def _permutation_shapes(
    args: dict, a: Sequence[int], pivots: Sequence[int]
) -> list[tuple[list[int], str]]:
    return [([a[0], a[0]], WIDE)]


def _permutation(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    """P of A = P L U: the rows of the identity, swapped back from the last on."""
    (size, _), (_, count) = extents
    (_, pivots), (p,) = taken, made
    identity(p, size)
    with T.serial(0, count) as step:
        k = count - 1 - step
        other = variable("int32", tirx.Cast("int32", pivots[0, k]) - 1)
        swap_rows(p, k, other[0], size)


# ---- Householder reflections.


def _householder_shapes(
    args: dict, a: Sequence[int], tau: Sequence[int]
) -> list[tuple[list[int], str]]:
    return [(list(a), WIDE)]


def _geqrf_shapes(args: dict, a: Sequence[int]) -> list[tuple[list[int], str]]:
    return [(list(a), WIDE), ([1, min(a)], WIDE)]


def _geqrf(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    ((rows, columns),), (given,), (a, tau) = extents, taken, made
    copied(given, a, rows, columns)
    with T.serial(0, min(rows, columns)) as k:
        below = variable(WIDE, 0)
        with T.serial(k + 1, rows) as i:
            below[0] = below[0] + a[i, k] * a[i, k]
        tau[0, k] = 0.0
        with T.If(below[0] > constant(0)), T.Then():
            norm = tirx.sqrt(a[k, k] * a[k, k] + below[0])
            beta = variable(WIDE, tirx.Select(a[k, k] > constant(0), -norm, norm))
            tau[0, k] = (beta[0] - a[k, k]) / beta[0]
            scale = variable(WIDE, a[k, k] - beta[0])
            with T.serial(k + 1, rows) as i:
                a[i, k] = a[i, k] / scale[0]
            a[k, k] = beta[0]
            with T.serial(k + 1, columns) as j:
                _reflect(a, tau[0, k], a, k, j, rows)


def _reflect(v: Matrix, tau: Expr, x: Matrix, k: Expr, j: Expr, rows: int) -> None:
    """Column j of x less tau v (v^T x), of the vector below the diagonal in column k."""
    product = variable(WIDE, x[k, j])
    with T.serial(k + 1, rows) as i:
        product[0] = product[0] + v[i, k] * x[i, j]
    x[k, j] = x[k, j] - tau * product[0]
    with T.serial(k + 1, rows) as i:
        x[i, j] = x[i, j] - tau * v[i, k] * product[0]


def _householder(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    """The first columns of the product of reflections."""
    (rows, columns), (_, count) = extents
    (v, tau), (q,) = taken, made
    with T.serial(0, rows) as i, T.serial(0, columns) as j:
        q[i, j] = tirx.Select(i == j, constant(1), constant(0))
    with T.serial(0, count) as step:
        k = count - 1 - step
        with T.serial(0, columns) as j:
            _reflect(v, tau[0, k], q, k, j, rows)


# ---- Eigenvalues and singular values, by Jacobi's rotations.


def rotate(
    m: Matrix, first: Callable, second: Callable, size: Expr | int, c: Expr, s: Expr
) -> None:
    """Two rows or columns of a matrix turned by an angle."""
    with T.serial(0, size) as i:
        x, y = variable(WIDE, m[first(i)]), variable(WIDE, m[second(i)])
        m[first(i)] = c * x[0] - s * y[0]
        m[second(i)] = s * x[0] + c * y[0]


def _angle(half_difference: Expr, off: Expr) -> tuple[Any, Any]:
    """Cosine and sine of the rotation that makes an element off the diagonal 0."""
    theta = half_difference / off
    size = tirx.abs(theta) + tirx.sqrt(theta * theta + constant(1))
    tangent = variable(WIDE, tirx.Select(theta < constant(0), -1.0 / size, 1.0 / size))
    cosine = variable(WIDE, 1.0 / tirx.sqrt(tangent[0] * tangent[0] + constant(1)))
    return cosine, variable(WIDE, tangent[0] * cosine[0])


def _sorted(values: Matrix, vectors: list[Matrix], size: int, rows: list[int], down: bool) -> None:
    """Values in order, and the columns that belong to them."""
    with T.serial(0, size) as k:
        best = variable("int32", tirx.Cast("int32", k))
        with T.serial(k + 1, size) as i:
            one, other = values[0, i], values[0, best[0]]
            with T.If(one > other if down else one < other), T.Then():
                best[0] = tirx.Cast("int32", i)
        with T.If(best[0] != k), T.Then():
            swap(values, (0, k), (0, best[0]))
            for m, extent in zip(vectors, rows, strict=True):
                with T.serial(0, extent) as i:
                    swap(m, (i, k), (i, best[0]))


def _eigh_shapes(args: dict, a: Sequence[int]) -> list[tuple[list[int], str]]:
    return [([1, a[0]], WIDE), (list(a), WIDE), (list(a), WIDE)]


def _eigh(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    ((size, _),), (given,), (values, v, a) = extents, taken, made
    lower = args["UPLO"] == "L"
    with T.serial(0, size) as i, T.serial(0, size) as j:
        kept = i >= j if lower else i <= j
        a[i, j] = tirx.Select(kept, given[i, j], given[j, i])
    identity(v, size)
    with T.serial(0, SWEEPS), T.serial(0, size) as p, T.serial(p + 1, size) as q:
        is_left = tirx.abs(a[p, q]) > constant(1e-300)
        with T.If(is_left), T.Then():
            c, s = _angle((a[q, q] - a[p, p]) / 2.0, a[p, q])
            rotate(a, lambda i: (i, p), lambda i: (i, q), size, c[0], s[0])
            rotate(a, lambda i: (p, i), lambda i: (q, i), size, c[0], s[0])
            rotate(v, lambda i: (i, p), lambda i: (i, q), size, c[0], s[0])
    with T.serial(0, size) as i:
        values[0, i] = a[i, i]
    _sorted(values, [v], size, [size], down=False)


def _svd_shapes(args: dict, a: Sequence[int]) -> list[tuple[list[int], str]]:
    """Of A or its transpose, which has no more columns than rows."""
    least, most = min(a), max(a)
    return [([most, least], WIDE), ([1, least], WIDE), ([least, least], WIDE)]


def _svd(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    ((rows, columns),), (given,), (u, values, v) = extents, taken, made
    turned = rows < columns
    most, least = (columns, rows) if turned else (rows, columns)
    with T.serial(0, most) as i, T.serial(0, least) as j:
        u[i, j] = given[j, i] if turned else given[i, j]
    identity(v, least)
    with T.serial(0, SWEEPS), T.serial(0, least) as p, T.serial(p + 1, least) as q:
        first, second, off = (variable(WIDE, 0) for _ in range(3))
        with T.serial(0, most) as i:
            first[0] = first[0] + u[i, p] * u[i, p]
            second[0] = second[0] + u[i, q] * u[i, q]
            off[0] = off[0] + u[i, p] * u[i, q]
        with T.If(tirx.abs(off[0]) > 1e-17 * tirx.sqrt(first[0] * second[0])), T.Then():
            c, s = _angle((second[0] - first[0]) / 2.0, off[0])
            rotate(u, lambda i: (i, p), lambda i: (i, q), most, c[0], s[0])
            rotate(v, lambda i: (i, p), lambda i: (i, q), least, c[0], s[0])
    with T.serial(0, least) as j:
        square = variable(WIDE, 0)
        with T.serial(0, most) as i:
            square[0] = square[0] + u[i, j] * u[i, j]
        values[0, j] = tirx.sqrt(square[0])
        with T.serial(0, most) as i:
            u[i, j] = u[i, j] / tirx.max(values[0, j], constant(1e-300))
    _sorted(values, [u, v], least, [most, least], down=True)


def _singular(importer: Importer, node: fx.Node) -> relax.Expr:
    """_linalg_svd(A, full_matrices, compute_uv): (U, S, Vh)."""
    args = bound_arguments(node)
    rows, columns = known_shape(args["A"])[-2:]
    if args["full_matrices"] and args["compute_uv"] and rows != columns:
        raise FrontendError("all singular vectors of a matrix that is not square: leave them out")
    u, values, v = factored(importer, node, 1, _svd, _svd_shapes)
    if rows < columns:
        u, v = v, u
    last = list(range(len(known_shape(args["A"]))))
    last[-2:] = last[:-3:-1]
    return typed_results(importer, node, [u, values, importer.permute(v, last)])


CONVERTERS: dict[str, Converter] = {
    "_linalg_eigh.default": factorization(1, _eigh, _eigh_shapes),
    "_linalg_svd.default": _singular,
    "geqrf.default": factorization(1, _geqrf, _geqrf_shapes),
    "linalg_cholesky_ex.default": factorization(1, _cholesky, _cholesky_shapes),
    "linalg_householder_product.default": factorization(2, _householder, _householder_shapes),
    "linalg_lu_factor_ex.default": factorization(1, _lu, _lu_shapes),
    "linalg_solve_triangular.default": factorization(2, _triangular, _triangular_shapes),
    "lu_unpack.default": factorization(2, _permutation, _permutation_shapes),
}
