"""Graphs that repeat themselves: what is found, and plans that are the same as without looking."""

import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.graph import FusionGraph
from tvm_fusion.plan.legality import Evaluator
from tvm_fusion.plan.regions.repeats import LEAST_PERIODS, Shortened, find_repeats, shortened
from tvm_fusion.plan.search.search import plan_from, search, solve, solve_whole
from tvm_fusion.plan.search.solution import check_solution
from tvm_fusion.plan.structure import Structures

from ..support.counting import searched
from ..support.graphs import module
from ..support.large_graphs import graph_of, transformer

POLICY = load_policy()
H200 = load_profile("h200")
SMALL = {"tokens": 128, "width": 128, "heads": 4}
F16 = "float16"


def evaluator_of(mod, device="h200") -> Evaluator:
    hw = load_profile(device)
    return Evaluator(graph_of(mod, hw), hw, POLICY)


def repeats_of(evaluator: Evaluator):
    return find_repeats(evaluator.graph, evaluator.wiring.number, LEAST_PERIODS)


def chain(periods, results=False):
    """exp, sum, divide, add of a weight of its own, multiply by a common one."""

    def emit(bb, x, common, *weights):
        kept = []
        for weight in weights[:periods]:
            e = bb.emit(op.exp(x))
            total = bb.emit(op.sum(e, axis=-1, keepdims=True))
            x = bb.emit(op.add(bb.emit(op.divide(e, total)), weight))
            x = bb.emit(op.multiply(x, common))
            kept.append(x)
        return (x, *(kept[:-1] if results else ()))

    shapes = [((64, 128), F16)] * 2 + [((128,), F16)] * periods
    return module(emit, *shapes)


def masked(periods):
    """Layers of attention that all take one mask, which each of them computes again."""

    def emit(bb, x, rows, columns, *weights):
        mask = bb.emit(op.less_equal(columns, rows))
        for weight in weights:
            scores = bb.emit(op.matmul(x, weight))
            lowest = relax.const(-1e4, F16)
            x = bb.emit(op.nn.softmax(bb.emit(op.where(mask, scores, lowest)), axis=-1))
        return x

    shapes = [((512, 512), F16), ((512, 1), F16), ((1, 512), F16)]
    return module(emit, *shapes, *[((512, 512), F16)] * periods)


def counting(periods):
    """Layers of which each raises a counter of its own, all of them in one launch."""

    def emit(bb, x, *given):
        raised = []
        for weight, counter in zip(given[:periods], given[periods:], strict=True):
            raised.append(bb.emit(op.add(counter, relax.const(1, "int64"))))
            x = bb.emit(op.tanh(bb.emit(op.matmul(x, weight))))
        return x, *raised

    return module(emit, *[((512, 512), F16)] * (periods + 1), *[((), "int64")] * periods)


def test_a_chain_of_layers_is_one_repeat_of_as_many_periods():
    evaluator = evaluator_of(chain(9))
    first = repeats_of(evaluator)[0]
    assert first.period == len(evaluator.graph.ops) // 9
    assert first.count >= 8
    assert first.end <= len(evaluator.graph.ops)


def test_fewer_layers_than_are_planned_anyway_are_no_repeat():
    assert not repeats_of(evaluator_of(chain(3)))


def test_results_of_every_layer_do_not_hide_the_repeat():
    assert repeats_of(evaluator_of(chain(9, results=True)))


def test_a_layer_unlike_the_others_ends_the_repeat():
    def emit(bb, x):
        for number in range(20):
            turn = op.nn.relu if number == 10 else op.tanh
            for f in (op.exp, op.sin, op.cos, turn):
                x = bb.emit(f(x))
        return x

    found = repeats_of(evaluator_of(module(emit, ((64, 64), F16))))
    assert found
    assert not any(repeat.start <= 43 < repeat.end for repeat in found)


@pytest.mark.parametrize("read", [False, True])
def test_values_that_are_read_behind_all_layers_are_left_alone(read):
    def emit(bb, x):
        first = []
        for _ in range(12):
            for f in (op.exp, op.sin, op.cos, op.tanh):
                x = bb.emit(f(x))
            first.append(x)
        for value in first[:-1] if read else ():
            x = bb.emit(op.add(x, value))
        return x

    found = repeats_of(evaluator_of(module(emit, ((64, 64), F16))))
    assert any(repeat.start < 48 and repeat.end > 4 for repeat in found) is not read


