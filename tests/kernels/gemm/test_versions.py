"""Kernels of a product for ranges of its symbolic size: which, and right at the edges of each."""

import dataclasses
import math
import re

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
from tvm_fusion.kernels.gemm.hopper.config import HopperConfig
from tvm_fusion.kernels.gemm.hopper.problem import read_problems
from tvm_fusion.kernels.gemm.skinny.config import SkinnyConfig
from tvm_fusion.kernels.gemm.versions import Version, Way, versions_of, write_versions
from tvm_fusion.kernels.versions import of_both_ends
from tvm_fusion.runtime.build.trusted_calls import KINDS
from tvm_fusion.runtime.build.version_names import launches_of, versions_among
from tvm_fusion.transform.apply.write_kernels import write_kernel

from ...support.cuda_on_cpu import lower, run_cuda_on_cpu
from ...support.helpers_tir import poisoned
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.kernel_cases import assert_close, fuse

A100, H200 = load_profile("nvidia_a100"), load_profile("nvidia_h200")
TINY_H200 = dataclasses.replace(H200, num_sms=4, sms_per_cluster_group=4)
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


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        # as fast at both ends as any
        ([{"a": 1.0, "b": 1.2}, {"a": 1.01, "b": 1.0}, {"a": 1.0, "b": 1.2}], [("a", None)]),
        # the fastest of the largest size loses where its range begins
        (
            [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0, "c": 1.1}, {"a": 3.0, "b": 1.0, "c": 1.1}],
            [("a", 20), ("c", None)],
        ),
        ([{"a": 1.0}, {"b": 1.0}], []),
        ([{"a": 1.0}, {}], []),
    ],
)
def test_versions_lose_little_at_both_ends_of_their_ranges(times, wanted):
    tables = [[(seconds, name) for name, seconds in table.items()] for table in times]
    found = of_both_ends(dict(zip((10, 20, 40), tables, strict=False)), 3)
    assert found == [Version(*one) for one in wanted]


def test_more_versions_than_are_allowed_are_none():
    tables = [[(1.0, str(number))] for number in range(versions.MOST + 1)]
    assert versions_of(tables, range(len(tables))) == []


@pytest.fixture(scope="module")
def small():
    """A product on an A100 with a version for each of three ranges of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "ROWS", (4, 20, 70))
        patch.setattr(versions, "least_loss", _one_each)
        return lower(write_kernel(SOME.with_attr(OUTPUTS_ATTR, 1), "gemm", A100, POLICY))


def within(func, bounds):
    return with_known_sizes(func, dict.fromkeys(sizes_of(func), bounds))


def edges_of(kernel):
    """The sizes that the names of a kernel's versions tell."""
    names = kernel.attrs.get(VERSIONS_ATTR, ())
    return [int(edge) for name in names for edge in re.findall(r"\d+", str(name))]


def test_no_version_is_for_sizes_that_cannot_occur():
    n = tirx.Var("n", "int64")
    func = product(n, 2048, 8192)
    whole = edges_of(write_versions(WRITER, func, H200, POLICY))
    for bounds in (Bounds(0, 300), Bounds(100, 300), Bounds(100)):
        written = write_versions(WRITER, within(func, bounds), H200, POLICY)
        edges = edges_of(written)
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
    assert all(edge < 256 for edge in edges_of(few))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 5), (5, 4), (3, 7), (2, 36), (0, 3)])
def test_rows_of_two_sizes_are_right_at_the_edges(sizes, monkeypatch):
    monkeypatch.setattr(versions, "ROWS", (4, 20, 70))
    monkeypatch.setattr(versions, "least_loss", _one_each)
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


def _one_each(spans, left_out=()):
    """The best configuration of each range that is not that of another one."""
    found = []
    for span in spans:
        ranked = sorted(
            (seconds, str(kind), kind) for kind, (seconds, _) in span.last.times.items()
        )
        others = [kind for *_, kind in ranked if kind not in {*left_out, *(w.kind for w in found)}]
        thin = isinstance(others[0], SkinnyConfig)
        found.append(Way(others[0], span.last.rows if thin else None))
    return found


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


def gated(rows):
    """silu(x g) * (x u) + r."""

    def emit(bb, x, g, u, r):
        gate, up = (bb.emit(op.matmul(x, w)) for w in (g, u))
        return op.add(bb.emit(op.multiply(bb.emit(op.nn.silu(gate)), up)), r)

    shapes = ((rows, 64), (64, 96), (64, 96), (rows, 96))
    return fuse(emit, *((shape, "float16") for shape in shapes)).with_attr(OUTPUTS_ATTR, 1)


