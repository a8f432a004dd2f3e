"""The fusion graph of one Relax function: operators with access maps, tensors, and reachability as
bitsets.

Each `call_tir` binding is an operator; reshapes that only rename indices are views (free where they
stay alone); every other binding is opaque. Tuples and their projections are looked through.
Operators are numbered in binding order, which is a topological order, so "a before b" is `a < b`,
and a set of operators is a Python int with one bit each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

import tvm
import tvm_ffi
from tvm import relax, tirx

from .access import Block, Extent
from .extents import product_key
from .reader import extent_of, op_name, read_prim_func

COMPOSITES_ATTR = "tvm_fusion.composites"

JOIN_ATTR = "tvm_fusion.join"
"""On the PrimFunc of a concatenation whose parts are computed where they belong: its axis
(`transform.lower.joins`)."""

COPY_ATTR = "tvm_fusion.copy"
"""On a PrimFunc that copies because the same elements are needed in two places: it is no view."""

OUTPUTS_ATTR = "tvm_fusion.outputs"
"""Of a written kernel for a GPU with symbolic sizes: how many of its last parameters it fills."""

VERSIONS_ATTR = "tvm_fusion.versions"
"""Of a PrimFunc of which a call launches one of several kernels: the largest size of each but the
last, or the name of its range (`kernels.versions`)."""
PLACED_ATTR = "tvm_fusion.placed"
"""On a join once its parts have the pitch of the whole: the byte at which each begins
(`transform.apply.place_parts`)."""

COOPERATIVE_ATTR = "tvm_fusion.cooperative"
"""On a kernel whose blocks wait for each other: all have to run at once, which its launch asks of
the device (`runtime.build.lowering`)."""

CONDITIONAL_SHAPE = "an extent has a condition, which TVM's FuseTIR takes for an operator"


class OpKind(Enum):
    CALL_TIR = "call_tir"
    VIEW = "view"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Tensor:
    id: int
    name: str
    shape: tuple[Extent, ...]
    dtype: str
    producer: int | None = None
    consumers: tuple[int, ...] = ()
    is_output: bool = False
    is_constant: bool = False
    is_inner: bool = False  # a buffer inside one operator's PrimFunc


@dataclass(frozen=True, slots=True)
class Op:
    """One binding. `why_opaque` says why an opaque operator cannot be read; `is_join`: alone, it is
    a concatenation with nothing to do; `reshapes`: it writes the elements that it reads in the same
    order, a view unless a result of the function.
    """

    id: int
    name: str
    func: str
    kind: OpKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    region: int = 0
    key: str = ""
    composite: str | None = None
    why_opaque: str = ""
    is_join: bool = False
    reshapes: bool = False


@dataclass(frozen=True, slots=True)
class FusionGraph:
    function: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]

    def producers(self, op: int) -> tuple[int, ...]:
        found = {self.tensors[t].producer for t in self.ops[op].inputs}
        return tuple(sorted(p for p in found if p is not None))

    def consumers(self, op: int) -> tuple[int, ...]:
        found = {c for t in self.ops[op].outputs for c in self.tensors[t].consumers}
        return tuple(sorted(found))

    def fingerprint(self) -> str:
        """Identifies the module a plan was made for: operators, their PrimFuncs, shapes and
        wiring.
        """
        text = hashlib.sha256()
        for op in self.ops:
            shapes = [(self.tensors[t].shape, self.tensors[t].dtype) for t in op.outputs]
            text.update(repr((op.kind.value, op.key, op.inputs, op.outputs, shapes)).encode())
        text.update(repr([t.id for t in self.tensors if t.is_output]).encode())
        return text.hexdigest()[:16]


def bits(ops: Iterable[int]) -> int:
    """The bitset of some operator numbers."""
    out = 0
    for op in ops:
        out |= 1 << op
    return out


def build_graph(mod: tvm.IRModule, function: str = "main") -> FusionGraph:
    """Reads the fusion graph of `mod[function]`, a module after LegalizeOps.

    Raises
    ------
    KeyError
        The module has no such function.
    """
    return _GraphBuilder(mod, mod[function], function).build()


@dataclass(slots=True)
class _GraphBuilder:
    mod: tvm.IRModule
    relax_func: relax.Function
    name: str
    ops: list[Op] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    values: dict[int, object] = field(
        default_factory=dict
    )  # Var hash -> tensor id or tuple of them
    constants: dict[int, int] = field(default_factory=dict)
    symbols: dict[int, int] = field(
        default_factory=dict
    )  # hash of a symbol that a match_cast defines
    known: list = field(default_factory=list)
    funcs: dict[str, tuple] = field(default_factory=dict)

    def build(self) -> FusionGraph:
        attrs = self.relax_func.attrs
        composites = dict(attrs[COMPOSITES_ATTR]) if attrs and COMPOSITES_ATTR in attrs else {}
        for param in self.relax_func.params:
            self.values[hash(param)] = self._declare(param.name, param.ty, None)
            self.known.extend(relax.analysis.definable_tir_vars_in_type(param.ty))
        body = self.relax_func.body
        for region, block in enumerate(body.blocks):
            fusible = isinstance(block, relax.DataflowBlock)
            for binding in block.bindings:
                self._bind(binding, region, fusible, composites.get(binding.var.name))
        outputs = set(_flatten(self._value(body.body)))
        return self._finish(outputs)

    def _finish(self, outputs: set[int]) -> FusionGraph:
        consumers: dict[int, set[int]] = {}
        for op in self.ops:
            for t in op.inputs:
                consumers.setdefault(t, set()).add(op.id)
        tensors = tuple(
            replace(t, consumers=tuple(sorted(consumers.get(t.id, ()))), is_output=t.id in outputs)
            for t in self.tensors
        )
        self.ops = [
            replace(
                op, kind=OpKind.CALL_TIR
            )  # a result of the function is a tensor of its own, not a view
            if op.kind is OpKind.VIEW and any(tensors[t].is_output for t in op.outputs)
            else op
            for op in self.ops
        ]
        ancestors = [0] * len(self.ops)
        for op in self.ops:
            for t in op.inputs:
                p = tensors[t].producer
                if p is not None:
                    ancestors[op.id] |= ancestors[p] | 1 << p
        descendants = [0] * len(self.ops)
        for op in reversed(self.ops):
            for t in op.outputs:
                for c in tensors[t].consumers:
                    descendants[op.id] |= descendants[c] | 1 << c
        return FusionGraph(
            self.name, tuple(self.ops), tensors, tuple(ancestors), tuple(descendants)
        )

    def _declare(self, name: str, ty, producer: int | None, **flags):
        """A tensor id, or a tuple of them for a tuple type; what is no tensor (a shape, an object)
        counts as an empty one.
        """
        if isinstance(ty, relax.TupleType):
            return tuple(
                self._declare(f"{name}.{i}", f, producer, **flags) for i, f in enumerate(ty.fields)
            )
        if not isinstance(ty, relax.TensorType):
            return self._tensor(name, (), "object", producer, **flags)
        shape = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ()
        dtype = str(ty.dtype)
        return self._tensor(name, tuple(map(extent_of, shape)), dtype, producer, **flags)

    def _tensor(self, name, shape, dtype, producer, **flags) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, shape, dtype, producer, **flags))
        return len(self.tensors) - 1

    def _value(self, e):
        if isinstance(e, relax.Var):
            return self.values.get(hash(e), ())
        if isinstance(e, tvm.ir.GenericConst):
            if hash(e) not in self.constants:
                name = f"constant{len(self.constants)}"
                self.constants[hash(e)] = self._declare(name, e.ty, None, is_constant=True)
            return self.constants[hash(e)]
        if isinstance(e, relax.Tuple):
            return tuple(self._value(f) for f in e.fields)
        if isinstance(e, relax.TupleGetItem):
            whole = self._value(e.tuple_value)
            return whole[e.index] if isinstance(whole, tuple) and e.index < len(whole) else ()
        if isinstance(e, relax.Call):
            return tuple(self._value(a) for a in e.args)
        if isinstance(e, relax.If):
            return (self._value(e.cond), *self._free(e))
        return ()

    def _free(self, e) -> tuple:
        return tuple(self.values.get(hash(v), ()) for v in relax.analysis.free_vars(e))

    def _bind(self, binding, region: int, fusible: bool, composite: str | None) -> None:
        var, value = binding.var, getattr(binding, "value", None)
        renames = (relax.Tuple, relax.TupleGetItem, relax.Var, tvm.ir.GenericConst)
        if isinstance(value, renames) and not isinstance(binding, relax.MatchCast):
            self.values[hash(var)] = self._value(value)
            return
        op_id = len(self.ops)
        call = value if fusible and _is_call_tir(value) else None
        inputs = self._value(call.args[1]) if call is not None else self._value(value)
        symbols = self._symbols_read(var.ty, value)
        outputs = self._declare(var.name, var.ty, op_id)
        branched = call is not None and self._is_symbolic(inputs, outputs)
        branched = branched and any(map(_has_conditions, (var.ty, call.args[1].ty)))
        call = None if branched else call
        self.values[hash(var)] = outputs
        op = Op(
            op_id,
            var.name,
            "",
            OpKind.OPAQUE,
            _unique((*_flatten(inputs), *symbols)),
            (*_flatten(outputs), *self._symbols_made(binding, op_id)),
            region=region,
            composite=composite,
            why_opaque=CONDITIONAL_SHAPE if branched else "it is no call_tir in a dataflow block",
        )
        if call is not None:
            op = self._read(op, call, inputs, tuple(_flatten(outputs)))
        self.ops.append(op)

    def _is_symbolic(self, *values) -> bool:
        shapes = (self.tensors[t].shape for t in _flatten(values))
        return any(not isinstance(extent, int) for shape in shapes for extent in shape)

    def _symbols_made(self, binding, op_id: int) -> tuple[int, ...]:
        """A match_cast gives symbols their values: whoever uses them comes after it, as if it read
        a tensor.
        """
        if not isinstance(binding, relax.MatchCast):
            return ()
        new = [
            v
            for v in relax.analysis.definable_tir_vars_in_type(binding.ty)
            if not any(v.same_as(k) for k in self.known)
        ]
        self.known.extend(new)
        for v in new:
            self.symbols[hash(v)] = self._tensor(v.name, (), "object", op_id)
        return tuple(self.symbols[hash(v)] for v in new)

    def _symbols_read(self, ty, value) -> tuple[int, ...]:
        if not self.symbols:
            return ()
        found: dict[int, None] = {}

        def see(v) -> None:
            if hash(v) in self.symbols:
                found[self.symbols[hash(v)]] = None

        for v in relax.analysis.tir_vars_in_type(ty):
            see(v)
        tvm_ffi.structural_walk(value, [(tvm.ir.Var, see)])
        return tuple(found)

    def _read(self, op: Op, call, args: tuple, outputs: tuple[int, ...]) -> Op:
        func_name = call.args[0].name_hint
        access, is_view, key = self._prim_func(func_name)
        if access.refusal is not None:
            return replace(op, func=func_name, key=key, why_opaque=access.refusal)
        tensors = {i: t for i, t in enumerate((*args, *outputs)) if isinstance(t, int)}
        for k in range(access.num_inner):
            name = f"{op.name}.inner{k}"
            shape, dtype = access.inner_shapes[k], access.inner_dtypes[k]
            tensors[-1 - k] = self._tensor(name, shape, dtype, op.id, is_inner=True)
        blocks = tuple(
            replace(
                b,
                reads=tuple(a.remap(tensors) for a in b.reads),
                writes=tuple(a.remap(tensors) for a in b.writes),
            )
            for b in access.blocks
        )
        sizes = {product_key(self.tensors[t].shape) for t in (*op.inputs, *op.outputs)}
        # A slice may look like a reshape, and what is read at the only place that there is.
        is_view = is_view and len(sizes) == len(op.inputs) == 1
        kind = OpKind.VIEW if is_view else OpKind.CALL_TIR
        attrs = self.mod[func_name].attrs
        is_join = attrs is not None and JOIN_ATTR in attrs
        return replace(
            op,
            func=func_name,
            kind=kind,
            blocks=blocks,
            key=key,
            why_opaque="",
            is_join=is_join,
            reshapes=is_view,
        )

    def _prim_func(self, name: str):
        if name not in self.funcs:
            func = self.mod[name]
            if isinstance(func, tirx.PrimFunc):
                access = read_prim_func(func)
                view = access.refusal is None and _is_reshape(func)
                key = format(tvm_ffi.structural_hash(func) & (2**64 - 1), "016x")
                self.funcs[name] = access, view, key
            else:
                raise TypeError(f"call_tir of {name}, which is no PrimFunc")
        return self.funcs[name]


def _is_reshape(func: tirx.PrimFunc) -> bool:
    is_copy = func.attrs is not None and COPY_ATTR in func.attrs
    return not is_copy and relax.analysis.has_reshape_pattern(func)


def _is_call_tir(e) -> bool:
    return isinstance(e, relax.Call) and getattr(e.op, "name", "") == "relax.call_tir"


def _has_conditions(ty) -> bool:
    """Whether an extent of a type has a condition in it, as that of a slice with symbolic ends."""
    if isinstance(ty, relax.TupleType):
        return any(_has_conditions(field) for field in ty.fields)
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return False

    def visit(call: tvm.ir.Call) -> tvm_ffi.VisitInterrupt | None:
        return tvm_ffi.VisitInterrupt() if op_name(call) == "if_then_else" else None

    extents = (e for e in ty.shape.values if not isinstance(e, tirx.IntImm))
    return any(tvm_ffi.structural_walk(e, [(tvm.ir.Call, visit)]) is not None for e in extents)


def _flatten(value) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    else:
        for item in value:
            yield from _flatten(item)


def _unique(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
