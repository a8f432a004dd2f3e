"""The calls of one graph: cut into parts at the first one, when the weights are there."""

import copy
import itertools
import logging
import operator
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._guards import CompileContext

from tvm_fusion.errors import ConfigError, FrontendError, TargetError
from tvm_fusion.frontends.finish import first_line
from tvm_fusion.frontends.torch.refusals import OperatorsRefused, listed
from tvm_fusion.host.collector import others_set_aside
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.graphs.capture_rules import CudaGraphOptions
from tvm_fusion.torch_backend.collectives import Collective, awaited, collectives
from tvm_fusion.torch_backend.kept_graphs import KeptGraph, Place
from tvm_fusion.torch_backend.options import BackendOptions
from tvm_fusion.torch_backend.part_calls import PartCalls, picker
from tvm_fusion.torch_backend.part_reports import PartReport, tell, tell_of_times, trace
from tvm_fusion.torch_backend.partition import NAME, Partition, is_graph, partitioned
from tvm_fusion.torch_backend.step_graphs import StepGraph, why_not

_log = logging.getLogger(__name__)
_numbers = itertools.count()


class GraphCalls:
    """Runs one graph."""

    def __init__(
        self,
        graph: fx.GraphModule | KeptGraph,
        static: frozenset[int],
        options: BackendOptions,
        place: Place | None = None,
    ) -> None:
        """`static` are the inputs that are parameters or buffers, `place` where the graph is to be
        kept.
        """
        self._graph, self._static, self._options, self._place = graph, static, options, place
        self._number = next(_numbers)
        self._compile_id = CompileContext.current_compile_id()
        self._lock = threading.RLock()
        self._run: Callable[[Sequence[Any]], Any] | None = None
        self._running: list[PartCalls] = []
        self._outside_us: dict[str, float] = {}  # of operators, by name
        self._collectives: tuple[Collective, ...] = ()
        self._collective_us: dict[str, float] = {}
        self._told: list[PartReport] = []  # those that are to have these times

    def run(self, inputs: Sequence[Any]) -> Any:
        """What the graph returns for its inputs."""
        run = self._run
        if run is None:
            with self._lock, others_set_aside():
                run = self._run = self._run or self._made_or_torch(inputs)
                return run(inputs)
        return run(inputs)

    run._boxed_call = True  # what AOTAutograd asks: whether it takes a list

    def forget_weights(self) -> None:
        """Compile anew: weights were written to, which their own versions do not tell."""
        for part in self._running:
            part.forget_weights()

    def _made_or_torch(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """What runs the graph: its parts, or where they cannot be made torch, once named."""
        try:
            return self._made(inputs)
        except (ConfigError, TargetError):
            raise
        except Exception as error:
            if self._options.strict:
                raise
            tell_of_eager(error)
        whole = self._graph if isinstance(self._graph, fx.GraphModule) else self._graph.graph
        return lambda given: whole.forward(*given)

    def _made(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """Cut the graph, import its parts, and have it call them."""
        refused: dict[str, str] = {}
        first = cut = self._cut(refused)
        while True:
            parts = self._parts(cut, inputs)
            found = _refused(cut, parts, self._values(cut, inputs))
            if not found:
                break
            refused |= found
            cut = self._cut(refused)
        if self._place is not None:
            # what was refused since, other values or another target may let in
            self._place.keep(first, self._static)
        trace(f"graph{self._number}_parts", lambda: _text(cut), self._compile_id)
        self._tell_of_outside(cut)
        self._running = parts
        self._compile_called(cut)
        self._collectives = collectives(cut.graph.graph, lambda node: node.op == "call_module")
        if len(parts) == 1 and (run := _alone(cut, parts[0])):
            return run
        run = self._in_parts(cut, parts)

        is_told = (cut.outside or self._collectives) and self._options.report is not None
        return self._timed_once(cut, run) if is_told else run

    def _in_parts(
        self, cut: Partition, parts: Sequence[PartCalls]
    ) -> Callable[[Sequence[Any]], Any]:
        """Calls of parts and of what stands between; recorded, where they may be."""
        device = next((d for d in map(_device, cut.parts) if d.type != "cpu"), torch.device("cpu"))
        graphs = CudaGraphOptions.of(self._options.graphs_on(device))
        why = "CUDA graphs are not asked for" if graphs is None else why_not(cut, device)
        is_recorded = why is None
        if graphs is not None and why is not None and self._collectives:
            _log.warning("no CUDA graph of parts and collectives, parts have their own: %s", why)
        for number, (call, part) in enumerate(zip(cut.parts, parts, strict=True)):
            _call(call, part, number)
            if is_recorded:
                part.leave_capture()
        cut.graph.recompile()
        if is_recorded:
            return StepGraph(cut, parts, self._static, device, graphs.static_outputs)
        return lambda given: cut.graph.forward(*given)

    def _compile_called(self, cut: Partition) -> None:
        """Have graphs compiled that operators call between parts. What they give is read by the
        next call of them, and no CUDA graph is made of that.
        """
        options = replace(self._options, cuda_graph=False, graph_where_possible=False)
        for node in filter(is_graph, cut.graph.graph.nodes):
            graph = operator.attrgetter(node.target)(cut.graph)
            setattr(cut.graph, node.target, _Called(graph, options))

    def _timed_once(
        self, cut: Partition, run: Callable[[Sequence[Any]], Any]
    ) -> Callable[[Sequence[Any]], Any]:
        """`run`, but in the second call that no CUDA graph is made of what runs in torch is timed,
        and told of: in the first one it is not warm.
        """
        count = itertools.count()

        def counted(given: Sequence[Any]) -> Any:
            if _is_captured() or next(count) != 1:
                return run(given)  # a stream that is captured cannot be waited for
            self._run = run
            timed = _Timed(cut, {one.name for one in self._collectives})
            results = timed.run(*given)
            self._outside_us.update(timed.us)
            self._collective_us.update(timed.collective_us)
            tell_of_times(self._told, self._options.report)
            self._told.clear()
            return results

        return counted

    def _cut(self, refused: Mapping[str, str]) -> Partition:
        """The graph in parts, without these nodes; as it was kept, if that will do."""
        if isinstance(self._graph, fx.GraphModule):
            return partitioned(self._graph, refused)
        return partitioned(self._graph.graph, refused) if refused else self._graph.cut()

    def _parts(self, cut: Partition, inputs: Sequence[Any]) -> list[PartCalls]:
        constant = self._values(cut, inputs)
        made = []
        for number, call in enumerate(cut.parts):
            weights = [i for i, node in enumerate(call.args) if node.name in constant]
            made.append(
                PartCalls(
                    cut.graph.get_submodule(call.target),
                    weights,
                    cut.updates[number],
                    _device(call),
                    self._options,
                    self._teller(cut, number),
                )
            )
        return made

    def _values(self, cut: Partition, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors that nothing writes to, by the names of their nodes."""
        placeholders = cut.graph.graph.find_nodes(op="placeholder")
        pairs = enumerate(zip(placeholders, inputs, strict=True))
        found = {
            node.name: value
            for i, (node, value) in pairs
            if i in self._static and node.name not in cut.written
        }
        for node in cut.graph.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(node.target)(cut.graph)
            if isinstance(value, torch.Tensor):
                found[node.name] = value
        return found

    def _teller(self, cut: Partition, part: int) -> Callable[[CompiledModule], None]:
        outside = Counter(str(one.node.target) for one in cut.outside)

        def told(module: CompiledModule) -> None:
            times = self._outside_us, self._collectives, self._collective_us
            report = PartReport(self._number, part, module, cut.count, outside, *times)
            is_timed = outside or self._collectives
            if is_timed and self._options.report is not None and self._is_untimed():
                self._told.append(report)
            tell(report, self._options.report, self._compile_id)

        return told

    def _is_untimed(self) -> bool:
        return not self._outside_us and not self._collective_us

    def _tell_of_outside(self, cut: Partition) -> None:
        if not cut.outside:
            return
        lines = listed(cut.outside)
        text = f"{len(cut.outside)} of {cut.count} operators of a graph run in torch"
        if self._options.strict:
            raise FrontendError(
                f"torch.compile, backend tvm_fusion: {text}: {'; '.join(lines)}; write these lines "
                "with other operators, or leave the option strict out"
            )
        warnings.warn(f"tvm_fusion: {text}: {'; '.join(lines)}", stacklevel=2)


class _Called(nn.Module):
    """A graph that an operator calls, compiled."""

    def __init__(self, graph: fx.GraphModule, options: BackendOptions) -> None:
        super().__init__()
        whole = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        output = whole.graph.output_node()
        (results,) = output.args
        self._is_bare = isinstance(results, fx.Node)
        output.args = ((results,) if self._is_bare else tuple(results),)
        whole.recompile()
        self._run = GraphCalls(whole, frozenset(), options).run

    def forward(self, *inputs: Any) -> Any:
        results = tuple(self._run(inputs))
        return results[0] if self._is_bare else results


class _Timed(fx.Interpreter):
    """Runs a graph in parts node by node.

    Attributes
    ----------
    us : Counter
        How long the operators outside the parts take.
    collective_us : dict of str to float
        And each collective, until its result is there.
    """

    def __init__(self, cut: Partition, collectives: Collection[str]) -> None:
        super().__init__(cut.graph)
        self._outside = {one.node.meta[NAME] for one in cut.outside}
        self._collectives = collectives
        self.us: Counter[str] = Counter()
        self.collective_us: dict[str, float] = {}

    def run_node(self, node: fx.Node) -> Any:
        """What a node gives."""
        is_outside = node.op == "call_function" and node.meta.get(NAME) in self._outside
        if not is_outside and node.name not in self._collectives:
            return super().run_node(node)
        began = _now_us()
        found = super().run_node(node)
        if is_outside:
            self.us[str(node.target)] += _now_us() - began
        else:
            found = awaited(found)
            self.collective_us[node.name] = _now_us() - began
        return found


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _now_us() -> float:
    """The time when all that was launched on a GPU has ended."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter_ns() / 1e3


def tell_of_eager(error: Exception) -> None:
    """Warn that a graph runs in torch because of an error that is not the caller's."""
    why = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(f"tvm_fusion: a graph runs in eager mode: {why}", stacklevel=2)


def _text(cut: Partition) -> str:
    """A graph in parts, and what is in each."""
    texts = [cut.graph.code]
    for call in cut.parts:
        texts.append(f"{call.target}:\n{cut.graph.get_submodule(call.target).code}")
    return "\n".join([*texts, *listed(cut.outside)])


def _refused(
    cut: Partition, parts: Sequence[PartCalls], values: dict[str, torch.Tensor]
) -> dict[str, str]:
    """Import all parts; returns what cannot be converted, by the names in the whole graph."""
    found: dict[str, str] = {}
    for call, part in zip(cut.parts, parts, strict=True):
        names = [node.name for node in call.args]
        known = {
            inner: values[n] for n, inner in zip(names, part.names, strict=True) if n in values
        }
        try:
            part.imported(known)
        except OperatorsRefused as error:
            found |= {one.node.meta[NAME]: one.why for one in error.refused}
    return found


def _alone(cut: Partition, part: PartCalls) -> Callable[[Sequence[Any]], Any] | None:
    """A call of the only part of a graph that does nothing else; None where it does."""
    (call,) = cut.parts
    placeholders = cut.graph.graph.find_nodes(op="placeholder")
    (results,) = cut.graph.graph.output_node().args
    known = {*placeholders, call, cut.graph.graph.output_node(), *call.users}
    is_result = all(n.target is operator.getitem and n.args[0] is call for n in call.users)
    if not is_result or not all(result in call.users for result in results):
        return None
    if any(node not in known for node in cut.graph.graph.nodes):
        return None
    taken = [placeholders.index(node) for node in call.args]
    given = [node.args[1] for node in results]
    (all_results,) = cut.graph.get_submodule(call.target).graph.output_node().args
    take = None if taken == list(range(len(placeholders))) else picker(taken)
    give = None if given == list(range(len(all_results))) else picker(given)

    if take is None and give is None:
        return part.run

    def run(inputs: Sequence[Any]) -> Any:
        found = part.run(inputs if take is None else take(inputs))
        return found if give is None else give(found)

    return run


def _call(call: fx.Node, part: PartCalls, number: int) -> None:
    """Have the graph call a part as a function."""

    def run(*inputs: Any) -> tuple[Any, ...]:
        return part(*inputs)

    run.__name__ = run.__qualname__ = f"part{number}"
    with call.graph.inserting_before(call):
        made = call.graph.call_function(run, call.args)
    made.meta = call.meta
    call.replace_all_uses_with(made)
    call.graph.erase_node(call)


def _device(call: fx.Node) -> torch.device:
    """Where a part runs: on the GPU, if one of its tensors is there."""
    given = [node.meta.get("val") for node in call.args]
    made = call.meta.get("val")
    values = [*given, *(made if isinstance(made, tuple | list) else [made])]
    devices = [x.device for x in values if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
