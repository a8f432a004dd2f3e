"""What users register takes effect at once, is undone, and is refused where it cannot be used."""

import doctest
import pickle
import re
import sys
from dataclasses import replace

import pytest
import tvm
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tvm_fusion import extend
from tvm_fusion.config import files, load_profile, profile_file, resolve_target
from tvm_fusion.errors import InputError
from tvm_fusion.kernels import registry
from tvm_fusion.kernels.pointwise.kernel_class import Pointwise
from tvm_fusion.tuning.measure.building import Place

from .support.graphs import module

X = ((16, 32), "float32")
ON_CPU = {"kinds": ("llvm",)}


def chain(bb, x):
    return op.multiply(bb.emit(op.exp(x)), relax.const(2.0))


def classes_of(target="llvm"):
    return {g.kernel_class for g in tvm_fusion.explain(module(chain, X), target).groups}


class Mine(Pointwise):
    name = "mine"


def test_a_family_is_asked_as_long_as_its_block_lasts():
    with tvm_fusion.register_family(Mine(), **ON_CPU) as mine:
        assert registry.family("mine") is mine
        assert classes_of() == {"mine"}
    assert "mine" not in classes_of()


def test_a_decorated_family_stays_until_its_name_is_taken_out():
    @tvm_fusion.register_family(kinds=("llvm",))
    class Decorated(Mine):
        name = "decorated"

    assert issubclass(Decorated, Mine)
    assert classes_of() == {"decorated"}
    tvm_fusion.unregister_family("decorated")
    assert tvm_fusion.register_family(Mine) is Mine
    tvm_fusion.unregister_family("mine")
    assert not registry.added()


@pytest.mark.parametrize("module", [extend, files], ids=["extend", "files"])
def test_the_examples_of_docstrings_run(module):
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)


def test_what_is_undone_stays_so_and_undoing_twice_takes_out_nothing_else():
    first = tvm_fusion.register_family(Mine(), **ON_CPU)
    first.undo()
    with tvm_fusion.register_family(Mine(), **ON_CPU):
        first.undo()
        assert "mine" in registry.names()
    assert "undone" in repr(first)


class Nothing(extend.Family):
    pass


class Half(extend.Family):
    name = "half"
    accepts = traffic = lambda self, *_: None


class Unwritten(Half):
    resources = Half.traffic


@pytest.mark.parametrize(
    ("family", "kinds", "error", "says"),
    [
        ("row", ("llvm",), TypeError, "instance of a Family, got 'row'"),
        (Nothing(), ("llvm",), TypeError, "Nothing lacks name, accepts, traffic, resources"),
        (Half(), ("llvm",), TypeError, "Half lacks resources$"),
        (Unwritten(), ("cuda", "llvm"), TypeError, "Unwritten lacks writer .needed for cuda"),
        (Pointwise(), ("llvm",), ValueError, "'pointwise' is already registered"),
        (Mine(), (), ValueError, "kinds"),
        (Mine(), ("rocm",), ValueError, "rocm"),
    ],
)
def test_a_family_that_cannot_be_used_is_refused_with_what_is_missing(family, kinds, error, says):
    with pytest.raises(error, match=says):
        tvm_fusion.register_family(family, kinds=kinds)
    assert not registry.added()


@pytest.mark.parametrize(
    "take_out",
    [
        lambda: tvm_fusion.unregister_family("row"),
        lambda: tvm_fusion.unregister_rewrite("fold_factors"),
        lambda: tvm_fusion.unregister_profile("nvidia_h200"),
    ],
)
def test_what_the_package_has_cannot_be_taken_out(take_out):
    with pytest.raises(LookupError, match="registered: none"):
        take_out()


# Rewrites


