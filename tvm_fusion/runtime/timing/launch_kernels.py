"""The kernels of single launches: written, built, and called without a virtual machine.

A plan is several launches; two plans of a graph share most of theirs. Each launch is written once,
as it is in a compiled module, and becomes a function of a library that takes its tensors (inputs,
then outputs).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...ir.graph import FusionGraph, OpKind
from ...ir.weights import value_of
from ...kernels.cpu.contraction.panels import Panels, wanted_panels
from ...plan.group_view import GroupView
from ...plan.plan import FusionPlan
from ...transform.apply.materialize import Rewriter, fix_regions
from ...transform.apply.pack_constants import packed_constant
from ...transform.apply.write_kernels import Tuned, write_kernels
from ..build import cubin_cache
from ..build.build import KernelBuildError, build_functions
from ..build.resources import KernelResources
from ..calls.launch_count import launched_kernels

logger = logging.getLogger(__name__)

SYMBOL = "launch_"  # what the names of all functions, and of their kernels, begin with


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What one launch computes and writes, and by which kernel class.

    Attributes
    ----------
    ops : tuple of int
        Operators, ascending.
    stores : tuple of int
        Tensors it writes.
    kernel_class : str
    """

    ops: tuple[int, ...]
    stores: tuple[int, ...]
    kernel_class: str


# A tensor of the graph by its name; "constant <n>" for a constant of the module, and with the
# numbers of `Panels` behind it for that constant in panels.
Key = str


@dataclass(frozen=True, slots=True)
class Kernel:
    """A written and built launch.

    Attributes
    ----------
    spec : LaunchSpec
    symbol : str
        Its function in the library.
    arguments : tuple of str
        Tensors that the function takes, inputs before outputs.
    device_kernels : tuple of str
        Names of what it launches on the device; empty on a CPU.
    resources : tuple of KernelResources
    """

    spec: LaunchSpec
    symbol: str
    arguments: tuple[Key, ...]
    device_kernels: tuple[str, ...] = ()
    resources: tuple[KernelResources, ...] = ()


