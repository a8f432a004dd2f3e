"""The part of an exported program that depends on no input, computed by PyTorch itself.

Models build masks, positions and rotary tables from `arange` and constants in every call: dozens of
tiny operators whose results never change. What depends on a parameter is not computed here.
"""

import math
from typing import Any

import torch
from torch import fx

EVALUATION_LIMIT_BYTES = 64 << 20  # no larger value is computed
CONSTANT_LIMIT_BYTES = (
    1 << 20
)  # and none larger than this put into the module: it would be read, not computed


def input_free_values(program: torch.export.ExportedProgram) -> dict[fx.Node, torch.Tensor]:
    """The values of all nodes that depend on constants and buffers only.

    Parameters
    ----------
    program : torch.export.ExportedProgram

    Returns
    -------
    dict
        Nodes with a static shape and at most `EVALUATION_LIMIT_BYTES`; random ones are left out.
    """
    values: dict[fx.Node, torch.Tensor] = {}
    given = _given_tensors(program)
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in given:
                values[node] = given[node.name].cpu()
            elif node.op == "call_function" and _can_evaluate(node, values):
                result = node.target(
                    *fx.map_arg(node.args, values.__getitem__),
                    **fx.map_arg(node.kwargs, values.__getitem__),
                )
                values[node] = result.cpu()  # the module's constants lie there, whatever the model
    return values


def _given_tensors(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Buffers and constants by the name of their placeholder."""
    signature = program.graph_signature
    buffers = dict(program.named_buffers())
    given = {name: buffers[target] for name, target in signature.inputs_to_buffers.items()}
    for name, target in signature.inputs_to_lifted_tensor_constants.items():
        given[name] = program.constants[target]
    return given


def _can_evaluate(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or "empty" in node.target.__name__:
        return False
    if not all(argument in values for argument in node.all_input_nodes):
        return False
    result: Any = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not all(isinstance(n, int) for n in result.shape):
        return False
    return math.prod(result.shape) * result.element_size() <= EVALUATION_LIMIT_BYTES
