"""Attentions as values, made without a PrimFunc: for tests of the writers, and for measurements.

Inputs are `q`, `k`, `v`, then what the form of the logit reads, then the outputs.
"""

from dataclasses import dataclass, field

import numpy as np
from tvm import tirx
from tvm.ir import Expr

from tvm_fusion.kernels.attention.read.model import Attention
from tvm_fusion.kernels.contraction.model import Axis, Operand, Output, fresh_var
from tvm_fusion.kernels.program.expr import constant
from tvm_fusion.kernels.program.program import Param


@dataclass
class Sizes:
    """What an attention is made of; `layout` "bhsd", or "bshd": projections as they come; operands
    in `turned` lie as [B, H, D, S].
    """

    batch: object = 1
    heads: int = 2
    kv_heads: int | None = None
    queries: object = 64
    keys: object = 64
    terms: int = 64
    features: int | None = None
    dtype: str = "float16"
    layout: str = "bhsd"
    scale: float | None = None
    turned: str = ""

    def __post_init__(self):
        self.kv_heads = self.kv_heads or self.heads
        self.features = self.features or self.terms
        self.scale = self.scale or self.terms**-0.5


@dataclass
class Form:
    """How logits and visibility are computed: functions of a `Point`; None is the plain one."""

    logit: object = None
    visible: object = None
    outputs: object = None
    lse: bool = False
    extra: dict = field(default_factory=dict)  # name -> (shape, dtype)


@dataclass
class Point:
    """The axes and values at one score, or (`e`) at one result."""

    b: Expr
    h: Expr
    m: Expr
    n: Expr
    e: Expr
    score: Expr
    result: Expr
    lse: Expr
    buffers: dict
    scale: float

    def load(self, name, *indices):
        found = tirx.BufferLoad(self.buffers[name], list(indices))
        dtype = str(found.ty.dtype)
        return tirx.Cast("float32", found) if dtype in ("float16", "bfloat16") else found


def f32(value):
    return constant(value, "float32")


