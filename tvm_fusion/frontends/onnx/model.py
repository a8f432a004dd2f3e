"""ONNX models to Relax."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import IRModule

from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends.finish import checked_module, cleaned, first_line
from tvm_fusion.ir.origins import Origin, with_origins

try:
    import onnx
except ImportError as error:
    raise FrontendError(
        "reading an ONNX model needs onnx, which is not installed: pip install 'tvm_fusion[onnx]'"
    ) from error

from google.protobuf.message import EncodeError
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from .definitions import DIRECT, with_known_operators

# Operators with a weight that their kernels read as an array.
WEIGHT_READERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def from_onnx_file(path: Path) -> IRModule:
    """Read an `.onnx` file, with the external data beside it if there is any.

    Raises
    ------
    FrontendError
        The file is broken or no valid model, or holds an operator that cannot be converted.
    """
    try:
        model = onnx.load(path)
    except MemoryError:  # `frontends` has words for it
        raise
    except Exception as error:
        raise FrontendError(
            f"{path}: is no ONNX model or is damaged: {first_line(error)}; export it again"
        ) from error
    return from_model(model, str(path), path)


def from_model(model: onnx.ModelProto, where: str, file: Path | None = None) -> IRModule:
    """Translate a model; dimensions without a number stay symbolic.

    Parameters
    ----------
    model : onnx.ModelProto
        Left as it is.
    where : str
        Where it came from, for messages.
    file : Path, optional
        What it was read from: a message of Protocol Buffers holds 2 GB at most, a file more.
    """
    _check(model, where, file)
    model = _with_arrays_for_weights(_without_local_functions(model))
    model = with_known_operators(model)
    with _captured_output() as printed:
        try:
            importer = _Importer(None, "float32", keep_params_in_input=False)
            mod = importer.from_onnx(model.graph, _opset(model))
        except MemoryError:
            raise
        except Exception as error:
            raise FrontendError(
                f"{where}: cannot be converted to Relax{_at_operator(printed.getvalue())}: "
                f"{first_line(error)}"
                "; export the model without that operator"
            ) from error
    mod = checked_module(cleaned(mod), where)
    return with_origins(mod, {**importer.origins, **_spans(mod)})


class _Importer(ONNXGraphImporter):
    """TVM's importer; what it emits tells the node that it comes from.

    Attributes
    ----------
    origins : dict of str to Origin
        By the names of variables; expressions that are no variables yet have a span instead.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.origins: dict[str, Origin] = {}

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Refuses all operators that are not converted at once, with the nodes that have them."""
        known = {*_get_convert_map(), *DIRECT}
        places: dict[str, list[str]] = {}
        for node in graph.node:
            if node.op_type not in known:
                places.setdefault(node.op_type, []).append(node.name or f"-> {node.output[0]}")
        if places:
            told = (f"{op} ({_several(at)})" for op, at in places.items())
            raise FrontendError(f"there is no converter for {', '.join(told)}")

    def _convert_operator(self, op_name: str, inputs: list, attrs: dict, opset: int) -> Any:
        result = super()._convert_operator(op_name, inputs, attrs, opset)
        node = str(attrs["tvm_custom"]["name"])
        return self._told(result, node) if node else result

    def _told(self, value: Any, node: str) -> Any:
        """A value, or each of several, that tells its node."""
        if isinstance(value, relax.Tuple):
            return self.bb.normalize(relax.Tuple([self._told(v, node) for v in value.fields]))
        if isinstance(value, relax.Var):
            self.origins.setdefault(value.name, _origin(node))
        if not isinstance(value, tvm.ir.Call) or value.span is not None:
            return value
        span = tvm.ir.Span(tvm.ir.SourceName(node), 0, 0, 0, 0)
        return self.bb.normalize(relax.Call(value.op, value.args, value.attrs, value.ty_args, span))


def _several(names: list[str]) -> str:
    return names[0] + (f", and {len(names) - 1} more" if names[1:] else "")


def _opset(model: onnx.ModelProto) -> int:
    """The version of the standard operators that a model is written in."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def _origin(node: str) -> Origin:
    """A node's module: exporters call it after the path, "/layers.3/mlp/Gemm"."""
    path = node.strip("/").split("/")
    return Origin(".".join(path[:-1]) if node.startswith("/") else node)


def _spans(mod: IRModule) -> dict[str, Origin]:
    """The origins of the variables whose values have a span."""
    found = {}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            span = getattr(getattr(binding, "value", None), "span", None)
            if span is not None:
                found[binding.var.name] = _origin(span.source_name.name)
    return found


def _check(model: onnx.ModelProto, where: str, file: Path | None) -> None:
    if not model.HasField("graph") or not model.graph.output:
        raise FrontendError(f"{where}: holds no graph with an output; export the model again")
    try:
        onnx.checker.check_model(model if file is None else file)
    except EncodeError as error:
        raise FrontendError(
            f"{where}: has more than the 2 GB that ONNX can check in memory; write it with "
            "onnx.save(..., save_as_external_data=True), and give the path of the file"
        ) from error
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise FrontendError(
            f"{where}: onnx.checker finds it invalid: {first_line(error)}; export it again"
        ) from error


def _without_local_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Functions defined inside the model, expanded where they are called."""
    if not model.functions:
        return model
    from onnx import inliner

    return inliner.inline_local_functions(model)


def _with_arrays_for_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Weights that are given as "this shape, filled with this value", as arrays.

    The `light` models of the onnx package are written so. Fills that are no weights stay as they
    are: a kernel computes them for nothing.
    """
    graph = model.graph
    shapes = {tensor.name: tensor for tensor in graph.initializer}
    weights = {name for node in graph.node if node.op_type in WEIGHT_READERS for name in node.input}
    fills = [
        node
        for node in graph.node
        if node.op_type == "ConstantOfShape"
        and node.input[0] in shapes
        and node.output[0] in weights
    ]
    if not fills:
        return model
    expanded = onnx.ModelProto()
    expanded.CopyFrom(model)
    for node in fills:
        shape = onnx.numpy_helper.to_array(shapes[node.input[0]])
        array = np.full(tuple(shape), _fill_value(node))
        expanded.graph.initializer.append(onnx.numpy_helper.from_array(array, node.output[0]))
        expanded.graph.node.remove(node)
    return expanded


def _fill_value(node: onnx.NodeProto) -> np.generic:
    """The value of a ConstantOfShape; float32 zero if it has none."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return onnx.numpy_helper.to_array(attribute.t).reshape(-1)[0]
    return np.float32(0)


@contextlib.contextmanager
def _captured_output() -> Iterator[io.StringIO]:
    """What TVM's importer prints, kept off standard output; its warnings help no user."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield printed


def _at_operator(printed: str) -> str:
    """The operator that could not be translated, as far as TVM's importer printed it."""
    operator = printed.partition("Error converting operator ")[2].partition(",")[0]
    return f" at operator {operator}" if operator else ""
