"""One team of threads for torch's operators and TVM's kernels.

torch runs its operators on a team of OpenMP's threads, TVM its kernels on a pool of its own, and
the threads of both spin for a while after each, on the cores that the other wants: where calls take
turns, each waits for slices of the scheduler. Spinning less makes both slow by themselves, since
threads that sleep have to be woken.

Here the parallel loops of TVM's modules go through a launcher that runs them on the team of torch,
where torch is loaded:

    kernel -> launch(lambda, data, tasks=0) -> GOMP_parallel(work, job)     torch's OpenMP is there
                                            -> TVMBackendParallelLaunch     it is not

TVM fills a pointer of each module with the address of its launcher when the module is loaded, from
a table that is the process's: so does `install`, for all modules that are loaded afterwards. The
launcher is LLVM IR that TVM compiles, since a call of it must not take longer than TVM's own.

Neither torch's team nor TVM's pool is there in a child that a process with threads forks (a worker
of torch's DataLoader): whoever opens a loop on them waits for ever. Loops run in the thread that
calls there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from .native import address_of, library, load_ir

_POINTER = b"__TVMBackendParallelLaunch"  # of a module, to what launches its parallel loops

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_sharing: tuple[int, bool] | None = None  # what `share_team` was asked for
_had_threads = False  # this process, when it forked last
_alone = False  # whether this is a child of such a process


class _State(ctypes.Structure):
    """`@state` of the launcher: where it finds what it calls, and how many tasks it makes.

    As long as `parallel` is null, loops go to `pool`. A team of another size than torch's would be
    made and unmade in turns with it: where torch has more threads, those without a task do nothing.
    """

    _fields_ = (
        ("parallel", ctypes.c_void_p),  # GOMP_parallel
        ("thread_num", ctypes.c_void_p),  # omp_get_thread_num
        ("num_threads", ctypes.c_void_p),  # omp_get_num_threads
        ("pool", ctypes.c_void_p),  # TVMBackendParallelLaunch
        ("take_error", ctypes.c_void_p),  # TVMFFIErrorMoveFromRaised
        ("set_error", ctypes.c_void_p),  # TVMFFIErrorSetRaised
        ("drop", ctypes.c_void_p),  # TVMFFIObjectDecRef
        ("max_threads", ctypes.c_void_p),  # omp_get_max_threads
        ("threads", ctypes.c_int32),
        ("least", ctypes.c_int32),  # of torch's team, to be used as it is
    )


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launcher of this process: the address of `@launch`, what it looks at, and the address of
    `@alone`, which runs a loop in the thread that calls.
    """

    address: int
    state: _State
    alone: int


def share_team(threads: int, exactly: bool) -> bool:
    """Let loops run on torch's team from now on, if torch is loaded and has one.

    Parameters
    ----------
    threads : int
        That work on a loop.
    exactly : bool
        Whether also where torch was given fewer (`torch.set_num_threads`), but for one, which is no
        team; else as many as it was given.

    Returns
    -------
    bool
        Whether they do.
    """
    global _sharing
    if _alone:
        return False
    if _sharing == (threads, exactly):
        return True
    launcher, functions = install(), _openmp_of_torch()
    if launcher is None or functions is None:
        return False
    with _lock:
        state = launcher.state
        state.threads, state.least = threads, threads if exactly else 2
        state.thread_num, state.num_threads, state.max_threads = functions[1:]
        state.parallel = functions[0]  # from here on loops go there
        _sharing = threads, exactly
    return True


@cache
def install() -> Launcher | None:
    """Make the launcher that of all modules that TVM loads from now on; once in a process.

    Returns None where TVM's libraries lack what it takes: modules launch as TVM has it.
    """
    try:
        runtime, ffi = library("libtvm_runtime"), library("libtvm_ffi")
        pool = address_of(runtime.TVMBackendParallelLaunch)
        names = ("TVMFFIErrorMoveFromRaised", "TVMFFIErrorSetRaised", "TVMFFIObjectDecRef")
        errors = [address_of(getattr(ffi, name)) for name in names]
        register = ffi.TVMFFIEnvModRegisterContextSymbol
        module = load_ir(_LAUNCHER)
    except (AttributeError, OSError, ValueError) as error:
        _logger.info("parallel loops stay in TVM's pool: %s", error)
        return None
    # Modules keep the address for as long as they live, which may be longer than this module does.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    state = _State.from_address(module["state"]())
    launcher = Launcher(module["launcher"](), state, module["alone"]())
    launcher.state.pool = launcher.alone if _alone else pool
    launcher.state.take_error, launcher.state.set_error, launcher.state.drop = errors
    return launcher if register(_POINTER, ctypes.c_void_p(launcher.address)) == 0 else None


