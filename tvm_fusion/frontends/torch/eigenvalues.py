"""Eigenvalues and eigenvectors of any real matrix, as loops.

    values, vectors = linalg.eig(A)  ->  A = Q H Q^T, H of Hessenberg's form;  Q, H by Francis' QR
                                         steps until H has blocks of one or two rows;  the vectors
                                         of H by substitution, times Q

As EISPACK's `hqr2` has it (Golub and Van Loan, Matrix Computations, 7.4 to 7.6), in float64. The
order is that in which the steps find the values, as LAPACK's; a vector has norm 1, and of complex
ones the largest element is real, as LAPACK's; its sign nobody gives.

Does not handle: complex matrices; matrices that are badly scaled, which LAPACK balances before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .linalg import WIDE, Matrix, constant, copied, factorization, identity, rotate
from .loops import variable
from .operators import Converter

_aten = torch.ops.aten
Tensor = torch.Tensor
Z = tuple[Any, Any]  # a complex number's parts

STEPS = 30  # an eigenvalue is given at most so many; two or three are usual
EPS = 2.0**-52


def _eigenpairs(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parts of the values and of the vectors, as PyTorch has them."""
    values, vectors = torch.linalg.eig(a)
    parts = (values.real, values.imag, vectors.real, vectors.imag)
    return tuple(part.contiguous() for part in parts)


_operator = torch.library.custom_op("tvm_fusion::eigenpairs", _eigenpairs, mutates_args=())