@tvm.transform.module_pass(opt_level=0)
class DropExp:
    """exp(log(x)) -> x, which TVM does not do."""

    def transform_module(self, mod, _ctx):
        x = relax.dpl.wildcard()
        pattern = relax.dpl.is_op("relax.exp")(relax.dpl.is_op("relax.log")(x))
        main = relax.dpl.rewrite_call(pattern, lambda _call, found: found[x], mod["main"])
        out = mod.clone()
        out.update_func(mod.get_global_var("main"), main)
        return relax.transform.DeadCodeElimination()(out)


def exp_of_log(bb, x):
    return op.tanh(bb.emit(op.exp(bb.emit(op.log(bb.emit(op.exp(x)))))))


def longer(bb, x):
    """Long enough that the work counts beside a launch."""
    for _ in range(4):
        x = bb.emit(op.exp(bb.emit(op.log(bb.emit(op.exp(x))))))
        x = bb.emit(op.tanh(x))
    return x


LARGE = ((512, 1024), "float32")


def test_a_rewrite_is_tried_and_the_plan_names_it():
    mod = module(longer, LARGE)
    plain = tvm_fusion.explain(mod, "llvm")
    with tvm_fusion.register_rewrite("drop_exp", DropExp(), **ON_CPU):
        found = tvm_fusion.explain(mod, "llvm")
        assert found.plan["rewrites"] == ["drop_exp"]
        assert sum(map(len, (g.ops for g in found.groups))) == 8
        other = tvm_fusion.explain(module(chain, X), "llvm")  # nothing to do
    for report in (plain, other, tvm_fusion.explain(mod, "llvm")):
        assert report.plan["rewrites"] == []


def test_the_rewritten_module_is_checked_and_its_plan_needs_the_rewrite():
    mod = module(longer, LARGE)

    @tvm_fusion.register_rewrite("drop_exp", kinds=("llvm",))
    def drop(hw):
        assert hw.kind == "llvm"
        return DropExp()

    try:
        compiled = tvm_fusion.compile(mod, "llvm", verify=True)
        assert compiled.plan.rewrites == ("drop_exp",)
        assert compiled.report.verify.passed
    finally:
        tvm_fusion.unregister_rewrite("drop_exp")
    with pytest.raises(tvm_fusion.PlanError, match="drop_exp"):
        tvm_fusion.compile(mod, "llvm", plan=compiled.plan)


def test_a_rewrite_that_rounds_is_not_tried_where_roundings_stay():
    tried = []

    def make(hw):
        tried.append(hw.name)
        return DropExp()

    mod = module(exp_of_log, X)
    with tvm_fusion.register_rewrite("drop_exp", make, rounds=True, **ON_CPU):
        tvm_fusion.explain(mod, "llvm", policy={"rounding": "exact"})
        assert not tried
        tvm_fusion.explain(mod, "llvm")
        assert tried


def raises(_mod, _ctx):
    raise KeyError("gone")


def unbound(mod, _ctx):
    loose = relax.Var("loose", relax.TensorType(*X))
    main = mod["main"]
    out = mod.clone()
    body = relax.SeqExpr([], loose)
    out.update_func(
        mod.get_global_var("main"), relax.Function(main.params, body, ret_ty=main.ret_ty)
    )
    return out


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (raises, "'broken' failed on a module of the model: .*gone"),
        (unbound, "'broken' returned a module that is not well formed"),
    ],
)
def test_a_rewrite_that_fails_is_named(does, says):
    broken = tvm.transform.module_pass(does, opt_level=0, name="broken")
    with (
        tvm_fusion.register_rewrite("broken", broken, **ON_CPU),
        pytest.raises(InputError, match=says),
    ):
        tvm_fusion.explain(module(chain, X), "llvm")


@pytest.mark.parametrize(
    ("name", "make", "options", "error", "says"),
    [
        ("fold_factors", DropExp(), {}, ValueError, "'fold_factors' is already registered"),
        ("", DropExp(), {}, ValueError, "has a name"),
        ("mine", "drop", {}, TypeError, "not 'drop'"),
        ("mine", DropExp, {}, TypeError, "a pass or a function"),
        ("mine", DropExp(), {"kinds": ("tpu",)}, ValueError, "tpu"),
    ],
)
def test_a_rewrite_that_cannot_be_used_is_refused(name, make, options, error, says):
    with pytest.raises(error, match=says):
        tvm_fusion.register_rewrite(name, make, **options)


