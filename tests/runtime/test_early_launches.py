"""Kernels of a module are launched early where the device can, and keep the contract of it."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_fusion.config import resolve_target
from tvm_fusion.cost.analytic import pays_early
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.kernels.attention.decode.kernel import emit_attention_decode
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm import versions
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper
from tvm_fusion.kernels.gemm.runs.rank import emit_product, product_ranked
from tvm_fusion.kernels.gemm.skinny.kernel import emit_gemm_skinny
from tvm_fusion.kernels.gpu.ahead import EARLY_ATTR, READS_AHEAD, VARIABLE
from tvm_fusion.kernels.gpu.memory import copy_in
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.build.early_launches import (
    ANOTHER,
    DYNAMIC_SMEM,
    EARLY,
    Calls,
    LaunchTimes,
    launched_early,
)
from tvm_fusion.runtime.build.kernel_code import CudaUnit, kernel_code
from tvm_fusion.runtime.build.lowering import COOPERATIVE, LAUNCH_PARAMS, SCHEDULED_ATTR, TIRX_ATTR

from ..support import cuda_on_cpu
from ..support.cuda_on_cpu import EmulationError, run_cuda_on_cpu
from ..support.decode_cases import Sizes, attention_of
from ..support.hopper_on_cpu import run_hopper_on_cpu
from ..support.kernel_cases import fuse
from ..support.runtime_cases import H200, call_in_sequence, double_in_tirx
from ..support.thin_products import Thin
from ..support.wgmma_registers import machine_code

INSTRUCTIONS = ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;")
FIRST_STATEMENT = re.compile(r"double_kernel\([^;{]*\) \{\s*(\w+)\(\);")
CALLED = "tvmf_wait_for_kernels_before();"
OTHER_ACCESSES = r"\b(LD|LDGSTS|UTMALDG|UBLKCP|STG|ST|ATOMG|RED|UTMASTG)\."


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["source", "compiled"])
def test_each_kernel_of_a_module_waits_before_anything_else(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "1")
    built = build(call_in_sequence({"double": double_in_tirx()}), H200, compile_kernels=compiled)
    sources = built.cuda_sources if compiled else (built.cuda_source,)
    assert sources
    for source in sources:
        assert all(word in source for word in INSTRUCTIONS)
        assert source.index(INSTRUCTIONS[0]) < source.index(INSTRUCTIONS[1])
    (first,) = FIRST_STATEMENT.findall("".join(sources))
    assert first.endswith("wait_for_kernels_before")


def unit_of(profile, early):
    """Of a kernel with shared memory of a size that its launch tells."""
    target, hw = resolve_target(profile)
    problem = analyze_contraction(Thin(4, 16, 16, batch=1).func())
    kernel = emit_product(problem, hw, product_ranked(problem, hw)[0][1])
    (unit,) = kernel_code("product", kernel, target, early).units
    return unit


def parameters(unit):
    ((_, func),) = unit.kernels.functions_items()
    return [str(name) for name in func.attrs[LAUNCH_PARAMS]]


def test_the_size_of_shared_memory_stays_the_last_parameter_of_a_launch(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    plain, early = (parameters(unit_of("nvidia_h200", early)) for early in (False, True))
    assert plain[-1] == DYNAMIC_SMEM
    assert EARLY not in plain
    assert early == [*plain[:-1], EARLY, DYNAMIC_SMEM]


@pytest.mark.parametrize("why", ["device", "environment", "model"])
def test_where_nothing_is_launched_early_kernels_are_the_same(why, monkeypatch):
    monkeypatch.setenv(VARIABLE, {"environment": "0", "device": "1", "model": ""}[why])
    profile = "nvidia_a100" if why == "device" else "nvidia_h200"
    plain, early = (unit_of(profile, early) for early in (False, True))
    assert early.source == plain.source
    assert parameters(early) == parameters(plain)


def test_a_kernel_whose_blocks_wait_for_each_other_is_not_launched_early(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    unit = unit_of("nvidia_h200", False)
    ((gvar, func),) = unit.kernels.functions_items()
    spread = func.with_attr(LAUNCH_PARAMS, [COOPERATIVE, *parameters(unit)])
    kernels = tvm.IRModule({gvar: spread})
    assert launched_early(kernels, unit.target, ["product"])[gvar].same_as(spread)


# ---- what stands in front of the wait


def product(rows, emit, terms=512):
    """``x w^T + c`` of an odd number of columns."""

    def graph(bb, x, w, c):
        return op.add(bb.emit(op.matmul(x, bb.emit(op.permute_dims(w)))), c)

    shapes = (rows, terms), (200, terms), (200,)
    hw = resolve_target("nvidia_h200")[1]
    func = fuse(graph, *((shape, "float16") for shape in shapes))
    rng = np.random.default_rng(rows)
    x, w, c = (rng.standard_normal(shape).astype("float16") for shape in shapes)
    expected = x.astype(float) @ w.T.astype(float) + c
    return emit(analyze_contraction(func), hw), [x, w, c], expected


def attention():
    """One query of two heads that share 256 keys."""
    hw = resolve_target("nvidia_h200")[1]
    found = attention_of(Sizes(2, 2, 2, 1, 256, 64, 64))
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape).astype("float16")
        for shape in ((2, 2, 1, 64), (2, 1, 256, 64), (2, 1, 256, 64))
    )
    scores = np.einsum("bhmd,bnd->bhmn", q.astype(float), k[:, 0].astype(float)) * 0.125
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhmn,bnd->bhmd", weights, v[:, 0].astype(float))
    return emit_attention_decode(found, hw), [q, k, v], expected


KERNELS = {
    "skinny": (functools.partial(product, 1, emit_gemm_skinny), run_cuda_on_cpu),
    "skinny 5": (functools.partial(product, 5, emit_gemm_skinny), run_cuda_on_cpu),
    "hopper": (functools.partial(product, 16, emit_gemm_hopper), run_hopper_on_cpu),
    "attention": (attention, run_cuda_on_cpu),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_touches_nothing_but_weights_before_it_waits(name, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    make, run = KERNELS[name]
    kernel, inputs, expected = make()
    result = np.full(expected.shape, np.nan, "float16")
    run(kernel, [*inputs, result])  # the emulator knows what is touched before the wait
    assert np.abs(result - expected).max() <= 4e-3 * np.abs(expected).max()


def test_the_emulator_sees_a_kernel_that_does_not_wait(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    kernel, inputs, expected = product(1, emit_gemm_skinny)
    lowered = cuda_on_cpu.lower(kernel)
    source = re.sub(r"tvmf_behind_wait\(\w+\);", "", lowered.source.replace(CALLED, ""))
    with pytest.raises(EmulationError, match="in front of the wait"):
        run_cuda_on_cpu(
            replace(lowered, source=source), [*inputs, np.zeros(expected.shape, "float16")]
        )


def test_products_of_few_rows_load_their_first_weights_before_they_wait(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    kernel, inputs, expected = product(1, emit_gemm_skinny, terms=2048)
    assert [int(number) for number in kernel.attrs[READS_AHEAD]] == [1]
    result = np.full(expected.shape, np.nan, "float16")
    run_cuda_on_cpu(kernel, [*inputs, result])
    assert np.abs(result - expected).max() <= 4e-3 * np.abs(expected).max()
    before, behind = machine_code(kernel).split("ACQBULK")
    assert "PREEXIT" in behind
    assert re.search(r"\bLDG\.", before)
    assert not re.search(OTHER_ACCESSES, before)
    assert not re.search(r"\bLDG\.\S*CONSTANT", before + behind)


# ---- who is launched late


class Linears(nn.Module):
    """Two products of one row; the weights of the second are weights, or an input."""

    def __init__(self, given):
        super().__init__()
        self.given = given
        self.first, self.second = nn.Linear(2048, 2048), nn.Linear(2048, 512)

    def forward(self, x, weight):
        y = torch.relu(self.first(x))
        return nn.functional.linear(y, weight) if self.given else self.second(y)


def launches_of(model, inputs, monkeypatch, asked="1"):
    """Of each kernel of a planned model whether it is launched early."""
    monkeypatch.setenv(VARIABLE, asked)
    monkeypatch.setenv("TVM_FUSION_KERNEL_CACHE", "0")
    early, make = [], CudaUnit.module

    def module(unit, binary):
        ((_, func),) = unit.kernels.functions_items()
        early.append(EARLY in map(str, func.attrs[LAUNCH_PARAMS]))
        return make(unit, binary)

    monkeypatch.setattr(CudaUnit, "module", module)
    with torch.no_grad():
        planned_function((model, inputs) if inputs else model, "nvidia_h200").build()
    return early


@pytest.mark.one_in(2)
@pytest.mark.parametrize("given", [False, True], ids=["weights", "input"])
def test_the_first_launch_is_late_and_what_reads_ahead_of_no_weight(given, monkeypatch):
    inputs = torch.zeros(1, 2048).half(), torch.zeros(512, 2048).half()
    early = launches_of(Linears(given).half(), inputs, monkeypatch)
    assert sorted(early) == ([False, False] if given else [False, True])


def test_a_first_launch_that_a_call_may_leave_out_is_not_the_one_to_be_late(monkeypatch):
    monkeypatch.setattr(versions, "least_loss", lambda *given: [])
    rows = {0: torch.export.Dim("n", min=0, max=64)}
    inputs = torch.zeros(8, 2048).half(), torch.zeros(512, 2048).half()
    model = Linears(False).half()
    program = torch.export.export(model, inputs, dynamic_shapes=(rows, None))
    early = launches_of(program, None, monkeypatch)  # of kernels that read nothing ahead
    assert early == [True, True]


@pytest.mark.parametrize(("asked", "early"), [("0", [False, False]), ("", [False, True])])
def test_what_reads_ahead_is_early_unless_that_is_switched_off(asked, early, monkeypatch):
    inputs = torch.zeros(1, 2048).half(), torch.zeros(512, 2048).half()
    assert sorted(launches_of(Linears(False).half(), inputs, monkeypatch, asked)) == early


def test_launches_are_to_be_early_that_are_short_beside_the_gap_in_front_of_them():
    x = torch.zeros(8192, 8192).half(), torch.zeros(64, 64).half()
    planned = planned_function((Rows(), x), "nvidia_h200")
    times = {g.ops[-1]: g.predicted_us - g.terms["launch"] for g in planned.plan.groups}
    short = sum(pays_early(us, planned.hw) for us in times.values())
    functions = (f for _, f in planned.write().mod.functions_items() if EARLY_ATTR in f.attrs)
    marked = [bool(func.attrs[EARLY_ATTR]) for func in functions]
    assert (sum(marked), short) == (1, 1)
    assert len(marked) == len(times) == 2
    assert max(times.values()) > 10 * min(times.values())


class Rows(nn.Module):
    """A long launch and a short one."""

    def forward(self, x, y):
        return torch.softmax(x, -1), torch.softmax(y, -1)


@pytest.mark.parametrize(
    ("order", "reads", "unsure", "late"),
    [
        ([("a", True), ("b", True)], {"a": [], "b": []}, "", {"a"}),
        ([("host", True), ("a", True), ("b", True)], {"a": [], "b": []}, "", {"host", "a"}),
        ([("a", False), ("b", True), ("c", True)], {"a": [], "b": [], "c": []}, "", {"a", "b"}),
        ([("a", True), ("reads", True)], {"a": [], "reads": [2]}, "", {"a"}),
        ([("a", True), ("reads", True)], {"a": [], "reads": [1, 2]}, "", {"a", "reads"}),
        ([("a", True), ("both", True)], {"a": [], "both": [0]}, "", {"a", "both"}),
        (
            [("n", True), ("reads", True), ("a", True), ("reads", True)],
            {"n": [], "reads": [0], "a": []},
            ("n", "reads"),
            {"reads", "a"},
        ),
        ([("n", True), ("a", True), ("b", True)], {"n": [], "a": [], "b": []}, ("n",), {"a"}),
        (
            [("a", True), ("b", True), (ANOTHER, True), ("c", True), ("d", True)],
            {"a": [], "b": [], "c": [], "d": []},
            "",
            {"a", "c"},
        ),
    ],
)
def test_which_launches_are_late(order, reads, unsure, late):
    calls = Calls((tuple(order),), {"reads": {0, 2}, "both": {1}})
    assert calls.late(reads, reads.keys() - set(unsure)) == late


def test_what_else_a_function_calls_is_told_from_prim_funcs():
    @I.ir_module(check_well_formed=False)  # `double` is called as in a lowered module
    class Module:
        @T.prim_func(private=True)
        def double(x: T.Buffer((128,), "float32"), y: T.Buffer((128,), "float32")):
            for i in range(128):
                y[i] = x[i] * T.float32(2)

        @R.function(private=True)
        def inner(x: R.Tensor((128,), "float32")):
            y = R.call_packed("library.f", x, ty_args=R.Tensor((128,), "float32"))
            return y

        @R.function
        def main(x: R.Tensor((128,), "float32"), y: R.Tensor((128,), "float32")):
            cls = Module
            cls.double(x, y)
            z = cls.inner(y)
            cls.double(z, y)
            return R.call_packed("library.f", y, ty_args=R.Tensor((128,), "float32"))

    called = {order for order in Calls.of(Module, {}).orders}
    double, other = ("double", True), (ANOTHER, True)
    assert called == {(other,), (double, other, double, other)}


@pytest.mark.parametrize("name", ["f_kernel", "f_kernel_1", "f_upto_64_kernel", "f_beyond_kernel"])
def test_all_kernels_of_a_function_are_late(name):
    kernel = double_in_tirx().with_attr(LAUNCH_PARAMS, ["threadIdx.x", EARLY])
    gvar = tvm.ir.GlobalVar(name)
    for late, wanted in (("f", False), ("g", True)):
        module = LaunchTimes({late})(tvm.IRModule({gvar: kernel}))
        (func,) = module.functions.values()
        assert (EARLY in map(str, func.attrs[LAUNCH_PARAMS])) == wanted


@pytest.mark.parametrize(
    "name",
    ["double", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("hopper", "attention"))],
)
def test_machine_code_loads_nothing_else_before_it_waits(name, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    kernel = double_in_tirx() if name == "double" else KERNELS[name][0]()[0]
    before, behind = machine_code(kernel).split("ACQBULK")
    assert "PREEXIT" in behind
    assert not re.search(rf"{OTHER_ACCESSES}|\bLDG\.", before)
    assert re.search(rf"{OTHER_ACCESSES}|\bLDG\.", behind)
    assert not re.search(r"\bLDG\.\S*CONSTANT", behind)


def reading(ahead):
    """y = 2 x, of a kernel that reads x, by a load ahead or any other, in front of its wait."""

    @T.prim_func
    def ahead_of_it(x: T.Buffer((128,), "float32"), y: T.Buffer((128,), "float32")):
        T.device_entry()
        tx = T.thread_id([128])
        kept = T.alloc_local((1,), "float32")
        copy_in(lambda at: kept.ptr_to([0]), lambda at: x.ptr_to([tx]), 4, 4, "ahead")
        with T.attr({"tvm_fusion.before_wait": 1}):
            T.evaluate(0)
        y[tx] = kept[0] * T.float32(2)

    @T.prim_func
    def plain(x: T.Buffer((128,), "float32"), y: T.Buffer((128,), "float32")):
        T.device_entry()
        tx = T.thread_id([128])
        kept = T.alloc_local((1,), "float32")
        kept[0] = x[tx]
        with T.attr({"tvm_fusion.before_wait": 1}):
            T.evaluate(0)
        y[tx] = kept[0] * T.float32(2)

    func = ahead_of_it if ahead else plain
    return func.with_attr(TIRX_ATTR, True).with_attr(SCHEDULED_ATTR, True)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_a_kernel_that_would_read_otherwise_waits_at_its_start(ahead, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    lowered = cuda_on_cpu.lower(reading(ahead))
    body = lowered.source.rsplit('extern "C"', 1)[1]
    load = "tvmf_load4_ahead(" if ahead else "x_ptr["
    assert (body.index(CALLED) > body.index(load)) == ahead
    x, y = np.arange(128, dtype="float32"), np.zeros(128, "float32")
    run_cuda_on_cpu(lowered, [x, y])
    assert (y == 2 * x).all()
