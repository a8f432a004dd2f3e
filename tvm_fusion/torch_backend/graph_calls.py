"""The calls of one graph: compiled for its weights and sizes, and again where those change."""

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tvm_fusion.config import resolve_target
from tvm_fusion.errors import ConfigError, TargetError
from tvm_fusion.frontends.torch.model import from_exported_program
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.torch_backend.dynamo_graph import Parts, exported, plain_number, refuse_writes
from tvm_fusion.torch_backend.options import BackendOptions
from tvm_fusion.transform.layouts.memory_formats import takes_formats

_log = logging.getLogger(__name__)

MAX_BUILDS = 16  # of one graph, for different weights, numbers and (where static) shapes
MOST_CHANGES = 2  # of a weight's values; after so many it is no constant any more


class GraphCalls:
    """Runs one graph; takes what it takes and returns a tuple."""

    def __init__(self, graph: fx.GraphModule, parts: Parts, options: BackendOptions) -> None:
        self._graph, self._parts, self._options = graph, parts, options
        self._keeps_symbols = parts.has_symbols
        self._builds: list[_Build] = []  # the one used last comes last
        self._changes: Counter[int] = Counter()  # how often a weight was written to, by input

    @classmethod
    def of(
        cls, graph: fx.GraphModule, inputs: Sequence[Any], options: BackendOptions
    ) -> "GraphCalls | None":
        """Compile a graph for these inputs; None, with a warning, where it cannot be.

        Raises
        ------
        ConfigError, TargetError
            For options that cannot be used.
        """
        parts = Parts.of(graph, inputs)
        if parts is None:
            return None  # nothing is computed, so nothing is lost
        calls = cls(graph, parts, options)
        return calls if calls._build(inputs).module is not None else None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        build = self._builds[-1]
        if not self._fits(build, inputs):
            build = self._find(inputs)
        if build.module is None:
            return self._graph(*inputs)
        tensors = [inputs[i] for i in self._parts.tensors]
        if build.lies_elsewhere:
            tensors = [t.to(build.device) for t in tensors]
        results = build.module(*tensors)
        if self._parts.rest is None:
            return results
        computed, rest = iter(results), iter(self._parts.rest(*inputs))
        return tuple(next(computed if own else rest) for own in self._parts.from_computed)

    def _fits(self, build: "_Build", inputs: Sequence[Any]) -> bool:
        looks = not self._options.frozen
        for index, weight, version in build.weights:
            if inputs[index] is not weight or (looks and _version(weight) != version):
                return False
        if any(inputs[i] != number for i, number in build.numbers):
            return False
        return build.shapes is None or build.shapes == self._shapes(inputs)

    def _shapes(self, inputs: Sequence[Any]) -> list[torch.Size]:
        return [inputs[i].shape for i in self._parts.tensors]

    def _find(self, inputs: Sequence[Any]) -> "_Build":
        """The build for inputs that the latest one does not fit."""
        self._forget_stale()
        for build in reversed(self._builds):
            if self._fits(build, inputs):
                self._builds.remove(build)
                self._builds.append(build)
                return build
        return self._build(inputs)

    def _forget_stale(self) -> None:
        """Drop builds with old values of weights; a weight that changes again becomes an input."""
        if self._options.frozen:
            return
        stale = [b for b in self._builds if any(_version(w) != v for _, w, v in b.weights)]
        for build in stale:
            self._builds.remove(build)
        if stale:
            changed = {i for i, w, v in stale[-1].weights if _version(w) != v}
            self._changes.update(changed)
        again = {i for i in self._parts.weights if self._changes[i] >= MOST_CHANGES}
        if again:
            self._parts = self._parts.with_inputs(again)
            self._builds.clear()

    def _build(self, inputs: Sequence[Any]) -> "_Build":
        """Compile for these inputs, and keep the result."""
        build = None
        if self._keeps_symbols:
            try:
                build = self._compiled(inputs, keep_symbols=True)
            except (ConfigError, TargetError):
                raise
            except Exception as error:  # a kernel build; each shape is tried by itself
                _log.info("compiled for each shape by itself: %s", error)
                self._keeps_symbols = False
        if build is None:
            try:
                build = self._compiled(inputs, keep_symbols=False)
            except (ConfigError, TargetError):
                raise
            except Exception as error:  # a kernel build
                count = sum(n.op.startswith("call_") for n in self._graph.graph.nodes)
                warnings.warn(
                    f"tvm_fusion: a graph of {count} operators runs in eager mode: {error}",
                    stacklevel=2,
                )
                build = self._described(inputs, None, keep_symbols=False)
        self._builds = [*self._builds[1 - MAX_BUILDS :], build]
        return build

    def _compiled(self, inputs: Sequence[Any], keep_symbols: bool) -> "_Build":
        from tvm_fusion.compilation.compiler import compile

        options, device = self._options, _device(inputs)
        program = exported(self._parts, inputs, keep_symbols)
        target = device.type.replace("cpu", "llvm") if options.target is None else options.target
        keep = takes_formats(resolve_target(target)[0])
        mod = from_exported_program(program, "torch.compile", refuse_writes, keep)
        graphs = options.cuda_graph or (options.graph_where_possible and device.type == "cuda")
        module = compile(
            mod,
            target,
            policy=options.policy,
            verify=options.verify,
            measure=options.measure,
            cuda_graph=graphs,
        )
        module.device  # noqa: B018 - a target that this machine lacks is named now
        return self._described(inputs, module, keep_symbols)

    def _described(
        self, inputs: Sequence[Any], module: CompiledModule | None, keep_symbols: bool
    ) -> "_Build":
        parts, device = self._parts, _device(inputs)
        return _Build(
            module,
            [(i, inputs[i], _version(inputs[i])) for i in parts.weights],
            [(i, plain_number(inputs[i])) for i in parts.fixed],
            self._shapes(inputs) if parts.has_symbols and not keep_symbols else None,
            device,
            any(inputs[i].device != device for i in parts.tensors),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Build:
    """A compiled graph, and what it was compiled for.

    Attributes
    ----------
    module : CompiledModule or None
        None where it runs in eager mode.
    weights : list of (input, tensor, version)
    numbers : list of (input, value)
    shapes : list of torch.Size or None
        None where all that Dynamo lets pass will do.
    device : torch.device
    lies_elsewhere : bool
        Whether a tensor is on another device.
    """

    module: CompiledModule | None
    weights: list[tuple[int, torch.Tensor, int]]
    numbers: list[tuple[int, Any]]
    shapes: list[torch.Size] | None
    device: torch.device
    lies_elsewhere: bool


def _version(tensor: torch.Tensor) -> int:
    """A number that rises when a tensor is written to; -1 where torch keeps none."""
    return -1 if tensor.is_inference() else tensor._version


def _device(inputs: Sequence[Any]) -> torch.device:
    """Where a graph runs: on the GPU, if one of its tensors is there."""
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