# Profiles


def profile(name="my_gpu", base="nvidia_h100", **values):
    return replace(load_profile(base), name=name, aliases=("my own gpu",), **values)


def test_a_profile_is_a_target_by_its_name_and_its_aliases():
    few = profile(num_sms=8)
    with tvm_fusion.register_profile(few) as added:
        assert added is few
        assert resolve_target("my_gpu")[1] is resolve_target("My own GPU")[1] is few
        (slow,) = tvm_fusion.explain(module(chain, LARGE), "my_gpu").groups
        (fast,) = tvm_fusion.explain(module(chain, LARGE), "h100").groups
        assert slow.predicted_us > 1.3 * fast.predicted_us
    with pytest.raises(tvm_fusion.TargetError, match="unknown target 'my_gpu'"):
        tvm_fusion.explain(module(chain, X), "my_gpu")


def test_a_profile_of_a_cpu_compiles_here():
    with tvm_fusion.register_profile(profile("my_cpu", "llvm_cpu")):
        compiled = tvm_fusion.compile(module(chain, X), "my_cpu", verify=True)
    assert compiled.report.target == "my_cpu"
    assert compiled.report.verify.passed


def test_a_profile_is_read_from_a_file(tmp_path):
    shipped = profile_file("nvidia_a100").read_text()
    names = re.sub(r"(?m)^(name|aliases) = .*\n", "", shipped)
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "my_a100"\naliases = ["a100 of mine"]\n{names}')
    with tvm_fusion.register_profile(file):
        assert resolve_target("a100 of mine")[1].name == "my_a100"


def test_a_target_of_tvms_still_means_the_shipped_profile():
    target = load_profile("nvidia_h100").to_target()
    before = resolve_target(target)[1]
    with tvm_fusion.register_profile(profile()):
        assert resolve_target(target)[1] == before


def test_processes_of_tuning_know_what_was_registered():
    policy = extend.load_policy(None)
    with tvm_fusion.register_profile(profile("my_cpu", "llvm_cpu")) as mine:
        place = pickle.dumps(Place("my_cpu", policy, registry.added(), extend.added_profiles()))
    try:
        assert pickle.loads(place).resolved()[1] == mine
        assert pickle.loads(place).resolved()[1] == mine
    finally:
        tvm_fusion.unregister_profile("my_cpu")


def test_a_family_of_a_notebook_goes_to_processes_of_tuning_by_value():
    """They cannot import what stands in the notebook's `__main__`."""
    made = {"Pointwise": Pointwise, "__name__": "__main__"}
    exec("class Noted(Pointwise):\n    name = 'noted'", made)
    with tvm_fusion.register_family(made["Noted"](), **ON_CPU):
        sent = pickle.dumps(Place("llvm", extend.load_policy(None), registry.added()))
    assert not hasattr(sys.modules["__main__"], "Noted")
    try:
        pickle.loads(sent).resolved()
        assert type(registry.family("noted")).mro()[1] is Pointwise
    finally:
        tvm_fusion.unregister_family("noted")


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (7, TypeError, "HardwareProfile or a path"),
        ("no_such.toml", tvm_fusion.ConfigError, "no such file"),
        (replace(load_profile("h100"), name="mine"), ValueError, "taken by nvidia_h100"),
        (profile("h200"), ValueError, "'h200' is taken by nvidia_h200"),
        (profile("cuda"), ValueError, "'cuda' cannot be"),
        (profile("My GPU"), ValueError, "'My GPU' cannot be"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused(given, error, says):
    with pytest.raises(error, match=says):
        tvm_fusion.register_profile(given)
    assert not extend.added_profiles()
