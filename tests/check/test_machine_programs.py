"""Kernels for other CPUs than this one are right: narrower vectors, other instructions.

Programs of `machine_programs`; those for x86-64 without AVX-512 run on any x86-64 machine.
"""

import pytest
import torch
import tvm

from tests.support.machine_programs import KINDS, TARGETS, judged
from tvm_fusion.config import load_profile
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.kernels.cpu.machine import machine_of
from tvm_fusion.runtime.build.build import build

NARROW = ("x86-64", "nehalem", "sandybridge", "haswell")
OTHERS = ("skylake-avx512", "sapphirerapids", "neoverse-n1")


def assert_right(name: str, seed: int, target: str, runs: bool = True) -> None:
    if runs and not tvm.target.codegen.llvm_get_system_triple().startswith("x86_64"):
        pytest.skip("runs x86-64 code")
    outcome = judged(name, seed, target, runs)
    assert outcome.near <= 1, f"{outcome} is wrong: torch says so"
    assert outcome.fell_back == ""


NAMED = [
    ("x86-64", "counts", 7),  # comparisons counted along vectors
    ("haswell", "logs_of_sums", 21),  # a comparison that two operators read
    ("x86-64", "attention", 1123),  # a sum as a bool
    ("haswell", "pools", 5),
    ("x86-64", "largest", 9),
    ("haswell", "permuted", 11),
    ("nehalem", "batched_products", 3),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("target", "name", "seed"), NAMED)
def test_a_program_for_narrow_vectors_is_right(target, name, seed):
    assert_right(name, seed, target)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("target", NARROW)
def test_programs_for_narrow_vectors_are_right(target, name):
    for seed in range(5):
        assert_right(name, 7_000 + seed, target)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("target", OTHERS)
def test_programs_for_other_machines_build(target, name):
    assert_right(name, 7_100, target, runs=False)


class _Exponentials(torch.nn.Module):
    def forward(self, x):
        return torch.exp(x) * 2


VECTOR_BYTES = {"x86-64": 16, "haswell": 32, "skylake-avx512": 64, "neoverse-n1": 16}


@pytest.mark.parametrize("name", VECTOR_BYTES)
def test_kernels_are_written_for_the_target_that_was_asked_for(name):
    target = tvm.target.Target(TARGETS[name])
    with target:
        assert machine_of(load_profile("llvm")).vector_bytes == VECTOR_BYTES[name]
    planned = planned_function((_Exponentials(), (torch.zeros(33, 65),)), target)
    written = planned.fuse()
    scales = "ldexp" in str(build(written, target).executable.mod.imports[0].inspect_source("ll"))
    assert scales == (VECTOR_BYTES[name] == 64)
