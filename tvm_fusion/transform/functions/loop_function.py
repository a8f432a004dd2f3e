"""Loops over functions of Relax as one PrimFunc: a step's operators one after the other, on buffers
that stay where they are from step to step.

    Before                                   After
    main(h, x, w):                           scan(h0, xs, w, h, ys):
        t = permute(w)                           t = permute(w)          the same in each step
        a = first(h, x, t)                       h = h0
        n = second(a)                            for s in range(steps):
        y = third(a)                                 a = first(h, xs[s], t)
        return n, y                                  n = second(a)
                                                     ys[s] = third(a)
                                                     h = n

`main` is lowered, all else are plain loops. Its length costs nothing to compile.
Does not handle: calls of packed functions, casts of shapes, and branches within a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import Call, Expr, GenericConst, TensorLoad, Var

from ...errors import Unsupported
from ...ir.blocks import calls_host, has_threads
from .functions import operator_name

STEPS_ATTR = "tvm_fusion.steps"
"""Of a PrimFunc that is a loop over steps, each of which is several nests of loops: whether it is
`KNOWN` how many there are, or `DATA` decide when it ends."""
KNOWN, DATA = "known", "data"


def ends_by_data(mod: tvm.IRModule) -> bool:
    """Whether numbers decide when a loop of a module ends."""
    functions = (f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))
    return any((f.attrs or {}).get(STEPS_ATTR) == DATA for f in functions)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A tensor as a part of a buffer: that at the first indices."""

    buffer: Var
    at: tuple[Expr, ...] = ()

    @property
    def shape(self) -> list[Expr]:
        """Its extents."""
        return list(self.buffer.ty.shape)[len(self.at) :]

    def load(self, indices: Sequence[Expr]) -> Expr:
        """An element."""
        return tirx.BufferLoad(self.buffer, [*self.at, *indices])

    def store(self, value: Expr, indices: Sequence[Expr]) -> tirx.Stmt:
        """An element with a new value."""
        return tirx.BufferStore(self.buffer, value, [*self.at, *indices])


@dataclass(frozen=True, slots=True, eq=False)
class LoopFunction:
    """A loop as a PrimFunc.

    Attributes
    ----------
    func : PrimFunc
        Of what it takes, `constants`, and what it gives.
    constants : tuple of relax.Expr
    """

    func: tirx.PrimFunc
    constants: tuple[relax.Expr, ...]


def scan_function(
    step: tvm.IRModule,
    carried: Sequence[relax.TensorType],
    rows: Sequence[relax.TensorType],
    others: Sequence[relax.TensorType],
) -> LoopFunction:
    """What is carried from row to row of tensors, and what each row gives.

    Parameters
    ----------
    step : IRModule
        Lowered; `main` takes what is carried, a row of each tensor and the others, and returns what
        is carried on, and a row of each tensor that is given.
    carried, rows, others : sequence of relax.TensorType
        What the loop takes, of which `rows` have at least one row. It gives what is carried last,
        and all rows.

    Raises
    ------
    Unsupported
        A step is more than calls of PrimFuncs.
    """
    made, count = _Loop(DATA if ends_by_data(step) else KNOWN), len(carried)
    first, rows_given, after = (made.parameters(tys) for tys in (carried, rows, others))
    steps = rows_given[0].shape[0]
    index = Var("step", steps.ty)
    kept = [made.result(part) for part in first]
    each = [Part(part.buffer, (index,)) for part in rows_given]
    results = [made.sized(ty, step, [*first, *each, *after]) for ty in _results(step)]
    of_rows = [Part(made.result(part, steps).buffer, (index,)) for part in results[count:]]
    places = dict(enumerate(of_rows, count))
    ahead, statements, found = made.inlined(step, [*kept, *each], after, places)
    body = [*statements, *copies(found[count:], of_rows), *made.moved(found[:count], kept)]
    loop = tirx.For(index, _zero(index), steps, tirx.ForKind.SERIAL, sequence(body))
    return made.function([*copies(first, kept), *ahead, loop])


