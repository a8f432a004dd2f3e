"""The probe: what ptxas says of kernels, cached, in parallel, with failures told."""

import dataclasses

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.relax import op

from tests.support.cuda_on_cpu import run_cuda_on_cpu
from tests.support.graphs import module, plan_of
from tests.support.runtime_cases import without_compilers
from tvm_fusion import explain
from tvm_fusion.config import load_policy
from tvm_fusion.cost.probe import Candidate, ProbeFailure, candidates_of, group_key, probe
from tvm_fusion.cost.traffic import Resources
from tvm_fusion.errors import BuildError, TargetError
from tvm_fusion.plan.decide.probing import guessed, in_doubt, probed_plan
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.report.text import render
from tvm_fusion.runtime.build.cuda_compiler import Compiler
from tvm_fusion.runtime.build.resources import code_bytes
from tvm_fusion.runtime.timing.launch_kernels import LaunchSpec, LaunchWriter
from tvm_fusion.transform.apply.write_kernels import call_deep

from ..benchmarks.plans.forced import forced

F16 = "float16"
BIG = ((4096, 4096), F16)
POLICY = load_policy(None)
needs_nvcc = pytest.mark.usefixtures("nvcc")


def two_kernels(bb, x):
    y = bb.emit(op.tanh(bb.emit(op.add(x, x))))
    return bb.emit(op.nn.softmax(y, axis=-1)), bb.emit(op.nn.softmax(y, axis=0))


def chain(length: int):
    def emit(bb, x):
        for i in range(length):
            x = bb.emit(op.tanh(x) if i % 2 else op.exp(x))
        return x

    return emit


def one_group(planned, kernel_class: str = "pointwise") -> Candidate:
    graph = planned.graph
    outputs = tuple(t.id for t in graph.tensors if t.is_output)
    return Candidate(GroupView(graph, tuple(o.id for o in graph.ops), outputs), kernel_class)


def probed(planned, groups, **more):
    return probe(planned.low, planned.graph, groups, planned.hw, POLICY, **more)


@pytest.fixture(scope="module")
def softmaxes():
    return plan_of(module(two_kernels, BIG))


@needs_nvcc
def test_registers_shared_memory_threads_and_code_of_kernels_are_found(softmaxes):
    groups = candidates_of(softmaxes.graph, softmaxes.plan)
    found = probed(softmaxes, groups)
    assert set(found) == {g.key for g in groups}
    for used in found.values():
        assert 16 <= used.registers_per_thread <= 255
        assert 0 <= used.spill_bytes < 1000
        assert used.threads % 32 == 0
        assert used.smem_bytes > 0  # both reduce across the warps of a block
        assert 1000 < used.code_bytes < 100_000
        assert used.code_bytes % 16 == 0  # instructions have 16 bytes


@needs_nvcc
def test_dynamic_shared_memory_is_counted_as_it_is_launched():
    product = plan_of(module(lambda bb, x, w: op.matmul(x, w), BIG, BIG))
    (found,) = probed(product, candidates_of(product.graph, product.plan)).values()
    assert 100_000 < found.smem_bytes <= product.hw.smem_per_block_bytes
    assert found.threads == 384


@needs_nvcc
def test_a_longer_chain_has_more_code_and_as_many_registers():
    short, long = (
        next(iter(probed(p, [one_group(p)]).values()))
        for p in (plan_of(module(chain(n), BIG)) for n in (4, 16))
    )
    assert 3 < long.code_bytes / short.code_bytes < 5
    assert abs(long.registers_per_thread - short.registers_per_thread) <= 8


@needs_nvcc
def test_what_was_compiled_once_is_found_without_a_compiler(softmaxes, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    groups = candidates_of(softmaxes.graph, softmaxes.plan)
    first = probed(softmaxes, groups)
    monkeypatch.setattr(Compiler, "compile", lambda *args: pytest.fail("it was compiled again"))
    assert probed(softmaxes, groups) == first


# Always: equal groups are compiled once, and what was compiled is found.
@pytest.mark.nightly
@needs_nvcc
def test_the_order_of_groups_and_the_number_of_compilers_do_not_matter(
    softmaxes, tmp_path, monkeypatch
):
    groups = candidates_of(softmaxes.graph, softmaxes.plan)
    results = []
    for jobs, order in ((1, groups), (4, groups[::-1])):
        monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path / str(jobs)))
        results.append(probed(softmaxes, order, jobs=jobs))
    assert results[0] == results[1]


