# %% [markdown]
# # 1. A first fusion
#
# **Question.** A model is a list of operators. Run one by one, each of them writes its result to
# memory, and the next one reads it back. How much of that is needed?
#
# This notebook takes a small model, looks at what it costs operator by operator, has `tvm_fusion`
# put operators together, and checks that the numbers stay right. It runs on any CPU in seconds;
# nothing in it needs a GPU.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.special import erf
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion

# %% [markdown]
# ## A model
#
# A residual connection, an RMSNorm, and a small layer behind it, written in Relax. A path to a
# `.pt2` or `.onnx` file, or an `nn.Module` with its example inputs, would do as well: that is
# tutorial 7.


# %%
@I.ir_module
class Model:
    @R.function
    def main(
        x: R.Tensor((64, 256), "float32"),
        residual: R.Tensor((64, 256), "float32"),
        scale: R.Tensor((256,), "float32"),
        weight: R.Tensor((256, 512), "float32"),
        bias: R.Tensor((512,), "float32"),
    ):
        with R.dataflow():
            total = R.add(x, residual)
            normal = R.nn.rms_norm(total, scale, axes=[-1], epsilon=1e-5)
            wide = R.add(R.matmul(normal, weight), bias)
            out = R.nn.gelu(wide)
            R.output(out, total)
        return out, total


# %% [markdown]
# ## Compile
#
# `compile` plans, fuses, writes the kernels, builds them, and holds the result against float64.
# The report begins with what was saved. *Launches* are kernels that run, counted in the module
# that was built. *Bytes* are what they read and write, each tensor once a kernel.

# %%
compiled = tvm_fusion.compile(Model, "llvm")
report = compiled.report
print(report)

# %% [markdown]
# Five launches became two. Why these two, and not one?
#
# - The norm has to see a whole row before it can scale any element of it, and a kernel for rows
#   can add the residual on the way in. So `add` and `rms_norm` are one kernel.
# - The matrix product computes tiles. Adding a bias and applying GELU concerns each element by
#   itself, so that happens while a tile is still in registers. That is the other one.
# - The two do not go together: a tile of the product holds a part of a row, and the norm needs
#   the whole. The report says that, too. A *refusal* is a reason, with the operators it is about.

# %%
assert (report.launches.unfused, report.launches.fused) == (5, 2)
assert report.bytes.fused < report.bytes.unfused
assert [refusal.code for refusal in report.refusals] == ["epilogue"]

for refusal in report.refusals:
    print(f"{refusal.code}: {' and '.join(refusal.where)}")
    print(f"    {refusal.why}")

# %% [markdown]
# ## Where the bytes went
#
# What is saved are intermediates: tensors that one kernel would write and the next one would
# read. A group's bytes apart (every operator by itself) and together:

# %%
fig, axis = plt.subplots(figsize=(7, 2.2))
rows = np.arange(len(report.groups))
axis.barh(rows - 0.2, [g.bytes_unfused / 1e3 for g in report.groups], 0.38, label="one by one")
axis.barh(rows + 0.2, [g.bytes_fused / 1e3 for g in report.groups], 0.38, label="fused")
axis.set_yticks(rows, [", ".join(g.composites) or g.name for g in report.groups])
axis.invert_yaxis()
axis.set_xlabel("kB read and written")
axis.legend()
plt.show()

# %% [markdown]
# ## Run it
#
# Inputs are NumPy, torch or TVM tensors, and outputs are of the same kind.

# %%
rng = np.random.default_rng(0)
shapes = [(64, 256), (64, 256), (256,), (256, 512), (512,)]
inputs = [rng.standard_normal(shape, np.float32) for shape in shapes]

out, total = compiled(*inputs)

x, residual, scale, weight, bias = (array.astype(np.float64) for array in inputs)
row = x + residual
normal = row / np.sqrt((row * row).mean(-1, keepdims=True) + 1e-5) * scale
wide = normal @ weight + bias
gates = 0.5 * (1 + erf(wide / np.sqrt(2)))
np.testing.assert_allclose(np.asarray(out), wide * gates, rtol=1e-4, atol=1e-4)
np.testing.assert_allclose(np.asarray(total), row, rtol=1e-6)
print("worst error that the check found:", f"{report.verify.worst_error:.1e}")

# %% [markdown]
# ## The plan is data
#
# What was decided can be saved, read, edited, and run again. The same plan gives the same
# kernels.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "plan.json"
    compiled.plan.save(file)
    again = tvm_fusion.compile(Model, "llvm", plan=file)
assert again.plan == compiled.plan
for group in again.plan.groups:
    print(group.kernel_class, list(group.ops))

# %% [markdown]
# ## What to try
#
# - `policy={"max_group_ops": 1}` fuses nothing. That is more launches than the 5 that the savings
#   are counted against: there a norm or a GELU is one kernel, as in any framework; here they are
#   opened into their parts, which is what the search starts from.
# - `tvm_fusion.compile(Model, "llvm", time=True)` also times both, in turns, and says whether
#   there is a difference at all.
# - `tvm_fusion.explain(Model, "nvidia_h200")` plans for a GPU that this machine does not have.

# %%
apart = tvm_fusion.explain(Model, "llvm", policy={"max_group_ops": 1})
gpu = tvm_fusion.explain(Model, "nvidia_h200")
print(f"llvm, every part by itself: {apart.launches.fused:.0f} launches")
print(f"llvm, operator by operator: {report.launches.unfused:.0f}")
print(f"llvm, fused:                {report.launches.fused:.0f}")
print(f"nvidia_h200, fused:         {gpu.launches.fused:.0f}")
assert apart.launches.fused > report.launches.unfused > report.launches.fused
