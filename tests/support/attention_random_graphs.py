"""The Relax graph of a configuration of `attention_random`, and what its inputs are."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx

from tests.support.attention_graphs import FLOAT, Graph, constant
from tests.support.attention_masks import where
from tests.support.attention_random import Configuration
from tests.support.graphs import module
from tests.support.kernel_cases import numpy_dtype

CAP = 8.0


def factor(c: Configuration) -> float:
    """What scores are multiplied with: 1 / sqrt(D), rounded as the graph rounds it."""
    if c.spelling == "composite":
        return float(np.float32(c.D**-0.5))
    wide = c.scale != "query" and c.spelling in ("wide", "flash")
    kind = numpy_dtype(FLOAT if wide else c.dtype)
    if c.scale == "divide":
        return 1 / float(kind.type(c.D**0.5))
    return float(kind.type(c.D**-0.5))


def inputs_of(c: Configuration, known: bool = True) -> dict[str, tuple[tuple, str]]:
    """Shape and dtype of each input; with symbols where the graph does not know a size, unless
    `known`.
    """
    size = {name: getattr(c, name) for name in "BMN"}
    if not known:
        size |= {name: tirx.Var(name.lower(), "int64") for name in c.symbolic}
        if c.itself:
            size["M"] = size["N"]
    size |= {"H": c.H, "1": 1}
    b, m, n = size["B"], size["M"], size["N"]
    if c.layout == "packed":
        found = {"qkv": ((b, m, (c.H + 2 * c.G) * c.D), c.dtype)}
    else:
        found = {
            "q": (_stored(c.layout, b, c.H, m, c.D), c.dtype),
            "k": (
                (b, c.G, c.D, n) if c.layout == "turned" else _stored(c.layout, b, c.G, n, c.D),
                c.dtype,
            ),
            "v": (_stored(c.layout, b, c.G, n, c.E), c.dtype),
        }
    if c.added:
        found["added"] = (tuple(size[x] for x in c.added), c.added_dtype)
    if c.boolean:
        found["seen"] = (tuple(size[x] for x in c.boolean), "bool")
    if c.documents:
        found["key_ids"] = ((b, n), "int32")
        if not same_ids(c):
            found["query_ids"] = ((b, m), "int32")
    if c.alibi:
        found["slopes"] = ((c.H,), FLOAT)
    if c.epilogue in ("residual", "gate"):
        found["more"] = (_stored(c.output, b, c.H, m, c.E), c.dtype)
    return found


def same_ids(c: Configuration) -> bool:
    """Queries and keys are of the same documents."""
    return c.M == c.N and ("M" in c.symbolic) == ("N" in c.symbolic) and _one_symbol(c)


def _one_symbol(c: Configuration) -> bool:
    return c.itself or "M" not in c.symbolic


def _stored(layout: str, b: Any, h: int, s: Any, d: int) -> tuple:
    """The shape in a layout."""
    if layout in ("bhsd", "turned"):
        return b, h, s, d
    return (b, s, h, d) if layout == "bshd" else (b, s, h * d)


def module_of(c: Configuration) -> tvm.IRModule:
    """The configuration as a Relax module."""
    inputs = inputs_of(c, known=False)

    def emit(bb, *variables):
        return _emit(Graph(bb), c, dict(zip(inputs, variables, strict=True)))

    return module(emit, *inputs.values())


def _emit(g: Graph, c: Configuration, x: dict) -> Any:
    if c.spelling == "composite":
        result, lse = _composite(g, c, x), None
    else:
        q, k, v = (_spread(g, c, y) for y in _heads_first(g, c, x))
        result, lse = _attend(g, c, q, k, v, x)
        if c.output != "bhsd":
            result = g.permute_dims(result, (0, 2, 1, 3))
    if c.output == "merged":
        b, s, _, _ = result.ty.shape
        result = g.reshape(result, (b, s, c.H * c.E))
    if c.epilogue == "residual":
        result = g.add(result, x["more"])
    elif c.epilogue == "gate":
        result = g.multiply(result, g.sigmoid(x["more"]))
    elif c.epilogue == "float32":
        result = g.scaled(g.wide(result), 0.5)
    return [result, lse] if c.lse else result


def _split(g: Graph, c: Configuration, x: dict) -> list:
    """q, k and v of one tensor, as [B, S, H * D]."""
    ends = [0, c.H * c.D, (c.H + c.G) * c.D, (c.H + 2 * c.G) * c.D]
    return [g.strided_slice(x["qkv"], [2], [a], [b]) for a, b in pairwise(ends)]


def _heads_first(g: Graph, c: Configuration, x: dict) -> list:
    """q, k and v as [B, H, S, D]; turned keys as they are."""
    if c.layout in ("packed", "merged"):
        parts = _split(g, c, x) if c.layout == "packed" else [x["q"], x["k"], x["v"]]
        return [g.heads(p, h) for p, h in zip(parts, (c.H, c.G, c.G), strict=True)]
    parts = [x["q"], x["k"], x["v"]]
    return [g.permute_dims(p, (0, 2, 1, 3)) for p in parts] if c.layout == "bshd" else parts


def _spread(g: Graph, c: Configuration, y: Any) -> Any:
    """Key heads repeated, to one for each query head."""
    b, h, s, d = y.ty.shape
    if int(h) == c.H:
        return y
    if c.repeat == "repeat":
        return g.repeat(y, c.H // c.G, axis=1)
    y = g.broadcast_to(g.expand_dims(y, 2), (b, c.G, c.H // c.G, s, d))
    return g.reshape(y, (b, c.H, s, d))


def _composite(g: Graph, c: Configuration, x: dict) -> Any:
    """Relax's operator, of [B, S, H, D]; the result as [B, S, H, D] or as stored."""
    if c.layout == "packed":
        parts = []
        for y, h in zip(_split(g, c, x), (c.H, c.G, c.G), strict=True):
            b, s, _ = y.ty.shape
            parts.append(g.reshape(y, (b, s, h, c.D)))
    else:
        parts = [x["q"], x["k"], x["v"]]
        if c.layout == "bhsd":
            parts = [g.permute_dims(p, (0, 2, 1, 3)) for p in parts]
    causal = {"causal": "TopLeft", "causal at the end": "BottomRight"}.get(c.position)
    bias = [x["added"]] if c.added else []
    result = g.attention(*parts, *bias, causal_mask=causal)
    return g.permute_dims(result, (0, 2, 1, 3)) if c.output == "bhsd" else result


