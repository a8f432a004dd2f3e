"""The form in which a recurrence stands in a module: a PrimFunc of plain loops, that any build can
compute, and from which kernels are written (`problem`).

    for b in parallel(batch):
        hidden = h0[b]; memory = c0[b]
        for s in range(steps):
            t = s                                     or steps - 1 - s
            product[g] = sum over k of w[g, k] * hidden[k]
            hidden[j], memory[j] = cell(x[t, b, gates of j], product[gates of j], ...)
            y[t, b, j] = hidden[j]
        h[b] = hidden; c[b] = memory

Sums, functions and the memory are of float32 (of float64 where data are); the hidden state is
rounded to the type of the data, as what is given of each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..program.expr import constant, convert
from ..program.program import Extent
from .cell import Cell, step


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """One layer in one direction.

    Parameters of its function, in order: `x` (steps, batch, gates * units), what the gates get of
    the input; `w` (gates * units, units), the recurrent weights; `bias` (units) of cells that have
    one; the states before the first step (batch, units), one or two; then what is
    computed: the hidden states `y` (steps, batch, units), and the last of each state.

    Attributes
    ----------
    cell : Cell
    steps, batch : int, or Expr where symbolic
    units : int
    dtype : of all parameters; a type of floats.
    backward : the last step is the first.
    """

    cell: Cell
    steps: Extent
    batch: Extent
    units: int
    dtype: str
    backward: bool

    @property
    def wide(self) -> str:
        """The type in which is computed."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def columns(self) -> int:
        """Gates of all units."""
        return self.cell.gates * self.units

    @property
    def states(self) -> int:
        return 2 if self.cell.has_memory else 1

    def shapes(self) -> dict[str, tuple[Extent, ...]]:
        """Shapes of the parameters by name, in order."""
        state, names = (self.batch, self.units), ("h", "c")[: self.states]
        return {
            "x": (self.steps, self.batch, self.columns),
            "w": (self.columns, self.units),
            **({"bias": (self.units,)} if self.cell.has_bias else {}),
            **{f"{name}0": state for name in names},
            "y": (self.steps, self.batch, self.units),
            **dict.fromkeys(names, state),
        }

    @property
    def results(self) -> int:
        """How many of the parameters are written."""
        return 1 + self.states


def recurrence_form(made: Recurrence) -> tirx.PrimFunc:
    """The function of plain loops."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("recurrence")
        T.func_attr({"tirx.noalias": True})
        given = {name: T.arg(name, _buffer(s, made.dtype)) for name, s in made.shapes().items()}
        with T.parallel(index(0), index(made.batch)) as b:
            _sequence(made, given, b)
    return builder.get().without_attr("global_symbol")


def index(value: Extent) -> Expr:
    """A size or an index, in 64 bits."""
    return constant(value, "int64") if isinstance(value, int) else convert(value, "int64")


def _buffer(shape: tuple[Extent, ...], dtype: str) -> Var:
    return T.buffer([index(n) for n in shape], dtype)


def _own(size: int, dtype: str) -> Var:
    return T.alloc_buffer([size], dtype, scope="local")


def _product(w: Var, g: Expr, hidden: Var, product: Var, made: Recurrence) -> None:
    """One gate's product, by several sums side by side, which LLVM has in a vector."""
    lanes = next(n for n in (8, 4, 2, 1) if made.units % n == 0)
    parts = _own(lanes, made.wide)
    with T.serial(0, index(lanes)) as lane:
        T.buffer_store(parts, constant(0, made.wide), [lane])
    with T.serial(0, index(made.units // lanes)) as k, T.serial(0, index(lanes)) as lane:
        at = k * index(lanes) + lane
        term = convert(w[g, at], made.wide) * convert(hidden[at], made.wide)
        T.buffer_store(parts, parts[lane] + term, [lane])
    T.buffer_store(product, constant(0, made.wide), [g])
    with T.serial(0, index(lanes)) as lane:
        T.buffer_store(product, product[g] + parts[lane], [g])


def _sequence(made: Recurrence, given: dict[str, Var], b: Expr) -> None:
    """All steps of one sequence of the batch."""
    dtype, wide, units = made.dtype, made.wide, made.units
    hidden, product = _own(units, dtype), _own(made.columns, wide)
    memory = _own(units, wide) if made.cell.has_memory else None
    with T.serial(0, index(units)) as j:
        T.buffer_store(hidden, given["h0"][b, j], [j])
        if memory is not None:
            T.buffer_store(memory, convert(given["c0"][b, j], wide), [j])
    with T.serial(0, index(made.steps)) as s:
        t = index(made.steps) - index(1) - s if made.backward else s
        with T.serial(0, index(made.columns)) as g:
            _product(given["w"], g, hidden, product, made)
        with T.serial(0, index(units)) as j:
            places = [j + index(n * units) for n in range(made.cell.gates)]
            found, kept = step(
                made.cell,
                [convert(given["x"][t, b, place], wide) for place in places],
                [product[place] for place in places],
                convert(given["bias"][j], wide) if made.cell.has_bias else None,
                convert(hidden[j], wide),
                None if memory is None else memory[j],
            )
            T.buffer_store(hidden, convert(found, dtype), [j])
            T.buffer_store(given["y"], hidden[j], [t, b, j])
            if memory is not None:
                T.buffer_store(memory, kept, [j])
    with T.serial(0, index(units)) as j:
        T.buffer_store(given["h"], hidden[j], [b, j])
        if memory is not None:
            T.buffer_store(given["c"], convert(memory[j], dtype), [b, j])
