"""Rewrites of models of many equal layers are tried on a few of these, and those that cannot gain
are not planned.
"""

import math
from collections import deque

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow import variants
from tvm_fusion.flow.few_layers import HEAD, LEAST, TAIL, few_layers
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.plan import structure
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.plan.search import search
from tvm_fusion.transform.pipeline import legalize, open_composites

from ..support.graphs import module
from ..support.large_graphs import transformer

H200 = load_profile("nvidia_h200")
SMALL = {"tokens": 128, "width": 128, "heads": 4}
COUNT = LEAST + 1


def opened(mod: tvm.IRModule) -> tvm.IRModule:
    return open_composites(mod, H200.to_target(), hw=H200)


def operators(mod: tvm.IRModule) -> list[str]:
    bindings = (b for block in mod["main"].body.blocks for b in block.bindings)
    return [getattr(getattr(b.value, "op", None), "name", "") for b in bindings]


def folded(layers: int, words: int = 1001) -> tvm.IRModule:
    """Norms and products with constants of their own, and a last product of an odd width."""

    def emit(bb, x):
        rng = np.random.default_rng(0)

        def weight(*shape: int) -> tvm.ir.GenericConst:
            return relax.const(rng.standard_normal(shape).astype("float16"))

        for _ in range(layers):
            normed = bb.emit(op.nn.rms_norm(x, weight(256), axes=[-1]))
            inner = bb.emit(op.nn.silu(bb.emit(op.matmul(normed, weight(256, 512)))))
            x = bb.emit(op.add(x, bb.emit(op.matmul(inner, weight(512, 256)))))
        return op.matmul(x, weight(256, words))

    return module(emit, ((512, 256), "float16"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keep", [False, True], ids=["last", "all"])
def test_the_short_function_is_that_of_fewer_layers(keep):
    whole = opened(transformer(COUNT, **SMALL, keep=keep))
    short = few_layers(whole)
    relax.analysis.well_formed(short.mod)
    fewer = transformer(HEAD + TAIL + 1, **SMALL, keep=keep)  # the first one is like no other
    assert operators(short.mod) == operators(opened(fewer))
    assert math.isclose(sum(short.stands_for.values()), len(operators(whole)))


def test_the_first_layer_behind_those_left_out_reads_the_last_one_in_front():
    def emit(bb, x, *weights):
        for weight in weights:
            for f in (op.exp, op.sin, op.tanh):
                x = bb.emit(f(x))
            x = bb.emit(op.add(x, weight))
        return x

    mod = module(emit, *[((8, 8), "float32")] * (COUNT + 1))
    used = [v.name for v in relax.analysis.free_vars(few_layers(mod).mod["main"].body)]
    given = [p.name for p in mod["main"].params]
    unused = [name for name in given if name not in used]
    first = given.index(unused[0])
    assert unused == given[first : first + len(unused)]
    assert HEAD <= first < first + len(unused) <= len(given) - TAIL


@pytest.mark.parametrize("layers", [LEAST - 1, 1])
def test_a_function_of_few_layers_has_no_short_form(layers):
    assert few_layers(opened(transformer(layers, **SMALL))) is None


def test_a_function_of_several_blocks_has_no_short_form():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 8), "float32"))
    with bb.function("main", [x]):
        y = x
        for _ in range(COUNT):
            with bb.dataflow():
                for f in (op.exp, op.sin, op.tanh):
                    y = bb.emit(f(y))
                y = bb.emit_output(y)
            y = bb.emit(op.cos(y))
        bb.emit_func_output(y)
    assert few_layers(bb.get()) is None


def searched(mod: tvm.IRModule, **policy: str) -> FusionPlan:
    policy = load_policy({"probe": "off", **policy})
    _, graph, plan = variants.searched_plan(mod, H200.to_target(), H200, policy)
    plan.check(graph)
    return plan


@pytest.fixture
def decided(monkeypatch) -> list[int]:
    """The operators of the graphs that are planned."""
    sizes, decide = [], variants.decide

    def counted(graph, *rest, **more):
        sizes.append(len(graph.ops))
        return decide(graph, *rest, **more)

    monkeypatch.setattr(variants, "decide", counted)
    return sizes


def test_the_plan_is_that_of_the_whole_which_is_planned_once(decided, monkeypatch):
    found, sizes = searched(folded(COUNT)), [*decided]
    assert len(sizes) > 2
    assert max(sizes[:-1]) < 0.8 * sizes[-1]
    monkeypatch.setattr(variants, "few_layers", lambda mod: None)
    assert searched(folded(COUNT)).to_json() == found.to_json()
    assert found.rewrites


@pytest.mark.one_in(2)
@pytest.mark.parametrize("exact", [False, True])
def test_where_a_few_layers_do_not_tell_the_whole_decides(exact, decided, monkeypatch):
    """Of few layers that take exactly what the whole takes, the plan's own whole is enough."""
    monkeypatch.setattr(variants, "CLOSE", math.inf)
    if not exact:
        monkeypatch.setattr(variants, "SAME", -1.0)
    searched(folded(COUNT, 20_001), rounding="exact")
    short, whole = decided[:2], decided[2:]
    assert len(whole) == (1 if exact else 2)
    assert max(short) < min(whole)


def test_few_layers_and_the_whole_are_solved_once(monkeypatch):
    sizes, solve = [], search._improved

    def counted(evaluator, first):
        sizes.append(len(evaluator.graph.ops))
        return solve(evaluator, first)

    monkeypatch.setattr(search, "_improved", counted)
    monkeypatch.setattr(structure, "_RECENT", deque(maxlen=4))
    mod = opened(transformer(COUNT, **SMALL))
    target = H200.to_target()
    graphs = [build_graph(legalize(one, target, H200)) for one in (few_layers(mod).mod, mod)]
    few, whole = [search.search(graph, H200, load_policy(None)) for graph in graphs]
    assert sizes == [len(graphs[0].ops)]
    monkeypatch.setattr(structure, "_RECENT", deque(maxlen=4))
    assert search.search(graphs[1], H200, load_policy(None)) == whole
    assert len(few.groups) < len(whole.groups)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("least", "planned"), [(0.001, True), (0.2, False)])
def test_what_changes_launches_of_little_time_is_not_planned(least, planned, decided, monkeypatch):
    """`lean_weights` stores the last weight with longer rows; nothing else finds work here."""
    monkeypatch.setattr(variants, "LEAST_REWRITE_GAIN", least)
    searched(folded(4), rounding="exact")
    assert (len(decided) > 1) is planned
