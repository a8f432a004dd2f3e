"""Row kernels for ranges of a symbolic size: which, and right at the edges of each."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.extents import Bounds, sizes_of, with_known_sizes
from tvm_fusion.ir.graph import OUTPUTS_ATTR, VERSIONS_ATTR
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row import versions
from tvm_fusion.kernels.row.candidates import row_ranked, work_of
from tvm_fusion.kernels.row.config import RowConfig
from tvm_fusion.kernels.row.cost import estimate_rows
from tvm_fusion.kernels.row.forms import WRITER
from tvm_fusion.kernels.row.versions import length_tables, write_row_versions
from tvm_fusion.kernels.versions import MOST, SLIGHT, Multiple, Priced, least_lost
from tvm_fusion.runtime.build.version_names import launches_of, versions_among
from tvm_fusion.transform.apply.write_kernels import write_kernel

from ...support.cuda_on_cpu import lower, run_cuda_on_cpu
from ...support.helpers_tir import poisoned
from ...support.kernel_cases import assert_close, fuse, softmax_of
from ...support.row_graphs import layernorm, rmsnorm, softmax

H200 = load_profile("nvidia_h200")
POLICY = load_policy(None)
N = tirx.Var("n", "int64")
HALF = "float16"


def written(func):
    return write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "row", H200, POLICY)


def kernels_of(lowered):
    return [one.kernel for one in (lowered, *lowered.versions)]


def layernorm_of(x, gamma, beta):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta


def cases(rows):
    row, vector = ((rows, N), HALF), ((N,), HALF)
    return {
        "softmax": (fuse(softmax, row), softmax_of, lambda n: [(rows, n)]),
        "layernorm": (
            fuse(layernorm, row, vector, vector),
            layernorm_of,
            lambda n: [(rows, n), (n,), (n,)],
        ),
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["softmax", "layernorm"])
def test_each_range_of_lengths_is_right_at_its_edges(name, monkeypatch):
    monkeypatch.setattr(versions, "COLUMNS", (32, 256, 1024))
    rows = 37
    func, reference, shapes = cases(rows)[name]
    kernel = written(func)
    lowered = lower(kernel)
    names = versions_among(kernels_of(lowered))
    assert any(text.startswith("multiples of 8 up to") for text in names)
    assert len(names) <= MOST + 1  # beside that of the shortest
    edges = {int(text.split()[-1]) for text in names if text.split()[-1].isdigit()}
    assert edges <= {8, 32, 256, 1024}
    assert len(edges) > 1
    lengths = {0, 1, 7, 8, 9, 100} | {edge + off for edge in edges for off in (-8, -1, 0, 1, 8)}
    for length in sorted(n for n in lengths if n >= 0):
        rng = np.random.default_rng(length)
        inputs = [rng.standard_normal(shape).astype(HALF) for shape in shapes(length)]
        y = poisoned((rows, length), HALF)
        assert run_cuda_on_cpu(lowered, [*inputs, y]) == bool(length)
        if length:
            assert_close(y, reference(*(x.astype(float) for x in inputs)), HALF)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("softmax", Bounds(0, 300)),
        ("softmax", Bounds(24, 1000, 8)),
        ("layernorm", Bounds(100, 1003)),
        ("layernorm", Bounds(0, 1 << 20, 4)),
        ("softmax", Bounds(0, 5000, 1, (8, 100))),
    ],
    ids=str,
)
def test_rows_within_bounds_have_no_kernel_for_others(name, bounds):
    rows = 37
    func, reference, shapes = cases(rows)[name]
    func = with_known_sizes(func, dict.fromkeys(sizes_of(func), bounds))
    lowered = lower(written(func))
    names = versions_among(kernels_of(lowered))
    beyond = math.inf if bounds.most is None else bounds.most
    edges = {int(text.split()[-1]) for text in names if text.split()[-1].isdigit()}
    assert all(max(bounds.least, 1) <= edge < beyond for edge in edges)
    short = bounds.least <= 8 and bounds.multiple < 8 and not bounds.hints
    if bounds.multiple == 1 or not short:
        assert (8 in edges) == short
    assert len(names) <= MOST + short
    assert any("multiples" in text for text in names) == (bounds.multiple % 8 != 0)
    last = min(beyond, 1200) // bounds.multiple * bounds.multiple
    lengths = {bounds.nearest(1), last, last - bounds.multiple}
    lengths |= {edge + off for edge in edges for off in (-8, -1, 0, 1, 8)}
    for length in sorted(n for n in lengths if 0 < n <= 1200 and bounds.refusal(n) is None):
        rng = np.random.default_rng(length)
        inputs = [rng.standard_normal(shape).astype(HALF) for shape in shapes(length)]
        y = poisoned((rows, length), HALF)
        assert run_cuda_on_cpu(lowered, [*inputs, y]) == 1
        assert_close(y, reference(*(x.astype(float) for x in inputs)), HALF)


def test_few_rows_have_one_kernel():
    func = fuse(rmsnorm, ((N, 4096), HALF), ((4096,), HALF))
    known = with_known_sizes(func, dict.fromkeys(sizes_of(func), Bounds(0, 16)))
    assert VERSIONS_ATTR in written(func).attrs
    assert VERSIONS_ATTR not in written(known).attrs


def scaled(bb, x):
    rows, columns = x.ty.shape
    return softmax(bb, bb.emit(op.reshape(x, (rows // 12, columns * 12))))


def test_lengths_that_are_computed_are_asked_for_as_they_are():
    """Rows of 12 n columns divide into vectors of 8 where n is even."""
    func = fuse(scaled, ((48, N), HALF))
    kernel = written(func)
    names = list(kernel.attrs[VERSIONS_ATTR])
    assert any(str(name).startswith("of8_") for name in names)
    lowered = lower(kernel)
    for n in (1, 2, 3, 10, 11):
        x = np.random.default_rng(n).standard_normal((48, n)).astype(HALF)
        y = poisoned((4, 12 * n), HALF)
        run_cuda_on_cpu(lowered, [x, y])
        assert_close(y, softmax_of(x.reshape(4, 12 * n).astype(float)), HALF)


def test_a_known_multiple_has_no_kernels_for_other_lengths():
    func = fuse(softmax, ((64, N * 8), HALF))
    names = [*map(str, written(func).attrs[VERSIONS_ATTR])]
    assert names
    assert not any(name.startswith("of") for name in names)


def test_predicted_times_are_those_of_the_length():
    """A bound at the length itself takes what a kernel of that very length does."""
    func, _, _ = cases(4096)["softmax"]
    columns = analyze(func, False).columns
    program = analyze(Multiple.dividing(func, columns, 8).func, False)
    tables = length_tables(program, work_of(program, H200), versions.COLUMNS, H200)
    for columns, table in zip(versions.COLUMNS, tables, strict=True):
        fixed = analyze(fuse(softmax, ((4096, columns), HALF)), False)
        seconds = [s for s, config in row_ranked(fixed, H200) if config.form != "bulk"]
        assert table[0][0] == pytest.approx(min(seconds), rel=0.02)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_versions_are_those_that_lose_least_in_all(most):
    first, second, third = (RowConfig(threads=threads) for threads in (8, 16, 32))
    losses = {
        first: [0.0, 0.5, math.inf, math.inf],
        second: [0.3, 0.0, 0.1, math.inf],
        third: [0.9, 0.4, 0.2, 0.0],
    }
    ends, found = [8, 16, 32, 64], least_lost(Priced([8, 16, 32, 64], losses), most)
    known = [(version.config, version.most) for version in found.versions]
    assert (
        known
        == {
            1: [(third, None)],
            2: [(second, 32), (third, None)],
            3: [(first, 8), (second, 32), (third, None)],
        }[most]
    )
    start, loss = 0, 0.0
    for config, end in known:
        stop = len(ends) if end is None else ends.index(end) + 1
        loss += sum(losses[config][start:stop]) + SLIGHT
        start = stop
    assert found.loss == pytest.approx(loss)


def test_rows_of_few_columns_are_computed_element_by_element():
    """Whether vectors divide them is not asked: the first kernel is for all of them."""
    names = list(written(fuse(softmax, ((4096, N), HALF))).attrs[VERSIONS_ATTR])
    assert [int(name) for name in names[:2]] == [versions.SHORTEST, versions.SHORT]
    assert str(names[2]).startswith("of8_")
    func = fuse(softmax, ((64, N), HALF))
    for most, ranges in ((20, ("up to 8", "beyond")), (8, ()), (5, ())):
        bounded = with_known_sizes(func, {sizes_of(func)[0]: Bounds(0, most)})
        lowered = lower(written(bounded))
        assert versions_among(kernels_of(lowered)) == ranges
        _softmax_is_right(lowered, [n for n in (1, 5, 7, 8, 9, 20) if n <= most])


def _softmax_is_right(lowered, lengths):
    for length in lengths:
        x = np.random.default_rng(length).standard_normal((64, length)).astype(HALF)
        y = poisoned(x.shape, HALF)
        run_cuda_on_cpu(lowered, [x, y])
        assert_close(y, softmax_of(x.astype(float)), HALF)


def test_what_lies_beyond_the_end_of_a_row_costs_a_group_at_most():
    """A version for rows of 8192 takes a row of 1025 a quarter of its vectors."""
    func, _, _ = cases(4096)["softmax"]
    program = analyze(func, False)
    work = work_of(program, H200)
    config = RowConfig(threads=64, most=8192)
    short, long = (
        estimate_rows(replace(work, columns=columns), config, H200).time_us
        for columns in (1025, 8192)
    )
    exact = estimate_rows(replace(work, columns=1025), replace(config, most=1025), H200).time_us
    assert exact < short < long / 2


def test_a_number_of_rows_has_a_kernel_that_loses_little_at_any():
    func = fuse(rmsnorm, ((N, 4096), HALF), ((4096,), HALF))
    kernel = write_row_versions(WRITER, func, H200, POLICY)
    edges = [int(most) for most in kernel.attrs[VERSIONS_ATTR]]
    assert edges == sorted(set(edges) & set(versions.ROWS))
    lowered = lower(written(func))
    gamma = np.ones(4096, HALF)
    for rows in (0, 1, *(edge + off for edge in edges[:1] for off in (0, 1))):
        x = np.random.default_rng(rows).standard_normal((rows, 4096)).astype(HALF)
        y = poisoned((rows, 4096), HALF)
        run_cuda_on_cpu(lowered, [x, gamma, y])
        wide = x.astype(float)
        if rows:
            scale = np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
            assert_close(y, wide / scale, HALF)


def test_fixed_sizes_have_no_versions():
    func = fuse(softmax, ((64, 128), HALF))
    assert write_row_versions(WRITER, func, H200, POLICY) is None


def test_versions_of_multiples_are_one_launch_and_told_by_their_ranges():
    names = ["f_of8_upto_64_kernel", "f_of8_beyond_kernel", "f_upto_64_kernel", "f_beyond_kernel"]
    assert launches_of(names) == 1
    assert versions_among(names) == (
        "multiples of 8 up to 64",
        "multiples of 8 beyond",
        "up to 64",
        "beyond",
    )
