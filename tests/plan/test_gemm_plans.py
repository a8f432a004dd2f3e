"""What the planner joins to a matrix product, by predicted time."""

import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import unfused_plan

from ..support import gemm_cases as graphs
from ..support.graphs import module, plan_of

HALF, FLOAT = "float16", "float32"
DEVICES = ["nvidia_h200", "nvidia_a100"]


def plan(emit, *shapes, dtype=HALF, device="nvidia_h200", **more):
    inputs = [s if isinstance(s[-1], str) else (s, dtype) for s in shapes]
    return plan_of(module(emit, *inputs), device, **more)


def gains(planned, policy=None):
    """Predicted microseconds that the plan saves."""
    unfused = unfused_plan(planned.graph, planned.hw, load_policy(policy))
    return unfused.predicted_us - planned.plan.predicted_us


def with_product(planned):
    """The operators of the launch with the first matrix product."""
    products = {o.name for o in planned.graph.ops if any(b.is_contraction for b in o.blocks)}
    return next(g for g in planned.plan.groups if products & set(g.ops))


# ---- epilogues and siblings


@pytest.mark.one_in(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("rows", [1, 16, 300, 4096])
@pytest.mark.parametrize(
    ("emit", "others"),
    [
        (graphs.bias_gelu, [(1024, 4096), (4096,)]),
        (graphs.residual, [(1024, 4096), "output"]),
        (graphs.gate_up, [(1024, 4096), (1024, 4096)]),
        (graphs.qkv, [(1024, 4096), (1024, 512), (1024, 512)]),
    ],
    ids=["bias, gelu", "residual", "gate and up", "q, k, v"],
)
def test_these_are_one_launch_at_any_size(emit, others, rows, dtype, device):
    shapes = [(rows, 4096) if s == "output" else s for s in others]
    planned = plan(emit, (rows, 1024), *shapes, dtype=dtype, device=device)
    if emit in (graphs.gate_up, graphs.bias_gelu) and rows == 300 and dtype == FLOAT:
        # Tiles of pairs of products are too few to fill the device, which twice as many tiles of
        # single ones do, and blocks of one wave do not hide an erf: the activation may cost less
        # by itself.
        products = {o.name for o in planned.graph.ops if any(b.is_contraction for b in o.blocks)}
        assert products <= set(with_product(planned).ops)
        assert planned.launches <= 2
    else:
        assert planned.launches == 1
    assert gains(planned) > 0


@pytest.mark.parametrize("rows", [1, 2048, 4096])
def test_gate_and_up_of_a_large_layer_are_one_launch(rows):
    """Two launches take 1,004 us, one 937 (4096 rows, H200, 2026-11-20)."""
    planned = plan(graphs.gate_up, (rows, 4096), (4096, 11008), (4096, 11008))
    assert planned.launches == 1
    assert planned.plan.predicted_us < 950


@pytest.mark.parametrize("rows", [2048, 4096])
def test_a_gated_layer_is_two_launches(rows):
    def swiglu(bb, x, g, u, d):
        return op.matmul(bb.emit(graphs.gate_up(bb, x, g, u)), d)

    planned = plan(swiglu, (rows, 4096), (4096, 11008), (4096, 11008), (11008, 4096))
    assert planned.launches == 2


@pytest.mark.parametrize("columns", [(4096, 4096, 4096), (4096, 1024, 1024)], ids=str)
@pytest.mark.parametrize("rows", [2048, 4096])
def test_large_q_k_v_are_one_launch(rows, columns):
    planned = plan(graphs.qkv, (rows, 4096), *((4096, n) for n in columns))
    assert planned.launches == 1


# ---- prologues


def gated(bb, x, y, w):
    return op.matmul(bb.emit(op.multiply(bb.emit(op.nn.silu(x)), y)), w)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [64, 2048, 8192])
def test_an_activation_in_front_of_many_rows_is_a_kernel_of_its_own(rows, device):
    planned = plan(gated, (rows, 4096), (rows, 4096), (4096, 4096), device=device)
    assert planned.launches == 2
    assert RefusalCode.PROLOGUE in {r.code for r in planned.plan.refusals}
    assert gains(planned) > 0


def test_an_activation_in_front_of_one_row_is_computed_on_the_way():
    planned = plan(gated, (1, 4096), (1, 4096), (4096, 4096))
    assert planned.launches == 1
    assert gains(planned) > 0


@pytest.mark.parametrize("rows", [4, 16])
def test_an_activation_in_front_of_some_rows_is_a_kernel_of_its_own(rows):
    """Each column tile would compute it for each row: 66.9 us with 4 rows, 30 apart (H200)."""
    planned = plan(gated, (rows, 4096), (rows, 4096), (4096, 4096))
    assert planned.launches == 2
    assert gains(planned) > 0


def test_a_policy_without_recomputation_computes_an_activation_once():
    planned = plan(gated, (1, 4096), (1, 4096), (4096, 4096), policy="conservative")
    assert planned.launches == 2


def test_an_activation_that_others_read_is_a_kernel_of_its_own():
    def emit(bb, x, y, w):
        z = bb.emit(op.multiply(bb.emit(op.nn.silu(x)), y))
        return bb.emit(op.matmul(z, w)), z

    assert plan(emit, (1, 4096), (1, 4096), (4096, 4096)).launches == 2


