"""A graph of parts and collectives as one CUDA graph, in which the collectives are.

    launched one by one:  a = part0(x); all_reduce_(a); wait(a); b = part1(a)
    replayed:             x' <- x; all kernels of the graph, those of NCCL among them; b <- b'

Recorded in the call after one that ran with the same weights, when kernels are loaded and processes
connected; again after a weight changed, and where what is written to lies elsewhere. NCCL may talk
to the other processes meanwhile: all are to be called alike, as for collectives anyhow. A replay
reads weights and writes caches where they are; other inputs are copied to where the recording reads
them, and results to memory of the caller's. Where the recording fails, or something in the graph
may not be repeated, each part has a CUDA graph of its own.
"""

import logging
import operator
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from tvm_fusion.frontends.finish import first_line
from tvm_fusion.runtime.graphs.capture import torch_captures
from tvm_fusion.torch_backend.collectives import is_of_processes
from tvm_fusion.torch_backend.layouts import memory_order
from tvm_fusion.torch_backend.part_calls import PartCalls
from tvm_fusion.torch_backend.partition import Partition

_log = logging.getLogger(__name__)

RECORDED = ("cuda",)
MOST_RECORDINGS = 16  # of one graph; its parts then have graphs of their own
_NOT_REPEATED = frozenset(
    getattr(torch.Tag, name)
    for name in (
        "cudagraph_unsafe",
        "data_dependent_output",
        "dynamic_output_shape",
        "nondeterministic_seeded",
    )
    if hasattr(torch.Tag, name)  # of this version
)


