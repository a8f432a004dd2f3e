"""Equal splits of an exported program, as one.

Where the tensor that is split was written into, `torch.export` splits it anew for each piece:

    p = split(x, 2); a = p[0]; q = split(x, 2); b = q[1]   ->   p = split(x, 2); a = p[0]; b = p[1]

so that a tensor in n pieces has n splits of n results each.
"""

import torch

SPLITS = (
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
)


def merge_equal_splits(program: torch.export.ExportedProgram) -> None:
    """Merges equal splits in a program that is the caller's own, in which nothing writes into a
    tensor.
    """
    first: dict[str, torch.fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.target not in SPLITS:
            continue
        kept = first.setdefault(str((node.target, node.args, node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
