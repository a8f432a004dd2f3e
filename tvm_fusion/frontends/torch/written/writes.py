"""Values written at indices: `index_copy`, `index_put`, `x[:, :, position] = new`.

    y = x.index_copy(2, position, new)     y is x with other values at the position
    x.index_copy_(2, position, new)        an input of the model, changed in place: a cache

torch.export makes the first of the second, and notes that the result takes the place of the input.
Where nothing else reads the old input, the kernel writes into the input itself and copies nothing
(`written_inputs`). One position is a choice at every element, which fuses with what reads it; many
are a copy and a loop of stores, in order (transform/lower/ordered_writes.py). A mask is a choice,
too. Refused, with advice: a mask beside another index; a symbolic number of values for a mask.
Writes with symbolic extents are left to TVM where it gets them right (`_is_right_in_tvm`), or
refused. Inputs that are changed in other ways get their new values from outputs of `main`
(`convention`); a module that is imported alone leaves them as they were, and a warning says
so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from tvm import relax, te, tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from tvm_fusion.errors import FrontendError

from ....transform.lower.ordered_writes import DISTINCT_ATTR
from ..convention import is_view, view_on
from ..importer import Importer, bound_arguments
from ..indexing import counted_from_start, taken
from ..operators import Converter
from ..refusals import place_of
from .known_indices import are_distinct

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
ALONG_AN_AXIS = (_aten.index_copy.default, _aten.index_add.default)
WRITES = (_aten.index_put.default, _aten.index_put_.default, *ALONG_AN_AXIS)


def refuse_writes_into_repeats(program: torch.export.ExportedProgram, where: str) -> None:
    """Raise FrontendError if a program writes in place into a view with elements that share memory.

    torch.export makes such a write out of place by adding up the elements that share memory:
    ``x.expand(3, -1).fill_(2)`` sets `x` to 6 (`aten::expand`'s inverse is a sum).
    """
    for node in program.graph.nodes:
        for written in written_by(node):
            if _repeats(written.meta.get("val")):
                raise FrontendError(
                    f"{where}: {node.target} writes in place into {written.name}, whose elements "
                    "share memory (expand, broadcast_to): torch.export gets it wrong. Write into "
                    "the tensor before it is expanded, or into a clone"
                )


def refuse_writes_into_constants(program: torch.export.ExportedProgram, where: str) -> None:
    """Raise FrontendError if a program writes into a tensor that is no input and no buffer: one
    that the model keeps as an attribute, in a list or in another object.
    """
    specs = program.graph_signature.input_specs
    constants = {s.arg.name for s in specs if s.kind is InputKind.CONSTANT_TENSOR}
    for node in program.graph.nodes:
        for written in written_by(node):
            if base_of(written).name in constants:
                raise FrontendError(
                    f"{where}: {node.target} ({place_of(node)}) writes in place into a tensor that "
                    "the model keeps as an attribute, which torch.export takes for a constant: "
                    "register it as a buffer, whose values are kept between calls"
                )


RESIZES = (_aten.resize_.default, _aten.resize_as_.default, _aten.set_.source_Tensor)


def refuse_other_sizes(program: torch.export.ExportedProgram, where: str) -> None:
    """Raise FrontendError if a program gives an input or a buffer another size or other memory."""
    for node in program.graph.nodes:
        if node.target in RESIZES and base_of(node.args[0]).op == "placeholder":
            raise FrontendError(
                f"{where}: {node.target} ({place_of(node)}) gives {base_of(node.args[0]).name!r}, "
                "an input or buffer, another size or memory, which stays the caller's: give one of "
                "that size, or resize a clone of it"
            )


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes into."""
    if node.target is _aten.detach_.default:  # no element of it
        return []
    return _arguments(node, lambda alias: alias.is_write)


def base_of(node: fx.Node) -> fx.Node:
    """The tensor that a node is a view of, or another name of; the node itself where it is none."""
    while views := _arguments(node, lambda _: True):
        node = views[0]
    return node


def _arguments(node: fx.Node, counts: Callable[[Any], bool]) -> list[fx.Node]:
    """The arguments of a node whose memory its schema says something of that counts."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = bound_arguments(node)
    found = [given[a.name] for a in schema.arguments if a.alias_info and counts(a.alias_info)]
    return [argument for argument in found if isinstance(argument, fx.Node)]


def _repeats(value: object) -> bool:
    """Whether elements of a tensor share memory."""
    return isinstance(value, torch.Tensor) and any(
        stride == 0 and size != 1 for stride, size in zip(value.stride(), value.shape, strict=True)
    )


def written_inputs(program: torch.export.ExportedProgram, buffers: bool) -> set[fx.Node]:
    """The writes of a program that may change an input of the model in place, or one of its
    `buffers` where these are inputs too.

    They are those between it and what takes its place, if each is the only reader of what it
    changes, and if something reads the last one.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    kinds = [OutputKind.USER_INPUT_MUTATION, *([OutputKind.BUFFER_MUTATION] if buffers else [])]
    found: set[fx.Node] = set()
    for spec in program.graph_signature.output_specs:
        if spec.kind not in kinds:
            continue
        last = nodes[spec.arg.name]
        if any(user.op != "output" for user in last.users):
            found.update(chain_of_writes(last)[1:])
    return found


def warn_of_lost_writes(program: torch.export.ExportedProgram, in_place: set[fx.Node]) -> None:
    """Log what is written that the imported module leaves as it is, as it takes no state."""
    nodes = {node.name: node for node in program.graph.nodes}
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION and nodes[spec.arg.name] not in in_place:
            _log.warning(
                "the model changes its input %s in place; the compiled one leaves it as it is: "
                "write with index_copy_ or index_put_, and read the result, or give the model to "
                "tvm_fusion.compile as it is",
                spec.target,
            )
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            _log.warning(
                "the model changes its buffer %s; the compiled one has no state: make it an "
                "input that is written with index_copy_, or give the model to tvm_fusion.compile "
                "as it is",
                spec.target,
            )


def chain_of_writes(last: fx.Node) -> list[fx.Node]:
    """An input and the writes between it and its last value, if these can be done in place: each
    is the only reader of what it changes. Empty if they cannot.
    """
    found, node = [], last
    while node.op == "call_function":
        if node.target not in WRITES or len(node.args[0].users) != 1 or not _is_plain(node):
            return []
        found.append(node)
        node = node.args[0]
    return [node, *reversed(found)]


def adds(node: fx.Node) -> bool:
    """Whether a write adds to what stands there, so that it may take place once only."""
    return bool(_arguments_of_put(node).get("accumulate"))


def _arguments_of_put(node: fx.Node) -> dict[str, Any]:
    """The arguments of a write, as those of `index_put`."""
    args = bound_arguments(node)
    if node.target in ALONG_AN_AXIS:
        axis = args["dim"] % node.meta["val"].ndim
        args["indices"] = [*[None] * axis, args["index"]]
        args["values"] = args["source"]
        args["accumulate"] = node.target is _aten.index_add.default
    return args


def _is_plain(node: fx.Node) -> bool:
    """Whether a write is one that is handled here."""
    args = _arguments_of_put(node)
    tensors = [node.meta["val"], args["values"].meta["val"]]
    tensors += [i.meta["val"] for i in args["indices"] if i is not None]
    whole = all(not t.dtype.is_floating_point and t.dtype != torch.bool for t in tensors[2:])
    static = all(isinstance(n, int) for t in tensors for n in t.shape)
    return whole and static and len(tensors) > 2


@dataclass(frozen=True, slots=True)
class Source:
    """Elements of a tensor of `count` that values are, by strides and an offset."""

    count: int
    strides: tuple[int, ...]
    offset: int

    def place(self, at: Sequence[Expr]) -> Expr:
        """The element for one of the values."""
        first = tirx.const(self.offset, "int64")
        return sum((i * n for i, n in zip(at, self.strides, strict=True)), first)


@dataclass(frozen=True, slots=True)
class Write:
    """Where values go.

    Attributes
    ----------
    shape : of the tensor that is written to.
    dtype : of it.
    indices : shape and dtype of the index of each axis, None where the whole axis is written.
    values : shape of the values, which broadcast.
    adds : whether the values are added to what is there.
    distinct : whether no two values are written to one element.
    wraps : whether an index below 0 counts from the end, and is not out of range.
    source : the values as a view of the elements of another tensor, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    indices: tuple[tuple[tuple[int, ...], str] | None, ...]
    values: tuple[int, ...]
    adds: bool = False
    distinct: bool = False
    wraps: bool = True
    source: Source | None = None

    def written(self, old: Expr, value: Expr) -> Expr:
        """What stands where a value was written."""
        if not self.adds:
            return value
        return tirx.any(old, value) if self.dtype == "bool" else old + value

    @property
    def indexed(self) -> list[int]:
        """The axes with an index."""
        return [axis for axis, index in enumerate(self.indices) if index is not None]

    @property
    def points(self) -> tuple[int, ...]:
        """The shape that the indices broadcast to."""
        return tuple(torch.broadcast_shapes(*(i[0] for i in self.indices if i is not None)))

    @property
    def first(self) -> int:
        """The axis of the region where those of the indices begin, as in NumPy."""
        axes = self.indexed
        return axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0

    @property
    def region(self) -> tuple[int, ...]:
        """The shape of all that is written."""
        rest = [n for axis, n in enumerate(self.shape) if self.indices[axis] is None]
        return (*rest[: self.first], *self.points, *rest[self.first :])

    def place(self, at: Sequence[Expr], load) -> list[Expr]:
        """The element of the tensor for one of the region; `load(number, place)` reads an index."""
        points = at[self.first : self.first + len(self.points)]
        rest = [*at[: self.first], *at[self.first + len(self.points) :]]
        found, number = [], 0
        for index, extent in zip(self.indices, self.shape, strict=True):
            if index is None:
                found.append(rest.pop(0))
                continue
            value = load(number, broadcast(points, index[0])).astype("int64")
            found.append(tirx.Select(value < 0, value + extent, value) if self.wraps else value)
            number += 1
        return found


def broadcast(place: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    """The place in a tensor of this shape that broadcasts to a place."""
    last = list(place)[len(place) - len(shape) :]
    return [tirx.const(0, "int64") if n == 1 else i for i, n in zip(last, shape, strict=True)]


def write_function(write: Write, in_place: bool) -> tirx.PrimFunc:
    """``write(x, *indices, values)``, or with a new tensor behind them that begins as a copy."""
    with IRBuilder() as builder, B.prim_func(s_tir=True):
        T.func_name("write")
        x = T.arg("x", _buffer(write.shape, write.dtype))
        indices = [T.arg(f"index{axis}", _buffer(*write.indices[axis])) for axis in write.indexed]
        source = write.source
        values = T.arg("values", _buffer([source.count] if source else write.values, write.dtype))
        y = x if in_place else T.arg("y", _buffer(write.shape, write.dtype))
        T.func_attr({"tirx.noalias": True, **({DISTINCT_ATTR: True} if write.distinct else {})})
        if not in_place:
            with T.grid(*_long(write.shape)) as loops, T.sblock("copy"):
                at = _axes(write.shape, loops)
                T.buffer_store(y, x[tuple(at)], at)
        with T.grid(*_long(write.region)) as loops, T.sblock("write"):
            at = _axes(write.region, loops)
            place = write.place(at, lambda number, where: indices[number][tuple(where)])
            own = broadcast(at, write.values)
            value = values[source.place(own)] if source else values[tuple(own)]
            T.buffer_store(y, write.written(y[tuple(place)], value), place)
    # a module may hold several: the name that it gives each is the only one
    return builder.get().without_attr("global_symbol")


def _axes(extents: Sequence[int], loops) -> list[Expr]:
    loops = [loops] if len(extents) == 1 and not isinstance(loops, list | tuple) else list(loops)
    pairs = zip(_long(extents), loops, strict=True)
    return [T.axis.spatial((tirx.const(0, "int64"), n), loop) for n, loop in pairs]


def _buffer(shape: Sequence[int], dtype: str) -> Any:
    return T.buffer(_long(shape), dtype)


def _long(extents: Sequence[int]) -> list[Expr]:
    """Extents of the type that those of Relax have, as FuseTIR wants them."""
    return [tirx.const(n, "int64") for n in extents]


def _chosen(write: Write, x: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
    """x with the values at one position: a choice at every element. A position below 0 is none."""
    *indices, values = tensors

    def at(*index):
        zeros = [tirx.const(0, "int64")] * len(write.points)
        rest = [i for axis, i in enumerate(index) if write.indices[axis] is None]
        region = [*rest[: write.first], *zeros, *rest[write.first :]]
        place = write.place(region, lambda number, where: indices[number](*where))
        here = [index[axis].astype("int64") == place[axis] for axis in write.indexed]
        value = write.written(x(*index), values(*broadcast(region, write.values)))
        return tirx.if_then_else(tirx.all(*here), value, x(*index))

    return te.compute(write.shape, at, name="write")


def _position(importer: Importer, index: fx.Node, extent: int, wraps: bool) -> relax.Expr:
    """One position along an axis; -1 where it is out of range. It is looked for among all that
    there are, so that a CPU raises OutOfRange: a choice alone would read and write nothing.
    """
    known = importer.known_values.get(index)
    if known is not None:
        place = known.numpy().astype("int64")
        place = np.where(place < 0, place + extent, place) if wraps else place
        return relax.const(np.where((place >= 0) & (place < extent), place, -1), "int64")
    if wraps:
        number = counted_from_start(importer, index, extent)
    else:
        number = importer.cast(importer.value_of(index), "int64")
    found = taken(importer, relax.const(np.arange(extent), "int64"), number, 0)
    inside = importer.emit(relax.op.equal(found, number))
    return importer.emit(relax.op.where(inside, number, relax.const(-1, "int64")))


def _index_put(importer: Importer, node: fx.Node) -> relax.Expr:
    args = _arguments_of_put(node)
    if any(_is_mask(i) for i in args["indices"]):
        return _put_by_mask(importer, args)
    if not _is_plain(node):
        if not _is_right_in_tvm(args):
            raise NotImplementedError(
                "symbolic extents where not every axis has an index, or where the values are "
                "broadcast: fix the extents, or write with torch.where"
            )
        return importer._index_put(node)
    x, values = (importer.value_of(args[name]) for name in ("self", "values"))
    dtype = str(x.ty.dtype)
    values = importer.cast(values, dtype)
    given = [None if i is None else importer.value_of(i) for i in args["indices"]]
    given += [None] * (x.ty.ndim - len(given))
    write = Write(
        _extents(x),
        dtype,
        tuple(None if i is None else (_extents(i), str(i.ty.dtype)) for i in given),
        _extents(values),
        args["accumulate"],
        are_distinct(*_indexed(args["indices"], _extents(x))),
        node.target not in ALONG_AN_AXIS,
    )
    operands = [x, *(i for i in given if i is not None), values]
    builder = importer.block_builder
    if node in importer.in_place:
        write, operands[-1] = _read_at_source(importer, write, args["values"], values)
        function = builder.add_func(write_function(write, in_place=True), "write")
        return importer.emit(relax.op.call_tir_inplace(function, operands, [0], x.ty))
    if math.prod(write.points) == 1:
        pairs = zip(*_indexed(args["indices"], write.shape), strict=True)
        operands[1:-1] = [_position(importer, i, n, write.wraps) for i, n in pairs]
        chosen = replace(write, wraps=False)
        return builder.emit_te(
            lambda *tensors: _chosen(chosen, *tensors), *operands, primfunc_name_hint="write"
        )
    function = builder.add_func(write_function(write, in_place=False), "write")
    return importer.emit(relax.op.call_tir(function, operands, x.ty))


def _read_at_source(
    importer: Importer, write: Write, node: fx.Node, values: relax.Expr
) -> tuple[Write, relax.Expr]:
    """The write, and what it reads: what values were cut out of and turned from, where something
    computed that. Their copy would be a kernel of its own. (An input may be another name of the
    tensor that is written to.)
    """
    base = node
    while is_view(base):
        base = base.args[0]
    view = None if base is node or base.op != "call_function" else view_on(node, base)
    if view is None or importer.dtype_of(base) != write.dtype:
        return write, values
    count = base.meta["val"].numel()
    source = Source(count, view.stride(), view.storage_offset())
    flat = importer.emit(relax.op.reshape(importer.value_of(base), [count]))
    return replace(write, source=source), flat


def _indexed(indices: Sequence[Any], extents: Sequence[int]) -> tuple[list[Any], list[int]]:
    """The indices that there are, and the extents of their axes."""
    pairs = [(i, n) for i, n in zip(indices, extents, strict=False) if i is not None]
    return [i for i, _ in pairs], [n for _, n in pairs]


def _is_right_in_tvm(args: dict) -> bool:
    """Whether TVM's converter gets a write with symbolic extents right.

    It takes an index of each axis, or one whole axis before them, and values one by one in the
    order of their places, or one number: it broadcasts no others.
    """
    x, values, given = args["self"].meta["val"], args["values"].meta["val"], args["indices"]
    indices = [None if i is None else (_known(i.meta["val"]), "int64") for i in given]
    write = Write(_known(x), "", tuple(indices), _known(values))
    if len(given) < x.ndim or not write.indexed:
        return False
    return write.values in ((), write.region) and (not write.values or None not in indices[1:])


def _known(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, with 0 for what is symbolic."""
    return tuple(n if isinstance(n, int) else 0 for n in x.shape)


def _is_mask(index: fx.Node | None) -> bool:
    return index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _put_by_mask(importer: Importer, args: dict) -> relax.Expr:
    """`x[:, mask] = values`: values where the mask is, x elsewhere."""
    (first, mask), *others = [(n, i) for n, i in enumerate(args["indices"]) if i is not None]
    if others:
        raise NotImplementedError(
            "a mask beside another index: write one of them as torch.where, or as masked_fill"
        )
    x, mask = importer.value_of(args["self"]), importer.operand(mask, "bool")
    values = importer.cast(importer.value_of(args["values"]), str(x.ty.dtype))
    behind = x.ty.ndim - first - mask.ty.ndim
    values = _spread(importer, values, mask, values.ty.ndim - 1 - behind)
    if args["accumulate"]:
        add = relax.op.logical_or if str(x.ty.dtype) == "bool" else relax.op.add
        values = importer.emit(add(x, values))
    mask = importer.emit(relax.op.reshape(mask, [*mask.ty.shape, *[1] * behind]))
    return importer.emit(relax.op.where(mask, values, x))


def _spread(importer: Importer, values: relax.Expr, mask: relax.Expr, axis: int) -> relax.Expr:
    """Values with the axes of a mask in place of the axis of its true elements, if there is one."""
    if axis < 0:
        return values
    shape, over = list(values.ty.shape), [1] * mask.ty.ndim
    if not isinstance(shape[axis], tirx.IntImm):
        raise NotImplementedError(
            "a symbolic number of values for a mask: fix the number, or write with torch.where"
        )
    if int(shape[axis]) != 1:  # one for each of them
        flat = importer.emit(relax.op.reshape(importer.cast(mask, "int64"), [-1]))
        rank = importer.emit(relax.op.cumsum(flat, 0))
        rank = importer.emit(relax.op.subtract(rank, relax.const(1, "int64")))
        values = importer.emit(relax.op.take(values, rank, axis, mode="clip"))
        over = list(mask.ty.shape)
    return importer.emit(relax.op.reshape(values, [*shape[:axis], *over, *shape[axis + 1 :]]))


def _extents(x: relax.Expr) -> tuple[int, ...]:
    return tuple(int(n) for n in x.ty.shape)


CONVERTERS: dict[str, Converter] = {
    "index_put.default": _index_put,
    "index_put_.default": _index_put,
    "index_copy.default": _index_put,
    "index_add.default": _index_put,
}
