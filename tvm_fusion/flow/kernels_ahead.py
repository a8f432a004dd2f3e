"""Kernels whose code is known before their module is built: nvcc compiles them meanwhile.

    PrimFunc of a group -> [kernel cache] -> written kernel -> code -> nvcc begins
                                                                 |
    module of all kernels  -----------------> build  <-----------+

A kernel is lowered as soon as it is written, in a thread of its own (TVM's passes hold no lock of
Python's), so that lowering and compiling the first ones and writing the next ones take place at the
same time. One that the kernel cache has is neither written nor lowered: a
declaration stands for it in the module. Where several functions become one module, so do their
kernels: one that another function had is not written again.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import tvm
import tvm_ffi
from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import BuildError
from ..host.cores import available_cores, use_all_cores
from ..runtime.build.cubin_cache import Compiling
from ..runtime.build.cuda_compiler import cuda_arch
from ..runtime.build.kernel_code import KernelCode, kernel_code
from ..runtime.build.lowering import TIRX_ATTR, is_tirx
from ..transform.apply.write_kernels import Wanted
from ..transform.functions.unique_names import FreshNames
from .kernel_cache import KernelCache
from .kernel_writers import Job, KernelWriters, current_writers, has_plain_passes

MOST_LOWERED = 2
"""Kernels at a time: they are lowered as fast as they are written, and a quarter of it is Python's,
for whose lock the writer waits.
"""
logger = logging.getLogger(__name__)


class KernelsAhead:
    """The kernels of one module; a context manager, left when the module is built.

    Does not handle: kernels of the s_tir dialect, which the lowering of Relax looks into.

    Attributes
    ----------
    compiling : Compiling
    """

    def __init__(
        self,
        target: tvm.target.Target,
        hw: HardwareProfile,
        policy: Policy,
        writers: KernelWriters | None = None,
        compiling: Compiling | None = None,
    ) -> None:
        """`writers` are other processes that write kernels as well; `compiling` is its own where
        none is given.
        """
        self._codes: dict[str, Future[KernelCode | None]] = {}
        self._pool = ThreadPoolExecutor(
            min(MOST_LOWERED, available_cores()), initializer=use_all_cores
        )
        self.compiling = compiling or Compiling(cuda_arch(target))
        self._target = target
        self._hw, self._policy, self._writers = hw, policy, writers
        self._cache = KernelCache.of(target, hw, policy)
        self._looked_up: dict[tuple[str, str, str], Path | None] = {}

    def __enter__(self) -> Self:
        self.compiling.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writers is not None:
            self._writers.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.compiling.__exit__(*exception)

    @property
    def codes(self) -> dict[str, KernelCode]:
        """By name of PrimFunc, once all that was added is lowered."""
        found = {name: code.result() for name, code in self._codes.items()}
        return {name: code for name, code in found.items() if code is not None}

    def forget(self) -> None:
        """The function is written anew: its PrimFuncs may be others."""
        self._codes.clear()
        self._looked_up.clear()

    def in_turn(
        self, wanted: Sequence[Wanted], name_of: Callable[[Wanted], str] = attrgetter("name")
    ) -> Iterator[Wanted]:
        """The kernels that are to be written, each when it is due: those that other processes write
        come last; what these have not begun when there is nothing else is due here, from the end
        on: what takes nvcc longest stands first. `name_of` says what each is called here.

        Kernels of equal PrimFuncs are one, which is written here.
        """
        jobs = self.offered(wanted, name_of)
        yield from (one for one in wanted if one not in jobs)
        late = []
        for one in reversed(list(jobs)):
            if jobs[one].answer.cancel():
                del self._codes[jobs[one].name]
                yield one
            else:
                late.append(one)
        yield from late

    def offered(
        self, wanted: Sequence[Wanted], name_of: Callable[[Wanted], str] = attrgetter("name")
    ) -> dict[Wanted, Job]:
        """What other processes may write from now on."""
        if self._writers is None or self._cache is None or not has_plain_passes():
            return {}
        alike = Counter(map(_structure, wanted))
        jobs = {}
        for one in wanted:
            name = name_of(one)
            if one.choice or name in self._codes or alike[_structure(one)] > 1:
                continue
            path = self._path(name, one.func, one.class_name, "")
            if not path.exists():
                job = Job(name, one.func, one.class_name, path, self._begun)
                jobs[one] = self._writers.job(job)
                self._codes[name] = jobs[one].answer
        self._writers.begin(list(jobs.values()), self._target, self._hw, self._policy)
        return jobs

    def known(
        self, name: str, func: tirx.PrimFunc, class_name: str, choice: str = ""
    ) -> tirx.PrimFunc | None:
        """The declaration of a PrimFunc's kernel, if its code is known; nvcc begins then. `choice`
        is what tuning chose, empty for the untuned kernel.
        """
        begun = self._codes.get(name)
        if begun is None or begun.result() is None:
            path = self._path(name, func, class_name, choice)
            code = path and self._cache.read(path)
            if code is None:
                return None
            self._codes[name] = _done(self._begun(code))
        return func.with_body(tirx.Evaluate(0)).with_attr(TIRX_ATTR, True)

    def add(
        self,
        name: str,
        func: tirx.PrimFunc,
        class_name: str,
        kernel: tirx.PrimFunc,
        choice: str = "",
    ) -> None:
        """Lower the kernel that was written for a PrimFunc, and let nvcc begin. One that does not
        lower is left to the build, which says why.
        """
        if not is_tirx(kernel):
            return
        path = self._path(name, func, class_name, choice)
        context = tvm.transform.PassContext.current()
        if context.instruments:  # they see one pass after the other, in the thread that has them
            self._codes[name] = _done(self._lowered(name, kernel, path))
        else:
            same = partial(_same_context, context)
            self._codes[name] = self._pool.submit(self._lowered, name, kernel, path, same)

    def _lowered(
        self,
        name: str,
        kernel: tirx.PrimFunc,
        path: Path | None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> KernelCode | None:
        """The code of a kernel, which nvcc begins with; None where it does not lower."""
        try:
            with context():
                code = kernel_code(name, kernel, self._target, early=True)
        except BuildError as error:
            logger.info("%s", error)
            return None
        self._begun(code)
        if path:
            self._cache.keep(path, code)
        return code

    def _path(self, name: str, func: tirx.PrimFunc, class_name: str, choice: str) -> Path | None:
        """Where the cache has the code of a PrimFunc; its text is a hundredth of a second's work,
        and asked for before it is written and behind it.
        """
        if self._cache is None:
            return None
        key = name, class_name, choice
        if key not in self._looked_up:
            self._looked_up[key] = self._cache.path(name, func, class_name, choice)
        return self._looked_up[key]

    def _begun(self, code: KernelCode) -> KernelCode:
        for unit in code.units:
            self.compiling.begin(unit.source)
        return code


def _structure(one: Wanted) -> tuple[str, int]:
    """Equal for kernels of equal PrimFuncs."""
    func = one.func
    plain = func.without_attr("global_symbol") if "global_symbol" in func.attrs else func
    return one.class_name, tvm_ffi.structural_hash(plain)


def _done(code: KernelCode | None) -> Future[KernelCode | None]:
    found: Future[KernelCode | None] = Future()
    found.set_result(code)
    return found


def _same_context(context: tvm.transform.PassContext) -> tvm.transform.PassContext:
    """The options of passes that another thread has."""
    required, disabled = list(context.required_pass), list(context.disabled_pass)
    config = dict(context.config)
    return tvm.transform.PassContext(context.opt_level, required, disabled, config=config)


class KernelsOfAll:
    """The kernels of several functions that become one module, in which equal ones are one.

    Attributes
    ----------
    names : dict of str to dict of str to str
        By function, what its PrimFuncs are called in the module.
    """

    def __init__(self, ahead: KernelsAhead | None, fresh: FreshNames) -> None:
        """`fresh` gives the names of the module; without `ahead` there is nothing ahead."""
        self.names: dict[str, dict[str, str]] = {}
        self._ahead, self._fresh = ahead, fresh
        self._known: dict[tuple[str, str, int], list[tuple[tirx.PrimFunc, str]]] = {}

    def of(self, function: str) -> "KernelsOfOne | None":
        """The kernels of one of the functions."""
        if self._ahead is None:
            return None
        return KernelsOfOne(self._ahead, self._name, self.names.setdefault(function, {}))

    def _name(self, name: str, func: tirx.PrimFunc, class_name: str, choice: str) -> str:
        """The name of a PrimFunc's kernel: that of an equal one, or a new one like its own."""
        plain = func.without_attr("global_symbol") if "global_symbol" in func.attrs else func
        key = (class_name, choice, tvm_ffi.structural_hash(plain))
        alike = self._known.setdefault(key, [])
        for other, found in alike:
            if tvm_ffi.structural_equal(other, plain):
                return found
        alike.append((plain, self._fresh(name)))
        return alike[-1][1]


