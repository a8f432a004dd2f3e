"""Kernels of a product for ranges of its symbolic size: which, and right at the edges of each."""

import math

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.extents import Bounds, sizes_of, with_known_sizes
from tvm_fusion.ir.graph import OUTPUTS_ATTR, VERSIONS_ATTR
from tvm_fusion.kernels.gemm import versions
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.kernels.gemm.versions import Version, versions_of, write_versions
from tvm_fusion.runtime.build.trusted_calls import KINDS
from tvm_fusion.runtime.build.version_names import launches_of, versions_among
from tvm_fusion.transform.apply.write_kernels import write_kernel

from ...support.cuda_on_cpu import lower, run_cuda_on_cpu
from ...support.helpers_tir import poisoned
from ...support.kernel_cases import assert_close, fuse

A100, H200 = load_profile("nvidia_a100"), load_profile("nvidia_h200")
POLICY = load_policy(None)


def product(rows, terms=64, columns=96):
    def emit(bb, x, w):
        return op.nn.relu(bb.emit(op.matmul(x, w)))

    return fuse(emit, ((rows, terms), "float16"), ((terms, columns), "float16"))


SOME = product(tirx.Var("n", "int64"))


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        (
            [{"a": 1.0, "b": 2.0}, {"a": 1.02, "b": 1.0}, {"a": 9.0, "b": 3.0}],
            [("a", 20), ("b", None)],
        ),
        ([{"a": 1.0, "b": 1.03}, {"b": 5.0}, {"b": 7.0}], [("b", None)]),
        ([{"a": 1.0}, {"b": 1.0}, {"a": 1.0}], [("a", 10), ("b", 20), ("a", None)]),
        ([{"a": 1.0}, {}, {"a": 1.0}], []),
        ([{"a": None}, {"a": None}, {"a": None}], []),
    ],
)
def test_the_fewest_versions_that_lose_little_are_taken(times, wanted):
    tables = [[(seconds, name) for name, seconds in table.items()] for table in times]
    assert versions_of(tables, (10, 20, 40)) == [Version(*one) for one in wanted]


def test_more_versions_than_are_allowed_are_none():
    tables = [[(1.0, str(number))] for number in range(versions.MOST + 1)]
    assert versions_of(tables, range(len(tables))) == []


