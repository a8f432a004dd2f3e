"""Kernels for every architecture: by portable forms, nothing in them of one architecture alone."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.portable import (
    ARCHITECTURES,
    OF_ONE_ALONE,
    compiled,
    names,
    pairs_of,
    random_names,
    sources,
)

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
BLACKWELL = ("sm_100", "sm_110a", "sm_121")


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize(("case", "family"), [("product", "gemm"), ("attention", "attention")])
def test_blackwell_has_tensor_cores_by_mma_sync(arch, case, family):
    families, found = sources(f"small/{case}", arch)
    assert families == [family]
    assert all("mma.sync" in text for text in found.values())
    assert not any(OF_ONE_ALONE.search(text) for text in found.values())


def test_hopper_with_its_own_features_is_told_apart():
    _, found = sources("small/square", "sm_90a")
    assert any(OF_ONE_ALONE.search(text) for text in found.values())
    _, found = sources("small/square", "sm_90")
    assert not any(OF_ONE_ALONE.search(text) for text in found.values())


def test_random_problems_are_for_each_architecture_or_for_one_in_turn():
    chosen, archs = random_names(3), ("sm_80", "sm_90a")
    assert len(pairs_of(chosen, archs)) == 6
    in_turn = [("drawn/0", "sm_80"), ("drawn/1", "sm_90a"), ("drawn/2", "sm_80")]
    assert pairs_of(chosen, archs, in_turn=True) == in_turn


@pytest.mark.one_in(6)
@needs_nvcc
@pytest.mark.parametrize(
    ("case", "arch"),
    [
        ("small/product", "sm_120"),
        ("small/square", "sm_90a"),
        ("small/softmax", "sm_103"),
        ("small/float8", "sm_80"),
        ("small/from_float8", "sm_86"),
        ("gemm/gemm_fp8_4096x4096x4096", "sm_90"),
        ("gemm/gemm_fp8_4096x4096x4096", "sm_100"),
    ],
)
def test_a_few_kernels_are_compiled(case, arch, pool):
    one = compiled(case, arch, pool)
    assert one.wrong == []
    assert one.kernels
    assert "fallback" not in one.families
    assert not any(kernel.spill_bytes for kernel in one.kernels)


@pytest.mark.nightly
@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", names())
def test_kernels_of_every_family_are_compiled_for_every_architecture(case, arch, pool):
    one = compiled(case, arch, pool)
    assert one.wrong == []
    assert one.kernels
