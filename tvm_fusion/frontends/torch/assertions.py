"""What an exported program asserts is dropped before its operators are translated.

    count = aten._local_scalar_dense(sum)
    aten._assert_scalar(count == 4)         neither is converted

Eager execution raises there, the compiled model does not.
"""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten
ASSERTIONS = (
    _aten._assert_scalar.default,
    _aten._assert_async.default,
    _aten._assert_async.msg,
    _aten._assert_tensor_metadata.default,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
)


def drop_assertions(program: torch.export.ExportedProgram) -> None:
    """Takes assertions, and what nothing else reads, out of a decomposed program."""
    graph = program.graph
    for node in reversed(graph.nodes):
        is_call = node.op == "call_function"
        if is_call and (node.target in ASSERTIONS or (not node.users and _is_pure(node))):
            graph.erase_node(node)
    program.graph_module.recompile()


def _is_pure(node: fx.Node) -> bool:
    """Whether a call does nothing but give a result."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or not schema.is_mutable
