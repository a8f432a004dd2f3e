"""Decompose: the names and tags of what it opens, and what it leaves alone."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

from tests.support.decompose_tools import bound_names, calls, module_of, run
from tvm_fusion.transform.decompose import COMPOSITES_ATTR, Decompose


def two_softmaxes_and_a_gelu() -> tvm.IRModule:
    return module_of(
        lambda x: op.nn.gelu(op.nn.softmax(op.exp(op.nn.softmax(x)), 0)), ((4, 8), "float16")
    )


def test_every_binding_of_a_composite_is_tagged_and_nothing_else():
    after = Decompose()(two_softmaxes_and_a_gelu())
    tags = dict(after["main"].attrs[COMPOSITES_ATTR])

    untagged = [call.op.name for name, call in calls(after) if name not in tags]
    assert untagged == ["relax.exp"]
    assert set(tags) <= set(bound_names(after))
    assert set(tags.values()) == {"softmax#1", "softmax#2", "gelu#1"}
    assert tags["softmax2_exp"] == "softmax#2"


@pytest.mark.parametrize(
    "later",
    [
        relax.transform.LegalizeOps(),
        tvm.transform.Sequential([relax.transform.LegalizeOps(), relax.transform.FoldConstant()]),
        relax.transform.DeadCodeElimination(),
        relax.transform.Normalize(),
        lambda mod: tvm.ir.load_json(tvm.ir.save_json(mod)),
        lambda mod: tvm.script.from_source(mod.script(show_meta=True)),
    ],
    ids=["legalize", "fold constants", "dead code", "normalize", "json", "tvmscript"],
)
def test_tagged_names_survive(later):
    mod = Decompose()(two_softmaxes_and_a_gelu())
    after = later(mod)

    assert dict(after["main"].attrs[COMPOSITES_ATTR]) == dict(mod["main"].attrs[COMPOSITES_ATTR])
    assert bound_names(after) == bound_names(mod)


def test_variables_of_one_name_are_told_apart():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for name, build in (
                ("x", op.nn.softmax),
                ("softmax1_exp", op.exp),
                ("x", op.nn.silu),
            ):
                call = builder.normalize(build(value))
                value = relax.DataflowVar(name, call.ty)
                builder.emit_normalized(relax.VarBinding(value, call))
            out = builder.emit_output(op.exp(value))
        builder.emit_func_output(out)
    after = Decompose()(builder.get())

    names = ["x", *bound_names(after)]
    assert len(names) == len(set(names))
    tags = dict(after["main"].attrs[COMPOSITES_ATTR])
    (user_exp,) = [name for name, call in calls(after) if name == "softmax1_exp"]
    assert user_exp not in tags
    assert tags["softmax1_exp_1"] == "softmax#1"
    array = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")
    np.testing.assert_allclose(run(after, array), run(builder.get(), array), rtol=1e-5)


def test_numbering_goes_on_where_an_earlier_run_stopped():
    once = Decompose()(module_of(op.nn.softmax, ((4, 8), "float32")))
    func = once["main"]
    (block,) = func.body.blocks
    old = block.bindings[-1]
    builder = relax.BlockBuilder(once)
    again = relax.VarBinding(old.var, builder.normalize(op.nn.softmax(block.bindings[-2].var)))
    block = relax.DataflowBlock([*block.bindings[:-1], again])
    body = relax.SeqExpr([block], func.body.body)
    grown = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
    twice = Decompose()(tvm.IRModule({"main": grown}))

    tags = dict(twice["main"].attrs[COMPOSITES_ATTR])
    assert tags["softmax1_exp"] == "softmax#1"
    assert tags["softmax2_exp"] == "softmax#2"


def test_composites_in_both_branches_of_an_if_are_opened():
    @I.ir_module
    class Before:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4, 8), "float32")):
            if c:
                y = R.nn.softmax(x)
                r = y
            else:
                y = R.nn.gelu(x)
                r = y
            return r

    after = Decompose()(Before)

    assert relax.analysis.check_well_formed(after)
    assert "R.nn." not in after.script()
    tags = dict(after["main"].attrs[COMPOSITES_ATTR])
    assert (tags["y"], tags["y_1"]) == ("softmax#1", "gelu#1")


@pytest.mark.parametrize("attr", ["Primitive", "Composite", "Codegen"])
def test_functions_that_belong_to_others_are_left_alone(attr: str):
    before = module_of(op.nn.softmax, ((4, 8), "float32"))
    before["main"] = before["main"].with_attr(attr, 1 if attr == "Primitive" else "other")

    assert Decompose()(before).same_as(before)


def training_batch_norm(x, g):
    return op.nn.batch_norm(x, g, g, g, g, 1, training=True)[0]


PASS_THROUGH = {
    "pointwise": (lambda x: op.exp(op.add(x, x)), [((4, 8), "float32")]),
    "float32 reductions": (lambda x: op.add(op.sum(x), op.max(x)), [((4, 8), "float32")]),
    "cumsum": (lambda x: op.cumsum(x, 1), [((4, 8), "float16")]),
    "sort": (op.sort, [((4, 8), "float32")]),
    "pooling": (lambda x: op.nn.max_pool2d(x, 2), [((1, 2, 8, 8), "float16")]),
    "relu and softplus": (lambda x: op.nn.softplus(op.nn.relu(x)), [((4, 8), "float32")]),
    "batch_norm in training form": (training_batch_norm, [((4, 8), "float32"), ((8,), "float32")]),
    "mean over a symbolic extent": (
        lambda x: op.mean(x, 0),
        [((tirx.Var("n", "int64"), 8), "float32")],
    ),
    "mean of a scalar": (op.mean, [((), "float32")]),
    "mean of unknown shape": (lambda x: op.mean(x, 0), [(None, "float32", None, 2)]),
    "sliding window attention": (
        lambda q: op.nn.attention(q, q, q, window_size=4),
        [((1, 8, 2, 4), "float32")],
    ),
    "attention with fewer key heads": (
        lambda q, k: op.nn.attention(q, k, k),
        [((1, 8, 4, 4), "float32"), ((1, 8, 2, 4), "float32")],
    ),
    "group_norm of symbolic channels": (
        lambda x, g: op.nn.group_norm(x, g, g, 2, 1, [2]),
        [((1, tirx.Var("c", "int64"), 4), "float32"), ((tirx.Var("c", "int64"),), "float32")],
    ),
}


@pytest.mark.parametrize("name", PASS_THROUGH)
def test_what_has_no_rule_passes_through(name: str):
    build, types = PASS_THROUGH[name]
    before = module_of(build, *types)

    assert Decompose()(before).same_as(before)


def test_other_functions_and_module_attributes_survive():
    before = module_of(op.nn.softmax, ((4, 8), "float32"))
    before = before.with_attr("system_lib_prefix", "mine")
    before["other"] = module_of(op.exp, ((4,), "float32"))["main"].with_attr(
        "global_symbol", "other"
    )
    after = Decompose()(before)

    assert after.attrs["system_lib_prefix"] == "mine"
    assert after["other"].same_as(before["other"])