def is_alone() -> bool:
    """Whether loops run in the thread that calls, as this is a child of a process with threads."""
    return _alone


def _before_fork() -> None:
    global _had_threads
    _had_threads = _alone or _thread_count() > 1


def _in_child() -> None:
    global _alone, _lock
    _lock = threading.Lock()  # another thread may have held it
    _alone = _had_threads
    launcher = install() if _alone and install.cache_info().currsize else None
    if launcher is not None:
        launcher.state.parallel, launcher.state.pool = None, launcher.alone


def _thread_count() -> int:
    """The threads of this process, those that are none of Python's among them; more than one where
    the system does not say.
    """
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 2


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def _openmp_of_torch() -> tuple[int, ...] | None:
    """What opens a parallel region in the OpenMP that torch uses, what tells within it the number
    of a thread and of all, and before it how many there will be; None without torch, or where
    torch has another backend.
    """
    torch = sys.modules.get("torch")
    # while torch is being imported, it has no version yet
    return None if getattr(torch, "__version__", None) is None else _functions_of(torch)


@cache
def _functions_of(torch: Any) -> tuple[int, ...] | None:
    try:
        if not torch.backends.openmp.is_available():
            return None
        openmp = ctypes.CDLL(None)  # torch loads its dependencies for all to see
        numbers = ("omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")
        names = [openmp.GOMP_parallel, *(getattr(openmp, name) for name in numbers)]
    except (AttributeError, OSError, TypeError):  # a system whose OpenMP has another interface
        return None
    return tuple(map(address_of, names))


