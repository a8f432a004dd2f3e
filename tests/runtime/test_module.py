"""CompiledModule: calls with any kind of tensor, checks, saving and loading."""

import functools
import json
import threading

import numpy as np
import pytest
import torch
import tvm
from tvm import relax, tirx
from tvm.support import cc

from tvm_fusion.errors import BuildError, InputError, TargetError
from tvm_fusion.plan.plan import FusionPlan, PlannedGroup
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.calls.signature import InputSpec, Signature
from tvm_fusion.runtime.calls.tensors import to_tvm

from ..support.runtime_cases import H200, LLVM, call_in_sequence, relax_module, symbolic_sum


@pytest.fixture(scope="module")
def compiled() -> CompiledModule:
    group = PlannedGroup(("lv", "lv1"), "row", predicted_us=1.5)
    plan = FusionPlan("main", "a fingerprint", "llvm_cpu", "default", (group,))
    return CompiledModule.of(build(symbolic_sum(), LLVM), plan, "a report")


def arrays(n=5, m=3):
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((n, 8)).astype("float32"),
        rng.standard_normal((n, m)).astype("float32"),
    )


def expected(x, y):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True), y.sum(axis=1)


KINDS = {
    "numpy": (lambda a: a, np.ndarray, lambda o: o),
    "torch": (torch.from_numpy, torch.Tensor, lambda o: o.numpy()),
    "tvm": (tvm.runtime.tensor, tvm.runtime.Tensor, lambda o: o.numpy()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 3), (13, 64)])
def test_outputs_are_of_the_kind_given_for_every_size(compiled, kind, n, m):
    wrap, output_type, unwrap = KINDS[kind]
    x, y = arrays(n, m)
    outputs = compiled(wrap(x), wrap(y))
    assert isinstance(outputs, tuple)
    assert isinstance(outputs[1], tuple)
    assert all(isinstance(o, output_type) for o in (outputs[0], outputs[1][0]))
    for got, want in zip((outputs[0], outputs[1][0]), expected(x, y), strict=True):
        np.testing.assert_allclose(unwrap(got), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kinds", "output_type"),
    [(("numpy", "torch"), torch.Tensor), (("numpy", "tvm"), tvm.runtime.Tensor)],
)
def test_a_mixture_gives_torch_before_tvm_before_numpy(compiled, kinds, output_type):
    inputs = [KINDS[k][0](a) for k, a in zip(kinds, arrays(), strict=True)]
    assert isinstance(compiled(*inputs)[0], output_type)


def test_strided_and_misaligned_and_read_only_inputs_give_the_same_numbers(compiled):
    x, y = arrays()
    want = compiled(x, y)[0]
    shifted = np.empty(x.size + 1, "float32")[1:].reshape(x.shape)
    shifted[:] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    big_endian = x.astype(">f4")
    strided = np.repeat(x, 2, axis=1)[:, ::2]
    for variant in (np.asfortranarray(x), strided, shifted, read_only, big_endian):
        np.testing.assert_array_equal(compiled(variant, y)[0], want)
    tensor = torch.from_numpy(x)
    ones = torch.from_numpy(y)
    for variant in (tensor.T.contiguous().T, torch.from_numpy(shifted), tensor.requires_grad_()):
        np.testing.assert_array_equal(compiled(variant, ones)[0].numpy(), want)


def test_aligned_contiguous_inputs_are_not_copied():
    tensor = torch.zeros(64, 8)
    assert to_tvm(tensor, tvm.cpu(), "x").data_ptr() == tensor.data_ptr()
    room = np.zeros(64 * 8 + 16, "float32")
    start = (-room.ctypes.data % 64) // 4
    aligned = room[start : start + 64 * 8].reshape(64, 8)
    assert to_tvm(aligned, tvm.cpu(), "x").data_ptr() == aligned.ctypes.data


def test_torch_outputs_share_memory_with_the_module(compiled):
    x, y = map(torch.from_numpy, arrays())
    first = compiled(x, y)[0]
    kept = first.clone()
    for _ in range(3):
        compiled(x + 1, y)
    assert torch.equal(first, kept)


