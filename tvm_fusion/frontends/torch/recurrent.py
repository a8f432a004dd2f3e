"""LSTM, GRU and RNN: of each layer and direction one product for all steps, and a loop over them.

    y, h, c = lstm(x, [h0, c0], [w_ih, w_hh, b_ih, b_hh])
        x' = x @ w_ih^T + (b_ih + b_hh)
        y, h, c = recurrence(x', w_hh, h0, c0)              a function of TIR

`kernels.recurrence.form` has the loops. Does not handle: projections, packed sequences (`lstm.data`
and its like have no converter), and quantised cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._decomp import decompositions as torch_decompositions
from tvm import relax, tirx

from ...errors import FrontendError
from ...kernels.recurrence.cell import Cell
from ...kernels.recurrence.form import Recurrence, recurrence_form
from .importer import Importer, bound_arguments
from .operators import HALVES, Converter


def _recurrent(cell: Cell) -> Converter:
    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        if args["train"] and args["dropout"]:
            raise FrontendError("it drops elements at random in training: call eval() first")
        x, states = (importer.value_of(args[name]) for name in ("input", "hx"))
        states = list(states) if cell.has_memory else [states]
        ways = 2 if args["bidirectional"] else 1
        count = args["num_layers"] * ways
        weights = _weights(importer, args, count)
        if args["batch_first"]:
            x = importer.permute(x, (1, 0, 2))
        last: list[list[relax.Expr]] = [[] for _ in states]
        for layer in range(args["num_layers"]):
            found = []
            for way in range(ways):
                at = layer * ways + way
                before = [_row(importer, state, at, count) for state in states]
                given = _given(importer, cell, x, weights[at])
                y, *after = _steps(importer, cell, given, before, backward=way == 1)
                found.append(y)
                for kept, state in zip(last, after, strict=True):
                    kept.append(importer.emit(relax.op.expand_dims(state, 0)))
            x = _joined(importer, found, 2)
        if args["batch_first"]:
            x = importer.permute(x, (1, 0, 2))
        return relax.Tuple([x, *(_joined(importer, kept, 0) for kept in last)])

    return convert


def _weights(importer: Importer, args: dict, count: int) -> list[list[relax.Expr]]:
    """Of each layer and direction: both weights, and both biases if there are some."""
    found, each = importer.value_of(args["params"]), 4 if args["has_biases"] else 2
    if len(found) != each * count:
        raise FrontendError(
            "an LSTM with projections (proj_size): leave them out, or write the projection as a "
            "linear layer behind it"
        )
    return [found[n : n + each] for n in range(0, len(found), each)]


def _row(importer: Importer, state: relax.Expr, at: int, count: int) -> relax.Expr:
    """The state of one layer and direction."""
    if count > 1:
        state = importer.emit(relax.op.strided_slice(state, [0], [at], [at + 1]))
    return importer.emit(relax.op.squeeze(state, [0]))


def _joined(importer: Importer, parts: Sequence[relax.Expr], axis: int) -> relax.Expr:
    return parts[0] if len(parts) == 1 else importer.emit(relax.op.concat(list(parts), axis))


def _given(
    importer: Importer, cell: Cell, x: relax.Expr, weights: Sequence[relax.Expr]
) -> list[relax.Expr]:
    """What does not depend on the states: the product of all inputs with their weights and biases,
    rounded once; the other weights; the bias that is to be added apart.
    """
    into, across, *biases = weights
    dtype = str(x.ty.dtype)
    wide, units = "float32" if dtype in HALVES else dtype, int(across.ty.shape[1])
    product = importer.emit(relax.op.matmul(x, importer.permute(into, (1, 0)), out_dtype=wide))
    apart = [relax.op.zeros([units], dtype)] if cell.has_bias else []
    if biases:
        own, other = (importer.cast(bias, wide) for bias in biases)
        if cell.has_bias:
            first = (cell.gates - 1) * units
            apart = [relax.op.strided_slice(biases[1], [0], [first], [first + units])]
            ahead = importer.emit(relax.op.strided_slice(other, [0], [0], [first]))
            none = importer.emit(relax.op.zeros([units], wide))
            other = importer.emit(relax.op.concat([ahead, none], 0))
        product = importer.emit(relax.op.add(product, importer.emit(relax.op.add(own, other))))
    product = importer.cast(product, dtype)
    return [product, across, *map(importer.emit, apart)]


def _steps(
    importer: Importer,
    cell: Cell,
    given: Sequence[relax.Expr],
    states: Sequence[relax.Expr],
    backward: bool,
) -> Iterator[relax.Expr]:
    """The hidden states of all steps, and the last of each state."""
    x, w = given[:2]
    steps, batch = (_size(n, name) for n, name in zip(x.ty.shape, ("steps", "batch"), strict=False))
    dtype = str(x.ty.dtype)
    func = recurrence_form(Recurrence(cell, steps, batch, int(w.ty.shape[1]), dtype, backward))
    state = relax.TensorType(states[0].ty.shape, dtype)
    y = relax.TensorType([*list(x.ty.shape)[:2], w.ty.shape[1]], dtype)
    name = importer.block_builder.add_func(func, "recurrence")
    results = [y, *[state] * len(states)]
    made = importer.emit(relax.call_tir(name, [*given, *states], results))
    for n in range(len(results)):
        yield importer.emit(relax.TupleGetItem(made, n))


def _size(extent: object, name: str) -> int | tirx.Var:
    return int(extent) if isinstance(extent, tirx.IntImm) else tirx.Var(name, "int64")


@contextmanager
def states_in_shape() -> Iterator[None]:
    """A context in which torch traces the last states of LSTMs in their shape: its decomposition,
    which says what shapes are, leaves an axis of one element in them (2.11, on GPUs and of halves).
    """
    original = torch_decompositions.one_layer_lstm

    def one_layer_lstm(
        x: torch.Tensor, hidden: Sequence[torch.Tensor], *others: Any, **options: Any
    ) -> Any:
        y, last = original(x, hidden, *others, **options)
        return y, tuple(a.reshape(b.shape) for a, b in zip(last, hidden, strict=True))

    torch_decompositions.one_layer_lstm = one_layer_lstm
    try:
        yield
    finally:
        torch_decompositions.one_layer_lstm = original


CONVERTERS: dict[str, Converter] = {
    "lstm.input": _recurrent(Cell.LSTM),
    "gru.input": _recurrent(Cell.GRU),
    "rnn_tanh.input": _recurrent(Cell.TANH),
    "rnn_relu.input": _recurrent(Cell.RELU),
}
