# %% [markdown]
# # 4. Layouts: permutes that cost nothing
#
# **Question.** A transformer splits its heads by reshapes and permutes, a convolutional network
# comes with channels first while tensor cores want them last. Copying a tensor into another order
# costs as much as any other pass over memory. Who pays for it?
#
# Nobody, as long as a neighbour can address the other order itself: a kernel computes an address
# for each element anyway. This notebook looks at both cases, planned for GPUs (no GPU is needed
# for that) and run on the CPU.

# %%
import json
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion.transform import AssignLayouts, Decompose

# %% [markdown]
# ## The heads of a transformer
#
# Attention as it is written everywhere: three projections, each reshaped into heads and permuted,
# the product of queries and keys, a softmax, the product with the values, and all of it back.

# %%
rng = np.random.default_rng(0)
HEADS = 4


def projection(width, dtype):
    return relax.const((rng.standard_normal((width, width)) / width**0.5).astype(dtype))


def attention(tokens, width, dtype):
    """Two sequences of so many tokens."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, tokens, width), dtype))

    def emit(value):
        return builder.emit(value)

    def heads(y):
        split = emit(relax.op.reshape(y, (2, tokens, HEADS, width // HEADS)))
        return emit(relax.op.permute_dims(split, (0, 2, 1, 3)))

    with builder.function("main", [x]):
        with builder.dataflow():
            q, k, v = (heads(emit(relax.op.matmul(x, projection(width, dtype)))) for _ in "qkv")
            scores = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, (0, 1, 3, 2)))))
            scaled = emit(relax.op.multiply(scores, relax.const((width // HEADS) ** -0.5, dtype)))
            mixed = emit(relax.op.matmul(emit(relax.op.nn.softmax(scaled, -1)), v))
            together = emit(relax.op.permute_dims(mixed, (0, 2, 1, 3)))
            flat = emit(relax.op.reshape(together, (2, tokens, width)))
            out = builder.emit_output(relax.op.matmul(flat, projection(width, dtype)))
        builder.emit_func_output(out)
    return builder.get()


def operators(mod):
    """How often each operator is called."""
    found = Counter()
    relax.analysis.post_order_visit(
        mod["main"],
        lambda e: found.update([e.op.name]) if isinstance(e, relax.Call) else None,
    )
    return {name.removeprefix("relax."): count for name, count in found.items()}


half = attention(128, 256, "float16")
found = operators(half)
print(found)
assert (found["permute_dims"], found["reshape"], found["matmul"]) == (5, 4, 6)

# %% [markdown]
# Five permutes and four reshapes beside six products and a softmax. The plan:

# %%
report = tvm_fusion.explain(half, "nvidia_h200", policy={"probe": "off"})
for group in report.groups:
    print(f"{group.kernel_class:10} {group.predicted_us:6.2f} us  {len(group.ops):2} operators")
print("launches that only change a layout:", len(report.layouts))
assert report.layouts == ()
assert [group.kernel_class for group in report.groups] == ["gemm", "attention", "gemm"]

# %% [markdown]
# Three launches: the three projections as one product with a shared left operand, attention, and
# the last product. The permutes are in the addresses with which attention reads its operands and
# writes its result.
#
# On the CPU the same model, with shorter sequences, runs here, and is checked:

# %%
compiled = tvm_fusion.compile(attention(32, 64, "float32"), "llvm")
print([group.kernel_class for group in compiled.report.groups])
assert compiled.report.verify.passed
assert compiled.report.layouts == ()

# %% [markdown]
# ## A convolutional net
#
# Two convolutions with bias and ReLU, a residual and a pool, channels first as PyTorch has them.


# %%
@I.ir_module
class Net:
    @R.function
    def main(
        x: R.Tensor((8, 64, 28, 28), "float16"),
        w1: R.Tensor((64, 64, 3, 3), "float16"),
        w2: R.Tensor((64, 64, 3, 3), "float16"),
        bias: R.Tensor((1, 64, 1, 1), "float16"),
    ):
        with R.dataflow():
            y = R.nn.relu(R.add(R.nn.conv2d(x, w1, padding=(1, 1)), bias))
            z = R.nn.relu(R.add(R.nn.conv2d(y, w2, padding=(1, 1)), x))
            p = R.nn.max_pool2d(z, pool_size=(2, 2), strides=(2, 2))
            R.output(p)
        return p


laid = AssignLayouts()(Net)
print("before:", operators(Net))
print("after: ", operators(laid))

# %% [markdown]
# `AssignLayouts` is a pass of its own. It solves for all tensors at once which order each lies
# in, so that permutes move the fewest bytes. What is left are those at the borders: the input and
# the weights come in, the result goes out, in the order of the model's signature. Between them
# nothing is permuted, however deep the net is:


# %%
def deep(blocks):
    """So many convolutions behind one another; their weights are constants."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 64, 28, 28), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for _ in range(blocks):
                kernel = relax.const(rng.standard_normal((64, 64, 3, 3)).astype("float16") / 24)
                y = builder.emit(relax.op.nn.conv2d(y, kernel, padding=(1, 1)))
                y = builder.emit(relax.op.nn.relu(y))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