def _attend(g: Graph, c: Configuration, q: Any, k: Any, v: Any, x: dict) -> tuple[Any, Any]:
    """The result as [B, H, M, E], and the logarithm of the sum of weights."""
    if c.scale == "query":
        q = g.scaled(q, c.D**-0.5)
    turned = k if c.layout == "turned" else g.permute_dims(k, (0, 1, 3, 2))
    s = g.matmul(q, turned, out_dtype=FLOAT if c.spelling in ("wide", "flash") else c.dtype)
    if c.scale == "scores":
        s = g.scaled(s, c.D**-0.5)
    elif c.scale == "divide":
        s = g.divide(s, constant(c.D**0.5, s))
    s = _logits(g, c, g.wide(s) if c.spelling == "cast" else s, x)
    if c.spelling == "flash":
        result, lse = _flash(g, c, s, v)
    else:
        p = g.softmax(s, axis=-1)
        result, lse = g.matmul(g.astype(p, c.dtype) if c.wide else p, v), None
    if c.guard == "result":
        seen = g.astype(g.max(g.astype(x["seen"], "int8"), axis=-1, keepdims=True), "bool")
        result = where(g, seen, result, 0.0)
    return result, lse


def _flash(g: Graph, c: Configuration, s: Any, v: Any) -> tuple[Any, Any]:
    """The division behind the second product; empty rows get a maximum of 0 and a sum of 1."""
    top = g.max(s, axis=-1, keepdims=True)
    if c.guard:
        top = g.te(_replaced, top, -math.inf, 0.0)
    e = g.exp(g.subtract(s, top))
    total = g.sum(e, axis=-1, keepdims=True)
    if c.guard:
        total = g.te(_replaced, total, 0.0, 1.0)
    o = g.divide(g.matmul(g.astype(e, c.dtype), v, out_dtype=FLOAT), total)
    lse = g.squeeze(g.add(top, g.log(total)), axis=[-1]) if c.lse else None
    return g.astype(o, c.dtype), lse


def _replaced(x: te.Tensor, bad: float, other: float) -> te.Tensor:
    def at(*i):
        return tirx.Select(x(*i) == tirx.const(bad, FLOAT), tirx.const(other, FLOAT), x(*i))

    return te.compute(x.shape, at, name="guard")


def _logits(g: Graph, c: Configuration, s: Any, x: dict) -> Any:
    """Scores, capped, biased and masked."""
    if c.softcap:
        s = g.scaled(g.tanh(g.scaled(s, 1 / CAP)), CAP)
    if c.alibi:
        s = g.te(_slanted, s, x["slopes"])
    if c.added:
        s = g.add(s, g.wide(x["added"]) if c.wide and c.added_dtype != FLOAT else x["added"])
    if c.boolean:
        s = where(g, x["seen"], s, -math.inf)
    if c.documents:
        rows = x["key_ids"] if same_ids(c) else x["query_ids"]
        same = g.equal(g.expand_dims(rows, 2), g.expand_dims(x["key_ids"], 1))
        s = where(g, g.expand_dims(same, 1), s, -math.inf)
    if c.position != "all":
        s = g.te(_placed(c.position, c.window), s)
    return s


def _slanted(s: te.Tensor, slopes: te.Tensor) -> te.Tensor:
    """ALiBi: the further away a key, the less."""
    return te.compute(
        s.shape,
        lambda b, h, i, j: s(b, h, i, j) + slopes(h) * tirx.Cast(FLOAT, j - i),
        name="alibi",
    )


def _placed(position: str, window: int) -> Callable[[te.Tensor], te.Tensor]:
    """-inf for keys that are not visible by their place."""

    def placed(s: te.Tensor) -> te.Tensor:
        shift = 0 if position == "causal" else s.shape[3] - s.shape[2]

        def at(b, h, i, j):
            seen = j <= i + shift
            if window:
                seen = tirx.And(seen, j > i + shift - window)
            return tirx.if_then_else(seen, s(b, h, i, j), tirx.const(-math.inf, s.dtype))

        return te.compute(s.shape, at, name="placed")

    return placed
