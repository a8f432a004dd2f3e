"""Modules with CUDA kernels of each class, as text of TVMScript and back."""

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.build.lowering import is_tirx
from tvm_fusion.transform import Fuse
from tvm_fusion.transform.apply.kernel_bodies import (
    S_TIR_ATTR,
    WITHOUT_ATTR,
    with_layouts,
    with_plain_scalars,
    with_roots,
    without_layouts,
    without_root,
)

from ..support.runtime_cases import relax_module

HALF, SINGLE = "float16", "float32"
ROWS = tirx.Var("n", "int64")


def product(bb, x, w):
    return op.nn.relu(bb.emit(op.matmul(x, w)))


def skinny(bb, x, w):
    return product(bb, x, bb.emit(op.permute_dims(w)))


def chain(bb, x, y):
    return op.multiply(bb.emit(op.exp(x)), y)


def turned(bb, x, y):
    return op.add(bb.emit(op.permute_dims(x)), y)


def backward(bb, x, dy):
    """The gradients of x times its reciprocal length, and of a scale and an offset of columns."""
    squares = bb.emit(op.mean(op.multiply(x, x), axis=1, keepdims=True))
    scale = bb.emit(op.rsqrt(op.add(squares, relax.const(1e-5, SINGLE))))
    normal = bb.emit(op.multiply(x, scale))
    inner = bb.emit(op.mean(op.multiply(dy, normal), axis=1, keepdims=True))
    dx = bb.emit(op.multiply(scale, op.subtract(dy, op.multiply(normal, inner))))
    dgamma = bb.emit(op.sum(op.multiply(dy, normal), axis=0))
    return relax.Tuple([dx, dgamma, bb.emit(op.sum(dy, axis=0))])


def attention(causal=None):
    return lambda bb, q, k, v: op.nn.attention(q, k, v, causal_mask=causal)


def depthwise(bb, x, w):
    return op.nn.conv2d(x, w, padding=1, groups=24, data_layout="NHWC")


# Kernel class, operators, inputs
CASES = {
    "pointwise": ("pointwise", chain, ((128, 1024), HALF), ((128, 1024), HALF)),
    "symbolic": ("pointwise", chain, ((ROWS, 1023), HALF), ((ROWS, 1023), HALF)),
    "transpose": ("transpose", turned, ((1000, 1031), SINGLE), ((1031, 1000), SINGLE)),
    "row": ("row", lambda bb, x: op.nn.softmax(x), ((512, 1000), HALF)),
    "symbolic_row": ("row", lambda bb, x: op.nn.softmax(x), ((ROWS, 4096), HALF)),
    "column": ("column", lambda bb, x: op.sum(x, axis=0), ((2048, 1024), SINGLE)),
    "mixed": ("mixed", backward, ((4096, 1024), SINGLE), ((4096, 1024), SINGLE)),
    "gemm": ("gemm", product, ((2048, 1024), HALF), ((1024, 2048), HALF)),
    "odd_gemm": ("gemm", product, ((200, 136), HALF), ((136, 72), HALF)),
    "skinny_gemm": ("gemm", skinny, ((1, 4096), HALF), ((4096, 4096), HALF)),
    "float32_gemm": ("gemm", product, ((512, 512), SINGLE), ((512, 512), SINGLE)),
    "depthwise": ("convolution", depthwise, ((8, 56, 56, 24), HALF), ((24, 1, 3, 3), HALF)),
    "attention": ("attention", attention("TopLeft"), *[((2, 512, 8, 64), HALF)] * 3),
    "decode": (
        "attention",
        attention(),
        *[((4, n, 32, 128), HALF) for n in (1, 2048, 2048)],
    ),
}


def module(case: str) -> tvm.IRModule:
    _, emit, *inputs = CASES[case]
    return relax_module(emit, *[(f"x{i}", *given) for i, given in enumerate(inputs)])


@pytest.mark.one_in(30)
@pytest.mark.parametrize("device", ["nvidia_a100", "nvidia_h100"])
@pytest.mark.parametrize("case", CASES)
def test_a_fused_module_reads_back_from_its_script(case, device):
    found = []
    fuse = Fuse(device, on_plan=lambda fused: found.extend(fused.plan.groups))
    mod = fuse(module(case))
    assert CASES[case][0] in {group.kernel_class for group in found}
    kernels = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc) and is_tirx(f)]
    assert kernels
    again = tvm.script.from_source(mod.script(show_meta=True))
    tvm.ir.assert_structural_equal(again, mod, map_free_vars=True)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("case", CASES)
def test_layouts_come_back_before_a_kernel_is_lowered(case):
    target, hw = resolve_target("nvidia_h100")
    bare = Planned.of(module(case), target, hw, load_policy(None)).fuse()
    rooted = with_roots(bare)
    kernels = {
        gvar: func
        for gvar, func in bare.functions_items()
        if isinstance(func, tirx.PrimFunc) and is_tirx(func)
    }
    assert kernels
    for gvar, func in kernels.items():
        assert S_TIR_ATTR in rooted[gvar].attrs
        tvm.ir.assert_structural_equal(without_root(rooted[gvar]), func)


def scalar_kernel(layout: object, index: int | None) -> tirx.PrimFunc:
    """Stores to a buffer of one element at `index`, None for a loop's variable."""
    out = tirx.decl_buffer((4,), SINGLE, "out", layout=layout)
    one = tirx.decl_buffer((1,), SINGLE, "one", scope="local", layout=None)
    i = tirx.Var("i", "int32")
    place = i if index is None else tirx.IntImm("int32", index)
    store = tirx.BufferStore(one, tirx.const(1.0, SINGLE), [place])
    read = tirx.BufferStore(out, tirx.BufferLoad(one, [place]), [i])
    loop = tirx.For(i, 0, 1, tirx.ForKind.SERIAL, tirx.SeqStmt([store, read]))
    return tirx.PrimFunc([out], tirx.SeqStmt([tirx.AllocBuffer(one), loop]))


def test_the_only_place_of_a_buffer_is_its_first():
    func = with_plain_scalars(scalar_kernel(None, None))
    tvm.ir.assert_structural_equal(func, scalar_kernel(None, 0))
    tvm.ir.assert_structural_equal(with_plain_scalars(func), func)


def test_buffers_without_a_layout_are_remembered():
    from tvm.tirx.layout import S, TileLayout

    func = scalar_kernel(TileLayout(S[(4,)]), 0)
    changed = without_layouts(func)
    assert list(changed.attrs[WITHOUT_ATTR]) == [1]
    assert changed.params[0].ty.layout is None
    tvm.ir.assert_structural_equal(with_layouts(changed), func)
    assert with_layouts(func).same_as(func)


def test_a_layout_that_no_shape_tells_stays():
    from tvm.tirx.layout import S, TileLayout

    func = scalar_kernel(TileLayout(S[(2, 2) : (1, 2)]), 0)
    assert without_layouts(func).same_as(func)