def int4(bb, x, packed, scales):
    """x W^T, eight weights in each word, a factor for each 32 of them."""
    n, words = (int(e) for e in packed.ty.shape)
    shifts = relax.const([4 * i for i in range(8)], "int32")
    values = bb.emit(op.right_shift(bb.emit(op.reshape(packed, (n, words, 1))), shifts))
    values = bb.emit(op.bitwise_and(values, relax.const(15, "int32")))
    values = bb.emit(op.reshape(values, (n, words // 4, 32)))
    values = bb.emit(op.subtract(bb.emit(op.astype(values, HALF)), relax.const(8.0, HALF)))
    values = bb.emit(op.multiply(values, bb.emit(op.reshape(scales, (n, words // 4, 1)))))
    weights = bb.emit(op.reshape(values, (n, 8 * words)))
    return op.matmul(x, bb.emit(op.permute_dims(weights, (1, 0))))


def quantised(rows, n=11008, k=4096, **more):
    return plan(int4, (rows, k), ((n, k // 8), "int32"), ((n, k // 32), HALF), **more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 16])
def test_four_bit_weights_of_few_rows_are_widened_on_the_way(rows, device):
    planned = quantised(rows, device=device)
    assert planned.launches == 1
    assert gains(planned) > 0


@pytest.mark.parametrize("device", DEVICES)
def test_four_bit_weights_of_many_rows_are_widened_where_that_is_predicted_to_be_faster(device):
    planned = quantised(8192, device=device)
    apart = plan_of(
        module(int4, ((8192, 4096), HALF), ((11008, 512), "int32"), ((11008, 128), HALF)), device
    )
    assert gains(planned) >= 0
    assert planned.plan.predicted_us <= apart.plan.predicted_us


def test_four_bit_weights_of_many_rows_are_widened_once_on_a_device_with_wgmma():
    """The form that computes operands reaches half the rate of the one that does not."""
    planned = quantised(8192)
    assert planned.launches == 2


def test_eight_bit_weights_with_a_factor_for_each_column_are_one_launch():
    def emit(bb, x, w, scales):
        weights = bb.emit(op.permute_dims(bb.emit(op.astype(w, HALF)), (1, 0)))
        return op.multiply(bb.emit(op.matmul(x, weights)), scales)

    planned = plan(emit, (1, 4096), ((11008, 4096), "int8"), (11008,))
    assert planned.launches == 1


def test_a_cpu_computes_no_operands():
    planned = plan(gated, (1, 64), (1, 64), (64, 64), dtype=FLOAT, device="llvm")
    assert planned.launches == 2


# ---- predicted time


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (777, 1024, 4096), (1000, 999, 997)])
def test_the_report_shows_what_the_time_of_a_product_is_made_of(shape, dtype):
    m, n, k = shape
    analytic = {"learned": False}  # the terms are those of the analytic model
    group = with_product(plan(graphs.matmul, (m, k), (k, n), dtype=dtype, policy=analytic))
    assert {"hbm", "start", "launch"} <= set(group.terms)
    assert max(group.terms.values()) <= group.predicted_us


def test_few_rows_take_the_time_of_the_weights():
    group = with_product(plan(graphs.linear, (1, 4096), (11008, 4096)))
    body = {name: t for name, t in group.terms.items() if name not in ("launch", "start")}
    assert max(body, key=body.get) == "hbm"


def test_unreachable_row_pitches_cost_what_their_form_costs():
    even, odd = (with_product(plan(graphs.matmul, (4096, 4096), (4096, n))) for n in (4096, 4095))
    assert odd.predicted_us > 1.5 * even.predicted_us


@pytest.mark.parametrize(("rows", "us"), [(1, 9.9), (4, 10.2), (16, 13.6)])
def test_four_bit_weights_take_about_the_measured_time(rows, us):
    planned = quantised(rows)
    assert planned.plan.predicted_us - planned.hw.launch_us == pytest.approx(us, rel=0.1)


def test_products_with_odd_pitches_take_about_the_measured_time():
    """What decides whether the terms are filled up: 30.2 us on an H200."""
    planned = plan(graphs.matmul, (1000, 999), (999, 1001))
    assert planned.plan.predicted_us - planned.hw.launch_us == pytest.approx(31, rel=0.1)


def test_float32_may_be_rounded_for_tensor_cores_only_where_the_policy_says_so():
    exact, rounded = (
        with_product(
            plan(graphs.linear, (4096, 4096), (4096, 4096), dtype=FLOAT, policy=policy)
        ).predicted_us
        for policy in (None, {"allow_tf32": True})
    )
    assert 1300 < exact < 2800  # six products: 2,435 on an H100
    assert rounded == pytest.approx(367, rel=0.1)


def test_eight_bit_floats_take_half_the_time_of_sixteen():
    """Measured on an H200: 98.5 us, and 5 for the launch."""

    def emit(bb, x, w):
        return op.matmul(x, bb.emit(op.permute_dims(w, (1, 0))), out_dtype=FLOAT)

    shape = (4096, 4096)
    planned = plan(emit, shape, shape, dtype="float8_e4m3fn")
    assert with_product(planned).predicted_us == pytest.approx(103.4, rel=0.1)


def test_a_batch_of_products_costs_as_much_as_its_tiles():
    one, many = (
        with_product(plan(graphs.matmul, (b, 512, 512), (b, 512, 512))).predicted_us
        for b in (1, 512)
    )
    assert many > 10 * one
