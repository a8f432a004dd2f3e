# %% [markdown]
# # 8. Your own kernel family, rewrite and device
#
# **Question.** I know something that the package does not: a better kernel for one kind of work,
# an algebraic identity of my models, the numbers of my device. Where does it go?
#
# Three calls: `register_family`, `register_rewrite`, `register_profile`. Each takes effect for
# everything that is planned afterwards, and each is undone by what it returns. What such a thing
# is written with stands in `tvm_fusion.extend`.

# %%
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax, s_tir
from tvm.relax.dpl import is_op, rewrite_call, wildcard
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion import extend

# %% [markdown]
# ## A kernel family
#
# A family answers four questions about a group of operators:
#
# | | |
# |---|---|
# | `accepts` | can one launch compute it? A `Fit`, or a `Refusal` with a reason |
# | `traffic` | what does that launch move and execute? The cost model makes a time of it |
# | `resources` | how many registers and how much shared memory does it need? |
# | `writer` | how is it written? Forms rank configurations and emit a kernel from one |
#
# It decides on access maps and shapes, never on names of operators. This one takes chains of
# pointwise operators with one output on CPUs, and writes loops by TVM's schedules: all threads
# over the rows, so many elements at a time within one.


# %%
@dataclass(frozen=True)
class Lanes:
    """A configuration: elements of a vector."""

    count: int


class Strips(extend.Family):
    """Pointwise work in vectors of a width that divides the rows."""

    name = "strips"
    needs = extend.Needs(absent=extend.REDUCES)  # not worth asking about anything that reduces

    def accepts(self, group, hw, policy):
        if len(group.outputs) != 1:
            return group.refuse(extend.RefusalCode.SPACE_MISMATCH, "strips have one output")
        shape = group.graph.tensors[group.outputs[0]].shape
        if len(shape) != 2 or not all(isinstance(extent, int) for extent in shape):
            return group.refuse(extend.RefusalCode.SPACE_MISMATCH, "strips are cut from matrices")
        return extend.Fit(
            self.name, *shape, tuple(float(shape[0] * shape[1]) for _ in group.blocks)
        )

    def traffic(self, group, fit, hw):
        moved = sum(map(group.tensor_bytes, (*group.inputs, *group.outputs)))
        return extend.Traffic(hbm_bytes=0.0, l2_bytes=float(moved))

    def resources(self, group, fit, hw):
        return extend.Resources(registers_per_thread=32, smem_bytes=0)

    def writer(self, hw):
        form = extend.Form("strips", Lanes, rank, emit)
        return extend.Writer("a chain of pointwise operators", extend.OnCPU, (form,))


def rank(problem, hw, policy):
    """Predicted seconds and configurations, the best guess first."""
    return [(None, Lanes(16)), (None, Lanes(8))]


def emit(problem, hw, config):
    """The kernel of a configuration."""
    schedule = s_tir.Schedule(problem.func)
    *before, last = schedule.get_child_blocks(schedule.get_sblock("root"))
    for block in before:
        schedule.compute_inline(block)
    rows, columns = schedule.get_loops(last)
    if schedule.get(columns).extent % config.count:
        raise extend.Unsupported(f"the rows are no multiple of {config.count}")
    _, lanes = schedule.split(columns, [None, config.count])
    schedule.parallel(rows)
    schedule.vectorize(lanes)
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


@I.ir_module
class Chain:
    @R.function
    def main(x: R.Tensor((64, 96), "float32"), y: R.Tensor((64, 96), "float32")):
        with R.dataflow():
            out = R.multiply(R.tanh(R.add(x, y)), x)
            R.output(out)
        return out


with tvm_fusion.register_family(Strips(), kinds=("llvm",)):
    compiled = tvm_fusion.compile(Chain, "llvm")
    print([(g.kernel_class, list(g.ops)) for g in compiled.report.groups])
assert [g.kernel_class for g in compiled.report.groups] == ["strips"]
assert compiled.report.verify.passed

# %% [markdown]
# The check is not told who wrote a kernel. With a bug in it the module is mended before you get
# it, and the report says what gave way. Here the family takes exp for tanh:


# %%
class Wrong(Strips):
    name = "wrong"

    def writer(self, hw):
        form = extend.Form("wrong", Lanes, rank, with_other_numbers)
        return extend.Writer("a chain, wrongly", extend.OnCPU, (form,))


