"""Graphs that were cut into parts before, on disk: a second process traces none with AOTAutograd.

    <cache folder>/graphs/<key>.pickle      the graph of ATen operators, and the same in parts

The key holds all that decides what AOTAutograd and `partition` make of a graph of Dynamo: its nodes
with their arguments and the lines they come from, how its inputs lie, torch's modes and flags, the
versions of torch, TVM and Python and the state of this package. No weight's numbers and no option
of ours decide that: what is made of the parts has a key of its own (`compilation.kept_modules`).

Kept is what calls of AOTAutograd would do nothing around but return inputs as they are: no result
is a view of an input, what is written to shares its memory with no other input and is written by
the graph itself, all sizes are fixed, inputs are plain tensors and operators are torch's own. So
they are left out in the process that traces, too: a tenth of the call of a small graph. Where
somebody watches operators (modes of torch), changes them (`torch.library`), or plans are not kept
(`TVM_FUSION_PLAN_CACHE=0`), nothing is looked up. The `MOST_GRAPHS` used last stay.
"""

import hashlib
import logging
import pickle
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import tvm
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta

from tvm_fusion.errors import InputError
from tvm_fusion.flow.plan_cache import is_wanted, package_state
from tvm_fusion.frontends.torch.refusals import Refused
from tvm_fusion.host.atomic_files import replace_bytes
from tvm_fusion.host.cache_folder import by_use, cache_dir, make_folder, mark_used
from tvm_fusion.torch_backend.aten_graphs import are_gathered
from tvm_fusion.torch_backend.partition import NAME, Partition
from tvm_fusion.torch_backend.plain_graphs import (
    NotPlain,
    PlainGraph,
    built,
    operator_name,
    plain,
    plain_value,
    tensor_like,
)

_log = logging.getLogger(__name__)
_FORMAT = 1
MOST_GRAPHS = 256


