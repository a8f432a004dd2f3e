"""Arenas of functions with symbolic sizes: offsets that never meet, and memory that is kept."""

import itertools

import numpy as np
import pytest
import torch
import tvm_ffi
from torch.export import Dim
from tvm import ir, sym, tirx

import tvm_fusion
from tvm_fusion.transform.memory.arena import SymbolicTensor, plan_arena
from tvm_fusion.transform.memory.storage_plan import Life, least_peak_bytes

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def at(expr, n, m):
    values = tvm_ffi.structural_map(
        expr, (ir.Var, lambda v: tirx.IntImm("int64", n if v is N or v.same_as(N) else m))
    )
    return int(sym.Analyzer().simplify(values))


def drawn(rng):
    extents = [(N, 64), (N, 128), (N + 1, 64), (N,), (8, N, N), (M, 4), (N, M), (40,), (N // 2, 64)]
    firsts = np.sort(rng.integers(0, 20, 24))
    return [
        SymbolicTensor(
            extents[rng.integers(len(extents))], 4, int(first), int(first + rng.integers(0, 5))
        )
        for first in firsts
    ]


@pytest.mark.parametrize("seed", range(6))
def test_tensors_that_are_needed_at_once_never_meet_at_any_size(seed):
    tensors = drawn(np.random.default_rng(seed))
    plan = plan_arena(tensors)
    for n, m in ((0, 0), (1, 1), (2, 500), (65, 3), (1000, 1000)):
        sizes = [
            at(tirx.const(1, "int64") * t.item_bytes * np.prod(t.extents), n, m) for t in tensors
        ]
        begins = [at(offset, n, m) for offset in plan.offsets]
        total = at(plan.size_bytes, n, m)
        for begin, size in zip(begins, sizes, strict=True):
            assert begin % 256 == 0
            assert begin + size <= total
        for i, j in itertools.combinations(range(len(tensors)), 2):
            if tensors[i].meets(tensors[j]) and sizes[i] and sizes[j]:
                apart = begins[i] + sizes[i] <= begins[j] or begins[j] + sizes[j] <= begins[i]
                assert apart, (n, m, tensors[i], tensors[j])
    lives = [Life(size, t.first, t.last) for size, t in zip(sizes, tensors, strict=True)]
    assert total <= 1.6 * least_peak_bytes(lives)  # where sizes are large


class Sorted(torch.nn.Module):
    """Intermediates of different forms, all in memory: sorting keeps nothing to itself."""

    def forward(self, x):
        scores = torch.sort(x[:, None] * x).values
        return torch.sort(scores.sum(0)).values, torch.sort(scores.relu(), 0).values.sum(1)


def taken(module):
    """The sizes of the storages that calls of a module take from the pool, in order."""
    sizes = []

    def look(_function, name, before, _result, *arguments):
        if before and name == "vm.builtin.alloc_storage":
            sizes.append(int(arguments[1][0]))
        return 0

    module.vm.set_instrument(look)
    return sizes


TOO_MANY = 1 << 22  # scores of 70 TB


def test_an_arena_is_kept_and_grown_and_never_as_large_as_the_bound(tmp_path):
    tokens = Dim("tokens", max=TOO_MANY)
    module = tvm_fusion.compile(
        Sorted(),
        "llvm",
        example_inputs=(torch.randn(37),),
        dynamic_shapes=({0: tokens},),
        verify=False,
    )
    module.save(tmp_path / "sorted.so")
    for one in (module, tvm_fusion.CompiledModule.load(tmp_path / "sorted.so")):
        sizes, arenas = taken(one), []
        (symbol,) = one.signature.bounds
        with pytest.raises(RuntimeError, match="alloc"):
            one(torch.randn(TOO_MANY))  # later calls ask for what they need
        for n in (65, 30, 1, 66, 200, 65, 190, 0):
            del sizes[:]
            x = torch.randn(n)
            torch.testing.assert_close(one(x), Sorted()(x))
            arenas.append(max(sizes))
            assert one.memory.peak_bytes({symbol: n}) <= max(4096, 1.2 * arenas[-1]) + 8192
        first, *_ = arenas
        assert 65 * 65 * 4 <= first <= 8 * 65 * 65 * 4
        assert arenas[:3] == [first] * 3
        assert arenas[3] <= 1.2 * first
        assert arenas[5:] == [arenas[4]] * 3
