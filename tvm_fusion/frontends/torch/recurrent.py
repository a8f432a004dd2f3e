"""What goes step by step: a loop in TIR, however many steps there are.

    y, h, c = lstm(x, [h0, c0], [w_ih, w_hh, b_ih, b_hh])
        x' = x @ w_ih^T + (b_ih + b_hh)
        y, h, c = recurrence(x', w_hh, h0, c0)              a function of TIR

    h, y = scan(step, [h0], [xs], [w])                      step(h, x, w) -> (h', y)
        h, y = loop(h0, xs, w)                              a function of TIR

LSTM, GRU and RNN have one product for all steps of each layer and direction, and a loop over them
(`kernels.recurrence.form`). `scan` and `while_loop` are the loops of a model's own steps
(`transform.functions.loop_function`).
Does not handle: projections, packed sequences (`lstm.data` and its like have no converter), and
quantised cells; steps that sort, draw random numbers or write into what they are given.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import tvm
import tvm_ffi
from torch import fx
from torch._decomp import decompositions as torch_decompositions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from tvm import relax, tirx

from ...errors import FrontendError, Unsupported
from ...kernels.recurrence.cell import Cell
from ...kernels.recurrence.form import Recurrence, recurrence_form
from ...transform.functions.loop_function import LoopFunction, scan_function, while_function
from ...transform.pipeline import lower
from ..finish import checked_module, cleaned
from .importer import Importer, bound_arguments, is_tensor, shape_of
from .operators import HALVES, Converter
from .refusals import listed


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


# ---- Loops of a model's own steps.


def _scan(importer: Importer, node: fx.Node) -> relax.Expr:
    """What is carried from row to row of tensors, and what each row gives."""
    _refuse_writes(node)
    step, *given = node.args[:4]
    carried, rows, others = ([importer.value_of(x) for x in each] for each in given)
    each = [relax.Var("row", relax.TensorType(list(x.ty.shape)[1:], x.ty.dtype)) for x in rows]
    fakes = [*map(_fake, given[0]), *(_fake(x)[0] for x in given[1]), *map(_fake, given[2])]
    mod = _imported(importer, node, step, fakes, [*carried, *each, *others])
    others = [*filter(is_tensor, others)]
    mod, rows, others = _without_ahead(importer, mod, len(carried), rows, others)
    with _as_refusal():
        made = scan_function(_lowered(mod), _types(carried), _types(rows), _types(others))
    return _called(importer, node, made, [*carried, *rows, *others])


def _while_loop(importer: Importer, node: fx.Node) -> relax.Expr:
    """What is carried from step to step while a condition of it holds."""
    _refuse_writes(node)
    condition, step, *given = node.args[:4]
    carried, others = ([importer.value_of(x) for x in each] for each in given)
    if not all(map(is_tensor, carried)):
        raise FrontendError("it carries numbers: carry tensors of one element")
    fakes = [_fake(x) for each in given for x in each]
    asked, mod = (
        _imported(importer, node, graph, fakes, [*carried, *others]) for graph in (condition, step)
    )
    others = [*filter(is_tensor, others)]
    with _as_refusal():
        given = (_types(carried), _types(others))
        made = while_function(_lowered(asked), _lowered(mod), *given)
    return _called(importer, node, made, [*carried, *others])


def _refuse_writes(node: fx.Node) -> None:
    if node.kwargs.get("mutated_arg_indices"):
        raise FrontendError("its steps write into what they are given: carry it along")


def _fake(arg: Any) -> Any:
    """What stands for an argument while a graph is traced."""
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _types(values: Sequence[relax.Expr]) -> list[relax.TensorType]:
    return [value.ty for value in values]


@contextmanager
def _as_refusal() -> Iterator[None]:
    try:
        yield
    except Unsupported as why:
        text = f"its steps are no loop in TIR: {why}; write them in other operators"
        raise FrontendError(text) from why


def _called(
    importer: Importer, node: fx.Node, made: LoopFunction, given: Sequence[relax.Expr]
) -> relax.Expr:
    """The results of a loop."""
    types = [
        relax.TensorType(
            shape_of(value, importer.symbols), importer._convert_data_type(value.dtype)
        )
        for value in node.meta["val"]
    ]
    name = importer.block_builder.add_func(made.func, node.target.__name__)
    arguments = [*given, *made.constants]
    result = importer.emit(relax.call_tir(name, arguments, types if len(types) > 1 else types[0]))
    if len(types) == 1:
        return relax.Tuple([result])
    return relax.Tuple([importer.emit(relax.TupleGetItem(result, n)) for n in range(len(types))])


def _lowered(mod: tvm.IRModule) -> tvm.IRModule:
    return lower(mod, tvm.target.Target("llvm"))


def _imported(
    importer: Importer,
    node: fx.Node,
    graph: fx.Node,
    fakes: Sequence[Any],
    taken: Sequence[Any],
) -> tvm.IRModule:
    """The graph of a step, which takes such tensors and numbers, as a module."""
    found = operator.attrgetter(graph.target)(graph.graph.owning_module)
    step = fx.GraphModule(found, copy.deepcopy(found.graph))
    mode = next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None)
    if mode is None:
        raise FrontendError("it takes no tensors")
    with mode, torch.no_grad():
        _Values(step, mode).run(*fakes)
    inner = type(importer)(importer.converters)
    inner.symbols, inner.multiples = importer.symbols, importer.multiples
    inner.block_builder, params = relax.BlockBuilder(), []
    for placeholder, value in zip(step.graph.find_nodes(op="placeholder"), taken, strict=True):
        inner.env[placeholder] = value
        if is_tensor(value):
            inner.env[placeholder] = relax.Var(placeholder.name, value.ty)
            params.append(inner.env[placeholder])
    for constant in step.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(constant.target)(step)
        if isinstance(value, torch.Tensor):
            with step.graph.inserting_before(constant):
                given = step.graph.placeholder(f"{constant.name}_value")
            given.meta = constant.meta
            constant.replace_all_uses_with(given)
            step.graph.erase_node(constant)
            kept = importer._convert_pytorch_tensor_to_tvm(value.detach().cpu())
            inner.env[given] = relax.const(kept)
    with inner.block_builder.function("main", params):
        with inner.block_builder.dataflow():
            results = inner._translate_fx_graph(step, step.graph.nodes, {})
            result = inner.block_builder.emit_output(relax.Tuple(results))
        inner.block_builder.emit_func_output(result)
    if inner.refused:
        why = "; ".join(listed(inner.refused))
        text = f"a step of it is not converted: {why}; write it in other operators"
        raise FrontendError(text)
    return checked_module(cleaned(inner.block_builder.get()), f"a step of {node.target}")


# What is computed for each row by itself, and so for all rows at once: of tensors alike, or of one
# and of what is the same for all.
_OF_ONE = frozenset(
    f"relax.{name}"
    for name in ("abs", "astype", "cos", "exp", "log", "negative", "nn.gelu", "nn.relu", "nn.silu",
                 "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh")
)  # fmt: skip
_OF_TWO = frozenset(
    f"relax.{name}" for name in ("add", "divide", "maximum", "minimum", "multiply", "subtract")
)


def _without_ahead(
    importer: Importer,
    mod: tvm.IRModule,
    carried: int,
    rows: Sequence[relax.Expr],
    others: Sequence[relax.Expr],
) -> tuple[tvm.IRModule, list[relax.Expr], list[relax.Expr]]:
    """A step without what can be computed ahead of it, for all rows at once or once for all, and
    the rows and the other tensors that it takes then.
    """
    main, count = mod["main"], carried + len(rows)
    of_rows = dict(zip(main.params[carried:count], rows, strict=True))
    fixed = dict(zip(main.params[count:], others, strict=True))
    blocks = []
    for block in main.body.blocks:
        left = []
        for binding in block.bindings:
            call, var = getattr(binding, "value", None), binding.var
            known = _is_computed(call) and {a for a in call.args if isinstance(a, relax.Var)}
            if not known or not known <= {*of_rows, *fixed}:
                left.append(binding)
            elif known <= {*fixed} or _is_by_row(call, of_rows):
                args = [of_rows.get(a, fixed.get(a, a)) for a in call.args]
                ahead = importer.emit(relax.Call(call.op, args, call.attrs, call.ty_args))
                (fixed if known <= {*fixed} else of_rows)[var] = ahead
            else:
                left.append(binding)
        blocks.append(type(block)(left))
    body = relax.SeqExpr(blocks, main.body.body)
    used = relax.analysis.free_vars(body)
    new = {v: relax.Var(v.name, v.ty) for v in (*of_rows, *fixed) if v in used}
    of_rows, fixed = ({v: x for v, x in each.items() if v in new} for each in (of_rows, fixed))
    body = tvm_ffi.structural_map(body, [(relax.Var, lambda v: new.get(v, v))])
    params = [*main.params[:carried], *(new[v] for v in (*of_rows, *fixed))]
    func = relax.Function(params, body, main.ret_ty, main.is_pure, main.attrs)
    out = mod.clone()
    out.update_func(mod.get_global_var("main"), func)
    return relax.transform.Normalize()(out), [*of_rows.values()], [*fixed.values()]


def _is_computed(call: Any) -> bool:
    """Whether a value is an operator's of tensors, that gives a tensor."""
    is_operator = isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op)
    is_own = is_operator and not any(isinstance(a, tvm.ir.GlobalVar) for a in call.args)
    return is_own and isinstance(call.ty, relax.TensorType)


def _is_by_row(call: relax.Call, rows: Container[relax.Var]) -> bool:
    """Whether an operator gives for rows one above the other what it gives for each."""
    name, ndim = call.op.name, call.ty.ndim
    if name in _OF_ONE:
        return True
    if name == "relax.matmul":
        x, w = call.args
        return x in rows and w not in rows and w.ty.ndim == 2
    tensors = [a for a in call.args if is_tensor(a)]
    sizes = [(a in rows, a.ty.ndim) for a in tensors]
    return name in _OF_TWO and all(n == ndim if row else n <= ndim for row, n in sizes)


class _Values(fx.Interpreter):
    """Notes what nodes give for tensors that stand for others, of one mode."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self._mode = mode

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.op == "get_attr" and isinstance(value, torch.Tensor):
            value = self._mode.from_tensor(value)
        if node.op != "output":
            node.meta["val"] = value
        return value


CONVERTERS: dict[str, Converter] = {
    "scan": _scan,
    "while_loop": _while_loop,
    "lstm.input": _recurrent(Cell.LSTM),
    "gru.input": _recurrent(Cell.GRU),
    "rnn_tanh.input": _recurrent(Cell.TANH),
    "rnn_relu.input": _recurrent(Cell.RELU),
}
