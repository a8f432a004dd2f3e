"""A kernel that was written before is not written again, and is the same one."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_fusion import cache_key, kernel_cache
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.job import Job
from tvm_fusion.kernels import registry
from tvm_fusion.kernels.pointwise import Pointwise
from tvm_fusion.runtime.kernel_code import kernel_code
from tvm_fusion.transform import write_kernels

TARGET, H200 = resolve_target("nvidia_h200")
POLICY = load_policy({"probe": "off"})


def module(rows: object = 64, weight: float = 0.5):
    """Two launches: a row kernel, and a product with an epilogue."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 256), "float16"))
    w = relax.const(np.full((256, 128), weight, "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(relax.op.exp(x)))
            z = builder.emit(relax.op.matmul(y, w))
            z = builder.emit_output(relax.op.nn.relu(z))
        builder.emit_func_output(z)
    return builder.get()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Names the classes of the kernels that are written; they are kept in a folder of the test's
    own.
    """
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(kernel_cache.VARIABLE, "1")
    found, write = [], write_kernels.KernelWriter.kernel

    def noted(self, func, class_name):
        found.append(class_name)
        return write(self, func, class_name)

    monkeypatch.setattr(write_kernels.KernelWriter, "kernel", noted)
    return found


def built(mod=None, policy=POLICY, hw=H200):
    job = Job.from_module(mod or module(), TARGET, hw, policy)
    result, _ = job.build_fused()
    assert not job.cuts
    return result


def facts(result):
    return (
        result.cuda_sources,
        result.kernels,
        result.resources,
        result.memory,
        result.signature,
        result.executable.as_text(),
    )


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
    mod, _ = Job.from_module(module(), TARGET, H200, POLICY).write()
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
