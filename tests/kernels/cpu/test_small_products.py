"""Small products on a CPU: which are sums along memory, and which wake the other cores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax import op
from tvm.tirx import ForKind

from tvm_fusion.config import load_profile
from tvm_fusion.config.targets import cpu_target
from tvm_fusion.kernels.cpu import write
from tvm_fusion.kernels.cpu.contraction.operands import MOST_DOT_ROWS, MOST_DOTS
from tvm_fusion.kernels.cpu.contraction.panels import CONSTANTS_ATTR, PANELS_ATTR, Panels
from tvm_fusion.kernels.cpu.machine import (
    PRODUCT_WORK,
    SMALL_WORK,
    WAKE_US,
    Machine,
    machine_of,
    small_work,
)
from tvm_fusion.kernels.cpu.write import write_cpu

from ...support.helpers_tir import call, compile_cpu, poisoned
from ...support.kernel_cases import assert_close, fuse

F32 = "float32"
MACHINES = {"AVX-512": Machine(64, 32, 2), "AVX2": Machine(32, 16, 8), "NEON": Machine(16, 32, 3)}


def product(rows, terms, columns, turned=True, dtype=F32, constant=False) -> tirx.PrimFunc:
    """relu(x W^T + b), or W as it lies."""
    weight = (columns, terms) if turned else (terms, columns)

    def emit(bb, x, w, b):
        w = bb.emit(op.permute_dims(w)) if turned else w
        return op.nn.relu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))

    func = fuse(emit, ((rows, terms), dtype), (weight, dtype), ((columns,), dtype))
    return func.with_attr(CONSTANTS_ATTR, [1]) if constant else func


def loops_of(func: tirx.PrimFunc, kind: ForKind) -> list[tirx.For]:
    found = []
    tvm_ffi.structural_walk(func.body, [(tirx.For, lambda f: found.append(f) and None)])
    return [f for f in found if f.kind == kind]


def buffers_of(func: tirx.PrimFunc) -> list[str]:
    found = []
    tvm_ffi.structural_walk(func.body, [(tirx.AllocBuffer, lambda a: found.append(a) and None)])
    return [a.buffer.name for a in found]


def check(kernel: tirx.PrimFunc, rows: int, terms: int, columns: int, turned: bool, dtype: str):
    rng = np.random.default_rng(rows + terms + columns)
    shapes = (rows, terms), (columns, terms) if turned else (terms, columns), (columns,)
    x, w, b = (rng.standard_normal(s).astype(dtype) for s in shapes)
    wide = [a.astype("float64") for a in (x, w, b)]
    given = w
    if PANELS_ATTR in kernel.attrs:
        ((_, *how),) = kernel.attrs[PANELS_ATTR]
        given = Panels.read(how).of(w)
    (got,) = call(compile_cpu(kernel), [x, given, b], [poisoned((rows, columns), dtype)])
    expected = np.maximum(wide[0] @ (wide[1].T if turned else wide[1]) + wide[2], 0)
    assert_close(got, expected, dtype)


SIZES = [
    (3, 16, 5),
    (3, 17, 4),
    (4, 101, 13),
    (MOST_DOT_ROWS, 31, MOST_DOTS // MOST_DOT_ROWS),
    (MOST_DOT_ROWS, 31, MOST_DOTS // MOST_DOT_ROWS + 1),
    (MOST_DOT_ROWS + 1, 33, 7),
    (5, 1031, 3),
    (7, 4099, 10),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("size", SIZES)
def test_narrow_products_are_right_on_each_machine(machine, size, monkeypatch):
    monkeypatch.setattr(write, "machine_of", lambda hw: MACHINES[machine])
    check(write_cpu(product(*size)), *size, True, F32)


@pytest.mark.parametrize("dtype", [F32, "float16"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_narrow_products_are_right_however_the_weight_lies(dtype, turned, constant):
    size = (5, 259, 11)
    check(write_cpu(product(*size, turned, dtype, constant)), *size, turned, dtype)


@pytest.mark.parametrize(
    ("size", "packs"),
    [((4, 512, 10), False), ((8, 64, 30), False), ((9, 512, 10), True), ((8, 64, 31), True)],
)
def test_few_sums_along_memory_are_not_packed(size, packs):
    kernel = write_cpu(product(*size))
    assert any("right" in name for name in buffers_of(kernel)) == packs


def test_few_sums_over_a_weight_that_lies_across_the_terms_are_packed():
    assert any("right" in name for name in buffers_of(write_cpu(product(4, 512, 10, False))))


def test_a_constant_weight_keeps_its_panels():
    assert PANELS_ATTR in write_cpu(product(4, 512, 10, constant=True)).attrs


LEAST_PARALLEL = machine_of(None).small_work / PRODUCT_WORK  # multiply-adds


@pytest.mark.parametrize(("share", "parallel"), [(0.75, False), (1.5, True)])
def test_small_products_stay_on_one_core(share, parallel):
    size = (16, round(share * LEAST_PARALLEL / (16 * 48)), 48)
    kernel = write_cpu(product(*size, turned=False))
    assert bool(loops_of(kernel, ForKind.PARALLEL)) == parallel
    check(kernel, *size, False, F32)


def test_where_cores_wake_late_larger_products_stay_on_one_core():
    size = (16, round(1.5 * LEAST_PARALLEL / (16 * 48)), 48)
    late = replace(load_profile("llvm_cpu"), launch_us=4 * WAKE_US)
    assert not loops_of(write_cpu(product(*size), hw=late), ForKind.PARALLEL)
    with cpu_target():  # a user's target has no such rate: that of the profile counts
        assert not loops_of(write_cpu(product(*size), hw=late), ForKind.PARALLEL)


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_plan_and_writer_leave_the_same_on_one_core(cores):
    """Whatever the cores of a user's target: plans know those of the profile."""
    cpu = load_profile("llvm_cpu")
    with tvm.target.Target({"kind": "llvm", "num-cores": cores}):
        assert machine_of(cpu).small_work == small_work(cpu.launch_us, cpu.num_sms)


def test_few_cores_gain_less_than_many_and_an_odd_measurement_is_bounded():
    assert small_work(WAKE_US, 2) == SMALL_WORK == small_work(WAKE_US, 1)
    assert small_work(WAKE_US, 16) == pytest.approx(SMALL_WORK * 8 / 15)
    assert small_work(0.0, 2) == SMALL_WORK / 2
    assert small_work(1e6, 2) == 8 * SMALL_WORK


def test_a_chain_of_as_much_work_as_a_product_stays_on_one_core():
    rows = round(LEAST_PARALLEL) // 64
    kernel = write_cpu(fuse(lambda bb, x: op.nn.relu(x), ((rows, 64), F32)))
    assert not loops_of(kernel, ForKind.PARALLEL)
