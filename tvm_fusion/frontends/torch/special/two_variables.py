"""Special functions of two variables, as series that end where a term changes nothing: loops of
float64 (`loops`).

    igamma(a, x)    x^a e^-x / Gamma(a + 1) (1 + x / (a + 1) + x^2 / (a + 1) (a + 2) + ...), x <= a
                    one less a continued fraction (DLMF 8.9.2) elsewhere
    zeta(x, q)      q^-x + (q + 1)^-x + ..., its rest by Euler and Maclaurin (DLMF 25.11.5)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import fx
from tvm import relax, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..importer import Importer
from ..loops import known_shape, loops, variable
from ..operators import Converter
from .one_variable import SHIFT, STIRLING

MOST_TERMS = 20_000  # of a row: as many as incomplete gamma functions need at 1e7
SMALL, LARGE = 2.0**-53, 1e300


def _real(value: float) -> Expr:
    return tirx.const(value, "float64")


def _of_two(name: str, compute: Callable[[Expr, Expr], Expr]) -> Converter:
    """A function of elements, computed in float64."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        shape = known_shape(node)
        given = [importer.operand(arg, "float64") for arg in node.args[:2]]
        given = [importer.emit(relax.op.broadcast_to(x, shape)) for x in given]

        def write(ins: list, outs: list) -> None:
            (xs, ys), (result,) = ins, outs
            with T.parallel(0, math.prod(shape)) as i:
                result[i] = compute(xs[i], ys[i])

        made = loops(importer, name, given, [(shape, "float64")], write)[0]
        return importer.cast(made, importer.dtype_of(node))

    return convert


