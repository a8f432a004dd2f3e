"""The modules whose plans and kernels `golden` keeps: workloads, and small graphs of what these do
not have.

===============  ===================================================================================
kind             cases
===============  ===================================================================================
suites           each workload of the benchmark suites, called by the first suite that has it
random           random graphs of Relax operators, and random programs of torch
exact            workloads with the roundings of the unfused graph
symbolic         sizes that are known when the module is called
weights          weights that are constants of the module: narrow, transposed, stacked, shared ...
functions        modules of several functions
probed           graphs near a limit of the device, planned with what ptxas says of their kernels
===============  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
import tvm
from torch import nn
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.frontend import nn as tvm_nn

from tests.pipelines import llm
from tests.pipelines import modules as pipelines
from tests.support.graphs import module
from tvm_fusion.config import resolve_target
from tvm_fusion.frontends import load
from tvm_fusion.fuzz.campaign import draw_program

from .plans import case_graphs
from .plans.random_graphs import module_of
from .workloads import SUITES

RANDOM = 20  # of each sort
PROBED = ("register_pressure", "code_chain", "coalescing")
EXACT = (*SUITES["memory"], "linear_bias_gelu", "swiglu_mlp", "rmsnorm_qkv", "block")
H200 = "nvidia_h200"
F16, F32, BF16 = "float16", "float32", "bfloat16"


@dataclass(frozen=True)
class Case:
    """A module that is made anew each time.

    Attributes
    ----------
    make : callable
    policy : mapping
        Keys of the policy that are not the default's.
    needs : str
        The tool that the module or its plan depends on: "torch", "nvcc" or none.
    devices : tuple of str
        All, if empty.
    """

    make: Callable[[], tvm.IRModule]
    policy: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    devices: tuple[str, ...] = ()

    def is_for(self, device: str) -> bool:
        """Whether it is planned for a device."""
        return not self.devices or device in self.devices


MANY = ("conv", "vision", "contiguous", "compile_time", "compile_time_cpu", "held_classes")
OF_MANY = (
    *("resnet_b1_stem", "resnet_b1_56_3x3_64_64", "resnet_b1_28_3x3s2_256_256"),
    *("resnet_b1_14_1x1_256_1024", "depthwise_28_5x5_240", "audio_1000_9s2_256_512"),
    *("up_8_4_512_512", "up3_10_3_64_64", "grouped_56_3_128_128_g32", "unet_block_b1"),
)
"""Of suites of many alike, those that are cases: one of each kind."""


def kind_of(name: str) -> str:
    """The kind of a case, by its name."""
    group = name.partition("/")[0]
    return "suites" if group in SUITES else group


def cases() -> dict[str, Case]:
    """All cases by name, `<suite or kind>/<name>`."""
    first = {name: suite for suite in reversed(SUITES) for name in SUITES[suite]}
    first = {n: suite for n, suite in first.items() if suite not in MANY or n in OF_MANY}
    keys = {name: f"{suite}/{name}" for name, suite in first.items()}
    workload = {name: partial(module_of, f"suite:{key}") for name, key in keys.items()}
    found = {keys[name]: Case(make, needs="torch") for name, make in workload.items()}
    exact = {"rounding": "exact"}
    found |= {f"exact/{name}": Case(workload[name], exact, "torch") for name in EXACT}
    for seed in range(RANDOM):
        found[f"random/graph_{seed}"] = Case(partial(module_of, f"random:{seed}"))
        found[f"random/program_{seed}"] = Case(partial(drawn, seed), needs="torch")
    found |= {f"symbolic/{name}": Case(partial(_symbolic, name)) for name in SYMBOLIC}
    found |= {f"weights/{name}": Case(partial(_held, name)) for name in WEIGHTS}
    found |= {f"weights/{name}": Case(make, needs="torch") for name, make in MODELS.items()}
    found |= {f"functions/{name}": Case(make) for name, make in FUNCTIONS.items()}
    found["functions/paged"] = Case(_paged, devices=(H200,))
    for name in PROBED:
        make = partial(case_graphs.CASES[name].build, 1.0)
        found[f"probed/{name}"] = Case(make, {"probe": "auto"}, "nvcc", (H200,))
    return found


def drawn(seed: int) -> tvm.IRModule:
    program = draw_program(seed)
    return load((program.module(), program.arguments()))


# ---- symbolic sizes


def _linear(bb, x, w):
    return bb.emit(op.matmul(x, bb.emit(op.permute_dims(w))))


def _bias_gelu(bb, x, w, b):
    return op.nn.gelu(bb.emit(op.add(_linear(bb, x, w), b)))


def _gate_up(bb, x, g, u):
    return op.multiply(bb.emit(op.nn.silu(_linear(bb, x, g))), _linear(bb, x, u))


def _attention(bb, q, k, v, mask):
    scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
    scores = bb.emit(op.add(bb.emit(op.multiply(scores, relax.const(0.125, F16))), mask))
    return op.matmul(bb.emit(op.nn.softmax(scores)), v)


def _add_rms_norm(bb, x, r, g):
    total = bb.emit(op.add(x, r))
    return [total, op.nn.rms_norm(total, g, axes=[-1])]


def _sums(bb, x):
    y = bb.emit(op.exp(x))
    return [op.mean(y, [0]), op.sum(y, [1]), op.multiply(y, x)]


SYMBOLIC: dict[str, tuple] = {
    "softmax": (lambda bb, x: op.nn.softmax(x), ("n", "m")),
    "add_rms_norm": (_add_rms_norm, ("n", 4096), ("n", 4096), (4096,)),
    "layer_norm": (
        lambda bb, x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]),
        *(("n", 128, 768), (768,), (768,)),
    ),
    "turned": (
        lambda bb, x, y: op.add(bb.emit(op.permute_dims(x)), y),
        *(("n", "m"), ("m", "n")),
    ),
    "sums": (_sums, ("n", "m")),
    "bias_gelu": (_bias_gelu, ("n", 1024), (4096, 1024), (4096,)),
    "gate_up": (_gate_up, ("n", 1024), (2816, 1024), (2816, 1024)),
    "columns": (lambda bb, x, w: op.matmul(x, w), (64, 512), (512, "n")),
    "attention": (
        _attention,
        *((1, 8, "n", 64), (1, 8, "m", 64), (1, 8, "m", 64), (1, 1, "n", "m")),
    ),
    "decode": (
        _attention,
        *(("n", 8, 1, 64), ("n", 8, "m", 64), ("n", 8, "m", 64), ("n", 1, 1, "m")),
    ),
    "concat": (
        lambda bb, x, y: op.nn.relu(bb.emit(op.concat([x, y], axis=1))),
        *((5, "n"), (5, "m")),
    ),
}


def _symbolic(name: str) -> tvm.IRModule:
    emit, *shapes = SYMBOLIC[name]
    size = {letter: tirx.Var(letter, "int64") for letter in "nm"}
    return module(emit, *((tuple(size.get(e, e) for e in shape), F16) for shape in shapes))


# ---- weights


def _weight(*shape: int, dtype: str = F16, seed: int = 0) -> relax.Constant:
    """Values in eighths, which every type holds."""
    values = np.random.default_rng(seed).integers(-8, 8, shape) / 8
    return relax.const(values.astype(getattr(ml_dtypes, dtype, dtype)), dtype)


def _integers(*shape: int, dtype: str = "int8", low: int = -128, high: int = 128):
    return relax.const(np.random.default_rng(1).integers(low, high, shape).astype(dtype), dtype)


def _transposed(bb, x):
    return op.nn.relu(_linear(bb, x, _weight(512, 256)))


def _straight(bb, x):
    product = bb.emit(op.matmul(x, _weight(256, 512)))
    return op.nn.gelu(bb.emit(op.add(product, _weight(512))))


def _odd(bb, x):
    return op.matmul(x, _weight(1001, 1003))


def _left(bb, x):
    return op.add(bb.emit(op.matmul(_weight(128, 200), x)), _weight(128, 1))


def _stacked_qkv(bb, x):
    joined = bb.emit(op.add(_linear(bb, x, _weight(768, 256)), _weight(768)))
    return [bb.emit(op.nn.relu(bb.emit(part))) for part in bb.emit(op.split(joined, 3, axis=-1))]


def _normed_qkv(bb, x):
    normed = bb.emit(op.nn.rms_norm(x, _weight(256), axes=[-1]))
    return [_linear(bb, normed, _weight(256, 256, seed=seed)) for seed in range(3)]


def _gated(bb, x):
    inner = bb.emit(_gate_up(bb, x, _weight(688, 256), _weight(688, 256, seed=1)))
    return op.add(_linear(bb, inner, _weight(256, 688)), x)


def _tied(bb, ids):
    table = _weight(1000, 256)
    h = bb.emit(op.nn.rms_norm(bb.emit(op.take(table, ids, axis=0)), _weight(256), axes=[-1]))
    return _linear(bb, h, table)


def _one_weight_twice(bb, x):
    held = _weight(256, 256)
    return _linear(bb, bb.emit(op.nn.relu(_linear(bb, x, held))), held)


def _experts(bb, x):
    return op.nn.silu(bb.emit(op.matmul(x, _weight(4, 256, 320))))


def _lora(bb, x):
    low = _linear(bb, _linear(bb, x, _weight(16, 512)), _weight(512, 16))
    scaled = bb.emit(op.multiply(low, relax.const(0.5, F16)))
    return op.add(_linear(bb, x, _weight(512, 512)), scaled)


def _int4(bb, x):
    """Two in a byte, in groups of 64 with a factor each."""
    packed, ones = _integers(512, 256, dtype="uint8", low=0), relax.const(15, "uint8")
    low = bb.emit(op.bitwise_and(packed, ones))
    high = bb.emit(op.right_shift(packed, relax.const(4, "uint8")))
    joined = bb.emit(op.reshape(bb.emit(op.stack((low, high), axis=-1)), (512, 8, 64)))
    centred = bb.emit(op.subtract(bb.emit(op.astype(joined, F16)), relax.const(8, F16)))
    scaled = bb.emit(op.multiply(centred, _weight(512, 8, 1)))
    return _linear(bb, x, bb.emit(op.reshape(scaled, (512, 512))))


def _int8(bb, x):
    return _linear(
        bb, x, bb.emit(op.multiply(bb.emit(op.astype(_integers(320, 256), F16)), _weight(320, 1)))
    )


def _float8(bb, x):
    return op.matmul(x, _weight(256, 320, dtype="float8_e4m3fn"), out_dtype=F32)


def _norm(bb, x):
    scale, shift = (_weight(768, dtype=F32, seed=seed) for seed in range(2))
    wide = bb.emit(op.nn.layer_norm(bb.emit(op.astype(x, F32)), scale, shift, axes=[-1]))
    return op.astype(wide, F16)


def _places(bb, x):
    hit = bb.emit(op.equal(x, relax.const(np.arange(200, 0, -2, dtype="int32"))))
    return op.astype(hit, F32)


WEIGHTS: dict[str, tuple] = {
    "transposed": (_transposed, ((64, 256), F16)),
    "straight": (_straight, ((64, 256), F16)),
    "straight_float32": (
        lambda bb, x: op.matmul(x, _weight(256, 512, dtype=F32)),
        ((37, 256), F32),
    ),
    "bfloat16": (lambda bb, x: _linear(bb, x, _weight(512, 256, dtype=BF16)), ((64, 256), BF16)),
    "odd": (_odd, ((100, 1001), F16)),
    "left": (_left, ((200, 96), F16)),
    "stacked_qkv": (_stacked_qkv, ((64, 256), F16)),
    "normed_qkv": (_normed_qkv, ((64, 256), F16)),
    "gated": (_gated, ((64, 256), F16)),
    "tied": (_tied, ((16,), "int64")),
    "one_weight_twice": (_one_weight_twice, ((64, 256), F16)),
    "experts": (_experts, ((4, 32, 256), F16)),
    "lora": (_lora, ((64, 512), F16)),
    "int4_one_row": (_int4, ((1, 512), F16)),
    "int4": (_int4, ((64, 512), F16)),
    "int8": (_int8, ((16, 256), F16)),
    "float8": (_float8, ((64, 256), "float8_e4m3fn")),
    "norm": (_norm, ((64, 768), F16)),
    "places": (_places, ((16, 100), "int32")),
}


def _held(name: str) -> tvm.IRModule:
    emit, *inputs = WEIGHTS[name]
    return module(emit, *inputs)


def _torch(make: Callable[[], nn.Module], *inputs: torch.Tensor) -> tvm.IRModule:
    torch.manual_seed(0)
    return load((make().eval(), inputs))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)),
    )


MODELS: dict[str, Callable[[], tvm.IRModule]] = {
    "batch_norm": partial(_torch, _convolutions, torch.zeros(2, 8, 14, 14)),
    "encoder_layer": partial(
        _torch,
        partial(nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True, norm_first=True),
        torch.zeros(2, 24, 64),
    ),
}


# ---- several functions


def _shared() -> tvm.IRModule:
    """Rows of a prefill and one of a decode through the same constants."""
    gamma, up, down = _weight(256), _weight(512, 256), _weight(256, 512)
    bb = relax.BlockBuilder()
    for name, rows in {"prefill": tirx.Var("n", "int64"), "decode": 1}.items():
        x = relax.Var("x", relax.TensorType((rows, 256), F16))
        with bb.function(name, [x]):
            with bb.dataflow():
                h = bb.emit(op.nn.rms_norm(x, gamma, axes=[-1]))
                h = _linear(bb, bb.emit(op.nn.gelu(_linear(bb, h, up))), down)
                y = bb.emit_output(op.add(h, x))
            bb.emit_func_output(y)
    return bb.get()


def _calls() -> tvm.IRModule:
    """One public function calls another."""
    bb = relax.BlockBuilder()
    kind = relax.TensorType((64, 256), F32)
    x = relax.Var("x", kind)
    with bb.function("inner", [x]):
        with bb.dataflow():
            y = bb.emit_output(op.tanh(bb.emit(op.multiply(x, relax.const(0.5)))))
        inner = bb.emit_func_output(y)
    x = relax.Var("x", kind)
    with bb.function("main", [x]):
        with bb.dataflow():
            called = bb.emit(relax.Call(inner, [x]))
            y = bb.emit_output(op.nn.softmax(bb.emit(op.add(called, x))))
        bb.emit_func_output(y)
    return bb.get()


class _Model(tvm_nn.Module):
    """An embedding, a layer and a head, of which two functions each run a part."""

    def __init__(self) -> None:
        super().__init__()
        self.words = tvm_nn.Embedding(1000, 128, F16)
        self.norm = tvm_nn.RMSNorm(128, -1, bias=False, dtype=F16)
        self.head = tvm_nn.Linear(128, 1000, bias=False, dtype=F16)

    def embed(self, words: tvm_nn.Tensor) -> tvm_nn.Tensor:
        return self.norm(self.words(words))

    def logits(self, h: tvm_nn.Tensor) -> tvm_nn.Tensor:
        return tvm_nn.op.softmax(self.head(tvm_nn.op.silu(h)).astype(F32), axis=-1)


def _exported() -> tvm.IRModule:
    words, h = tvm_nn.spec.Tensor(["n"], "int32"), tvm_nn.spec.Tensor([1, 128], F16)
    return _Model().export_tvm({"embed": {"words": words}, "logits": {"h": h}})[0]


def _paged() -> tvm.IRModule:
    """A language model with a paged cache of keys and values, whose functions are for one GPU."""
    shape = llm.Shape(width=256, inner=512, heads=4, groups=2, words=1000)
    return llm.language_model(shape, resolve_target(H200)[0])[0]


FUNCTIONS: dict[str, Callable[[], tvm.IRModule]] = {
    "shared": _shared,
    "calls": _calls,
    "exported": _exported,
    "branches": lambda: pipelines.cases({"kind": "llvm"})["several"].make(),
}
