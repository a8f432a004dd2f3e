"""A graph of Dynamo as AOTAutograd makes it: ATen operators that write into nothing.

    before:  x.mul_(2); y = silu(linear(x, w)); return y
    after:   a = mul(x, 2); b = silu(linear(a, w)); copy_(x, a); return b

Written and aliased inputs, views and tensor subclasses are torch's own bookkeeping.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import fx
from torch._export import utils as export_utils
from torch._functorch.aot_autograd import aot_module_simplified
from torch.export.exported_program import (
    _override_composite_implicit_decomp,
    _split_decomp_table_to_cia_and_python_decomp,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tvm_fusion.frontends.torch.complex.pairs import is_complex_node, read_parts
from tvm_fusion.frontends.torch.decompositions import decompositions, flex_attention_opened
from tvm_fusion.frontends.torch.recurrent import states_in_shape
from tvm_fusion.torch_backend.collectives import merge_repeated


class Calls(Protocol):
    """What runs a traced graph."""

    def run(self, inputs: Sequence[Any]) -> Any:
        """The results for all inputs: a list of AOTAutograd's, which asks whether it takes one
        (`_boxed_call`), or a tuple of Dynamo's.
        """

    def forget_weights(self) -> None:
        """Look at no value of a weight that was seen before."""


_attention = torch.ops.aten.scaled_dot_product_attention.default
_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

Compiler = Callable[[fx.GraphModule, frozenset[int]], Calls]


Told = Callable[[Any, Sequence[Any]], None]


def traced(
    graph: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, told: Told | None = None
) -> Callable[..., Any]:
    """Trace a graph, and compile what comes of it.

    Parameters
    ----------
    graph : fx.GraphModule
    inputs : sequence
        As Dynamo gives both.
    compiler : callable
        Takes the traced graph and the numbers of the inputs that are parameters and buffers.
    told : callable, optional
        Takes what AOTAutograd found out of inputs and results, and the guards that it asks for.

    Returns
    -------
    callable
        Takes what the graph takes.
    """

    def compiled(traced: fx.GraphModule, examples: Sequence[Any]) -> Callable[[list[Any]], Any]:
        if any(map(is_complex_node, traced.graph.nodes)):
            read_parts(traced.graph)
            traced.graph.eliminate_dead_code()
        merge_repeated(traced)
        calls.append(compiler(traced, frozenset() if gathered else _static_inputs()))
        return calls[-1].run

    calls: list[Calls] = []
    gathered = are_gathered(graph)
    whole, table = _tables()
    is_transformed = _is_transformed(graph)  # derivatives and `vmap`
    if is_transformed or any(map(is_traceable_wrapper_subclass, inputs)):
        # these and DTensor and its like know what operators are composed of, not the whole;
        # attention, which tensor parallel models compute of what each process has, stays whole of
        # plain tensors
        keeps = not is_transformed and _is_attention_plain(graph)
        whole = {_attention: whole[_attention]} if keeps else {}
        if not whole:
            table = {op: rule for op, rule in table.items() if op != _attention_on_cpu}
    # operators that are kept whole are not torn apart by their implicit decompositions
    opened = _override_composite_implicit_decomp(dict(whole))
    with opened, states_in_shape(), flex_attention_opened():
        # as `torch._dynamo.backends.common.aot_autograd`, which imports inductor's scheduler
        made = aot_module_simplified(
            graph,
            inputs,
            fw_compiler=compiled,
            inference_compiler=compiled,
            decompositions=dict(table),
            keep_inference_input_mutations=True,
        )
        made = torch._dynamo.disable(made, reason="compiled by tvm_fusion")
    context = torch._guards.TracingContext.try_get()
    if told is not None and context is not None:
        told(context.fw_metadata, context.guards_context.aotautograd_guards)
    wrapped = [i for i, x in enumerate(inputs) if is_traceable_wrapper_subclass(x)]
    return _watching(made, wrapped, calls) if wrapped else made


def _is_attention_plain(graph: fx.GraphModule) -> bool:
    """Whether attention is computed of plain tensors throughout a graph of Dynamo."""
    function = torch.nn.functional.scaled_dot_product_attention
    nodes = graph.graph.find_nodes(op="call_function", target=function)
    given = (n.meta.get("example_value") for node in nodes for n in node.all_input_nodes)
    return not any(map(is_traceable_wrapper_subclass, given))


def _watching(
    run: Callable[..., Any], wrapped: Sequence[int], calls: Sequence[Calls]
) -> Callable[..., Any]:
    """`run`, but what is known of weights is forgotten when tensors that are composed of others
    (DTensor) were written to: a graph is given those others, and their versions do not rise.
    """
    seen: list[int] = []

    def watched(*inputs: Any) -> Any:
        nonlocal seen
        versions = [inputs[i]._version for i in wrapped if not inputs[i].is_inference()]
        if seen and versions != seen:
            for one in calls:
                one.forget_weights()
        seen = versions
        return run(*inputs)

    return watched


def are_gathered(graph: fx.GraphModule) -> bool:
    """Whether weights of a graph are gathered from other processes for each call (FSDP2): their
    versions do not tell whether values are new.
    """
    for node in graph.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        kind = getattr(getattr(argument, "source", None), "guard_source", None)
        kind = kind() if callable(kind) else kind
        if kind is not None and kind.is_fsdp_module():
            return True
    return False


def _is_transformed(graph: fx.GraphModule) -> bool:
    """Whether a graph has transformations of `torch.func` in it: derivatives, and `vmap`."""
    return any(
        (getattr(node.target, "__module__", None) or "").startswith("torch._functorch")
        for module in graph.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def _static_inputs() -> frozenset[int]:
    """The inputs of the graph that is being compiled which are the same tensors in all calls."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return frozenset(metadata.static_input_indices or () if metadata is not None else ())


@cache
def _tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Decompositions of operators that are implicit compositions, and those of all others."""
    with _compositions_looked_up_once():
        return _split_decomp_table_to_cia_and_python_decomp(decompositions())


@contextmanager
def _compositions_looked_up_once() -> Iterator[None]:
    """torch looks up all implicit compositions of its dispatcher once for each namespace of
    operators (60 times a table), to find those that were registered meanwhile.
    """
    with _looking_up:  # else another thread puts back what this one has put there
        look_up = getattr(export_utils, _LOOK_UP, None)
        if look_up is None:  # of another version
            yield
            return
        look_up()
        setattr(export_utils, _LOOK_UP, lambda: None)
        try:
            yield
        finally:
            setattr(export_utils, _LOOK_UP, look_up)


_LOOK_UP = "_materialize_cpp_cia_ops"
_looking_up = threading.Lock()
