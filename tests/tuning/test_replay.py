"""Traces as texts: every candidate comes back as it was, and nothing else is taken."""

import pytest
import tvm
import tvm_ffi
from tvm.relax import op

from tvm_fusion.errors import Unsupported
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.tuning.database import Database, replay, trace_text
from tvm_fusion.tuning.database.trial import Trial

from ..support.kernel_cases import fuse
from ..support.tune_functions import CUDA, LLVM, evolving, fused, layer_norm, softmax, texts_of


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["llvm", "cuda"])
def test_a_replayed_text_is_the_very_candidate(target):
    func = fused("softmax")
    proposed = evolving(func, target, seed=4).next(6)
    assert len(proposed) == 6
    for text, candidate in proposed:
        assert tvm_ffi.structural_equal(replay.schedule(func, text).mod, candidate.sch.mod)
        assert trace_text(replay.schedule(func, text).trace) == text


def product(bb, x, w):
    return op.matmul(x, w)


def pool(bb, x):
    return op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1))


STOCK_CASES = {
    "convolution": (
        lambda bb, x, w: op.nn.conv2d(x, w, padding=1, out_dtype="float32"),
        ((1, 16, 8, 8), "float16"),
        ((16, 16, 3, 3), "float16"),
    ),
    "product": (
        lambda bb, x, w: op.nn.relu(bb.emit(op.matmul(x, w))),
        ((30, 44), "float16"),
        ((44, 52), "float16"),
    ),
    "product of floats": (product, ((64, 64), "float32"), ((64, 64), "float32")),
    "softmax": (softmax, ((16, 64), "float16")),
    "pool": (
        lambda bb, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)),
        ((1, 8, 16, 16), "float16"),
    ),
    "sum": (lambda bb, x: op.sum(x, axis=[1]), ((21, 9, 10), "float32")),
    "all": (lambda bb, x: op.sum(x), ((30, 11), "float32")),
    "argmax": (lambda bb, x: op.argmax(x, axis=1), ((16, 64), "float32")),
    "norm": (layer_norm, ((33, 96), "float32"), ((96,), "float32"), ((96,), "float32")),
}
ON_TENSOR_CORES = ("convolution", "product")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", STOCK_CASES)
def test_candidates_of_tvms_rules_for_cuda_come_back_as_they_were(name):
    emit, *inputs = STOCK_CASES[name]
    func = fuse(emit, *inputs)
    proposed = evolving(func, CUDA, seed=4).next(3)
    assert len(proposed) >= 2
    assert all(('"Tensorize"' in text) == (name in ON_TENSOR_CORES) for text, _ in proposed)
    for text, candidate in proposed:
        sch = replay.schedule(func, text)
        assert tvm_ffi.structural_equal(sch.mod, candidate.sch.mod)
        assert trace_text(sch.trace) == text


# Always: traces for tensor cores are kept, and schedules for a GPU compile (`test_evolve`).
@pytest.mark.nightly
def test_candidates_for_tensor_cores_compile(tmp_path, monkeypatch):
    """Shared memory of two dtypes: operands in float16, results in float32."""
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    func = fuse(*STOCK_CASES["convolution"])
    (text,) = texts_of(evolving(func, CUDA, seed=4), 1)
    kernel = replay.scheduled(func, text).with_attr("global_symbol", "kernel")
    _, resources = build_functions(tvm.IRModule({"kernel": kernel}), CUDA)
    assert all(r.registers > 0 for r in resources)


def test_a_database_keeps_traces_for_tensor_cores(tmp_path):
    func = fuse(*STOCK_CASES["product"])
    (text,) = texts_of(evolving(func, CUDA), 1)
    trial = Trial("trace", text, "ok", 2.0, 0.0, (2.0,))
    database = Database(tmp_path, "device", target=CUDA)
    database.add(func, CUDA, trial)
    (found,) = Database(tmp_path, "device", target=CUDA).trials(func)
    assert (found.kind, found.text, found.us) == ("trace", text, 2.0)
    (records,) = Database(tmp_path, None).tuning_records().values()
    assert trace_text(records[0].trace) == text


def test_a_replayed_function_keeps_its_name_and_attributes():
    func = fused("chain").with_attr({"global_symbol": "kernel", "of_somebody": 7})
    (text,) = texts_of(evolving(func, LLVM), 1)
    kernel = replay.scheduled(func, text)
    assert kernel.attrs["global_symbol"] == "kernel"
    assert int(kernel.attrs["of_somebody"]) == 7


def test_a_trace_of_another_function_is_refused():
    (text,) = texts_of(evolving(fused("linear"), LLVM), 1)
    with pytest.raises(Unsupported, match="does not fit this function"):
        replay.scheduled(fused("softmax"), text)
    with pytest.raises(Unsupported, match="is no JSON"):
        replay.scheduled(fused("softmax"), "[[")
