"""The suites beyond the twelve: what they hold, compute, and have to move."""

import importlib
import math
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from tvm_fusion.config import load_profile

from .. import peers, workloads
from ..rows.accuracy import output_shapes, relative_error
from ..rows.together import limit_us
from ..run import run_suite
from .instance import Instance, Sizes
from .training import _dropout

SMALL = 0.02
MORE = workloads.SUITES["memory_more"]
FP8 = torch.float8_e4m3fn


def test_the_suites_are_the_twelve_and_more_and_all():
    assert len(workloads.SUITES["memory"]) == 12
    assert len(MORE) >= 24
    assert set(workloads.SUITES["memory"]).isdisjoint(MORE)
    assert {*workloads.SUITES["memory"], *MORE} < set(workloads.SUITES["all"])
    dtypes = {workloads.dtype_of(name, "none") for name in MORE}
    assert dtypes == {"float16", "bfloat16", "float32"}


@pytest.fixture
def twins(monkeypatch):
    """The modules of JAX functions, imported anew with a JAX that is there for its names alone."""
    folder = f"{peers.__name__}.jax"
    names = [f"{folder}.{path.stem}" for path in (Path(peers.__file__).parent / "jax").glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("jax", "jax.numpy"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    yield importlib.import_module(f"{folder}.functions").FUNCTIONS
    for name in names:
        sys.modules.pop(name, None)


def test_every_workload_for_a_gpu_has_a_twin_in_jax(twins):
    translated = {*workloads.CONV, *workloads.VISION, *workloads.CONTIGUOUS}
    others = set(workloads.WORKLOADS) - set(workloads.ON_CPUS) - translated
    assert others - set(twins) == set()


TRANSLATED = [n for n in workloads.VISION if n.endswith("_b1")]
TRANSLATED += ["resnet_b1_stem", "up_8_4_512_512", "up3_8_2_128_64", "audio_3001_3_96_100"]


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", TRANSLATED)
def test_every_operator_of_a_network_is_translated_to_jax(twins, name):
    exported = importlib.import_module(f"{peers.__name__}.jax.exported")
    function, arrays = exported.function_of(workloads.make(name, "cpu", "float32", 0.1))
    assert callable(function)
    assert len(arrays) > 1


@pytest.mark.one_in(36)
@pytest.mark.parametrize("name", [*MORE, *workloads.SUITES["small"]])
def test_every_further_workload_compiles_and_is_right_on_the_cpu(name):
    (row,) = run_suite([name], [], "llvm", scale=SMALL, repeats=1, budget_s=0.01)["rows"]
    assert row["failures"] == {}
    assert row["dtype"] == workloads.dtype_of(name, "none")
    assert row["error"] is not None
    assert row["ours_us"] > 0
    assert row["launches"] >= 1


@pytest.mark.parametrize(
    ("full", "scaled"), [(1, 1), (63, 63), (64, 64), (1000, 64), (4096, 81), (65537, 1311)]
)
def test_scaled_extents_keep_what_is_small_and_what_is_odd(full, scaled):
    assert Sizes("cpu", torch.float32, SMALL).extent(full) == scaled
    assert Sizes("cpu", torch.float32, 1.0).extent(full) == full


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("argmax_32000", 8192 * 32000 * 2 + 8192 * 8),
        ("quantise_int8", 8192 * 5120 * (2 + 1) + 8192 * 4),
        ("quantise_fp8", 8192 * 4096 * (2 + 1) + 8192 * 4),
        ("cross_entropy_gradient_bf16", 4096 * 32000 * (2 + 2) + 4096 * 8),
        ("sum_middle_axis", 32 * (1024 + 1) * 2048 * 2),
        ("concat_slice_pad", 4096 * (8189 + 1000 + 9192) * 2 + 9192 * 2),
        ("layernorm_backward", 8192 * 4096 * 3 * 2 + 4096 * 3 * 2),
        ("softmax_128256_bf16", 4096 * 128256 * 2 * 2),
    ],
)
def test_a_limit_counts_each_byte_in_the_type_that_it_has(name, moved):
    h200 = load_profile("nvidia_h200")
    instance = workloads.make(name, "meta", workloads.dtype_of(name, "none"))
    limit = limit_us(instance, output_shapes(instance), 0, h200)
    assert limit == pytest.approx(1e6 * moved / h200.hbm_bytes_per_s, rel=1e-9)


def test_rows_of_a_table_that_no_index_names_are_not_counted():
    instance = workloads.make("embedding_rmsnorm_bf16", "cpu", "bfloat16", SMALL)
    table, labels, _ = instance.inputs
    assert instance.unread_bytes == (table.shape[0] - len(set(labels.tolist()))) * table[0].nbytes
    assert instance.unread_bytes > 0


def test_an_input_given_twice_is_read_once():
    x = torch.empty(1024)
    twice = Instance("twice", torch.nn.Identity(), (x, x), "float32")
    once = Instance("once", torch.nn.Identity(), (x,), "float32")
    h200 = load_profile("nvidia_h200")
    assert limit_us(twice, [x], 0, h200) == limit_us(once, [x], 0, h200)


@pytest.mark.parametrize("rows", [8192, 65536])
def test_dropout_drops_a_tenth_everywhere_and_by_the_seed(rows):
    seeds = [torch.tensor([seed], dtype=torch.int32) for seed in (1, 2, -7)]
    kept = [_dropout(torch.ones(rows // 64, 1024), seed) != 0 for seed in seeds]
    for mask in kept:
        assert mask.float().mean() == pytest.approx(0.9, abs=0.005)
        assert mask.float().mean(0).sub(0.9).abs().max() < 6 * math.sqrt(0.09 / mask.shape[0])
        assert mask.float().mean(1).sub(0.9).abs().max() < 6 * math.sqrt(0.09 / mask.shape[1])
    both = (kept[0] & kept[1]).float().mean()
    assert both == pytest.approx(0.81, abs=0.005)  # independent of each other


@pytest.mark.parametrize(
    ("given", "wanted", "error"),
    [
        (torch.tensor([1, -3, 5, 0]).char(), torch.tensor([1, -3, 5, 0]).char(), 0.0),
        (torch.tensor([1, -3, 5, 0]).char(), torch.tensor([1, -4, 5, 0]).char(), 0.25),
        (torch.tensor([1, -3, 5, 0]).char(), torch.tensor([1, -5, 5, 0]).char(), 1.0),
        (torch.tensor([448.0, -1.0]).to(FP8), torch.tensor([416.0, -1.0]).to(FP8), 0.5),
        (torch.tensor([0.0, -1.0]).to(FP8), torch.tensor([-0.0, -1.0]).to(FP8), 0.0),
        (torch.tensor([448.0, -1.0]).to(FP8), torch.tensor([384.0, -1.0]).to(FP8), 1.0),
        (torch.tensor([math.nan, 1.0]).to(FP8), torch.tensor([448.0, 1.0]).to(FP8), math.inf),
        (torch.tensor([1, 2]).int(), torch.tensor([1, 2]), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0),
    ],
    ids=[
        "int8",
        "a step",
        "two steps",
        "fp8",
        "signed zero",
        "two fp8 steps",
        "NaN",
        "index",
        "no",
    ],
)
def test_whole_numbers_and_8_bit_floats_are_compared_by_steps(given, wanted, error):
    assert relative_error([given], [wanted]) == error
