"""Packing the right operand of a contraction in panels, as vectors, before its tiles are computed.

    for a block of terms:                       B contiguous along the columns
        for each panel, term:
            panels[p, k, 0:16] = B[k, 16 * p : 16 * p + 16]

    for each panel:                             B contiguous along the terms
        for each 16 terms:
            panels[p, k : k + 16, 0:16] = B[16 * p : 16 * p + 16, k : k + 16] ^ T, in registers

A panel that the columns end in holds anything behind them: nothing reads what comes of it.

Does not handle: operands that are computed, unknown extents, other strides (see `pack_ahead`).
"""

from __future__ import annotations

from math import prod

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.tirx import ForKind

from ...program.expr import dtype_of
from ..loops import Loop, Loops, pieces, seq
from ..nests.scope import Scope, new_buffer
from ..stages.stages import Stage
from .operands import Product, make_side
from .packing import Operands

# Terms of a task where the operand is contiguous along the columns: as many rows are read side by
# side, and a piece of a panel is half a page.
TERMS = 32

# Elements from which on all cores pack: 256 kB, about as long as it takes to wake them up.
MANY_ELEMENTS = 64 << 10


def emit_panels(
    stage: Stage, product: Product, lanes: int, paired: bool = False
) -> tuple[Var, tirx.Stmt] | None:
    """A buffer of panels [batch, panel, term, lane] and the loops that fill it; None where the
    operand cannot be packed by vectors. Where terms are `paired`, a pair counts as one.
    """
    writer = _Writer(stage, product, lanes, paired)
    return (writer.buffer, writer.write()) if writer.can_write() else None


class _Writer:
    def __init__(self, stage: Stage, product: Product, lanes: int, paired: bool) -> None:
        wide = any(dtype_of(a.var) == "int64" for a in (*stage.axes, *stage.reduced))
        self.loops = loops = Loops("int64" if wide else "int32")
        self.scope, self.lanes = Scope(loops, {}), lanes
        self.stage, self.product, self.paired = stage, product, paired
        self.side = make_side(product.columns, lanes, self.scope)
        sizes = [a.size for a in (*product.batch, *product.columns, *product.reduced)]
        self.is_known = None not in sizes
        if self.is_known:
            self.batch = [int(a.size) for a in product.batch]
            self.columns, self.terms = (
                prod(int(a.size) for a in axes) for axes in (product.columns, product.reduced)
            )
            self.terms = -(-self.terms // 2) if paired else self.terms
            self.panels = -(-self.columns // lanes)
            shape = [*self.batch, self.panels, self.terms, lanes]
            self.dtype = self._operands({}).right_dtype
            self.buffer = new_buffer(f"{stage.name}_right", [*map(loops.imm, shape)], self.dtype)

    def _operands(self, where: dict[Var, Expr]) -> Operands:
        return Operands(self.stage, self.product, self.scope, where, self.paired)

    def can_write(self) -> bool:
        """Whether vectors can be loaded."""
        if not self.is_known or self.lanes < 2:
            return False
        operands, terms = self._operands({}), self.loops.imm(self.terms)
        steps = operands.right_steps(self.side)
        self.turns = operands.can_turn(self.side, self.loops.imm(0), terms, self.lanes)
        along = steps is not None and steps[1] == 1 and len(self.product.columns) == 1
        return self.turns or along

    def write(self) -> tirx.Stmt:
        """One loop over all tasks."""
        inner = self.panels if self.turns else -(-self.terms // TERMS)
        tasks = prod(self.batch) * inner
        many = tasks > 1 and tasks // inner * self.terms * self.columns >= MANY_ELEMENTS
        task = self.loops.new("task", tasks, ForKind.PARALLEL if many else ForKind.SERIAL)
        at, rest = [], tirx.FloorDiv(task.value, self.loops.imm(inner))
        for size in reversed(self.batch):
            at.append(self.loops.simplify(tirx.FloorMod(rest, self.loops.imm(size))))
            rest = tirx.FloorDiv(rest, self.loops.imm(size))
        self.at = at[::-1]
        where = {a.var: i for a, i in zip(self.product.batch, self.at, strict=True)}
        self.operands = self._operands(where)
        index = self.loops.simplify(tirx.FloorMod(task.value, self.loops.imm(inner)))
        return task.around(self._panel(index) if self.turns else self._terms(index))

    def _panel(self, panel: Expr) -> tirx.Stmt:
        """One panel, square by square."""
        first = panel * self.loops.imm(self.lanes)

        def column(lane: Expr) -> Expr:
            return self.loops.simplify(tirx.Min(first + lane, self.loops.imm(self.columns - 1)))

        def store(value: Expr, term: Expr, lane: Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.buffer, value, [*self.at, panel, term, lane])

        none, terms = self.loops.imm(0), self.loops.imm(self.terms)
        return self.operands.turn(self.side, column, none, terms, self.lanes, store)

    def _terms(self, block: Expr) -> tirx.Stmt:
        """A block of terms of all panels, then what is left of the columns in pieces."""
        start = self.loops.simplify(block * self.loops.imm(TERMS))
        count = tirx.Min(self.loops.imm(TERMS), self.loops.imm(self.terms) - start)
        whole, rest = divmod(self.columns, self.lanes)
        done = [self._copies(self.loops.new("panel", whole), start, count, 0, self.lanes)]
        for lane, width in pieces(rest, self.lanes):
            last = self.loops.new("panel", 1)
            done.append(self._copies(last, start, count, lane, width, whole))
        return seq(*done)

    def _copies(
        self, panel: Loop, start: Expr, count: Expr, lane: int, width: int, first: int = 0
    ) -> tirx.Stmt:
        """Vectors of some lanes for some panels, `first` the first of them."""
        term = self.loops.new("k", self.loops.simplify(count))
        kind = ForKind.VECTORIZED if width > 1 else ForKind.SERIAL
        v = self.loops.new("v", width, kind)
        number_of = self.loops.simplify(panel.value + self.loops.imm(first))
        at = self.loops.simplify(start + term.value)
        lanes = v.value + self.loops.imm(lane)
        value = self.operands.right(self.side, number_of * self.loops.imm(self.lanes) + lanes, at)
        store = tirx.BufferStore(self.buffer, value, [*self.at, number_of, at, lanes])
        return panel.around(term.around(v.around(store)))
