"""Reads the access maps of a PrimFunc: its blocks, what they read and write, what they compute."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.ir.prim.expr import BitwiseAnd, BitwiseNot, BitwiseOr, BitwiseXor, LShift, RShift
from tvm.relax.transform import AnnotateTIROpPattern

from .access import (
    Access,
    Affine,
    Axis,
    AxisKind,
    Block,
    Extent,
    FuncAccess,
    Index,
    Irregular,
    Pipe,
    Reduction,
)
from .blocks import (
    BlockDef,
    Stray,
    along_scan,
    read_arg_pair,
    read_blocks,
    read_scan,
    substitute,
    term_of,
)

OPAQUE_PATTERN = 8  # TVM's OpPatternKind.kOpaque: no pass fuses the function

_SPECIAL = frozenset(
    [
        "exp",
        "exp2",
        "exp10",
        "tanh",
        "erf",
        "rsqrt",
        "sqrt",
        "log",
        "log2",
        "log10",
        "log1p",
        "sigmoid",
        "pow",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "asinh",
        "acosh",
        "atanh",
        "hypot",
    ]
)
_DIVISION = (tirx.Div,)
_INTEGER = (tirx.FloorDiv, tirx.FloorMod)
_COMMUTING = {
    tirx.Add: Reduction.SUM,
    tirx.Mul: Reduction.PRODUCT,
    tirx.Max: Reduction.MAX,
    tirx.Min: Reduction.MIN,
}
_BINARY = (
    tirx.Add,
    tirx.Sub,
    tirx.Mul,
    tirx.Div,
    tirx.Max,
    tirx.Min,
    tirx.FloorDiv,
    tirx.FloorMod,
    tirx.Mod,
    tirx.EQ,
    tirx.NE,
    tirx.LT,
    tirx.LE,
    tirx.GT,
    tirx.GE,
    tirx.And,
    tirx.Or,
    BitwiseAnd,
    BitwiseOr,
    BitwiseXor,
    LShift,
    RShift,
)
_UNARY = (tirx.Not, BitwiseNot)
_ARITHMETIC = (*_BINARY, *_UNARY, tirx.Select, tirx.Cast)
_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}
_LEAVES = (Var, tirx.IntImm, tirx.FloatImm)  # asked first: each class takes a call of abc's
_ORDERED = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


class _Unreadable(Exception):
    """A construct outside blocks of stores over loop nests."""


def extent_of(value) -> Extent:
    """A shape entry as an int, or as text when it is symbolic."""
    if isinstance(value, int):
        return value
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    return re.sub(r"T\.int\d+\((-?\d+)\)", r"\1", str(value))


def op_name(e) -> str:
    """Last part of a TIR call's operator name ("exp", "if_then_else"), or "" when `e` is no such
    call.
    """
    if not isinstance(e, Call):
        return ""
    return getattr(e.op, "name", "").rpartition(".")[2]


def read_prim_func(func: tirx.PrimFunc) -> FuncAccess:
    """Reads the access maps of an s_tir PrimFunc made of blocks (LegalizeOps output, or a user's
    own).

    A function marked as scheduled is somebody's finished kernel, and opaque; so is one that its
    author calls opaque.
    """
    if func.attrs and func.attrs.get("tirx.is_scheduled"):
        return FuncAccess((), refusal="its PrimFunc is already scheduled")
    if _is_called_opaque(func):
        return FuncAccess((), refusal="its op_pattern says that it is opaque")
    try:
        return _FuncReader(func).read()
    except _Unreadable as why:
        return FuncAccess((), refusal=str(why))


def _is_called_opaque(func: tirx.PrimFunc) -> bool:
    """Whether a PrimFunc's `op_pattern` is opaque where TVM's own analysis finds another: its
    `AnnotateTIROpPattern` calls all opaque that have several loop nests, such as a softmax.
    """
    if not has_opaque_pattern(func):
        return False
    mod = tvm.IRModule({"f": func.without_attr("op_pattern")})
    return not has_opaque_pattern(AnnotateTIROpPattern()(mod)["f"])


def has_opaque_pattern(func: tirx.PrimFunc) -> bool:
    """Whether a PrimFunc is marked as opaque: no pass of TVM's fuses it."""
    return bool(func.attrs) and int(func.attrs.get("op_pattern", 0)) == OPAQUE_PATTERN


@dataclass(slots=True)
class _FuncReader:
    func: tirx.PrimFunc
    buffers: dict[int, int] = field(default_factory=dict)
    inner: list = field(default_factory=list)

    def read(self) -> FuncAccess:
        for i, param in enumerate(self.func.params):
            self.buffers[hash(param)] = i
        found = read_blocks(self.func, opens=_is_root)
        blocks = tuple(self._block(block) for block in found)
        if not blocks:
            raise _Unreadable("the function holds no block")
        return FuncAccess(
            blocks,
            len(self.inner),
            inner_shapes=tuple(tuple(map(extent_of, b.ty.shape)) for b in self.inner),
            inner_dtypes=tuple(str(b.ty.dtype) for b in self.inner),
        )

    def _key(self, buffer) -> int:
        if hash(buffer) not in self.buffers:
            self.buffers[hash(buffer)] = -1 - len(self.inner)
            self.inner.append(buffer)
        return self.buffers[hash(buffer)]

    def _block(self, block: BlockDef | Stray) -> Block:
        if isinstance(block, Stray):
            raise _Unreadable(f"a {block.kind} outside any block")
        scan = read_scan(block)
        if scan is None:
            return _BlockReader(self._key, block).read()
        block = along_scan(block, scan)
        place = next(n for n, axis in enumerate(block.axes) if axis.var.same_as(scan.axis))
        return replace(_BlockReader(self._key, block).read(), scanned=place)