@pytest.mark.parametrize("shared", [(), (4, 6), (5, 6)], ids=str)
def test_a_weight_that_two_layers_share_is_no_weight_of_their_own(shared):
    """The launches that read it become one, which the others do not."""

    def emit(bb, x, *given):
        weights, scales = given[:9], given[9:]
        for number in range(9):
            weight = weights[shared[0] if number in shared else number]
            rows = bb.emit(op.nn.softmax(bb.emit(op.multiply(weight, scales[number]))))
            x = bb.emit(op.tanh(bb.emit(op.matmul(rows, x))))
        return x

    evaluator = evaluator_of(module(emit, *[((1024, 1024), F16)] * 19))
    assert bool(repeats_of(evaluator)) is not bool(shared)
    found = plan_from(evaluator, solve(evaluator))
    assert found.to_json() == plan_from(evaluator, solve_whole(evaluator)).to_json()


def test_the_short_graph_is_the_graph_of_fewer_layers():
    long, short = (graph_of(transformer(n, **SMALL), H200) for n in (9, 4))
    evaluator = Evaluator(long, H200, POLICY)
    repeat = repeats_of(evaluator)[0]
    cut = Shortened.of(long, repeat, 2, repeat.count - 7)
    assert [op.func for op in cut.short.ops] == [op.func for op in short.ops]
    assert [op.inputs for op in cut.short.ops][-1] != ()
    assert cut.short.ancestors == short.ancestors
    assert cut.short.descendants == short.descendants
    again = Evaluator(short, H200, POLICY, structures=evaluator.structures)
    assert evaluator.on(cut.short).wiring.number == again.wiring.number


MODELS = {
    "chain": lambda: chain(12),
    "chain with results": lambda: chain(12, results=True),
    "transformer": lambda: transformer(8, **SMALL),
    "transformer with a cache": lambda: transformer(8, **SMALL, keep=True),
    "layers of one mask": lambda: masked(12),
    "layers with counters": lambda: counting(24),
    "one layer is different": lambda: transformer(14, **SMALL, odd=7),
}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("device", ["h200", "llvm"])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_the_one_of_the_whole_graph(name, device):
    evaluator = evaluator_of(MODELS[name](), device)
    forms = list(shortened(evaluator.graph, repeats_of(evaluator)))
    assert any(len(f.short.ops) < len(f.graph.ops) for f in forms)
    found, whole = solve(evaluator), solve_whole(evaluator)
    check_solution(evaluator.graph, found, evaluator)
    assert plan_from(evaluator, found).to_json() == plan_from(evaluator, whole).to_json()


def test_a_solution_that_is_not_periodic_is_not_continued():
    evaluator = evaluator_of(chain(12))
    form = next(shortened(evaluator.graph, repeats_of(evaluator)))
    single = solve_whole(Evaluator(form.short, H200, load_policy({"max_group_ops": 1})))
    assert form.expand(single) is not None
    lopsided = solve_whole(evaluator.on(form.short))
    middle = form.repeat.start + form.head * form.repeat.period
    kept = tuple(x for x in lopsided if x.members >> middle & 1)
    apart = tuple(x for x in single if x.members & ~kept[0].members)
    assert form.expand((*apart, kept[0])) is None


def layers_of(count: int) -> FusionGraph:
    return graph_of(transformer(count), H200)


def test_thirty_two_layers_take_little_more_work_than_one(monkeypatch):
    """A stack of one layer is planned whole; a long one as a few, and most of these are known."""
    work = {}
    for count in (1, 32):
        with searched(monkeypatch) as work[count]:
            search(layers_of(count), H200, POLICY, structures=Structures())
    assert work[32]["asked"] < 3 * work[1]["asked"]
    assert work[32]["costed"] < work[1]["costed"]


def test_every_layer_of_a_long_stack_is_planned_like_the_one_before():
    graph = layers_of(16)
    plan = search(graph, H200, POLICY)
    plan.check(graph)
    sizes = [len(g.ops) for g in plan.groups if g.kernel_class not in ("view", "opaque")]
    classes = [g.kernel_class for g in plan.groups if g.kernel_class not in ("view", "opaque")]
    per_layer = len(sizes) // 16
    middle = slice(4 * per_layer, 12 * per_layer)
    shifted = slice(5 * per_layer, 13 * per_layer)
    assert sizes[middle] == sizes[shifted]
    assert classes[middle] == classes[shifted]


def test_forbidden_groups_are_kept_apart_in_one_layer_only():
    graph = layers_of(8)
    plan = search(graph, H200, POLICY)
    half = len(plan.groups) // 2
    banned = max((g.ops for g in plan.groups[half - 5 : half + 5]), key=len)
    again = search(graph, H200, POLICY, forbidden=frozenset({banned}))
    assert banned not in [g.ops for g in again.groups]
    assert sum(len(g.ops) == len(banned) for g in again.groups) > 1
