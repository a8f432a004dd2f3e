"""Schedules that MetaSchedule evolves: what is proposed, what it computes, what is learned."""

import json
import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax import op

from tvm_fusion.errors import Unsupported
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.runtime.build.lowering import SCHEDULED_ATTR
from tvm_fusion.tuning.database import trace_text
from tvm_fusion.tuning.search import replay
from tvm_fusion.tuning.search.space_blocks import Blocks, inline, schedule_of
from tvm_fusion.tuning.search.spaces import design

from ..support.kernel_cases import assert_close, fuse, softmax_of
from ..support.stock_cuda_on_cpu import lowered_together, run_launches_on_cpu
from ..support.tune_functions import (
    CASES,
    CUDA,
    LLVM,
    arrays,
    assert_right,
    evolving,
    fused,
    run,
    softmax,
)


def synthetic_us(text: str) -> float:
    """A cost with one best decision for each choice: the second of a list, 8 iterations inside."""
    _, decisions = json.loads(text)
    far = [abs(math.log2(d[-1]) - 3) if isinstance(d, list) else abs(d - 1) for _, d in decisions]
    return 10.0 * (1 + sum(far))


# ---- what is proposed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("space", ["own", "stock"])
@pytest.mark.parametrize("name", CASES)
def test_schedules_on_a_cpu_compute_what_the_function_computes(name, space):
    func = fused(name)
    search = evolving(func, LLVM, space=space, seed=3, trials=4, batch=4)
    texts = search.ask(8)
    assert 1 <= len(texts) <= 4
    assert len(set(texts)) == len(texts)
    assert search.ask(8) == []
    values = arrays(func)
    for text in texts[-2:]:
        assert replay.canonical(text) == text
        kernel = replay.scheduled(func, text)
        assert bool(kernel.attrs[SCHEDULED_ATTR])
        assert "global_symbol" not in kernel.attrs
        assert_right(name, run(kernel, values), values)


def test_evolution_finds_better_schedules_than_the_first_batch():
    search = evolving(fused("linear"), LLVM, seed=1, trials=200, batch=8)
    batches = []
    for _ in range(5):
        texts = search.ask(8)
        costs = [synthetic_us(text) for text in texts]
        search.tell(list(zip(texts, costs, strict=True)))
        batches.append((texts, costs))
    every = [text for texts, _ in batches for text in texts]
    assert len(every) == len(set(every)) == 40
    hashes = {tvm_ffi.structural_hash(replay.scheduled(fused("linear"), t)) for t in every}
    assert len(hashes) == 40
    assert min(batches[-1][1]) < min(batches[0][1])
    assert np.mean(batches[-1][1]) < np.mean(batches[0][1])
    best = min(every, key=synthetic_us)
    worst = max(every, key=synthetic_us)
    assert search.predicted(best) < search.predicted(worst)


def test_a_seed_decides_what_is_proposed():
    def texts(seed):
        search = evolving(fused("chain"), LLVM, seed=seed, trials=20, batch=4)
        first = search.ask(5)
        search.tell([(text, synthetic_us(text)) for text in first])
        return first + search.ask(5)

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_a_search_on_two_threads_proposes_schedules_that_differ():
    func = fused("linear")
    search = evolving(func, LLVM, space="stock", trials=12, batch=4, threads=2)
    first = search.ask(6)
    search.tell([(text, synthetic_us(text)) for text in first])
    texts = first + search.ask(6)
    assert search._context.num_threads == 2
    assert evolving(func, LLVM, trials=1, batch=1, threads=2)._context.num_threads == 1
    assert len(set(texts)) == 12
    scheduled = [replay.scheduled(func, text) for text in texts]
    assert len({tvm_ffi.structural_hash(f) for f in scheduled}) == 12


def test_starting_points_come_first_and_what_is_known_never():
    func = fused("chain")
    all_of_it = evolving(func, LLVM, trials=12, batch=4).ask(12)
    slow, fast, *known = all_of_it
    seeds = [(slow, 9.0), (fast, 1.0), (known[0], 5.0), ("[]", 2.0)]
    spaced = json.dumps(json.loads(known[0]))
    told = [(spaced, 4.0), (known[1], None), *((text, 7.0) for text in known[2:])]
    search = evolving(func, LLVM, seeds=seeds, known=told, trials=12, batch=4)
    texts = search.ask(6)
    assert texts[:2] == [fast, slow]
    assert len(texts) == 6
    assert not set(texts) & set(known)


