"""Traces as texts: every candidate comes back as it was, and nothing else is taken."""

import json

import pytest
import tvm
import tvm_ffi
from tvm.relax import op

from tvm_fusion.errors import Unsupported
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.tuning.database import Database, check, trace_text
from tvm_fusion.tuning.measure.trial_record import Trial
from tvm_fusion.tuning.search import replay

from ..support.kernel_cases import fuse
from ..support.tune_functions import CUDA, LLVM, evolving, fused, layer_norm, softmax


@pytest.mark.parametrize("target", [LLVM, CUDA], ids=["llvm", "cuda"])
@pytest.mark.parametrize("space", ["own", "stock"])
def test_a_replayed_text_is_the_very_candidate(space, target):
    func = fused("softmax")
    search = evolving(func, target, space=space, seed=4, trials=6, batch=4)
    texts = search.ask(6)
    assert len(texts) == 6
    for text in texts:
        mod = search._candidates[text].sch.mod
        assert tvm_ffi.structural_equal(replay.schedule(func, text).mod, mod)
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


@pytest.mark.parametrize("name", STOCK_CASES)
def test_candidates_of_tvms_rules_for_cuda_come_back_as_they_were(name):
    emit, *inputs = STOCK_CASES[name]
    func = fuse(emit, *inputs)
    search = evolving(func, CUDA, space="stock", seed=4, trials=3, batch=3)
    texts = search.ask(3)
    assert len(texts) == 3
    assert all(('"Tensorize"' in text) == (name in ON_TENSOR_CORES) for text in texts)
    for text in texts:
        assert replay.canonical(text) == text
        sch = replay.schedule(func, text)
        assert tvm_ffi.structural_equal(sch.mod, search._candidates[text].sch.mod)
        assert trace_text(sch.trace) == text


def test_candidates_for_tensor_cores_compile(tmp_path, monkeypatch):
    """Shared memory of two dtypes: operands in float16, results in float32."""
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    func = fuse(*STOCK_CASES["convolution"])
    (text,) = evolving(func, CUDA, space="stock", seed=4, trials=1, batch=1).ask(1)
    kernel = replay.scheduled(func, text).with_attr("global_symbol", "kernel")
    _, resources = build_functions(tvm.IRModule({"kernel": kernel}), CUDA)
    assert all(r.registers > 0 for r in resources)


def test_a_database_keeps_traces_for_tensor_cores(tmp_path):
    func = fuse(*STOCK_CASES["product"])
    (text,) = evolving(func, CUDA, space="stock", trials=1, batch=1).ask(1)
    trial = Trial("trace", text, "ok", 2.0, 0.0, (2.0,))
    database = Database.open(tmp_path, "device", target=CUDA)
    database.add(func, CUDA, trial)
    (found,) = Database.open(tmp_path, "device", target=CUDA).trials(func)
    assert (found.kind, found.text, found.us) == ("trace", text, 2.0)
    assert check(tmp_path, replay=True).ok  # in another process


def test_a_replayed_function_keeps_its_name_and_attributes():
    func = fused("chain").with_attr({"global_symbol": "kernel", "of_somebody": 7})
    (text,) = evolving(func, LLVM, trials=1, batch=1).ask(1)
    kernel = replay.scheduled(func, text)
    assert kernel.attrs["global_symbol"] == "kernel"
    assert int(kernel.attrs["of_somebody"]) == 7


GET = ["GetSBlock", [], ["root", "main"], ["b0"]]
BROKEN = {
    "no JSON": "[[",
    "a number that is none": "[[],[NaN]]",
    "no lists": "{}",
    "three lists": "[[],[],[]]",
    "no instruction": "[[3],[]]",
    "unknown": '[[["Nonsense",[],[],[]]],[]]',
    "unsafe": '[[["UnsafeSetDType",[],[0,"float32"],[]]],[]]',
    "undefined": '[[["GetLoops",["b7"],[],[]]],[]]',
    "twice": json.dumps([[GET, GET], []]),
    "an attribute": '[[["GetSBlock",[],[null],["b0"]]],[]]',
    "an input": '[[["GetLoops",[null],[],[]]],[]]',
    "far decision": json.dumps([[GET], [[900, 1]]]),
    "no decision": '[[["SampleCategorical",[],[[1,2],[0.5,0.5]],["v0"]]],[]]',
    "a text": json.dumps([[GET], [["0", 1]]]),
}


TYPE = {"type": "ir.PrimType", "data": {"span": 0, "dtype": "int64"}}
VAR = {"type": "ir.Var", "data": {"span": 0, "ty": 1, "name": 2}}
NODES = [
    {"type": "None"},
    TYPE,
    {"type": "ffi.String", "data": "i"},
    VAR,
    {"type": "ffi.Array", "data": [3]},
    {
        "type": "tirx.IndexMap",
        "data": {"initial_indices": 4, "final_indices": 4, "inverse_index_map": 0},
    },
]


def with_index_map(nodes, root):
    graph = json.dumps({"root_index": root, "nodes": nodes, "metadata": {}})
    return json.dumps([[GET, ["TransformBlockLayout", ["b0"], [graph], []]], []])


BROKEN |= {
    "no map": with_index_map([], 0),
    "another root": with_index_map(NODES, 4),
    "a far root": with_index_map(NODES, 6),
    "a circle": with_index_map([*NODES[:4], {"type": "ffi.Array", "data": [4]}, NODES[5]], 5),
    "far away": with_index_map([*NODES[:4], {"type": "ffi.Array", "data": [99]}, NODES[5]], 5),
    "no indices": with_index_map([*NODES[:4], {"type": "ffi.Array", "data": [1]}, NODES[5]], 5),
    "a function": with_index_map([*NODES[:4], {"type": "tirx.PrimFunc", "data": {}}, NODES[5]], 5),
    "no graph": json.dumps([[GET, ["TransformBlockLayout", ["b0"], ["{}"], []]], []]),
    "an input map": json.dumps([[GET, ["TransformLayout", ["b0", "{"], [0, 0, None, 1], []]], []]),
    "no padding": json.dumps([[GET, ["TransformLayout", ["b0"], [0, None, 0, 1], []]], []]),
}


def test_a_sound_index_map_is_taken():
    text = with_index_map(NODES, 5)
    assert replay.parse(text) == json.loads(text)


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_broken_traces_are_refused_before_tvm_sees_them(text):
    with pytest.raises(Unsupported) as refused:
        replay.parse(text)
    assert "does not fit" not in str(refused.value)


def test_a_trace_of_another_function_is_refused():
    (text,) = evolving(fused("linear"), LLVM, trials=1, batch=1).ask(1)
    with pytest.raises(Unsupported, match="does not fit this function"):
        replay.scheduled(fused("softmax"), text)
