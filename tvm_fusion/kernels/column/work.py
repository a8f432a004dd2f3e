"""What the time of a column kernel depends on, as numbers: made from a program by the writer, from
the sizes of a group by the planner, so that both rank configurations alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tvm_ffi
from tvm.ir import Call, Expr, Var

from ...cost.liveness import held_between, peak_live
from ..program.expr import bytes_of, dtype_of, variables
from ..program.online import merge_online
from ..program.program import Element, Level, Program
from ..row.keep import kept_values
from .lanes import Lanes, is_turned, main_bytes

ASSUMED_ROWS = 4096  # where the number of rows is symbolic
REGISTER = 4
LOADED = 0.5  # registers of a float16 that waits in a vector; compilers widen others for good
PACKED = 0.6  # the same while some are being widened


@dataclass(frozen=True, slots=True)
class ColumnWork:
    """A program with its lanes laid out.

    Attributes
    ----------
    rows : extents of the rows; an assumed one where an extent is symbolic
    known : whether the last of them is known
    columns : reduced elements of a row
    along_rows, inner : see `lanes`
    turned : no access runs along the rows
    width : elements of the widest vectors
    element : bytes of the narrowest element that moves with the steps
    moving, still, stored : bytes of a point that are loaded at every step, loaded once, stored
    reductions, partial_bytes : how many, and bytes of one partial result of each
    phases, merged : of reductions that wait for one another, and with sums of exponentials run
        along with their maximum
    sweeps : passes over the columns where nothing is held
    loaded : registers of a point that is held as it was loaded
    held : registers of a point between two sweeps: what was loaded, or computed at a cost, before
        and is read after
    online : the same between a maximum and the sum that runs along with it; 0 without
    kept : registers of a point for temporaries that are kept on purpose
    live : values of a point that are live at once while it is computed
    """

    rows: tuple[int, ...]
    columns: int
    along_rows: bool = True
    inner: int = 1
    turned: bool = False
    known: bool = True
    width: int = 1
    element: int = 4
    moving: int = 4
    still: int = 0
    stored: int = 0
    reductions: int = 1
    partial_bytes: int = 4
    phases: int = 1
    merged: int = 1
    sweeps: int = 1
    loaded: float = 1.0
    held: float = 1.0
    online: float = 0.0
    kept: float = 0.0
    live: int = 2


def work_of(program: Program, lanes: Lanes) -> ColumnWork:
    """The numbers of a program for one way to lay the lanes."""
    merged = merge_online(program)
    loads = lanes.loads.values()
    still = sum(bytes_of(v.dtype) for v in loads if not v.moves)
    read, stored = main_bytes(program)
    sizes = [bytes_of(v.dtype) for v in loads if v.moves]
    kept = sum(bytes_of(dtype_of(v)) / REGISTER for v in kept_values(program))
    moving, packed = read - still, _packed(lanes)
    sources, weights = _values(program, packed)
    roots = _roots((r.phase, r.body) for r in program.reductions)
    roots += _roots((o.phase, o.value) for o in program.outputs if o.full)
    return ColumnWork(
        tuple(e if isinstance(e, int) else ASSUMED_ROWS for e in program.rows),
        program.columns,
        lanes.along_rows,
        lanes.inner,
        is_turned(program),
        all(isinstance(e, int) for e in program.rows[-1:]),
        lanes.width,
        min(sizes, default=max(1, read)),
        moving,
        still,
        stored,
        len(program.reductions),
        sum(bytes_of(reduction.dtype) for reduction in program.reductions),
        program.phases,
        merged.phases,
        _sweeps(merged),
        sum(LOADED if v.dtype == "float16" else 1.0 for v in loads if v.moves),
        held_between(sources, roots, weights),
        _online(merged, packed),
        kept,
        peak_live(sources, tuple(var for _, wanted in roots for var in wanted)),
    )


def _sweeps(merged: Program) -> int:
    """Passes over the columns when nothing is held."""
    return merged.phases + any(o.full and o.phase == merged.phases for o in merged.outputs)


def _roots(found: Iterable[tuple[int, Expr]]) -> list[tuple[int, tuple[Var, ...]]]:
    """Sweeps with the values that they end in."""
    return [(sweep, tuple(variables(expr))) for sweep, expr in found]


def _online(merged: Program, packed: frozenset[Var]) -> float:
    """Between the maxima of a group of steps and the sums that run along with them."""
    running = [r for r in merged.reductions if r.online is not None]
    if not running:
        return 0.0
    roots = _roots((0, r.body) for r in merged.reductions if r.online is None)
    roots += _roots((1, r.body) for r in running)
    sources, weights = _values(merged, packed)
    return held_between(sources, roots, weights)


def _packed(lanes: Lanes) -> frozenset[Var]:
    """Loads that stay two in a register until they are used."""
    return frozenset(
        var for var, v in lanes.loads.items() if v.dtype == "float16" and v.piece >= REGISTER
    )


def _values(
    program: Program, packed: frozenset[Var]
) -> tuple[dict[Var, tuple[Var, ...]], dict[Var, float | None]]:
    """What a point is computed from, and the registers of each; None for what is cheap."""
    sources: dict[Var, tuple[Var, ...]] = {}
    weights: dict[Var, float | None] = {}
    for item in (*program.tiles, *program.elements):
        if not isinstance(item, Element) or program.level(item.var) == Level.ELEMENT:
            sources[item.var] = ()
            weights[item.var] = PACKED if item.var in packed else _registers(item.dtype)
    for value in program.values:
        if program.level(value.var) == Level.ELEMENT:
            calls: list[Expr] = []
            tvm_ffi.structural_walk(value.body, [(Call, calls.append)])
            sources[value.var] = tuple(variables(value.body))
            weights[value.var] = _registers(dtype_of(value.var)) if calls else None
    return sources, weights


def _registers(dtype: str) -> float:
    return max(1.0, bytes_of(dtype) / REGISTER)