def test_what_tvms_post_processors_finished_is_no_parent_in_own_spaces():
    """Own spaces would change a choice, and leave out what was done after it."""
    func = fused("softmax")
    of_stock = evolving(func, LLVM, space="stock", trials=8, batch=4).ask(8)
    of_own = evolving(func, LLVM, trials=4, batch=4).ask(4)
    known = [(text, 1.0) for text in (*of_stock, *of_own)]
    parents = {}
    for space in ("own", "stock"):
        search = evolving(func, LLVM, space=space, known=known, trials=16, batch=4)
        records = search._database.get_all_tuning_records()
        parents[space] = {trace_text(record.trace) for record in records}
        assert search.predicted(of_stock[0]) == pytest.approx(1.0, rel=0.2)  # all teach, though
    assert parents == {"own": set(of_own), "stock": {*of_own, *of_stock}}


def test_failures_and_nonsense_times_teach_nothing():
    search = evolving(fused("chain"), LLVM, trials=8, batch=1)
    texts = search.ask(3)
    before = search.predicted(texts[0])
    search.tell([(texts[0], None), (texts[1], math.inf), (texts[2], math.nan)])
    assert search.predicted(texts[0]) == before
    assert math.isfinite(before)
    assert before > 0
    assert search.predicted("no trace") is None
    search.tell([(texts[0], 20.0)])
    assert search.predicted(texts[0]) == pytest.approx(20.0, rel=0.2)


def test_functions_that_no_space_holds_are_refused():
    unscheduled = fused("chain")
    bound = replay.scheduled(unscheduled, evolving(unscheduled, CUDA, trials=1, batch=1).ask(1)[0])
    with pytest.raises(Unsupported, match="scheduled already"):
        evolving(bound, CUDA, trials=1, batch=1)
    with pytest.raises(Unsupported, match="symbolic"):
        evolving(symbolic_softmax(), LLVM, trials=1, batch=1)


# ---- own spaces


def symbolic_softmax() -> tirx.PrimFunc:
    return fuse(softmax, ((tirx.Var("n", "int64"), 96), "float32"))


def test_own_spaces_take_symbolic_extents():
    func = symbolic_softmax()
    values = arrays(func, n=19)
    found = design(func, LLVM, "own", 5).schedules
    assert len(found) >= 2
    for sch in found:
        got = run(replay.scheduled(func, trace_text(sch.trace)), values)
        assert_close(got, softmax_of(values[0].astype("float64")), "float32")


@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["llvm", "cuda"])
def test_own_spaces_leave_the_function_unchanged(target):
    func = fuse(softmax, ((8, 32), "float32"))
    before = func.script()
    design(func, target, "own", 1)
    assert func.script() == before


def test_light_blocks_are_inlined_and_outputs_stay():
    blocks = Blocks(schedule_of(fused("linear")))
    inline(blocks)
    assert len(blocks.named()) == 2
    assert blocks.is_output(blocks.all()[-1])


def two_sums(bb, x):
    return op.sum(bb.emit(op.exp(x)), axis=[1])


CUDA_CASES = {
    "softmax": (softmax, (33, 60), softmax_of),
    "sum": (two_sums, (21, 9, 10), lambda x: np.exp(x).sum(1)),
    "turn": (lambda bb, x: op.permute_dims(x, [1, 0]), (33, 20), np.transpose),
    "all": (lambda bb, x: op.sum(x), (30, 11), np.sum),
}


@pytest.mark.parametrize("name", CUDA_CASES)
def test_own_cuda_spaces_compute_what_the_function_computes(name):
    emit, shape, reference = CUDA_CASES[name]
    func = fuse(emit, (shape, "float32"))
    spaces = design(func, CUDA, "own", 2).schedules
    texts = evolving(func, CUDA, seed=2, trials=3, batch=3).ask(3)
    assert len(texts) == 3
    assert len(spaces) >= 1
    for kernels in lowered_together([replay.scheduled(func, text) for text in texts]):
        values = arrays(func)
        run_launches_on_cpu(kernels, values)
        np.testing.assert_allclose(
            values[-1], reference(values[0].astype("float64")), rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("space", ["own", "stock"])
def test_cuda_schedules_compile_for_the_device(space, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    func = fuse(softmax, ((64, 256), "float32"))
    (text,) = evolving(func, CUDA, space=space, seed=1, trials=1, batch=1).ask(1)
    kernel = replay.scheduled(func, text).with_attr("global_symbol", "kernel")
    _, resources = build_functions(tvm.IRModule({"kernel": kernel}), CUDA)
    assert resources
    assert all(r.registers > 0 for r in resources)
