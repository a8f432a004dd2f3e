"""Column kernels for ranges of a symbolic number of columns, and of the blocks of clusters."""

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels.column import versions
from tvm_fusion.kernels.column.config import Form
from tvm_fusion.kernels.column.kernel import ColumnConfig, emit_column
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.runtime.build.version_names import versions_among

from ...support.cuda_on_cpu import compile_cubins, lower, run_cuda_on_cpu
from ...support.graphs import module
from ...support.helpers_tir import poisoned
from ...support.kernel_cases import assert_close, fuse
from ...support.module_on_cpu import EmulatedModule

H200 = load_profile("nvidia_h200")
A100 = load_profile("nvidia_a100")
POLICY = load_policy(None)
HALF, FLOAT = "float16", "float32"
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def silu_sum(bb, x):
    y = bb.emit(op.nn.silu(bb.emit(op.astype(x, FLOAT))))
    return op.astype(bb.emit(op.sum(y, axis=[0])), HALF)


def silu_sum_of(x):
    return (x / (1 + np.exp(-x))).sum(0)


def softmax(bb, x):
    y = bb.emit(op.astype(x, FLOAT))
    return op.astype(bb.emit(op.nn.softmax(y, axis=0)), HALF)


def softmax_of(x):
    e = np.exp(x - x.max(0, keepdims=True, initial=-np.inf))
    return e / e.sum(0, keepdims=True)


def largest_place(bb, x):
    return op.argmax(x, axis=0)


def inner_sum(bb, x):
    return op.sum(bb.emit(op.astype(x, FLOAT)), axis=[1])


def planned(emit, *args, hw=H200):
    return Planned.of(module(emit, *args), hw.to_target(), hw, POLICY)


def drawn(n, shape):
    return np.random.default_rng(n).standard_normal(shape).astype(HALF)


CASES = {
    "silu": (silu_sum, silu_sum_of, (N, 72), lambda n: (n, 72)),
    "odd": (silu_sum, silu_sum_of, (N, 37), lambda n: (n, 37)),
    "any": (silu_sum, silu_sum_of, (N, M), lambda n: (n, 19)),
    "softmax": (softmax, softmax_of, (N, 40), lambda n: (n, 40)),
    "inner": (inner_sum, lambda x: x.sum(1), (3, N, 24), lambda n: (3, n, 24)),
    "place": (largest_place, lambda x: x.argmax(0), (N, 24), lambda n: (n, 24)),
}


@pytest.mark.parametrize(
    ("name", "hw"),
    [("silu", H200), ("silu", A100), ("any", H200), ("softmax", H200), ("place", H200)],
    ids=lambda of: getattr(of, "name", of),
)
def test_each_range_of_columns_is_right_at_its_edges(name, hw, monkeypatch):
    emit, reference, shape, at = CASES[name]
    monkeypatch.setattr(versions, "COLUMNS", (8, 300, 1 << 15))
    plan = planned(emit, (shape, HALF), hw=hw)
    assert [group.kernel_class for group in plan.plan.groups] == ["column"]
    written = EmulatedModule.of(plan)
    assert not written.cuts
    names = versions_among(list(written.kernels))
    edges = {int(text.split()[-1]) for text in names if text.split()[-1].isdigit()}
    assert edges
    assert edges <= {8, 300}
    assert len(names) <= versions.MOST
    first = 0 if name not in ("softmax", "place") else 1
    for n in sorted({first, 1, 2, 7, 500} | {edge + off for edge in edges for off in (-1, 0, 1)}):
        x = drawn(n, at(n))
        (found,) = written([x])
        assert_close(found, reference(x.astype(float)), HALF)


CLUSTERS = [
    ("silu", ColumnConfig(Form.LOOP, 4, 16, 8, 4, cluster=8)),
    ("silu", ColumnConfig(Form.LOOP, 9, 8, 8, 2, cluster=2)),
    ("odd", ColumnConfig(Form.LOOP, 8, 8, 1, 2, cluster=3)),
    ("softmax", ColumnConfig(Form.LOOP, 4, 32, 8, 2, cluster=4)),
    ("inner", ColumnConfig(Form.LOOP, 1, 32, 8, 8, cluster=8)),
]


@pytest.mark.parametrize(("name", "config"), CLUSTERS, ids=str)
@pytest.mark.parametrize("symbolic", [True, False])
def test_blocks_of_a_cluster_share_columns(name, config, symbolic):
    emit, reference, shape, at = CASES[name]
    for n in (2, 30, 700):
        program = analyze(fuse(emit, (shape if symbolic else at(n), HALF)))
        lowered = lower(emit_column(program, config, H200))
        x = drawn(n, at(n))
        want = reference(x.astype(float))
        y = poisoned(want.shape, FLOAT if name == "inner" else HALF)
        assert run_cuda_on_cpu(lowered, [x, y]) == 1
        assert_close(y, want, HALF)


def test_clusters_are_refused_where_there_are_none():
    config = ColumnConfig(Form.LOOP, 4, 16, cluster=8)
    with pytest.raises(Unsupported, match="no thread block clusters"):
        emit_column(analyze(fuse(silu_sum, ((N, 72), HALF))), config, A100)
    with pytest.raises(Unsupported, match="float32"):
        emit_column(analyze(fuse(largest_place, ((N, 24), HALF))), config, H200)


def test_registers_hold_no_columns_of_symbolic_number():
    config = ColumnConfig(Form.REGISTERS, 4, 16)
    with pytest.raises(Unsupported, match="symbolic length"):
        emit_column(analyze(fuse(silu_sum, ((N, 72), HALF))), config, H200)


def test_long_columns_fill_the_device():
    """Of 1024 sums blocks side by side are few: the blocks of a cluster share them."""
    func = fuse(silu_sum, ((N, 1024), HALF))
    kernel = versions.write_column_versions(versions.WRITER, func, H200, POLICY)
    assert "T.cta_id_in_cluster([8])" in kernel.script()
    (one, *_) = compile_cubins({"sums": kernel})
    assert one.spill_bytes == 0


def test_columns_that_are_neighbours_stay_whole_rows_or_others():
    plan = planned(lambda bb, x: op.sum(x, axis=[0, 2]), ((3, 8, N), FLOAT))
    assert "column" not in [group.kernel_class for group in plan.plan.groups]


def test_vectors_of_other_lengths_are_none_of_the_launch():
    """The casts of both results are one function, whose size has one name."""

    def emit(bb, x):
        own, others = (bb.emit(op.mean(x, axis=[axis])) for axis in (0, 1))
        narrow = [bb.emit(op.astype(found, HALF)) for found in (own, others)]
        return relax.Tuple(narrow)

    plan = planned(emit, ((N, M), FLOAT))
    assert "column" in [group.kernel_class for group in plan.plan.groups]
    written = EmulatedModule.of(plan)
    assert not written.cuts
    x = drawn(5, (5, 19)).astype(FLOAT)
    for found, axis in zip(written([x]), (0, 1), strict=True):
        assert_close(found, x.mean(axis), HALF)