@dataclass(frozen=True)
class KeptGraph:
    """What lies at a place.

    Attributes
    ----------
    static : frozenset of int
        The inputs that are parameters or buffers.
    returned : tuple of (int, int)
        The results that are inputs, and which.
    whole : bytes
        The graph of ATen operators, as a pickled `PlainGraph`.
    plain_cut : PlainGraph
        The same in parts.
    written : frozenset of str
    updates : tuple of tuple of (int, int)
        As a `Partition` has them.
    outside : list of (str, str)
        Names of nodes, and why they are not compiled.
    count : int
    """

    static: frozenset[int]
    returned: tuple[tuple[int, int], ...]
    whole: bytes = field(repr=False)
    plain_cut: PlainGraph = field(repr=False)
    written: frozenset[str]
    updates: tuple[tuple[tuple[int, int], ...], ...]
    outside: list[tuple[str, str]]
    count: int

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The graph of ATen operators."""
        return built(pickle.loads(self.whole))

    def cut(self) -> Partition:
        """The graph in parts."""
        graph = built(self.plain_cut)
        names = {node.meta.get(NAME): node for node in graph.graph.nodes}
        parts = tuple(graph.graph.find_nodes(op="call_module"))
        outside = tuple(Refused(names[name], why) for name, why in self.outside)
        return Partition(graph, parts, self.written, self.updates, outside, self.count)


@dataclass
class Place:
    """Where a graph lies, if it was compiled before.

    Attributes
    ----------
    path : Path
    shares : bool
        Whether inputs share memory with each other.
    returned : tuple of (int, int) or None
        The results that are inputs, and which; None until it is traced, and where AOTAutograd does
        more around the graph that it made.
    whole : bytes or None
        The graph that it made, once that is known to be all that calls need.
    """

    path: Path
    shares: bool
    returned: tuple[tuple[int, int], ...] | None = None
    whole: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, graph: fx.GraphModule, inputs: Sequence[Any]) -> "Place | None":
        """The place of a graph of Dynamo; None where nothing of it is kept."""
        if not is_wanted() or are_gathered(graph):
            return None
        try:
            if _is_watched():
                return None
            laid = list(map(_input, inputs))
            memory = [value.untyped_storage().data_ptr() for value in inputs]
            shared = [memory.index(address) for address in memory]
            key = _key(graph, [*laid, shared, *_surroundings(inputs)])
        except (NotPlain, AttributeError) as error:  # what another version of torch does not have
            _log.info("the graph is not kept: %s", error)
            return None
        path = cache_dir() / "graphs" / f"{key}.pickle"
        return cls(path, shared != list(range(len(shared))))

    def found(self) -> KeptGraph | None:
        """What was kept; None where nothing was, or it cannot be read."""
        try:
            found = pickle.loads(self.path.read_bytes())
            mark_used(self.path)
        except FileNotFoundError:
            return None
        except Exception as error:  # damaged: pickle raises what it likes
            _log.warning("the graph in %s is traced again: %s", self.path, error)
            return None
        return found if isinstance(found, KeptGraph) else None

    def traced(self, metadata: ViewAndMutationMeta | None, guards: Sequence[Any]) -> None:
        """Note what AOTAutograd found out of the graph, and the guards that it asks for."""
        try:
            self.returned = _returned(metadata, self.shares) if metadata and not guards else None
        except AttributeError as error:  # what another version of torch does not have
            _log.info("the graph is not kept: %s", error)

    def takes(self, graph: fx.GraphModule) -> bool:
        """Whether calls need nothing but this graph, which AOTAutograd made, and inputs to return
        as they are.
        """
        if self.returned is not None:
            try:
                self.whole = pickle.dumps(plain(graph))
            except (NotPlain, pickle.PicklingError) as error:
                _log.info("the graph is not kept: %s", error)
        return self.whole is not None

    def keep(self, cut: Partition, static: frozenset[int]) -> None:
        """Write the graph and its parts; what cannot be written is left, and logged."""
        if self.whole is None:
            return
        try:
            outside = [(one.node.meta[NAME], one.why) for one in cut.outside]
            parts = plain(cut.graph, [NAME])
            about = cut.written, cut.updates, outside, cut.count
            kept = KeptGraph(static, self.returned, self.whole, parts, *about)
            make_folder(self.path.parent)
            replace_bytes(self.path, pickle.dumps(kept))
        except (NotPlain, OSError, InputError, pickle.PicklingError) as error:
            _log.info("the graph is not kept: %s", error)
            return
        _forget_old(self.path.parent)


def as_dynamo_calls(
    calls: Callable[[Sequence[Any]], Sequence[Any]], returned: Sequence[tuple[int, int]]
) -> Callable[..., Any]:
    """`calls` of a graph, which take inputs one by one and return those that are results."""
    if not returned:
        return lambda *inputs: calls(inputs)

    def run(*inputs: Any) -> list[Any]:
        results = list(calls(inputs))
        for number, given in returned:
            results[number] = inputs[given]
        return results

    return run


def _returned(found: ViewAndMutationMeta, shares: bool) -> tuple[tuple[int, int], ...] | None:
    """The results that are inputs, and which; None where AOTAutograd does more around a graph whose
    inputs share memory or do not.
    """
    changed = any(one.mutates_metadata or one.mutates_storage_metadata for one in found.input_info)
    others = found.num_intermediate_bases or found.tokens or found.is_rng_op_functionalized
    if found.mutated_inp_runtime_indices or changed or others:
        return None
    if shares and found.mutated_graph_handled_indices:
        return None
    returned = []
    for number, one in enumerate(found.output_info):
        if one.output_type is OutputType.is_input:
            returned.append((number, one.base_idx))
        elif one.output_type is not OutputType.non_alias:
            return None
    return tuple(returned)


def _is_watched() -> bool:
    """Whether something is to see each operator as it is traced or called, or has changed it."""
    modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    off = torch.compiler.config.force_disable_caches
    return bool(modes or transformed or off or torch._C._is_any_autocast_enabled())


def _key(graph: fx.GraphModule, around: Sequence[Any]) -> str:
    nodes = list(graph.graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    text = [repr(part) for part in (_FORMAT, *around)]
    for node in nodes:
        target = node.target
        if node.op == "call_function":
            target = operator_name(target)
            if target == "torch.lstm":
                raise NotPlain("an LSTM")  # is taken apart as far as its sizes say
        elif node.op not in ("placeholder", "call_method", "output"):
            raise NotPlain(f"{node} is a {node.op}")
        arguments = [plain_value(a, places) for a in (node.args, node.kwargs)]
        row = (node.op, node.name, target, arguments, _origin(node), _static_kind(node))
        text.append(repr(row))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _origin(node: fx.Node) -> tuple[str, str]:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())), node.meta.get("stack_trace") or ""


def _static_kind(node: fx.Node) -> Any:
    """What Dynamo says of an input that is the same tensor in all calls."""
    tensor = node.meta.get("tensor_dict") or {}
    return tensor.get("_dynamo_static_input_type")


def _input(value: Any) -> tuple[Any, ...]:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise NotPlain(f"an input is a {type(value).__name__}")
    like = tensor_like(value)
    return like, type(value).__name__, value.requires_grad, value.storage_offset()


def _surroundings(inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What torch's operators depend on beside their inputs, and what this package does with
    them.
    """
    backends = torch.backends
    devices = {str(value.device): value.device for value in inputs}
    gpus = [torch.cuda.get_device_properties(d) for d in devices.values() if d.type == "cuda"]
    return [
        torch.__version__,
        torch.version.git_version,
        tvm.__version__,
        platform.python_version(),
        package_state(),
        sorted(devices),
        [(gpu.name, gpu.major, gpu.minor) for gpu in gpus],
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        [getattr(backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTIONS],
        backends.cudnn.enabled,
        torch._C._get_mkldnn_enabled(),
        torch._functorch.config.get_hash().hex(),
        _changed_operators(),
    ]


_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn")


def _changed_operators() -> str:
    """The implementations of torch's own operators that were registered from Python: torch's, and
    those of others.
    """
    own = sorted(name for name in torch.library._impls if name.startswith(("aten/", "prims/")))
    return hashlib.sha256("\n".join(own).encode()).hexdigest()


def _forget_old(folder: Path) -> None:
    """Only the graphs that were used last stay."""
    for found in by_use(folder.glob("*.pickle"))[MOST_GRAPHS:]:
        with suppress(OSError):  # of another user
            found.unlink(missing_ok=True)
