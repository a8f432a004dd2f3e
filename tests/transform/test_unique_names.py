"""Names of Vars: unique, and identifiers."""

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tests.support.graphs import module
from tvm_fusion.transform.functions.unique_names import UniqueNames

TY = relax.TensorType((4,), "float32")


def with_names(parameter: str, *names: str) -> tvm.IRModule:
    """main(parameter) = tanh(exp(...)) through Vars of the given names."""
    x = relax.Var(parameter, TY)
    bindings, value = [], x
    for name in names:
        var = relax.DataflowVar(name, TY)
        bindings.append(relax.VarBinding(var, op.exp(value)))
        value = var
    out = relax.Var("out", TY)
    bindings.append(relax.VarBinding(out, op.tanh(value)))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], out)
    return relax.transform.Normalize()(tvm.IRModule({"main": relax.Function([x], body, TY)}))


def names_of(mod):
    func = mod["main"]
    return [func.params[0].name, *(b.var.name for b in func.body.blocks[0].bindings)]


def test_twins_and_odd_characters_are_renamed():
    mod = UniqueNames()(with_names("in/x:0", "lv", "lv", "2.y"))
    assert names_of(mod) == ["in_x_0", "lv", "lv_1", "_2_y", "out"]
    relax.analysis.well_formed(mod)


def test_good_names_stay():
    mod = module(lambda bb, x: op.exp(x), ((4,), "float32"))
    tvm.ir.assert_structural_equal(UniqueNames()(mod), mod)


def test_renaming_twice_is_renaming_once():
    once = UniqueNames()(with_names("a b", "lv", "lv"))
    tvm.ir.assert_structural_equal(UniqueNames()(once), once)


def test_a_model_with_such_names_compiles_and_runs():
    compiled = tvm_fusion.compile(with_names("in/x:0", "lv", "lv"), "llvm", verify=False)
    x = np.linspace(-1, 0, 4).astype("float32")
    np.testing.assert_allclose(compiled(x), np.tanh(np.exp(np.exp(x))), rtol=1e-5)
