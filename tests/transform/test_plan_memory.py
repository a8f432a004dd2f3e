"""Storages: lifetimes, places side by side, the peak, and numbers of modules that share memory."""

import itertools
import re

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from tvm_fusion.ir.extents import UPPER_BOUNDS_ATTR
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.transform.memory.plan_memory import SETTLE, PlanMemory
from tvm_fusion.transform.memory.storage_plan import Life, least_peak_bytes, plan_storages

from ..support.runtime_cases import LLVM, relax_module

MB = 1 << 20
# tensors of an encoder layer by launch: query, key, value, mixed, projected, normed, wide, narrow
ENCODER = [
    *[Life(16 * MB, 0, 1)] * 3,
    Life(16 * MB, 1, 2),
    Life(16 * MB, 2, 3),
    Life(16 * MB, 3, 6),
    Life(64 * MB, 4, 5),
    Life(16 * MB, 5, 6),
]


def check_places(tensors, plan):
    """Nothing lies outside its storage, or where something else is needed at the same time."""
    for tensor, place in zip(tensors, plan.places, strict=True):
        storage = plan.storages[place.storage]
        assert place.offset % 256 == 0
        assert place.offset + tensor.size_bytes <= storage.size_bytes
        assert storage.first <= tensor.first
        assert tensor.last <= storage.last
    pairs = itertools.combinations(zip(tensors, plan.places, strict=True), 2)
    for (a, at_a), (b, at_b) in pairs:
        if at_a.storage == at_b.storage and a.meets(b):
            first, second = sorted([(at_a.offset, a.size_bytes), (at_b.offset, b.size_bytes)])
            assert sum(first) <= second[0]