def gated_of(x, g, u, r):
    x, g, u, r = (each.astype(float) for each in (x, g, u, r))
    gate = x @ g
    return gate / (1 + np.exp(-gate)) * (x @ u) + r


def _thin_then_others(tensor):
    """The fastest kernel of the skinny form up to 5 rows, on tensor cores or not; one of another
    form for more.
    """

    def choose(spans, left_out=()):
        few, rest = (
            sorted((seconds, str(kind), kind) for kind, (seconds, _) in span.last.times.items())
            for span in spans[:2]
        )
        kinds = (k for *_, k in few if isinstance(k, SkinnyConfig) and bool(k.tensor) == tensor)
        other = next(k for *_, k in rest if not isinstance(k, SkinnyConfig))
        return [Way(next(kinds), 5), *(Way(other) for _ in spans[1:])]

    return choose


@pytest.fixture(scope="module", params=[False, True], ids=["fma", "mma"])
def thin(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "ROWS", (5, 70))
        patch.setattr(versions, "least_loss", _thin_then_others(request.param))
        return lower(write_kernel(gated(tirx.Var("n", "int64")), "gemm", A100, POLICY))


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6, 71])
def test_few_rows_have_a_kernel_for_so_many_or_fewer(thin, rows):
    assert "main_upto_5_kernel" in [thin.kernel, *(version.kernel for version in thin.versions)]
    rng = np.random.default_rng(rows)
    shapes = ((rows, 64), (64, 96), (64, 96), (rows, 96))
    inputs = [rng.standard_normal(shape).astype("float16") for shape in shapes]
    y = poisoned((rows + 1, 96), "float16")
    behind = y[rows:].copy()
    assert run_cuda_on_cpu(thin, [*inputs, y[:rows]]) == bool(rows)
    assert_close(y[:rows], gated_of(*inputs), "float16") if rows else None
    assert np.array_equal(y[rows:], behind, equal_nan=True)


