"""Whether and how a compiled module's calls are captured into CUDA graphs: the switch, and what
calls do once it is on.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import tvm
from tvm import relax

from ...errors import TargetError
from ..calls.channels_last import taken
from ..calls.signature import Signature
from ..calls.tensors import Kind, from_tvm, torch_stream
from ..calls.written_inputs import write_back
from .capture_rules import CudaGraphOptions
from .captured_calls import GraphedCalls
from .driver import CudaDriver, CudaGraphError

CAPTURED_TARGETS = ("cuda",)


class Module(Protocol):
    """What is asked of a compiled module: see `calls.compiled_module.CompiledModule`."""

    lock: Lock
    target: tvm.target.Target
    device: tvm.runtime.Device
    vm: relax.VirtualMachine
    signature: Signature
    writes: tuple[int, ...]
    uncapturable: str | None
    unread: frozenset[int]
    renewed: Mapping[int, int]

    def check(self, inputs: Sequence[Any]) -> tuple[Kind, Any]: ...

    def arguments(self, inputs: Sequence[Any]) -> list[Any]: ...

    def run(self, arguments: Sequence[Any]) -> Any: ...


class GraphMode:
    """The switch of one compiled module.

    Attributes
    ----------
    options : CudaGraphOptions or None
        None while it is off.
    """

    def __init__(self) -> None:
        self.options: CudaGraphOptions | None = None
        self._graphs: GraphedCalls | None = None

    def set(self, module: Module, value: Any) -> None:
        """Turn it on or off, and drop what was captured; see `CompiledModule.cuda_graph`."""
        options, kind = CudaGraphOptions.of(value), module.target.kind.name
        if options is not None and kind not in CAPTURED_TARGETS:
            raise TargetError(
                f"cuda_graph: the module is compiled for {kind}; compile it for the target cuda, "
                "or leave cuda_graph out"
            )
        with module.lock:
            if self._graphs is not None:
                self._graphs.clear()
            self.options, self._graphs = options, None

    def refusal(self, module: Module) -> str | None:
        """Why calls are not captured though the switch is on; None if they are."""
        if self.options is None:
            return None
        return module.uncapturable or (self._graphs and self._graphs.refusal)

    def call(self, module: Module, inputs: Sequence[Any]) -> Any:
        """Run a call as one launch; NotImplemented where that cannot be. The result is as the
        function gives it (see `calls.channels_last`).

        The first call with inputs of its shapes runs launch by launch, and is captured afterwards;
        where sizes are symbolic the second one is.
        """
        with module.lock:
            graphs = self._graphs or self._active(module)
            if graphs is None or graphs.refusal is not None:
                return NotImplemented
            given = taken(module.signature, inputs)
            result = graphs.again(given)
            if result is not NotImplemented:
                return result
            kind, like = module.check(inputs)
            if graphs.is_in_capture(kind):
                return NotImplemented
            with torch_stream(module.device, kind):
                arguments = module.arguments(inputs)
                graph = graphs.find(arguments)
                if graph is not None:
                    result = graphs.call(graph, arguments, kind, like)
                else:
                    outputs = module.run(arguments)
                    if graphs.is_due(arguments):
                        with contextlib.suppress(CudaGraphError):  # the refusal is noted
                            outputs = graphs.add(arguments, given, outputs)
                    result = from_tvm(outputs, kind, like)
                write_back(module.writes, inputs, arguments)
            return result

    def bound(self, module: Module, arguments: Sequence[Any]) -> Callable[[], Any] | None:
        """A function that launches a graph over these very arguments; None where that cannot be."""
        with module.lock:
            graphs = self._active(module)
            if graphs is None:
                return None
            if module.writes:
                return _CapturedAfterFirst(module, graphs, arguments)
            module.run(arguments)  # loads the kernels
            with contextlib.suppress(CudaGraphError):
                return graphs.bound(arguments)
        return None

    def _active(self, module: Module) -> GraphedCalls | None:
        """The graphs of the module; None if its calls are not captured."""
        if self.options is None or self.refusal(module) is not None:
            return None
        if self._graphs is None:
            driver = CudaDriver(module.device.index)
            self._graphs = GraphedCalls(
                module.vm,
                module.device,
                module.signature,
                self.options,
                driver,
                module.unread,
                module.renewed,
            )
        return self._graphs


class _CapturedAfterFirst:
    """A bound function of a module that writes into its inputs: a run that nobody asked for would
    write once more.
    """

    def __init__(self, module: Module, graphs: GraphedCalls, arguments: Sequence[Any]) -> None:
        self._module, self._graphs, self._arguments = module, graphs, arguments
        self._launch: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        if self._launch is not None:
            return self._launch()
        module, arguments = self._module, self._arguments
        outputs = module.run(arguments)
        with module.lock:
            try:
                self._launch = self._graphs.bound(arguments)
            except CudaGraphError:
                self._launch = functools.partial(module.run, arguments)
        return outputs
