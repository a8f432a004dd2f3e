"""`explain --why a,b` names a price, the reason and one action, whatever the two are."""

import re
from types import SimpleNamespace

import pytest
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_policy
from tvm_fusion.errors import InputError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels import registry
from tvm_fusion.report.flip import KINDS
from tvm_fusion.report.why import _known, asked, why

from ..support.graphs import Refuses, module

PRICED = re.compile(r"(saves|costs|would save) [\d.]+ (us|ms)")


def projections(bb, x, first, second):
    q = bb.emit(op.matmul(x, first), "q")
    k = bb.emit(op.matmul(x, second), "k")
    weights = bb.emit(op.nn.softmax(q), "weights")
    return k, bb.emit(op.sum(weights, axis=0), "out")


SQUARE = ((256, 256), "float32")
MODEL = module(projections, *[SQUARE] * 3)


def answer(pair, target="llvm", mod=MODEL, **options):
    report = tvm_fusion.explain(mod, target, why=pair, **options)
    text = why(report)
    assert report.pair.names == tuple(pair.split(","))
    assert all(f"({group.kernel_class}" in text for group in report.groups)
    assert PRICED.search(text), text
    assert report.repeats == ()
    assert {(group.same_as, group.rejected) for group in report.groups} <= {(None, None)}
    assert all(r.flip.split(": ")[0] in KINDS for r in report.pair.refusals)
    assert report.to_json()["pair"]["price"] == report.pair.price
    return report.pair, text


def test_products_that_read_one_operand_say_why_they_are_two_launches_on_a_cpu():
    pair, text = answer("q,k")
    assert "neither reads the other, both read x0 (262 kB)" in text
    assert "share nothing but the call" in text
    assert "to turn it: model: multiply once by the weights side by side" in text
    assert (pair.saves_us, pair.kernel_class) == (None, None)
    assert pair.limit_us <= pair.apart_us


def test_what_is_one_kernel_says_what_that_saves():
    pair, text = answer("q,k", "nvidia_h200", mod=HALVES)
    assert "one kernel computes both" in text
    assert pair.saves_us == pytest.approx(pair.apart_us - pair.together_us)
    assert pair.saves_us > 0


HALVES = module(projections, *[((256, 256), "float16")] * 3)


def test_what_lies_between_two_that_are_no_neighbours_is_named():
    pair, text = answer("q,out")
    assert "not neighbours: no tensor between them and no operand in common" in text
    assert any("weights" in label for label in pair.between)
    assert "no kernel class computes these" in pair.price


def independent(bb, x, y):
    return bb.emit(op.exp(x), "one"), bb.emit(op.sum(y, axis=0), "other")


def test_what_was_never_proposed_says_since_when():
    mod = module(independent, ((64, 64), "float32"), ((32, 48), "float32"))
    _, text = answer("one,other", mod=mod)
    assert "neither is computed from the other" in text


def chain(bb, x):
    return bb.emit(op.sqrt(bb.emit(op.exp(bb.emit(op.tanh(x), "a")), "b")), "c")


def test_a_fusion_that_a_class_could_do_has_its_price():
    """A plan that has them apart: the pair is evaluated, not looked up."""
    mod = module(chain, ((512, 512), "float32"))
    apart = tvm_fusion.explain(mod, "llvm", policy={"max_group_ops": 1})
    plan = dict(apart.plan, refusals=[])
    pair, text = answer("a,b", mod=mod, plan=plan)
    assert pair.kernel_class == "pointwise"
    assert pair.saves_us == pytest.approx(pair.apart_us - pair.together_us)
    assert pair.saves_us > 0
    assert "as one pointwise kernel" in text
    pair, text = answer("a,b", mod=mod, plan=plan, policy={"max_group_ops": 1})
    assert "policy: allowed from max_group_ops = 2 (now 1)" in text


def test_names_may_be_modules_groups_and_composites():
    target, hw = tvm_fusion.config.resolve_target("llvm")
    planned = Planned.of(MODEL, target, hw, load_policy(None))
    report = tvm_fusion.explain(MODEL, "llvm")
    ops = [
        SimpleNamespace(name=name, module=f"layers.{n}.proj", source=None)
        for n, name in enumerate(("q", "k"))
    ]
    known = _known(planned, SimpleNamespace(groups=report.groups, graph=SimpleNamespace(ops=ops)))
    assert known["layers.0"] == {"q"}
    assert known["layers"] == {"q", "k"}
    assert "weights" in known["softmax#1"]
    assert len(known["softmax#1"]) > 1
    told = asked(planned, report, "softmax#1,out")
    assert told.pair.launches
    assert {g.name for g in told.groups} < {g.name for g in report.groups}


def test_an_unknown_name_gives_the_nearest_ones():
    with pytest.raises(InputError, match=r"nothing is called 'weigths' .*did you mean 'weights'"):
        tvm_fusion.explain(MODEL, "llvm", why="q,weigths")
    with pytest.raises(InputError, match="takes two names"):
        tvm_fusion.explain(MODEL, "llvm", why="q")


def test_a_class_of_the_users_is_heard_and_hides_nobody():
    _, alone = answer("q,k")
    registry.register(Refuses(), ("llvm",))
    try:
        _, beside = answer("q,k")
    finally:
        registry.unregister("refuses")
    assert [x for x in beside.splitlines() if "refuses" not in x] == alone.splitlines()
    assert "  refuses: nothing is computed twice" in beside.splitlines()
