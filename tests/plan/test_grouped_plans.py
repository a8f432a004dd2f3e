"""Plans of graphs with many matrix products: siblings, experts, low-rank updates, batches."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import unfused_plan

from ..support import grouped_cases as graphs
from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.gemm_cases import FLOAT, HALF
from ..support.graphs import module, plan_of
from ..support.kernel_cases import outputs_of

TOKENS = (600, 300, 900, 100, 700, 496, 500, 500)
FEW_TOKENS = (75, 37, 112, 12, 87, 62, 62, 62)
DTYPES = [HALF, FLOAT]


def plan(emit, *shapes, dtype=HALF, device="nvidia_h200", **more):
    return plan_of(module(emit, *((s, dtype) for s in shapes)), device, **more)


def products_of(planned):
    """Matrix products of each launch."""
    count = {o.name: sum(b.is_contraction for b in o.blocks) for o in planned.graph.ops}
    return [sum(count[name] for name in g.ops) for g in planned.plan.groups]


def gains(planned):
    """Whether the plan is predicted to be faster than that which fuses nothing."""
    unfused = unfused_plan(planned.graph, planned.hw, load_policy(None))
    return planned.plan.predicted_us < unfused.predicted_us


def feed_forward(tokens, hidden, inner):
    """Shapes of tokens, gate, up and down of each expert."""
    return [
        s for t in tokens for s in ((t, hidden), (hidden, inner), (hidden, inner), (inner, hidden))
    ]


def low_rank(hidden, widths, rank=16):
    """Shapes of a weight and its low-rank factors, for each width."""
    return [s for n in widths for s in ((hidden, n), (hidden, rank), (rank, n))]


# ---- siblings


@pytest.mark.parametrize("dtype", DTYPES)
def test_six_projections_of_one_tensor_are_one_launch(dtype):
    widths = (4096, 16, 1024, 16, 1024, 16)
    planned = plan(graphs.projections, (512, 4096), *((4096, n) for n in widths), dtype=dtype)
    assert products_of(planned) == [6]
    assert gains(planned)


def test_nine_projections_are_two_launches():
    planned = plan(graphs.projections, (512, 1024), *[(1024, 256)] * 9)
    assert sorted(products_of(planned)) == [1, 8]


def test_pairs_that_meet_in_an_output_stay_apart_from_others():
    def emit(bb, x, g, u, w):
        return relax.Tuple([*graphs.experts(bb, x, g, u).fields, bb.emit(op.matmul(x, w))])

    planned = plan(emit, (4096, 4096), *[(4096, 4096)] * 3)
    assert sorted(products_of(planned)) == [1, 2]


# ---- low-rank updates


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [16, 4096])
def test_q_k_v_with_low_rank_updates_are_at_most_three_launches(rows, dtype):
    """The weights and the first factors read the same rows: they may be one launch, which nothing
    but the products with the second factors and the sums follows. In float32 tensor cores multiply
    three times, and narrow factors are faster apart.
    """
    shapes = low_rank(4096, (4096, 1024, 1024))
    planned = plan(graphs.lora, (rows, 4096), *shapes, dtype=dtype)
    assert sum(products_of(planned)) == 9
    assert planned.launches <= (3 if dtype == HALF or rows == 16 else 4)
    assert gains(planned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_second_halves_with_residuals_are_one_launch(dtype):
    shapes = [s for n in (4096, 1024, 512) for s in ((4096, 16), (16, n), (4096, n))]
    planned = plan(graphs.lora_b, *shapes, dtype=dtype)
    assert products_of(planned) == [3]
    assert gains(planned)


# ---- experts


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("emit", [graphs.mixture, graphs.mixture_one_by_one])
def test_experts_of_few_tokens_are_a_launch_for_gate_and_up_and_one_for_down(emit, dtype):
    shapes = feed_forward(FEW_TOKENS, 2048, 1024)
    planned = plan(emit, *shapes, dtype=dtype, policy={"max_group_ops": 128})
    # twelve tokens in float32: a form of few rows of their own is predicted to be faster
    launches = [8, 16] if dtype == HALF else [1, 2, 7, 14]
    assert sorted(products_of(planned)) == launches
    assert gains(planned)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("emit", [graphs.mixture, graphs.mixture_one_by_one])
def test_experts_of_many_tokens_are_as_few_launches_as_the_predicted_time_says(emit, dtype):
    shapes = feed_forward(TOKENS, 2048, 1024)
    planned = plan(emit, *shapes, dtype=dtype, policy={"max_group_ops": 128})
    assert sum(products_of(planned)) == 24
    assert planned.launches <= 6
    assert gains(planned)


def test_an_expert_never_shares_a_launch_with_what_waits_for_it():
    planned = plan(graphs.mixture_one_by_one, *feed_forward(TOKENS, 2048, 1024))
    where = {name: i for i, g in enumerate(planned.plan.groups) for name in g.ops}
    for group in planned.plan.groups:
        inside = {n for n, i in where.items() if planned.plan.groups[i] is group}
        assert not _leaves_and_returns(planned.graph, inside)


def _leaves_and_returns(graph, inside):
    """Whether a path leaves a set of operators and comes back to it."""
    outside = {o.id for o in graph.ops if o.name not in inside}
    reached = {o.id for o in graph.ops if o.name in inside}
    left = set()
    for o in graph.ops:
        before = set(graph.producers(o.id))
        if o.id in outside and before & (reached | left):
            left.add(o.id)
    return any(set(graph.producers(o.id)) & left for o in graph.ops if o.name in inside)


# ---- batches


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_equal_products_written_apart_are_one_launch(dtype):
    planned = plan(graphs.separate, *[(64, 64)] * 16, dtype=dtype)
    assert products_of(planned) == [8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_small_products_is_one_launch(dtype):
    planned = plan(graphs.separate, (512, 64, 64), (512, 64, 64), dtype=dtype)
    assert products_of(planned) == [1]


# ---- the kernels of a plan


def launches_of(emit, *shapes, dtype=FLOAT):
    """The launches of a module's plan on an H200: kernel, arguments and results, by name."""
    target, hw = resolve_target("nvidia_h200")
    mod = module(emit, *((s, dtype) for s in shapes))
    own = Planned.of(mod, target, hw, load_policy(None))
    found = own.write()
    written = found.mod
    assert not found.planned.cuts
    found = []
    for binding in written["main"].body.blocks[0].bindings:
        if isinstance(binding.value, relax.Call):
            kernel, arguments = binding.value.args
            found.append((binding.var, written[kernel], list(arguments.fields)))
    return written["main"], found


