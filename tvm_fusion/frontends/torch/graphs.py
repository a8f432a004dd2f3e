"""Graphs of ATen operators whose nodes know what they give, as AOTAutograd traces them, to Relax.

    graph(x: f32[s0, 8], weight: f32[4, 8]) -> (linear(x, weight),)
    main(x: Tensor((s0, 8))) -> (linear(x, constant),)

Tensors are inputs, in order, but for the weights, which are constants. Sizes are read off the
tensors: each symbol of a size has to stand alone as an extent of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import free_symbols
from tvm import relax, tirx
from tvm.ir import IRModule

from ...errors import FrontendError
from .assertions import drop_assertions
from .importer import Importer, is_weight_elsewhere, shape_of, size_of
from .model import CONVERTERS, translated
from .slices import merge_equal_splits


def from_graph(
    graph: fx.GraphModule,
    weights: Mapping[str, torch.Tensor],
    where: str,
    in_place: Collection[fx.Node] = (),
) -> IRModule:
    """Translate a graph.

    Parameters
    ----------
    graph : fx.GraphModule
        Functional, decomposed by `decompositions`; nodes have fake tensors and sizes as
        `meta["val"]`. It takes tensors and sizes, and returns a tuple of tensors. Assertions and
        repeated splits are taken out of it.
    weights : mapping of str to torch.Tensor
        The values of placeholders that are constants. What depends on those only that are no
        `nn.Parameter` is computed here.
    where : str
        What the graph is of, for messages.
    in_place : collection of fx.Node
        Writes that `main` does in its inputs (`writes.chain_of_writes`).

    Raises
    ------
    OperatorsRefused
        It holds operators that cannot be converted; they are nodes of the graph.
    FrontendError
        It cannot be converted for another reason.
    """
    program = _Program.of(graph, weights)
    drop_assertions(program)
    merge_equal_splits(program)
    importer = _GraphImporter(CONVERTERS)
    importer.in_place = set(in_place)
    return translated(importer, program, where, bare=False)


def is_size(node: fx.Node) -> bool:
    """Whether a node gives a number that depends on the sizes of tensors."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def lone_symbols(tensors: Iterable[torch.Tensor]) -> set[str]:
    """The symbols that are extents of tensors by themselves."""
    extents = (n for tensor in tensors for n in tensor.shape)
    return {
        str(n.node.expr) for n in extents if isinstance(n, torch.SymInt) and n.node.expr.is_symbol
    }


@dataclass(frozen=True, slots=True)
class _Program:
    """What `Importer` reads of an exported program, of a graph."""

    graph_module: fx.GraphModule
    graph_signature: ExportGraphSignature
    state_dict: dict[str, torch.Tensor]
    range_constraints: dict[Any, Any]
    constants: dict[str, Any]

    @classmethod
    def of(cls, graph: fx.GraphModule, weights: Mapping[str, torch.Tensor]) -> _Program:
        placeholders = graph.graph.find_nodes(op="placeholder")
        inputs = [
            _input(node, weights.get(node.name))
            for node in placeholders
            if isinstance(node.meta.get("val"), torch.Tensor)
        ]
        (results,) = graph.graph.output_node().args
        outputs = [
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results
        ]
        # copies: whoever holds a weight may free its memory between calls, as FSDP2 does; what
        # stays on a device is copied, or computed from, before the module is compiled
        on_host = {
            name: w.detach() if is_weight_elsewhere(w) else w.detach().to("cpu", copy=True)
            for name, w in weights.items()
        }
        ranges = _ranges(node.meta.get("val") for node in placeholders)
        return cls(graph, ExportGraphSignature(inputs, outputs), on_host, ranges, {})

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._weights(InputKind.PARAMETER)

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._weights(InputKind.BUFFER)

    def _weights(self, kind: InputKind) -> Iterable[tuple[str, torch.Tensor]]:
        names = [spec.target for spec in self.graph_signature.input_specs if spec.kind is kind]
        return [(name, self.state_dict[name]) for name in names]


class _GraphImporter(Importer):
    """Has sizes as expressions in the extents of the inputs."""

    def create_input_vars(self, program: _Program) -> Any:
        specs = program.graph_signature.input_specs
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        user = [s.arg.name for s in specs if s.kind is InputKind.USER_INPUT]
        names = sorted(lone_symbols(values[name] for name in user))
        self.symbols = {name: tirx.Var(name, "int64") for name in names}
        variables: tuple[dict[str, relax.Var], dict[str, relax.Var]] = {}, {}
        for spec in specs:
            value = values[spec.arg.name]
            shape = shape_of(value, self.symbols)
            if shape is None:
                raise FrontendError(
                    f"the sizes of {spec.arg.name} cannot be read off its tensors"
                    "; give it inputs that have each size as an extent"
                )
            type_ = relax.TensorType(shape, self._convert_data_type(value.dtype))
            given = variables[spec.kind is InputKind.USER_INPUT]
            given[spec.arg.name] = relax.Var(spec.arg.name, type_)
        ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
        return *variables, {n: ranges[n] for n in names if n in ranges}

    def _translate_fx_graph(
        self, graph: Any, nodes: Iterable[fx.Node], inputs: dict, custom_ops: Any = None
    ) -> tuple[relax.Expr, ...]:
        rest = []
        for node in nodes:
            if is_size(node):
                self.env[node] = self._size(node)
            else:
                rest.append(node)
        return super()._translate_fx_graph(graph, rest, inputs, custom_ops)

    def _size(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        if value.node.expr.is_number:
            return int(value.node.expr)
        size = size_of(value, self.symbols)
        if size is None and node.users:
            raise FrontendError(
                f"the size {value} cannot be read off the tensors"
                "; give the model an input that has it as an extent"
            )
        return size


def _input(node: fx.Node, weight: torch.Tensor | None) -> InputSpec:
    argument = TensorArgument(node.name)
    if weight is None:
        return InputSpec(InputKind.USER_INPUT, argument, None)
    if isinstance(weight, torch.nn.Parameter):
        return InputSpec(InputKind.PARAMETER, argument, node.name)
    return InputSpec(InputKind.BUFFER, argument, node.name, persistent=True)


def _ranges(values: Iterable[Any]) -> dict[Any, tuple[int, int | None]]:
    """The bounds of the symbols of tensors' extents, None where there is none above."""
    found: dict[Any, tuple[int, int | None]] = {}
    for value in values:
        for extent in getattr(value, "shape", ()):
            for symbol in free_symbols(extent):
                bounds = extent.node.shape_env.bound_sympy(symbol)
                upper = float(bounds.upper)
                above = None if math.isinf(upper) else int(upper)
                found[symbol] = int(bounds.lower), above
    return found
