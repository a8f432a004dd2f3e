"""Decode attention on CUDA: units and rows, bounds of the keys, shared memory, registers, refusals,
and predicted times beside measured ones."""

import dataclasses
import json
import math
from itertools import groupby
from pathlib import Path

import pytest
from tvm import tirx

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.attention.decode.config import MATRIX, MAX_FEATURES, Tile
from tvm_fusion.kernels.attention.decode.kernel import (
    DecodeConfig,
    attention_decode_ranked,
    emit_attention_decode,
)
from tvm_fusion.kernels.attention.decode.problem import read_decode
from tvm_fusion.kernels.attention.decode.rank import DecodeSizes, decode_seconds, rank
from tvm_fusion.kernels.contraction.model import Operand
from tvm_fusion.kernels.program.expr import constant, substitute

from ...support.cuda_on_cpu import compile_cubins
from ...support.decode_cases import Sizes, attention_of, int64

H200, A100, RTX4090 = (load_profile(name) for name in ("nvidia_h200", "nvidia_a100", "rtx4090"))
SMALL = Sizes(2, 4, 2, 3, 70, 64, 64)
# Kernel times on an H200, 2026-11-22, with a clean L2: sizes, configuration, microseconds.
MEASURED = Path(__file__).parents[2] / "data" / "attention_decode_h200.jsonl"


# ---- units, rows, bounds


def test_heads_that_share_keys_are_rows_of_one_unit():
    problem = read_decode(attention_of(Sizes(2, 8, 4, 3, 70, 64, 64)), H200)
    assert (problem.unit_count, problem.rows, problem.chunks) == (4, 12, 1)


def test_a_batch_that_shares_keys_is_rows_too():
    attention = attention_of(Sizes(4, 2, 1, 1, 70, 64, 64))
    first = {attention.batch[0].var: int64(0)}

    def of_first(operand):
        load = operand.value.value
        places = [substitute(index, first) for index in load.indices]
        return Operand(tirx.Cast("float32", tirx.BufferLoad(load.source, places)))

    shared = {"k": of_first(attention.k), "v": of_first(attention.v)}
    problem = read_decode(dataclasses.replace(attention, **shared), H200)
    assert (problem.unit_count, problem.rows) == (2, 4)


def test_only_bounds_that_no_row_changes_are_left_out_of_the_points():
    lengths = ("lengths", (3,), "int32")
    alone = attention_of(
        Sizes(3, 4, 2, 1, 70, 64, 64),
        extra=[lengths],
        visible=lambda p: p.n < tirx.Cast("int64", p.load("lengths", p.b)),
    )
    own = read_decode(alone, H200).range
    assert len(own.below) == 1
    assert not own.least
    assert own.rest is None
    causal = attention_of(SMALL, visible=lambda p: p.n <= p.m + int64(60))
    own = read_decode(causal, H200).range
    assert len(own.below) == 1
    assert own.rest is not None


# ---- shared memory and registers


@pytest.mark.parametrize("head", range(16, MAX_FEATURES + 1, 16))
def test_rows_of_a_matrix_lie_in_different_banks_and_copies_fill_whole_lines(head):
    tile = Tile(2 * head, 16, 0)
    per_row = tile.width // 16
    places = [
        [row * per_row + (chunk ^ tile.turn(row)) for chunk in range(per_row)] for row in range(16)
    ]
    for first in range(0, 16, MATRIX):
        for chunk in range(per_row):
            assert len({places[first + r][chunk] % 8 for r in range(MATRIX)}) == MATRIX
    flat = [place for row in places for place in row]
    for i in range(0, len(flat), 8):
        assert sorted(flat[i : i + 8]) == list(range(i, i + 8))


