"""Products of pairs of bfloat16 on a CPU: where they are used, and that they are right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax import op
from tvm.target import Target

from tvm_fusion.kernels.cpu.contraction.panels import CONSTANTS_ATTR, PANELS_ATTR, Panels
from tvm_fusion.kernels.cpu.machine import machine_of
from tvm_fusion.kernels.cpu.write import write_cpu

from ...support.helpers_tir import call, compile_cpu, cpu_target, poisoned
from ...support.kernel_cases import assert_close, fuse, gelu_of

BF16, F32 = "bfloat16", "float32"
INSTRUCTION = "vdpbf16ps"
X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "num-cores": 2}

runs_pairs = pytest.mark.skipif(
    not machine_of(None).dots_pairs, reason="this CPU has no AVX-512 BF16: it cannot run them"
)


def product(rows, terms, columns, *, turned=False, constant=False, batch=(), out=F32, more=None):
    """x W, or x W^T of a W that is stored `turned`."""
    weight = (*batch, columns, terms) if turned else (*batch, terms, columns)
    axes = [*range(len(batch)), len(batch) + 1, len(batch)]

    def emit(bb, x, w, *others):
        w = bb.emit(op.permute_dims(w, axes)) if turned else w
        y = op.matmul(x, w, out_dtype=out)
        return more(bb, bb.emit(y), *others) if more else y

    func = fuse(
        emit, ((*batch, rows, terms), BF16), (weight, BF16), *([((columns,), BF16)] if more else [])
    )
    return func.with_attr(CONSTANTS_ATTR, [1]) if constant else func


def small_integers(rng, *shape):
    """Numbers whose products and sums are exact in float32."""
    return rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16)


def run(kernel: tirx.PrimFunc, arrays, shape, dtype=F32):
    """The output of a kernel, which takes constants as it wants them."""
    arrays = list(arrays)
    for position, *how in kernel.attrs.get(PANELS_ATTR, ()):
        arrays[int(position)] = Panels.read(how).of(arrays[int(position)])
    (got,) = call(compile_cpu(kernel), arrays, [poisoned(shape, dtype)])
    return got


def calls_of(kernel: tirx.PrimFunc) -> int:
    """How often a kernel multiplies pairs."""
    found = []
    extern = tvm.ir.Op.get("tirx.call_pure_extern")
    look = lambda c: found.append(c) if c.op == extern else None  # noqa: E731
    tvm_ffi.structural_walk(kernel.body, [(tvm.ir.Call, lambda c: look(c))])
    return len(found)


def written(func: tirx.PrimFunc, exact: bool = False) -> tirx.PrimFunc:
    """The kernel for the CPU of the tests, which multiplies pairs."""
    with cpu_target():
        kernel = write_cpu(func, exact)
    assert calls_of(kernel) > 0
    return kernel


# ---- where


@pytest.mark.parametrize("processor", ["znver4", "sapphirerapids", "cooperlake"])
def test_processors_with_the_instruction_use_it(processor):
    target = Target({**X86, "mcpu": processor})
    with target:
        kernel = write_cpu(product(16, 64, 48))
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    assembly = tvm.tirx.build(mod, target=target, pipeline="s_tir").inspect_source("s")
    assert assembly.count(INSTRUCTION) >= calls_of(kernel) > 0
    assert "tvm_fusion_dot_pairs" not in assembly  # a function that is inlined everywhere


def test_sums_in_float64_are_none_of_pairs():
    with Target({**X86, "mcpu": "znver4"}):
        assert calls_of(write_cpu(product(5, 64, 48, out="float64"))) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "described",
    [
        {**X86, "mcpu": "znver3"},
        {**X86, "mcpu": "skylake-avx512"},
        {**X86, "mcpu": "znver4", "mattr": ["-avx512bf16"]},
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1", "num-cores": 2},
    ],
    ids=lambda d: d["mcpu"] + "".join(d.get("mattr", ())),
)
def test_processors_without_the_instruction_multiply_float32(described):
    target = Target(described)
    with target:
        kernel = write_cpu(product(16, 64, 48))
    assert calls_of(kernel) == 0
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    assembly = tvm.tirx.build(mod, target=target, pipeline="s_tir").inspect_source("s")
    assert INSTRUCTION not in assembly


@pytest.mark.parametrize("dtypes", [("float16", "float16"), (F32, F32), (BF16, F32), (F32, BF16)])
def test_other_types_are_multiplied_in_float32(dtypes):
    def emit(bb, x, w):
        x, w = (
            bb.emit(op.astype(a, F32)) if d == BF16 else a
            for a, d in zip((x, w), dtypes, strict=True)
        )
        return op.matmul(x, w)

    with Target({**X86, "mcpu": "znver4"}):
        kernel = write_cpu(fuse(emit, ((16, 64), dtypes[0]), ((64, 48), dtypes[1])))
    assert calls_of(kernel) == 0


def test_a_kernel_with_pairs_reads_back_from_its_script():
    with Target({**X86, "mcpu": "znver4"}):
        kernel = write_cpu(product(16, 64, 48))
    again = tvm.script.from_source(kernel.script())
    assert calls_of(again) == calls_of(kernel) > 0
    tvm.ir.assert_structural_equal(again, kernel, map_free_vars=True)


# ---- right


@runs_pairs
@pytest.mark.one_in(3)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("rows", "terms", "columns"),
    [
        (37, 331, 517),  # odd everywhere
        (33, 334, 130),  # pairs of an even number of terms lie in memory
        (5, 4, 17),
        (9, 33, 35),
        (6, 1202, 71),  # several blocks of terms
        (9, 4103, 33),
    ],
)
def test_sums_of_integers_are_exact(rows, terms, columns, turned, constant):
    rng = np.random.default_rng(terms)
    x = small_integers(rng, rows, terms)
    w = small_integers(rng, *((columns, terms) if turned else (terms, columns)))
    kernel = written(product(rows, terms, columns, turned=turned, constant=constant))
    got = run(kernel, [x, w], (rows, columns))
    wide = x.astype("float64"), w.astype("float64")
    np.testing.assert_array_equal(got, wide[0] @ (wide[1].T if turned else wide[1]))


@runs_pairs
def test_one_row_multiplies_the_panels_of_a_constant():
    rng = np.random.default_rng(1)
    x, w = small_integers(rng, 1, 96), small_integers(rng, 49, 96)
    kernel = written(product(1, 96, 49, turned=True, constant=True))
    got = run(kernel, [x, w], (1, 49))
    np.testing.assert_array_equal(got, x.astype("float64") @ w.astype("float64").T)


@runs_pairs
@pytest.mark.one_in(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_batches_are_exact(turned, constant):
    rng = np.random.default_rng(2)
    x = small_integers(rng, 3, 9, 41)
    w = small_integers(rng, *((3, 37, 41) if turned else (3, 41, 37)))
    kernel = written(product(9, 41, 37, turned=turned, constant=constant, batch=(3,)))
    got = run(kernel, [x, w], (3, 9, 37))
    wide = w.astype("float64")
    expected = x.astype("float64") @ (wide.swapaxes(1, 2) if turned else wide)
    np.testing.assert_array_equal(got, expected)


@runs_pairs
@pytest.mark.parametrize(
    ("rows", "terms", "constant"),
    [(1, 77, True), (13, 77, True), (13, 77, False), (37, 130, True), (37, 130, False)],
)
def test_a_linear_layer_with_gelu_is_right(rows, terms, constant):
    def more(bb, y, b):
        return op.nn.gelu(bb.emit(op.add(y, b)))

    rng = np.random.default_rng(terms)
    shapes = (rows, terms), (45, terms), (45,)
    x, w, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in shapes)
    func = product(rows, terms, 45, turned=True, constant=constant, out=BF16, more=more)
    got = run(written(func), [x, w, b], (rows, 45), BF16)
    wide = [a.astype("float64") for a in (x, w, b)]
    assert_close(got, gelu_of(wide[0] @ wide[1].T + wide[2]), BF16)


@runs_pairs
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("terms", [64, 65])
def test_a_computed_left_operand_is_rounded_as_the_graph_rounds_it(terms, exact):
    def emit(bb, x, y, w):
        return op.matmul(bb.emit(op.add(x, y)), w, out_dtype=F32)

    rng = np.random.default_rng(terms)
    x = rng.integers(128, 256, (9, terms)).astype(ml_dtypes.bfloat16)
    y = rng.integers(128, 256, (9, terms)).astype(ml_dtypes.bfloat16)
    w = rng.integers(-2, 3, (terms, 48)).astype(ml_dtypes.bfloat16)
    func = fuse(emit, (x.shape, BF16), (y.shape, BF16), (w.shape, BF16))
    got = run(written(func, exact), [x, y, w], (9, 48))
    summed = (x.astype(F32) + y.astype(F32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got, summed.astype("float64") @ w.astype("float64"))


@runs_pairs
@pytest.mark.parametrize("terms", [32, 33])
def test_operands_with_several_axes_of_terms_are_exact(terms):
    """Heads and features of an attention's output, which lie (head, row, feature)."""

    def emit(bb, x, w):
        x = bb.emit(op.permute_dims(x, [1, 0, 2]))
        return op.matmul(bb.emit(op.reshape(x, (11, 3 * terms))), w, out_dtype=F32)

    rng = np.random.default_rng(3)
    x, w = small_integers(rng, 3, 11, terms), small_integers(rng, 3 * terms, 50)
    got = run(written(fuse(emit, (x.shape, BF16), (w.shape, BF16))), [x, w], (11, 50))
    wide = x.astype("float64").transpose(1, 0, 2).reshape(11, 3 * terms)
    np.testing.assert_array_equal(got, wide @ w.astype("float64"))


