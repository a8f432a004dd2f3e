"""Fixtures of the test-suite, and the rule for tests that need a GPU."""

import os
from functools import cache

import pytest

from tvm_fusion._threads import kernel_threads

from .tools import require

os.environ.setdefault("TVM_FUSION_PLAN_CACHE", "0")  # what is tested is the search
os.environ.setdefault("TVM_FUSION_KERNEL_CACHE", "0")  # and the writers
os.environ.setdefault("TVM_FUSION_CALIBRATE", "0")  # plans are the same on each machine


@pytest.fixture(scope="session", autouse=True)
def _all_cores() -> None:
    """Keeps TVM from pinning every process of the test-suite to the first core."""
    kernel_threads()


@pytest.fixture
def nvcc() -> str:
    """The path of nvcc."""
    return require("nvcc")


LLVM_AND_GPU = ["llvm", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@cache
def _has_gpu() -> bool:
    import tvm

    return bool(tvm.cuda(0).exist)


@pytest.fixture(params=LLVM_AND_GPU)
def target(request: pytest.FixtureRequest):
    """TVM targets that can run here: the CPU, and the GPU if there is one."""
    from tvm_fusion.config import resolve_target

    return resolve_target(request.param)[0]