@needs_nvcc
def test_equal_groups_are_compiled_once(tmp_path, monkeypatch):
    def layers(bb, x, y):
        return bb.emit(op.tanh(x)), bb.emit(op.tanh(y))

    planned = plan_of(module(layers, BIG, BIG))
    graph = planned.graph
    groups = [Candidate(GroupView(graph, (o.id,), o.outputs), "pointwise") for o in graph.ops]
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    found = probed(planned, groups)
    assert len(found) == 2
    assert len(set(found.values())) == 1
    assert len(list(tmp_path.glob("*.cubin"))) == 1


@needs_nvcc
def test_a_group_that_its_class_cannot_write_is_told_and_leaves_the_others_alone(softmaxes):
    wrong = one_group(softmaxes, "pointwise")
    right = candidates_of(softmaxes.graph, softmaxes.plan)[0]
    found = probed(softmaxes, [wrong, right])
    assert found[wrong.key].code is RefusalCode.WRITER
    assert found[wrong.key].why
    assert isinstance(found[right.key], Resources)


@needs_nvcc
def test_a_kernel_that_the_compiler_refuses_is_told(softmaxes, tmp_path, monkeypatch):
    def refuse(*args):
        raise BuildError("ptxas fatal : too much of everything")

    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setattr(Compiler, "compile", refuse)
    found = probed(softmaxes, candidates_of(softmaxes.graph, softmaxes.plan))
    told = ProbeFailure(RefusalCode.BUILD, "ptxas fatal : too much of everything")
    assert set(found.values()) == {told}


def test_without_a_compiler_the_probe_says_what_to_install(softmaxes, monkeypatch, tmp_path):
    without_compilers(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match="no CUDA compiler"):
        probed(softmaxes, candidates_of(softmaxes.graph, softmaxes.plan))


def test_a_cpu_has_nothing_to_probe():
    planned = plan_of(module(chain(2), ((64, 64), "float32")), "llvm")
    assert probed(planned, candidates_of(planned.graph, planned.plan)) == {}


# ---- facts in the plan


def test_an_evaluator_takes_what_was_found_for_what_it_would_guess():
    planned = plan_of(module(chain(8), BIG))
    group = one_group(planned)
    spilled = Resources(255, 0, threads=256, code_bytes=8192, spill_bytes=4000)

    def estimated(found):
        evaluator = Evaluator(planned.graph, planned.hw, POLICY, probed=found)
        return evaluator.group(group.view.ops, group.view.outputs).estimate

    assert "spill" not in estimated({}).terms
    assert estimated({group.key: spilled}).terms["spill"] > 0
    assert estimated({group.key: spilled}).time_us > 2 * estimated({}).time_us
    other = ((), ())
    assert estimated({other: spilled}) == estimated({})


def nearly_full():
    """A chain that is one kernel, on a device whose instruction cache it is guessed to fill."""
    planned = plan_of(module(chain(12), BIG))
    view = one_group(planned).view
    costed = Evaluator(planned.graph, planned.hw, POLICY).group(view.ops, view.outputs)
    code_bytes = guessed(costed, planned.hw).code_bytes
    return plan_of(module(chain(12), BIG), instruction_cache_bytes=int(code_bytes / 0.9))


@pytest.fixture
def doubtful(monkeypatch):
    planned = nearly_full()
    asked = []

    def told(code_bytes: int):
        def answer(low, graph, groups, hw, policy, target=None, jobs=None):
            groups = list(groups)
            asked.extend(g.key for g in groups)
            used = Resources(32, 0, threads=256, code_bytes=0, spill_bytes=0)
            size = {g.key: code_bytes * len(g.view.ops) for g in groups}
            return {k: dataclasses.replace(used, code_bytes=n) for k, n in size.items()}

        monkeypatch.setattr("tvm_fusion.plan.decide.probing.probe", answer)
        monkeypatch.setattr("tvm_fusion.plan.decide.probing.can_probe", lambda hw: True)

    return planned, told, asked


def test_groups_near_a_limit_are_compiled_and_the_plan_stays_if_they_fit(doubtful):
    planned, told, asked = doubtful
    told(100)
    plan, found = probed_plan(
        planned.low, planned.graph, planned.plan, planned.hw, POLICY, planned.hw.to_target()
    )
    assert len(asked) == 1
    assert [g.ops for g in plan.groups] == [g.ops for g in planned.plan.groups]
    assert set(found) == set(asked)
    assert plan.predicted_us <= planned.plan.predicted_us


