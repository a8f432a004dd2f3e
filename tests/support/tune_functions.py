"""Functions, inputs and searches for the tests of evolved schedules."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.relax import op
from tvm.s_tir import meta_schedule as ms

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.transform.apply.materialize import materialize
from tvm_fusion.tuning.search import evolve
from tvm_fusion.tuning.search.evolve import Evolved

from .graphs import module
from .kernel_cases import assert_close, softmax_of

CPU, H200 = load_profile("llvm"), load_profile("nvidia_h200")
LLVM, CUDA = CPU.to_target(), H200.to_target()
POPULATION = 12  # of a search that proposes up to ten at once; one of a session has 64


def chain(bb, x, y):
    return op.tanh(bb.emit(op.multiply(bb.emit(op.add(x, y)), x)))


def softmax(bb, x):
    return op.nn.softmax(x, -1)


def linear(bb, x, w, b):
    return op.nn.relu(bb.emit(op.add(bb.emit(op.matmul(x, w)), b)))


def layer_norm(bb, x, g, b):
    return op.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-5)


def layer_norm_of(x, g, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b


CASES: dict[str, tuple[Callable, tuple, Callable]] = {
    "chain": (chain, ((37, 123), (37, 123)), lambda x, y: np.tanh((x + y) * x)),
    "softmax": (softmax, ((33, 96),), softmax_of),
    "linear": (linear, ((24, 40), (40, 36), (36,)), lambda x, w, b: np.maximum(x @ w + b, 0)),
    "layer_norm": (layer_norm, ((33, 96), (96,), (96,)), layer_norm_of),
}


@cache
def fused(name: str) -> tirx.PrimFunc:
    """The one PrimFunc that this package makes of a model for a CPU."""
    emit, shapes, _ = CASES[name]
    mod = module(emit, *((shape, "float32") for shape in shapes))
    planned = Planned.of(mod, LLVM, CPU, load_policy(None))
    made = materialize(planned.low, planned.graph, planned.plan)
    (name,) = made.groups
    return made.mod[name].without_attr("global_symbol")


def arrays(func: tirx.PrimFunc, n: int = 1) -> list[np.ndarray]:
    """Inputs and a poisoned output; `n` for symbolic extents."""
    rng = np.random.default_rng(0)
    shapes = [
        [e.value if isinstance(e, tirx.IntImm) else n for e in p.ty.shape] for p in func.params
    ]
    *inputs, output = (rng.standard_normal(shape).astype("float32") for shape in shapes)
    return [*inputs, np.full_like(output, np.nan)]


def run(func: tirx.PrimFunc, values: list[np.ndarray]) -> np.ndarray:
    library, _ = build_functions(
        tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}), LLVM
    )
    tensors = [tvm.runtime.tensor(v) for v in values]
    library["kernel"](*tensors)
    return tensors[-1].numpy()


def assert_right(name: str, got: np.ndarray, values: list[np.ndarray]) -> None:
    reference = CASES[name][2](*(v.astype("float64") for v in values[:-1]))
    assert_close(got, reference, "float32")


def evolving(func: tirx.PrimFunc, target: tvm.target.Target, **options) -> Evolved:
    """A search whose cost model learns from the first batch on, among few schedules."""
    model = ms.cost_model.XGBModel(num_warmup_samples=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evolve, "POPULATION", POPULATION)
        return Evolved(func, target, model, **options)


def texts_of(search: Evolved, count: int) -> list[str]:
    """The next schedules that a search proposes."""
    return [text for text, _ in search.next(count)]
