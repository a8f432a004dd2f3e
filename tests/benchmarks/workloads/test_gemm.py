"""The suites of matrix products: what they hold, compute, and are compared with."""

import math

import pytest
import torch

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported

from .. import workloads
from ..peers.registry import outputs_of
from ..rows.accuracy import output_shapes, reference, relative_error
from ..rows.products import products, products_alone
from ..rows.together import limit_us
from ..run import run_suite
from .gemm import PLAIN_SHAPES
from .gemm_layers import TOKENS, token_counts
from .gemm_sweep import EPILOGUES, SWEEP_SHAPES, epilogue_of

SMALL = 0.02
GEMM, SWEEP = workloads.SUITES["gemm"], workloads.SUITES["gemm_sweep"]
PLAIN = [f"gemm_{m}x{n}x{k}" for m, n, k in PLAIN_SHAPES]
# On the CPU all plain ones in float16 compile to the same few kernels
COMPILED = [name for name in GEMM if name not in PLAIN] + ["gemm_256x1024x1024", *SWEEP[18:24]]


def small(name):
    return workloads.make(name, "cpu", workloads.dtype_of(name, "float32"), SMALL)


def test_the_suite_holds_the_sixteen_plain_products_and_what_is_around_others():
    assert len(PLAIN) == len(set(PLAIN)) == 16
    assert set(PLAIN) < set(GEMM)
    assert {"linear_bias_gelu", "swiglu_mlp", "gemv_int4", "block_tail", "moe"} < set(GEMM)
    plain = {name for name in GEMM if workloads.WORKLOADS[name].plain}
    assert plain - set(PLAIN) == {
        "gemm_bf16_4096x4096x4096",
        "gemm_fp8_4096x4096x4096",
        "gemm_fp32_4096x4096x4096",
        "bmm_512x64x64x64",
        "gemv_fp16",
    }


def test_the_sweep_is_sixty_shapes_with_ten_of_each_epilogue():
    assert len(SWEEP) == len(set(SWEEP)) == 60
    counts = [sum(epilogue_of(name) == epilogue for name in SWEEP) for epilogue in EPILOGUES]
    assert counts == [10] * 6
    plain = {name for name in SWEEP if workloads.WORKLOADS[name].plain}
    assert plain == {name for name in SWEEP if name.endswith("_plain")}
    for shape in ("300x4096x4096", "1000x1000x1000", "1500x3000x808"):
        assert f"sweep_{shape}_plain" in plain


@pytest.mark.parametrize(
    ("axis", "wanted"),
    [
        (0, {1, 3, 7, 16, 33, 64, 100, 127, 128, 200, 256, 300, 500, 512, 777, 1000, 1024, 1500}),
        (0, {2048, 3000, 4096}),
        (1, {16, 64, 333, 777, 1001, 4097}),
        (2, {16, 40, 999, 1001, 808, 16384}),
    ],
)
def test_the_sweep_has_sizes_of_every_kind(axis, wanted):
    assert wanted <= {shape[axis] for shape in SWEEP_SHAPES}


@pytest.mark.parametrize(
    ("suite", "count"), [(GEMM, len(GEMM)), (SWEEP, 60)], ids=["gemm", "sweep"]
)
def test_every_product_is_right_in_torch_and_of_the_order_of_one(suite, count):
    assert len(suite) == count
    for name in suite:
        instance = small(name)
        wanted, flop = reference(instance)
        with torch.no_grad():
            given = outputs_of(instance.for_torch(*instance.inputs))
        ceiling = 1e-5 if instance.dtype == "float32" else 5e-3
        assert relative_error(given, wanted) < ceiling, name
        assert [t.shape for t in output_shapes(instance)] == [t.shape for t in wanted], name
        assert flop > 0, name
        assert all(0.02 < float(t.std()) < 4 for t in wanted), name


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", COMPILED)
def test_every_kind_of_product_compiles_and_is_right_on_the_cpu(name):
    (row,) = run_suite([name], ["cublas"], "llvm", scale=SMALL, repeats=1, budget_s=0.01)["rows"]
    assert row["failures"] == {}
    assert row["error"] is not None
    assert row["ours_us"] > 0
    assert row["cublas_us"] > 0
    assert row["cublas_ratio"] == row["cublas_us"] / row["ours_us"]


