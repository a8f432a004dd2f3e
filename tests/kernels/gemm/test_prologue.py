"""Left operands that the Hopper GEMM computes on their way from shared memory to wgmma."""

import dataclasses
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper, hopper_ranked
from tvm_fusion.kernels.gemm.hopper.plan import HopperConfig
from tvm_fusion.kernels.gemm.hopper.problem import read_problems
from tvm_fusion.kernels.gemm.kernel_class import Gemm
from tvm_fusion.kernels.gemm.mma.rank import mma_ranked
from tvm_fusion.plan.group_view import GroupView

from ...support.gemm_cases import BRAIN, FLOAT, HALF, case, sigmoid
from ...support.graphs import module, plan_of
from ...support.hopper_on_cpu import compile_hopper, cuda_source, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, outputs_of

H200 = load_profile("nvidia_h200")
DATA = Path(__file__).parents[2] / "data"
TINY_H200 = dataclasses.replace(H200, num_sms=4, sms_per_cluster_group=4)


def scale_shift_relu(bb, x, s, b, w):
    """relu(x s + b) w^T with sums in float32 of vectors of any dtype."""
    x, s, b = (bb.emit(op.astype(v, FLOAT)) for v in (x, s, b))
    y = bb.emit(op.add(bb.emit(op.multiply(x, s)), b))
    y = bb.emit(op.nn.relu(bb.emit(op.astype(y, str(w.ty.dtype)))))
    return op.matmul(y, bb.emit(op.permute_dims(w, (1, 0))))


def silu(bb, x, w):
    return op.matmul(bb.emit(op.nn.silu(x)), w)


def normed(bb, x, mean, scale, gain, w):
    """((x - mean) scale) gain w, mean and scale of each row."""
    x = bb.emit(op.subtract(bb.emit(op.astype(x, FLOAT)), mean))
    x = bb.emit(op.astype(bb.emit(op.multiply(x, scale)), HALF))
    return op.matmul(bb.emit(op.multiply(x, gain)), w)


def affine(M, K, N, dtype=HALF, vectors=FLOAT):
    shapes = [(M, K), ((K,), vectors), ((K,), vectors), (N, K)]
    return case(
        f"batch norm, relu {M}x{N}x{K} of {dtype}, {vectors}",
        scale_shift_relu,
        shapes,
        lambda x, s, b, w: [np.maximum(x * s + b, 0) @ w.T],
        dtype,
    )


def rows_normed(M, K, N):
    shapes = [(M, K), ((M, 1), FLOAT), ((M, 1), FLOAT), (K,), (K, N)]
    return case("rows", normed, shapes, lambda x, m, s, g, w: [(x - m) * s * g @ w])


