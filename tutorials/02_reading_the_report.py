# %% [markdown]
# # 2. Reading the report
#
# **Question.** A compiler says "fused". What did it do, how sure is it, and what should I look at
# first?
#
# Everything that the package knows of what it did is in one value, the report. This notebook
# reads one from top to bottom. It only plans (`explain`), for an NVIDIA H200: planning needs no
# GPU, so all of it is computed here. No time in it is a measurement; those are predictions of the
# model.

# %%
import json
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion.report.why import why

# %% [markdown]
# ## A layer of a transformer without its attention
#
# A norm, a gated feed-forward layer, the residual, and a classifier's softmax, in half precision.

# %%
rng = np.random.default_rng(0)


def constant(*shape):
    return relax.const(rng.standard_normal(shape).astype("float16") / 16)


gate, up, down, head = (
    constant(*shape) for shape in ((512, 1408), (512, 1408), (1408, 512), (512, 256))
)


@I.ir_module
class Layer:
    @R.function
    def main(x: R.Tensor((256, 512), "float16"), scale: R.Tensor((512,), "float16")):
        with R.dataflow():
            normal = R.nn.rms_norm(x, scale, axes=[-1], epsilon=1e-5)
            gated = R.nn.silu(R.matmul(normal, gate))
            hidden = R.multiply(gated, R.matmul(normal, up))
            y = R.add(R.matmul(hidden, down), x)
            probabilities = R.nn.softmax(R.matmul(y, head), axis=-1)
            R.output(y, probabilities)
        return y, probabilities


report = tvm_fusion.explain(Layer, "nvidia_h200")
print(report)

# %% [markdown]
# ## The header: what was saved
#
# Three comparisons with the model as TVM runs it without this package, one kernel an operator:
# launches, bytes, and, for a module that was timed, the time. A ratio above 1 is a gain. A plan
# that nothing was built of has no times, so there is a dash and not a number.

# %%
print(f"launches: {report.launches.unfused:.0f} -> {report.launches.fused:.0f}")
print(f"bytes:    {report.bytes.unfused / 1e6:.1f} MB -> {report.bytes.fused / 1e6:.1f} MB")
assert report.launches.fused < report.launches.unfused

# %% [markdown]
# ## Groups: one kernel each
#
# A group has the operators of one kernel. Its *class* is the family that writes it (a matrix
# product, a reduction of rows, ...), its *label* says what a model's author knows it by: the
# operators of the model, and the module's path where the model came from PyTorch. Equal kernels
# are one line with a count. Operators may stand in two groups: then they are computed twice,
# which is tutorial 3.

# %%
for group in report.groups:
    saved = 1 - group.bytes_fused / group.bytes_unfused
    times = f"{group.predicted_us:6.2f} us, {saved:4.0%} fewer bytes"
    print(f"{group.kernel_class:5} {times}  {group.label}")
moved = sum(group.bytes_fused for group in report.groups)
assert moved == report.bytes.fused  # the header adds up

# %% [markdown]
# ## Terms: why a kernel takes what it takes
#
# The prediction of a group is made of terms, each the time that one resource alone would need:
# memory, the L2, tensor cores, special functions, the launch. They are not added up: a kernel
# that waits for memory computes meanwhile (tutorial 5 has the formula). The largest term says
# what the kernel is bound by, so what a change would have to make smaller.


# %%
def largest(group, count):
    """Names of the largest terms beside the launch, which is the same for each kernel."""
    terms = sorted(group.terms, key=group.terms.__getitem__, reverse=True)
    return [name for name in terms if name != "launch"][:count]


names = sorted({name for group in report.groups for name in largest(group, 3)})
fig, axis = plt.subplots(figsize=(8, 2.6))
width = 0.8 / len(names)
for i, name in enumerate(names):
    values = [g.terms.get(name, 0.0) for g in report.groups]
    axis.bar(np.arange(len(values)) + i * width, values, width, label=name)
axis.set_xticks(np.arange(len(report.groups)) + 0.4, [g.kernel_class for g in report.groups])
axis.set_ylabel("us, predicted")
axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
plt.tight_layout()
plt.show()

for group in report.groups:
    launch, (bound,) = group.terms["launch"], largest(group, 1)
    print(f"{group.kernel_class:10} launch {launch:.1f} us, beside that bound by {bound}")
    assert max(group.terms.values()) <= group.predicted_us * 1.001

# %% [markdown]
# ## Refusals: what stayed apart, and why
#
# Each is a code, the operators, and a reason, told by the family that came closest. Codes are a
# closed list (see [refusals](pages/refusals.md)), so programs can count them. They are ranked by
# what they cost by the cost model, and `flip` is one action that would turn it, behind its kind:
# the model's author can change a `dtype`, a `layout`, a `size` or the `model`, who compiles it a
# `policy`, or `measure`.

# %%
print(Counter(refusal.code for refusal in report.refusals))
for refusal in report.refusals[:3]:
    print(f"\n{refusal.code}, costs {refusal.cost_us:.1f} us: {' | '.join(refusal.where)}")
    print(f"  {refusal.why}\n  {refusal.flip}")
costs = [refusal.cost_us or 0.0 for refusal in report.refusals]
assert costs == sorted(costs, reverse=True)
assert {r.code for r in report.refusals} <= {c.value for c in tvm_fusion.extend.RefusalCode}

# %% [markdown]
# One asks for a pair by name, as `python -m tvm_fusion explain MODEL --why normal,hidden` does.

# %%
answer = tvm_fusion.explain(Layer, "nvidia_h200", why="normal,hidden")
print(why(answer))

# %% [markdown]
# ## For programs: JSON
#
# `to_json` gives all of it, with the version of the format. The plan is in it, too, so that a
# report is enough to run the same thing again.

# %%
data = report.to_json()
assert json.loads(json.dumps(data)) == data
print("version", data["version"], "with", ", ".join(data))
print(len(data["graph"]["ops"]), "operators and", len(data["graph"]["tensors"]), "tensors")

# %% [markdown]
# ## What to try
#
# - `report.write_html("report.html")`, or `--html` on the command line: the same as a page, with
#   the graph before and after fusion, the bytes on each edge, and a panel for each kernel.
# - Keep the JSON of two versions of a model: `python -m tvm_fusion diff OLD.json NEW.json` says
#   what became of each kernel.
# - `print(report.full())`: every group, term and refusal. On the command line that is `--full`.
# - `compile(..., time=True)` on a machine that has the device: the header then has times with
#   their quartiles, and says "no difference" where they overlap.
# - Make the model float32 and explain again: which class writes the products then, and which term
#   are they bound by?

# %%
single = tvm_fusion.explain(Layer, "nvidia_a100")
print("on an A100:", [f"{g.kernel_class} {g.predicted_us:.1f} us" for g in single.groups])
