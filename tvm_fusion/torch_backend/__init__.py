"""`torch.compile(model, backend="tvm_fusion")`, for inference.

    model = torch.compile(model, backend="tvm_fusion", options={"cuda_graph": True})
    with torch.no_grad():
        outputs = model(*inputs)

Dynamo cuts the model into graphs of torch operators, which AOTAutograd makes functional. Of each
the operators that can be converted are compiled, in parts, as `tvm_fusion.compile` does it; the
others run in torch between these parts, and a warning names them. Weights become constants of the
compiled parts, symbolic sizes stay symbolic where they can. A graph that needs gradients runs in
eager mode.
"""

from tvm_fusion.errors import FrontendError

try:
    import torch
except ImportError as error:
    raise FrontendError(
        "the backend for torch.compile needs torch, which is not installed: "
        "pip install 'tvm_fusion[torch]'"
    ) from error

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm_fusion.host.collector import others_set_aside, uncollected

with uncollected():  # Dynamo and ours are hundreds of thousands of objects, none of them garbage
    from torch._dynamo.exc import TorchDynamoException

    from tvm_fusion.torch_backend.aten_graphs import traced
    from tvm_fusion.torch_backend.graph_calls import GraphCalls, tell_of_eager
    from tvm_fusion.torch_backend.kept_graphs import Place, as_dynamo_calls
    from tvm_fusion.torch_backend.options import BackendOptions
    from tvm_fusion.torch_backend.part_reports import PartReport

NAME = "tvm_fusion"

__all__ = ["NAME", "BackendOptions", "PartReport", "backend"]


def backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    example_inputs : sequence
        Tensors and sizes, weights among them.
    options : mapping, optional
        See `BackendOptions`.
    mode : str, optional
        "default", or "reduce-overhead": CUDA graphs, where the graph runs on a GPU.

    Returns
    -------
    Callable
        Takes what the graph takes, and returns a tuple.

    Raises
    ------
    ConfigError
        For an unknown option, or a value that it does not take.

    The first call raises TargetError if the target in the options is unknown or cannot be used
    here, and FrontendError with `strict` for an operator that cannot be converted.
    """
    wanted = BackendOptions.of(options, mode)
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        warnings.warn(
            "tvm_fusion compiles for inference, and a graph has an input that requires a gradient: "
            "it runs in eager mode; call the model under torch.no_grad() or torch.inference_mode()",
            stacklevel=2,
        )
        return graph.forward
    elsewhere = {x.device.type for x in tensors} - {"cpu", "cuda"}
    if elsewhere:
        warnings.warn(
            f"tvm_fusion compiles for CPUs and for CUDA, and a graph has a tensor on "
            f"{min(elsewhere)}: it runs in eager mode",
            stacklevel=2,
        )
        return graph.forward
    if any(x.is_neg() or x.is_conj() for x in tensors):
        warnings.warn(
            "tvm_fusion: an input is a conjugate or a negative that PyTorch only marks: the graph "
            "runs in eager mode; pass x.resolve_conj().resolve_neg()",
            stacklevel=2,
        )
        return graph.forward
    try:
        with others_set_aside():
            return _calls(graph, example_inputs, wanted)
    except TorchDynamoException:  # asks for another graph
        raise
    except Exception as error:
        if wanted.strict:
            raise
        tell_of_eager(error)
        return graph.forward


def _calls(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], wanted: BackendOptions
) -> Callable[..., Any]:
    """What compiles the graph in its first call."""
    place = Place.of(graph, inputs)
    kept = None if place is None else place.found()
    if kept is not None:
        return as_dynamo_calls(GraphCalls(kept, kept.static, wanted).run, kept.returned)
    made: list[tuple[torch.fx.GraphModule, GraphCalls]] = []

    def compiled(aten: torch.fx.GraphModule, static: frozenset[int]) -> GraphCalls:
        made.append((aten, GraphCalls(aten, static, wanted, place)))
        return made[-1][1]

    run = traced(graph, inputs, compiled, None if place is None else place.traced)
    if place is not None and len(made) == 1 and place.takes(made[0][0]):
        return as_dynamo_calls(made[0][1].run, place.returned)
    return run


def _register() -> None:
    """Make the backend known by its name, unless Dynamo found the entry point already."""
    from torch._dynamo.backends import registry

    if NAME not in registry._BACKENDS:
        registry.register_backend(backend, name=NAME)


_register()