def _horner(coefficients: Sequence[float], x: Expr) -> Expr:
    result = _real(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + _real(coefficient)
    return result


def _log_gamma(x: Expr) -> Expr:
    """Of x > 0, by Stirling's series, as `one_variable` has it."""
    product = x
    for k in range(1, SHIFT):
        product = product * (x + _real(k))
    z = x + _real(SHIFT)
    series = _horner(STIRLING, 1.0 / (z * z)) / z
    half_log = _real(0.5 * math.log(2 * math.pi))
    return (z - 0.5) * tirx.log(z) - z + half_log + series - tirx.log(product)


def _incomplete_gamma(is_upper: bool, a: Expr, x: Expr) -> Expr:
    """The share of Gamma(a) below x, or above."""
    # Ends and poles are chosen in the end: they must not make the loops endless.
    usual = tirx.And(tirx.And(a > 0, x > 0), tirx.And(a < _real(LARGE), x < _real(LARGE)))
    a_ = variable("float64", tirx.Select(usual, a, _real(1)))[0]
    x_ = variable("float64", tirx.Select(usual, x, _real(1)))[0]
    scale = variable("float64", tirx.exp(a_ * tirx.log(x_) - x_ - _log_gamma(a_)))[0]
    value = variable("float64", 0)
    count = variable("int32", 0)
    by_fraction = tirx.And(x_ > 1, x_ > a_)
    with T.If(by_fraction):
        with T.Then():
            # Lentz: b0 + a1 / (b1 + a2 / (b2 + ...)), b = x + 1 - a + 2 n, a = -n (n - a)
            b = variable("float64", x_ + 1.0 - a_)
            c, d = variable("float64", LARGE), variable("float64", 1.0 / b[0])
            value[0] = d[0]
            step = variable("float64", 0)
            with T.While(tirx.And(count[0] < MOST_TERMS, tirx.abs(step[0] - 1.0) > SMALL)):
                count[0] = count[0] + 1
                n = tirx.Cast("float64", count[0])
                numerator = variable("float64", n * (a_ - n))
                b[0] = b[0] + 2.0
                d[0] = numerator[0] * d[0] + b[0]
                d[0] = 1.0 / tirx.Select(tirx.abs(d[0]) < _real(1 / LARGE), _real(1 / LARGE), d[0])
                c[0] = b[0] + numerator[0] / c[0]
                c[0] = tirx.Select(tirx.abs(c[0]) < _real(1 / LARGE), _real(1 / LARGE), c[0])
                step[0] = c[0] * d[0]
                value[0] = value[0] * step[0]
            value[0] = value[0] * scale
        with T.Else():
            term = variable("float64", 1.0 / a_)
            value[0] = term[0]
            with T.While(tirx.And(count[0] < MOST_TERMS, term[0] > value[0] * SMALL)):
                count[0] = count[0] + 1
                term[0] = term[0] * x_ / (a_ + tirx.Cast("float64", count[0]))
                value[0] = value[0] + term[0]
            value[0] = value[0] * scale
    rest = tirx.Not(by_fraction) if is_upper else by_fraction
    found = tirx.Select(rest, 1.0 - value[0], value[0])
    all_below, none_below = (_real(0), _real(1)) if is_upper else (_real(1), _real(0))
    none = _real(math.nan)
    found = tirx.Select(tirx.Or(tirx.isnan(a), tirx.isnan(x)), none, found)
    endless = [tirx.abs(y) == _real(math.inf) for y in (a, x)]
    found = tirx.Select(endless[1], all_below, found)
    found = tirx.Select(endless[0], tirx.Select(endless[1], none, none_below), found)
    found = tirx.Select(x == 0, none_below, found)
    found = tirx.Select(a == 0, tirx.Select(x > 0, all_below, none), found)
    return tirx.Select(tirx.Or(a < 0, x < 0), none, found)


_EULER_MACLAURIN = (  # (2k)! / B_2k
    12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9,
    7.47242496e10, -2.950130727918164224e12, 1.1646782814350067249e14,
    -4.5979787224074726105e15, 1.8152105401943546773e17, -7.1661652561756670113e18,
)  # fmt: skip
_DIRECT = 9  # terms before the rest, and its least argument


def _zeta(x: Expr, q: Expr) -> Expr:
    """The zeta function of Hurwitz; of q < 0 with whole x, too, as PyTorch has it."""
    whole = [tirx.floor(y) == y for y in (x, q)]
    pole = tirx.And(q <= 0, whole[1])
    usual = tirx.And(tirx.And(x > 1, tirx.Or(q > 0, whole[0])), tirx.Not(pole))
    usual = tirx.And(usual, tirx.And(q > -MOST_TERMS, tirx.abs(q) < _real(LARGE)))
    x_ = variable("float64", tirx.Select(usual, x, _real(2)))[0]
    place = variable("float64", tirx.Select(usual, q, _real(1)))
    term = variable("float64", tirx.pow(place[0], -x_))
    total = variable("float64", term[0])
    count = variable("int32", 0)
    with T.While(tirx.Or(count[0] < _DIRECT, place[0] <= _DIRECT)):
        count[0] = count[0] + 1
        place[0] = place[0] + 1.0
        term[0] = tirx.pow(place[0], -x_)
        total[0] = total[0] + term[0]
    total[0] = total[0] + term[0] * place[0] / (x_ - 1.0) - 0.5 * term[0]
    factor = variable("float64", 1)
    for k, divisor in enumerate(_EULER_MACLAURIN):
        factor[0] = factor[0] * (x_ + _real(2 * k))
        term[0] = term[0] / place[0]
        total[0] = total[0] + factor[0] * term[0] / _real(divisor)
        factor[0] = factor[0] * (x_ + _real(2 * k + 1))
        term[0] = term[0] / place[0]
    none, endless = _real(math.nan), _real(math.inf)
    found = tirx.Select(usual, total[0], none)
    first = tirx.Select(q < 1, endless, tirx.Select(q == 1, _real(1), _real(0)))
    of_endless = tirx.And(x == endless, q < endless)
    found = tirx.Select(of_endless, first, found)
    found = tirx.Select(tirx.And(q == endless, x > 1), none, found)
    found = tirx.Select(pole, endless, found)
    found = tirx.Select(x < 1, none, found)
    return tirx.Select(x == 1, endless, found)


CONVERTERS: dict[str, Converter] = {
    "igamma.default": _of_two("igamma", partial(_incomplete_gamma, False)),
    "igammac.default": _of_two("igammac", partial(_incomplete_gamma, True)),
    **{
        f"special_zeta.{kind}": _of_two("zeta", _zeta)
        for kind in ("default", "other_scalar", "self_scalar")
    },
}
