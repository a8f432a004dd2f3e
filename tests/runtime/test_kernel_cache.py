"""A kernel that was written before is not written again, and is the same one."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow import kernel_cache
from tvm_fusion.flow import plan_cache as cache_key
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.flow.kernels_ahead import KernelsAhead
from tvm_fusion.flow.planned import Planned
from tvm_fusion.ir import weights
from tvm_fusion.ir.weights import with_values
from tvm_fusion.kernels import registry
from tvm_fusion.kernels.pointwise.kernel_class import Pointwise
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.build.cuda_compiler import Compiler, DeviceCode
from tvm_fusion.runtime.build.kernel_code import kernel_code
from tvm_fusion.runtime.calls.launch_count import cuda_sources, launched_kernels
from tvm_fusion.transform.apply import write_kernels
from tvm_fusion.tuning.database.trial import Trial
from tvm_fusion.tuning.session import lookup
from tvm_fusion.tuning.session.choices import DEFAULT, class_choices
from tvm_fusion.tuning.session.contested import Sent
from tvm_fusion.tuning.session.tasks import tasks_of

TARGET, H200 = resolve_target("nvidia_h200")
POLICY = load_policy({"probe": "off"})


def module(rows: object = 64, weight: float | np.ndarray = 0.5):
    """Two launches: a row kernel, and a product with an epilogue."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 256), "float16"))
    w = relax.const(np.broadcast_to(weight, (256, 128)).astype("float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(relax.op.exp(x)))
            z = builder.emit(relax.op.matmul(y, w))
            z = builder.emit_output(relax.op.nn.relu(z))
        builder.emit_func_output(z)
    return builder.get()


compiled_by_nvcc = Compiler.compile


@cache
def compiled(compiler: Compiler, source: str, arch: str) -> DeviceCode:
    """The machine code of a source, made once for all tests: none is about nvcc."""
    return compiled_by_nvcc(compiler, source, arch)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Names the classes of the kernels that are written; they are kept in a folder of the test's
    own.
    """
    monkeypatch.setattr(Compiler, "compile", compiled)
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(kernel_cache.VARIABLE, "1")
    found, write = [], write_kernels.KernelWriter.kernel

    def noted(self, func, class_name):
        found.append(class_name)
        return write(self, func, class_name)

    monkeypatch.setattr(write_kernels.KernelWriter, "kernel", noted)
    return found


def built(mod=None, policy=POLICY, hw=H200):
    planned = Planned.of(mod or module(), TARGET, hw, policy)
    made = planned.build()
    assert not made.planned.cuts
    return made.built


def facts(result):
    return (
        result.cuda_sources,
        result.kernels,
        result.resources,
        result.memory,
        result.signature,
        result.executable.as_text(),
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [64, tirx.Var("n", "int64")], ids=["64", "n"])
def test_the_second_build_writes_nothing_and_is_the_same(written, rows):
    mod = module(rows)
    first = facts(built(mod))
    assert len(written) == 2
    assert facts(built(mod)) == first
    assert len(written) == 2


def test_what_is_kept_is_what_is_built_without_a_cache(written, monkeypatch):
    built()
    kept = facts(built())
    monkeypatch.setenv(kernel_cache.VARIABLE, "0")
    assert facts(built()) == kept
    assert len(written) == 4


def test_a_module_of_known_kernels_is_built_again_with_its_weights(written, monkeypatch):
    """As it is to be saved: its kernels were not written, by this process at least."""
    monkeypatch.setattr(weights, "LEAST_ELEMENTS", 256)
    mod = module(weight=np.random.default_rng(0).normal(size=(256, 128)))
    first, again = (planned_function(mod, TARGET, POLICY).build().built for _ in range(2))
    assert first.weights
    assert len(written) == 2
    for one in (first, again):
        whole = one.complete()
        assert whole is not one.executable
        assert launched_kernels(whole.mod) == launched_kernels(one.executable.mod)
        assert sorted(cuda_sources(whole.mod)) == sorted(first.cuda_sources)
    kept = tvm.ir.load_json(tvm.ir.save_json(again.written()))
    assert build(with_values(kept), TARGET).kernels == first.kernels
    assert len(written) == 2


@pytest.mark.parametrize(
    ("other", "policy", "hw"),
    [
        (module(rows=65), POLICY, H200),
        (module(), replace(POLICY, rounding="exact"), H200),
        (module(), POLICY, replace(H200, num_sms=H200.num_sms - 1)),
    ],
    ids=["shape", "policy", "device"],
)
def test_what_differs_is_written(written, other, policy, hw):
    built()
    built(other, policy, hw)
    assert len(written) == 4


def test_other_weights_take_the_same_kernels(written, tmp_path):
    built()
    before = sorted((tmp_path / "kernels").iterdir())
    built(module(weight=0.25))
    assert len(written) == 2
    assert sorted((tmp_path / "kernels").iterdir()) == before


@pytest.mark.parametrize("damage", ["", "{}", "\x00", "cut", "changed"])
def test_a_damaged_kernel_is_written_again(written, damage, tmp_path):
    first = facts(built())
    files = sorted((tmp_path / "kernels").iterdir())
    whole = [file.read_text() for file in files]
    for file, text in zip(files, whole, strict=True):
        changes = {
            "cut": text[: len(text) // 2],
            "changed": text.replace("__global__", "__device__"),
        }
        file.write_text(changes.get(damage, damage))
    assert facts(built()) == first
    assert len(written) == 4
    assert [file.read_text() for file in files] == whole


def test_a_kernel_without_its_machine_code_is_compiled_again(written, tmp_path):
    first = facts(built())
    for file in tmp_path.glob("*.cubin"):
        file.unlink()
    assert facts(built()) == first
    assert len(written) == 2
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_it_can_be_switched_off(written, tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, "0")
    built()
    built()
    assert len(written) == 4
    assert not (tmp_path / "kernels").exists()


def test_nothing_is_kept_with_a_kernel_class_of_the_users(written, tmp_path):
    class Mine(Pointwise):
        name = "mine"

    registry.register(Mine())
    try:
        built()
        built()
    finally:
        registry.unregister("mine")
    assert len(written) == 4
    assert not (tmp_path / "kernels").exists()


def test_a_changed_package_writes_again(written, monkeypatch):
    built()
    monkeypatch.setattr(cache_key, "package_state", lambda: "another")
    built()
    assert len(written) == 4


def test_other_options_of_the_passes_lower_again(written):
    built()
    with tvm.transform.PassContext(config={"tirx.UnrollLoop": {"auto_max_step": 1}}):
        built()
    assert len(written) == 4


def test_a_folder_that_cannot_be_written_is_left_alone(written, tmp_path):
    (tmp_path / "kernels").write_text("a file in its place")
    assert facts(built()) == facts(built())
    assert len(written) == 4


@pytest.fixture
def tuned(written, monkeypatch):
    """Builds with a database that has times of the row kernel: untuned, and of another choice, by
    its number. The row kernels that tuning chose are noted beside those of `written`.
    """
    write = lookup.written

    def noted(workload, kind, text, hw, policy):
        written.append(text)
        return write(workload, kind, text, hw, policy)

    monkeypatch.setattr(lookup, "written", noted)

    def build(position):
        planned = Planned.of(module(), TARGET, H200, POLICY)
        tasks = tasks_of(planned.low, planned.graph, planned.plan, POLICY)
        task = next(t for t in tasks if t.kernel_class == "row")
        times = {DEFAULT: 10.0}
        if position:
            choices = class_choices(task.workload, H200, POLICY)
            times[choices[position][0].text] = 1.0
        trials = [Trial("class", t, "ok", us, 0.0, (us,) * 9, 0.0) for t, us in times.items()]
        chosen = lookup.TunedKernels(Sent({task.key: tuple(trials)}), 0.01)
        result = replace(planned, tuned=chosen).build().built
        assert chosen.used[task.key] is trials[-1]
        return facts(result)

    return build


def test_a_tuned_kernel_is_kept_under_its_choice(written, tuned):
    first, other, untuned = (tuned(position) for position in (-1, -2, 0))
    chosen = [text for text in written if text.startswith("RowConfig(")]
    assert len(set(chosen)) == len(chosen) == 2
    assert sorted(set(written) - set(chosen)) == ["gemm", "row"]
    assert len(written) == 4
    assert len({x[0] for x in (first, other, untuned)}) == 3
    assert [tuned(position) for position in (-1, -2, 0)] == [first, other, untuned]
    assert facts(built()) == untuned
    assert len(written) == 4


def test_nvcc_begins_with_a_tuned_kernel_before_the_build(tuned, monkeypatch):
    begun, add = [], KernelsAhead.add

    def noted(self, name, func, class_name, kernel, choice=""):
        add(self, name, func, class_name, kernel, choice)
        begun.append((class_name, choice.startswith("class RowConfig("), name in self.codes))

    monkeypatch.setattr(KernelsAhead, "add", noted)
    tuned(-1)
    assert sorted(begun) == [("gemm", False, True), ("row", True, True)]


def test_a_choice_that_is_no_longer_offered_is_not_kept(written, tuned, monkeypatch):
    def refused(*_):
        raise Unsupported("not offered")

    untuned = tuned(0)
    monkeypatch.setattr(lookup, "written", refused)
    planned = Planned.of(module(), TARGET, H200, POLICY)
    trials = [
        Trial("class", t, "ok", us, 0.0, (us,) * 9, 0.0) for t, us in ((DEFAULT, 9.0), ("x", 1.0))
    ]
    tasks = tasks_of(planned.low, planned.graph, planned.plan, POLICY)
    chosen = lookup.TunedKernels(Sent({t.key: tuple(trials) for t in tasks}), 0.01)
    result = replace(planned, tuned=chosen).build().built
    assert facts(result) == untuned
    assert len(chosen.stale) == 2
    assert not chosen.used
    assert len(written) == 2


@pytest.fixture
def described():
    """What TVM is told of the kernels of each CUDA module, in the order in which they are made."""
    name, found = "ffi.Module.create.cuda", []
    before = tvm_ffi.get_global_func(name, allow_missing=True)

    def create(source, _format, infos, _more):
        found.append(sorted(map(repr, infos.values())))
        source = bytes(source).decode()
        return tvm_ffi.get_global_func("runtime.CSourceModuleCreate")(source, "c", [], None)

    tvm_ffi.register_global_func(name, create, override=True)
    yield found
    tvm_ffi.remove_global_func(name)
    if before is not None:
        tvm_ffi.register_global_func(name, before)


def test_what_is_kept_of_a_kernel_tells_tvm_all_about_it(described, tmp_path):
    cache = kernel_cache.KernelCache(tmp_path, "")
    mod = Planned.of(module(), TARGET, H200, POLICY).write().mod
    for gvar, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        path = cache.path(gvar.name_hint, func, "any")
        code = kernel_code(gvar.name_hint, func, TARGET)
        cache.keep(path, code)
        (unit,) = cache.read(path).units
        assert unit.module(b"code").inspect_source() == code.units[0].source
        whole, kept = described[-2:]
        assert whole == kept
    assert len(described) == 4
    assert any("use_dyn_shared_memory" in info for infos in described for info in infos)