def _is_root(block: BlockDef) -> bool:
    return not block.axes and block.name == "root"


class _BlockReader:
    def __init__(self, key, block: BlockDef):
        self.key, self.block = key, block
        self.axes = tuple(Axis(extent_of(axis.domain.extent), axis.kind) for axis in block.axes)
        self.axis_of = {hash(axis.var): i for i, axis in enumerate(block.axes)}
        self.reads: dict[Access, None] = {}
        self.counts: dict[Pipe, float] = {}
        self.functions: dict[str, float] = {}
        self.conversions = 0
        self.compares = False
        self.own: set[int] = set()

    def read(self) -> Block:
        name, body = self.block.name, self.block.body
        stores = body.stores
        if body.others:
            raise _Unreadable(f"a {body.others[0]} inside block {name}")
        if not stores:
            raise _Unreadable(f"block {name} stores nothing")
        self.own = {hash(s.buffer) for s in stores}
        writes = tuple(
            Access(
                self.key(s.buffer), tuple(self.index(substitute(i, body.lets)) for i in s.indices)
            )
            for s in stores
        )
        if any(write.data_dependent for write in writes):
            raise _Unreadable(f"block {name} writes at places that are data")
        for store in stores:
            self.visit(store.value, guarded=False)
        reduces = any(a.kind is AxisKind.REDUCE for a in self.axes)
        kind, contraction = None, False
        if reduces:
            kind, body = self._combiner(stores)
            contraction = kind is Reduction.SUM and self._is_product(body)
        if any(a.kind is AxisKind.OPAQUE for a in self.axes):
            raise _Unreadable(f"block {name} has an opaque axis")
        return Block(
            name,
            self.axes,
            tuple(self.reads),
            writes,
            tuple(sorted(self.counts.items(), key=lambda item: item[0].value)),
            kind,
            contraction,
            tuple(sorted(self.functions.items())),
            self.conversions,
            not reduces and len(stores) == 1 and _is_scaling(stores[0].value),
            self.compares,
            not reduces and len(stores) == 1 and _is_move(stores[0].value),
        )

    def _combiner(self, stores) -> tuple[Reduction, object]:
        pair = read_arg_pair(stores)
        if pair is not None:
            return (Reduction.ARGMAX if pair.largest else Reduction.ARGMIN), None
        kind = _COMMUTING.get(type(stores[0].value))
        term = term_of(stores[0]) if len(stores) == 1 and kind is not None else None
        return (Reduction.OTHER, None) if term is None else (kind, term)

    def _is_product(self, body) -> bool:
        return (
            isinstance(body, tirx.Mul)
            and all(isinstance(_strip_casts(x), TensorLoad) for x in (body.a, body.b))
            and len(self.reads) == 2
        )

    def visit(self, e, guarded: bool) -> None:
        """Collects reads and operation counts of a value."""
        if isinstance(e, TensorLoad):
            for i in e.indices:
                self._index_reads(i, guarded)
            if hash(e.source) not in self.own:
                access = Access(
                    self.key(e.source), tuple(self.index(i) for i in e.indices), guarded
                )
                self.reads.setdefault(access)
            return
        if isinstance(e, Var):
            return
        self._count(e)
        if op_name(e) == "if_then_else":
            condition, *branches = e.args
            self.visit(condition, guarded)
            for branch in branches:
                self.visit(branch, True)
            return
        for child in children(e):
            self.visit(child, guarded)

    def _index_reads(self, e, guarded: bool) -> None:
        """Loads inside an index are reads of their own (the index tensor of a gather)."""
        if isinstance(e, TensorLoad):
            self.visit(e, guarded)
        for child in children(e):
            self._index_reads(child, guarded)

    def _count(self, e) -> None:
        pipe = pipe_of(e)
        if pipe is not None:
            self.counts[pipe] = self.counts.get(pipe, 0) + 1
            if pipe is Pipe.SPECIAL:
                name = op_name(e)
                self.functions[name] = self.functions.get(name, 0) + 1
            if isinstance(e, _ORDERED) and not self.compares:
                apart = self._affine(e.a - e.b)
                self.compares = apart is not None and len(apart.axes) > 1
        elif isinstance(e, tirx.Cast):
            self.conversions += 1

    def index(self, e) -> Index:
        affine = self._affine(e)
        if affine is not None:
            return affine
        axes, data = set(), False
        stack = [e]
        while stack:
            x = stack.pop()
            if isinstance(x, Var):
                if hash(x) in self.axis_of:
                    axes.add(self.axis_of[hash(x)])
            elif isinstance(x, TensorLoad):
                data = True
                stack.extend(x.indices)
            else:
                stack.extend(children(x))
        return Irregular(frozenset(axes), data, 1 if data else self._repeats(e))

    def _repeats(self, e) -> int:
        """n where an index is ``axis // n``, clamped or not to where it lies anyway; else 1."""
        clamps = []
        while isinstance(e, (tirx.Min, tirx.Max)) and isinstance(e.b, tirx.IntImm):
            clamps.append(e)
            e = e.a
        if not isinstance(e, (tirx.Div, tirx.FloorDiv)) or not isinstance(e.b, tirx.IntImm):
            return 1
        at, repeats = self._affine(e.a), int(e.b.value)
        axis = None if at is None else at.single_axis
        extent = None if axis is None else self.axes[axis].extent
        if extent is None or repeats < 1 or (clamps and not isinstance(extent, int)):
            return 1
        last = (extent - 1) // repeats if clamps else 0
        for clamp in clamps:
            end = int(clamp.b.value)
            if end < last if isinstance(clamp, tirx.Min) else end > 0:
                return 1
        return repeats

    def _affine(self, e) -> Affine | None:
        zero = (0,) * len(self.axes)
        if isinstance(e, tirx.IntImm):
            return Affine(zero, int(e.value))
        if isinstance(e, Var):
            i = self.axis_of.get(hash(e))
            return None if i is None else Affine((*zero[:i], 1, *zero[i + 1 :]))
        if isinstance(e, tirx.Cast):
            return self._affine(e.value)
        if isinstance(e, (tirx.Add, tirx.Sub)):
            a, b = self._affine(e.a), self._affine(e.b)
            if a is None or b is None:
                return None
            sign = 1 if isinstance(e, tirx.Add) else -1
            both = zip(a.coefficients, b.coefficients, strict=True)
            return Affine(tuple(p + sign * q for p, q in both), a.constant + sign * b.constant)
        if isinstance(e, tirx.Mul):
            a, b = self._affine(e.a), self._affine(e.b)
            if a is None or b is None or (a.axes and b.axes):
                return None
            base, factor = (a, b.constant) if a.axes else (b, a.constant)
            return Affine(tuple(c * factor for c in base.coefficients), base.constant * factor)
        return None


