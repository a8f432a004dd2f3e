"""WriteKernels: every fused PrimFunc becomes a kernel of its kernel class.

Functions that are structurally equal (the layers of a model) are written once. A function its class
cannot write is reported, not raised: the caller cuts that group and goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx

from .._deep import call_deep
from ..config import HardwareProfile, Policy
from ..errors import TooDeep, Unsupported
from ..kernels.registry import kernel_class
from ..plan.plan import UNWRITTEN

logger = logging.getLogger(__name__)

OPAQUE_PATTERN = 8  # TVM's OpPatternKind.kOpaque: no later pass fuses the function again


@dataclass(frozen=True, slots=True)
class Written:
    """The module with its kernels, and why functions could not be written by their class."""

    mod: tvm.IRModule
    failures: Mapping[str, str]


def write_kernels(
    mod: tvm.IRModule, classes: Mapping[str, str], hw: HardwareProfile, policy: Policy
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
    """
    functions, failures = {}, {}
    writer = KernelWriter(hw, policy)
    for gvar, func in mod.functions.items():
        name = classes.get(gvar.name_hint)
        if name is None or name in UNWRITTEN or not isinstance(func, tirx.PrimFunc):
            functions[gvar] = func
            continue
        try:
            functions[gvar] = _named(writer.kernel(func, name), func)
        except Unsupported as why:
            logger.info("%s cannot be written as %s: %s", gvar.name_hint, name, why)
            failures[gvar.name_hint] = str(why)
            functions[gvar] = func
    return Written(tvm.IRModule(functions, attrs=mod.attrs), failures)


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
        write = kernel_class(class_name).write
        try:
            kernel = write(plain, self.hw, self.policy)
        except (TooDeep, RecursionError):
            kernel = call_deep(write, plain, self.hw, self.policy)
        kernel = kernel.with_attr("op_pattern", OPAQUE_PATTERN)
        self.known.setdefault(key, []).append((plain, kernel))
        return kernel


def _named(kernel: tirx.PrimFunc, like: tirx.PrimFunc) -> tirx.PrimFunc:
    symbol = like.attrs.get("global_symbol") if like.attrs else None
    if symbol:
        return kernel.with_attr("global_symbol", symbol)
    return kernel.without_attr("global_symbol") if "global_symbol" in kernel.attrs else kernel