@pytest.mark.parametrize("size", [8, 32, 40, 48, 160, 568])
def test_rows_of_a_size_that_is_passed_have_versions(size, monkeypatch):
    monkeypatch.setattr(versions, "ROWS", (4, 20, 70))
    monkeypatch.setattr(versions, "least_loss", _one_each)
    func = product(tirx.FloorDiv(tirx.Var("n", "int64"), tirx.IntImm("int64", 8)))
    func = within(func, Bounds(8, 8192, 8))
    (n,) = sizes_of(func)
    *inputs, output = func.params
    func = tirx.PrimFunc([*inputs, n, output], func.body, func.ret_type, attrs=func.attrs)
    lowered = lower(write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "gemm", A100, POLICY))
    assert len(lowered.versions) == 2
    rng = np.random.default_rng(size)
    x, w = (rng.standard_normal(shape).astype("float16") for shape in ((size // 8, 64), (64, 96)))
    y = poisoned((size // 8, 96), "float16")
    assert run_cuda_on_cpu(lowered, [x, w, size, y]) == 1
    assert_close(y, np.maximum(x.astype(float) @ w.astype(float), 0), "float16")


def test_products_of_known_rows_are_ranked_once(monkeypatch):
    """Four of n rows."""
    n = tirx.Var("n", "int64")

    def some(bb, x, places, w):
        return op.matmul(bb.emit(op.take(x, places, axis=0)), w)

    func = fuse(some, ((n, 64), "float16"), ((4,), "int32"), ((64, 96), "float16"))
    monkeypatch.setattr(versions, "tables_by_size", lambda *_: pytest.fail("ranked by size"))
    monkeypatch.setattr(versions, "least_loss", lambda *_: pytest.fail("ranked by rows"))
    assert write_versions(WRITER, func, H200, POLICY) is None


def turned(bb, x, w):
    return op.matmul(bb.emit(op.flip(x, 0)), w)


def test_rows_that_depend_on_how_many_there_are_have_no_kernel_for_fewer(monkeypatch):
    monkeypatch.setattr(versions, "ROWS", (5, 70))
    first = _thin_then_others(False)

    def choose(spans, left_out=()):
        if left_out:
            return _one_each(spans, {*left_out, *(k for k in spans[0].last.times if _is_thin(k))})
        return first(spans)

    monkeypatch.setattr(versions, "least_loss", choose)
    func = fuse(turned, ((tirx.Var("n", "int64"), 64), "float16"), ((64, 96), "float16"))
    lowered = lower(write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "gemm", A100, POLICY))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("float16") for shape in ((3, 64), (64, 96)))
    y = poisoned((3, 96), "float16")
    assert run_cuda_on_cpu(lowered, [x, w, y]) == 1
    assert_close(y, x[::-1].astype(float) @ w.astype(float), "float16")


def _is_thin(kind):
    return isinstance(kind, SkinnyConfig)


@pytest.fixture(scope="module")
def hopper():
    """Versions on a small Hopper device, each of another tile."""
    found: list[Way] = []

    def choose(spans, left_out=()):
        for span in spans:
            kinds = (
                kind
                for kind in span.last.times
                if isinstance(kind, HopperConfig)
                and kind.multicast == 1
                and kind not in {*left_out, *(way.kind for way in found)}
            )
            found.append(Way(next(kinds)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "ROWS", (64, 128, 192, 256))
        patch.setattr(versions, "least_loss", choose)
        return lower(write_kernel(gated(tirx.Var("n", "int64")), "gemm", TINY_H200, POLICY))


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 129, 200])
def test_hopper_kernels_ask_for_the_rows_that_there_are(hopper, rows):
    assert len(hopper.versions) == 3
    rng = np.random.default_rng(rows)
    shapes = ((rows, 64), (64, 96), (64, 96), (rows, 96))
    inputs = [rng.standard_normal(shape).astype("float16") for shape in shapes]
    y = poisoned((rows, 96), "float16")
    assert run_hopper_on_cpu(hopper, [*inputs, y]) == 1
    assert_close(y, gated_of(*inputs), "float16")


@pytest.mark.parametrize(
    ("least", "most", "height", "rows"),
    [
        (1, 64, 64, 64),
        (65, 128, 64, 128),
        (65, 128, 128, 128),
        (64, 128, 64, None),
        (1, None, 64, None),
    ],
)
def test_row_tiles_are_counted_once_where_all_sizes_of_a_range_have_as_many(
    least, most, height, rows
):
    contraction = WRITER.read(SOME, False)
    contraction = dataclasses.replace(contraction, rows=Bounds(least, most))
    problem = read_problems(contraction)[0]
    assert problem.whole_tiles(height) == (problem.M if rows is None else rows)


def test_a_large_product_has_versions_on_hopper_and_loses_little_at_each_size():
    n = tirx.Var("n", "int64")
    func = product(n, 2048, 8192)
    written = write_versions(WRITER, func, H200, POLICY)
    assert 2 <= len(written.attrs[VERSIONS_ATTR]) < versions.MOST
    assert {edge - edge % 2 for edge in edges_of(written)} <= {0, *versions.ROWS}


@pytest.mark.parametrize(("rows", "width", "loss"), [(7, 64, 0.015), (7, 128, 0.258), (65, 128, 0)])
def test_few_rows_in_tiles_that_leave_multiprocessors_idle_take_more(rows, width, loss):
    known = WRITER.read(product(rows, 2048, 8192), False)
    configs = (config for _, config in WRITER.ranked(known, H200, POLICY))
    tiles = (c for c in configs if isinstance(c, HopperConfig) and c.split == 1)
    config = next(c for c in tiles if (c.block_m, c.block_n) == (64, width))
    assert versions._thin_loss(known, config, H200) == pytest.approx(loss, abs=1e-3)


def rows_of_images(bb, x, w):
    x = bb.emit(op.reshape(x, (x.ty.shape[0] * 196, 1024)))
    return op.nn.relu(bb.emit(op.matmul(x, w)))


def rows_behind_100(bb, x, w):
    x = bb.emit(op.strided_slice(x, [0], [100], [x.ty.shape[0]]))
    return op.nn.relu(bb.emit(op.matmul(x, w)))


@pytest.mark.parametrize(
    ("emit", "shape", "sizes"),
    [
        (rows_of_images, (196, 1024), [1, 2, 3, 5, 10, 20, 83, 334]),
        (rows_behind_100, (1024,), [rows for rows in versions.ROWS if rows > 100]),
    ],
)
def test_rows_that_are_computed_of_the_size_are_ranked_at_each_that_leaves_some(
    emit, shape, sizes, monkeypatch
):
    found = []
    monkeypatch.setattr(versions, "least_loss", lambda *given: found.append(given) or [])
    n = tirx.Var("n", "int64")
    func = fuse(emit, ((n, *shape), "float16"), ((1024, 4096), "float16"))
    assert write_versions(WRITER, func, A100, POLICY) is None
    ((spans, _),) = found
    assert [span.most for span in spans] == sizes
    assert spans[-1].last.best[0] > 4 * spans[0].last.best[0]


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
