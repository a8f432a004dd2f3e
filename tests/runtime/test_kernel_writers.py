"""Kernels that processes beside this one write."""

import multiprocessing
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow import kernel_writers
from tvm_fusion.flow import planned as planned_functions
from tvm_fusion.flow.kernel_writers import Job, KernelWriters, current_writers, writers_beside
from tvm_fusion.flow.kernels_ahead import KernelsAhead
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.search import search
from tvm_fusion.runtime.build.cuda_compiler import Compiler, DeviceCode

from ..support.graphs import module

TARGET, H200 = resolve_target("nvidia_h200")
_, A100 = resolve_target("nvidia_a100")
POLICY = load_policy(None)
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def _no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv("TVM_FUSION_KERNEL_CACHE", "1")
    monkeypatch.setattr(Compiler, "compile", lambda self, source, arch: DeviceCode(b"", ""))


@pytest.fixture
def planned():
    """Three kernels: a product, rows, points."""

    def body(bb, x, y, w):
        rows = bb.emit(op.nn.softmax(bb.emit(op.matmul(x, w))))
        return bb.emit(op.add(bb.emit(op.cumsum(rows, axis=1)), y))

    sizes = (64, 128), (64, 64), (128, 64)
    mod = module(body, *((size, "float16") for size in sizes))
    return Planned.of(mod, TARGET, H200, POLICY)


class Noting:
    """Writers that note what they are given; `done` are answered."""

    compiling = None

    def __init__(self, done=()):
        self.given, self.done = [], done

    def job(self, job):
        return job

    def begin(self, jobs, *how):
        self.given += [job.name for job in jobs]
        for job in jobs:
            if job.name in self.done:
                job.answer.set_result(None)

    def stop(self):
        self.given.append("stopped")


def job(path):
    return Job("kernel", None, "pointwise", path, lambda code: code)


def written(planned, writers=None):
    with KernelsAhead(TARGET, H200, POLICY, writers) as ahead:
        return planned.write(ahead), ahead.codes


def test_a_process_writes_what_this_one_does(planned, tmp_path, monkeypatch):
    _, plain = written(planned)
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path / "other"))
    jobs, offered = [], KernelWriters.begin

    def all_answered(self, given, *how):
        offered(self, given, *how)
        jobs.extend(given)
        assert [job.answer.result(PATIENCE_S) is not None for job in given] == [True] * len(given)

    monkeypatch.setattr(KernelWriters, "begin", all_answered)
    found, codes = written(planned, KernelWriters(1, TARGET, H200))
    assert codes.keys() == plain.keys() == {job.name for job in jobs}
    for name, code in codes.items():
        assert [u.source for u in code.units] == [u.source for u in plain[name].units]
        assert code.host.script(show_meta=True) == plain[name].host.script(show_meta=True)
    assert all(job.path.exists() for job in jobs)
    assert found.planned.plan == planned.plan


def test_what_no_process_has_begun_is_written_here_from_the_end_on(planned, monkeypatch):
    order, add = [], KernelsAhead.add

    def noted(self, name, *how):
        order.append(name)
        return add(self, name, *how)

    monkeypatch.setattr(KernelsAhead, "add", noted)
    writers = Noting()
    written(planned, writers)
    assert len(order) > 1
    assert writers.given == [*reversed(order), "stopped"]


def test_what_a_process_cannot_write_is_written_here(planned, tmp_path, monkeypatch):
    _, plain = written(planned)
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path / "other"))
    _, codes = written(planned, Noting(done=list(plain)))
    assert codes.keys() == plain.keys()


def test_a_process_that_ends_leaves_what_waits(tmp_path):
    writers = KernelWriters(1, TARGET, H200)
    one = job(tmp_path / "kernel.json")
    writers.stop()
    writers.begin([one], TARGET, H200, POLICY)
    assert one.answer.cancel()


def test_a_process_that_hangs_is_stopped(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_writers, "LONGEST_S", 0.1)
    seen = []

    def silent(self, hw):
        ours, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(["sleep", "60"])
        self._connection, self._lock, self._is_ready = ours, threading.Lock(), True
        seen.append((self, theirs))

    monkeypatch.setattr(kernel_writers._Process, "__init__", silent)
    _, plain = written(planned)
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path / "other"))
    _, codes = written(planned, KernelWriters(2, TARGET, H200))
    assert codes.keys() == plain.keys()
    assert [process._process.wait(PATIENCE_S) for process, _ in seen] == [-signal.SIGKILL] * 2


def test_a_program_that_is_no_python_starts_no_processes(monkeypatch):
    monkeypatch.setenv(kernel_writers.VARIABLE, "2")
    monkeypatch.setattr(kernel_writers, "KernelWriters", lambda *_: pytest.fail("started"))
    for name, value in (("executable", ""), ("executable", None), ("frozen", True)):
        with monkeypatch.context() as changed, writers_beside():
            changed.setattr(sys, name, value, raising=False)
            kernel_writers.begin(chain(1), TARGET, H200, POLICY)


