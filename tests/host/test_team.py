"""Parallel loops on torch's team of threads."""

import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import tvm
from tvm.script import tirx as T

import tvm_fusion
from tvm_fusion.host import team as _team
from tvm_fusion.host.native import library
from tvm_fusion.host.threads import kernel_threads, thread_count
from tvm_fusion.runtime.calls.signature import function_of, load_library

THREADS = max(2, thread_count())
Lambda = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
Launch = ctypes.CFUNCTYPE(ctypes.c_int, Lambda, ctypes.c_void_p, ctypes.c_int)

pytestmark = pytest.mark.skipif(
    _team._openmp_of_torch() is None, reason="torch was built without OpenMP of GNU's interface"
)


class Env(ctypes.Structure):
    """TVMParallelGroupEnv."""

    _fields_ = (("counters", ctypes.c_void_p), ("tasks", ctypes.c_int32))


@pytest.fixture
def launch():
    """The launcher, on a team of at least two."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    assert _team.share_team(THREADS, exactly=False)
    yield Launch(_team.install().address)
    torch.set_num_threads(before)
    kernel_threads()


def number_of_tasks(env):
    return Env.from_address(env).tasks


@pytest.mark.parametrize("data", [None, 12])
def test_each_task_runs_once_and_is_given_the_loop_s_data(launch, data):
    found = []

    def task(number, env, given):
        found.append((number, number_of_tasks(env), given, threading.get_ident()))
        return 0

    assert launch(Lambda(task), data, 0) == 0
    assert sorted(found)[0][:3] == (0, THREADS, data)
    assert sorted(number for number, *_ in found) == list(range(THREADS))
    assert len({thread for *_, thread in found}) == THREADS


@pytest.mark.parametrize(
    ("wanted", "exactly", "of_torch", "tasks"),
    [
        (2, False, 2, 2),
        (2, False, 3, 2),  # one of torch's has nothing to do
        (3, False, 2, 2),  # no more than torch was given
        (3, True, 2, 3),  # the user asked for them
        (2, False, 1, 2),  # one thread is no team
        (1, False, 3, 1),
        (1, True, 1, 1),
    ],
)
def test_the_team_is_torch_s_where_that_suits(launch, wanted, exactly, of_torch, tasks):
    torch.set_num_threads(of_torch)
    assert _team.share_team(wanted, exactly)
    found = []

    def task(number, env, _):
        found.append((number, number_of_tasks(env)))
        return 0

    assert launch(Lambda(task), None, 0) == 0
    assert sorted(found) == [(number, tasks) for number in range(tasks)]


def test_a_loop_within_a_task_is_run_by_the_task_s_thread(launch):
    inner = []

    def within(number, env, _):
        inner.append((number, number_of_tasks(env)))
        return 0

    within = Lambda(within)
    assert launch(Lambda(lambda *_: launch(within, None, 0)), None, 0) == 0
    assert inner == [(0, 1)] * THREADS


def test_a_barrier_lets_no_task_pass_before_all_have_come(launch):
    barrier = library("libtvm_runtime").TVMBackendParallelBarrier
    barrier.argtypes = (ctypes.c_int, ctypes.c_void_p)
    events = []

    def task(number, env, _):
        events.append("came")
        barrier(number, env)
        events.append("passed")
        return 0

    for _ in range(3):
        assert launch(Lambda(task), None, 0) == 0
        assert events == ["came"] * THREADS + ["passed"] * THREADS
        events.clear()


@T.prim_func
def checked(values: T.Buffer((64,), "float32"), least: T.float32):
    for i in T.parallel(64):
        assert values[i] >= least, "too small"
        values[i] = values[i] + T.float32(1)


def built(func):
    library = tvm.tirx.build(tvm.IRModule({"main": func}), target="llvm")
    return function_of(library, "main", tvm.cpu())


@pytest.mark.parametrize("wrong", [[0], [63], range(64)])
def test_an_error_of_a_task_is_the_caller_s(wrong):
    function = built(checked)
    numbers = np.arange(64, dtype="float32")
    values = tvm.runtime.tensor(numbers)
    function(values, 0.0)
    np.testing.assert_array_equal(values.numpy(), numbers + 1)
    numbers[list(wrong)] = -1
    for _ in range(3):
        with pytest.raises(Exception, match="too small"):
            function(tvm.runtime.tensor(numbers), 0.0)
    values = tvm.runtime.tensor(numbers)
    function(values, -1.0)  # the error is gone
    np.testing.assert_array_equal(values.numpy(), numbers + 1)


def threads_of_this_process():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux")
@pytest.mark.skipif(thread_count() < 2, reason="a kernel on one core opens no team")
@pytest.mark.parametrize("more", [0, 1])
def test_torch_s_operators_and_ours_run_on_one_team_in_a_new_thread(launch, more):
    team = THREADS + more
    function, counts = built(checked), []
    values, x = tvm.runtime.tensor(np.ones(64, "float32")), torch.ones(1 << 20)

    def calls():
        torch.set_num_threads(team)
        for _ in range(2):
            counts.append(threads_of_this_process())
            function(values, 0.0)
            counts.append(threads_of_this_process())
            x.add(1)

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    before, *after = counts
    assert after == [before + team - 1] * 3


def run_python(code, **environment):
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


LATE = """if True:
    import sys
    sys.modules["torch"] = None  # TVM imports it where it finds it
    import numpy as np
    import tvm
    from tvm.relax import BlockBuilder, TensorType, Var, VirtualMachine, op
    import tvm_fusion
    bb, x = BlockBuilder(), Var("x", TensorType((9, 65), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit_output(bb.emit(op.exp(op.add(x, x))))
        bb.emit_func_output(y)
    module = tvm_fusion.compile(bb.get(), "llvm", verify=False)
    numbers = np.linspace(-1, 1, 9 * 65, dtype="float32").reshape(9, 65)
    first = module(numbers)
    from tvm_fusion.host import team as _team
    print(_team._sharing is None)
    del sys.modules["torch"]
    import torch
    second = module(numbers)
    right = np.allclose(second, np.exp(2 * numbers))
    print(_team._sharing is None, right, np.array_equal(first, second))
"""


def test_a_module_changes_over_to_the_team_when_torch_is_imported():
    assert run_python(LATE) == ["True", "False", "True", "True"]


def test_saved_modules_run_on_the_team(tmp_path):
    library = tvm.tirx.build(tvm.IRModule({"main": checked}), target="llvm")
    library.export_library(str(tmp_path / "kernel.so"))
    function = function_of(load_library(tmp_path / "kernel.so"), "main", tvm.cpu())
    pointer = ctypes.c_void_p.in_dll(
        ctypes.CDLL(str(tmp_path / "kernel.so")), _team._POINTER.decode()
    )
    assert pointer.value == _team.install().address
    values = tvm.runtime.tensor(np.ones(64, "float32"))
    function(values, 0.0)
    np.testing.assert_array_equal(values.numpy(), np.full(64, 2, "float32"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(3))
def test_calls_that_take_turns_give_the_numbers_that_they_give_alone(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (int(torch.randint(1, 200, (), generator=generator)) for _ in range(2))
    x = torch.randn(rows, columns, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(columns, 33), torch.nn.ReLU()).eval()
    with torch.no_grad():
        module = tvm_fusion.compile((model, (x,)), "llvm")
        alone, expected = module(x), model(x)
        for _ in range(20):
            assert torch.equal(model(x), expected)
            assert torch.equal(module(x), alone)
    assert kernel_threads() == thread_count()
