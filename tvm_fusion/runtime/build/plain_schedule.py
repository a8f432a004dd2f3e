"""A plain GPU schedule for PrimFuncs that no rule takes: slow, but right for any loops.

    Before                                   After
    for i, j in T.grid(7, 5):                for b in T.thread_binding(1, "blockIdx.x"):
        for k in range(n(i)):                    for t in T.thread_binding(128, "threadIdx.x"):
            y[i, j] = y[i, j] + x[i, k, j]           if b * 128 + t < 35:
                                                         for k in range(n(i)): ...

Every nest becomes a kernel of its own. A loop is spread over threads only where it is proven that
its iterations do not meet: its variable is itself an index of every tensor that the nest writes, in
one dimension of all stores to it and of all loads from it, or can be computed from the place in
memory (`row // s * c + row % s + i * s` with i below c / s). What is left of the nest runs in each
thread in its order; where no loop is proven, the whole nest runs in one thread. A nest that has
threads of its own stays as it is.

A loop over steps of several nests each (`loop_function.STEPS_ATTR`) is one kernel of one block: its
threads share each nest, and wait for one another where a nest reads what another wrote.

    for s in range(n):                       for s in range(n):
        for i in range(700):                     for turn in range(2):
            a[i] = h[i] + x[s, i]                    if turn * 352 + t < 700: a[...] = ...
        for i in range(700):                     wait for the block
            h[i] = a[699 - i]                    ...

Does not handle: calls of functions of the host (a library's sort), which no kernel can make.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, Expr, PrimType, Range, TensorLoad, Var
from tvm.sym import Analyzer

from ...ir.blocks import called, calls_host, has_threads, substitute
from ...transform.functions.loop_function import STEPS_ATTR
from ...transform.lower.ordered_writes import serial, variables_of

THREADS = 128
MOST_THREADS, WARP = 1024, 32
TOLD = 6  # terms that a thread adds in the time in which the lanes of a warp add up theirs
MOST_SHARED = 40 << 10  # bytes that a block takes for what nests tell one another

PLAIN_ATTR = "tvm_fusion.plain"
"""Of functions scheduled here: how, for the report."""

OWN_THREADS = "on threads of its own"
ONE_BLOCK = "step by step in one block"
PER_ELEMENT = "one thread an element"
ONE_THREAD = "in one thread, since no loop is proven to be free of order"

# Calls after which an element may be reached by other ways than its indices.
_ADDRESSES = ("address_of", "tvm_access_ptr", "call_extern", "call_pure_extern")


def plain_schedule(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function with every nest on the threads of a GPU, marked with `PLAIN_ATTR`; None if that
    cannot be.
    """
    if STEPS_ATTR in (func.attrs or {}):
        return None if calls_host(func.body) else _in_a_block(func)
    root = func.body.block if isinstance(func.body, s_tir.SBlockRealize) else None
    body = func.body if root is None else root.body
    nests = list(body) if isinstance(body, tirx.SeqStmt) else [body]
    if any(calls_host(nest) or isinstance(nest, tirx.Bind) for nest in nests):
        return None
    parts = [_scheduled(nest) for nest in nests]
    scheduled = tirx.SeqStmt([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
    how = {said for _, said in parts}
    slowest = next(said for said in (ONE_THREAD, PER_ELEMENT, OWN_THREADS) if said in how)
    func = func.with_attr(PLAIN_ATTR, slowest)
    if root is None:
        return func.with_body(scheduled)
    block = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        scheduled,
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    realize = func.body
    return func.with_body(s_tir.SBlockRealize(realize.iter_values, realize.predicate, block))


def _scheduled(nest: tirx.Stmt) -> tuple[tirx.Stmt, str]:
    """One nest on threads, and how."""
    if has_threads(nest):
        return nest, OWN_THREADS
    loops, body = _loops(nest)
    spread = _independent(loops, body)
    total = _points(spread)
    threads = THREADS if spread else 1
    block, thread = (Var(name, PrimType("int64")) for name in ("block", "thread"))
    flat = block * threads + thread
    body = _iteration(loops, spread, body, flat)
    if spread:
        body = tirx.IfThenElse(flat < total, body, None)
    body = _bound(thread, threads, "threadIdx.x", body)
    body = _bound(block, (total + (threads - 1)) // threads, "blockIdx.x", body)
    return body, PER_ELEMENT if spread else ONE_THREAD


def _points(loops: Sequence[tirx.For]) -> Expr:
    """How many iterations loops have together."""
    total: Expr = tirx.IntImm("int64", 1)
    for loop in loops:
        total = total * loop.extent.astype("int64")
    return total


def _iteration(
    loops: Sequence[tirx.For], spread: Sequence[tirx.For], body: tirx.Stmt, flat: Expr
) -> tirx.Stmt:
    """One iteration of the loops that are spread, of all by number, with the others around it."""
    kept = [loop for loop in loops if not any(loop.same_as(own) for own in spread)]
    values = _values(spread, flat)
    for loop in reversed(kept):
        body = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, body)
    return tvm_ffi.structural_map(_in_order(body), [(Var, lambda var: values.get(var, var))])


def _values(loops: Sequence[tirx.For], flat: Expr) -> dict[Var, Expr]:
    """The variables of loops in one of all their iterations, by number."""
    rest, values = flat, {}
    for loop in reversed(loops):
        extent = loop.extent.astype("int64")
        values[loop.loop_var] = (rest % extent).astype(str(loop.loop_var.ty.dtype))
        rest = rest // extent
    return values


def _bound(var: Var, extent: Expr | int, tag: str, body: tirx.Stmt) -> tirx.For:
    """A loop over the threads or the blocks of a kernel."""
    axis = tirx.IterVar(None, Var(tag, var.ty), tirx.IterVar.ThreadIndex, tag)
    extent = tirx.const(extent, "int64") if isinstance(extent, int) else extent
    zero = tirx.IntImm("int64", 0)
    return tirx.For(var, zero, extent, tirx.ForKind.THREAD_BINDING, body, axis)


def _loops(nest: tirx.Stmt) -> tuple[list[tirx.For], tirx.Stmt]:
    """The loops around all of a nest, the outermost first, and what stands in them."""
    loops: list[tirx.For] = []
    while isinstance(nest, tirx.For):
        loops.append(nest)
        nest = nest.body
    return loops, nest


def _in_order(body: tirx.Stmt) -> tirx.Stmt:
    """The loops of what runs in a thread, none of them vectors or for several cores."""

    def ordered(loop: tirx.For) -> tirx.For:
        return loop if loop.kind == tirx.ForKind.SERIAL else serial(loop)

    return tvm_ffi.structural_map(body, [(tirx.For, ordered)])


# ---- steps in one block


def _in_a_block(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A loop over steps as a kernel of one block."""
    statements = list(func.body) if isinstance(func.body, tirx.SeqStmt) else [func.body]
    own = [s for s in statements if isinstance(s, tirx.AllocBuffer)]
    nests = [s for s in statements if not isinstance(s, tirx.AllocBuffer)]
    sizes = [_bytes(s.buffer) for s in own]
    if None not in sizes and sum(sizes) <= MOST_SHARED:
        shared = {s.buffer: _in_shared_memory(s.buffer) for s in own}
        renamed = [(Var, lambda var: shared.get(var, var))]
        nests = [tvm_ffi.structural_map(nest, renamed) for nest in nests]
        outside, inside = [], [tirx.AllocBuffer(buffer) for buffer in shared.values()]
    else:
        outside, inside = own, []
    steps = _Steps(_threads(nests))
    body = tirx.SeqStmt([*inside, *steps.spread(nests)])
    kernel = _bound(steps.thread, steps.threads, "threadIdx.x", body)
    kernel = _bound(Var("block", PrimType("int64")), 1, "blockIdx.x", kernel)
    func = func.with_body(tirx.SeqStmt([*outside, kernel]) if outside else kernel)
    return func.with_attr(PLAIN_ATTR, ONE_BLOCK)


def _bytes(buffer: Var) -> int | None:
    """The size of a buffer, in words; None where it is symbolic."""
    shape = buffer.ty.shape
    if not all(isinstance(extent, tirx.IntImm) for extent in shape):
        return None
    bits = max(8, tvm.DataType(str(buffer.ty.dtype)).bits)
    return -(-math.prod(map(int, shape)) * bits // 8 // 16) * 16


def _in_shared_memory(buffer: Var) -> Var:
    shape, dtype = list(buffer.ty.shape), str(buffer.ty.dtype)
    return tirx.decl_buffer(shape, dtype, buffer.name, scope="shared", layout=None)


def _threads(nests: Sequence[tirx.Stmt]) -> int:
    """As many as the largest nest can use."""
    most = 1

    def visit(loop: tirx.For) -> None:
        nonlocal most
        loops, body = _loops(loop)
        own = _independent(loops, body)
        found = _sum_of(loops, own, body)
        total = Analyzer().simplify(_points(own))
        total = int(total) if isinstance(total, tirx.IntImm) else MOST_THREADS
        if found is not None and found.is_by_warps(MOST_THREADS):
            total *= WARP
        most = max(most, total)

    tvm_ffi.structural_walk(tirx.SeqStmt(list(nests)), [(tirx.For, visit)])
    return min(-(-most // WARP) * WARP, MOST_THREADS)


@dataclass(slots=True)
class _Steps:
    """Spreads nests over the threads of a block.

    Attributes
    ----------
    threads : how many there are
    read, written : buffers that some thread may read or write since all waited
    """

    threads: int
    thread: Var = field(default_factory=lambda: Var("thread", PrimType("int64")))
    read: set[Var] = field(default_factory=set)
    written: set[Var] = field(default_factory=set)

    def spread(self, nests: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
        """Statements that all threads run."""
        made = []
        for nest in nests:
            made += self._nest(nest)
        return made

    def _nest(self, nest: tirx.Stmt) -> list[tirx.Stmt]:
        if isinstance(nest, tirx.SeqStmt):
            return self.spread(list(nest))
        loops, body = _loops(nest)
        shared = _independent(loops, body) if loops else []
        if shared or not _is_shared_within(nest):
            return self._leaf(nest, loops, shared, body)
        before = self._wait()
        if isinstance(nest, tirx.While | tirx.IfThenElse):
            # whoever is asked once more than others reads before these write
            asked = _buffers(nest.condition, TensorLoad)
            if isinstance(nest, tirx.While):
                made = tirx.While(nest.condition, self._whole(nest.body, asked))
            else:
                cases = (nest.then_case, nest.else_case)
                cases = [case and self._whole(case, asked) for case in cases]
                made = tirx.IfThenElse(nest.condition, *cases)
            self.read |= asked
            return [*before, made]
        body = self._whole(nest.body)
        loop = tirx.For(nest.loop_var, nest.min, nest.extent, tirx.ForKind.SERIAL, body)
        return [*before, loop]

    def _whole(self, body: tirx.Stmt, asked: Collection[Var] = ()) -> tirx.Stmt:
        """What runs as a whole, once buffers were asked: at its end all have waited."""
        self.read |= set(asked)
        return tirx.SeqStmt([*self._nest(body), *self._wait()])

    def _leaf(
        self,
        nest: tirx.Stmt,
        loops: Sequence[tirx.For],
        shared: Sequence[tirx.For],
        body: tirx.Stmt,
    ) -> list[tirx.Stmt]:
        """A nest whose iterations are shared; in one thread where none are."""
        read, written = _buffers(nest, TensorLoad), _buffers(nest, tirx.BufferStore)
        meets = (read & self.written) | (written & (self.written | self.read))
        before = self._wait() if meets else []
        self.read |= read
        self.written |= written
        found = _sum_of(loops, shared, body)
        if found is not None and found.is_by_warps(self.threads):
            return [*before, self._by_warps(found)]
        if not shared:
            first = tirx.EQ(self.thread, tirx.IntImm("int64", 0))
            return [*before, tirx.IfThenElse(first, _in_order(nest), None)]
        total = Analyzer().simplify(_points(shared))
        turns = Analyzer().simplify((total + (self.threads - 1)) // self.threads)
        turn = Var("turn", PrimType("int64"))
        flat = turn * self.threads + self.thread
        made = tirx.IfThenElse(flat < total, _iteration(loops, shared, body, flat), None)
        zero = tirx.IntImm("int64", 0)
        return [*before, tirx.For(turn, zero, turns, tirx.ForKind.SERIAL, made)]

    def _by_warps(self, found: _Sum) -> tirx.Stmt:
        """Sums of which each is of the lanes of a warp."""
        warps, dtype = self.threads // WARP, str(found.store.value.ty.dtype)
        turn, again = (Var(name, PrimType("int64")) for name in ("turn", "again"))
        part = tirx.decl_buffer((1,), dtype, "part", scope="local", layout=None)
        here = tirx.BufferLoad(part, [0])
        lane, element = self.thread % WARP, turn * warps + self.thread // WARP
        place, own = again * WARP + lane, _values(found.own, element)
        term = substitute(found.term, own | _values(found.summed, place))
        adds: tirx.Stmt = tirx.BufferStore(part, here + term, [0])
        adds = tirx.IfThenElse(place < found.terms, adds, None)
        statements = [
            tirx.AllocBuffer(part),
            tirx.BufferStore(part, tirx.const(0, dtype), [0]),
            _repeated(again, -(-found.terms // WARP), adds),
        ]
        step = WARP // 2
        while step:
            args = (tirx.const(0xFFFFFFFF, "uint32"), here, step, WARP, WARP)
            other = tirx.call_intrin(dtype, "tirx.tvm_warp_shuffle_down", *args)
            statements.append(tirx.BufferStore(part, here + other, [0]))
            step //= 2
        indices = [substitute(i, own) for i in found.store.indices]
        whole = tirx.BufferLoad(found.store.buffer, indices) + here
        whole = tirx.BufferStore(found.store.buffer, whole, indices)
        first = tirx.EQ(lane, tirx.IntImm("int64", 0))
        statements.append(tirx.IfThenElse(first, whole, None))
        inside = tirx.IfThenElse(element < found.count, tirx.SeqStmt(statements), None)
        return _repeated(turn, -(-found.count // warps), inside)

    def _wait(self) -> list[tirx.Stmt]:
        if not self.read and not self.written:
            return []
        self.read.clear()
        self.written.clear()
        sync = tirx.call_intrin("int32", "tirx.tvm_storage_sync", tvm.ir.StringImm("shared"))
        return [tirx.Evaluate(sync)]


def _repeated(var: Var, count: int, body: tirx.Stmt) -> tirx.Stmt:
    zero, extent = (tirx.IntImm("int64", n) for n in (0, count))
    return tirx.For(var, zero, extent, tirx.ForKind.SERIAL, body)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A nest that adds terms to elements.

    Attributes
    ----------
    store, term : what is stored, and what is added
    own, summed : loops over elements, and over the terms of each
    count, terms : how many there are
    """

    store: tirx.BufferStore
    term: Expr
    own: Sequence[tirx.For]
    summed: Sequence[tirx.For]
    count: int
    terms: int

    def is_by_warps(self, threads: int) -> bool:
        """Whether it takes less time, whatever is read, where each element is a warp's, whose lanes
        add some of its terms each and tell one another, than where it is a thread's.
        """
        of_threads = -(-self.count // threads) * self.terms
        of_warps = -(-self.count // (threads // WARP)) * (-(-self.terms // WARP) + TOLD)
        return of_warps * 2 < of_threads


def _sum_of(loops: Sequence[tirx.For], own: Sequence[tirx.For], body: tirx.Stmt) -> _Sum | None:
    """A nest as a sum whose terms may be added in any order; None where it is none."""
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, tirx.Add):
        return None
    summed = [loop for loop in loops if not any(loop.same_as(other) for other in own)]
    before, term = body.value.a, body.value.b
    is_same = isinstance(before, TensorLoad) and before.source.same_as(body.buffer)
    if not is_same or str(term.ty.dtype) not in ("float32", "float64", "int32", "int64"):
        return None
    if not all(map(tvm_ffi.structural_equal, before.indices, body.indices)):
        return None
    variables = {loop.loop_var for loop in summed}
    if body.buffer in _buffers(term, TensorLoad) or not summed:
        return None
    if any(variables.intersection(variables_of(index)) for index in body.indices):
        return None
    if not all(_starts_at_zero(loop) and isinstance(loop.extent, tirx.IntImm) for loop in loops):
        return None
    count, terms = (math.prod(int(loop.extent) for loop in each) for each in (own, summed))
    return _Sum(body, term, own, summed, count, terms)


def _is_shared_within(nest: tirx.Stmt) -> bool:
    """Whether a statement has a nest in it whose iterations can be shared."""

    def visit(loop: tirx.For) -> tvm_ffi.VisitInterrupt | None:
        loops, body = _loops(loop)
        return tvm_ffi.VisitInterrupt() if _independent(loops, body) else None

    return tvm_ffi.structural_walk(nest, [(tirx.For, visit)]) is not None


def _buffers(node: tirx.Stmt | Expr, kind: type) -> set[Var]:
    """The buffers that something loads from, or stores to."""
    found: set[Var] = set()

    def visit(access: Any) -> None:
        found.add(access.source if kind is TensorLoad else access.buffer)

    tvm_ffi.structural_walk(node, [(kind, visit)])
    return found


# ---- what is independent


@dataclass(slots=True)
class _Accesses:
    """The accesses of a nest, each index by the loop variable that it is; None if it is none.

    Attributes
    ----------
    stores, loads : mapping of tensors to the indices of each access
    places : of each access, the number of the element in its tensor, over the variables of loops
    own : tensors that live within the nest
    ranges : what the loops within the nest go through
    known : whether all accesses are known; an address that is taken may lead anywhere
    """

    stores: dict[Var, list[list[Var | None]]] = field(default_factory=dict)
    loads: dict[Var, list[list[Var | None]]] = field(default_factory=dict)
    places: dict[Var, list[Expr]] = field(default_factory=dict)
    own: set[Var] = field(default_factory=set)
    ranges: dict[Var, Range] = field(default_factory=dict)
    known: bool = True


def _independent(loops: Sequence[tirx.For], body: tirx.Stmt) -> list[tirx.For]:
    """The loops whose iterations are proven not to meet."""
    found = _accesses(body)
    written = [tensor for tensor in found.stores if tensor not in found.own]
    if not found.known or not written:
        return []
    variables = {loop.loop_var for loop in loops}
    return [
        loop
        for loop in loops
        if _starts_at_zero(loop)
        and not variables.intersection(variables_of(loop.extent))
        and all(
            _tells_apart(found, tensor, loop.loop_var) or _is_told_by(found, tensor, loop, loops)
            for tensor in written
        )
    ]


def _starts_at_zero(loop: tirx.For) -> bool:
    return isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0 and loop.step is None


def _tells_apart(found: _Accesses, tensor: Var, var: Var) -> bool:
    """Whether a variable is the index of all accesses of a tensor in one dimension."""
    accesses = [*found.stores[tensor], *found.loads.get(tensor, ())]
    rank = min(map(len, accesses))
    return any(all(a[d] is not None and a[d].same_as(var) for a in accesses) for d in range(rank))


def _is_told_by(found: _Accesses, tensor: Var, loop: tirx.For, loops: Sequence[tirx.For]) -> bool:
    """Whether the iteration of a loop can be computed from every place of a tensor that it reaches:
    in ``row // s * c + row % s + i * s``, i below c / s, from ``place // c`` and ``place % s``.
    """
    var, analyzer = loop.loop_var, Analyzer()
    reach = {other.loop_var: Range(other.min, other.extent) for other in loops} | found.ranges
    for other, own in reach.items():
        analyzer.bind(other, own)
    places = [analyzer.simplify(place) for place in found.places.get(tensor, ())]
    known = len(places) == len(found.stores[tensor]) + len(found.loads.get(tensor, ()))
    if not known or not all(set(variables_of(place)) <= set(reach) for place in places):
        return False
    whole = isinstance(loop.extent, tirx.IntImm)
    sizes = set().union(*(_divisors(place, var) for place in places))
    sizes = sizes or {1, *([int(loop.extent)] if whole else [])}
    return any(size > 0 and _tells(places, var, loop.extent, size, reach) for size in sizes)


def _tells(
    places: Sequence[Expr], var: Var, extent: Expr, size: int, reach: dict[Var, Range]
) -> bool:
    """Whether quotient and remainder of a variable by `size` can be computed from all places."""
    analyzer = Analyzer()
    for other, own in reach.items():
        if not other.same_as(var):
            analyzer.bind(other, own)
    quotient, rest = (Var(name, var.ty) for name in ("quotient", "rest"))
    count = analyzer.simplify((extent + (size - 1)) // size)
    analyzer.bind(quotient, Range(0, count))
    analyzer.bind(rest, Range(0, size))
    here, next_one = ({var: q * size + rest} for q in (quotient, quotient + 1))
    step = analyzer.simplify(substitute(places[0], next_one) - substitute(places[0], here))
    places = [analyzer.simplify(substitute(place, here)) for place in places]
    prove = analyzer.can_prove_equal
    if not all(prove(place % size, rest) for place in places):
        return False
    if isinstance(count, tirx.IntImm) and int(count) == 1:
        return True
    known = isinstance(step, tirx.IntImm) and int(step) > 0
    return known and all(prove(place // step, quotient) for place in places)


def _divisors(expr: Expr, var: Var) -> set[int]:
    """What a variable is divided by in an expression; 0 for what is no positive number."""
    found: set[int] = set()

    def visit(division: Expr) -> None:
        if var in variables_of(division.a):
            known = isinstance(division.b, tirx.IntImm) and division.a.same_as(var)
            found.add(max(0, int(division.b)) if known else 0)

    kinds = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
    tvm_ffi.structural_walk(expr, [(kind, visit) for kind in kinds])
    return found


def _accesses(body: tirx.Stmt) -> _Accesses:
    found = _Accesses()
    meaning: dict[Var, Expr] = {}

    def resolved(index: Expr) -> Var | None:
        while isinstance(index, Var) and index in meaning:
            index = meaning[index]
        return index if isinstance(index, Var) else None

    def realize(node: s_tir.SBlockRealize) -> None:
        for axis, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            meaning[axis.var] = value
        found.own.update(node.block.alloc_buffers)
        found.known &= not node.block.match_buffers

    def place(tensor: Var, indices: Sequence[Expr]) -> None:
        if len(indices) != len(tensor.ty.shape) or not len(indices):
            return
        at: Expr = tirx.IntImm(str(indices[0].ty.dtype), 0)
        for index, extent in zip(indices, tensor.ty.shape, strict=True):
            index, extent = (
                x.astype(str(at.ty.dtype)) for x in (substitute(index, meaning), extent)
            )
            at = at * extent + index
        found.places.setdefault(tensor, []).append(at)

    def inner(loop: tirx.For) -> None:
        found.ranges[loop.loop_var] = Range(loop.min, loop.extent)

    def store(node: tirx.BufferStore) -> None:
        place(node.buffer, node.indices)
        found.stores.setdefault(node.buffer, []).append([resolved(i) for i in node.indices])

    def load(node: TensorLoad) -> None:
        place(node.source, node.indices)
        found.loads.setdefault(node.source, []).append([resolved(i) for i in node.indices])

    def alias(_: tirx.DeclBuffer) -> None:
        found.known = False

    def call(node: Call) -> None:
        # Functions of numbers are given no tensor, and take no address of an element.
        numbers = [node.ty, *(a.ty for a in node.args if isinstance(a, Expr))]
        found.known &= called(node) not in _ADDRESSES
        found.known &= all(isinstance(ty, PrimType) for ty in numbers)

    callbacks = [
        (s_tir.SBlockRealize, realize),
        (tirx.For, inner),
        (tirx.BufferStore, store),
        (TensorLoad, load),
        (tirx.AllocBuffer, lambda node: found.own.add(node.buffer)),
        (tirx.DeclBuffer, alias),
        (Call, call),
    ]
    tvm_ffi.structural_walk(body, callbacks, order="pre")
    return found