class KernelsOfOne:
    """`KernelsAhead` for one function of several: see `KernelsOfAll`."""

    def __init__(
        self, ahead: KernelsAhead, name_of: Callable[..., str], names: dict[str, str]
    ) -> None:
        self._ahead, self._name_of, self._names = ahead, name_of, names

    def forget(self) -> None:
        """See `KernelsAhead`; what other functions have stays known."""
        self._names.clear()

    def in_turn(self, wanted: Sequence[Wanted]) -> Iterator[Wanted]:
        """See `KernelsAhead`."""

        def name_of(one: Wanted) -> str:
            return self._name_of(one.name, one.func, one.class_name, one.choice)

        return self._ahead.in_turn(wanted, name_of)

    def known(
        self, name: str, func: tirx.PrimFunc, class_name: str, choice: str = ""
    ) -> tirx.PrimFunc | None:
        """See `KernelsAhead`."""
        self._names[name] = own = self._name_of(name, func, class_name, choice)
        return self._ahead.known(own, func, class_name, choice)

    def add(
        self,
        name: str,
        func: tirx.PrimFunc,
        class_name: str,
        kernel: tirx.PrimFunc,
        choice: str = "",
    ) -> None:
        """See `KernelsAhead`."""
        self._names[name] = own = self._name_of(name, func, class_name, choice)
        self._ahead.add(own, func, class_name, kernel, choice)


def kernels_ahead(
    target: tvm.target.Target, hw: HardwareProfile, policy: Policy
) -> AbstractContextManager[KernelsAhead | None]:
    """The kernels of a module for CUDA; None elsewhere."""
    if target.kind.name != "cuda":
        return nullcontext()
    return KernelsAhead(target, hw, policy, current_writers())


def begin_kernels(
    wanted: Sequence[Wanted], target: tvm.target.Target, hw: HardwareProfile, policy: Policy
) -> None:
    """Has other processes begin with the kernels of a plan that may not be the last one. Those that
    the last one has, too, are its own: what decides a kernel is in the path of its job.
    """
    writers = current_writers()
    if writers is not None:
        KernelsAhead(target, hw, policy, writers, writers.compiling).offered(wanted)