def test_torch_tensors_after_accepted_ones_are_checked_as_the_first_were(compiled):
    x, y = (torch.from_numpy(a).clone() for a in arrays())
    want = compiled(x, y)[0]
    for same in (x, x.T.contiguous().T, x.clone().requires_grad_(), torch.nn.Parameter(x)):
        assert torch.equal(compiled(same, y)[0], want)
    assert compiled(x[:2], y[:2])[0].shape == (2, 8)
    assert isinstance(compiled(x.numpy(), y.numpy())[0], np.ndarray)
    for wrong in ((x.half(), y), (x[:, :7], y), (x, y[:4]), (x,)):
        compiled(x, y)
        with pytest.raises(InputError):
            compiled(*wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x,), r"expected 2 inputs \(x: float32 \(n, 8\); y.*got 1"),
        (lambda x, y: (x, y.astype("float64")), "input y: expected dtype float32, got float64"),
        (
            lambda x, y: (x[:, :7], y),
            r"input x: expected shape \(n, 8\), got \(5, 7\): axis 1 is 7",
        ),
        (lambda x, y: (x, y[:4]), r"input y: expected shape \(n, m\), got \(4, 3\).*n = 5"),
        (lambda x, y: (x.ravel(), y), r"input x: expected shape \(n, 8\) of rank 2.*rank 1"),
        (lambda x, y: (x, [1.0, 2.0]), "an input is a list"),
        (lambda x, y: (torch.from_numpy(x).half(), y), "input x: expected dtype float32.*float16"),
    ],
    ids=["count", "dtype", "extent", "symbolic extent", "rank", "kind", "torch dtype"],
)
def test_a_wrong_input_is_named_with_what_was_expected_and_given(compiled, change, message):
    with pytest.raises(InputError, match=message):
        compiled(*change(*arrays()))


def test_symbolic_extents_of_one_name_are_told_apart():
    n, other = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    mod = relax_module(
        lambda bb, x, y: relax.op.nn.relu(x),
        ("x", (n, other, n * 2), "float16"),
        ("y", (n,), "int32"),
    )
    signature = Signature.of(mod)
    assert signature.inputs == (
        InputSpec("x", "float16", ("n", "n_1", "(n * 2)")),
        InputSpec("y", "int32", ("n",)),
    )
    assert signature.check([("float16", (2, 3, 4)), ("int32", (2,))]) == {"n": 2, "n_1": 3}
    assert Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature


def test_an_extent_that_is_an_expression_is_checked_too():
    n = tirx.Var("n", "int64")
    mod = relax_module(lambda bb, x: relax.op.nn.relu(x), ("x", (n, n * 2), "float32"))
    compiled = CompiledModule.of(build(mod, LLVM))
    assert compiled(np.zeros((2, 4), "float32")).shape == (2, 4)
    with pytest.raises(InputError, match=r"expected x: float32 \(n, \(n \* 2\)\), got \(2, 5\)"):
        compiled(np.zeros((2, 5), "float32"))


def test_a_tensor_of_unknown_shape_takes_any():
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=2))
    mod = tvm.IRModule({"main": relax.Function([x], x, x.ty)})
    assert Signature.of(mod).inputs == (InputSpec("x", "float32", None),)
    assert Signature.of(mod).check([("float32", (2, 3))]) == {}


def test_parameters_that_are_no_tensors_go_through():
    n = tirx.Var("n", "int64")
    ty = relax.TensorType((2,), "float32")
    pair = relax.Var("pair", relax.TupleType([ty, ty]))
    shape = relax.Var("shape", relax.ShapeType([n]))
    x = relax.Var("x", relax.TensorType((n,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [pair, shape, x]):
        second = bb.emit(relax.TupleGetItem(pair, 1))
        bb.emit_func_output(relax.Tuple([bb.emit(relax.op.add(second, second)), x]))
    compiled = CompiledModule.of(build(bb.get(), LLVM))
    two = np.asarray([1.0, 2.0], "float32")
    doubled, same = compiled([two, two], (3,), np.zeros(3, "float32"))
    np.testing.assert_array_equal(doubled, 2 * two)
    assert same.shape == (3,)


def test_a_saved_module_loads_with_everything_it_knew(compiled, tmp_path):
    path = compiled.save(tmp_path / "model.so")
    loaded = CompiledModule.load(path)
    x, y = arrays()
    np.testing.assert_array_equal(loaded(x, y)[0], compiled(x, y)[0])
    assert loaded.signature == compiled.signature
    assert loaded.launches == compiled.launches == 2
    assert loaded.report == "a report"
    assert loaded.plan == compiled.plan
    assert dict(loaded.target.export()) == dict(compiled.target.export())
    with pytest.raises(InputError, match="input x"):
        loaded(x.astype("float16"), y)
    with pytest.raises(BuildError, match="cannot be saved again"):
        loaded.save(tmp_path / "again.so")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda so, meta: so.unlink(), "there is no file"),
        (lambda so, meta: meta.unlink(), "there is no file"),
        (lambda so, meta: so.write_bytes(b"no library"), "cannot load"),
        (lambda so, meta: so.write_bytes(so.read_bytes()[:5000]), "it ends after 5000 bytes"),
        (lambda so, meta: meta.write_text("{"), "not JSON"),
        (lambda so, meta: meta.write_text('{"format": 0}'), "has not the format"),
        (
            lambda so, meta: meta.write_text(meta.read_text().replace(tvm.__version__, "0.1")),
            "was built with TVM 0.1",
        ),
    ],
    ids=[
        *("no library", "no sidecar", "broken library", "cut library"),
        *("broken sidecar", "format", "version"),
    ],
)
def test_a_spoilt_file_is_an_input_error(compiled, tmp_path, spoil, message):
    path = compiled.save(tmp_path / "model.so")
    spoil(path, tmp_path / "model.so.json")
    with pytest.raises(InputError, match=message):
        CompiledModule.load(path)


