"""How the tensors of an exported program lie: see `transform.layouts.memory_formats`."""

import torch
from torch import fx

from ..transform.layouts.memory_formats import MemoryFormats

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def formats_of(program: torch.export.ExportedProgram) -> MemoryFormats:
    """How the example inputs of a program lie, and its outputs in eager execution, as torch.export
    tells: it has contiguous outputs of 3-D convolutions (2.11), whatever those of eager mode are.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    sides = signature.user_inputs, signature.user_outputs
    return MemoryFormats(*(tuple(_lies_last(nodes.get(str(n))) for n in side) for side in sides))


def _lies_last(node: fx.Node | None) -> bool:
    value = node.meta.get("val") if node is not None else None
    if not isinstance(value, torch.Tensor) or value.ndim not in FORMATS:
        return False
    return not value.is_contiguous() and value.is_contiguous(memory_format=FORMATS[value.ndim])
