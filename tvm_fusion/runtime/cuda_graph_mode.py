"""Whether and how a compiled module's calls are captured into CUDA graphs: the switch, and what
calls do once it is on.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import TargetError
from .cuda_graph_calls import GraphedCalls
from .cuda_graph_driver import CudaDriver, CudaGraphError
from .cuda_graph_rules import CudaGraphOptions
from .tensors import Kind, from_tvm

if TYPE_CHECKING:
    from .module import CompiledModule

CAPTURED_TARGETS = ("cuda",)


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

    def set(self, module: "CompiledModule", value: Any) -> None:
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

    def refusal(self, module: "CompiledModule") -> str | None:
        """Why calls are not captured though the switch is on; None if they are."""
        if self.options is None:
            return None
        return module.uncapturable or (self._graphs and self._graphs.refusal)

    def call(self, module: "CompiledModule", inputs: Sequence[Any]) -> Any:
        """Run a call as the launch of a graph; NotImplemented where that cannot be."""
        with module.lock:
            graphs = self._active(module)
            if graphs is None:
                return NotImplemented
            graph, kind, like = graphs.known(inputs), Kind.TORCH, None
            if graph is None:
                kind, like = module.check(inputs)
                if graphs.is_in_capture(kind):
                    return NotImplemented
                try:
                    graph = graphs.graph(inputs)
                except CudaGraphError:
                    return NotImplemented  # the refusal is noted
            return graphs.call(graph, inputs, kind, like)

    def bound(self, module: "CompiledModule", arguments: Sequence[Any]) -> Callable[[], Any] | None:
        """A function that launches a graph over these very arguments; None where that cannot be."""
        with module.lock, contextlib.suppress(CudaGraphError):
            graphs = self._active(module)
            return graphs and graphs.bound(arguments)

    def buffers(self, module: "CompiledModule", inputs: Sequence[Any]) -> tuple[Any, ...]:
        """See `CompiledModule.graph_inputs`."""
        kind, _ = module.check(inputs)
        with module.lock:
            graphs = self._active(module)
            if graphs is None:
                raise CudaGraphError(self.refusal(module) or "cuda_graph is not set")
            buffers = graphs.graph(inputs).buffers
        return from_tvm(buffers, Kind.TORCH if kind is Kind.TORCH else Kind.TVM, None)

    def _active(self, module: "CompiledModule") -> GraphedCalls | None:
        """The graphs of the module; None if its calls are not captured."""
        if self.options is None or self.refusal(module) is not None:
            return None
        if self._graphs is None:
            driver = CudaDriver(module.device.index)
            self._graphs = GraphedCalls(
                module.vm, module.device, module.signature, self.options, driver
            )
        return self._graphs
