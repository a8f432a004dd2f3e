"""Every fused PrimFunc becomes a kernel of its kernel class.

Functions that are structurally equal (the layers of a model) are written once. A function its class
cannot write is reported, not raised: the caller cuts that group and goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from ...config import HardwareProfile, Policy
from ...errors import TooDeep, Unsupported
from ...host.stages import stepped
from ...ir.graph import OUTPUTS_ATTR, PLACED_ATTR
from ...ir.reader import OPAQUE_PATTERN
from ...kernels.cpu.contraction.panels import mark_constants
from ...kernels.gpu.ahead import EARLY_ATTR
from ...kernels.recurrence.problem import read_recurrence
from ...kernels.registry import family, names
from ...plan.plan import STOCK, UNWRITTEN, FusionPlan
from ..functions.functions import operator_name, with_functions
from .kernel_bodies import TIRX_ATTR, with_plain_scalars

logger = logging.getLogger(__name__)

MANY_TERMS = 8
"""Of windows that are written out: their kernels take the compiler longer than a product's."""

CLASS_ATTR = "tvm_fusion.kernel_class"
"""On fused PrimFuncs between `Materialize` and `WriteKernels`: the class that is to write them."""


@dataclass(frozen=True, eq=False, slots=True)
class Wanted:
    """A kernel that is to be written: its variable in the module, what it computes, its class, and
    what tuning chose.
    """

    gvar: tvm.ir.GlobalVar
    func: tirx.PrimFunc
    class_name: str
    choice: str = ""

    @property
    def name(self) -> str:
        """What its PrimFunc is called."""
        return self.gvar.name_hint


class Ahead(Protocol):
    """Takes the kernels of a function one by one: see `flow.kernels_ahead`."""

    def forget(self) -> None: ...

    def in_turn(self, wanted: Sequence[Wanted]) -> Iterator[Wanted]: ...

    def known(
        self, name: str, func: tirx.PrimFunc, class_name: str, choice: str = ""
    ) -> tirx.PrimFunc | None: ...

    def add(
        self,
        name: str,
        func: tirx.PrimFunc,
        class_name: str,
        kernel: tirx.PrimFunc,
        choice: str = "",
    ) -> None: ...


class Tuned(Protocol):
    """Where tuned kernels come from: `tuning.session.lookup.TunedKernels`."""

    def plan(self, mod: tvm.IRModule, hw: HardwareProfile, policy: Policy) -> FusionPlan | None: ...

    def choice(self, func: tirx.PrimFunc, class_name: str, policy: Policy) -> str: ...

    def kernel(
        self, func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
    ) -> tirx.PrimFunc | None: ...

    def told(
        self, func: tirx.PrimFunc, class_name: str, policy: Policy
    ) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class Written:
    """The module with its kernels, and why functions could not be written by their class."""

    mod: tvm.IRModule
    failures: Mapping[str, str]


def write_kernels(
    mod: tvm.IRModule,
    classes: Mapping[str, str],
    hw: HardwareProfile,
    policy: Policy,
    ahead: Ahead | None = None,
    tuned: Tuned | None = None,
    constants: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    early: Mapping[str, bool] = MappingProxyType({}),
) -> Written:
    """Writes the kernel of each PrimFunc.

    Parameters
    ----------
    mod : IRModule
        A module after Materialize.
    classes : mapping of str
        Kernel class by name of PrimFunc; those without one (views, opaque calls) stay as they are.
    hw : HardwareProfile
    policy : Policy
    ahead : Ahead, optional
        Takes each kernel as soon as it is written; what it knows already is declared only.
    tuned : Tuned, optional
        Has kernels that tuning chose; those it has none for are written as without.
    constants : mapping of str, optional
        Parameters that are constants in all calls, by name of PrimFunc and position: a kernel may
        take them packed, which is left to `PackConstants`.
    early : mapping of str, optional
        PrimFuncs whose kernels may be launched early (`runtime.build.early_launches`), and whether
        that pays whatever they read.
    """
    functions, failures = dict(mod.functions.items()), {}
    writer = KernelWriter(hw, policy)
    wanted = wanted_kernels(mod, classes, policy, tuned, constants, early)
    turns = wanted if ahead is None else ahead.in_turn(wanted)
    for one in stepped("kernels written", turns, len(wanted)):
        symbol, func, name, choice = one.name, one.func, one.class_name, one.choice
        kernel = None
        try:
            if choice:
                known = func.without_attr(EARLY_ATTR) if symbol in early else func
                write = partial(tuned.kernel, known, name, hw, policy)
                kernel = _kernel(symbol, func, name, choice, write, ahead)
            if kernel is None:
                write = partial(writer.kernel, func, name)
                kernel = _kernel(symbol, func, name, "", write, ahead)
        except Unsupported as why:
            logger.info("%s cannot be written as %s: %s", symbol, name, why)
            failures[symbol] = str(why)
            continue
        except Exception as error:  # no fault of one class may end a compile: its group is cut
            logger.warning("kernel class %s fails to write %s: %r", name, symbol, error)
            failures[symbol] = f"kernel class {name} failed: {type(error).__name__}: {error}"
            continue
        functions[one.gvar] = kernel
    for gvar, func in mod.functions_items():
        if gvar.name_hint not in classes and isinstance(func, tirx.PrimFunc):
            known = constants.get(gvar.name_hint, ())
            functions[gvar] = _of_recurrence(gvar.name_hint, func, known, hw, policy)
    return Written(with_functions(mod, functions), failures)