# int lambda(int task, Env* env, void* data) does its part of a loop and returns 0, or else has
# raised an error in its thread. Env is TVMParallelGroupEnv: the counters of a barrier, a cache line
# a task, and the number of tasks. A job is a loop: lambda, data, counters, the first error of its
# tasks, and how many they are at most.
_LAUNCHER = """\
%State = type { ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, i32, i32 }
%Env = type { ptr, i32 }
%Job = type { ptr, ptr, ptr, ptr, i32 }

@state = internal global %State zeroinitializer

define internal i32 @launch(ptr %lambda, ptr %data, i32 %tasks) {
  %parallel = load ptr, ptr @state
  %alone = icmp eq ptr %parallel, null
  %counted = icmp ne i32 %tasks, 0
  %elsewhere = or i1 %alone, %counted
  br i1 %elsewhere, label %pool, label %team

pool:
  %at.launch = getelementptr %State, ptr @state, i32 0, i32 3
  %launch = load ptr, ptr %at.launch
  %status = call i32 %launch(ptr %lambda, ptr %data, i32 %tasks)
  ret i32 %status

team:
  %at.threads = getelementptr %State, ptr @state, i32 0, i32 8
  %threads = load i32, ptr %at.threads
  %at.most = getelementptr %State, ptr @state, i32 0, i32 7
  %most = load ptr, ptr %at.most
  %team.size = call i32 %most()
  %at.least = getelementptr %State, ptr @state, i32 0, i32 9
  %least = load i32, ptr %at.least
  %suits = icmp sge i32 %team.size, %least
  %several = icmp sgt i32 %threads, 1
  %shared = and i1 %suits, %several
  %size = select i1 %shared, i32 %team.size, i32 %threads
  %lines = mul i32 %threads, 64
  %counters = alloca i8, i32 %lines, align 64
  call void @llvm.memset.p0.i32(ptr align 64 %counters, i8 0, i32 %lines, i1 false)
  %job = alloca %Job
  %job.data = getelementptr %Job, ptr %job, i32 0, i32 1
  %job.counters = getelementptr %Job, ptr %job, i32 0, i32 2
  %job.error = getelementptr %Job, ptr %job, i32 0, i32 3
  %job.tasks = getelementptr %Job, ptr %job, i32 0, i32 4
  store ptr %lambda, ptr %job
  store ptr %data, ptr %job.data
  store ptr %counters, ptr %job.counters
  store ptr null, ptr %job.error
  store i32 %threads, ptr %job.tasks
  call void %parallel(ptr @work, ptr %job, i32 %size, i32 0)
  %error = load atomic ptr, ptr %job.error acquire, align 8
  %right = icmp eq ptr %error, null
  br i1 %right, label %done, label %failed

done:
  ret i32 0

failed:
  %at.set = getelementptr %State, ptr @state, i32 0, i32 5
  %set = load ptr, ptr %at.set
  call void %set(ptr %error)
  call void @drop(ptr %error)
  ret i32 -1
}

define internal i32 @alone(ptr %lambda, ptr %data, i32 %tasks) {
  %counter = alloca [64 x i8], align 64
  call void @llvm.memset.p0.i32(ptr align 64 %counter, i8 0, i32 64, i1 false)
  %env = alloca %Env
  %env.tasks = getelementptr %Env, ptr %env, i32 0, i32 1
  store ptr %counter, ptr %env
  store i32 1, ptr %env.tasks
  %status = call i32 %lambda(i32 0, ptr %env, ptr %data)
  ret i32 %status
}

define internal void @work(ptr %job) {
  %at.number = getelementptr %State, ptr @state, i32 0, i32 1
  %number = load ptr, ptr %at.number
  %task = call i32 %number()
  %at.count = getelementptr %State, ptr @state, i32 0, i32 2
  %count = load ptr, ptr %at.count
  %size = call i32 %count()
  %job.tasks = getelementptr %Job, ptr %job, i32 0, i32 4
  %threads = load i32, ptr %job.tasks
  %tasks = call i32 @llvm.smin.i32(i32 %size, i32 %threads)
  %idle = icmp sge i32 %task, %tasks
  br i1 %idle, label %done, label %run

run:
  %env = alloca %Env
  %env.tasks = getelementptr %Env, ptr %env, i32 0, i32 1
  %job.counters = getelementptr %Job, ptr %job, i32 0, i32 2
  %counters = load ptr, ptr %job.counters
  store ptr %counters, ptr %env
  store i32 %tasks, ptr %env.tasks
  %lambda = load ptr, ptr %job
  %job.data = getelementptr %Job, ptr %job, i32 0, i32 1
  %data = load ptr, ptr %job.data
  %status = call i32 %lambda(i32 %task, ptr %env, ptr %data)
  %right = icmp eq i32 %status, 0
  br i1 %right, label %done, label %failed

failed:
  %mine = alloca ptr
  %at.take = getelementptr %State, ptr @state, i32 0, i32 4
  %take = load ptr, ptr %at.take
  call void %take(ptr %mine)
  %error = load ptr, ptr %mine
  %job.error = getelementptr %Job, ptr %job, i32 0, i32 3
  %swapped = cmpxchg ptr %job.error, ptr null, ptr %error acq_rel acquire
  %first = extractvalue { ptr, i1 } %swapped, 1
  br i1 %first, label %done, label %later

later:
  call void @drop(ptr %error)
  br label %done

done:
  ret void
}

define internal void @drop(ptr %error) {
  %at.drop = getelementptr %State, ptr @state, i32 0, i32 6
  %drop = load ptr, ptr %at.drop
  %status = call i32 %drop(ptr %error)
  ret void
}

declare void @llvm.memset.p0.i32(ptr, i8, i32, i1)
declare i32 @llvm.smin.i32(i32, i32)

define i32 @__tvm_ffi_launcher(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  call void @return_address(ptr %result, i64 ptrtoint (ptr @launch to i64))
  ret i32 0
}

define i32 @__tvm_ffi_state(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  call void @return_address(ptr %result, i64 ptrtoint (ptr @state to i64))
  ret i32 0
}

define i32 @__tvm_ffi_alone(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  call void @return_address(ptr %result, i64 ptrtoint (ptr @alone to i64))
  ret i32 0
}

define internal void @return_address(ptr %result, i64 %address) {
  store i32 1, ptr %result ; kTVMFFIInt
  %value = getelementptr i8, ptr %result, i32 8
  store i64 %address, ptr %value
  ret void
}
"""