def test_the_plan_changes_if_the_facts_are_worse_than_the_estimates(doubtful):
    planned, told, _ = doubtful
    told(1_000_000)
    plan, found = probed_plan(planned.low, planned.graph, planned.plan, planned.hw, POLICY)
    largest = max(len(g.ops) for g in planned.plan.groups)
    assert max(len(g.ops) for g in plan.groups) < largest
    assert found


def test_nothing_is_compiled_where_no_group_is_near_a_limit_or_the_policy_says_off(monkeypatch):
    monkeypatch.setattr(
        "tvm_fusion.plan.decide.probing.probe", lambda *a: pytest.fail("it was compiled")
    )
    monkeypatch.setattr("tvm_fusion.plan.decide.probing.can_probe", lambda hw: True)
    small = plan_of(module(chain(4), BIG))
    assert not in_doubt(small.graph, small.plan, small.hw, POLICY)
    assert probed_plan(small.low, small.graph, small.plan, small.hw, POLICY) == (small.plan, {})
    tight = nearly_full()
    off = load_policy({"probe": "off"})
    assert probed_plan(tight.low, tight.graph, tight.plan, tight.hw, off) == (tight.plan, {})


def test_a_group_keeps_its_key_whatever_stands_around_it():
    graphs = [plan_of(module(chain(n), BIG)).graph for n in (3, 5)]
    keys = [group_key(GroupView(g, (0, 1), g.ops[1].outputs)) for g in graphs]
    assert keys[0] == keys[1]
    assert group_key(GroupView(graphs[0], (0,), graphs[0].ops[0].outputs)) != keys[0]


@needs_nvcc
def test_explain_shows_registers_and_code_if_asked_and_compiles_nothing_if_not():
    mod = module(chain(4), BIG)
    plain, shown = (explain(mod, "nvidia_h200", probe=asked) for asked in (False, True))
    assert [g.registers for g in plain.groups] == [None]
    (group,) = shown.groups
    assert group.registers >= 16
    assert group.code_bytes > 1000
    header = next(line for line in render(shown).splitlines() if line.startswith("group"))
    assert {"registers", "code"} <= set(header.split())


def test_explain_has_no_registers_to_show_on_a_cpu():
    with pytest.raises(TargetError, match="registers"):
        explain(module(chain(2), ((64, 64), "float32")), "llvm", probe=True)


# ---- long chains


@needs_nvcc
def test_a_hundred_and_fifty_operators_can_be_one_kernel():
    planned = plan_of(module(chain(150), BIG))
    (found,) = probed(planned, [one_group(planned)]).values()
    assert found.registers_per_thread <= 64
    assert found.spill_bytes == 0


def test_a_long_chain_of_values_that_stand_twice_in_the_next_has_the_right_numbers():
    """Beyond `MOST_REFERENCES` values go through arrays of one element."""

    def kernel_of(length: int):
        planned = plan_of(module(chain(length), ((4, 64), F16)))
        (group,) = candidates_of(planned.graph, planned.plan)
        spec = LaunchSpec(group.view.ops, group.view.outputs, group.kernel_class)
        return LaunchWriter(planned.low, planned.graph, planned.hw, POLICY).write(spec)[0]

    def arrays(kernel) -> int:
        found = []
        tvm_ffi.structural_walk(kernel.body, [(tirx.AllocBuffer, found.append)])
        return len(found)

    kernel = kernel_of(24)
    assert arrays(kernel) > arrays(kernel_of(4))
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(F16)
    got, expected = np.zeros_like(x), x.astype("float64")
    run_cuda_on_cpu(kernel, [x, got])
    for i in range(24):
        expected = np.tanh(expected) if i % 2 else np.exp(expected)
    np.testing.assert_allclose(got, expected, rtol=2e-3)


def test_a_deep_call_returns_and_raises_as_a_plain_one_does():
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    assert call_deep(depth, 20_000) == 20_000
    with pytest.raises(ZeroDivisionError):
        call_deep(lambda: 1 / 0)
    with pytest.raises(RecursionError):
        depth(20_000)


# ---- cubins


@pytest.mark.parametrize("binary", [b"", b"nothing", b"\x7fELF\x02" + b"\0" * 20])
def test_what_is_no_whole_cubin_has_no_kernels(binary):
    assert code_bytes(binary) == {}


def test_a_plan_by_hand_writes_what_is_read_outside():
    planned = plan_of(module(chain(4), BIG))
    first, second = forced(planned.graph, [[0, 1], [2, 3]])
    assert first.stores == planned.graph.ops[1].outputs
    assert second.stores == planned.graph.ops[3].outputs