def test_an_encoder_layer_needs_what_its_widest_launch_holds():
    output = Life(16 * MB, 6, 7)
    plan = plan_storages(ENCODER, [output])
    check_places(ENCODER, plan)
    assert plan.peak_bytes == least_peak_bytes([*ENCODER, output]) == 96 * MB
    assert plan.pool_bytes == 112 * MB
    assert sorted(s.size_bytes // MB for s in plan.storages) == [16, 16, 64]


def test_a_storage_that_ends_makes_room_for_an_output_of_its_size():
    tensors = [Life(1024, 0, 1), Life(1024, 1, 2)]
    plan = plan_storages(tensors, [Life(1024, 2, 3)])
    assert plan.pool_bytes == plan.peak_bytes == 2048


def test_nothing_has_no_storages():
    plan = plan_storages([])
    assert (plan.places, plan.storages, plan.peak_bytes, plan.pool_bytes) == ((), (), 0, 0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(30))
def test_random_lifetimes_never_overlap_and_stay_near_the_least_peak(seed):
    rng = np.random.default_rng(seed)
    firsts = np.sort(rng.integers(0, 40, 60))
    sizes = rng.choice([1, 256, 300, 1024, 4096, 5000, 16384], 60)
    tensors = [
        Life(int(size), int(first), int(first + rng.integers(0, 8)))
        for size, first in zip(sizes, firsts, strict=True)
    ]
    others = [Life(4096, int(rng.integers(0, 40)), 48) for _ in range(3)]
    plan = plan_storages(tensors, others)
    check_places(tensors, plan)
    each = [Life(-(-t.size_bytes // 256) * 256, t.first, t.last) for t in tensors]
    least = least_peak_bytes([*each, *others])
    assert least <= plan.peak_bytes <= 1.5 * least
    assert plan == plan_storages(tensors, others)


def planned(monkeypatch, mod):
    """A module for the CPU whose memory is planned as on a GPU, and its `main` before lowering."""
    seen = []

    def plan_memory():
        passes = [PlanMemory(), _Shown(seen)]
        return tvm.transform.Sequential(passes)

    monkeypatch.setattr(relax.transform, "StaticPlanBlockMemory", plan_memory)
    compiled = CompiledModule.of(build(mod, LLVM))
    return compiled, seen[-1]["main"].script()


@tvm.transform.module_pass(opt_level=0, name="Shown")
class _Shown:
    def __init__(self, to: list) -> None:
        self.to = to

    def transform_module(self, mod, _ctx):
        self.to.append(mod)
        return mod


def branches(bb, x):
    """Four tensors of (16, 32) beside each other after one of (16, 128)."""
    wide = bb.emit(relax.op.exp(bb.emit(relax.op.concat([x, x, x, x], 1))))
    parts = bb.emit(relax.op.split(wide, 4, 1))
    first, second, third, fourth = (bb.emit(parts[i]) for i in range(4))
    low = bb.emit(relax.op.nn.softmax(first))
    high = bb.emit(relax.op.maximum(second, third))
    mixed = bb.emit(relax.op.add(low, bb.emit(relax.op.nn.relu(fourth))))
    return relax.op.subtract(bb.emit(relax.op.multiply(mixed, high)), low)


def branches_of(x):
    first, second, third, fourth = torch.exp(torch.cat([x] * 4, 1)).split(32, 1)
    low = torch.softmax(first, 1)
    return (low + fourth.relu()) * torch.maximum(second, third) - low


def test_tensors_side_by_side_keep_their_numbers(monkeypatch):
    compiled, text = planned(monkeypatch, relax_module(branches, ("x", (16, 32), "float32")))
    assert SETTLE in text
    for _ in range(3):
        x = torch.randn(16, 32)
        torch.testing.assert_close(compiled(x), branches_of(x))


def test_outputs_have_memory_of_their_own(monkeypatch):
    def emit(bb, x):
        y = bb.emit(relax.op.exp(x))
        z = bb.emit(relax.op.add(y, x))
        return relax.Tuple([bb.emit(relax.op.nn.relu(z)), y])

    compiled, text = planned(monkeypatch, relax_module(emit, ("x", (16, 32), "float32")))
    assert text.count("builtin.alloc_tensor") == 2
    assert text.count("memory.alloc_storage") == 1
    kept = []
    for _ in range(3):
        x = torch.randn(16, 32)
        kept.append((compiled(x), x))
    for (first, second), x in kept:
        torch.testing.assert_close(first, torch.relu(torch.exp(x) + x))
        torch.testing.assert_close(second, torch.exp(x))


def test_a_view_keeps_the_memory_of_what_it_looks_at(monkeypatch):
    def emit(bb, x):
        y = bb.emit(relax.op.exp(x))
        rows = bb.emit(relax.op.reshape(y, (32, 16)))
        other = bb.emit(relax.op.nn.relu(bb.emit(relax.op.sqrt(bb.emit(relax.op.abs(x))))))
        return relax.op.add(rows, bb.emit(relax.op.reshape(other, (32, 16))))

    compiled, _ = planned(monkeypatch, relax_module(emit, ("x", (16, 32), "float32")))
    x = torch.randn(16, 32)
    wanted = torch.exp(x) + x.abs().sqrt()
    torch.testing.assert_close(compiled(x), wanted.view(32, 16))


def test_symbolic_shapes_get_the_plan_of_tvm():
    rows = tvm.tirx.Var("n", "int64")
    symbolic = relax_module(branches, ("x", (rows, 32), "float32"))
    passes = (relax.transform.LegalizeOps(), relax.transform.ToNonDataflow())
    mod = tvm.transform.Sequential([*passes, relax.transform.CallTIRRewrite()])(symbolic)
    given = PlanMemory()(mod)
    assert SETTLE not in given.script()
    wanted = relax.transform.StaticPlanBlockMemory()(mod)
    count = wanted["main"].script().count("memory.alloc_storage")
    assert given["main"].script().count("memory.alloc_storage") == count


def test_a_storage_of_bounded_size_is_as_large_as_a_call_needs():
    rows = tvm.tirx.Var("n", "int64")
    symbolic = relax_module(branches, ("x", (rows, 32), "float32"))
    bounds = {"n": 1 << 20}
    symbolic["main"] = symbolic["main"].with_attr(UPPER_BOUNDS_ATTR, bounds)
    passes = (relax.transform.LegalizeOps(), relax.transform.ToNonDataflow())
    mod = tvm.transform.Sequential([*passes, relax.transform.CallTIRRewrite()])(symbolic)
    main = PlanMemory()(mod)["main"]
    sizes = re.findall(r"alloc_storage\(R.shape\(\[(.*?)\]\)", main.script())
    assert sizes
    assert all("n" in size for size in sizes)
    assert dict(main.attrs[UPPER_BOUNDS_ATTR]) == bounds


def test_the_plan_counts_a_storage_until_its_last_tensor(monkeypatch):
    compiled, _ = planned(monkeypatch, relax_module(branches, ("x", (16, 32), "float32")))
    wide, one = 16 * 128 * 4, 16 * 32 * 4
    assert compiled.memory.peak_bytes() == 2 * wide
    assert compiled.memory.outputs == (one,)
