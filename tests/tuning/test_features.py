"""What the cost model of evolved schedules sees, and how their choices are changed."""

import math

import numpy as np
from tvm import tirx
from tvm.relax import op
from tvm.s_tir.schedule import Trace

from tvm_fusion.tuning.search import replay
from tvm_fusion.tuning.search.nest_walk import launches_of
from tvm_fusion.tuning.search.schedule_features import COLUMNS, TVM_COLUMNS, columns
from tvm_fusion.tuning.search.space_blocks import Blocks, schedule_of
from tvm_fusion.tuning.search.spaces import MutateChoice, prime_factors

from ..support.kernel_cases import fuse
from ..support.tune_functions import CPU, H200, LLVM, evolving, fused


def test_features_have_this_packages_columns_beside_tvms():
    search = evolving(fused("softmax"), LLVM, trials=1, batch=1)
    (text,) = search.ask(1)
    (matrix,) = search._extractor.matrices(search._context, [search._candidates[text]])
    assert matrix.shape[1] == TVM_COLUMNS + len(COLUMNS)
    assert np.isfinite(matrix).all()
    own = columns(replay.scheduled(fused("softmax"), text), CPU)
    assert (matrix[:, TVM_COLUMNS:] == own).all()


def bound(func: tirx.PrimFunc, lanes: int, turned: bool) -> tirx.PrimFunc:
    sch = schedule_of(func)
    (block,) = Blocks(sch).all()
    loops = list(sch.get_loops(block))
    grid, threads, vector = sch.split(
        sch.fuse(*(reversed_loops(sch, loops) if turned else loops)), [None, 32, lanes]
    )
    sch.bind(grid, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")
    sch.vectorize(vector)
    return sch.mod["main"]


def reversed_loops(sch, loops):
    sch.reorder(*reversed(loops))
    return list(reversed(loops))


def test_columns_tell_vectors_and_strides_apart():
    func = fuse(lambda bb, x: op.exp(x), ((64, 128), "float32"))
    narrow, wide, turned = (
        dict(zip(COLUMNS, columns(bound(func, lanes, turned), H200), strict=True))
        for lanes, turned in ((1, False), (4, False), (1, True))
    )
    assert narrow["read_run"] == wide["read_vector"] == turned["read_apart"] > 0
    assert narrow["read_vector"] == wide["read_run"] == turned["read_run"] == 0
    assert wide["vector"] > narrow["vector"]
    assert turned["touched"] > narrow["touched"] == wide["touched"]
    assert turned["microseconds"] > wide["microseconds"]
    (launch,) = launches_of(bound(func, 4, False))
    assert (launch.grid, launch.threads, launch.vector) == (64, 32, 4)


def test_operands_of_tensor_cores_are_held_by_threads():
    found = []
    for scope in ("local", "wmma.matrix_a", "m16n8k8.matrixA"):
        sch = schedule_of(fuse(lambda bb, x: op.exp(x), ((64, 128), "float32")))
        (block,) = Blocks(sch).all()
        sch.cache_read(block, 0, scope)
        assert scope in str(sch.mod)
        found.append(columns(sch.mod["main"], H200))
    assert dict(zip(COLUMNS, found[0], strict=True))["local_traffic"] > 0
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_a_mutation_changes_one_choice():
    func = fused("linear")
    (text,) = evolving(func, LLVM, seed=2, trials=1, batch=1).ask(1)
    trace: Trace = replay.schedule(func, text).trace
    mutator = MutateChoice(1)
    changed = set()
    for _ in range(30):
        new = mutator.apply(trace)
        different = [
            i
            for i, inst in enumerate(new.insts)
            if new.get_decision(inst) is not None
            and str(new.get_decision(inst)) != str(trace.get_decision(inst))
        ]
        assert len(different) == 1
        decision = new.get_decision(new.insts[different[0]])
        if not isinstance(decision, int):
            old = trace.get_decision(trace.insts[different[0]])
            assert math.prod(map(int, decision)) == math.prod(map(int, old))
        changed.update(different)
    assert len(changed) > 2
    assert prime_factors(97) == [97]
    assert prime_factors(1) == []


def test_a_trace_without_choices_is_not_mutated():
    sch = schedule_of(fuse(lambda bb, x: op.exp(x), ((4,), "float32")))
    assert MutateChoice(1).apply(sch.trace) is None
