"""Complex tensors of a decomposed program as pairs of real numbers.

    view_as_real(complex(a, b))[..., 0]   ->  a
    z: complex64 [n], an input            ->  z: float32 [n, 2], as `view_as_real` has it
    return complex(a, b)                  ->  return stack([a, b], -1)

`complex_numbers` leaves nothing else of them but what it has no rule for: that stays, and is
refused by its name.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
JOINTS = (_aten.complex.default, _aten.view_as_real.default)  # of real tensors and complex ones
_OF_ORIGIN = ("nn_module_stack", "stack_trace")
IS_COMPLEX = "complex"
"""What nodes say that are complex tensors of the model: of inputs yes, of the output which ones."""


NO_RULE = "complex_without_rule"


def has_no_rule(node: fx.Node) -> bool:
    """Whether a node is an operator of complex numbers that no rule is known for."""
    return bool(node.meta.get(NO_RULE))


def is_complex_input(node: fx.Node) -> bool:
    """Whether an input or a weight of a program is complex in the model."""
    return bool(node.meta.get(IS_COMPLEX))


def complex_outputs(program: torch.export.ExportedProgram) -> tuple[bool, ...]:
    """Of all outputs whether they are complex in the model."""
    node = program.graph.output_node()
    return node.meta.get(IS_COMPLEX, (False,) * len(node.args[0]))


def has_complex(program: torch.export.ExportedProgram) -> bool:
    """Whether a program computes with complex numbers, or takes or gives them."""
    return any(map(is_complex_node, program.graph.nodes))


def is_complex_node(node: object) -> bool:
    """Whether a node stands for a complex tensor, or for several values with such among them."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(x, torch.Tensor) and x.is_complex() for x in values)


def as_pairs(program: torch.export.ExportedProgram) -> None:
    """Takes complex tensors out of a decomposed program, as far as they are parts put together."""
    if not has_complex(program):
        return
    graph = program.graph
    _mark_unknown(program.graph)
    output = graph.output_node()
    output.meta[IS_COMPLEX] = tuple(map(is_complex_node, output.args[0]))
    _weights_as_pairs(program)
    for node in list(graph.nodes):
        if node.op == "placeholder" and is_complex_node(node):
            node.meta["val"] = _computed(_aten.view_as_real.default, node.meta["val"])
            node.meta.pop("tensor_meta", None)
            node.meta[IS_COMPLEX] = True
    read_parts(graph)
    _return_pairs(program)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def read_parts(graph: fx.Graph) -> None:
    """Has what reads the parts of complex tensors in a decomposed graph read what they are made of,
    or an input of pairs.
    """
    for node in list(graph.nodes):
        if node.target is _aten.view_as_real.default:
            _take_apart(node)
        elif node.target is _aten.view.default:
            # parts lie otherwise in memory than views of a complex tensor did
            node.target = _aten.reshape.default


def _return_pairs(program: torch.export.ExportedProgram) -> None:
    """Has a program return pairs, none of which is an input that is of another kind in the model:
    `view_as_real` of it, or `view_as_complex`.
    """
    output = program.graph.output_node()
    (given,) = output.args
    results = []
    with program.graph.inserting_before(output):
        for old, is_complex in zip(given, output.meta[IS_COMPLEX], strict=True):
            new = _pair(old) if is_complex and _is_put_together(old) else old
            if getattr(new, "op", "") == "placeholder" and is_complex_input(new) != is_complex:
                new = _call(program.graph, new, _aten.clone.default, new)
            results.append(new)
    for spec, new in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(new, fx.Node):
            spec.arg.name = new.name
    output.args = (tuple(results),)


def _mark_unknown(graph: fx.Graph) -> None:
    """Marks operators that take or give complex tensors and that no rule is known for."""
    for node in graph.nodes:
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if (
            is_operator
            and node.target not in JOINTS
            and any(map(is_complex_node, (node, *node.all_input_nodes)))
        ):
            node.meta[NO_RULE] = True


def _weights_as_pairs(program: torch.export.ExportedProgram) -> None:
    """The program with its own complex weights, buffers and constants as real tensors."""
    for held in ("_state_dict", "_constants"):
        kept = {name: _real_view(x) for name, x in getattr(program, held).items()}
        setattr(program, held, kept)


def _real_view(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_complex():
        return x
    pair = torch.view_as_real(x.detach().resolve_conj()).contiguous()
    return torch.nn.Parameter(pair, False) if isinstance(x, torch.nn.Parameter) else pair


def _is_put_together(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is _aten.complex.default


def _take_apart(node: fx.Node) -> None:
    """Has the readers of `view_as_real` read what it is made of."""
    (whole,) = node.args
    if is_complex_input(whole):
        node.replace_all_uses_with(whole)
        return
    if not _is_put_together(whole):
        return
    last = node.meta["val"].ndim - 1
    for user in list(node.users):
        if user.target is _aten.select.int and user.args[1] in (-1, last):
            user.replace_all_uses_with(whole.args[user.args[2]])
    if any(user.users for user in node.users) or not _is_read_as_parts(node, last):
        with node.graph.inserting_before(node):
            node.replace_all_uses_with(_pair(whole))


def _is_read_as_parts(node: fx.Node, last: int) -> bool:
    return all(
        user.target is _aten.select.int and user.args[1] in (-1, last) for user in node.users
    )


def _pair(whole: fx.Node) -> fx.Node:
    """The real tensor of a complex one that is put together here."""
    graph, parts = whole.graph, whole.args
    given = _taken_apart_of(parts)
    if given is not None:
        return given
    columns = [_call(graph, whole, _aten.unsqueeze.default, part, -1) for part in parts]
    return _call(graph, whole, _aten.cat.default, columns, -1)


def _taken_apart_of(parts: tuple[fx.Node, fx.Node]) -> fx.Node | None:
    """The tensor of pairs whose parts these are; None where they are of something else."""
    if not all(part.target is _aten.select.int for part in parts):
        return None
    (x, *at), (y, *other) = (part.args for part in parts)
    value = x.meta["val"]
    last = (-1, value.ndim - 1)
    found = x is y and value.shape[-1] == 2 and at[0] in last and other[0] in last
    return x if found and (at[1], other[1]) == (0, 1) else None


def _call(graph: fx.Graph, origin: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new node, which comes from where another one does."""
    node = graph.call_function(target, args)
    node.meta = {key: value for key, value in origin.meta.items() if key in _OF_ORIGIN}
    node.meta["val"] = _computed(target, *fx.map_arg(args, lambda x: x.meta["val"]))
    return node


def _computed(target: Any, *values: Any) -> Any:
    """What an operator gives of traced tensors."""
    tensors = [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    mode = getattr(tensors[0], "fake_mode", None)
    with mode or contextlib.nullcontext():
        return target(*values)