for blocks in (1, 4, 8):
    permutes = operators(AssignLayouts()(deep(blocks))).get("permute_dims", 0)
    print(f"{blocks} convolutions: {permutes} permutes, one in and one out")
    assert permutes == 2  # weights that are constants are turned once, when the model is compiled

# %% [markdown]
# ## What it is worth
#
# **Measured on an NVIDIA H200**, read from a committed file: whole networks in half precision,
# channels last for everybody, kernel time. The last bar of each is this package.

# %%
root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "tests/results").is_dir())
vision = json.loads((root / "tests/results/vision_h200.json").read_text())
rows = [row for row in vision["rows"] if row["name"].endswith("_b32")]
peers = ("torch", "torch.compile", "jax")
print(vision["device"], vision["date"], "us a call")
for row in rows:
    others = "  ".join(f"{peer} {row['peers_us'][peer]:6.0f}" for peer in peers)
    print(f"{row['name']:20} {row['launches']:4} launches  ours {row['ours_us']:6.0f}  {others}")

fig, axis = plt.subplots(figsize=(8, 2.8))
for i, peer in enumerate((*peers, "tvm_fusion")):
    times = [row["ours_us"] if peer == "tvm_fusion" else row["peers_us"][peer] for row in rows]
    axis.bar(np.arange(len(rows)) + 0.2 * i, times, 0.2, label=peer)
axis.set_xticks(
    np.arange(len(rows)) + 0.3, [r["name"].removesuffix("_b32") for r in rows], fontsize=7
)
axis.set_ylabel("us a call")
axis.legend(fontsize=7)
plt.show()
assert all(row["ours_us"] < min(row["peers_us"][peer] for peer in peers) for row in rows)

# %% [markdown]
# ## Where a layout does cost a launch
#
# Some orders cannot be absorbed: when two consumers want different ones, or an input has to be
# turned for a kernel that loads tiles. The report then lists the launch, what it costs, and why
# each neighbour refused it.

# %%
costly = tvm_fusion.explain(Net, "nvidia_h100", policy={"probe": "off"})
for layout in costly.layouts:
    print(f"{layout.name}: {layout.predicted_us:.1f} us, {layout.bytes / 1e6:.2f} MB")
    for refusal in layout.neighbours:
        print(f"    {refusal.code}: {refusal.why}")
assert costly.layouts

# %% [markdown]
# ## What to try
#
# - Give `Net` its input in channels last (`R.Tensor((8, 28, 28, 64))` and a permute behind it):
#   the launch at the front goes away.
# - With torch tensors in `channels_last` the module takes them as they lie, without a copy:
#   [convolutions](pages/convolutions.md).
# - `Decompose()` alone shows what a model is opened into before anything is planned.

# %%
print(operators(Decompose()(half)))