def with_other_numbers(problem, hw, config):
    return tvm.script.from_source(emit(problem, hw, config).script().replace("T.tanh", "T.exp"))


with tvm_fusion.register_family(Wrong(), kinds=("llvm",)):
    mended = tvm_fusion.compile(Chain, "llvm")
for group in mended.report.groups:
    print(f"{group.kernel_class}: {group.fallback}")
assert mended.report.verify.passed
assert all(group.fallback for group in mended.report.groups)

# %% [markdown]
# What is missing is said when it is registered, not when it is needed:

# %%
try:
    tvm_fusion.register_family(type("Empty", (extend.Family,), {"name": "empty"})())
except TypeError as error:
    print(error)

# %% [markdown]
# ## A rewrite
#
# A rewrite changes the graph before it is planned. It is *tried*: the model is planned with it
# and without it, and it stays where the predicted time falls. The plan names it, so that a saved
# plan runs the same graph. It sees high-level Relax with composites opened; `rounds=True` would
# say that the numbers round elsewhere, and then it is left out under `rounding = "exact"`.


# %%
@tvm.transform.module_pass(opt_level=0)
class ExpOfLog:
    """exp(log(x)) -> x"""

    def transform_module(self, mod, _context):
        x = wildcard()
        pattern = is_op("relax.exp")(is_op("relax.log")(x))
        main = rewrite_call(pattern, lambda _call, found: found[x], mod["main"])
        out = mod.clone()
        out.update_func(mod.get_global_var("main"), main)
        return relax.transform.DeadCodeElimination()(out)


@I.ir_module
class Roundabout:
    @R.function
    def main(x: R.Tensor((512, 1024), "float32")):
        with R.dataflow():
            positive = R.exp(x)
            again = R.exp(R.log(R.exp(R.log(positive))))
            out = R.tanh(again)
            R.output(out)
        return out


plain = tvm_fusion.explain(Roundabout, "llvm")
with tvm_fusion.register_rewrite("exp_of_log", ExpOfLog(), kinds=("llvm",), rounds=True):
    rewritten = tvm_fusion.explain(Roundabout, "llvm")
    exact = tvm_fusion.explain(Roundabout, "llvm", policy={"rounding": "exact"})
for name, report in (("without", plain), ("with", rewritten), ("exact", exact)):
    took = sum(group.predicted_us for group in report.groups)
    print(f"{name:8} {took:6.1f} us, rewritten by {report.plan['rewrites']}")
assert rewritten.plan["rewrites"] == ["exp_of_log"]
assert plain.plan["rewrites"] == exact.plan["rewrites"] == []

# %% [markdown]
# ## A device
#
# A profile has the numbers of a device, each with a unit and a source when it is read from a file
# like those in `configs/`. The nearest one, changed where you know better, is a start;
# `calibrate` measures the rest. Registered, its name is a target.

# %%
half = replace(
    extend.load_profile("nvidia_h100"),
    name="half_an_h100",
    aliases=(),
    num_sms=66,
    hbm_bytes_per_s=extend.load_profile("nvidia_h100").hbm_bytes_per_s / 2,
)


@I.ir_module
class Large:
    @R.function
    def main(x: R.Tensor((8192, 4096), "float16")):
        with R.dataflow():
            out = R.nn.softmax(R.add(x, x), axis=-1)
            R.output(out)
        return out


with tvm_fusion.register_profile(half):
    times = {
        name: sum(g.predicted_us for g in tvm_fusion.explain(Large, name).groups)
        for name in ("nvidia_h100", "half_an_h100")
    }
print({name: f"{us:.1f} us" for name, us in times.items()})
assert 1.5 < times["half_an_h100"] / times["nvidia_h100"] < 2.5

# %% [markdown]
# ## What to try
#
# - As a decorator: `@tvm_fusion.register_family(kinds=("llvm",))` above the class, undone by
#   `tvm_fusion.unregister_family("strips")`.
# - Return `[(1e-6, Lanes(16)), (1e-6, Lanes(8))]` from `rank` and tune: of what is predicted
#   alike the tuner measures both.
# - All names, and what may change between versions: [API](pages/api.md).

# %%
rng = np.random.default_rng(0)
x, y = (rng.standard_normal((64, 96), np.float32) for _ in "xy")
np.testing.assert_allclose(np.asarray(compiled(x, y)), np.tanh(x + y) * x, rtol=1e-5, atol=1e-6)