def run_on_cpu(emit, *inputs):
    """Results of a module's plan, each launch on the emulator."""
    main, launches = launches_of(emit, *(x.shape for x in inputs))
    values = dict(zip((p.name for p in main.params), inputs, strict=True))
    for var, kernel, arguments in launches:
        results = outputs_of(kernel, len(arguments))
        assert run_cuda_on_cpu(kernel, [*(values[a.name] for a in arguments), *results]) == 1
        values[var.name] = results
        for b in main.body.blocks[0].bindings:
            if isinstance(b.value, relax.TupleGetItem) and b.value.tuple_value.same_as(var):
                values[b.var.name] = results[b.value.index]
    last = main.body.blocks[0].bindings[-1].value
    return [values[field.name] for field in last.fields], len(launches)


WHOLE = {
    "low-rank updates": (
        graphs.lora,
        graphs.lora_of,
        [(37, 40), (40, 24), (40, 4), (4, 24), (40, 8), (40, 4), (4, 8)],
        3,
    ),
    "experts": (
        graphs.mixture_one_by_one,
        graphs.mixture_of,
        [s for t in (5, 70, 1) for s in ((t, 33), (33, 24), (33, 24), (24, 33))],
        2,
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", WHOLE)
def test_the_launches_of_a_plan_compute_what_the_graph_says(what):
    emit, reference, shapes, launches = WHOLE[what]
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(s).astype(FLOAT) for s in shapes]
    results, count = run_on_cpu(emit, *inputs)
    assert count <= launches
    expected = reference(*(x.astype(np.float64) for x in inputs))
    for got, want in zip(results, expected, strict=True):
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


# ---- what stays apart


def refusal(planned):
    """Codes of the refusals, each once."""
    return {r.code for r in planned.plan.refusals}


def test_large_independent_products_stay_apart():
    planned = plan(graphs.separate, *[(4096, 4096)] * 4)
    assert products_of(planned) == [1, 1]


def test_sums_of_unlike_length_stay_apart():
    planned = plan(graphs.separate, (256, 4096), (4096, 256), (256, 512), (512, 256))
    assert products_of(planned) == [1, 1]


def test_operands_of_different_dtypes_stay_apart():
    inputs = [((64, 64), d) for d in (HALF, HALF, FLOAT, FLOAT)]
    assert products_of(plan_of(module(graphs.separate, *inputs), "nvidia_h200")) == [1, 1]


def test_a_cpu_keeps_independent_products_apart():
    planned = plan(graphs.separate, *[(64, 64)] * 4, device="llvm", dtype=FLOAT)
    assert products_of(planned) == [1, 1]


def test_no_launch_holds_more_than_sixteen_products():
    planned = plan(graphs.separate, *[(64, 64)] * 40, dtype=FLOAT)
    assert max(products_of(planned)) <= 16


def test_a_product_of_a_product_is_two_launches():
    def emit(bb, x, w, u):
        return op.matmul(bb.emit(op.matmul(x, w)), u)

    planned = plan(emit, *[(64, 64)] * 3)
    assert products_of(planned) == [1, 1]
    assert RefusalCode.SEVERAL_CONTRACTIONS in refusal(planned)


def test_products_of_different_operands_that_meet_are_two_launches():
    """One product with the sum behind it, or both side by side and the sum by itself."""

    def emit(bb, x, w, y, u):
        return op.add(bb.emit(op.matmul(x, w)), bb.emit(op.matmul(y, u)))

    planned = plan(emit, *[(64, 64)] * 4)
    assert sorted(products_of(planned)) in ([1, 1], [0, 2])
    assert RefusalCode.SEVERAL_CONTRACTIONS in refusal(planned)


def chain(bb, x, y, *weights):
    """Two chains of products that cross: each product's operand may come from either."""
    results = []
    for i, w in enumerate(weights):
        results.append(bb.emit(op.matmul(x if i % 3 else y, w)))
        x, y = y, results[-1]
    return relax.Tuple(results)


@pytest.mark.parametrize("length", range(2, 9))
def test_crossing_chains_of_products_make_no_circle(length):
    planned = plan(chain, *[(64, 64)] * (2 + length), dtype=FLOAT)
    assert sum(products_of(planned)) == length
    for group in planned.plan.groups:
        assert not _leaves_and_returns(planned.graph, set(group.ops))


def test_an_opaque_operator_between_two_products_keeps_them_apart():
    def emit(bb, x, w, u):
        y = bb.emit(op.matmul(x, w))
        z = bb.emit(relax.call_dps_packed("somewhere.f", (y,), out_ty=y.ty))
        return relax.Tuple([y, bb.emit(op.matmul(z, u))])

    planned = plan(emit, *[(64, 64)] * 3)
    assert max(products_of(planned)) == 1


def test_planning_twice_gives_the_same_plan():
    plans = [plan(graphs.lora, (512, 1024), *low_rank(1024, (1024, 256, 256))) for _ in range(2)]
    first, second = ([g.ops for g in p.plan.groups] for p in plans)
    assert first == second
