"""Attention on a CPU: numbers against float64, what is left out, and what is refused."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from tests.support.attention_cases import CASES
from tests.support.attention_graphs import AttentionCase, one_group
from tests.support.attention_random import CONFIGURATIONS
from tests.support.attention_random_graphs import module_of
from tests.support.attention_random_numbers import ceilings, error, expected, numbers
from tvm_fusion.config.targets import cpu_target
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.attention.cpu.kernel import write_attention
from tvm_fusion.kernels.attention.cpu.tile import attention_tile, padded_queries
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.cpu.loops import pieces
from tvm_fusion.kernels.cpu.machine import Machine, machine_of

BY_NAME = {case.name: case for case in CASES}
AVX512, AVX2, NEON = Machine(64, 32, 2), Machine(32, 16, 2), Machine(16, 32, 2)
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def run(func, inputs, machine=None):
    """Outputs of the CPU kernel of an attention, on poisoned memory."""
    attention = analyze_attention(func)
    kernel = write_attention(func, attention, machine or machine_of(None))
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=cpu_target())
    arrays = [tvm.runtime.tensor(x) for x in inputs]
    sizes = sizes_of(func, inputs)
    for param in attention.params[len(inputs) :]:
        shape = [int(sizes.get(e, e)) if not isinstance(e, int) else e for e in param.shape]
        arrays.append(tvm.runtime.tensor(np.full(shape, np.nan, NUMPY[param.dtype])))
    built["main"](*arrays)
    return [a.numpy() for a in arrays[len(inputs) :]]


def sizes_of(func, inputs):
    """What the symbolic sizes are."""
    found = {}
    for param, array in zip(func.params, inputs, strict=False):
        for extent, size in zip(param.ty.shape, array.shape, strict=True):
            if isinstance(extent, tvm.ir.Var):
                found[extent] = size
    return found


def check(case: AttentionCase, machine=None):
    func, inputs = case.built()
    for got, wanted in zip(run(func, inputs, machine), case.expected(), strict=True):
        assert not np.isnan(got.astype("float64")).any()
        finite = np.isfinite(wanted)
        assert (np.isneginf(got.astype("float64")) == np.isneginf(wanted)).all()
        apart = np.abs(got.astype("float64") - wanted, where=finite, out=np.zeros(wanted.shape))
        largest = np.abs(wanted, where=finite, out=np.zeros(wanted.shape)).max()
        assert apart.max() <= TOLERANCE[case.sizes.dtype] * largest, case.name


# All spellings take minutes to compile: a third of them in each run.
SPELLINGS = [
    name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.nightly)
    for i, name in enumerate(BY_NAME)
]


@pytest.mark.one_in(72)
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_close_to_float64(name):
    check(BY_NAME[name].with_sizes(M=19, N=19))


SEVERAL_BLOCKS = (
    "[B, S, H * D] with head permutes",
    "cross attention with logsumexp",
    "causal by index",
    "causal, aligned at the end",
    "window on both sides",
    "added mask [B, 1, M, N]",
    "document ids",
    "softcap and causal",
    "bfloat16",
    "rows that see no key are 0",
)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", SEVERAL_BLOCKS)
def test_several_blocks_of_keys_and_a_tail_are_close_to_float64(name):
    check(BY_NAME[name].with_sizes(M=300, N=300, B=1, H=2, G=1))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("machine", [AVX512, AVX2, NEON], ids=["avx512", "avx2", "neon"])
@pytest.mark.parametrize(("queries", "keys"), [(8, 2), (33, 129), (97, 300)])
def test_tiles_of_every_machine_are_close_to_float64(machine, queries, keys):
    check(BY_NAME["float32"].with_sizes(M=queries, N=keys, D=17, E=23, B=1), machine)


HALVES = {"dtype": "bfloat16", "B": 1, "H": 2, "G": 1}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bfloat16", {"M": 33, "N": 129, "D": 64, "E": 23}),
        ("bfloat16", {"M": 97, "N": 300, "D": 17, "E": 32}),  # no pairs of terms
        ("causal by index", {"M": 301, "N": 301}),
        ("packed QKV", {"M": 41, "N": 41}),
        ("all in float32, cast at the end", {"M": 41, "N": 41}),  # weights are not rounded
    ],
)
def test_bfloat16_is_close_to_float64(name, sizes):
    check(BY_NAME[name].with_sizes(**HALVES, **sizes))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "sizes", "terms", "keys"),
    [
        ("bfloat16", {}, True, True),
        ("bfloat16", {"D": 17}, False, True),
        ("all in float32, cast at the end", {}, True, False),
        ("rotated q and k", {}, False, True),
        ("bfloat16", {"dtype": "float16"}, False, False),
    ],
)
@pytest.mark.parametrize("has_pairs", [True, False])
def test_products_of_bfloat16_multiply_pairs_where_the_machine_does(
    name, sizes, terms, keys, has_pairs
):
    func, _ = BY_NAME[name].with_sizes(**{**HALVES, "M": 41, "N": 41, **sizes}).built()
    machine = dataclasses.replace(AVX512, dots_pairs=has_pairs)
    script = write_attention(func, analyze_attention(func), machine).script()
    held = re.findall(r'(queries|weights)\w* = T.alloc_buffer\(.*"uint32"', script)
    assert ("queries" in held, "weights" in held) == (has_pairs and terms, has_pairs and keys)
    assert ("tvm_fusion_dot_pairs" in script) == (has_pairs and (terms or keys))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", [c.seed for c in CONFIGURATIONS if c.symbolic and c.M > 8][:4])
def test_symbolic_sizes_are_close_to_float64(seed):
    config = CONFIGURATIONS[seed].small()
    config = dataclasses.replace(config, M=max(config.M, 21), N=max(config.N, 21))
    mod, inputs = module_of(config), numbers(config)
    group = one_group(mod)
    named = dict(zip((p.name for p in mod["main"].params), inputs.values(), strict=True))
    arrays = [
        to_numpy(named[i.name]) if isinstance(i, relax.Var) else i.value.numpy()
        for i in group.inputs
        if not isinstance(i, relax.ShapeExpr)
    ]
    found = run(group.func, arrays)
    outputs = [torch.from_numpy(x.astype(np.float64)) for x in found]
    outputs = [outputs[group.outputs.index(i)] for i in range(len(outputs))]
    found = error(config, outputs, expected(config, inputs))
    limits = ceilings(config)
    assert all(found[name] <= limits[name] for name in found), found


def to_numpy(x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def test_keys_that_no_query_sees_are_not_read():
    case = BY_NAME["causal by index"].with_sizes(M=40, N=300, B=1)
    func, (q, k, v) = case.built()
    k[:, :, 128:] = v[:, :, 128:] = np.nan
    (got,) = run(func, (q, k, v))
    assert not np.isnan(got.astype("float64")).any()


@pytest.mark.parametrize(
    ("length", "lanes", "found"),
    [
        (64, 16, [(0, 16), (16, 16), (32, 16), (48, 16)]),
        (23, 16, [(0, 16), (16, 4), (20, 2), (22, 1)]),
        (1, 16, [(0, 1)]),
        (7, 8, [(0, 4), (4, 2), (6, 1)]),
    ],
)
def test_pieces_are_powers_of_two_that_cover_a_length(length, lanes, found):
    assert pieces(length, lanes) == found


@pytest.mark.parametrize(
    ("queries", "vectors"), [(8, 1), (16, 1), (17, 2), (33, 1), (81, 2), (256, 2), (1000, 2)]
)
def test_a_tile_leaves_few_lanes_idle(queries, vectors):
    tile = attention_tile(queries, 64, 64, AVX512)
    assert tile.vectors == vectors
    assert padded_queries(queries, 16)[0] < queries + tile.queries


@pytest.mark.parametrize("machine", [AVX512, AVX2, NEON])
def test_register_tiles_fit_the_registers(machine):
    tile = attention_tile(300, 64, 80, machine)
    for rows in (tile.score_rows, tile.result_rows):
        assert rows * tile.vectors + tile.vectors + 1 <= machine.vector_registers


def test_few_queries_and_symbolic_heads_are_refused():
    with pytest.raises(Unsupported, match="7 queries"):
        attention_tile(7, 64, 64, AVX512)
    with pytest.raises(Unsupported, match="symbolic"):
        attention_tile(64, tvm.tirx.Var("n", "int64"), 64, AVX512)