def while_function(
    condition: tvm.IRModule,
    step: tvm.IRModule,
    carried: Sequence[relax.TensorType],
    others: Sequence[relax.TensorType],
) -> LoopFunction:
    """What is carried from step to step while a condition of it holds.

    Parameters
    ----------
    condition, step : IRModule
        Lowered; `main` takes what is carried and the others. The condition is one element, a step
        returns what is carried on.
    carried, others : sequence of relax.TensorType
        What the loop takes; it gives what is carried last.

    Raises
    ------
    Unsupported
        A step or the condition is more than calls of PrimFuncs.
    """
    made = _Loop(DATA)
    first, after = (made.parameters(tys) for tys in (carried, others))
    kept = [made.result(part) for part in first]
    holds = made.scratch([], "bool", "holds")

    def asked() -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        ahead, statements, found = made.inlined(condition, kept, after)
        return ahead, [*statements, *copies(found, [holds])]

    (ahead, ask), (ahead_again, ask_again) = asked(), asked()
    ahead_of_steps, statements, found = made.inlined(step, kept, after)
    body = sequence([*statements, *made.moved(found, kept), *ask_again])
    before = [*copies(first, kept), *ahead, *ahead_again, *ahead_of_steps, *ask]
    return made.function([*before, tirx.While(holds.load([]), body)])


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Statements one after the other."""
    flat = [s for one in statements for s in (one if isinstance(one, tirx.SeqStmt) else [one])]
    if not flat:
        return tirx.Evaluate(tirx.const(0, "int32"))
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def copies(sources: Sequence[Part], targets: Sequence[Part]) -> list[tirx.Stmt]:
    """Nests that copy tensors to where they are not yet."""
    made = []
    for source, target in zip(sources, targets, strict=True):
        if source is target:
            continue
        loops = [Var(f"i{n}", extent.ty) for n, extent in enumerate(target.shape)]
        nest = target.store(source.load(loops), loops)
        for var, extent in reversed(list(zip(loops, target.shape, strict=True))):
            nest = tirx.For(var, _zero(var), extent, tirx.ForKind.SERIAL, nest)
        made.append(nest)
    return made


class _Loop:
    """A PrimFunc while it is put together."""

    def __init__(self, steps: str) -> None:
        self._steps = steps
        self._params: list[Var] = []
        self._constants: list[tuple[relax.Expr, Var]] = []
        self._given: list[Var] = []
        self._own: list[tirx.Stmt] = []
        self._sizes: dict[Var, Var] = {}  # of the caller, and here

    # ---- its buffers

    def parameters(self, types: Sequence[relax.TensorType]) -> list[Part]:
        """What it takes."""
        made = []
        for ty in types:
            shape = [self._size(extent) for extent in ty.shape]
            made.append(Part(_buffer(shape, str(ty.dtype), f"given{len(self._params)}")))
            self._params.append(made[-1].buffer)
        return made

    def _size(self, extent: Expr) -> Expr:
        for var in _variables(extent):
            self._sizes.setdefault(var, Var(var.name, var.ty))
        return tvm_ffi.structural_map(extent, [(Var, lambda v: self._sizes.get(v, v))])

    def result(self, like: Part, *steps: Expr) -> Part:
        """A tensor that it gives, for each of `steps`."""
        shape, dtype = [*steps, *like.shape], str(like.buffer.ty.dtype)
        self._given.append(_buffer(shape, dtype, f"made{len(self._given)}"))
        return Part(self._given[-1])

    def scratch(self, shape: Sequence[Expr], dtype: str, name: str) -> Part:
        """A tensor of its own."""
        made = _buffer(shape, dtype, name)
        self._own.append(tirx.AllocBuffer(made))
        return Part(made)

    def sized(self, ty: relax.TensorType, mod: tvm.IRModule, given: Sequence[Part]) -> Part:
        """A tensor of a type that `main` of a module has for what it is given."""
        sizes = _sizes_of(mod["main"].params, given)
        return Part(_buffer(_resolved(ty.shape, sizes), str(ty.dtype), "like"))

    def function(self, statements: Sequence[tirx.Stmt]) -> LoopFunction:
        """The whole."""
        lone = {e for p in self._params for e in p.ty.shape if isinstance(e, Var)}
        if not lone.issuperset(self._sizes.values()):
            raise Unsupported("a size in a loop is the extent of no tensor that it takes")
        params = [*self._params, *(var for _, var in self._constants), *self._given]
        body = sequence([*self._own, *statements])
        func = tirx.PrimFunc(params, body).with_attr("tirx.noalias", True)
        constants = tuple(expr for expr, _ in self._constants)
        return LoopFunction(func.with_attr(STEPS_ATTR, self._steps), constants)

    # ---- its statements

    def constant(self, constant: relax.Expr) -> Part:
        """A constant, which it takes behind all else."""
        ty = constant.ty
        made = Part(_buffer(list(ty.shape), str(ty.dtype), f"constant{len(self._constants)}"))
        self._constants.append((constant, made.buffer))
        return made

    def body(
        self, func: tirx.PrimFunc, parts: Sequence[Part], numbers: Sequence[Expr]
    ) -> tirx.Stmt:
        """What a PrimFunc of plain loops does, on these tensors and numbers; what it allocates is
        allocated once.
        """
        buffers, others = func.params[: len(parts)], func.params[len(parts) :]
        of = dict(zip(buffers, parts, strict=True))
        sizes = {**_sizes_of(buffers, parts), **dict(zip(others, numbers, strict=True))}

        def load(node: TensorLoad) -> Expr:
            return of[node.source].load(node.indices) if node.source in of else node

        def store(node: tirx.BufferStore) -> tirx.Stmt:
            return of[node.buffer].store(node.value, node.indices) if node.buffer in of else node

        rules = [(Var, lambda v: sizes.get(v, v)), (TensorLoad, load), (tirx.BufferStore, store)]
        body = tvm_ffi.structural_map(func.body, rules)
        if calls_host(body) or has_threads(body):
            raise Unsupported("a step calls a function of the host")
        if not set(buffers).isdisjoint(_variables(body)):
            raise Unsupported("a step takes the address of a tensor")
        rest = []
        for statement in body if isinstance(body, tirx.SeqStmt) else [body]:
            (self._own if _is_shared(statement) else rest).append(statement)
        return sequence(rest)

    def moved(self, found: Sequence[Part], kept: Sequence[Part]) -> list[tirx.Stmt]:
        """What was found to where it is carried; what stood there is found elsewhere, too."""
        aside, sources = [], []
        for source, target in zip(found, kept, strict=True):
            if source is not target and any(source is other for other in kept):
                other = self.scratch(source.shape, str(source.buffer.ty.dtype), "before")
                aside += copies([source], [other])
                source = other
            sources.append(source)
        return [*aside, *copies(sources, kept)]

    def inlined(
        self,
        mod: tvm.IRModule,
        changing: Sequence[Part],
        same: Sequence[Part],
        places: Mapping[int, Part] | None = None,
    ) -> tuple[list[tirx.Stmt], list[tirx.Stmt], list[Part]]:
        """The statements of `main` of a module, and where its results are.

        Parameters
        ----------
        mod : IRModule
        changing, same : sequence of Part
            What it is given: other numbers in each step, and the same ones.
        places : mapping of int to Part
            Where to put results, by number, that are computed in each step.

        Returns
        -------
        tuple
            Statements that are the same in each step, the others, and the results.
        """
        mod = _fused(mod)
        main, given = mod["main"], [*changing, *same]
        walk = _Walk(self, _plain(mod), _sizes_of(main.params, given))
        walk.known = dict(zip(main.params, given, strict=True))
        walk.fixed = set(main.params[len(changing) :])
        bindings = [b for block in main.body.blocks for b in block.bindings]
        bound = {b.var: getattr(b, "value", None) for b in bindings}
        leaves = _leaves(main.body.body, bound)
        for number, place in (places or {}).items():
            walk.places.setdefault(_origin(leaves[number], bound), place)
        for binding in bindings:
            walk.bind(binding)
        found = [walk.part(leaf) for leaf in leaves]
        return walk.ahead, walk.statements, found


@dataclass(slots=True, eq=False)
class _Walk:
    """Goes through the bindings of a lowered function.

    Attributes
    ----------
    loop : what the statements are of
    functions : PrimFuncs of plain loops
    sizes : of the function's symbols
    known : the tensors of its variables, and tuples of them
    fixed : variables that are the same in each step
    places : where call results go, by the variable of the call and their number
    ahead, statements : those that are the same in each step, and the others
    """

    loop: _Loop
    functions: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc]
    sizes: Mapping[Var, Expr]
    known: dict[Var, Any] = field(default_factory=dict)
    fixed: set[Var] = field(default_factory=set)
    places: dict[tuple[Var, int], Part] = field(default_factory=dict)
    ahead: list[tirx.Stmt] = field(default_factory=list)
    statements: list[tirx.Stmt] = field(default_factory=list)

    def bind(self, binding: relax.Binding) -> None:
        """Adds what a binding computes."""
        value = getattr(binding, "value", None)
        if not isinstance(binding, relax.VarBinding) or value is None:
            raise Unsupported("the size of a tensor in a step depends on values")
        if operator_name(value) == "relax.call_tir":
            self._call(binding.var, value)
            return
        if not isinstance(value, Var | GenericConst | relax.Tuple | relax.TupleGetItem):
            name = operator_name(value) or type(value).__name__
            raise Unsupported(f"{name} has no loops of its own, and a step is made of these")
        self.known[binding.var] = self.value(value)
        if self._is_fixed(value):
            self.fixed.add(binding.var)

    def value(self, expr: relax.Expr) -> Any:
        """A tensor, or a tuple of them."""
        if isinstance(expr, Var):
            return self.known[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(map(self.value, expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value)[expr.index]
        if isinstance(expr, GenericConst):
            return self.loop.constant(expr)
        raise Unsupported(f"a step takes a {type(expr).__name__}")

    def part(self, expr: relax.Expr) -> Part:
        """A tensor."""
        found = self.value(expr)
        if not isinstance(found, Part):
            raise Unsupported("a step gives tuples of tuples")
        return found

    def _is_fixed(self, expr: relax.Expr) -> bool:
        if isinstance(expr, relax.Tuple):
            return all(map(self._is_fixed, expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            return self._is_fixed(expr.tuple_value)
        return isinstance(expr, GenericConst) or expr in self.fixed

    def _call(self, var: Var, call: Call) -> None:
        func = s_tir.renew_defs(self.functions[call.args[0]])
        given = call.args[1].fields if isinstance(call.args[1], relax.Tuple) else [call.args[1]]
        is_fixed = all(map(self._is_fixed, given))
        types = var.ty.fields if isinstance(var.ty, relax.TupleType) else [var.ty]
        results = []
        for number, ty in enumerate(types):
            place = None if is_fixed else self.places.get((var, number))
            shape = _resolved(ty.shape, self.sizes)
            results.append(place or self.loop.scratch(shape, str(ty.dtype), var.name))
        self.known[var] = tuple(results) if isinstance(var.ty, relax.TupleType) else results[0]
        parts = [*map(self.part, given), *results]
        numbers = [*call.args[2].values] if len(call.args) > 2 else []
        body = self.loop.body(func, parts, [_substituted(n, self.sizes) for n in numbers])
        (self.ahead if is_fixed else self.statements).append(body)
        if is_fixed:
            self.fixed.add(var)


# ---- Functions of Relax.


def _results(mod: tvm.IRModule) -> list[relax.TensorType]:
    """The types of what `main` returns."""
    ty = mod["main"].ret_ty
    return list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]


def _leaves(expr: relax.Expr, bound: Mapping[Var, relax.Expr]) -> list[relax.Expr]:
    """What a function returns, one by one."""
    while isinstance(expr, Var) and isinstance(bound.get(expr), Var | relax.Tuple):
        expr = bound[expr]
    if isinstance(expr, relax.Tuple):
        return list(expr.fields)
    if isinstance(expr.ty, relax.TupleType):
        return [relax.TupleGetItem(expr, n) for n in range(len(expr.ty.fields))]
    return [expr]


def _origin(expr: relax.Expr, bound: Mapping[Var, relax.Expr]) -> tuple[relax.Expr, int]:
    """The variable of the call that gives a tensor, and which of its results that is."""
    number = 0
    while True:
        value = bound.get(expr) if isinstance(expr, Var) else expr
        if isinstance(value, relax.TupleGetItem):
            expr, number = value.tuple_value, value.index
        elif isinstance(value, Var) and value is not expr:
            expr = value
        elif isinstance(value, relax.Tuple):
            expr, number = value.fields[number], 0
        else:
            return expr, number


def _sizes_of(params: Sequence[Var], given: Sequence[Part]) -> dict[Var, Expr]:
    """The symbols of parameters' shapes, by the tensors that are given for them."""
    sizes: dict[Var, Expr] = {}
    for param, part in zip(params, given, strict=True):
        for symbol, extent in zip(param.ty.shape, part.shape, strict=True):
            if isinstance(symbol, Var):
                sizes.setdefault(symbol, extent)
    return sizes