def wanted_kernels(
    mod: tvm.IRModule,
    classes: Mapping[str, str],
    policy: Policy,
    tuned: Tuned | None = None,
    constants: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    early: Mapping[str, bool] = MappingProxyType({}),
) -> list[Wanted]:
    """The kernels that `write_kernels` writes, in that order: what takes nvcc longest stands first.
    Parameters are those of `write_kernels`.
    """
    outputs = _output_counts(mod)
    slow = names(lambda family: family.slow_to_compile)
    written_out = names(lambda family: family.writes_out_windows)

    def turn(item: tuple[tvm.ir.GlobalVar, Any]) -> tuple[int, bool, str]:
        name = classes.get(item[0].name_hint)
        terms = _terms(item[1]) if name in written_out else 0
        return -terms if terms >= MANY_TERMS else 0, name not in slow, item[0].name_hint

    wanted = []
    for gvar, func in sorted(mod.functions.items(), key=turn):
        symbol = gvar.name_hint
        name = classes.get(symbol, STOCK)
        if name in UNWRITTEN or not isinstance(func, tirx.PrimFunc):
            continue
        func = mark_constants(func, constants.get(symbol, ()))
        if gvar in outputs and _is_symbolic(func):
            func = func.with_attr(OUTPUTS_ATTR, outputs[gvar])
        choice = tuned.choice(func, name, policy) if tuned is not None else ""
        if symbol in early:
            func = func.with_attr(EARLY_ATTR, early[symbol])
        wanted.append(Wanted(gvar, func, name, choice))
    return wanted


def _output_counts(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, int]:
    """How many tensors each PrimFunc that a Relax function calls gives."""
    found: dict[tvm.ir.GlobalVar, int] = {}

    def visit(expr: Any) -> None:
        if operator_name(expr) == "relax.call_tir":
            ty = expr.ty
            found[expr.args[0]] = len(ty.fields) if isinstance(ty, relax.TupleType) else 1

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func.body, visit)
    return found


def _is_symbolic(func: tirx.PrimFunc) -> bool:
    """Whether a size of a parameter is known at the call alone."""
    buffers = (p.ty for p in func.params if isinstance(p.ty, tirx.BufferType))
    return any(not isinstance(e, tirx.IntImm) for ty in buffers for e in ty.shape)


def _terms(func: tirx.PrimFunc) -> int:
    """Those of the reductions of a function, of a result of its last one."""
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, blocks.append)])
    reduced = (
        axis.dom.extent
        for block in blocks
        for axis in block.iter_vars
        if axis.iter_type == tirx.IterVar.CommReduce
    )
    return math.prod(int(n) for n in reduced if isinstance(n, tirx.IntImm))


def _of_recurrence(
    symbol: str,
    func: tirx.PrimFunc,
    constants: tuple[int, ...],
    hw: HardwareProfile,
    policy: Policy,
) -> tirx.PrimFunc:
    """The kernel of a function that nothing fuses with, if that is a recurrence; else itself."""
    target = func.attrs.get("target") if func.attrs else None
    elsewhere = target is not None and target.kind.name != hw.kind
    if elsewhere or (func.attrs and "tirx.is_scheduled" in func.attrs):
        return func
    try:
        made = read_recurrence(func)
    except Unsupported as why:
        logger.info("%s stays as it is: %s", symbol, why)
        return func
    from ...kernels.recurrence.kernel import kernel_of  # all forms, which few models take

    try:
        kernel = kernel_of(mark_constants(func, constants), made, hw, policy)
    except Unsupported as why:
        logger.info("%s stays as it is: %s", symbol, why)
        return func
    return _named(with_plain_scalars(kernel), func)


