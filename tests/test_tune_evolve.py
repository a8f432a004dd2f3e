"""Schedules that MetaSchedule evolves: what is proposed, what it computes, what is learned."""

import json
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax import op
from tvm.s_tir.schedule import Trace

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.job import Job
from tvm_fusion.runtime.build import build_functions
from tvm_fusion.runtime.pipeline import SCHEDULED_ATTR
from tvm_fusion.transform.materialize import materialize
from tvm_fusion.tuning import replay
from tvm_fusion.tuning.database import trace_text
from tvm_fusion.tuning.evolve import Evolving
from tvm_fusion.tuning.features import COLUMNS, TVM_COLUMNS, columns
from tvm_fusion.tuning.mutate import MutateChoice, prime_factors
from tvm_fusion.tuning.nest_walk import launches_of
from tvm_fusion.tuning.space_blocks import Blocks, inline, schedule_of
from tvm_fusion.tuning.spaces import design

from .graphs import module
from .kernel_cases import assert_close, fuse, softmax_of
from .stock_cuda_on_cpu import run_launches_on_cpu

CPU, H200 = load_profile("llvm"), load_profile("nvidia_h200")
LLVM, CUDA = CPU.to_target(), H200.to_target()


def chain(bb, x, y):
    return op.tanh(bb.emit(op.multiply(bb.emit(op.add(x, y)), x)))


def softmax(bb, x):
    return op.nn.softmax(x, -1)


def linear(bb, x, w, b):
    return op.nn.relu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))


def layer_norm(bb, x, g, b):
    return op.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-5)


def layer_norm_of(x, g, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b


CASES: dict[str, tuple[Callable, tuple, Callable]] = {
    "chain": (chain, ((37, 123), (37, 123)), lambda x, y: np.tanh((x + y) * x)),
    "softmax": (softmax, ((33, 96),), softmax_of),
    "linear": (linear, ((24, 40), (40, 36), (36,)), lambda x, w, b: np.maximum(x @ w + b, 0)),
    "layer_norm": (layer_norm, ((33, 96), (96,), (96,)), layer_norm_of),
}


@cache
def fused(name: str) -> tirx.PrimFunc:
    """The one PrimFunc that this package makes of a model for a CPU."""
    emit, shapes, _ = CASES[name]
    mod = module(emit, *((shape, "float32") for shape in shapes))
    job = Job.from_module(mod, LLVM, CPU, load_policy(None))
    made = materialize(job.low, job.graph, job.plan)
    (name,) = made.groups
    return made.mod[name].without_attr("global_symbol")


def arrays(func: tirx.PrimFunc, n: int = 1) -> list[np.ndarray]:
    """Inputs and a poisoned output; `n` for symbolic extents."""
    rng = np.random.default_rng(0)
    shapes = [
        [e.value if isinstance(e, tirx.IntImm) else n for e in p.ty.shape] for p in func.params
    ]
    *inputs, output = (rng.standard_normal(shape).astype("float32") for shape in shapes)
    return [*inputs, np.full_like(output, np.nan)]


def run(func: tirx.PrimFunc, values: list[np.ndarray]) -> np.ndarray:
    library, _ = build_functions(
        tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}), LLVM
    )
    tensors = [tvm.runtime.tensor(v) for v in values]
    library["kernel"](*tensors)
    return tensors[-1].numpy()


def assert_right(name: str, got: np.ndarray, values: list[np.ndarray]) -> None:
    reference = CASES[name][2](*(v.astype("float64") for v in values[:-1]))
    assert_close(got, reference, "float32")


def synthetic_us(text: str) -> float:
    """A cost with one best decision for each choice: the second of a list, 8 iterations inside."""
    _, decisions = json.loads(text)
    far = [abs(math.log2(d[-1]) - 3) if isinstance(d, list) else abs(d - 1) for _, d in decisions]
    return 10.0 * (1 + sum(far))


def evolving(func: tirx.PrimFunc, target: tvm.target.Target, **options) -> Evolving:
    """A search that looks at few candidates."""
    return Evolving(func, target, population=12, **options)


# ---- what is proposed


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
    for text in texts:
        values = arrays(func)
        run_launches_on_cpu(replay.scheduled(func, text), values)
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


# ---- traces as texts


@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["llvm", "cuda"])
@pytest.mark.parametrize("space", ["own", "stock"])
def test_a_replayed_text_is_the_very_candidate(space, target):
    func = fused("softmax")
    search = evolving(func, target, space=space, seed=4, trials=6, batch=4)
    for text in search.ask(6):
        mod = search._candidates[text].sch.mod
        assert tvm_ffi.structural_equal(replay.schedule(func, text).mod, mod)
        assert trace_text(replay.schedule(func, text).trace) == text


def test_a_replayed_function_keeps_its_name_and_attributes():
    func = fused("chain").with_attr({"global_symbol": "kernel", "of_somebody": 7})
    (text,) = evolving(func, LLVM, trials=1, batch=1).ask(1)
    kernel = replay.scheduled(func, text)
    assert kernel.attrs["global_symbol"] == "kernel"
    assert int(kernel.attrs["of_somebody"]) == 7


GET = ["GetSBlock", [], ["root", "main"], ["b0"]]
BROKEN = {
    "no JSON": "[[",
    "a number that is none": "[[],[NaN]]",
    "no lists": "{}",
    "three lists": "[[],[],[]]",
    "no instruction": "[[3],[]]",
    "unknown": '[[["Nonsense",[],[],[]]],[]]',
    "unsafe": '[[["UnsafeSetDType",[],[0,"float32"],[]]],[]]',
    "undefined": '[[["GetLoops",["b7"],[],[]]],[]]',
    "twice": json.dumps([[GET, GET], []]),
    "an attribute": '[[["GetSBlock",[],[null],["b0"]]],[]]',
    "an input": '[[["GetLoops",[null],[],[]]],[]]',
    "far decision": json.dumps([[GET], [[900, 1]]]),
    "no decision": '[[["SampleCategorical",[],[[1,2],[0.5,0.5]],["v0"]]],[]]',
    "a text": json.dumps([[GET], [["0", 1]]]),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_broken_traces_are_refused_before_tvm_sees_them(text):
    with pytest.raises(Unsupported) as refused:
        replay.parse(text)
    assert "does not fit" not in str(refused.value)


def test_a_trace_of_another_function_is_refused():
    (text,) = evolving(fused("linear"), LLVM, trials=1, batch=1).ask(1)
    with pytest.raises(Unsupported, match="does not fit this function"):
        replay.scheduled(fused("softmax"), text)


# ---- features and mutation


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