WRONG = ("x", -3, [], {}, [None], 1e9)


def places(value, path=()):
    """The path of everything in a JSON value but the text of a report."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, part in inside:
        if key != "report":
            yield (*path, key)
            if isinstance(part, dict | list) and len(path) < 3:
                yield from places(part, (*path, key))


def test_whatever_a_sidecar_says_wrongly_is_an_input_error_or_does_not_matter(compiled, tmp_path):
    path, (x, y) = compiled.save(tmp_path / "model.so"), arrays()
    file = tmp_path / "model.so.json"
    whole = file.read_text()
    refused = 0
    for *way, last in places(json.loads(whole)):
        for wrong in (None, *WRONG):
            data = json.loads(whole)
            held = functools.reduce(lambda part, key: part[key], way, data)
            if wrong is None:
                del held[last]
            else:
                held[last] = wrong
            file.write_text(json.dumps(data))
            try:
                loaded = CompiledModule.load(path)
                loaded(x, y)
            except InputError:
                refused += 1
    assert refused > 100


def test_a_library_that_cannot_be_written_is_an_error(compiled, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"cannot write the module .*: there is no such directory"):
        compiled.save(tmp_path / "no" / "such" / "folder" / "model.so")
    monkeypatch.setattr(cc, "get_cc", lambda: None)
    with pytest.raises(BuildError, match=r"cannot write the library .*no C\+\+ compiler"):
        compiled.save(tmp_path / "model.so")


def test_a_cuda_module_is_made_and_counted_and_saved_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(tvm.runtime.Device, "exist", False)
    built = build(call_in_sequence({}), H200, compile_kernels=False)
    compiled = CompiledModule.of(built)
    assert compiled.launches == 1
    assert compiled.save(tmp_path / "model.so").exists()
    with pytest.raises(TargetError, match="compiled for cuda"):
        compiled(np.zeros(1024, "float32"))


def test_calls_from_several_threads_do_not_disturb_each_other(compiled):
    failures = []

    def work(seed):
        x = np.random.default_rng(seed).standard_normal((7, 8)).astype("float32")
        y = np.full((7, seed + 1), seed, "float32")
        for _ in range(20):
            soft, (sums,) = compiled(x, y)
            want_soft, want_sums = expected(x, y)
            if not (np.allclose(soft, want_soft, atol=1e-6) and np.allclose(sums, want_sums)):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ["default", "own"])
def test_cuda_tensors_go_in_and_out_without_a_copy_on_their_stream(stream, tmp_path):
    from tvm_fusion.config import resolve_target

    compiled = CompiledModule.of(build(symbolic_sum(), resolve_target("cuda")[0]))
    x, y = (torch.from_numpy(a).cuda() for a in arrays())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if stream == "own" else None):
        outputs = compiled(x, y)
        assert outputs[0].is_cuda
        torch.testing.assert_close(outputs[0], torch.softmax(x, -1))
    host = compiled(x.cpu(), y.cpu())
    assert not host[0].is_cuda
    loaded = CompiledModule.load(compiled.save(tmp_path / "model.so"))
    torch.testing.assert_close(loaded(x, y)[0], outputs[0])
