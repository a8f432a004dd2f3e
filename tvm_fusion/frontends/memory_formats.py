"""How the tensors of an exported program lie: see `transform.layouts.memory_formats`."""

import operator

import torch
from torch import fx

from ..transform.layouts.memory_formats import MemoryFormats
from .torch.convention import tensor_inputs

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def formats_of(program: torch.export.ExportedProgram) -> MemoryFormats:
    """How the example inputs of a program lie, and its outputs in eager execution.

    torch.export says so, but for what comes out of batch norms and 3-D convolutions (2.11), which
    it takes to be contiguous: an output that operators make which keep the format of their data
    lies as that does.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = tuple(_lies_last(nodes[name]) for name in tensor_inputs(program))
    outputs = tuple(_comes_last(nodes.get(str(name))) for name in signature.user_outputs)
    return MemoryFormats(inputs, outputs)


MOVES = ("permute", "transpose", "t", "view", "_unsafe_view", "reshape", "clone", "contiguous")
"""Operators whose results lie as torch.export says."""


def _comes_last(node: fx.Node | None) -> bool:
    """Whether a value lies channels last, or is made of data that does."""
    while node is not None and not _lies_last(node):
        value = node.meta.get("val")
        is_item = node.target is operator.getitem
        tensor = isinstance(value, torch.Tensor) and value.ndim in FORMATS
        name = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""
        if node.op != "call_function" or not (is_item or (tensor and name and name not in MOVES)):
            return False
        node = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
    return node is not None


def _lies_last(node: fx.Node | None) -> bool:
    value = node.meta.get("val") if node is not None else None
    if not isinstance(value, torch.Tensor) or value.ndim not in FORMATS:
        return False
    return not value.is_contiguous() and value.is_contiguous(memory_format=FORMATS[value.ndim])
