"""The time model of attention beside measured kernels, and what it must not get wrong."""

import dataclasses
import json
import math
from itertools import groupby
from pathlib import Path

import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.attention.decode.rank import attention_decode_ranked
from tvm_fusion.kernels.attention.hopper.config import FEW_KEYS
from tvm_fusion.kernels.attention.mma.kernel import attention_mma_ranked
from tvm_fusion.kernels.attention.time import (
    AttentionShape,
    AttentionTile,
    MmaTile,
    hopper_time,
    mma_time,
    moved_bytes,
    predict,
)

from ...support.attention_by_hand import Form, Sizes, attention
from ...support.decode_cases import Sizes as DecodeSizes
from ...support.decode_cases import attention_of

H200, POLICY = load_profile("nvidia_h200"), load_policy(None)
# Kernel times on an H200 (2026-11-22, 2026-11-23), clean L2: attention, tile, microseconds.
MEASURED = Path(__file__).parents[2] / "data" / "attention_h200.jsonl"
MEASURED_MMA = MEASURED.with_name("attention_mma_h200.jsonl")
PLAIN = AttentionShape(32, 1, 2048, 2048, 128, 128, "float16")


def measured(least_keys=1):
    """(case, predicted microseconds, measured microseconds) of all measured kernels of the Hopper
    form whose tiles have so many keys.
    """
    return [
        (row["case"], hopper_time(shape, tile, H200).seconds * 1e6, row["us"])
        for row, shape, tile in rows_of(MEASURED, AttentionTile)
        if tile.block_n >= least_keys
    ]


def measured_mma():
    """As `measured`, of the mma.sync form."""
    return [
        (row["case"], mma_time(shape, tile, H200).seconds * 1e6, row["us"])
        for row, shape, tile in rows_of(MEASURED_MMA, MmaTile)
    ]


def rows_of(path, tile):
    rows = map(json.loads, path.read_text().splitlines())
    return [(row, AttentionShape(**row["shape"]), tile(**row["tile"])) for row in rows]


def test_predictions_are_near_the_measurements():
    errors = [math.log(predicted / us) for _, predicted, us in measured()]
    assert len(errors) >= 150
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) <= 0.07
    assert max(map(abs, errors)) <= 0.25


def test_predictions_of_mma_sync_are_near_the_measurements():
    errors = [math.log(predicted / us) for _, predicted, us in measured_mma()]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) <= 0.11
    assert max(map(abs, errors)) <= 0.32


@pytest.mark.parametrize("kernels", [measured(FEW_KEYS), measured_mma()], ids=["hopper", "mma"])
def test_the_first_of_a_ranking_is_near_the_best(kernels):
    for case, rows in groupby(kernels, key=lambda row: row[0]):
        rows = list(rows)
        picked = min(rows, key=lambda row: row[1])[2]
        assert picked <= 1.06 * min(row[2] for row in rows), case


def seconds(**changes):
    found = predict(dataclasses.replace(PLAIN, **changes), H200, POLICY)
    return None if found is None else found.seconds


@pytest.mark.parametrize(
    "more",
    [
        {"batch": 64},
        {"queries": 4096},
        {"keys": 4096},
        {"terms": 256},
        {"features": 256},
        {"mask_bytes": 2.0 * 2048 * 2048},
        {"special": 1.0},
        {"arithmetic": 10.0},
    ],
)
def test_more_work_takes_longer(more):
    assert seconds(**more) > seconds()


@pytest.mark.parametrize("fewer", [{"visible": 0.5}, {"visible": 0.1, "edges": 2}])
def test_hidden_keys_cost_less(fewer):
    assert seconds(**fewer) < 0.75 * seconds()


def test_a_causal_attention_takes_more_than_half():
    assert seconds(visible=0.5) > 0.5 * seconds()


@pytest.mark.parametrize("terms", [64, 128, 256])
@pytest.mark.parametrize("visible", [1.0, 0.5])
def test_wgmma_comes_before_mma_sync(terms, visible):
    shape = dataclasses.replace(PLAIN, terms=terms, features=terms, visible=visible)
    assert predict(shape, H200, POLICY).form == "hopper"


def test_other_documents_cost_the_hopper_form_little():
    tile = AttentionTile(128, 128)
    shape = dataclasses.replace(PLAIN, by_point=True, mask_bytes=4.0 * 2 * 2048)
    all_keys = hopper_time(shape, tile, H200).seconds
    own_keys = hopper_time(dataclasses.replace(shape, matching=0.25), tile, H200).seconds
    assert 0.25 < own_keys / all_keys < 0.5


@pytest.mark.parametrize(
    ("batch", "heads", "keys"), [(32, 8, 8192), (1, 8, 2048), (16, 8, 2048), (4, 1, 1024)]
)
def test_planner_and_decode_writer_agree(batch, heads, keys):
    group = 4
    sizes = DecodeSizes(batch, group * heads, group, 1, keys, 128, 128)
    seconds, _ = attention_decode_ranked(attention_of(sizes), H200)[0]
    shape = AttentionShape(batch * heads * group, group, 1, keys, 128, 128, "float16")
    found = predict(shape, H200, POLICY)
    assert found.form == "decode"
    assert found.seconds == pytest.approx(seconds, rel=0.01)


def test_no_prediction_is_below_the_time_of_its_memory():
    for shape in (PLAIN, dataclasses.replace(PLAIN, queries=1), dataclasses.replace(PLAIN, keys=8)):
        bound = moved_bytes(shape) / H200.hbm_bytes_per_s
        assert predict(shape, H200, POLICY).seconds >= bound


def test_few_queries_of_long_caches_are_split_over_the_keys():
    assert predict(dataclasses.replace(PLAIN, queries=1), H200, POLICY).form == "decode"


@pytest.mark.parametrize("changes", [{"dtype": "float64"}, {"terms": 12}, {"features": 512}])
def test_what_no_form_computes_has_no_time(changes):
    assert seconds(**changes) is None


@pytest.mark.parametrize(("queries", "shares"), [(144, 4), (4096, 1)])
def test_warps_share_queries_where_there_are_few(queries, shares):
    """20 heads of 144 queries by 520 keys took 72.8 us on an H100 where each warp had its own."""
    made = attention(
        Sizes(batch=4, heads=5, queries=queries, keys=520, terms=40, dtype="float32"), Form()
    )
    assert attention_mma_ranked(made, H200)[0][1].shares == shares
    assert all(c.shares == 1 for _, c in attention_mma_ranked(attention(Sizes(), Form()), H200))