@_operator.register_fake
def _shapes(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = a.new_empty(a.shape[:-1])
    return values, torch.empty_like(values), torch.empty_like(a), torch.empty_like(a)


def eig(a: Tensor) -> tuple[Tensor, Tensor]:
    """The decomposition of `linalg_eig` of a real matrix."""
    values, imaginary, vectors, others = _operator(a)
    return torch.complex(values, imaginary), torch.complex(vectors, others)


# ---- Loops over rows; an outer one begins at 0, as TVM moves it wrongly otherwise.


def _result_shapes(args: dict, a: Sequence[int]) -> list[tuple[list[int], str]]:
    size = a[0]
    return [*[([1, size], WIDE)] * 2, *[([size, size], WIDE)] * 4, ([2, size], WIDE)]


def _write(args: dict, extents: list, taken: list[Matrix], made: list[Matrix]) -> None:
    ((size, _),), (given,) = extents, taken
    real, imag, vectors, others, h, q, x = made
    copied(given, h, size, size)
    identity(q, size)
    _hessenberg(h, q, x, size)
    with T.serial(0, size) as i:
        real[0, i] = math.nan  # where steps do not suffice
        imag[0, i] = 0.0
    _schur(h, q, real, imag, size)
    with T.serial(0, size) as k, T.If(imag[0, k] >= constant(0)), T.Then():
        _substitute(h, real, imag, x, size, k)
        _vector(q, x, vectors, others, size, k, imag[0, k] > constant(0))


def _hessenberg(h: Matrix, q: Matrix, v: Matrix, size: int) -> None:
    """Reflections of rows and columns, which make all below the first subdiagonal 0."""
    with T.serial(0, max(0, size - 2)) as m:
        below = variable(WIDE, 0)
        with T.serial(m + 2, size) as i:
            below[0] = below[0] + h[i, m] * h[i, m]
        with T.If(below[0] > constant(0)), T.Then():
            first = variable(WIDE, h[m + 1, m])
            norm = tirx.sqrt(first[0] * first[0] + below[0])
            beta = variable(WIDE, tirx.Select(first[0] > constant(0), -norm, norm))
            tau = variable(WIDE, (beta[0] - first[0]) / beta[0])
            v[0, m + 1] = 1.0
            with T.serial(m + 2, size) as i:
                v[0, i] = h[i, m] / (first[0] - beta[0])
                h[i, m] = 0.0
            h[m + 1, m] = beta[0]
            with T.serial(0, size - m - 1) as column:
                _reflect(h, v, tau[0], m + 1, size, lambda i: (i, column + m + 1))
            for matrix in (h, q):
                with T.serial(0, size) as row:
                    _reflect(matrix, v, tau[0], m + 1, size, lambda i: (row, i))


def _reflect(matrix: Matrix, v: Matrix, tau: Expr, first: Expr, size: int, at: Any) -> None:
    """x - tau v (v^T x) of a row or column."""
    product = variable(WIDE, 0)
    with T.serial(first, size) as i:
        product[0] = product[0] + v[0, i] * matrix[at(i)]
    with T.serial(first, size) as i:
        matrix[at(i)] = matrix[at(i)] - tau * v[0, i] * product[0]


# ---- Values.


def _schur(h: Matrix, q: Matrix, real: Matrix, imag: Matrix, size: int) -> None:
    """QR steps of the rows up to `last`, until one or two of them are apart from those above."""
    last, steps = variable("int32", size - 1), variable("int32", 0)
    shifted, norm = variable(WIDE, 0), variable(WIDE, 0)
    with T.serial(0, size) as i, T.serial(0, size) as j:
        norm[0] = norm[0] + tirx.abs(h[i, j])
    with T.While(tirx.And(last[0] >= 0, steps[0] < STEPS * size)):
        first = variable("int32", last[0])
        with T.While(_is_joined(h, first[0], norm[0])):
            first[0] = first[0] - 1
        with T.If(first[0] == last[0]):
            with T.Then():
                h[last[0], last[0]] = h[last[0], last[0]] + shifted[0]
                real[0, last[0]] = h[last[0], last[0]]
                last[0] = last[0] - 1
            with T.Else(), T.If(first[0] == last[0] - 1):
                with T.Then():
                    _two(h, q, real, imag, size, last[0], shifted[0])
                    last[0] = last[0] - 2
                with T.Else():
                    _step(h, q, size, first[0], last[0], steps[0], shifted)
                    steps[0] = steps[0] + 1


def _is_joined(h: Matrix, row: Expr, norm: Expr) -> Expr:
    """Whether there is a row above, and the element between the two is not nothing beside them."""
    at = tirx.max(row, 1)
    around = tirx.abs(h[at - 1, at - 1]) + tirx.abs(h[at, at])
    around = tirx.Select(around == constant(0), norm, around)
    return tirx.And(row > 0, tirx.abs(h[at, at - 1]) >= EPS * around)


def _two(
    h: Matrix, q: Matrix, real: Matrix, imag: Matrix, size: int, n: Expr, shifted: Expr
) -> None:
    """The values of a block of two rows, which real ones take apart."""
    product = variable(WIDE, h[n, n - 1] * h[n - 1, n])
    half = variable(WIDE, (h[n - 1, n - 1] - h[n, n]) / 2.0)
    square = variable(WIDE, half[0] * half[0] + product[0])
    root = variable(WIDE, tirx.sqrt(tirx.abs(square[0])))
    for i in (n, n - 1):
        h[i, i] = h[i, i] + shifted
    with T.If(square[0] >= constant(0)):
        with T.Then():
            z = variable(WIDE, half[0] + tirx.Select(half[0] >= constant(0), root[0], -root[0]))
            x = variable(WIDE, h[n, n])
            real[0, n - 1] = x[0] + z[0]
            rest = tirx.Select(z[0] == constant(0), constant(1), z[0])
            real[0, n] = tirx.Select(z[0] == constant(0), x[0] + z[0], x[0] - product[0] / rest)
            size_of = variable(WIDE, tirx.sqrt(h[n, n - 1] * h[n, n - 1] + z[0] * z[0]))
            s, c = variable(WIDE, -h[n, n - 1] / size_of[0]), variable(WIDE, z[0] / size_of[0])
            rest = size - n + 1  # the columns from n - 1 on
            rotate(h, lambda j: (n - 1, n - 1 + j), lambda j: (n, n - 1 + j), rest, c[0], s[0])
            rotate(h, lambda i: (i, n - 1), lambda i: (i, n), n + 1, c[0], s[0])
            rotate(q, lambda i: (i, n - 1), lambda i: (i, n), size, c[0], s[0])
            h[n, n - 1] = 0.0
        with T.Else():
            for i, sign in ((n - 1, 1.0), (n, -1.0)):
                imag[0, i] = sign * root[0]
            real[0, n - 1] = h[n, n] + half[0]
            real[0, n] = h[n, n] + half[0]


def _step(h: Matrix, q: Matrix, size: int, first: Expr, n: Expr, steps: Expr, shifted: Any) -> None:
    """A double step of rows `first` to n, shifted by the values of its last two rows as LAPACK's
    `lahqr` chooses them.
    """
    x, y = variable(WIDE, h[n, n]), variable(WIDE, h[n - 1, n - 1])
    w = variable(WIDE, h[n, n - 1] * h[n - 1, n])
    with T.If(tirx.truncmod(steps, 11) == 10), T.Then():  # Wilkinson's, where steps go in circles
        shifted[0] = shifted[0] + x[0]
        with T.serial(0, n + 1) as i:
            h[i, i] = h[i, i] - x[0]
        s = variable(WIDE, tirx.abs(h[n, n - 1]) + tirx.abs(h[n - 1, n - 2]))
        x[0] = 0.75 * s[0]
        y[0] = 0.75 * s[0]
        w[0] = -0.4375 * s[0] * s[0]
    half = variable(WIDE, (x[0] - y[0]) / 2.0)
    square = variable(WIDE, half[0] * half[0] + w[0])
    with T.If(square[0] >= constant(0)), T.Then():  # real ones: the one nearer to the last, twice
        root = tirx.sqrt(square[0])
        x[0] = x[0] - half[0] + tirx.Select(half[0] >= constant(0), root, -root)
        y[0] = x[0]
        w[0] = 0.0
    m, looks = variable("int32", n - 2), variable("int32", 1)
    reflection = tuple(variable(WIDE, 0) for _ in range(3))
    with T.While(looks[0] == 1):
        _first_column(h, m[0], x[0], y[0], w[0], reflection)
        with T.If(tirx.Or(m[0] <= first, _is_small(h, tirx.max(m[0], 1), reflection))):
            with T.Then():
                looks[0] = 0
            with T.Else():
                m[0] = m[0] - 1
    with T.serial(m[0] + 2, n + 1) as i:
        h[i, i - 2] = 0.0
        with T.If(i > m[0] + 2), T.Then():
            h[i, i - 3] = 0.0
    k, bulges = variable("int32", m[0]), variable("int32", 1)
    with T.While(tirx.And(k[0] < n, bulges[0] == 1)):
        _chase(h, q, size, (first, m[0], n, k[0]), reflection, bulges)
        k[0] = k[0] + 1


def _first_column(h: Matrix, m: Expr, x: Expr, y: Expr, w: Expr, reflection: tuple) -> None:
    """What begins a double step at row m, up to a factor."""
    p, q, r = reflection
    z = variable(WIDE, h[m, m])
    p[0] = ((x - z[0]) * (y - z[0]) - w) / h[m + 1, m] + h[m, m + 1]
    q[0] = h[m + 1, m + 1] - z[0] - (x - z[0]) - (y - z[0])
    r[0] = h[m + 2, m + 1]
    _scale(reflection)


def _scale(reflection: tuple) -> Any:
    total = variable(WIDE, sum(tirx.abs(part[0]) for part in reflection))
    with T.If(total[0] > constant(0)), T.Then():
        for part in reflection:
            part[0] = part[0] / total[0]
    return total


def _is_small(h: Matrix, m: Expr, reflection: tuple) -> Expr:
    """Whether a step may begin at row m: what it makes left of it is nothing."""
    p, q, r = (tirx.abs(part[0]) for part in reflection)
    around = sum(tirx.abs(h[i, i]) for i in (m - 1, m, m + 1))
    return tirx.abs(h[m, m - 1]) * (q + r) < EPS * (p * around)


def _chase(
    h: Matrix, basis: Matrix, size: int, rows: tuple, reflection: tuple, bulges: Any
) -> None:
    """The reflection of three rows, of two at the end, that moves the bulge down by one."""
    first, m, n, k = rows
    p, q, r = reflection
    third = variable("int32", tirx.Select(k < n - 1, k + 2, k + 1))  # stands for none at the end
    three = third[0] == k + 2
    total = variable(WIDE, 1)
    with T.If(k > m), T.Then():
        p[0] = h[k, k - 1]
        q[0] = h[k + 1, k - 1]
        r[0] = tirx.Select(three, h[third[0], k - 1], constant(0))
        total[0] = _scale(reflection)[0]
    norm = variable(WIDE, tirx.sqrt(sum(part[0] * part[0] for part in reflection)))
    with T.If(norm[0] == constant(0)):
        with T.Then():
            bulges[0] = 0
        with T.Else():
            s = variable(WIDE, tirx.Select(p[0] < constant(0), -norm[0], norm[0]))
            with T.If(k > m):
                with T.Then():
                    h[k, k - 1] = -s[0] * total[0]
                with T.Else(), T.If(first != m), T.Then():
                    h[k, k - 1] = -h[k, k - 1]
            p[0] = p[0] + s[0]
            left = [variable(WIDE, part[0] / s[0]) for part in reflection]
            right = [variable(WIDE, part[0] / p[0]) for part in reflection]
            rows = (k, k + 1, third[0])
            with T.serial(k, size) as j:
                _mirror(h, [(i, j) for i in rows], right, left, three)
            with T.serial(0, tirx.min(n, k + 3) + 1) as i:
                _mirror(h, [(i, j) for j in rows], left, right, three)
            with T.serial(0, size) as i:
                _mirror(basis, [(i, j) for j in rows], left, right, three)


def _mirror(m: Matrix, at: list[tuple], by: list, factors: list, three: Expr) -> None:
    """Three elements less their product with `by`, times `factors`."""
    product = variable(WIDE, by[0][0] * m[at[0]] + by[1][0] * m[at[1]])
    with T.If(three), T.Then():
        product[0] = product[0] + by[2][0] * m[at[2]]
        m[at[2]] = m[at[2]] - product[0] * factors[2][0]
    for place, factor in zip(at[:2], factors[:2], strict=True):
        m[place] = m[place] - product[0] * factor[0]


# ---- Vectors: (H - value) x = 0 from the value's own rows upwards.


def _number(real: Expr | float, imag: Expr | float = 0.0) -> Z:
    return variable(WIDE, real), variable(WIDE, imag)


def _product(a: Z, b: Z) -> Z:
    return (
        a[0][0] * b[0][0] - a[1][0] * b[1][0],
        a[0][0] * b[1][0] + a[1][0] * b[0][0],
    )


def _quotient(a: Z, b: Z, least: Expr) -> Z:
    """a / b; b is taken to be `least` where it is 0."""
    is_zero = tirx.And(b[0][0] == constant(0), b[1][0] == constant(0))
    real = variable(WIDE, tirx.Select(is_zero, least, b[0][0]))
    over = variable(WIDE, real[0] * real[0] + b[1][0] * b[1][0])
    conjugate = (real, variable(WIDE, -b[1][0]))
    return tuple(part / over[0] for part in _product(a, conjugate))


def _substitute(h: Matrix, real: Matrix, imag: Matrix, x: Matrix, size: int, k: Expr) -> None:
    """The vector of H of value k, the first of two of which one is the conjugate of the other."""
    value = _number(real[0, k], imag[0, k])
    least = variable(WIDE, 0)
    with T.serial(0, size) as i:
        least[0] = tirx.max(least[0], EPS * tirx.abs(h[i, i]))
        for part in (0, 1):
            x[part, i] = 0.0
    least[0] = tirx.Select(least[0] == constant(0), constant(EPS), least[0])
    x[0, k] = 1.0
    with T.If(value[1][0] > constant(0)), T.Then():
        x[0, k] = h[k, k + 1]
        x[0, k + 1] = value[0][0] - h[k, k]
        x[1, k + 1] = value[1][0]
    i = variable("int32", tirx.Cast("int32", k) - 1)
    with T.While(i[0] >= 0):
        rest = _rest(h, x, size, i[0])
        own = _number(h[i[0], i[0]] - value[0][0], -value[1][0])
        with T.If(imag[0, i[0]] < constant(0)):
            with T.Then():
                above = i[0] - 1
                other = _number(h[above, above] - value[0][0], -value[1][0])
                _solve_two(h, x, i[0], (other, own), (_rest(h, x, size, above), rest), least[0])
                i[0] = i[0] - 2
            with T.Else():
                found = _quotient(rest, own, least[0])
                x[0, i[0]] = found[0]
                x[1, i[0]] = found[1]
                i[0] = i[0] - 1


def _rest(h: Matrix, x: Matrix, size: int, i: Expr) -> Z:
    """What the known elements leave on the right of row i."""
    rest = _number(0.0)
    with T.serial(i + 1, size) as j:
        for part in (0, 1):
            rest[part][0] = rest[part][0] - h[i, j] * x[part, j]
    return rest


def _solve_two(
    h: Matrix, x: Matrix, i: Expr, diagonal: tuple[Z, Z], rest: tuple[Z, Z], least: Expr
) -> None:
    """Both elements of a block's two rows, i the second, by Cramer's rule."""
    upper, lower = variable(WIDE, h[i - 1, i]), variable(WIDE, h[i, i - 1])
    whole = _product(*diagonal)
    determinant = _number(whole[0] - upper[0] * lower[0], whole[1])
    for at, other, off, (a, b) in (
        (i - 1, diagonal[1], upper, rest),
        (i, diagonal[0], lower, rest[::-1]),
    ):
        product = _product(a, other)
        above = _number(*(part - off[0] * b[n][0] for n, part in enumerate(product)))
        found = _quotient(above, determinant, least)
        for part in (0, 1):
            x[part, at] = found[part]


def _vector(
    q: Matrix, x: Matrix, vectors: Matrix, others: Matrix, size: int, k: Expr, is_pair: Expr
) -> None:
    """Q x with norm 1 and a real largest element; of a pair its conjugate, too."""
    square, largest, turn = variable(WIDE, 0), variable(WIDE, 0), _number(1.0)
    with T.serial(0, size) as i:
        total = _number(0.0)
        with T.serial(0, size) as j:
            for part in (0, 1):
                total[part][0] = total[part][0] + q[i, j] * x[part, j]
        vectors[i, k] = total[0][0]
        others[i, k] = total[1][0]
        own = variable(WIDE, total[0][0] * total[0][0] + total[1][0] * total[1][0])
        square[0] = square[0] + own[0]
        with T.If(tirx.And(is_pair, own[0] > largest[0])), T.Then():
            largest[0] = own[0]
            turn[0][0] = total[0][0] / tirx.sqrt(own[0])
            turn[1][0] = -total[1][0] / tirx.sqrt(own[0])
    norm = variable(WIDE, tirx.sqrt(square[0]))
    with T.serial(0, size) as i:
        real, imag = _product(_number(vectors[i, k], others[i, k]), turn)
        found = _number(real / norm[0], imag / norm[0])
        vectors[i, k] = found[0][0]
        others[i, k] = found[1][0]
        with T.If(is_pair), T.Then():
            vectors[i, k + 1] = found[0][0]
            others[i, k + 1] = -found[1][0]


CONVERTERS: dict[str, Converter] = {
    "eigenpairs.default": factorization(1, _write, _result_shapes),
}
