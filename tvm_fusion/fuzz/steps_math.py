"""Statements of arithmetic: pointwise, comparisons, reductions, scans, casts."""

from __future__ import annotations

import torch

from .draw import FLOAT_SHARES, INTEGERS, Draft, Step
from .torch_program import Statement

UNARY = (
    *(f"torch.{name}({{0}})" for name in ("tanh", "sigmoid", "sin", "cos", "erf", "abs", "neg")),
    *(f"torch.{name}({{0}})" for name in ("sign", "atan", "square", "floor", "ceil", "round")),
    *(f"torch.{name}({{0}})" for name in ("trunc", "expm1", "asinh", "sinh", "exp", "exp2")),
    *(f"F.{name}({{0}})" for name in ("relu", "gelu", "silu", "softplus", "elu", "selu", "mish")),
    *(f"F.{name}({{0}})" for name in ("logsigmoid", "hardswish", "hardsigmoid", "hardtanh")),
    *(f"F.{name}({{0}})" for name in ("relu6", "celu", "softsign")),
    *(f"torch.{name}({{0}}.abs() + 0.5)" for name in ("sqrt", "rsqrt", "log", "log2", "log1p")),
    "torch.reciprocal({0}.abs() + 0.5)",
    'F.gelu({0}, approximate="tanh")',
    "F.leaky_relu({0}, 0.1)",
    "F.tanhshrink({0})",
    "torch.clamp({0}, -1, 0.75)",
    "torch.clamp({0}, min=0.25)",
    "{0} * 0.37 + 1.5",
    "1.25 - {0}",
    "3 / ({0}.abs() + 1)",
    "{0} ** 2",
    "{0} ** 3",
    "{0}.abs() ** 0.5",
    "torch.where({0} > 0, {0}, 0.5)",
    "torch.nan_to_num({0})",
    "{0}.clone()",
)
BINARY = (
    *("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 0.5)") * 2,
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1} * 2)",
    "torch.lerp({0}, {1}, 0.3)",
    "torch.atan2({0}, {1}.abs() + 0.25)",
    "torch.atan2({0}, {1})",
    "torch.fmod({0}, {1}.abs() + 0.7)",
    "torch.remainder({0}, {1}.abs() + 0.7)",
    "({0}.abs() + 0.5) ** {1}.clamp(-2, 2)",
    "torch.add({0}, {1}, alpha=-0.5)",
    "torch.logaddexp({0}, {1})",
    "F.silu({0}) * {1}",
    "F.prelu({0}, {1}.flatten()[:1])",
    "torch.floor_divide({0}, {1}.abs() + 0.9)",
)
COMPARISON = tuple(f"{{0}} {sign} {{1}}" for sign in ("<", "<=", ">", ">=", "==", "!="))
INTEGER = (
    *("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} // ({1}.abs() + 1)", "{0} % ({1}.abs() + 1)"),
    *("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "{0} << 2", "{0} >> 1", "~{0}", "{0} * 3 - 1"),
    *("torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.clamp({0}, 1, 5)"),
    "torch.where({0} > {1}, {0}, {1})",
    "torch.div({0}, {1}.abs() + 1, rounding_mode='trunc')",
    "{0} / ({1}.abs() + 1)",
    "{0} * 0.5",
)
BOOLEAN = ("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}", "torch.logical_or({0}, ~{1})")
REDUCTION = (
    *(f"{{0}}.{name}({{axes}}{{keep}})" for name in ("sum", "mean", "amax", "amin") * 2),
    "torch.logsumexp({0}, {axes}{keep})",
    "{0}.var({axes}, correction=0{keep})",
    "({0} + 2).std({axes}, correction=0{keep})",
    "torch.linalg.vector_norm({0}, 2, {axes}{keep})",
)
OF_ONE_AXIS = (
    "torch.argmax({0}, {axis})",
    "torch.argmin({0}, {axis}, keepdim=True)",
    "torch.max({0}, {axis})[0]",
    "torch.cumsum({0}, {axis})",
    "torch.cumprod({0}.clamp(0.5, 1.2), {axis})",
    "torch.median({0}, {axis})[0]",
    "torch.sort({0}, {axis})[0]",
    "torch.gather({0}, {axis}, torch.argsort({0}, {axis}, descending=True))",  # ties in any order
)
RARE = (
    "torch.hypot({0}, {0})",
    "torch.copysign({0}, {0})",
    "torch.min({0}, 0)[1]",
    "torch.prod({0}.clamp(0.5, 1.5), 0)",
    "{0}.index_fill(0, torch.tensor([0]), 1)",
    "torch.index_add({0}, 0, torch.tensor([0]), {0}[:1])",
    "torch.index_put({0}, (torch.tensor([0]),), {0}[:1], accumulate=True)",
)


def unary(d: Draft) -> Statement | None:
    """A function of one value."""
    return d.statement(d.choice(UNARY), d.floating())


def binary(d: Draft) -> Statement | None:
    """Arithmetic of two values, one broadcast at times, of two types now and then."""
    x = d.floating()
    if x is None:
        return None
    y = d.broadcast(x)
    if d.rng.random() < 0.1:
        return d.statement(f"{{0}} + {{1}}.to(torch.{d.choice(tuple(FLOAT_SHARES))})", x, y)
    return d.statement(d.choice(BINARY), *d.rng.sample((x, y), 2))


def comparison(d: Draft) -> Statement | None:
    """A comparison, alone or as what a `where` or a mask goes by."""
    x = d.value(lambda v: v.dtype != torch.bool)
    if x is None:
        return None
    test = d.choice(COMPARISON)
    code = d.choice((test, f"torch.where({test}, {{0}}, 0)", f"{{0}}.masked_fill({test}, 0.25)"))
    return d.statement(code, x, d.broadcast(x))


def masked(d: Draft) -> Statement | None:
    """A value where a boolean one allows it."""
    mask = d.value(lambda v: v.dtype == torch.bool)
    if mask is None:
        return None
    x = d.input(d.shape(mask), d.dtype)
    return d.statement(d.choice(("torch.where({0}, {1}, -{1})", "{1} * {0}")), mask, x)


def integer(d: Draft) -> Statement | None:
    """Arithmetic of integers, of a new one where there is none."""
    x = d.value(lambda v: not v.is_floating_point() and v.dtype != torch.bool)
    if x is None or d.rng.random() < 0.3:
        like = d.value(lambda v: v.ndim > 0)
        x = d.input(d.shape(like), d.choice(INTEGERS))
    return d.statement(d.choice(INTEGER), x, d.broadcast(x))


def boolean(d: Draft) -> Statement | None:
    """Logic of booleans, and what reduces them."""
    x = d.value(lambda v: v.dtype == torch.bool)
    if x is None:
        return None
    if d.rng.random() < 0.3:
        axis = d.axis(x)
        code = d.choice(
            ("{0}.any(%d)", "{0}.all(%d)", "{0}.sum(%d)", "torch.count_nonzero({0}, %d)")
        )
        return None if axis is None else d.statement(code % axis, x)
    return d.statement(d.choice(BOOLEAN), x, d.broadcast(x))


def cast(d: Draft) -> Statement | None:
    """A value in another type."""
    x = d.value(lambda v: True)
    to = d.choice((*FLOAT_SHARES, d.dtype, d.dtype, *INTEGERS, "bool"))
    if d.own[x].is_floating_point() and to in INTEGERS:
        return d.statement(f"({{0}}.clamp({d.choice((0, 1))}, 9) * 3).to(torch.{to})", x)
    return d.statement(f"{{0}}.to(torch.{to})", x)


def reduction(d: Draft) -> Statement | None:
    """A reduction over any axes."""
    x = d.floating((1, 2, 3, 4, 5))
    if x is None:
        return None
    rank = d.own[x].ndim
    axes = sorted(d.rng.sample(range(rank), d.rng.randint(1, rank)))
    named = d.choice((tuple(axes), tuple(a - rank for a in axes)))
    keep = d.choice(("", ", keepdim=True"))
    code = d.choice(REDUCTION).replace("{axes}", str(named)).replace("{keep}", keep)
    return d.statement(code, x)


def integer_reduction(d: Draft) -> Statement | None:
    """A reduction of integers."""
    x = d.value(lambda v: v.ndim > 0 and not v.is_floating_point() and v.dtype != torch.bool)
    if x is None:
        return None
    code = d.choice(("{0}.sum(%d)", "{0}.amax(%d)", "torch.cumsum({0}, %d)", "{0}.argmax(%d)"))
    return d.statement(code % d.axis(x), x)


def centred(d: Draft) -> Statement | None:
    """A value less or over a reduction of itself."""
    x = d.floating((1, 2, 3, 4))
    if x is None:
        return None
    axis = d.axis(x)
    code = d.choice(
        ("{0} - {0}.mean(%d, keepdim=True)", "{0} / ({0}.amax(%d, keepdim=True).abs() + 1)")
    )
    return d.statement(code % axis, x)


def of_one_axis(d: Draft) -> Statement | None:
    """What goes along one axis: argmax, scans, sorts."""
    x = d.floating((1, 2, 3, 4))
    if x is None:
        return None
    return d.statement(d.choice(OF_ONE_AXIS).replace("{axis}", str(d.axis(x))), x)


def rare(d: Draft) -> Statement | None:
    """An operator that models seldom have."""
    return d.statement(d.choice(RARE), d.floating((1, 2, 3, 4)))


STEPS = (
    Step("unary", 8, unary),
    Step("binary", 10, binary),
    Step("comparison", 2, comparison),
    Step("masked", 1, masked),
    Step("integer", 2.5, integer),
    Step("boolean", 1, boolean),
    Step("cast", 2, cast),
    Step("reduction", 5, reduction),
    Step("integer_reduction", 1, integer_reduction),
    Step("centred", 2, centred),
    Step("of_one_axis", 2, of_one_axis),
    Step("rare", 0.1, rare),
)
