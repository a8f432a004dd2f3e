# %% [markdown]
# # 9. In your Relax pipeline
#
# **Question.** I build models with passes of my own. I want to keep my pipeline and take only the
# fusion, or only a part of it.
#
# `Fuse` is one pass in the place of TVM's `FuseOps` and `FuseTIR`. What it returns is an ordinary
# module of scheduled PrimFuncs, which every later pass and TVM's default build take.

# %%
from collections import Counter

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax.dpl import is_op, wildcard
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.transform import Decompose, Fuse, Materialize, PackConstants, WriteKernels, plan

target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
rng = np.random.default_rng(0)

# %% [markdown]
# ## A language model's module: several functions, a symbolic length
#
# `prefill` takes any number of tokens, `decode` one. They share their weights, which are
# parameters.

# %%
WIDTH, WORDS = 64, 100


class Layer(nn.Module):
    """A gated feed-forward layer between two norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, -1, 1e-5, bias=False)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def prefill(self, x: nn.Tensor) -> nn.Tensor:
        """Logits of all positions: (1, n, WIDTH) -> (1, n, WORDS)."""
        h = self.norm(x)
        h = self.down(nn.op.silu(self.gate(h)) * self.up(h)) + x
        return self.head(self.norm(h))

    def decode(self, x: nn.Tensor) -> nn.Tensor:
        """Logits of one position: (1, 1, WIDTH) -> (1, 1, WORDS)."""
        return self.prefill(x)


module, parameters = Layer().export_tvm(
    {
        "prefill": {"x": nn.spec.Tensor((1, "n", WIDTH), "float32")},
        "decode": {"x": nn.spec.Tensor((1, 1, WIDTH), "float32")},
    }
)

# %% [markdown]
# `Fuse` stands between passes of yours. It plans each function by itself and says so to
# `on_plan`.

# %%
saved = {}


def note(fused):
    launches = saved[fused.name] = fused.report().launches
    print(f"{fused.name}: {launches.unfused:.0f} launches before, {launches.fused:.0f} now")


mine = [
    relax.transform.CanonicalizeBindings(),
    relax.transform.FuseTransposeMatmul(),
    Fuse(target, on_plan=note),
    relax.transform.DeadCodeElimination(),
]
built = tvm.compile(tvm.transform.Sequential(mine)(module), target)
assert saved.keys() == {"prefill", "decode"}
assert all(launches.fused < launches.unfused for launches in saved.values())

# %% [markdown]
# One executable, both functions, any length:

# %%
vm = relax.VirtualMachine(built, tvm.cpu())
weights = [
    tvm.runtime.tensor(rng.standard_normal(p.shape).astype(p.dtype) / 8) for _, p in parameters
]
for length in (1, 5, 17):
    x = rng.standard_normal((1, length, WIDTH)).astype("float32")
    whole = vm["prefill"](tvm.runtime.tensor(x), *weights).numpy()
    last = vm["decode"](tvm.runtime.tensor(x[:, -1:]), *weights).numpy()
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-4, atol=1e-4)
print("a decode of the last position agrees with the prefill of all")

# %% [markdown]
# ## Beside TVM's own
#
# The same module through TVM's fusion. What counts are the PrimFuncs that `main` calls: launches.


# %%
@I.ir_module
class Small:
    @R.function
    def main(
        x: R.Tensor((32, 64), "float32"),
        w: R.Tensor((64, 64), "float32"),
        b: R.Tensor((64,), "float32"),
    ):
        with R.dataflow():
            shifted = R.add(x, b)
            normal = R.nn.softmax(shifted, axis=-1)
            h = R.nn.gelu(R.matmul(normal, w))
            y = R.nn.layer_norm(R.multiply(h, shifted), b, b, axes=[-1])
            R.output(y)
        return y


def launches(mod):
    """Kernels that each function calls."""
    found = Counter()
    for gvar, function in mod.functions_items():
        if isinstance(function, relax.Function):
            name = gvar.name_hint
            relax.analysis.post_order_visit(
                function,
                lambda e, name=name: found.update(
                    [name]
                    if isinstance(e, relax.Call) and e.op == tvm.ir.Op.get("relax.call_tir")
                    else []
                ),
            )
    return dict(found)


own = [
    relax.transform.LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FoldConstant(),
    relax.transform.FuseOps(),
    relax.transform.FuseTIR(),
]
theirs = tvm.transform.Sequential(own)(Small)
ours = Fuse(target)(Small)
print("TVM's fusion:", launches(theirs), " Fuse:", launches(ours))
assert launches(ours)["main"] < launches(theirs)["main"]

# %% [markdown]
# They go together, too: what `Fuse` wrote is opaque to TVM's fusion, and running `Fuse` on its
# own output changes nothing.

# %%
tvm.ir.assert_structural_equal(Fuse(target)(ours), ours)
assert launches(tvm.transform.Sequential(own[1:])(ours)) == launches(ours)

# %% [markdown]
# ## One by one
#
# The stages of `Fuse` are passes. Between planning and materialising the plan is a value, which
# you can read, keep or edit.

# %%
opened = Decompose()(Small)
for composite in ("R.nn.softmax", "R.nn.gelu", "R.nn.layer_norm"):
    assert composite in Small.script()
    assert composite not in opened.script()
for name, mod in (("the model", Small), ("opened", opened)):
    print(f"{name}: {len(mod['main'].body.blocks[0].bindings)} operators")

plans = plan(Small, target)
for group in plans["main"].groups:
    print(group.kernel_class, list(group.ops))

fused = Materialize(plans, target)(Small)
waiting = [f for f in fused.functions.values() if isinstance(f, tirx.PrimFunc)]
assert not any("tirx.is_scheduled" in f.attrs for f in waiting)

written = tvm.transform.Sequential([WriteKernels(target), PackConstants()])(fused)
kernels = [f for f in written.functions.values() if isinstance(f, tirx.PrimFunc)]
assert all("tirx.is_scheduled" in f.attrs for f in kernels)
assert launches(written) == launches(ours)

# %% [markdown]
# Instruments, dumps and `disabled_pass` of TVM's `PassContext` know the stages by their names.


# %%
@tvm.instrument.pass_instrument
class Names:
    """The passes of this package, in the order in which they end."""

    def __init__(self):
        self.seen = []

    def run_after_pass(self, _mod, info):
        if str(info.name).startswith("tvm_fusion."):
            self.seen.append(str(info.name))


names = Names()
with tvm.transform.PassContext(instruments=[names]):
    Fuse(target)(Small)
print(list(dict.fromkeys(names.seen)))
stages = ("Decompose", "Plan", "Materialize", "WriteKernels", "Fuse")
assert {f"tvm_fusion.{stage}" for stage in stages} <= set(names.seen)

# %% [markdown]
# ## Beside a library (BYOC)
#
# What belongs to another code generator (`Codegen`, `Composite`) is left alone; the rest is fused
# around it. The library here is a stand-in that has TVM compile a product.


# %%
def library(functions, _options, _constants):
    """Modules with a function for each that was cut out."""
    return [tvm.compile(product(function), target).mod for function in functions]


def product(function):
    """A PrimFunc for a function of the graph, by the symbol that the graph calls it by."""
    a, b = (te.placeholder(list(map(int, p.ty.shape)), "float32") for p in function.params)
    k = te.reduce_axis((0, a.shape[1]))
    c = te.compute((a.shape[0], b.shape[1]), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))
    kernel = te.create_prim_func([a, b, c])
    return kernel.with_attr("global_symbol", str(function.attrs["global_symbol"]))


tvm_ffi.register_global_func("relax.ext.products", library, override=True)
pattern = is_op("relax.matmul")(wildcard(), wildcard())
with_library = [
    relax.transform.FuseOpsByPattern([("products.matmul", pattern)], annotate_codegen=True),
    Fuse(target),
    relax.transform.RunCodegen(),
]
mixed = tvm.transform.Sequential(with_library)(Small)
print(
    "calls of the library:", mixed.script().count("call_dps_packed"), " kernels:", launches(mixed)
)
assert mixed.script().count("call_dps_packed") == 1

inputs = [rng.standard_normal(s).astype("float32") for s in ((32, 64), (64, 64), (64,))]
results = [
    relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())["main"](
        *map(tvm.runtime.tensor, inputs)
    ).numpy()
    for mod in (ours, mixed)
]
np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)
tvm_ffi.registry.remove_global_func("relax.ext.products")

# %% [markdown]
# ## What to try
#
# - `tvm.compile(mod, target, relax_pipeline="tvm_fusion")`: the whole of it by its name.
# - With `tvm_fusion.TuningDatabase("tuned")` around the pipeline its kernels are the tuned ones
#   (tutorial 6). `Fuse(write=False)` leaves kernels unwritten for TVM's own tuners.
# - A module for a GPU is saved and built elsewhere: that process has to import `tvm_fusion`, and
#   an error says so where it does not.

# %%
by_name = tvm.compile(Small, target, relax_pipeline="tvm_fusion")
found = relax.VirtualMachine(by_name, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs)).numpy()
np.testing.assert_allclose(found, results[0], rtol=1e-5, atol=1e-7)
