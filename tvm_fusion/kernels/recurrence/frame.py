"""The shell of a kernel of a recurrence on a GPU, and the cell as it is computed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from ..gpu.frame import OPAQUE
from ..gpu.product_frame import lower
from ..program.expr import convert
from ..program.program import Extent
from .cell import step
from .form import Recurrence, index


@dataclass(slots=True, eq=False)
class Frame:
    """What the body of a kernel starts from.

    Attributes
    ----------
    buffers : flat views of the parameters, by name.
    steps, batch : in 64 bits.
    block, thread, rank : in 32 bits: in the grid (of clusters), in the block, in the cluster.
    func : the finished PrimFunc, once the frame is closed.
    """

    made: Recurrence
    buffers: dict[str, Var]
    steps: Expr
    batch: Expr
    block: Expr
    thread: Expr
    rank: Expr | None = None
    func: tirx.PrimFunc | None = None

    def time(self, s: Expr) -> Expr:
        """The place along the sequence of step `s` of those to be done."""
        return self.steps - index(1) - s if self.made.backward else s

    def inputs(self, time: Expr, row: Expr, unit: Expr) -> list[Expr]:
        """Where what each gate of a unit gets of the input lies."""
        made = self.made
        first = (time * self.batch + row) * index(made.columns) + unit
        return [first + index(gate * made.units) for gate in range(made.cell.gates)]

    def state(self, row: Expr, unit: Expr) -> Expr:
        """Where the state of a unit lies; that of a step is behind as many of whole batches."""
        return row * index(self.made.units) + unit

    def hidden(self, time: Expr, row: Expr, unit: Expr) -> Expr:
        """Where the hidden state of a unit after a step lies in `y`."""
        return self.state(time * self.batch + row, unit)


@contextmanager
def recurrence_kernel(
    made: Recurrence, grid: Extent, threads: int, cluster: int = 1
) -> Iterator[Frame]:
    """Opens a TIRx kernel with the parameters of a recurrence; `grid` counts clusters."""
    with IRBuilder() as builder, B.prim_func():
        T.func_name("main")
        shapes = made.shapes()
        args = {
            name: T.arg(name, T.buffer([index(n) for n in shape], made.dtype))
            for name, shape in shapes.items()
        }
        T.func_attr({"tirx.noalias": True})
        T.device_entry()
        blocks = grid * cluster
        block = T.cta_id([blocks if isinstance(blocks, int) else convert(blocks, "int32")])
        rank = None
        if cluster > 1:
            rank = T.cta_id_in_cluster([cluster])
            block = T.Bind(T.truncdiv(block, cluster))
        thread = T.thread_id([threads])
        buffers = {
            name: T.decl_buffer((_elements(shapes[name]),), made.dtype, data=arg.data)
            for name, arg in args.items()
        }
        frame = Frame(made, buffers, index(made.steps), index(made.batch), block, thread, rank)
        yield frame
    attrs = {"tirx.is_scheduled": True, "tirx.noalias": True, "op_pattern": OPAQUE}
    func = builder.get().with_attr({**attrs, "tvm_fusion.tirx": True})
    frame.func = func.without_attr("global_symbol")


def _elements(shape: Sequence[Extent]) -> Expr:
    total = index(1)
    for extent in shape:
        total = total * index(extent)
    return total


def cell_on_gpu(
    made: Recurrence,
    x: Sequence[Expr],
    product: Sequence[Expr],
    bias: Expr | None,
    hidden: Expr,
    memory: Expr | None,
) -> tuple[Expr, Expr | None]:
    """The next states, with functions in the forms that the device has fast ones of."""

    def bind(value: Expr) -> Expr:
        return T.Bind(lower(value, made.dtype != made.wide) if made.wide == "float32" else value)

    return step(made.cell, x, product, bias, hidden, memory, bind)