@dataclass
class BuiltLaunches:
    """A library with the kernels of some launches, and why others have none."""

    library: Any
    kernels: list[Kernel] = field(default_factory=list)
    failures: dict[LaunchSpec, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the library as a shared object, for another process."""
        self.library.export_library(str(path))


class LaunchWriter:
    """Writes launches of one graph.

    Parameters
    ----------
    low : IRModule
        The module that the graph was read from.
    graph : FusionGraph
    hw : HardwareProfile
    policy : Policy
    tuned : Tuned, optional
        See `write_kernels`.
    """

    def __init__(
        self,
        low: tvm.IRModule,
        graph: FusionGraph,
        hw: HardwareProfile,
        policy: Policy,
        tuned: Tuned | None = None,
    ) -> None:
        self.low, self.graph, self.hw, self.policy, self.tuned = low, graph, hw, policy, tuned
        self._plan = FusionPlan(graph.function, graph.fingerprint(), hw.name, policy.name, ())
        self._main = low[graph.function]
        self._rewriter = Rewriter(low, graph, self._plan)
        self._bindings = {b.var.name: b for block in self._main.body.blocks for b in block.bindings}
        self._constants: dict[int, int] = {}
        self.constants: list[Any] = []
        for block in self._main.body.blocks:
            for binding in block.bindings:
                self._number_constants(getattr(binding, "value", None))

    def _number_constants(self, value: Any) -> None:
        """Constants in the order of the module's text: the same in every process."""
        if isinstance(value, tvm.ir.GenericConst):
            if hash(value) not in self._constants:
                self._constants[hash(value)] = len(self.constants)
                self.constants.append(value)
        elif isinstance(value, relax.Call):
            for argument in value.args:
                self._number_constants(argument)
        elif isinstance(value, relax.Tuple):
            for item in value.fields:
                self._number_constants(item)

    def write(self, spec: LaunchSpec) -> tuple[tirx.PrimFunc, tuple[Key, ...]]:
        """The kernel of a launch, and the tensors it takes.

        Raises
        ------
        Unsupported
            The launch cannot be written, or has symbolic extents.
        """
        view = GroupView(self.graph, spec.ops, spec.stores)
        if any(self.graph.ops[i].kind is OpKind.OPAQUE for i in spec.ops):
            raise Unsupported("an operator that cannot be read is called by the virtual machine")
        func, inputs = self._alone(spec) if len(spec.ops) == 1 else self._together(view)
        constants = {"launch": self._constant_positions(inputs)}
        written = write_kernels(
            tvm.IRModule({"launch": func.with_attr("global_symbol", "launch")}),
            {"launch": spec.kernel_class},
            self.hw,
            self.policy,
            tuned=self.tuned,
            constants=constants,
        )
        if written.failures:
            raise Unsupported(written.failures["launch"])
        lone = len(spec.ops) == 1  # writes all of its results, also those that nobody reads
        stores = self.graph.ops[spec.ops[0]].outputs if lone else spec.stores
        outputs = (self.graph.tensors[t].name for t in stores)
        kernel = written.mod["launch"]
        panels = wanted_panels(kernel)
        arguments = (*(self.key_of(e, panels.get(i)) for i, e in enumerate(inputs)), *outputs)
        if len(kernel.params) != len(arguments):
            raise Unsupported("the launch takes more than tensors of known shape")
        return kernel, arguments

    def _constant_positions(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The inputs that are constants, where kernels may take those packed."""
        if self.hw.kind != "llvm":
            return ()
        return tuple(i for i, e in enumerate(inputs) if isinstance(e, tvm.ir.GenericConst))

    def constant(self, key: Key) -> tvm.runtime.Tensor:
        """The constant of a key."""
        number, *panels = (int(n) for n in key.removeprefix("constant ").split())
        constant = self.constants[number]
        return value_of(packed_constant(constant, Panels.read(panels)) if panels else constant)

    def _alone(self, spec: LaunchSpec) -> tuple[tirx.PrimFunc, Sequence[Any]]:
        call = self._bindings[self.graph.ops[spec.ops[0]].name].value
        if len(call.args) > 2:
            raise Unsupported("symbolic extents")
        values = call.args[1]
        inputs = values.fields if isinstance(values, relax.Tuple) else [values]
        if not set(spec.stores) <= set(self.graph.ops[spec.ops[0]].outputs):
            raise Unsupported("the operator does not write these tensors")
        return self.low[call.args[0].name_hint], inputs

    def _together(self, view: GroupView) -> tuple[tirx.PrimFunc, Sequence[Any]]:
        _, (primitive, inputs, symbols) = self._rewriter.primitive(view)
        if symbols:
            raise Unsupported("symbolic extents")
        names = {self.graph.ops[i].func for i in view.ops}
        functions = {g: f for g, f in self.low.functions.items() if g.name_hint in names}
        builder = relax.BlockBuilder(tvm.IRModule(functions))
        gvar = builder.add_func(primitive, "launch")
        params = [relax.Var(p.name, p.ty) for p in primitive.params]
        with builder.function("main", params):
            with builder.dataflow():
                result = builder.emit_output(relax.Call(gvar, params))
            builder.emit_func_output(result)
        fused = relax.transform.FuseTIR()(builder.get())
        bindings = (b for block in fused["main"].body.blocks for b in block.bindings)
        calls = [b.value for b in bindings if isinstance(b.value, relax.Call)]
        if len(calls) != 1:
            raise Unsupported(f"fusion leaves {len(calls)} calls")
        given = calls[0].args[1]
        order = given.fields if isinstance(given, relax.Tuple) else [given]
        by_param = {p.name: e for p, e in zip(fused["main"].params, inputs, strict=True)}
        return fix_regions(fused[calls[0].args[0].name_hint]), [by_param[v.name] for v in order]

    def results(self) -> tuple[Key, ...]:
        """What the function returns, tuples flattened."""
        return tuple(self._leaves(self._main.body.body))

    def _leaves(self, e: Any) -> Iterator[Key]:
        binding = self._bindings.get(e.name) if isinstance(e, relax.Var) else None
        value = getattr(binding, "value", None)
        if isinstance(value, (relax.Tuple, relax.Var)):
            yield from self._leaves(value)
        elif isinstance(e, relax.Tuple):
            for item in e.fields:
                yield from self._leaves(item)
        elif isinstance(e.ty, relax.TupleType):
            yield from (f"{self.key_of(e)}.{i}" for i in range(len(e.ty.fields)))
        else:
            yield self.key_of(e)

    def key_of(self, e: Any, panels: Panels | None = None) -> Key:
        """The tensor behind an expression of the module; a constant may be wanted in panels.

        Raises
        ------
        Unsupported
            It is no tensor of the graph.
        """
        if isinstance(e, tvm.ir.GenericConst):
            numbers = [self._constants[hash(e)], *(panels.numbers() if panels else ())]
            return " ".join(["constant", *map(str, numbers)])
        if isinstance(e, relax.TupleGetItem):
            return f"{self.key_of(e.tuple_value)}.{e.index}"
        if isinstance(e, relax.Var):
            binding = self._bindings.get(e.name)
            value = getattr(binding, "value", None)
            renames = (relax.Var, relax.TupleGetItem, tvm.ir.GenericConst)
            return self.key_of(value) if isinstance(value, renames) else e.name
        raise Unsupported(f"an input is a {type(e).__name__}")


def symbol_of(kernel: tirx.PrimFunc) -> str:
    """The name of a kernel's function: equal kernels share an entry of the cubin cache."""
    alone = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    return f"{SYMBOL}{tvm_ffi.structural_hash(alone) & (2**64 - 1):016x}"


def build_launches(
    writer: LaunchWriter, specs: Iterable[LaunchSpec], target: tvm.target.Target
) -> BuiltLaunches:
    """Writes and builds launches, those that can be.

    CUDA kernels are compiled side by side and through the cubin cache.
    """
    functions: dict[str, tirx.PrimFunc] = {}
    found: list[tuple[str, LaunchSpec, tuple[Key, ...]]] = []
    failures: dict[LaunchSpec, str] = {}
    for spec in dict.fromkeys(specs):
        try:
            with target:
                kernel, arguments = writer.write(spec)
        except Exception as error:  # one launch of many: recorded, its plans are left out
            failures[spec] = f"{type(error).__name__}: {error}"
            logger.info("launch %s cannot be written: %s", spec, error)
            continue
        symbol = symbol_of(kernel)
        functions.setdefault(symbol, kernel.with_attr("global_symbol", symbol))
        found.append((symbol, spec, arguments))
    return _build(functions, found, failures, target)


def _build(
    functions: dict[str, tirx.PrimFunc],
    found: Sequence[tuple[str, LaunchSpec, tuple[Key, ...]]],
    failures: dict[LaunchSpec, str],
    target: tvm.target.Target,
) -> BuiltLaunches:
    cubin_cache.install()
    while functions:
        try:
            library, found_resources = build_functions(tvm.IRModule(functions), target)
        except KernelBuildError as error:
            known = [name for name in error.failures if name in functions]
            if not known:
                raise
            for symbol, spec, _ in found:
                if symbol in known:
                    failures[spec] = error.failures[symbol]
            functions = {name: f for name, f in functions.items() if name not in known}
            continue
        resources = {r.name: r for r in found_resources}
        launched = launched_kernels(library)
        kernels = []
        for symbol, spec, arguments in found:
            if symbol in functions:
                names = tuple(launched.get(symbol, ()))
                used = tuple(resources[n] for n in names if n in resources)
                kernels.append(Kernel(spec, symbol, arguments, names, used))
        return BuiltLaunches(library, kernels, failures)
    return BuiltLaunches(None, [], failures)