SILU = case("silu", silu, [(136, 72), (72, 192)], lambda x, w: [x * sigmoid(x) @ w])
STAGED, NARROW = HopperConfig(128, 128, 4, True, False, 2), HopperConfig(64, 64, 3, True, False, 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("example", "config"),
    [
        (affine(136, 96, 128), STAGED),
        (affine(200, 64, 64, vectors=HALF), HopperConfig(192, 64, 3, True, False, 1)),
        (affine(70, 320, 64, BRAIN), HopperConfig(64, 64, 3, False, False, 0, split=2)),
        (rows_normed(136, 160, 128), NARROW),
        (SILU, STAGED),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_computed_rows_are_close_to_float64(example, config):
    inputs = example.arrays()
    outputs = outputs_of(example.func(), len(inputs))
    kernel = emit_gemm_hopper(analyze_contraction(example.func()), TINY_H200, config)
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    for got, expected in zip(outputs, example.expected(inputs), strict=True):
        error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= 2 * TOLERANCE[str(got.dtype)]


def test_the_largest_tiles_do_not_spill():
    contraction = analyze_contraction(affine(4096, 512, 256).func())
    for config in (HopperConfig(128, 256, 3, True, False, 2), STAGED):
        compiled = compile_hopper(emit_gemm_hopper(contraction, H200, config))
        assert (compiled.spill_bytes, compiled.remarks) == (0, ())


def test_tiles_that_leave_no_registers_are_not_ranked():
    contraction = analyze_contraction(affine(4096, 512, 128).func())
    with pytest.raises(Unsupported, match="128 registers"):
        emit_gemm_hopper(contraction, H200, HopperConfig(256, 128, 3, True, False, 2))
    assert all(config.block_m <= 192 for _, config in hopper_ranked(contraction, H200))


def test_nothing_stands_between_wgmma_and_its_wait():
    """ptxas gives the registers of A away behind the last wgmma that reads them, though PTX says
    that they are read until the wait: in another iteration of the loop it came too late.
    """
    source = cuda_source(emit_gemm_hopper(analyze_contraction(SILU.func()), H200, STAGED))
    body = source[source.index(") main_kernel") :]
    commits = [match.end() for match in re.finditer(r"wgmma_commit_group\w*\(\);", body)]
    assert commits
    assert all(re.match(r"\s*\w*wgmma_wait_group\w*_0\(\);", body[end:]) for end in commits)


def test_a_function_of_two_matrices_is_refused():
    def emit(bb, x, y, w):
        return op.matmul(bb.emit(op.multiply(x, y)), w)

    example = case("two", emit, [(136, 64), (136, 64), (64, 64)], lambda x, y, w: [x * y @ w])
    with pytest.raises(Unsupported, match="computed of 2 matrices"):
        read_problems(analyze_contraction(example.func()))


def test_what_a_function_costs_grows_with_the_tiles_that_compute_it():
    def plain(bb, x, w):
        return op.matmul(x, bb.emit(op.permute_dims(w, (1, 0))))

    def seconds(example):
        return hopper_ranked(analyze_contraction(example.func()), H200)[0][0]

    def more(columns):
        shapes = [(8192, 512), (columns, 512)]
        without = case("plain", plain, shapes, lambda x, w: [x @ w.T])
        return seconds(affine(8192, 512, columns)) - seconds(without)

    assert 0 < 5 * more(128) < more(4096)


def test_predictions_are_close_to_what_was_measured():
    """The order in which blocks take their tiles is another one since for few columns."""
    rows = json.loads((DATA / "prologue_sweep_h200.json").read_text())["rows"]
    errors, losses, measured = [], [], defaultdict(dict)
    for row in rows:
        if row["kind"] == "gemm":
            config = HopperConfig(**row["config"] | {"group_m": 0})
            measured[tuple(row["shape"])][config] = row["us"] * 1e-6
    for shape, seconds in measured.items():
        ranked = hopper_ranked(analyze_contraction(affine(*shape).func()), H200)
        offered = ((dataclasses.replace(config, group_m=0), time) for time, config in ranked)
        predicted = {config: time for config, time in offered if config in seconds}
        errors += [abs(predicted[config] / time - 1) for config, time in seconds.items()]
        losses.append(seconds[min(predicted, key=predicted.get)] / min(seconds.values()))
    assert len(errors) == 57
    assert statistics.median(errors) < 0.1
    assert max(losses) < 1.05


def test_the_planner_takes_batch_norm_into_a_product_and_leaves_what_costs_more():
    def groups(columns, emit):
        shapes = [((8192, 512), HALF), ((512,), HALF), ((512,), HALF), ((columns, 512), HALF)]
        return plan_of(module(emit, *shapes), "nvidia_h200").plan.groups

    def costly(bb, x, s, b, w):
        for function in (op.exp, op.tanh, op.log, op.sin, op.cos):
            x = bb.emit(function(x))
        return scale_shift_relu(bb, x, s, b, w)

    (fused,) = groups(128, scale_shift_relu)
    assert fused.kernel_class == "gemm"
    assert [g.kernel_class for g in groups(4096, costly)] == ["pointwise", "gemm"]


def test_computed_rows_of_a_transposed_product_are_predicted_as_they_are_written():
    """The kernel of (f(x) w)^T calls f(x) its right operand, which wgmma takes from memory alone:
    one launch, by mma.sync, took 221 us and not the 93 of wgmma (H200).
    """

    def emit(bb, x, w):
        return op.permute_dims(bb.emit(op.matmul(bb.emit(op.nn.silu(x)), w)), (1, 0))

    shapes = [(8192, 4096), (4096, 768)]
    contraction = analyze_contraction(case("turned", emit, shapes, lambda x, w: [x]).func())
    with pytest.raises(Unsupported, match="computed, not loaded"):
        read_problems(contraction)
    graph = plan_of(module(emit, *((s, HALF) for s in shapes)), "nvidia_h200").graph
    outputs = tuple(t.id for t in graph.tensors if t.is_output)
    whole = GroupView(graph, tuple(range(len(graph.ops))), outputs)
    predicted = Gemm().accepts(whole, H200, load_policy(None)).seconds
    written, _ = mma_ranked(contraction, H200, load_policy(None))[0]
    assert predicted == pytest.approx(written, rel=0.25)