@runs_pairs
@pytest.mark.parametrize("turned", [False, True])
def test_symbolic_sizes_are_exact(turned):
    m, k, n = (tirx.Var(name, "int64") for name in "mkn")
    kernel = compile_cpu(written(product(m, k, n, turned=turned)))
    rng = np.random.default_rng(6)
    for rows, terms, columns in ((13, 70, 45), (9, 71, 33), (1, 1, 1), (40, 601, 130)):
        x = small_integers(rng, rows, terms)
        w = small_integers(rng, *((columns, terms) if turned else (terms, columns)))
        (got,) = call(kernel, [x, w], [poisoned((rows, columns), F32)])
        wide = w.astype("float64")
        np.testing.assert_array_equal(got, x.astype("float64") @ (wide.T if turned else wide))


@runs_pairs
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_what_is_no_number_stays_in_its_row_and_column(turned, constant):
    rng = np.random.default_rng(4)
    x, w = small_integers(rng, 20, 35), small_integers(rng, 35, 40)
    x[7, 0] = x[19, 34] = np.nan
    w[34, 3] = np.inf  # the last term, behind which a zero is: not a NaN
    x[:, 34] = np.where(np.isnan(x[:, 34].astype(F32)), x[:, 34], 1)
    kernel = written(product(20, 35, 40, turned=turned, constant=constant))
    got = run(kernel, [x, np.ascontiguousarray(w.T) if turned else w], (20, 40))
    np.testing.assert_array_equal(got, x.astype("float64") @ w.astype("float64"))


@pytest.mark.parametrize("terms", [1, 2])
def test_sums_of_hardly_a_term_are_exact(terms):
    rng = np.random.default_rng(5)
    x, w = small_integers(rng, 9, terms), small_integers(rng, terms, 33)
    with cpu_target():
        kernel = write_cpu(product(9, terms, 33))
    np.testing.assert_array_equal(
        run(kernel, [x, w], (9, 33)), x.astype("float64") @ w.astype("float64")
    )
