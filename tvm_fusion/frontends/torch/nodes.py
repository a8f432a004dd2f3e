"""Each node of an exported program by itself: converted, and computed by PyTorch.

    main(inputs, what PyTorch gives for each node) -> what each node gives of that

A node that is converted wrongly is the only one that differs, whatever reads it.
Does not handle: programs with branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from tvm import relax
from tvm.ir import IRModule

from ..finish import checked_module, cleaned
from .importer import Importer


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a program and the module that computes each of PyTorch's operands.

    Attributes
    ----------
    mod : IRModule
        `main` takes the inputs of the program and a tensor for each of `nodes`, and returns one for
        each of them.
    nodes : tuple of fx.Node
    """

    mod: IRModule
    nodes: tuple[fx.Node, ...]

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, converters: dict[str, Any]) -> Nodes:
        """Those nodes of a decomposed program that depend on an input and give a tensor."""
        importer = _NodeImporter(converters)
        mod = importer.module_of(program)
        return cls(checked_module(cleaned(mod), "the nodes of the model"), importer.compared)


class _NodeImporter(Importer):
    """Has PyTorch's value of a node, an input of its own, in the place of the node's result."""

    compared: tuple[fx.Node, ...] = ()

    def create_input_vars(self, program: torch.export.ExportedProgram) -> Any:
        given, inputs, ranges = super().create_input_vars(program)
        self.compared = tuple(n for n in program.graph.nodes if self._is_compared(n))
        for node in self.compared:
            value = node.meta["val"]
            dtype = self._convert_data_type(value.dtype)
            inputs[f"{node.name}_given"] = relax.Var(
                f"{node.name}_given", relax.TensorType(list(value.shape), dtype)
            )
        return given, inputs, ranges

    def _is_compared(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            node.op == "call_function"
            and isinstance(value, torch.Tensor)
            and value.numel() > 0
            and node not in self.known_values
        )

    def _translate_fx_graph(
        self, graph: Any, nodes: Iterable[fx.Node], inputs: dict, custom_ops: Any = None
    ) -> tuple[relax.Expr, ...]:
        results = []
        for node in nodes:
            if node.op == "placeholder":
                self.env[node] = inputs[node.name]
            elif node.op == "call_function":
                result = self.convert_map[node.target.__name__](node)
                if f"{node.name}_given" in inputs:
                    results.append(result)
                    result = inputs[f"{node.name}_given"]
                self.env[node] = result
        # TVM drops what it takes for the state of the model where there are as many results
        return (*results, results[-1]) if results else ()


class _Values(fx.Interpreter):
    """Keeps what PyTorch gives for each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        return value.detach() if isinstance(value, torch.Tensor) else value


def values_of(
    program: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]
) -> dict[fx.Node, Any]:
    """What PyTorch gives for the nodes of a program, on inputs of the model, on the CPU."""
    running = _Values(program.graph_module)
    with torch.no_grad():
        running.run(*_arguments(program, inputs))
    return running.env


def _arguments(program: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The arguments of a program's graph: weights, buffers, constants and inputs in its order."""
    state, given, found = {**program.state_dict, **program.constants}, iter(inputs), []
    for spec in program.graph_signature.input_specs:
        user = spec.kind is InputKind.USER_INPUT
        found.append(next(given) if user else state[spec.target])
    return found
