"""What people deploy on CPUs as peers: ONNX Runtime and OpenVINO, on as many threads as torch.

Both get the model as torch exports it, compute in float32 and are tuned for the time of one call.
"""

import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import tvm
from torch import nn

from ..errors import InputError, Unsupported


def onnx_bytes(module: nn.Module, inputs: Sequence[torch.Tensor]) -> bytes:
    """A module as ONNX, weights inside."""
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_onnx_") as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            module, tuple(inputs), path, dynamo=True, external_data=False, verbose=False
        )
        return path.read_bytes()


def onnxruntime_call(model: bytes, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """A call of ONNX Runtime on an ONNX model."""
    try:
        import onnxruntime as library
    except ImportError as error:
        raise InputError("the peer onnxruntime needs: pip install onnxruntime") from error
    options = library.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = library.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return lambda: [torch.from_numpy(value) for value in session.run(None, given)]


def openvino_call(model: bytes, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """A call of OpenVINO on an ONNX model."""
    try:
        import openvino as library
    except ImportError as error:
        raise InputError("the peer openvino needs: pip install openvino") from error
    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # it would take bfloat16 where the processor has it
    }
    core = library.Core()
    compiled = core.compile_model(core.read_model(io.BytesIO(model)), "CPU", config)
    request = compiled.create_infer_request()
    given = [library.Tensor(x.numpy(), shared_memory=True) for x in inputs]

    def call() -> list[torch.Tensor]:
        results = request.infer(given, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(results[port]) for port in compiled.outputs]

    return call


def require_cpu(target: tvm.target.Target) -> None:
    """Raise Unsupported for a GPU."""
    if target.kind.name != "llvm":
        raise Unsupported("this peer is measured on a CPU only")
