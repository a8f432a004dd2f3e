"""Inputs and float64 results of the configurations of `attention_random`, with torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.attention_random import Configuration
from tests.support.attention_random_graphs import CAP, factor, inputs_of

CEILING = {"float16": 1e-3, "bfloat16": 8e-3}
"""Allowed error relative to the largest value: two roundings of the operands' dtype."""
STORED_SCORES = 4
"""How much larger it is where scores are stored in half precision: with a logit of 4, a rounding of
it changes the weight four times as much as a rounding of the weight."""
LSE_CEILING = 1e-4  # absolute, of float32


def numbers(c: Configuration, device: str = "cpu") -> dict[str, Tensor]:
    """Inputs by name, the same in each call on the same kind of device."""
    made = torch.Generator(device).manual_seed(c.seed)
    found = {}
    for name, (shape, dtype) in inputs_of(c).items():
        if name == "seen":
            x = torch.rand(shape, generator=made, device=device) < 0.6
            x[..., 0] = True
            if c.guard:
                x[0, ..., 1 :: max(2, c.M // 7), :] = False
        elif name == "key_ids":
            ids = torch.randint(0, 5, shape, generator=made, device=device)
            x = ids.sort(dim=1).values.int()
        elif name == "query_ids":  # each of a key
            picked = torch.randint(0, c.N, shape, generator=made, device=device)
            x = found["key_ids"].gather(1, picked).sort(dim=1).values
        elif name == "slopes":
            x = 2.0 ** -torch.arange(1, c.H + 1, device=device).float()
        else:
            x = torch.randn(shape, generator=made, device=device)
            if name == "added" and c.position in ("all", "causal"):
                x[..., 1:].masked_fill_(x[..., 1:] > 1.2, -torch.inf)
            x = x.to(getattr(torch, dtype))
        found[name] = x
    return found


def expected(c: Configuration, x: dict[str, Tensor]) -> list[Tensor]:
    """The results in float64."""
    q, k, v = _heads_first(c, x)
    results, sums = [], []
    for b in range(c.B):  # one by one: the scores are in memory
        kb, vb = (y[b].double().repeat_interleave(c.H // c.G, 0) for y in (k, v))
        logits = _logits(c, x, b, q[b].double() @ kb.transpose(1, 2) * factor(c))
        results.append(torch.softmax(logits, -1).nan_to_num(0.0) @ vb)
        sums.append(torch.logsumexp(logits, -1))
    result = torch.stack(results)
    if c.output != "bhsd":
        result = result.transpose(1, 2)
    if c.output == "merged":
        result = result.flatten(2)
    if c.epilogue == "residual":
        result = result + x["more"].double()
    elif c.epilogue == "gate":
        result = result * torch.sigmoid(x["more"].double())
    elif c.epilogue == "float32":
        result = result * 0.5
    return [result, torch.stack(sums)] if c.lse else [result]


def error(c: Configuration, got: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    """Largest errors: of the result, relative to its largest value, and of the logarithm; inf where
    a number is not finite.
    """
    result = (got[0].double() - wanted[0]).abs().max() / wanted[0].abs().max()
    found = {"result": float(result.nan_to_num(torch.inf))}
    if c.lse:
        found["lse"] = float((got[1].double() - wanted[1]).abs().max().nan_to_num(torch.inf))
    return found


def ceilings(c: Configuration) -> dict[str, float]:
    """What `error` may be."""
    stored = c.apart and c.spelling not in ("wide", "flash")
    result = CEILING[c.dtype] * (STORED_SCORES if stored else 1)
    return {"result": result, **({"lse": LSE_CEILING} if c.lse else {})}


def _heads_first(c: Configuration, x: dict[str, Tensor]) -> list[Tensor]:
    """q, k and v as [B, H, S, D]."""
    if c.layout in ("packed", "merged"):
        widths = [c.H * c.D, c.G * c.D, c.G * c.D]
        parts = x["qkv"].split(widths, 2) if c.layout == "packed" else [x[n] for n in "qkv"]
        return [
            p.unflatten(2, (h, -1)).transpose(1, 2)
            for p, h in zip(parts, (c.H, c.G, c.G), strict=True)
        ]
    q, k, v = (x[n] for n in "qkv")
    if c.layout == "turned":
        return [q, k.transpose(2, 3), v]
    return [y.transpose(1, 2) for y in (q, k, v)] if c.layout == "bshd" else [q, k, v]


def _logits(c: Configuration, x: dict[str, Tensor], b: int, s: Tensor) -> Tensor:
    """Logits [H, M, N] of a batch entry of its scaled scores."""

    def of_entry(mask: Tensor) -> Tensor:
        return mask[b if mask.shape[0] > 1 else 0]

    i = torch.arange(c.M, device=s.device)[:, None]
    j = torch.arange(c.N, device=s.device)[None]
    if c.softcap:
        s = torch.tanh(s / CAP) * CAP
    if c.alibi:
        s = s + x["slopes"].double()[:, None, None] * (j - i)
    if c.added:
        s = s + of_entry(x["added"]).double()
    seen = torch.ones(1, 1, 1, dtype=torch.bool, device=s.device)
    if c.boolean:
        seen = seen & of_entry(x["seen"])
    if c.documents:
        ids = x["key_ids"][b]
        seen = seen & (x.get("query_ids", x["key_ids"])[b][:, None] == ids[None])
    if c.position != "all":
        shift = 0 if c.position == "causal" else c.N - c.M
        seen = seen & (j <= i + shift)
        if c.window:
            seen = seen & (j > i + shift - c.window)
    return s.masked_fill(~seen, -torch.inf)