@dataclass(frozen=True, slots=True)
class _Warm:
    """What a call ran with: the weights, and what the parts were compiled to."""

    weights: list[torch.Tensor]
    builds: list[Any]

    def holds(self, weights: Sequence[torch.Tensor], parts: Sequence[PartCalls]) -> bool:
        """Whether a call now runs with the same."""
        if not all(map(operator.is_, weights, self.weights)):
            return False
        return all(p.would_run(b) for p, b in zip(parts, self.builds, strict=True))


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded call.

    Attributes
    ----------
    graph : torch.cuda.CUDAGraph
    warm : _Warm
    places : list of int
        Where the inputs are that it writes to.
    buffers : list of torch.Tensor
        Where those go that are neither these nor weights.
    results : sequence
        What it returned, in its own memory.
    """

    graph: Any
    warm: _Warm
    places: list[int]
    buffers: list[torch.Tensor]
    results: Sequence[Any]


class StepGraph:
    """Calls of a graph, recorded and replayed.

    Attributes
    ----------
    refusal : str or None
        Why calls are not recorded, once that failed.
    """

    def __init__(
        self,
        cut: Partition,
        parts: Sequence[PartCalls],
        static: Collection[int],
        device: torch.device,
        returns_own: bool,
    ) -> None:
        """`static` are the inputs that are parameters or buffers; `returns_own` lets results lie in
        memory that the next call overwrites.
        """
        self.refusal: str | None = None
        self._cut, self._parts, self._device = cut, parts, device
        self._returns_own = returns_own
        placeholders = cut.graph.graph.find_nodes(op="placeholder")
        used = [i for i, node in enumerate(placeholders) if node.users]
        self._written = [i for i in used if placeholders[i].name in cut.written]
        others = [i for i in used if i not in self._written]
        self._weights = [i for i in others if i in static]
        self._moved = [i for i in others if i not in static]
        (results,) = cut.graph.graph.output_node().args
        known = {node: i for i, node in enumerate(placeholders)}
        self._given = [known.get(node) for node in results]
        self._lock = threading.RLock()
        self._warm: _Warm | None = None
        self._recording: _Recording | None = None
        self._count = 0
        self._stream: Any = None

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results for inputs."""
        if self.refusal is not None or is_captured():
            return self._launched(inputs)
        with self._lock:
            recording = self._recording
            if recording is None or not self._holds(recording, inputs):
                recording = self._recording = self._recorded(inputs)
            if recording is not None:
                return self._replayed(recording, inputs)
            results = self._launched(inputs)
            if self.refusal is None:
                builds = [part.build for part in self._parts]
                self._warm = _Warm([inputs[i] for i in self._weights], builds)
            return results

    def _launched(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return self._cut.graph.forward(*inputs)

    def _holds(self, recording: _Recording, inputs: Sequence[Any]) -> bool:
        if self._places(inputs) != recording.places:
            return False
        return recording.warm.holds([inputs[i] for i in self._weights], self._parts)

    def _places(self, inputs: Sequence[Any]) -> list[int]:
        return [inputs[i].data_ptr() for i in self._written]

    def _recorded(self, inputs: Sequence[Any]) -> _Recording | None:
        """Record a call; None where that cannot be, or a part may have to be compiled first."""
        if self._recording is not None:
            synchronize(self._device)  # it may still run
            self._recording = None
        warm, self._warm = self._warm, None
        if warm is None or not warm.holds([inputs[i] for i in self._weights], self._parts):
            return None
        self._count += 1
        if self._count > MOST_RECORDINGS:
            return self._refused("weights, or where it writes to, change from call to call")
        given = list(inputs)
        with torch.inference_mode(False), torch.no_grad():
            buffers = [inputs[i].clone() for i in self._moved]
        for number, buffer in zip(self._moved, buffers, strict=True):
            given[number] = buffer
        try:
            graph, results = recorded(lambda: self._launched(given), self._device)
        except Exception as error:  # what torch cannot record
            return self._refused(f"{type(error).__name__}: {first_line(error)}")
        self._warm = warm
        return _Recording(graph, warm, self._places(inputs), buffers, results)

    def _refused(self, why: str) -> None:
        self.refusal = why
        _log.warning("no CUDA graph of parts and collectives, parts have their own: %s", why)
        for part in self._parts:
            part.capture()

    def _replayed(self, recording: _Recording, inputs: Sequence[Any]) -> Sequence[Any]:
        stream = current_stream(self._device)
        if self._stream not in (None, stream):
            stream.wait_stream(self._stream)
        self._stream = stream
        if self._moved:
            torch._foreach_copy_(recording.buffers, [inputs[i] for i in self._moved])
        recording.graph.replay()
        written = [inputs[i] for i in self._written]
        increment_version([x for x in written if not x.is_inference()])
        pairs = zip(recording.results, self._given, strict=True)
        return [self._own(result) if i is None else inputs[i] for result, i in pairs]

    def _own(self, result: Any) -> Any:
        is_kept = self._returns_own or not isinstance(result, torch.Tensor)
        return result if is_kept else result.clone()


def why_not(cut: Partition, device: torch.device) -> str | None:
    """Why a graph is not recorded as a whole; None where it may be."""
    if device.type not in RECORDED:
        return "it does not run on a GPU"
    nodes = list(cut.graph.graph.nodes)
    if not any(map(is_of_processes, nodes)):
        return "nothing in it talks to other processes"
    for node in nodes:
        if node.op == "output":
            continue
        leaves = [x for x in pytree.tree_leaves(node.meta.get("val")) if x is not None]
        if not all(_is_fixed(x, device) for x in leaves):
            return f"{node} is no tensor of a known size on one GPU"
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            is_known = is_of_processes(node) or target.namespace == "aten"
            if not is_known or _NOT_REPEATED & set(target.tags):
                return f"{target} runs in torch"
        elif node.op == "call_function" and target is not operator.getitem:
            return f"{node} runs in torch"
    (results,) = cut.graph.graph.output_node().args
    inputs = [n.meta["val"] for n in nodes if n.op == "placeholder"]
    values = [n.meta.get("val") for n in results if isinstance(n, fx.Node)]
    tensors = [x for x in (*inputs, *values) if isinstance(x, torch.Tensor)]
    if any(memory_order(x) is None for x in tensors):
        return "an input or a result has gaps in memory"
    return None


# ---- What asks torch for its GPU.


def recorded(call: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
    """A CUDA graph of a call, and what the call returned."""
    graph = torch.cuda.CUDAGraph()
    # other threads go on: NCCL's watchdog asks for events
    how = {"stream": torch.cuda.Stream(device), "capture_error_mode": "thread_local"}
    with torch.cuda.device(device), torch.cuda.graph(graph, **how):
        results = call()
    return graph, results


def current_stream(device: torch.device) -> Any:
    """The stream that a caller launches on."""
    return torch.cuda.current_stream(device)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    torch.cuda.synchronize(device)


def is_captured() -> bool:
    """Whether a caller captures his stream himself."""
    return torch_captures()


def _is_fixed(value: Any, device: torch.device) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    extents = (*value.shape, *value.stride())
    return value.device == device and all(isinstance(n, int) for n in extents)
