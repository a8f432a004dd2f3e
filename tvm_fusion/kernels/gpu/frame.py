"""The shell of a generated kernel: parameters, launch shape, flat views, attributes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from ...errors import Unsupported
from ..program.expr import convert, dtype_of, variables
from ..program.program import Extent, Param, Program

GRID_LIMIT = 2**31 - 1
OPAQUE = 8
"""Pattern kind that keeps other passes from fusing a finished kernel into something else."""

MOST_REFERENCES = 16
"""References to loaded values that a bound value may hold, spelled out down to the loads.

TVM's passes put the values of bound variables into each other: a chain in which each value stands
twice in the next one would take them time exponential in its length. With 1024 references a kernel
of four outputs that select from each other was lowered in 4.8 s, with 128 in 3.5, with 8 in 0.2.
"""


@contextmanager
def then(condition: Expr) -> Iterator[None]:
    """Statements under a condition."""
    with T.If(condition), T.Then():
        yield


def held(value: Expr) -> Expr:
    """`value` in a register, as an array of one element, which no pass looks through.

    TVM's simplifier puts the value of a bound integer into every expression that uses it, and takes
    a minute where coordinates are towers of quotients and selections.
    """
    register = T.alloc_local((1,), dtype_of(value))
    T.buffer_store(register, value, [0])
    return register[0]


@dataclass(slots=True, eq=False)
class Frame:
    """What the body of a kernel starts from.

    Attributes
    ----------
    buffers : flat view of each parameter (None for numbers passed by value).
    numbers : the new variables of numbers passed by value, by the program's.
    block, thread, rank : index in the grid (of clusters), in the block, and in the cluster.
    scratch : global memory that is the launch's own.
    func : the finished PrimFunc, once the frame is closed.
    """

    buffers: list[Var | None] = field(default_factory=list)
    numbers: dict[Var, Expr] = field(default_factory=dict)
    block: Expr | None = None
    thread: Expr | None = None
    rank: Expr | None = None
    scratch: list[Var] = field(default_factory=list)
    func: tirx.PrimFunc | None = None


@contextmanager
def kernel_frame(
    program: Program,
    grid: Extent,
    threads: int,
    cluster: int = 1,
    scratch: Sequence[tuple[int, str]] = (),
    narrow: bool = False,
) -> Iterator[Frame]:
    """Opens a TIRx kernel with the parameters of `program`; `grid` counts clusters. `scratch` says
    how many elements of which type. With `narrow` the number of elements of parameters of symbolic
    size is an int32.
    """
    if isinstance(grid, int) and grid * cluster > GRID_LIMIT:
        raise Unsupported(f"a grid of {grid * cluster} blocks")
    frame = Frame()
    blocks = grid * cluster
    with IRBuilder() as builder, B.prim_func():
        T.func_name("main")
        shapes = [n for p in program.params for n in p.shape or () if not isinstance(n, int)]
        sizes = set(variables(*shapes))
        args = [_declare(param, frame, sizes) for param in program.params]
        T.func_attr({"tirx.noalias": True})
        for count, dtype in scratch:
            frame.scratch.append(T.alloc_buffer((count,), dtype, scope="global"))
        T.device_entry()
        frame.block = T.cta_id([blocks if isinstance(blocks, int) else convert(blocks, "int32")])
        if cluster > 1:
            frame.rank = T.cta_id_in_cluster([cluster])
            frame.block = T.Bind(T.truncdiv(frame.block, cluster))
        frame.thread = T.thread_id([threads])
        for param, arg in zip(program.params, args, strict=True):
            frame.buffers.append(None if param.shape is None else _flat(param, arg, narrow))
        yield frame
    frame.func = _finish(builder.get(), program)


def _declare(param: Param, frame: Frame, sizes: Collection[Var]) -> Var:
    """The parameter of a new function; a number that is one of the `sizes` of tensors, such as n
    where all have n // 2 rows, is the variable that is in their shapes.
    """
    name = re.sub(r"\W|^(?=\d)", "_", param.name)  # models have tensors like "gpu_0/data"
    if param.shape is not None:
        return T.arg(name, T.buffer(param.shape, param.dtype))
    arg = T.arg(name, param.var if param.var in sizes else getattr(T, param.dtype)())
    frame.numbers[param.var] = arg
    return arg


def _flat(param: Param, arg: Var, narrow: bool) -> Var:
    elements = param.elements
    if narrow and not isinstance(elements, int):
        elements = convert(elements, "int32")
    return T.decl_buffer((elements,), param.dtype, data=arg.data)


def _finish(func: tirx.PrimFunc, program: Program) -> tirx.PrimFunc:
    func = func.with_attr(
        {
            "tirx.is_scheduled": True,
            "tirx.noalias": True,
            "op_pattern": OPAQUE,
            "tvm_fusion.tirx": True,
        }
    )
    return func if program.name is None else func.with_attr("global_symbol", program.name)


def launch_bounds(min_blocks: int) -> contextlib.AbstractContextManager:
    """Demand on ptxas, for so many blocks a multiprocessor; none for 0. In the device region, since
    on the function it is lost in lowering.
    """
    if not min_blocks:
        return contextlib.nullcontext()
    return T.attr({"tirx.launch_bounds_min_blocks_per_sm": min_blocks})