@pytest.fixture(scope="module")
def small():
    """A product on an A100 with a version for each of three ranges of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "SIZES", (4, 20, 70))
        patch.setattr(versions, "versions_of", _one_each)
        return lower(write_kernel(SOME.with_attr(OUTPUTS_ATTR, 1), "gemm", A100, POLICY))


def within(func, bounds):
    return with_known_sizes(func, dict.fromkeys(sizes_of(func), bounds))


def test_no_version_is_for_sizes_that_cannot_occur():
    n = tirx.Var("n", "int64")
    func = product(n, 2048, 8192)
    whole = [int(most) for most in write_versions(WRITER, func, H200, POLICY).attrs[VERSIONS_ATTR]]
    for bounds in (Bounds(0, 300), Bounds(100, 300), Bounds(100)):
        written = write_versions(WRITER, within(func, bounds), H200, POLICY)
        edges = [int(most) for most in written.attrs.get(VERSIONS_ATTR, ())]
        assert all(max(bounds.least, 1) <= most < (bounds.most or math.inf) for most in edges)
        assert len(edges) <= len(whole)


def test_within_narrow_bounds_one_kernel_is_the_best_for_these():
    n = tirx.Var("n", "int64")
    func = product(n, 2048, 8192)
    few = write_versions(WRITER, within(func, Bounds(0, 16)), H200, POLICY)
    many = write_versions(WRITER, within(func, Bounds(4096)), H200, POLICY)
    assert not any(VERSIONS_ATTR in kernel.attrs for kernel in (few, many))
    sources = [lower(kernel).source for kernel in (few, many)]
    assert sources[0] != sources[1]


def tokens(rows, terms, columns):
    """A product with a batch of texts."""

    def emit(bb, x, w, bias):
        return op.nn.relu(bb.emit(op.add(bb.emit(op.matmul(x, w)), bias)))

    shapes = ((*rows, terms), (terms, columns), (columns,))
    return fuse(emit, *((shape, "float16") for shape in shapes))


def test_rows_of_two_sizes_have_versions_by_their_product():
    b, n = tirx.Var("b", "int64"), tirx.Var("n", "int64")
    both = write_versions(WRITER, tokens((b, n), 2048, 8192), H200, POLICY)
    one = write_versions(WRITER, tokens((n,), 2048, 8192), H200, POLICY)
    assert [*both.attrs[VERSIONS_ATTR]] == [*one.attrs[VERSIONS_ATTR]]
    func = tokens((b, n), 2048, 8192)
    known = with_known_sizes(func, dict.fromkeys(sizes_of(func), Bounds(0, 16)))
    few = write_versions(WRITER, known, H200, POLICY)
    assert all(int(edge) < 256 for edge in few.attrs.get(VERSIONS_ATTR, ()))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 5), (5, 4), (3, 7), (2, 36), (0, 3)])
def test_rows_of_two_sizes_are_right_at_the_edges(sizes, monkeypatch):
    monkeypatch.setattr(versions, "SIZES", (4, 20, 70))
    monkeypatch.setattr(versions, "versions_of", _one_each)
    b, n = tirx.Var("b", "int64"), tirx.Var("n", "int64")
    func = tokens((b, n), 64, 96).with_attr(OUTPUTS_ATTR, 1)
    lowered = lower(write_kernel(func, "gemm", A100, POLICY))
    assert len(lowered.versions) == 2
    rng = np.random.default_rng(0)
    x, w, bias = (rng.standard_normal(s).astype("float16") for s in ((*sizes, 64), (64, 96), (96,)))
    y = poisoned((*sizes, 96), "float16")
    assert run_cuda_on_cpu(lowered, [x, w, bias, y]) == bool(y.size)
    if y.size:
        wide = (each.astype(float) for each in (x, w, bias))
        assert_close(y, np.maximum(next(wide) @ next(wide) + next(wide), 0), "float16")


def checks(func):
    found = []
    tvm_ffi.structural_walk(func.body, [(tirx.AssertStmt, found.append)])
    return found


def test_terms_that_are_a_multiple_are_read_in_vectors():
    func = product(1024, tirx.Var("n", "int64"), 512).with_attr(OUTPUTS_ATTR, 1)
    known = within(func, Bounds(8, 8192, 8))
    anywhere, multiple = (lower(write_kernel(f, "gemm", H200, POLICY)) for f in (func, known))
    vectors = [one.versions[-1].source.count("uint4") for one in (anywhere, multiple)]
    assert vectors[0] < vectors[1]


@pytest.mark.parametrize("shape", [(96, 64, "n"), (96, "n", 64)], ids=["columns", "terms"])
def test_multiples_are_right_and_asked_for(shape):
    n = tirx.Var("n", "int64")
    func = within(product(*(n if e == "n" else e for e in shape)), Bounds(8, 800, 8))
    kernel = write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "gemm", A100, POLICY)
    (check,) = checks(kernel)
    assert "at most 800 and a multiple of 8" in check.message_parts[0].value
    assert check.error_kind.value not in KINDS  # which host code may leave out
    lowered = lower(kernel)
    for size in (8, 72, 800):
        rng = np.random.default_rng(size)
        rows, terms, columns = (size if e == "n" else e for e in shape)
        x, w = (rng.standard_normal(s).astype("float16") for s in ((rows, terms), (terms, columns)))
        y = poisoned((rows, columns), "float16")
        assert run_cuda_on_cpu(lowered, [x, w, y]) == 1
        assert_close(y, np.maximum(x.astype(float) @ w.astype(float), 0), "float16")


def _one_each(tables, sizes):
    """The best configuration of each size that is not that of another one."""
    found = []
    for table in tables:
        found.append(next(c for _, c in table if c not in found))
    return [Version(c, most) for c, most in zip(found, (*sizes[:-1], None), strict=True)]


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 19, 20, 21, 70, 71])
def test_each_range_has_a_kernel_of_its_own(small, rows):
    kernels = [small.kernel, *(version.kernel for version in small.versions)]
    assert sorted(kernels) == ["main_beyond_kernel", "main_upto_20_kernel", "main_upto_4_kernel"]
    rng = np.random.default_rng(rows)
    x, w = (rng.standard_normal(s).astype("float16") for s in ((rows, 64), (64, 96)))
    y = poisoned((rows, 96), "float16")
    launched = run_cuda_on_cpu(small, [x, w, y])
    assert launched == bool(rows)
    if rows:
        assert_close(y, np.maximum(x.astype(float) @ w.astype(float), 0), "float16")


def test_a_large_product_has_versions_on_hopper_and_loses_little_at_each_size():
    n = tirx.Var("n", "int64")
    func = product(n, 2048, 8192)
    written = write_versions(WRITER, func, H200, POLICY)
    edges = [int(most) for most in written.attrs[VERSIONS_ATTR]]
    assert edges == sorted(set(edges) & set(versions.SIZES))
    assert 1 <= len(edges) < versions.MOST


def rows_of_images(bb, x, w):
    x = bb.emit(op.reshape(x, (x.ty.shape[0] * 196, 1024)))
    return op.nn.relu(bb.emit(op.matmul(x, w)))


def rows_behind_100(bb, x, w):
    x = bb.emit(op.strided_slice(x, [0], [100], [x.ty.shape[0]]))
    return op.nn.relu(bb.emit(op.matmul(x, w)))


@pytest.mark.parametrize(
    ("emit", "shape", "least"),
    [(rows_of_images, (196, 1024), 16), (rows_behind_100, (1024,), 128)],
)
def test_rows_that_are_computed_of_the_size_are_ranked_at_each_that_leaves_some(
    emit, shape, least, monkeypatch
):
    found = []
    monkeypatch.setattr(versions, "versions_of", lambda *given: found.append(given) or [])
    n = tirx.Var("n", "int64")
    func = fuse(emit, ((n, *shape), "float16"), ((1024, 4096), "float16"))
    assert write_versions(WRITER, func, A100, POLICY) is None
    ((tables, sizes),) = found
    assert sizes == [size for size in versions.SIZES if size >= least]
    assert tables[-1][0][0] > 4 * tables[0][0][0]  # seconds at 4096 and at the least


@pytest.mark.parametrize(
    "func",
    [product(128), product(tirx.Var("n", "int64"), tirx.Var("k", "int64"))],
    ids=["fixed", "two"],
)
def test_a_fixed_size_and_two_symbolic_ones_have_one_kernel(func):
    assert write_versions(WRITER, func, H200, POLICY) is None


def test_versions_are_one_launch_and_told_by_their_ranges():
    names = ["f_upto_64_kernel", "f_beyond_kernel", "g_kernel", "g_kernel_1"]
    assert launches_of(names) == 3
    assert versions_among(names) == ("up to 64", "beyond")
