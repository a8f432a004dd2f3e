"""Checks of large outputs and weights go piece by piece, and say what they say of the whole."""

import math

import numpy as np
import pytest
import torch
from tvm.relax import op

from tests.check.arrays.test_programs import CASES, plain, values
from tvm_fusion.check import allowance, distance, rules
from tvm_fusion.check.arrays import narrow
from tvm_fusion.check.arrays.programs import on_arrays
from tvm_fusion.check.reference import build_reference

HALVES = ("product", "layer norm, gelu", "convolution", "embedding")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(narrow, "LEAST", 1)
    monkeypatch.setattr(narrow, "PIECE", 50)
    monkeypatch.setattr(rules, "PIECE", 7)


@pytest.mark.parametrize("case", HALVES)
def test_what_is_widened_by_pieces_is_what_compiled_loops_give(case, small_pieces):
    mod = plain(*CASES[case])
    inputs = values(mod)
    found = on_arrays(mod, ["main"], None)["main"](inputs)
    for x, y in zip(found, build_reference(mod)(inputs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_weights_of_products_and_rows_of_tables_are_all_that_is_widened(monkeypatch):
    def head(bb, table, places, weight):
        rows = bb.emit(op.take(table, places, axis=0))
        return op.matmul(rows, bb.emit(op.permute_dims(weight)))

    mod = plain(head, ((512, 64), "float16"), ((3,), "int64"), ((768, 64), "float16"))
    inputs = values(mod)
    monkeypatch.setattr(narrow, "LEAST", 1024)
    monkeypatch.setattr(narrow, "PIECE", 4096)
    sizes, widened = [], narrow.widened

    def counted(tensor):
        sizes.append(tensor.numel())
        return widened(tensor)

    monkeypatch.setattr(narrow, "widened", counted)
    (found,) = on_arrays(mod, ["main"], None)["main"](inputs)
    np.testing.assert_allclose(found, build_reference(mod)(inputs)[0], rtol=1e-12, atol=1e-13)
    assert sizes[1:] == [3 * 64] + 12 * [4096]  # behind the places


def outputs():
    """A reference with what is no number, and outputs that are right, off, and refused."""
    rng = np.random.default_rng(0)
    ref = rng.standard_normal((5, 9))
    ref[0, 3], ref[2, 2], ref[4, 8], ref[3, 1] = np.nan, np.inf, -np.inf, 1e30
    right = ref.astype("float16")
    off, refused = right.copy(), right.copy()
    off[4, 1] += 3
    off[1, 1] += 3
    refused[2, 2], refused[4, 4] = 1, np.nan
    return ref, {"right": right, "off": off, "refused": refused}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["right", "off", "refused"])
@pytest.mark.parametrize("in_torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("more", ["alone", "plain", "bound"])
def test_a_verdict_by_pieces_is_that_on_the_whole(kind, in_torch, more, monkeypatch):
    ref, given = outputs()
    given = given[kind]
    beside = ref.astype("float16") if more == "plain" else None
    bound = np.where(np.isfinite(ref), 1e-3, 0.0) if more == "bound" else None
    arrays = [given, beside, ref, bound]
    if in_torch:
        arrays = [None if x is None else torch.from_numpy(x) for x in arrays]
    given, beside, ref, bound = arrays

    def verdict():
        return rules.check_output(given, beside, ref, "float16", None, bound)

    whole = verdict()
    monkeypatch.setattr(rules, "PIECE", 7)
    assert verdict() == whole
    assert whole.passed == (kind == "right")
    assert kind != "refused" or (whole.worst_index, whole.error) == ((2, 2), math.inf)


@pytest.mark.parametrize("in_torch", [False, True], ids=["numpy", "torch"])
def test_distances_and_changes_by_pieces_are_those_of_the_whole(in_torch, monkeypatch):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 6, 5))
    b[1, 1] = a[1, 1] = np.nan
    if in_torch:
        a, b = torch.from_numpy(a), torch.from_numpy(b)
    found = distance.distance(a, b), np.asarray(allowance._change(a, b))
    monkeypatch.setattr(rules, "PIECE", 7)
    assert distance.distance(a, b) == found[0]
    assert 0 < found[0] < math.inf
    np.testing.assert_array_equal(np.asarray(allowance._change(a, b)), found[1])
    b[5, 4] = math.nan
    a[5, 4] = 0.0
    assert distance.distance(a, b) == math.inf
