"""Real models that nobody here wrote, small enough for tests, and a plain way to run a module."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .helpers_tir import quick_executable

ONNX_LIGHT = ("light_resnet50", "light_squeezenet", "light_densenet121")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, inputs for it, and what it gives for them.

    Attributes
    ----------
    model : torch.nn.Module or Path
        What `tvm_fusion.frontends.load` and `tvm_fusion.compile` take.
    inputs : tuple
        Of torch.Tensor for a torch model, of numpy.ndarray for a file.
    expected : list of numpy.ndarray
    """

    model: Any
    inputs: tuple
    expected: list[np.ndarray]

    @property
    def arrays(self) -> list[np.ndarray]:
        """The inputs as NumPy arrays."""
        return [np.asarray(x) for x in self.inputs]


def tiny_llama(sequence: int = 128, batch: int = 1) -> Case:
    """Llama of transformers: 2 layers, hidden size 64, 4 heads over 2 key-value heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, config.vocab_size, (batch, sequence))
    with torch.no_grad():
        return Case(model, (tokens,), [model(tokens).logits.numpy()])


def tiny_bert(sequence: int = 128, batch: int = 1) -> Case:
    """BERT of transformers: 2 layers, hidden size 64, 4 heads, with its pooler."""
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = BertModel(config).eval()
    tokens = torch.randint(0, config.vocab_size, (batch, sequence))
    with torch.no_grad():
        states, pooled = model(tokens).to_tuple()[:2]
    return Case(model, (tokens,), [states.numpy(), pooled.numpy()])


def onnx_light(name: str) -> Case:
    """One of the `light` models of the onnx package, with the input and output it comes with."""
    import onnx
    from onnx.backend.test.runner import Runner

    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"{name}.onnx"
    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = tuple(
        Runner.generate_dummy_data(value, seed=0, name=name, random=False)
        for value in graph.input
        if value.name not in weights
    )
    expected = []
    for index in itertools.count():
        file = path.with_name(f"{name}_output_{index}.pb")
        if not file.exists():
            return Case(path, inputs, expected)
        expected.append(onnx.numpy_helper.to_array(onnx.load_tensor(file)))


def onnx_light_random(name: str) -> Case:
    """The same with random weights, so that outputs differ; expects what ONNX's evaluator gives."""
    import onnx.reference
    import onnx.version_converter

    case = onnx_light(name)
    model = onnx.load(case.model)
    model.ir_version = 8  # before version 4 every initializer had to be an input, too
    rng = np.random.default_rng(0)
    shapes = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    for node in list(model.graph.node):
        if node.op_type == "ConstantOfShape" and len(shapes[node.input[0]]) > 1:
            shape = tuple(shapes[node.input[0]])
            scale = np.sqrt(2 / np.prod(shape[1:]))
            weight = (rng.standard_normal(shape) * scale).astype("float32")
            model.graph.initializer.append(onnx.numpy_helper.from_array(weight, node.output[0]))
            model.graph.node.remove(node)
    # The evaluator does not compute Softmax and BatchNormalization of opset 9 as opset 9 says.
    model = onnx.version_converter.convert_version(model, 15)
    inputs = tuple(rng.random(x.shape, dtype="float32") for x in case.inputs)
    names = [value.name for value in onnx.load(case.model).graph.input]
    feeds = dict(zip((n for n in names if n not in shapes), inputs, strict=True))
    return Case(model, inputs, onnx.reference.ReferenceEvaluator(model).run(None, feeds))


def run_unfused(mod: tvm.IRModule, *inputs: Any) -> list[np.ndarray]:
    """Build a module with TVM alone, one kernel an operator, run it, and flatten what it gives."""
    machine = relax.VirtualMachine(quick_executable(mod), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(np.asarray(x)) for x in inputs))
    return [x.numpy() for x in _flat(result)]


def _flat(result: Any) -> list[Any]:
    if hasattr(result, "numpy"):
        return [result]
    return [tensor for item in result for tensor in _flat(item)]