REAL = {
    "long": Sizes(32, 32, 4, 1, 8192, 128, 128),
    "single": Sizes(1, 32, 4, 1, 2048, 128, 128),
    "rows16": Sizes(16, 64, 16, 1, 4096, 128, 128),
    "rows32": Sizes(16, 64, 8, 4, 4096, 128, 128),
    "head64": Sizes(16, 32, 1, 1, 4096, 64, 64),
    "head96": Sizes(16, 32, 4, 1, 4096, 96, 96),
    "head80": Sizes(16, 32, 8, 2, 4096, 80, 80),
    "head256": Sizes(4, 16, 8, 2, 4096, 256, 256),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("hw", "arch", "names"),
    [
        (H200, "sm_90a", tuple(REAL)),
        (A100, "sm_80", ("long", "rows32", "head256")),
        (RTX4090, "sm_89", ("rows16", "head80", "head256")),
    ],
    ids=["sm_90a", "sm_80", "sm_89"],
)
def test_nothing_spills_at_real_sizes(hw, arch, names):
    kernels = {}
    for name in names:
        attention = attention_of(REAL[name])
        ranked = attention_decode_ranked(attention, hw)
        configs = [ranked[0][1]]
        if name in ("long", "rows32"):
            configs += [c for _, c in ranked if c.step != configs[0].step][:1]
        for config in configs:
            kernels[f"{name}_{config.step}"] = emit_attention_decode(attention, hw, config)
    spills = {k.kernel: k.spill_bytes for k in compile_cubins(kernels, arch) if k.spill_bytes}
    # ptxas prefers 128 registers, and 8 bytes outside, to a few registers more.
    assert all(name.startswith("head80") and spilt <= 8 for name, spilt in spills.items()), spills


# ---- ranking


def measured():
    """(sizes, {configuration: microseconds}) of each case."""
    rows = map(json.loads, MEASURED.read_text().splitlines())
    cases = {case: list(own) for case, own in groupby(rows, key=lambda row: row["case"])}
    return {
        case: (
            DecodeSizes(**own[0]["sizes"]),
            {DecodeConfig(**row["config"]): row["us"] for row in own},
        )
        for case, own in cases.items()
    }


def test_predictions_are_near_the_measurements():
    errors = [
        math.log(decode_seconds(sizes, config, H200) * 1e6 / us)
        for sizes, table in measured().values()
        for config, us in table.items()
    ]
    assert len(errors) >= 37
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) <= 0.03
    assert max(map(abs, errors)) <= 0.065


@pytest.mark.parametrize("case", measured())
def test_the_first_of_a_ranking_is_measured_to_be_near_the_best(case):
    sizes, table = measured()[case]
    _, first = rank(sizes, H200)[0]
    assert table[first] <= 1.02 * min(table.values())


def test_few_units_are_split_over_clusters_where_the_device_has_them():
    attention = attention_of(REAL["single"])
    assert attention_decode_ranked(attention, H200)[0][1].split == 8
    assert all(config.split == 1 for _, config in attention_decode_ranked(attention, A100))
    seconds = [s for s, _ in attention_decode_ranked(attention_of(REAL["long"]), H200)]
    assert seconds == sorted(seconds)


# ---- refusals


@pytest.mark.parametrize(
    ("sizes", "how", "why"),
    [
        (Sizes(1, 4, 1, 200, 70, 64, 64), {}, "200 queries"),
        (Sizes(1, 4, 1, 1, 70, 64, 512), {}, "512 features"),
        (Sizes(1, 4, 1, 1, 70, 33, 33), {}, "odd addresses"),
        (SMALL, {"dtype": "float32"}, "float32 operands"),
    ],
)
def test_what_it_does_not_take_is_refused(sizes, how, why):
    with pytest.raises(Unsupported, match=why):
        emit_attention_decode(attention_of(sizes, **how), H200)


def test_keys_that_are_computed_are_refused():
    attention = attention_of(SMALL)
    computed = Operand(attention.k.value * constant(2, "float32"))
    with pytest.raises(Unsupported, match="keys are computed"):
        emit_attention_decode(dataclasses.replace(attention, k=computed), H200)


@pytest.mark.parametrize(
    ("config", "hw", "why"),
    [
        (DecodeConfig(2, 4, 16, 3), A100, "takes clusters"),
        (DecodeConfig(9, 4, 16, 3), H200, "at most 8 blocks"),
        (DecodeConfig(1, 8, 32, 6), H200, "bytes of shared memory"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(config, hw, why):
    with pytest.raises(Unsupported, match=why):
        emit_attention_decode(attention_of(REAL["long"]), hw, config)
