# %% [markdown]
# # 5. The cost model, and when to distrust it
#
# **Question.** Every decision rests on predicted times. How are they made, how far are they off,
# and how would I notice?

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion.config import load_profile

root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "tests/results").is_dir())

# %% [markdown]
# ## A time made of terms
#
# For one launch, the model counts bytes, operations, instructions and waits, and divides each by
# the rate at which the device does them. The rates are in the device's profile, each with its
# unit and where it is from. Of the terms it makes
#
# T = launch + gap + (sum_i T_i^p)^(1/p)
#
# With p = 1 the terms would be added up, as if nothing overlapped; with a large p the largest
# decides alone, as on a roofline. Kernels lie between, near the roof.

# %%
h200 = load_profile("nvidia_h200")
print(f"{h200.name}: {h200.num_sms} multiprocessors, {h200.hbm_bytes_per_s / 1e12:.2f} TB/s")
print(f"p = {h200.roofline_exponent:g}, a launch in a stream takes {h200.launch_us} us")

terms = np.array([10.0, 4.0])  # us of memory, us of arithmetic
for p in (1, 2, 6, 100):
    print(f"p = {p:3}: {(terms**p).sum() ** (1 / p):6.2f} us")


# %% [markdown]
# ## How the size decides
#
# The same three operators at several sizes. Small tensors are bound by the launch, large ones by
# memory, and fusing saves in both cases, for different reasons.


# %%
def chain(rows):
    """tanh(exp(x) * x)"""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 1024), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(relax.op.multiply(builder.emit(relax.op.exp(x)), x))
            y = builder.emit_output(relax.op.tanh(product))
        builder.emit_func_output(y)
    return builder.get()


sizes = [2**n for n in (4, 7, 10, 13, 16)]
groups = [tvm_fusion.explain(chain(n), "nvidia_h200").groups for n in sizes]
fused = [sum(g.predicted_us for g in found) for found in groups]
apart = [sum(g.unfused_predicted_us for g in found) for found in groups]
fig, axis = plt.subplots(figsize=(6, 2.8))
axis.loglog(sizes, apart, "o-", label="three launches")
axis.loglog(sizes, fused, "o-", label="one launch")
axis.set_xlabel("rows of 1024 halves")
axis.set_ylabel("us on an H200, predicted")
axis.legend()
plt.show()

for n, (group, *_) in zip(sizes, groups, strict=True):
    largest = max(group.terms, key=group.terms.__getitem__)
    print(f"{n:6} rows: {group.predicted_us:8.2f} us, the largest term is {largest}")
assert max(groups[0][0].terms, key=groups[0][0].terms.__getitem__) == "launch"
assert max(groups[-1][0].terms, key=groups[-1][0].terms.__getitem__) != "launch"

# %% [markdown]
# ## How far off?
#
# **Measured on an NVIDIA H200**, read from a committed file: thirty random graphs with the shapes
# of real models. Of each, all plans (or a sample) were built and timed. For the plan that was
# chosen, and for the best one that anybody found, the model's prediction stands beside what was
# measured.

# %%
quality = json.loads((root / "tests/results/plan_quality.json").read_text())
rows = quality["rows"]
measured = np.array([[row["chosen_us"], row["unfused_us"]] for row in rows])
predicted = np.array([[row["predicted_us"][k] for k in ("chosen", "unfused")] for row in rows])
off = np.abs(np.log2(predicted / measured))
print(quality["device"], quality["date"], f"{len(rows)} graphs")
print(f"median error of a plan: {100 * (2 ** np.median(off) - 1):.0f} %")
print(f"nine of ten within:     {100 * (2 ** np.quantile(off, 0.9) - 1):.0f} %")
over = np.array([row["chosen_over_best"] for row in rows])
print(f"the chosen plan / the best: {np.median(over):.3f} in the median, {over.max():.3f} at most")

fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
for column, label in enumerate(("chosen", "unfused")):
    left.loglog(measured[:, column], predicted[:, column], ".", label=label)
ends = [measured.min(), measured.max()]
left.plot(ends, ends, "k-", linewidth=0.5)
left.set_xlabel("measured, us")
left.set_ylabel("predicted, us")
left.legend()
right.hist(over, bins=np.linspace(0.99, 1.07, 17))
right.set_xlabel("time of the chosen plan / of the best")
plt.tight_layout()
plt.show()
assert over.max() < 1.1
assert np.all([row["chosen_over_unfused"] < 1 for row in rows])

# %% [markdown]
# Two things to see. A prediction of a time may be off by a third, and the plan is still the best
# one or near it: what decides is the *ratio* of two plans, and errors that both share cancel. And
# no chosen plan was slower than no fusion at all. That is what the next part is about.

# %% [markdown]
# ## What it does where it is unsure
#
# A fusion is kept if the predicted ratio, **with its interval**, excludes a loss. Each group
# carries that as its evidence.


# %%
@I.ir_module
class Close:
    @R.function
    def main(x: R.Tensor((2048, 1024), "float16"), w: R.Tensor((1024, 1024), "float16")):
        with R.dataflow():
            normal = R.nn.softmax(x, axis=-1)
            y = R.nn.gelu(R.matmul(normal, w))
            R.output(y)
        return y


for target in ("nvidia_h200", "nvidia_rtx4090"):
    report = tvm_fusion.explain(Close, target, policy={"probe": "off"})
    for group in report.groups:
        found = group.evidence
        said = f"{found['ratio']:.2f} of apart, between {found['low']:.2f} and {found['high']:.2f}"
        print(f"{target:15} {group.kernel_class:6} {said}: {found['verdict']}")
        assert found["low"] <= found["ratio"] <= found["high"]

# %% [markdown]
# The interval is that of the comparison and not of the time. Where the device has a learned
# correction (boosted trees over measured launches, the H200 has one), the interval comes from
# held-out graphs; elsewhere from the policy's `unknown_ratio`. `policy="conservative"` asks for
# more certainty, `"aggressive"` takes the prediction as it is.
#
# ## When to distrust it
#
# - **A profile of another device than yours.** Those that ship were measured on one machine each,
#   and an A100's or an RTX 4090's rates are partly from datasheets: each number in `configs/`
#   says where it is from. `python -m tvm_fusion calibrate` measures yours. (On `"llvm"` the
#   handful of rates that decide plans is measured at first use.)
# - **A launch unlike all that the correction has seen.** Then it leaves the analytic time alone.
# - **What the model does not know**: clocks that fall under load, another process on the device,
#   an L2 that two kernels share (tutorial 3 has a case of 1.5x).
# - **Times of a few microseconds**: launches and gaps decide there, not the kernel.
#
# In each of these cases measure: `compile(..., measure=True)` builds both versions of what is in
# doubt and times them in turns; what is not faster is cut.

# %%
shipped = load_profile("llvm_cpu")
print("the CPU that ships:", shipped.description)
here = tvm_fusion.compile(chain(64), "llvm").plan.measured
print("measured on this machine:", sorted(here) or "nothing (TVM_FUSION_CALIBRATE=0)")

# %% [markdown]
# ## What to try
#
# - Change a rate and see whether the plan changes: tutorial 8 registers a device of your own.
# - `tvm_fusion.explain(model, target, bound=True)` says how far the plan can be from the cheapest
#   one by the model. If that is nothing and the plan is slow, it is the model that is wrong, not
#   the search.
# - [decisions](pages/decisions.md) has the search, the intervals, and more figures.

# %%
print(tvm_fusion.explain(chain(4096), "nvidia_h200", bound=True).bound)