def attention(sizes: Sizes, form: Form | None = None) -> Attention:
    """The attention value."""
    form, s = form or Form(), sizes
    params, buffers = [], {}

    def param(name, shape, dtype):
        buffer = tirx.decl_buffer(shape, dtype, name)
        params.append(Param(name, tuple(shape), dtype, buffer))
        buffers[name] = buffer
        return buffer

    def shape(heads, rows, columns):
        if s.layout == "bhsd":
            return (s.batch, heads, rows, columns)
        return (s.batch, rows, heads * columns)

    def index(b, h, row, column, columns):
        if s.layout == "bhsd":
            return (b, h, row, column)
        return (b, row, h * columns + column)

    extents = (s.batch, s.heads, s.queries, s.keys, s.terms, s.features)
    axes = {
        name: constant(0, "int64") if isinstance(x, int) and x == 1 else fresh_var(name, "int64")
        for name, x in zip("bhmnde", extents, strict=True)
    }
    b, h, m, n, d, e = (axes[name] for name in "bhmnde")
    kv = h if s.kv_heads == s.heads else tirx.FloorDiv(h, constant(s.heads // s.kv_heads, "int64"))

    def operand(name, heads, head, rows, row, columns, column):
        if name in s.turned:
            buffer = param(name, (s.batch, heads, columns, rows), s.dtype)
            return Operand(tirx.Cast("float32", tirx.BufferLoad(buffer, [b, head, column, row])))
        buffer = param(name, shape(heads, rows, columns), s.dtype)
        load = tirx.BufferLoad(buffer, list(index(b, head, row, column, columns)))
        return Operand(tirx.Cast("float32", load))

    q = operand("q", s.heads, h, s.queries, m, s.terms, d)
    k = operand("k", s.kv_heads, kv, s.keys, n, s.terms, d)
    v = operand("v", s.kv_heads, kv, s.keys, n, s.features, e)
    for name, (extra, dtype) in form.extra.items():
        param(name, extra, dtype)
    names = ("score", "result", "lse")
    score, result, lse = (fresh_var(name, "float32") for name in names)
    point = Point(b, h, m, n, e, score, result, lse, buffers, s.scale)
    logit = form.logit(point) if form.logit else score * f32(s.scale)
    visible = form.visible(point) if form.visible else None
    values = form.outputs(point) if form.outputs else {"o": (result, s.dtype)}
    outputs, rows = [], []
    for name, (value, dtype) in values.items():
        param(name, shape(s.heads, s.queries, s.features), dtype)
        where = index(b, h, m, e, s.features)
        outputs.append(
            Output(
                len(params) - 1,
                where,
                tirx.Cast(dtype, value) if dtype != "float32" else value,
                dtype,
            )
        )
    if form.lse:
        param("lse", (s.batch, s.heads, s.queries), "float32")
        rows.append(Output(len(params) - 1, (b, h, m), lse, "float32"))

    def group(*pairs):
        return tuple(Axis(v, x) for v, x in pairs if not (isinstance(x, int) and x == 1))

    made = Attention(
        "attention",
        tuple(params),
        group((b, s.batch), (h, s.heads)),
        group((m, s.queries)),
        group((n, s.keys)),
        group((d, s.terms)),
        group((e, s.features)),
        q,
        k,
        v,
        score,
        logit,
        visible,
        (),
        result,
        lse,
        tuple(outputs),
        tuple(rows),
        (),
        s.dtype,
        s.dtype,
    )
    return made


# ---- forms


def causal(shift=0):
    return Form(visible=lambda p: p.n <= p.m + constant(shift, "int64"))


def window(size, shift=0):
    def visible(p):
        near = p.n > p.m + constant(shift - size, "int64")
        return tirx.And(p.n <= p.m + constant(shift, "int64"), near)

    return Form(visible=visible)


def softcap(cap):
    def logit(p):
        inner = p.score * f32(p.scale) / f32(cap)
        return tirx.call_intrin("float32", "tirx.tanh", inner) * f32(cap)

    return Form(logit=logit)


def alibi(heads):
    def logit(p):
        distance = tirx.Cast("float32", p.n - p.m)
        return p.score * f32(p.scale) + p.load("slope", p.h) * distance

    return Form(logit=logit, extra={"slope": ((heads,), "float32")})


def additive(shape, dtype="float16"):
    """A mask of (batch or 1, heads or 1, queries or 1, keys)."""

    def logit(p):
        zero = constant(0, "int64")
        at = [
            zero if isinstance(x, int) and x == 1 else i
            for x, i in zip(shape, (p.b, p.h, p.m, p.n), strict=True)
        ]
        return p.score * f32(p.scale) + p.load("mask", *at)

    return Form(logit=logit, extra={"mask": (shape, dtype)})


def boolean(shape):
    """Keys are visible where the mask of (batch, keys) or of all scores says so."""

    def visible(p):
        at = (p.b, p.n) if len(shape) == 2 else (p.b, p.h, p.m, p.n)
        return p.load("mask", *at)

    return Form(visible=visible, extra={"mask": (shape, "bool")})


def documents(batch, length):
    def visible(p):
        return tirx.EQ(p.load("ids", p.b, p.m), p.load("ids", p.b, p.n))

    return Form(visible=visible, extra={"ids": ((batch, length), "int32")})


# ---- references


def heads_first(sizes: Sizes, x: np.ndarray, heads: int) -> np.ndarray:
    """An operand as [B, H, S, D] in float64."""
    x = np.asarray(x, dtype=np.float64)
    if sizes.layout == "bhsd":
        return x
    b, rows, columns = x.shape
    return x.reshape(b, rows, heads, columns // heads).transpose(0, 2, 1, 3)


def reference(sizes, q, k, v, logit=None, visible=None):
    """Result and logarithm of the sum of weights, [B, H, M, E] and [B, H, M], in float64.

    `logit` maps the scaled scores [B, H, M, N] to logits; `visible` is a boolean array.
    """
    q = heads_first(sizes, q, sizes.heads)
    k, v = (heads_first(sizes, x, sizes.kv_heads) for x in (k, v))
    repeats = sizes.heads // sizes.kv_heads
    k, v = (np.repeat(x, repeats, axis=1) for x in (k, v))
    s = q @ k.transpose(0, 1, 3, 2) * sizes.scale
    s = s if logit is None else logit(s)
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return p @ v / np.where(total > 0, total, 1.0), lse
