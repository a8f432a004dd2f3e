"""Attentions with few queries as values, written by hand, and what they are in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from tvm import tirx

from tvm_fusion.kernels.attention.read.model import Attention
from tvm_fusion.kernels.contraction.model import Axis, Operand, Output, fresh_var
from tvm_fusion.kernels.program.expr import constant
from tvm_fusion.kernels.program.program import Param

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "bool": np.bool_}


def int64(value: int):
    return constant(value, "int64")


@dataclass(frozen=True)
class Sizes:
    """Extents; `rows` queries of each of `heads` heads, `shared` of which share keys."""

    batch: object
    heads: int
    shared: int
    rows: int
    keys: object
    terms: int
    features: int


@dataclass
class Point:
    """What a logit or a condition may be made of: axes, the score, and loads of parameters."""

    b: object
    h: object
    m: object
    n: object
    score: object
    load: Callable


def param(name, shape, dtype):
    buffer = tirx.decl_buffer(shape, dtype, name)
    return Param(name, tuple(shape), dtype, buffer)


def attention_of(
    sizes: Sizes,
    dtype="float16",
    layout="bhsd",
    scale=0.125,
    logit=None,
    visible=None,
    extra=(),
    lse=False,
    paged=0,
    pad=0,
):
    """q [b, h, m, d], k and v by `layout` ("bhsd", "bshd" or "packed": both in one tensor), masks
    in `extra` (name, shape, dtype), the result [b, m, h, e].

    `logit` and `visible` are functions of a `Point`. With `paged`, keys lie in pages of that size,
    found through a table; `pad` elements follow each head in memory.
    """
    s = sizes
    key_heads = s.heads // s.shared
    axes = {}
    extents = (s.batch, s.heads, s.rows, s.keys, s.terms, s.features)
    for name, extent in zip("bhmnde", extents, strict=True):
        axes[name] = Axis(fresh_var(name, "int64"), extent)
    at = {
        name: int64(0) if isinstance(a.extent, int) and a.extent == 1 else a.var
        for name, a in axes.items()
    }
    head = at["h"] if s.shared == 1 else tirx.FloorDiv(at["h"], int64(s.shared))
    params = {"q": param("q", (s.batch, s.heads, s.rows, s.terms), dtype)}

    def load(name, *indices):
        p = params[name]
        value = tirx.BufferLoad(p.var, list(indices))
        return value

    if paged:
        pages = s.keys // paged * s.batch
        params["table"] = param("table", (s.batch, s.keys // paged), "int32")
        for name, size in (("k", s.terms), ("v", s.features)):
            params[name] = param(name, (pages, paged, key_heads, size), dtype)

        def stored(name, last):
            page = load("table", at["b"], tirx.FloorDiv(at["n"], int64(paged)))
            return load(name, tirx.Cast("int64", page), at["n"] % int64(paged), head, last)
    elif layout == "packed":
        params["kv"] = param("kv", (s.batch, s.keys, 2, key_heads, s.terms), dtype)

        def stored(name, last):
            return load("kv", at["b"], at["n"], int64("kv".index(name)), head, last)
    else:
        for name, size in (("k", s.terms), ("v", s.features)):
            own = {"b": s.batch, "h": key_heads, "s": s.keys, "d": size + pad}
            params[name] = param(name, [own[c] for c in layout], dtype)

        def stored(name, last):
            places = {"b": at["b"], "h": head, "s": at["n"], "d": last}
            return load(name, *(places[c] for c in layout))

    for name, shape, kind in extra:
        params[name] = param(name, shape, kind)
    score = fresh_var("score", "float32")
    result, total = fresh_var("result", "float32"), fresh_var("lse", "float32")

    def wide(value):
        return tirx.Cast("float32", value)

    def read(name, *indices):
        value = load(name, *indices)
        return wide(value) if str(value.ty.dtype) in ("float16", "bfloat16") else value

    point = Point(at["b"], at["h"], at["m"], at["n"], score, read)
    q = wide(load("q", at["b"], at["h"], at["m"], at["d"]))
    params["y"] = param("y", (s.batch, s.rows, s.heads, s.features), dtype)
    if lse:
        params["lse"] = param("lse", (s.batch, s.heads, s.rows), "float32")
    numbers = {name: i for i, name in enumerate(params)}
    place = (at["b"], at["m"], at["h"], at["e"])
    row_outputs = ()
    if lse:
        row_outputs = (Output(numbers["lse"], (at["b"], at["h"], at["m"]), total, "float32"),)

    def kept(*names):
        return tuple(axes[name] for name in names if axes[name].extent != 1)

    return Attention(
        "attention",
        tuple(params.values()),
        kept("b", "h"),
        kept("m"),
        kept("n"),
        kept("d"),
        kept("e"),
        Operand(q),
        Operand(wide(stored("k", at["d"]))),
        Operand(wide(stored("v", at["e"]))),
        score,
        score * constant(scale, "float32") if logit is None else logit(point),
        None if visible is None else visible(point),
        (),
        result,
        total,
        (Output(numbers["y"], place, result, dtype),),
        row_outputs,
        (),
        dtype,
        dtype,
    )


def reference(arrays, sizes: Sizes, layout="bhsd", scale=0.125, mask=None, paged=0):
    """(result [b, m, h, e], lse [b, h, m]) in float64; `mask` makes logits of scores."""
    s = sizes
    wide = {name: a.astype(np.float64) for name, a in arrays.items() if a.dtype != np.bool_}
    if paged:
        k, v = (wide[name][arrays["table"]].reshape(s.batch, s.keys, -1, wide[name].shape[-1])
                .transpose(0, 2, 1, 3) for name in "kv")  # fmt: skip
    elif layout == "packed":
        k, v = (wide["kv"][:, :, i].transpose(0, 2, 1, 3) for i in range(2))
    else:
        order = [layout.index(c) for c in "bhsd"]
        k, v = wide["k"].transpose(order)[..., : s.terms], wide["v"].transpose(order)
        v = v[..., : s.features]
    k, v = (np.repeat(x, s.shared, axis=1) for x in (k, v))
    scores = np.einsum("bhmd,bhnd->bhmn", wide["q"], k)
    logits = scores * scale if mask is None else mask(scores, arrays)
    with np.errstate(all="ignore"):
        top = np.maximum(logits.max(-1, keepdims=True), -1e300)
        weights = np.exp(logits - top)
        total = weights.sum(-1)
        y = np.einsum("bhmn,bhne->bhme", weights, np.where(np.isfinite(v), v, 0))
        y = np.where(total[..., None] > 0, y / total[..., None], 0)
        lse = np.where(total > 0, top[..., 0] + np.log(total), -np.inf)
    return y.transpose(0, 2, 1, 3), lse


def arrays_of(attention: Attention, values=None, seed=0):
    """Random numbers for the inputs, NaN for the outputs, by name; `values` stand in for some."""
    rng = np.random.default_rng(seed)
    written = {o.param for o in (*attention.outputs, *attention.row_outputs)}
    found = {}
    for number, p in enumerate(attention.params):
        if values and p.name in values:
            found[p.name] = values[p.name]
        elif number in written:
            found[p.name] = np.full(p.shape, np.nan, NUMPY.get(p.dtype, p.dtype))
        else:
            found[p.name] = rng.standard_normal(p.shape).astype(NUMPY.get(p.dtype, p.dtype))
    return found
