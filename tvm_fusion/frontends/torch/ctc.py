"""The loss of connectionist temporal classification (Graves et al., 2006), whose operator
torch.export cannot trace: one of ours stands for it, which is a loop (`loops`).

    alpha[t, s] = log(e^alpha[t-1, s] + e^alpha[t-1, s-1] + e^alpha[t-1, s-2]) + log_probs[t, l[s]]

l are the labels of a target with blanks between, before and behind them; s - 2 counts where l[s] is
no blank and other than l[s - 2].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from tvm import relax, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .importer import Importer, bound_arguments
from .loops import known_shape, loops, variable
from .operators import Converter

Tensor = torch.Tensor


def _ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    begins: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> Tensor:
    """The losses of a batch [N], by PyTorch.

    Parameters
    ----------
    log_probs : Tensor
        [T, N, C].
    targets : Tensor
        All labels in a row, [S].
    begins : Tensor
        Where those of a sample begin, [N].
    input_lengths, target_lengths : Tensor
        [N].
    blank : int
    """
    lengths = target_lengths.tolist()
    parts = [targets[b : b + n] for b, n in zip(begins.tolist(), lengths, strict=True)]
    given = log_probs, torch.cat(parts), input_lengths, target_lengths
    return F.ctc_loss(*given, blank=blank, reduction="none")


_operator = torch.library.custom_op("tvm_fusion::ctc_losses", _ctc_losses, mutates_args=())


@_operator.register_fake
def _(log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """`torch.nn.functional.ctc_loss` by the operator above."""
    if reduction not in ("none", "mean", "sum") or 0 in targets.shape:
        return NotImplemented
    is_batch = log_probs.ndim == 3
    given = log_probs if is_batch else log_probs.unsqueeze(1)
    inputs, lengths = (
        torch.as_tensor(x, device=log_probs.device).to(torch.int64).reshape(-1)
        for x in (input_lengths, target_lengths)
    )
    if targets.ndim == 2:
        begins = torch.arange(targets.shape[0], device=log_probs.device) * targets.shape[1]
    else:
        begins = lengths.cumsum(0) - lengths
    losses = torch.ops.tvm_fusion.ctc_losses(
        given, targets.to(torch.int64).reshape(-1), begins, inputs, lengths, blank
    )
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1).to(losses.dtype)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses if is_batch else losses.squeeze(0)


def _log_of_sum(numbers: Sequence[Expr], dtype: str) -> Expr:
    """log(sum(exp(x))), from the greatest on."""
    high = numbers[0]
    for x in numbers[1:]:
        high = tirx.max(high, x)
    base = variable(dtype, tirx.Select(high == -math.inf, tirx.const(0, dtype), high))
    total = tirx.const(0, dtype)
    for x in numbers:
        total = total + tirx.exp(x - base[0])
    return tirx.log(total) + base[0]


def _losses(importer: Importer, node: fx.Node) -> relax.Expr:
    args, dtype = bound_arguments(node), importer.dtype_of(node)
    _, count, classes = known_shape(args["log_probs"])
    (total,) = known_shape(args["targets"])
    width = 2 * total + 1
    names = ("log_probs", "targets", "begins", "input_lengths", "target_lengths")
    inputs = [importer.value_of(args[name]) for name in names]
    none = tirx.const(-math.inf, dtype)

    def write(ins: list, outs: list) -> None:
        (log_probs, targets, begins, inputs, lengths), (losses, alpha) = ins, outs

        def label(n: Expr, s: Expr) -> Expr:
            place = tirx.min(begins[n] + s // 2, tirx.const(total - 1, "int64"))
            return tirx.Select(s % 2 == 0, tirx.const(args["blank"], "int64"), targets[place])

        def probability(t: Expr, n: Expr, s: Expr) -> Expr:
            return log_probs[(t * count + n) * classes + label(n, s)]

        def before(row: Expr, s: Expr, back: int) -> Expr:
            return tirx.Select(s >= back, alpha[row + tirx.max(s - back, 0)], none)

        with T.parallel(0, count) as n:
            size = 2 * lengths[n] + 1
            first = tirx.Cast("int64", n) * (2 * width)
            with T.serial(0, size) as s:
                begin = probability(0, n, s)
                alpha[first + s] = tirx.Select(s < 2, begin, none)
            with T.serial(1, tirx.max(inputs[n], 1)) as t:
                now, last = first + t % 2 * width, first + (t + 1) % 2 * width
                with T.serial(0, size) as s:
                    skips = tirx.And(s % 2 == 1, label(n, s) != label(n, tirx.max(s - 2, 0)))
                    paths = [before(last, s, 0), before(last, s, 1)]
                    paths.append(tirx.Select(skips, before(last, s, 2), none))
                    alpha[now + s] = _log_of_sum(paths, dtype) + probability(t, n, s)
            end = first + (tirx.max(inputs[n], 1) + 1) % 2 * width
            ends = [before(end, size - 1, 0), before(end, size - 1, 1)]
            loss = tirx.const(0, dtype) - _log_of_sum(ends, dtype)
            nothing = tirx.Select(lengths[n] == 0, tirx.const(0, dtype), 0 - none)
            losses[n] = tirx.Select(inputs[n] == 0, nothing, loss)

    results = [((count,), dtype), ((count, 2, width), dtype)]
    return loops(importer, "ctc_losses", inputs, results, write)[0]


CONVERTERS: dict[str, Converter] = {"ctc_losses.default": _losses}
