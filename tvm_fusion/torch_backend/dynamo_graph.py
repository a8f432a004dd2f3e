"""A graph of Dynamo, taken apart: what is compiled, what stays in torch, and where sizes come from.

Before:
    def forward(weight, s0, x):          # x is (s0, 8)
        y = linear(x, weight)
        return (y, x.t(), 2 * s0)

After:
    computed(x), with the weight in it:  return (linear(x, weight),)
    rest(weight, s0, x):                 return (x.t(), 2 * s0)
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.utils import get_static_address_type

from tvm_fusion.errors import FrontendError

_WRITING_OPERATORS = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name in ("setitem", "delitem", "iand", "ior")
    or (name.startswith("i") and hasattr(operator, name[1:]))
)


@dataclass(frozen=True, slots=True)
class Parts:
    """A graph by what becomes of its inputs and outputs.

    Attributes
    ----------
    computed : fx.GraphModule
        Takes what the graph takes; gives the outputs that are compiled.
    rest : fx.GraphModule or None
        The same for all other outputs: views of inputs, which stay views, sizes, and None.
    from_computed : tuple of bool
        For each output, which of the two gives it.
    weights, tensors : tuple of int
        Inputs that are parameters or buffers, and those that are other tensors.
    sizes : dict
        For inputs that are sizes: the tensor and the axis that have it.
    fixed : tuple of int
        Inputs that are numbers and no size of a tensor: each value is compiled by itself.
    """

    computed: fx.GraphModule
    rest: fx.GraphModule | None
    from_computed: tuple[bool, ...]
    weights: tuple[int, ...]
    tensors: tuple[int, ...]
    sizes: dict[int, tuple[int, int]]
    fixed: tuple[int, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, inputs: Sequence[Any]) -> "Parts | None":
        """Take a graph apart; None if there is nothing to compile."""
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        fakes = [n.meta.get("example_value") for n in nodes]
        results = graph.graph.output_node().args[0]
        memory = {_memory(fake) for fake in fakes} - {None}
        computed = tuple(_is_computed(result, memory) for result in results)
        if not any(computed):
            return None
        weights = tuple(i for i, x in enumerate(inputs) if _is_weight(x))
        is_tensor = [
            isinstance(x, torch.Tensor) and not _is_number(n)
            for n, x in zip(nodes, inputs, strict=True)
        ]
        tensors = tuple(i for i, yes in enumerate(is_tensor) if yes and i not in weights)
        numbers = [i for i, yes in enumerate(is_tensor) if not yes]
        sizes = {i: _axis_of(fakes[i], fakes, tensors) for i in numbers}
        sizes = {i: where for i, where in sizes.items() if where is not None}
        own = [r for r, yes in zip(results, computed, strict=True) if yes]
        others = [r for r, yes in zip(results, computed, strict=True) if not yes]
        return cls(
            _with_outputs(graph, own, trimmed=False),
            _with_outputs(graph, others, trimmed=True) if others else None,
            computed,
            weights,
            tensors,
            sizes,
            tuple(i for i in numbers if i not in sizes),
        )

    @property
    def has_symbols(self) -> bool:
        """Whether tensors have sizes that may change from call to call."""
        return bool(self.sizes) or self.symbols() != {}

    def with_inputs(self, weights: Collection[int]) -> "Parts":
        """The same with some weights as plain inputs."""
        return replace(
            self,
            weights=tuple(i for i in self.weights if i not in weights),
            tensors=tuple(sorted({*self.tensors, *weights})),
        )

    def symbols(self) -> dict[int, dict[int, str]] | None:
        """The symbolic axes by tensor, with the names of their symbols; None where an extent is an
        expression.
        """
        nodes = [n for n in self.computed.graph.nodes if n.op == "placeholder"]
        found: dict[int, dict[int, str]] = {}
        for index in self.tensors:
            for axis, extent in enumerate(nodes[index].meta["example_value"].shape):
                if isinstance(extent, torch.SymInt) and not extent.node.expr.is_number:
                    if not extent.node.expr.is_symbol:
                        return None
                    found.setdefault(index, {})[axis] = str(extent.node.expr)
        return found


class _Closed(nn.Module):
    """What is compiled, with its weights in it and its sizes read off its tensors."""

    def __init__(self, parts: Parts, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._graph, self._parts = [parts.computed], parts  # in a list: no submodule
        numbers = {i: plain_number(inputs[i]) for i in parts.fixed}
        self._numbers = {
            i: _Number(x) if isinstance(inputs[i], torch.Tensor) else x for i, x in numbers.items()
        }
        for index in parts.weights:
            if isinstance(inputs[index], nn.Parameter):
                self.register_parameter(f"weight{index}", inputs[index])
            else:
                self.register_buffer(f"weight{index}", inputs[index])

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = self._parts
        given: dict[int, Any] = dict(zip(parts.tensors, tensors, strict=True)) | self._numbers
        given |= {i: getattr(self, f"weight{i}") for i in parts.weights}
        given |= {i: given[tensor].shape[axis] for i, (tensor, axis) in parts.sizes.items()}
        return tuple(self._graph[0](*(given[i] for i in range(len(given)))))


def exported(
    parts: Parts, inputs: Sequence[Any], keep_symbols: bool
) -> torch.export.ExportedProgram:
    """Export what is compiled of a graph.

    Parameters
    ----------
    parts : Parts
    inputs : sequence
        All inputs of the graph.
    keep_symbols : bool
        Whether symbolic sizes stay symbolic; else they are those of the inputs.

    Raises
    ------
    FrontendError
        It cannot be traced, or its results are random.
    """
    tensors = tuple(inputs[i].detach() for i in parts.tensors)
    axes = parts.symbols() if keep_symbols else {}
    if axes is None:
        raise FrontendError("torch.compile: a size is an expression of others; leave it to torch")
    dims: dict[str, Any] = {}
    shapes = tuple(
        {
            axis: dims.setdefault(name, torch.export.Dim(name))
            for axis, name in axes.get(i, {}).items()
        }
        for i in parts.tensors
    )
    try:
        with torch.inference_mode(False), torch.no_grad(), torch._guards.tracing(None):
            program = torch.export.export(
                _Closed(parts, inputs), tensors, dynamic_shapes=(shapes,) if dims else None
            )
    except Exception as error:
        raise FrontendError(
            f"torch.compile: it cannot be traced: {_first(error)}; leave it to torch"
        ) from error
    for node in program.graph.nodes:
        if _is_random(node):
            raise FrontendError(
                f"torch.compile: {node.target} gives random numbers; leave it to torch"
            )
    return program


def refuse_writes(program: torch.export.ExportedProgram) -> None:
    """Raise FrontendError if a decomposed program changes what it is given."""
    signature = program.graph_signature
    if signature.user_inputs_to_mutate or signature.buffers_to_mutate:
        raise FrontendError("it writes into its inputs or buffers; leave it to torch")


@dataclass(frozen=True, slots=True)
class _Number:
    """A float in the place of the tensor that Dynamo makes of it."""

    value: float

    def item(self) -> float:
        return self.value


def plain_number(value: Any) -> Any:
    """A number without a symbol and without a tensor around it."""
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat | torch.Tensor) else value


def _is_number(node: fx.Node) -> bool:
    """Whether an input is a float in a tensor, which the graph only takes out again."""
    argument = node.meta.get("grapharg")
    wrapped = argument is not None and argument.pass_arg_as_tensor
    return wrapped and all(u.op == "call_method" and u.target == "item" for u in node.users)


def _is_weight(value: Any) -> bool:
    """Whether an input is a parameter or a buffer of a module."""
    if not isinstance(value, torch.Tensor):
        return False
    return isinstance(value, nn.Parameter) or get_static_address_type(value) is not None


def _is_computed(result: Any, memory: set[int]) -> bool:
    """Whether an output is a tensor with memory of its own, or of other results."""
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    return isinstance(value, torch.Tensor) and _memory(value) not in memory


def _memory(value: Any) -> int | None:
    """What identifies the memory of a traced tensor."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _axis_of(size: Any, fakes: Sequence[Any], tensors: Sequence[int]) -> tuple[int, int] | None:
    """A tensor and an axis that have a symbolic size."""
    if not isinstance(size, torch.SymInt):
        return None
    for index in tensors:
        for axis, extent in enumerate(fakes[index].shape):
            if isinstance(extent, torch.SymInt) and extent.node.expr == size.node.expr:
                return index, axis
    return None


def _may_write(node: fx.Node) -> bool:
    """Whether a node may change a tensor; dead-code elimination does not know all that do."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op.startswith("call_") and (
        in_place or node.target in _WRITING_OPERATORS or "out" in node.kwargs
    )


def _with_outputs(graph: fx.GraphModule, outputs: Sequence[Any], trimmed: bool) -> fx.GraphModule:
    """The graph with other outputs; `trimmed`: without what they do not need."""
    copied = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(graph.graph, known)
    copied.output(tuple(fx.map_arg(output, known.__getitem__) for output in outputs))
    if trimmed and not any(map(_may_write, copied.nodes)):
        copied.eliminate_dead_code()
    return fx.GraphModule(graph, copied)


def _is_random(node: fx.Node) -> bool:
    """Whether a node of an exported program gives other numbers every time."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    given = {a.name: a.default_value for a in node.target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    share = given.get("dropout_p", given.get("p"))
    return share != 0 and given.get("train") is not False


def _first(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
