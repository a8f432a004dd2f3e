"""The blocks of a PrimFunc, and what each of their three readers refuses of them."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import tirx as T

from tvm_fusion.errors import Unsupported
from tvm_fusion.ir.access import AxisKind, Reduction
from tvm_fusion.ir.blocks import BlockDef, Stray, read_blocks
from tvm_fusion.ir.reader import read_prim_func
from tvm_fusion.kernels.cpu.stages.reader import read_graph
from tvm_fusion.kernels.program.definitions import read_definitions

HEAD = """@T.prim_func(s_tir=True)
def func(A: T.Buffer((8,), "float32"), I: T.Buffer((8,), "int32"), X: T.Buffer((8, 4), "float32"),
         B: T.Buffer((8,), "float32"), n: T.int32):
"""
LOOP = """
for i in range(8):
    with T.sblock("b"):
        vi = T.axis.spatial(8, i)
"""
SUM = """
for i, k in T.grid(8, 4):
    with T.sblock("b"):
        vi, vk = T.axis.remap("SR", [i, k])
        with T.init():
            {init}
        {update}
"""


def function(body: str):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return tvm.script.from_source(HEAD + lines + "\n", {"T": T})


def looped(*statements: str, loop: str = LOOP) -> str:
    return loop + "\n".join(f"        {s}" for s in statements)


def indented(body: str) -> str:
    return "\n".join(f"    {line}" for line in body.splitlines())


COPY = looped("B[vi] = A[vi]")

REFUSALS = {
    "a condition around": (
        "if n > 0:" + indented(COPY),
        "a IfThenElse outside any block",
        "block root holds a IfThenElse",
        "a statement of type IfThenElse in block root",
    ),
    "a condition within": (
        looped("if n > 0:", "    B[vi] = A[vi]"),
        "a IfThenElse inside block b",
        "block b holds a IfThenElse",
        "a statement of type IfThenElse in block b",
    ),
    "a store outside": (
        "A[0] = T.float32(1)" + COPY,
        "a BufferStore outside any block",
        "a BufferStore stands outside of blocks",
        "a statement of type BufferStore outside of a block",
    ),
    "only a store outside": (
        "for i in range(8):\n    B[i] = A[i]",
        "a BufferStore outside any block",
        "a BufferStore stands outside of blocks",
        "a statement of type BufferStore outside of a block",
    ),
    "memory outside": (
        'C = T.alloc_buffer((8,), "float32")' + looped("C[vi] = A[vi]"),
        "a AllocBuffer outside any block",
        None,
        "a statement of type AllocBuffer outside of a block",
    ),
    "a loop within": (
        looped("for k in range(4):", "    B[vi] = X[vi, k]"),
        "a For inside block b",
        "block b holds a For",
        "a statement of type BufferStore outside of a block",
    ),
    "a loop in a block without axes": (
        'with T.sblock("b"):\n    for i in range(8):\n        B[i] = A[i]',
        "a For inside block b",
        "block b holds a For",
        "a statement of type BufferStore outside of a block",
    ),
    "stores in the root": (
        'with T.sblock("root"):\n    B[0] = A[0]',
        "a BufferStore outside any block",
        "B is written at 0",
        "block root stores at [0]",
    ),
    "a block that holds a block": (
        'with T.sblock("outer"):' + indented(COPY),
        "a For inside block outer",
        None,
        None,
    ),
    "a predicate": (
        looped("T.where(i < 7)", "B[vi] = A[vi]"),
        None,
        "block b has a predicate",
        "block b has a predicate or matched buffers",
    ),
    "a matched region": (
        looped('C = T.match_buffer(A[vi], (), "float32")', "B[vi] = C[()]"),
        None,
        "block b matches buffer regions",
        "block b has a predicate or matched buffers",
    ),
    "an opaque axis": (
        COPY.replace("spatial", "opaque"),
        "block b has an opaque axis",
        "block b has opaque axes",
        "axis vi of block b",
    ),
    "a loop that is split": (
        COPY.replace("i in range(8)", "i, j in T.grid(2, 4)").replace("8, i)", "8, i * 4 + j)"),
        None,
        "block b is already scheduled",
        "axis vi is bound to i * 4 + j",
    ),
    "a loop of threads": (
        COPY.replace("range(8)", 'T.thread_binding(8, thread="threadIdx.x")'),
        None,
        None,
        "loop i is scheduled already",
    ),
    "an index by a let": (
        looped("x: T.let = vi", "B[x] = A[vi]"),
        None,
        "B is written at x",
        "block b stores at [x]",
    ),
    "a let behind a store": (
        looped("B[vi] = A[vi]", "x: T.let = I[vi] + 1", "I[vi] = x"),
        None,
        None,
        "a statement of type Bind in block b",
    ),
    "a loop in an initial value": (
        SUM.format(
            init="for j in range(1):\n                B[vi] = T.float32(0)",
            update="B[vi] = B[vi] + X[vi, vk]",
        ),
        None,
        "block b holds a For",
        "a statement of type For in block b",
    ),
    "a sum that reads itself": (
        SUM.format(init="B[vi] = T.float32(0)", update="B[vi] = B[vi] + X[vi, vk] * B[vi]"),
        None,
        "reduction B reads itself",
        None,
    ),
}


def refusal(read, *args) -> str | None:
    try:
        read(*args)
    except Unsupported as why:
        return str(why)
    return None


@pytest.mark.parametrize("name", REFUSALS)
def test_each_reader_refuses_in_its_words(name):
    body, planner, cuda, cpu = REFUSALS[name]
    func = function(body)
    assert read_prim_func(func).refusal == planner
    assert refusal(read_definitions, func) == cuda
    assert refusal(read_graph, func, False) == cpu


def test_a_block_is_read_with_its_lets_in_their_places():
    func = function(
        SUM.format(
            init="z: T.let = T.float32(0)\n            B[vi] = z",
            update="x: T.let = X[vi, vk]\n        y: T.let = x * x\n        B[vi] = B[vi] + y",
        )
    )
    (block,) = read_blocks(func, opens=lambda block: block.name == "root")
    assert (block.name, [axis.kind for axis in block.axes], len(block.loops)) == (
        "b",
        [AxisKind.SPATIAL, AxisKind.REDUCE],
        2,
    )
    assert str(block.body.stores[0].value) == "B[vi] + X[vi, vk] * X[vi, vk]"
    assert str(block.initial.stores[0].value) == "T.float32(0.0)"
    assert not block.body.others
    assert not block.inner


def test_a_block_that_opens_stands_for_what_is_in_it():
    func = function("A[0] = T.float32(1)" + COPY)
    (root,) = read_blocks(func, opens=lambda block: False)
    stray, block = read_blocks(func, opens=lambda block: block.name == "root")
    assert isinstance(stray, Stray)
    assert isinstance(block, BlockDef)
    assert [type(part) for part in root.inner] == [Stray, BlockDef]


def test_an_initial_value_behind_a_let_is_that_value():
    body = SUM.format(
        init="z: T.let = T.float32(2)\n            B[vi] = z", update="B[vi] = B[vi] + X[vi, vk]"
    )
    (stage,) = read_graph(function(body), False).stages
    assert str(*stage.initial) == "T.float32(2.0)"


def test_an_index_behind_a_let_is_read_and_a_sum_behind_one_is_a_sum():
    (gather,) = read_prim_func(function(looped("x: T.let = I[vi]", "B[vi] = A[x]"))).blocks
    assert [access.tensor for access in gather.reads] == [1, 0]
    body = SUM.format(
        init="B[vi] = T.float32(0)", update="x: T.let = B[vi] + X[vi, vk]\n        B[vi] = x"
    )
    (total,) = read_prim_func(function(body)).blocks
    assert total.reduction is Reduction.SUM
