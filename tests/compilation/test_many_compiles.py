"""Many compiles in one process: at once, after failures, and without end."""

import gc
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import relax, te

import tvm_fusion
from tests.support.growth import private_bytes
from tvm_fusion.errors import TvmFusionError
from tvm_fusion.flow import kernel_cache, plan_cache, planned
from tvm_fusion.plan import structure
from tvm_fusion.transform.apply.write_kernels import call_deep

X = np.linspace(-1, 1, 64, dtype="float32").reshape(4, 16)


def model(columns: int) -> tvm.IRModule:
    """A small layer, a kernel or two of another size for each number of columns."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 16), "float32"))
    weight = relax.const(np.random.default_rng(columns).random((16, columns), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.relu(relax.op.matmul(x, weight)))
            z = builder.emit_output(relax.op.nn.softmax(y))
        builder.emit_func_output(z)
    return builder.get()


def expected(columns: int) -> np.ndarray:
    weight = np.random.default_rng(columns).random((16, columns), "float32")
    e = np.exp(np.maximum(X @ weight, 0))
    return e / e.sum(-1, keepdims=True)


def assert_right(module, columns: int) -> None:
    np.testing.assert_allclose(module(X), expected(columns), rtol=1e-5, atol=1e-6)


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """A folder of the test's own in which plans and kernels are kept."""
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(plan_cache.VARIABLE, "1")
    monkeypatch.setenv(kernel_cache.VARIABLE, "1")
    return tmp_path


def test_models_that_are_compiled_at_once_are_right(caches):
    columns = (24, 24, 40)  # twice the same, and another
    start = threading.Barrier(len(columns))

    def run(count: int) -> None:
        start.wait()
        assert_right(tvm_fusion.compile(model(count), "llvm", verify=False), count)

    with ThreadPoolExecutor(len(columns)) as pool:
        assert not any(pool.map(run, columns))


def test_threads_write_operators_under_tags_of_their_own():
    inside, found = threading.Barrier(2), []

    def run(name: str) -> None:
        with te.tag_scope(name):
            inside.wait(20)
            found.append((name, te.compute((4,), lambda i: i, name="y").op.tag))
            inside.wait(20)

    with ThreadPoolExecutor(2) as pool:
        assert not any(pool.map(run, ("injective", "broadcast")))
    assert sorted(found) == [("broadcast", "broadcast"), ("injective", "injective")]
    with te.tag_scope("outer"):
        te.compute((4,), lambda i: i)
        with pytest.raises(ValueError, match="nested"), te.tag_scope("inner"):
            pass


def test_deep_calls_of_several_threads_leave_each_other_their_frames():
    first_is_done, deep = threading.Event(), []

    def depth(frames: int) -> int:
        return 0 if frames == 0 else 1 + depth(frames - 1)

    def second() -> None:
        def run() -> int:
            first_is_done.wait(20)
            return depth(20_000)

        deep.append(call_deep(run))

    thread = threading.Thread(target=second)
    call_deep(thread.start)
    first_is_done.set()
    thread.join()
    assert deep == [20_000]
    with pytest.raises(RecursionError):
        depth(20_000)


@pytest.mark.parametrize(
    "stage", ["write_kernels", pytest.param("best_plan", marks=pytest.mark.nightly)]
)
def test_a_compile_that_fails_midway_costs_nothing_of_what_was_compiled(stage, caches, monkeypatch):
    before = tvm_fusion.compile(model(24), "llvm", verify=False)
    kept = {file: file.read_bytes() for file in caches.rglob("*.json")}
    assert kept

    def fail(*_arguments, **_options):
        raise TvmFusionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(planned, stage, fail)
        with pytest.raises(TvmFusionError, match="planted"):
            tvm_fusion.compile(model(40), "llvm", verify=False)
    assert {file: file.read_bytes() for file in kept} == kept
    assert not list(caches.rglob(".*.json.*")), "a file was left half written"
    assert_right(before, 24)
    assert_right(tvm_fusion.compile(model(40), "llvm", verify=False), 40)


def held(compiled: range) -> tuple[int, int]:
    """Bytes of the process, and objects of this package, after some models were compiled, all of
    another size.
    """
    for columns in compiled:
        tvm_fusion.compile(model(columns), "llvm", verify=False)
    gc.collect()
    ours = sum(str(type(x).__module__).startswith("tvm_fusion") for x in gc.get_objects())
    return private_bytes(), ours


def test_a_compile_leaves_nothing_behind_but_what_is_known_of_structures(monkeypatch):
    monkeypatch.setattr(structure, "_RECENT", deque(maxlen=0))  # nothing is
    memory, objects = held(range(17, 19))
    more, others = held(range(19, 24))
    assert others - objects < 5 * 50  # 25 in caches of so many entries; 107 with structures
    assert more - memory < 5 << 18


def test_what_is_known_of_structures_is_bounded_for_each_device(monkeypatch):
    monkeypatch.setattr(structure, "_RECENT", deque(maxlen=4))
    monkeypatch.setattr(structure, "MOST_KNOWN", 3)
    hw = policy = SimpleNamespace(fingerprint=lambda: "of this machine")
    first = structure.structures_for(hw, policy, (), None)
    assert structure.structures_for(hw, policy, (), None) is first
    first.known.update(dict.fromkeys([(1,), (2,), (3,)]))
    assert structure.structures_for(hw, policy, (), None) is not first
    assert len(structure._RECENT) == 1


@pytest.mark.nightly
def test_three_hundred_compiles_grow_by_a_bounded_amount():
    before, _ = held(range(17, 20))
    after, _ = held(range(20, 320))
    assert after - before < 40 << 20  # 26 MB of structures, and 0.03 a compile