def _resolved(shape: Sequence[Expr], sizes: Mapping[Var, Expr]) -> list[Expr]:
    return [_substituted(extent, sizes) for extent in shape]


def _substituted(expr: Expr, sizes: Mapping[Var, Expr]) -> Expr:
    return tvm_ffi.structural_map(expr, [(Var, lambda var: sizes.get(var, var))])


# ---- PrimFuncs.


def _fused(mod: tvm.IRModule) -> tvm.IRModule:
    """A lowered module whose element-wise operators are one with what they read."""
    passes = [
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(passes)(mod)


def _plain(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    """The PrimFuncs of a module without blocks."""
    functions = {
        gvar: _ordered(func)
        for gvar, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    passes = [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.LowerOpaqueBlock(),
    ]
    return dict(tvm.transform.Sequential(passes)(tvm.IRModule(functions)).functions_items())


def _ordered(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function whose tensors that are read once are computed where they are read, and whose sums
    begin apart, in nests of their own, and run along the rows of what they add up where these are
    rows of the result, too, as vectors can.
    """
    is_root = isinstance(func.body, s_tir.SBlockRealize) and func.body.block.name_hint == "root"
    if not is_root:
        return func
    schedule = s_tir.Schedule(func)
    _read_where_computed(schedule)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        node, loops = schedule.get(block), schedule.get_loops(block)
        if node.init is None or len(loops) != len(node.iter_vars):
            continue
        realize = schedule.get(loops[-1]).body
        pairs = zip(loops, realize.iter_values, strict=True)
        if not all(schedule.get(loop).loop_var.same_as(value) for loop, value in pairs):
            continue
        kinds = [axis.iter_type for axis in node.iter_vars]
        own = [x for x, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.DataPar]
        summed = [
            x for x, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.CommReduce
        ]
        if len(own) + len(summed) != len(loops):
            continue
        try:
            if own and _reads_rows(node):
                schedule.reorder(*own[:-1], *summed, own[-1])
            schedule.decompose_reduction(block, schedule.get_loops(block)[0])
        except s_tir.ScheduleError:
            continue  # it keeps its loops
    return schedule.mod["main"]


def _read_where_computed(schedule: s_tir.Schedule) -> None:
    """Inlines what one block reads, as often as it is computed and at one place."""
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    nodes = [schedule.get(block) for block in blocks]
    loads: Counter[Var] = Counter()
    readers: dict[Var, s_tir.SBlock] = {}
    for node in nodes:
        found: list[TensorLoad] = []
        tvm_ffi.structural_walk(node.body, [(TensorLoad, found.append)])
        for load in found:
            loads[load.source] += 1
            readers[load.source] = node
    for block, node in zip(blocks, nodes, strict=True):
        written = [region.source for region in node.writes]
        if node.init is not None or len(written) != 1 or loads[written[0]] != 1:
            continue
        if _points(node) == _points(readers[written[0]]) is not None:
            try:
                schedule.compute_inline(block)
            except s_tir.ScheduleError:
                continue  # it gives a result, too


def _points(block: s_tir.SBlock) -> int | None:
    """How often a block runs; None where a size is symbolic."""
    extents = [axis.dom.extent for axis in block.iter_vars]
    known = all(isinstance(extent, tirx.IntImm) for extent in extents)
    return math.prod(map(int, extents)) if known else None


def _reads_rows(block: s_tir.SBlock) -> bool:
    """Whether a sum reads a tensor along the last axis of its result, element by element."""
    own = [axis.var for axis in block.iter_vars if axis.iter_type == tirx.IterVar.DataPar][-1]
    written = [region.source for region in block.writes]
    lasts: list[Expr] = []

    def visit(load: TensorLoad) -> None:
        if len(load.indices) and not any(load.source.same_as(buffer) for buffer in written):
            lasts.append(load.indices[-1])

    tvm_ffi.structural_walk(block.body, [(TensorLoad, visit)])
    return any(own in _variables(last) for last in lasts)


def _is_shared(statement: tirx.Stmt) -> bool:
    """Whether a statement allocates memory that nests share."""
    is_own = isinstance(statement, tirx.AllocBuffer)
    return is_own and statement.buffer.ty.storage_scope in ("", "global")


def _variables(expr: Expr) -> list[Var]:
    found: list[Var] = []
    tvm_ffi.structural_walk(expr, [(Var, found.append)])
    return found


def _buffer(shape: Sequence[Expr], dtype: str, name: str) -> Var:
    return tirx.decl_buffer(list(shape), dtype, name, layout=None)


def _zero(var: Var) -> Expr:
    return tirx.const(0, str(var.ty.dtype))
