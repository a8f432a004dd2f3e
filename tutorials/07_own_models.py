# %% [markdown]
# # 7. Your own models: PyTorch, ONNX, torch.compile
#
# **Question.** My model is not written in Relax. How does it get in, what happens to its weights
# and its dynamic sizes, and what if an operator is not known?

# %%
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch

import tvm_fusion

# %% [markdown]
# ## A module and its example inputs
#
# That is what `torch.export` needs, and it is called for you. Weights become constants of the
# compiled model. Calls with torch tensors return torch tensors, which share memory by DLPack.

# %%
torch.manual_seed(0)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.wide = torch.nn.Linear(32, 64)
        self.narrow = torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


block = Block().eval()
example = torch.randn(16, 32)
compiled = tvm_fusion.compile((block, (example,)), "llvm")
with torch.no_grad():
    torch.testing.assert_close(compiled(example), block(example), rtol=1e-4, atol=1e-5)
for group in compiled.report.groups:
    print(f"{group.kernel_class:5} {group.label}")
assert (compiled.report.launches.unfused, compiled.report.launches.fused) == (7, 3)
assert {path for group in compiled.report.groups for path in group.modules} >= {"norm", "wide"}

# %% [markdown]
# Kernels are called after the modules whose work they do, since the report keeps where operators
# come from: module paths and lines of source from `torch.export`, names of nodes from ONNX. Three
# kernels for seven operators: the norm; the first layer with its GELU; the second with the
# residual.

# %% [markdown]
# ## Sizes that are not known yet
#
# Dimensions that `torch.export` keeps dynamic stay symbolic: one compile serves all sizes within
# their bounds, and the check runs several, below, at and above powers of two.

# %%
rows = torch.export.Dim("rows", min=1, max=4096)
dynamic = tvm_fusion.compile(
    block, "llvm", example_inputs=(example,), dynamic_shapes={"x": {0: rows}}
)
print([(spec.name, spec.shape) for spec in dynamic.signature.inputs])
for count in (1, 7, 300):
    x = torch.randn(count, 32)
    with torch.no_grad():
        torch.testing.assert_close(dynamic(x), block(x), rtol=1e-4, atol=1e-5)

# %% [markdown]
# Memory is what the sizes of a call need, whatever their bounds: intermediates lie in one arena,
# whose size is an expression in the symbols. It is kept for the next call, and grows.

# %%
(symbol,) = dynamic.signature.bounds
peaks = {size: dynamic.memory.peak_bytes({symbol: size}) for size in (1, 64, 4096)}
print(peaks)
weights = dynamic.memory.weights_bytes
assert peaks[1] - weights < 0.1 * (peaks[64] - weights) < 0.01 * (peaks[4096] - weights)

# %% [markdown]
# `8 * Dim("eights")` are multiples of 8. A size that is none, or out of its bounds, is an error
# that names the input and its axis, before any kernel runs.


# %%
class Merge(torch.nn.Module):
    """Sums of eight rows."""

    def forward(self, x):
        return x.reshape(x.shape[0] // 8, 8, 32).sum(1)


eights = 8 * torch.export.Dim("eights", min=2, max=100)
merge = tvm_fusion.compile(
    Merge(), "llvm", example_inputs=(example,), dynamic_shapes={"x": {0: eights}}
)
x = torch.randn(24, 32)
torch.testing.assert_close(merge(x), Merge()(x))
for count in (12, 1600):
    try:
        merge(torch.randn(count, 32))
    except tvm_fusion.InputError as error:
        print(error)
    else:
        raise AssertionError(f"{count} rows were taken")

# %% [markdown]
# On a GPU what is fast depends on the size. Products, rows and attention have a kernel for each
# range of a symbolic size, at most six, where the cost model sees that it pays; the host compares
# the size, and the report lists the ranges. With `cuda_graph`, a size is captured at its second
# call, and `max_shapes` says for how many sizes a graph is kept.
# `torch.compile(dynamic=True)` and `mark_dynamic` reach the same code. `python -m tests.benchmarks
# --suite symbolic` measures 25 programs, each compiled once, beside a compile for each size.

# %% [markdown]
# Any other wrong input is such an error, too.

# %%
try:
    dynamic(torch.randn(4, 31))
except tvm_fusion.InputError as error:
    print(error)
else:
    raise AssertionError("31 columns were taken")

# %% [markdown]
# ## ONNX
#
# A path is enough. Here a file is made first, so that the notebook needs none.

# %%
nodes = [
    onnx.helper.make_node("MatMul", ["x", "w"], ["wide"]),
    onnx.helper.make_node("Add", ["wide", "b"], ["shifted"]),
    onnx.helper.make_node("Relu", ["shifted"], ["y"]),
]
weights = {"w": np.eye(8, dtype="float32") * 2, "b": -np.ones(8, "float32")}
graph = onnx.helper.make_graph(
    nodes,
    "small",
    [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 8])],
    [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 8])],
    [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
)
opset = [onnx.helper.make_opsetid("", 17)]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "small.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset), path)
    small = tvm_fusion.compile(path, "llvm")

x = np.arange(32, dtype="float32").reshape(4, 8)
np.testing.assert_allclose(np.asarray(small(x)), np.maximum(2 * x - 1, 0))
print("launches:", small.report.launches.fused, "of", small.report.launches.unfused)
assert small.report.launches.fused == 1

# %% [markdown]
# ## torch.compile
#
# As a backend the package takes each graph that Dynamo finds. What it cannot convert runs in
# torch between the parts that are compiled, and a warning names it: the program stays right in any
# case.

# %%
fast = torch.compile(block, backend="tvm_fusion", options={"target": "llvm"})
with torch.no_grad():
    torch.testing.assert_close(fast(example), block(example), rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## An operator that is not known
#
# `compile` says which one, and where it is: here one that somebody wrote. Under `torch.compile` it
# runs in torch.


# %%
@torch.library.custom_op("tutorial::steepest", mutates_args=())
def steepest(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.gradient(x.numpy())).abs()


steepest.register_fake(torch.empty_like)


class Unknown(torch.nn.Module):
    def forward(self, x):
        return steepest(x) + 1


try:
    tvm_fusion.compile((Unknown(), (torch.randn(4),)), "llvm")
except tvm_fusion.FrontendError as error:
    print(error)
else:
    raise AssertionError("an operator without a converter was compiled")

with torch.no_grad():
    x = torch.randn(4)
    torch.testing.assert_close(torch.compile(Unknown(), backend="tvm_fusion")(x), Unknown()(x))

# %% [markdown]
# ## What to try
#
# - A model of `transformers`: pass it with its inputs, or wrap it so that it returns tensors.
# - A `.pt2` file (`torch.export.save`) and a Relax file (`.py` or `.json`) are paths, too.
# - On a GPU, `cuda_graph=True` makes a call one launch of a CUDA graph: [CUDA
#   graphs](pages/use.md).
