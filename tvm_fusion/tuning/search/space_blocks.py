"""Blocks of a PrimFunc under a schedule: their kinds, inlining, and gathering under common rows.

What `space_cuda` and `space_llvm` have in common. All of it works on any function of leaf blocks,
whatever operators these are from.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError

from ...errors import Unsupported
from ...ir.access import Pipe
from ...ir.extents import product_key
from ...ir.reader import extent_of, pipe_of

_SPATIAL, _REDUCE = 0, 2  # tirx.IterVar.DataPar, CommReduce


class Kind(Enum):
    """What a loop or a block does."""

    SPATIAL = "spatial"
    REDUCE = "reduce"
    OTHER = "other"  # the order of its iterations matters


class Blocks:
    """The blocks under the root of a schedule's function `main`.

    Raises
    ------
    Unsupported
        The function holds something other than leaf blocks, or launches threads of its own.
    """

    def __init__(self, sch: s_tir.Schedule) -> None:
        self.sch = sch
        func = sch.mod["main"]
        self.root = func.body.block.name_hint
        self.params = set(func.params)

    def all(self) -> list[SBlockRV]:
        """In the order they run."""
        return list(self.sch.get_child_blocks(self.sch.get_sblock(self.root)))

    def named(self) -> list[str]:
        """Their names, which stay what they are when others are inlined or split."""
        return [self.name(block) for block in self.all()]

    def name(self, block: SBlockRV) -> str:
        return self.sch.get(block).name_hint

    def get(self, name: str) -> SBlockRV:
        return self.sch.get_sblock(name)

    def is_output(self, block: SBlockRV) -> bool:
        return any(region.source in self.params for region in self.sch.get(block).writes)

    def kind(self, block: SBlockRV) -> Kind:
        types = {int(iv.iter_type) for iv in self.sch.get(block).iter_vars}
        if types <= {_SPATIAL}:
            return Kind.SPATIAL
        if types <= {_SPATIAL, _REDUCE} and self.sch.get(block).init is not None:
            return Kind.REDUCE
        return Kind.OTHER

    def loops(self, block: SBlockRV, below: int = 0) -> dict[Kind, list[LoopRV]]:
        """Its loops by kind, without the outermost `below`."""
        kinds = self._kinds_of_loop_vars(block)
        found: dict[Kind, list[LoopRV]] = {kind: [] for kind in Kind}
        for loop in list(self.sch.get_loops(block))[below:]:
            of_var = kinds.get(self.sch.get(loop).loop_var, set())
            if len(of_var) == 1:
                found[next(iter(of_var))].append(loop)
            else:  # of no iterator at all, it runs once
                found[Kind.OTHER if of_var else Kind.SPATIAL].append(loop)
        return found

    def extent(self, loop: LoopRV) -> int | str:
        return extent_of(self.sch.get(loop).extent)

    def is_static(self, loop: LoopRV) -> bool:
        return isinstance(self.extent(loop), int)

    def points(self, block: SBlockRV) -> tuple:
        """How often it runs, in a form that is equal for equal products."""
        return product_key(self.extent(loop) for loop in self.sch.get_loops(block))

    def is_heavy(self, block: SBlockRV) -> bool:
        """Whether a point of it takes more than arithmetic."""
        found: list[Expr] = []

        def look(e: Expr) -> None:
            if pipe_of(e) in (Pipe.SPECIAL, Pipe.DIVISION):
                found.append(e)

        tvm_ffi.structural_walk(self.sch.get(block).body, [(Expr, look)])
        return bool(found)

    def consumers(self, block: SBlockRV) -> list[str]:
        return [self.name(b) for b in self.sch.get_consumers(block)]

    def reads_along(self, block: SBlockRV, loop: LoopRV) -> bool:
        """Whether neighbours on the loop are neighbours in memory for something it reads."""
        var = self.sch.get(loop).loop_var
        of = {
            iv.var
            for iv, value in self._bindings(block)
            if any(v.same_as(var) for v in _vars(value))
        }
        last: list[bool] = []

        def look(load: TensorLoad) -> None:
            if load.indices and load.source not in written:
                last.append(any(v in of for v in _vars(load.indices[-1])))

        written = {region.source for region in self.sch.get(block).writes}
        tvm_ffi.structural_walk(self.sch.get(block).body, [(TensorLoad, look)])
        return any(last)

    def _kinds_of_loop_vars(self, block: SBlockRV) -> dict[Var, set[Kind]]:
        kinds: dict[Var, set[Kind]] = {}
        for iv, value in self._bindings(block):
            kind = {_SPATIAL: Kind.SPATIAL, _REDUCE: Kind.REDUCE}.get(int(iv.iter_type), Kind.OTHER)
            for var in _vars(value):
                kinds.setdefault(var, set()).add(kind)
        return kinds

    def _bindings(self, block: SBlockRV) -> list[tuple]:
        values = _realize_of()(self.sch, block).iter_values
        return list(zip(self.sch.get(block).iter_vars, values, strict=True))


def inline(blocks: Blocks, keep: Callable[[SBlockRV], bool] = lambda block: False) -> None:
    """Computes blocks without a reduction where they are read, except those to `keep`; the last of
    a chain where its producer is.
    """
    sch = blocks.sch
    for name in blocks.named():
        block = blocks.get(name)
        if blocks.kind(block) is Kind.SPATIAL and not blocks.is_output(block) and not keep(block):
            attempt(sch.compute_inline, block)
    for name in reversed(blocks.named()):
        block = blocks.get(name)
        producers = list(sch.get_producers(block))
        both = [block, *producers]
        if len(both) != 2 or keep(producers[0]):
            continue
        if all(blocks.kind(b) is Kind.SPATIAL for b in both):
            attempt(sch.reverse_compute_inline, block)


def gather(blocks: Blocks, rows: LoopRV, last: str) -> None:
    """Computes every other block below the loop `rows` of the block `last`.

    Raises
    ------
    Unsupported
        A block would then run more often than it does alone.
    ScheduleError
        A block cannot be moved.
    """
    for name in reversed([n for n in blocks.named() if n != last]):
        block = blocks.get(name)
        before = blocks.points(block)
        blocks.sch.compute_at(block, rows, preserve_unit_loops=True)
        if blocks.points(blocks.get(name)) != before:
            raise Unsupported(f"{name} is not computed row by row")


def shared_rows(func: tirx.PrimFunc, prepare: Callable[[s_tir.Schedule], None]) -> int:
    """How many leading loops of the last block all blocks share: the most for which each runs as
    often as alone when it is computed below them; 0 for none. A last block that reduces nothing
    keeps a loop of its own.
    """
    first = schedule_of(func)
    prepare(first)
    blocks = Blocks(first)
    *others, last = blocks.named()
    if not others:
        return 0
    spatial = len(blocks.loops(blocks.get(last))[Kind.SPATIAL])
    reduces = blocks.kind(blocks.get(last)) is Kind.REDUCE
    for count in range(spatial if reduces else spatial - 1, 0, -1):
        sch = first.copy()
        tried = Blocks(sch)
        loops = tried.loops(tried.get(last))[Kind.SPATIAL]
        try:
            gather(tried, sch.fuse(*loops[:count]), last)
        except (ScheduleError, Unsupported):
            continue
        return count
    return 0


def schedule_of(func: tirx.PrimFunc, seed: int = 1) -> s_tir.Schedule:
    """A fresh schedule of a function under the name `main`."""
    mod = module_of(func)
    return s_tir.Schedule(mod, seed=seed, error_render_level="fast")


def module_of(func: tirx.PrimFunc) -> tvm.IRModule:
    """The module that the schedules and traces of a function are of.

    Its body is an object of its own: a schedule changes a body in place that several functions
    share, as a function and its `with_attr` do.
    """
    realize = func.body
    if not isinstance(realize, s_tir.SBlockRealize):
        raise Unsupported("the function's body is no block")
    body = s_tir.SBlockRealize(realize.iter_values, realize.predicate, realize.block)
    return tvm.IRModule({"main": func.with_body(body).with_attr("global_symbol", "main")})


def attempt(primitive: Callable, *arguments) -> bool:
    """Applies a schedule primitive where it is legal; whether it was."""
    try:
        primitive(*arguments)
    except ScheduleError:
        return False
    return True


def refuse_unknown(func: tirx.PrimFunc) -> None:
    """Only loops around leaf blocks can be scheduled by what the leaves compute.

    Raises
    ------
    Unsupported
        The function is scheduled, launches threads of its own, or has blocks within blocks.
    """
    root = module_of(func)["main"].body.block
    attrs: list[tirx.AttrStmt] = []
    loops: list[tirx.For] = []
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(
        root.body,
        [(tirx.AttrStmt, attrs.append), (tirx.For, loops.append), (s_tir.SBlock, blocks.append)],
    )
    if any(a.attr_key in ("thread_extent", "virtual_thread") for a in attrs):
        raise Unsupported("the function launches threads of its own")
    if any(loop.kind == tirx.ForKind.THREAD_BINDING for loop in loops):
        raise Unsupported("the function is scheduled already")
    if not blocks:
        raise Unsupported("the function holds no block")
    inner: list[s_tir.SBlock] = []
    for block in blocks:
        tvm_ffi.structural_walk(block.body, [(s_tir.SBlock, inner.append)])
    if inner:
        raise Unsupported(f"block {inner[0].name_hint} lies within another")


def _vars(e) -> list[Var]:
    found: list[Var] = []
    tvm_ffi.structural_walk(e, [(Var, found.append)])
    return found


@cache
def _realize_of() -> Callable:
    return tvm_ffi.get_global_func("s_tir.schedule.GetSBlockRealize")