def _kernel(
    symbol: str,
    func: tirx.PrimFunc,
    class_name: str,
    choice: str,
    write: Callable[[], tirx.PrimFunc | None],
    ahead: Ahead | None,
) -> tirx.PrimFunc | None:
    """A kernel, or its declaration where its code is known; None where `write` gives none."""
    kernel = ahead and ahead.known(symbol, func, class_name, choice)
    if kernel is not None:
        return kernel.with_attr("op_pattern", OPAQUE_PATTERN)
    kernel = write()
    if kernel is None:
        return None
    kernel = named(kernel, func)
    if ahead is not None:
        ahead.add(symbol, func, class_name, kernel, choice)
    return kernel


class KernelWriter:
    """Kernels by the structure of what they compute: what is equal is written once."""

    def __init__(self, hw: HardwareProfile, policy: Policy):
        self.hw, self.policy = hw, policy
        self.known: dict[tuple[str, int], list[tuple[tirx.PrimFunc, tirx.PrimFunc]]] = {}

    def kernel(self, func: tirx.PrimFunc, class_name: str) -> tirx.PrimFunc:
        """The kernel of a fused PrimFunc, without a name; the same object for equal functions.

        Raises
        ------
        Unsupported
            The class cannot write it.
        """
        plain = func.without_attr("global_symbol") if "global_symbol" in func.attrs else func
        key = (class_name, tvm_ffi.structural_hash(plain))
        for original, kernel in self.known.get(key, ()):
            if tvm_ffi.structural_equal(original, plain):
                return kernel
        kernel = write_kernel(plain, class_name, self.hw, self.policy)
        self.known.setdefault(key, []).append((plain, kernel))
        return kernel


def write_kernel(
    func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy, config: Any = None
) -> tirx.PrimFunc:
    """The kernel that a class writes for a fused PrimFunc; with `config`, that configuration.

    Raises
    ------
    Unsupported
        The class cannot write it.
    """
    write = family(class_name).write
    try:
        kernel = write(func, hw, policy, config)
    except (TooDeep, RecursionError):
        kernel = call_deep(write, func, hw, policy, config)
    if kernel.attrs.get(TIRX_ATTR, False):
        kernel = with_plain_scalars(kernel)
    for name in (PLACED_ATTR, OUTPUTS_ATTR):
        if func.attrs and name in func.attrs:
            kernel = kernel.with_attr(name, func.attrs[name])
    return kernel.with_attr("op_pattern", OPAQUE_PATTERN)


def named(kernel: tirx.PrimFunc, like: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel of a PrimFunc by its name, which TVM fuses with nothing, early as it is to be."""
    if like.attrs and EARLY_ATTR in like.attrs:
        kernel = kernel.with_attr(EARLY_ATTR, like.attrs[EARLY_ATTR])
    return _named(kernel.with_attr("op_pattern", OPAQUE_PATTERN), like)


def _named(kernel: tirx.PrimFunc, like: tirx.PrimFunc) -> tirx.PrimFunc:
    symbol = like.attrs.get("global_symbol") if like.attrs else None
    if symbol:
        return kernel.with_attr("global_symbol", symbol)
    return kernel.without_attr("global_symbol") if "global_symbol" in kernel.attrs else kernel


# ---- Calls that recurse deeper than Python's default allows: chains of hundreds of operators.

_STACK_BYTES = 512 << 20  # reserved, not used: a chain of 400 operators takes about 20 MB
_FRAMES = 100_000


_DEEP = threading.Lock()
_limits: list[int] = []  # what is restored when the last of all calls is done, one for each


@contextlib.contextmanager
def _many_frames() -> Iterator[None]:
    """The recursion limit of the process is raised while one of its threads is in here."""
    with _DEEP:
        _limits.append(_limits[0] if _limits else sys.getrecursionlimit())
        sys.setrecursionlimit(max(_limits[0], _FRAMES))
    try:
        yield
    finally:
        with _DEEP:
            limit = _limits.pop()
            if not _limits:
                sys.setrecursionlimit(limit)


def call_deep(function: Callable, *args: Any) -> Any:
    """Return `function(*args)`, run on a stack of its own; what it raises is raised here."""
    outcome: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.extend((True, context.run(function, *args)))
        except BaseException as error:
            outcome.extend((False, error))

    thread = threading.Thread(target=run)
    with _many_frames():
        with _DEEP:
            size = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(size)
        thread.join()
    succeeded, result = outcome
    if succeeded:
        return result
    raise result
