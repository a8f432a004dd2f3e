"""Fixtures of the test-suite, and the rule for tests that need a GPU."""

import __future__

import contextlib
import gc
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from .support.tools import require

os.environ.setdefault("TVM_FUSION_PLAN_CACHE", "0")  # what is tested is the search
os.environ.setdefault("TVM_FUSION_KERNEL_CACHE", "0")  # and the writers
os.environ.setdefault("TVM_FUSION_CALIBRATE", "0")  # plans are the same on each machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of torch waste no core by waiting


@pytest.fixture(scope="session", autouse=True)
def _all_cores() -> None:
    """Keeps TVM from pinning every process of the test-suite to the first core."""
    from tvm_fusion.host.threads import kernel_threads

    kernel_threads()


@pytest.fixture(scope="session")
def _hidden_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a module of torch's name that cannot be imported."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "torch.py").write_text("raise ImportError('hidden: this process needs no torch')\n")
    return str(folder)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch, _hidden_torch: str) -> None:
    """Processes that are started find no torch, which TVM imports and takes 3 of 5 s."""
    _hide_torch(monkeypatch, _hidden_torch)


@pytest.fixture(scope="module")
def no_torch_in_module(_hidden_torch: str) -> Iterator[None]:
    """`no_torch` for all tests of a module and its fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        _hide_torch(patch, _hidden_torch)
        yield


def _hide_torch(patch: pytest.MonkeyPatch, folder: str) -> None:
    others = os.environ.get("PYTHONPATH")
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (folder, others))))


@pytest.fixture
def nvcc() -> str:
    """The path of nvcc."""
    return require("nvcc")


def pytest_configure(config: pytest.Config) -> None:
    """Prepares a process that runs tests; one that hands them to others waits for no import."""
    if config.getoption("numprocesses", None):
        return
    gc.disable()  # until all tests are there
    parsers = contextlib.ExitStack()
    config.add_cleanup(parsers.close)
    _quicken_parsers(parsers)
    patches = pytest.MonkeyPatch()
    config.add_cleanup(patches.undo)
    _quicken_exports(patches)


def _quicken_parsers(parsers: contextlib.ExitStack) -> None:
    """TVMScript, of which modules of tests hold some hundred functions, is parsed ten times faster
    where the parsers find their callers quickly.
    """
    from tvm.relax.script.parser import entry as relax_parser
    from tvm.script.parser.ir import entry as module_parser
    from tvm.tirx.script.parser import entry as tirx_parser

    from tvm_fusion.ir.quick_stacks import quick_stacks

    parsers.enter_context(quick_stacks(tirx_parser, relax_parser, module_parser))


DEVICES = ("CPU", "CUDA", "Meta")


def _quicken_exports(patches: pytest.MonkeyPatch) -> None:
    """Each `run_decompositions` of torch registers kernels of 1,000 operators by functions whose
    annotations it evaluates 11,000 times, and looks all operators up once a namespace and asks of
    each whether it can be kept; that is half of the time in which a small module is exported and
    decomposed. Most of the kernels are for devices that no machine has which these tests are for.
    Each trace makes twelve empty tensors for states of random numbers, a tenth of what is left.
    """
    import torch
    from torch._decomp import decompositions_for_rng
    from torch._export import utils as torch_export
    from torch.export import exported_program

    operators = torch._ops.OperatorBase
    patches.setattr(operators, "py_impl", _with_texts_as_annotations(operators.py_impl))
    for name in ("_materialize_cpp_cia_ops", "_check_valid_to_preserve"):
        found = getattr(torch_export, name, None)  # neither is there in every version
        if found is not None:
            patches.setattr(torch_export, name, cache(found))
    empty = torch.tensor(())

    def reset(state) -> None:
        state.seed = state.base_offset = empty
        state.relative_offset, state.offset_advanced_at_least_once = 0, False

    patches.setattr(decompositions_for_rng.PhiloxState, "reset", reset)
    for name in ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE"):
        keys = getattr(exported_program, name, ())
        kept = [key for key in keys if key.name.removeprefix("Autograd") in DEVICES]
        patches.setattr(exported_program, name, kept, raising=False)


def _with_texts_as_annotations(function: Callable) -> Callable:
    """The same function, made so that no annotation in it is evaluated."""
    source = textwrap.dedent(inspect.getsource(function))
    file, space = inspect.getsourcefile(function), {}
    code = compile(source, file, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, function.__globals__, space)
    return space[function.__name__]


def pytest_collection_finish() -> None:
    """What is there now stays to the end: the garbage collector need not look through it again, and
    through what tests make less often. It took a sixth of the time in which modules of torch are
    exported. How much that is takes 0.2 seconds to count, and each compile asks.
    """
    gc.collect()
    gc.freeze()
    count = gc.get_freeze_count()
    gc.get_freeze_count = lambda: count
    gc.set_threshold(100_000, 50, 20)
    gc.enable()


LLVM_AND_GPU = ["llvm", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device; leave to the nightly run what
    `one_in` does; begin with the files of those marked `long`, whole: fixtures of a module are made
    once.
    """
    slow = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        some = item.get_closest_marker("one_in")
        if some and sum(_places(item)) % some.args[0]:
            item.add_marker(pytest.mark.nightly)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _places(item: pytest.Item) -> list[int]:
    """Where a case stands in each list that its test is parametrized by.

    Cases whose places add up to a multiple of n are one in n, the first among them: of two lists of
    n values or more each value stays.
    """
    return [_place(mark, item.callspec.params) for mark in item.iter_markers("parametrize")]


def _place(mark: pytest.Mark, params: dict[str, object]) -> int:
    """Where the values of a case stand in one list; `callspec.indices` count whole cases."""
    names, listed = mark.args[:2]
    names = re.findall(r"\w+", names) if isinstance(names, str) else names
    wanted = [params[name] for name in names]
    for place, case in enumerate(listed):
        if isinstance(case, type(pytest.param())):
            values = case.values
        else:
            values = [case] if len(names) == 1 else case
        if all(_is_same(value, other) for value, other in zip(values, wanted, strict=True)):
            return place
    raise ValueError(f"{wanted} is none of the cases of {mark}")


def _is_same(value: object, other: object) -> bool:
    """Numbers of a range are made anew each time; what else may be compared is not known."""
    return value is other or (isinstance(value, int) and value == other)


@cache
def _has_gpu() -> bool:
    import tvm

    return bool(tvm.cuda(0).exist)


@pytest.fixture(params=LLVM_AND_GPU)
def target(request: pytest.FixtureRequest):
    """TVM targets that can run here: the CPU, and the GPU if there is one."""
    from tvm_fusion.config import resolve_target

    return resolve_target(request.param)[0]