def children(e) -> tuple:
    """The operands of a TIR expression (nothing for leaves and for unknown kinds)."""
    if isinstance(e, _LEAVES):
        return ()
    if isinstance(e, _BINARY):
        return (e.a, e.b)
    if isinstance(e, tirx.Select):
        return (e.condition, e.true_value, e.false_value)
    if isinstance(e, _UNARY):
        return (e.a,)
    if isinstance(e, tirx.Cast):
        return (e.value,)
    if isinstance(e, Call):
        return tuple(a for a in e.args if isinstance(a, tvm.ir.Expr))
    if isinstance(e, TensorLoad):
        return tuple(e.indices)
    return ()


def pipe_of(e) -> Pipe | None:
    """What executes an expression beside its operands, if anything does."""
    if isinstance(e, tirx.Cast) and _is_float(e) and _is_float(e.value):
        return None  # part of the load or store: halves are computed in float32 anyway
    if isinstance(e, Call):
        return Pipe.SPECIAL if op_name(e) in _SPECIAL else Pipe.ARITHMETIC
    if isinstance(e, _DIVISION):
        return Pipe.DIVISION
    if isinstance(e, _INTEGER):
        return Pipe.INTEGER
    if isinstance(e, _ARITHMETIC):
        return Pipe.ARITHMETIC
    return None


def _is_float(e) -> bool:
    return "float" in str(e.ty.dtype)


def _is_scaling(e) -> bool:
    """A load times or over a number, rounded as may be."""
    e = _strip_casts(e)
    if not isinstance(e, (tirx.Mul, tirx.Div)):
        return False
    a, b = _strip_casts(e.a), _strip_casts(e.b)
    if isinstance(e, tirx.Mul) and isinstance(a, tirx.FloatImm):
        a, b = b, a
    return isinstance(a, TensorLoad) and isinstance(b, tirx.FloatImm)


def _is_move(e) -> bool:
    """A load, or one of several as conditions say, zero where they say so, maybe widened on the
    way.
    """
    if op_name(e) != "if_then_else":
        return _is_moved_load(e)
    _, chosen, other = e.args
    zero = _strip_casts(other)
    is_zero = isinstance(zero, (tirx.IntImm, tirx.FloatImm)) and zero.value == 0
    return _is_move(chosen) and (is_zero or _is_move(other))


def _is_moved_load(e) -> bool:
    dtype = str(e.ty.dtype)
    while isinstance(e, tirx.Cast):
        if str(e.ty.dtype) not in (dtype, *_WIDER.get(dtype, ())):
            return False
        e = e.value
    return isinstance(e, TensorLoad) and str(e.ty.dtype) == dtype


def _strip_casts(e):
    while isinstance(e, tirx.Cast):
        e = e.value
    return e