def test_a_row_has_the_time_of_our_unfused_build_beside_it():
    (row,) = run_suite(["gate_up"], ["unfused"], "llvm", scale=SMALL, repeats=1)["rows"]
    assert row["failures"] == {}
    assert row["unfused_us"] > 0
    assert row["unfused_ratio"] == row["unfused_us"] / row["ours_us"]
    assert row["best_peer"] is None


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gemm_256x1024x1024", 1),
        ("linear_bias_gelu", 1),
        ("qkv", 3),
        ("swiglu_mlp", 3),
        ("lora_qkv", 9),
        ("moe", 9),
        ("gemv_int4", 1),
        ("attention_scores", 1),
        ("gemm_fp8_4096x4096x4096", 1),
    ],
)
def test_the_products_alone_are_those_that_the_workload_multiplies(name, count):
    instance = small(name)
    steps = products(instance)
    assert len(steps) == count
    flop = sum(2 * args[0].numel() * args[1].shape[-1] for _, args, _ in steps)
    assert flop == reference(instance)[1]
    assert len(products_alone(instance)()) == count


def test_a_product_alone_gives_what_the_workload_gives():
    instance = small("gemv_fp16")
    with torch.no_grad():
        assert torch.equal(products_alone(instance)()[0], instance.module(*instance.inputs))


def test_a_workload_without_products_has_none_to_time():
    with pytest.raises(Unsupported, match="softmax has no matrix product"):
        products_alone(small("softmax"))


def test_packed_weights_are_four_bits_each_from_the_lowest_with_zero_point_8():
    module = small("gemv_int4").module
    assert module.packed.dtype == torch.int32
    weight = module.weight()
    for row, column in [(0, 0), (1, 7), (2, 8), (3, 127)]:
        word = int(module.packed[row, column // 8]) & 0xFFFFFFFF
        value = (word >> 4 * (column % 8) & 15) - 8
        assert float(weight[row, column]) == float(
            torch.tensor(value, dtype=torch.float16) * module.scales[row, column // 128]
        )
    assert list(module.parameters()) == []


def test_experts_have_unequal_numbers_of_tokens_that_add_up():
    assert token_counts(sum(TOKENS), len(TOKENS)) == list(TOKENS)
    assert len(set(TOKENS)) > 2
    for total, experts in [(81, 3), (1000, 8)]:
        counts = token_counts(total, experts)
        assert sum(counts) == total
        assert min(counts) > 0


def test_a_limit_counts_packed_weights_and_their_scales():
    h200 = load_profile("nvidia_h200")
    moved = {
        "gemv_fp16": 11008 * 4096 * 2 + 4096 * 2 + 11008 * 2,
        "gemv_int8": 11008 * 4096 + 11008 * 2 + 4096 * 2 + 11008 * 2,
        "gemv_int4": 11008 * 4096 // 2 + 11008 * 32 * 2 + 8 * 4 + 4096 * 2 + 11008 * 2,
    }
    for name, wanted in moved.items():
        instance = workloads.make(name, "meta", "float16")
        limit = limit_us(instance, output_shapes(instance), 0, h200)
        assert limit == pytest.approx(1e6 * wanted / h200.hbm_bytes_per_s, rel=1e-9)


@pytest.mark.parametrize("name", PLAIN)
def test_full_sizes_are_those_that_the_name_says(name):
    m, n, k = map(int, name.split("_")[1].split("x"))
    instance = workloads.make(name, "meta", "float16")
    assert instance.shape == f"{m}x{k}"
    (output,) = output_shapes(instance)
    assert tuple(output.shape) == (m, n)
    h200 = load_profile("nvidia_h200")
    least = max(
        2 * m * n * k / h200.tensor_flop_per_s["float16"],
        2 * (m * k + n * k + m * n) / h200.hbm_bytes_per_s,
    )
    assert math.isclose(limit_us(instance, [output], 2 * m * n * k, h200), 1e6 * least)