@pytest.mark.parametrize(
    ("asked", "bindings", "cores", "count"),
    [
        ("3", 1, 1, 3),
        ("0", 999, 64, 0),
        ("", 31, 64, 0),
        ("", 64, 64, 2),
        ("", 999, 64, 4),
        ("", 999, 11, 2),
        ("many", 999, 3, 0),
    ],
)
def test_as_many_processes_start_as_are_asked_for_or_pay(
    monkeypatch, asked, bindings, cores, count
):
    began, mod = [], chain(bindings)
    monkeypatch.setenv(kernel_writers.VARIABLE, asked)
    monkeypatch.setattr(kernel_writers, "available_cores", lambda: cores)
    monkeypatch.setattr(kernel_writers, "KernelWriters", lambda n, *_: began.append(n) or Noting())
    kernel_writers.begin(mod, TARGET, H200, POLICY)
    assert not began  # nothing is compiled
    with writers_beside():
        kernel_writers.begin(mod, TARGET, H200, POLICY)
        started = current_writers()
    assert began == [count] * bool(count)
    assert (started.given == ["stopped"]) if count else (started is None)
    assert current_writers() is None


def chain(bindings):
    def body(bb, x):
        for _ in range(bindings - 1):
            x = bb.emit(op.exp(x))
        return op.exp(x)

    return module(body, ((8,), "float16"))


@pytest.fixture
def idle():
    """Writers whose processes begin with nothing."""
    writers = KernelWriters(0, TARGET, H200)
    yield writers
    writers.stop()


def test_what_is_asked_for_again_is_the_job_that_it_was(idle, tmp_path):
    first, other = (job(tmp_path / name) for name in "ab")
    assert [idle.job(one) for one in (first, other)] == [first, other]
    assert idle.job(job(first.path)) is first
    first.answer.cancel()
    again = job(first.path)
    assert idle.job(again) is again


def test_what_the_last_plan_does_not_have_is_dropped_unless_it_is_begun(idle, tmp_path):
    begun, dropped, kept, new = (job(tmp_path / name) for name in "abcd")
    idle.begin([begun, dropped, kept], TARGET, H200, POLICY)
    assert idle._next()[0] is begun
    idle.begin([new, kept, begun], TARGET, A100, POLICY)
    assert dropped.answer.cancelled()
    assert begun.answer.running()
    (first, how), (second, _) = idle._next(), idle._next()
    assert [first, second, idle._next()] == [new, kept, None]
    assert how[1] is A100  # as it was asked for, whichever process takes it


def test_kernels_of_the_best_plan_so_far_are_begun_before_the_last_one_is_there(monkeypatch):
    """A network of equal layers, of which a few are planned first, and the last weight of which may
    be stored with longer rows.
    """
    words = relax.const(np.ones((256, 1001), "float16"))

    def body(bb, x, *weights):
        for w in weights:
            inner = bb.emit(op.nn.silu(bb.emit(op.matmul(bb.emit(op.nn.softmax(x)), w))))
            x = bb.emit(op.add(x, inner))
        return op.matmul(x, words)

    sizes = (512, 256), *[(256, 256)] * 12
    mod = module(body, *((size, "float16") for size in sizes))
    offered = []

    class Offered(Noting):
        def begin(self, jobs, *how):
            offered.append({(job.name, job.path) for job in jobs})

    monkeypatch.setattr(kernel_writers, "_count", lambda mod: 1)
    monkeypatch.setattr(kernel_writers, "KernelWriters", lambda *_: Offered())
    with writers_beside():
        found = Planned.of(mod, TARGET, H200, POLICY)
        so_far = offered[-1]
        with KernelsAhead(TARGET, H200, POLICY, current_writers()) as ahead:
            found.write(ahead)
    assert so_far
    assert offered[-1] == so_far


def test_kernels_are_begun_before_the_first_plan_is_improved(monkeypatch):
    begun, improve = [], search.improve
    noting = Noting()

    def improved(*what):
        begun.append([*noting.given])
        return improve(*what)

    monkeypatch.setattr(search, "improve", improved)
    monkeypatch.setattr(kernel_writers, "_count", lambda mod: 1)
    monkeypatch.setattr(kernel_writers, "KernelWriters", lambda *_: noting)
    mod = module(lambda bb, x: bb.emit(op.nn.softmax(bb.emit(op.exp(x)))), ((64, 256), "float16"))
    with writers_beside():
        found = Planned.of(mod, TARGET, H200, POLICY)
        noting.given.clear()
        written(found, noting)
    assert begun[0]
    assert begun[0] == [name for name in noting.given if name != "stopped"]  # of the last plan


def test_the_last_plan_is_applied_once_if_it_was_the_best_before(monkeypatch):
    words, applied = relax.const(np.ones((256, 1001), "float16")), []
    apply = planned_functions.materialize

    def counted(*how):
        applied.append(how)
        return apply(*how)

    monkeypatch.setattr(planned_functions, "materialize", counted)
    monkeypatch.setattr(kernel_writers, "_count", lambda mod: 1)
    monkeypatch.setattr(kernel_writers, "KernelWriters", lambda *_: Noting())
    mod = module(lambda bb, x: op.matmul(bb.emit(op.nn.softmax(x)), words), ((64, 256), "float16"))
    with writers_beside():
        found = Planned.of(mod, TARGET, H200, POLICY)
        before = len(applied)
        written(found)
    assert before == len(applied) > 0
