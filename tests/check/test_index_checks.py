"""Indices that are data are checked before a call, where the device itself raises nothing."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_fusion
from tvm_fusion.check import index_checks
from tvm_fusion.check.compiled import _takes
from tvm_fusion.check.index_checks import VARIABLE, IndexChecks, of_saved
from tvm_fusion.config import load_profile
from tvm_fusion.errors import OutOfRange
from tvm_fusion.ir.origins import Origin

from ..support.graphs import module

LLVM = tvm.target.Target({"kind": "llvm", "opt-level": 0})
X, ROWS, U = (("float32", (3, 5)), ("int64", (3, 2)), ("float32", (3, 2)))
IN, OUT = np.array([[0, 4], [1, -5], [2, 0]]), np.array([[0, 4], [1, 8], [2, 0]])


def model(emit, *inputs):
    return module(emit, *((shape, dtype) for dtype, shape in inputs))


def later(bb, index):
    return bb.emit(op.add(index, relax.const(1, "int64")))


CASES = {
    "take": (model(lambda bb, x, i: op.take(x, i, axis=1), X, ROWS), abs(IN) % 5, "axis 1, .* 5 "),
    "computed": (
        model(lambda bb, x, i: op.take(x, later(bb, i), axis=1), X, ROWS),
        np.array([[-1, 3]] * 3),
        "axis 1, .* 5 ",
    ),
    "gather": (
        model(lambda bb, x, i: op.gather_elements(x, i, axis=1), X, ROWS),
        abs(IN) % 5,
        "axis 1, .* 5 ",
    ),
    "gather_nd": (
        model(lambda bb, x, i: op.gather_nd(x, i), X, ROWS),
        abs(IN) % 3,
        "axis 1, .* 5 ",
    ),
    "scatter_elements": (
        model(lambda bb, x, i, u: op.scatter_elements(x, i, u, axis=1), X, ROWS, U),
        IN,
        "axis 1, .* 5 ",
    ),
}


def tensors(*arrays):
    return [tvm.runtime.tensor(array) for array in arrays]


def values(*specs):
    return [np.ones(shape, dtype) for dtype, shape in specs]


@pytest.mark.parametrize("name", CASES)
def test_an_index_out_of_range_is_named_with_its_operator_and_axis(name):
    mod, right, axis = CASES[name]
    wrong = np.where(OUT == 8, OUT, right)
    checks = IndexChecks.of(mod, LLVM, {})
    rest = values(U) if name == "scatter_elements" else []
    checks(tensors(*values(X), right, *rest))
    told = rf"an index along {axis}elements, is out of range"
    with pytest.raises(OutOfRange, match=rf"{told} \(its indices reach from -?\d to [89]\)"):
        checks(tensors(*values(X), wrong, *rest))
    assert (checks.points > 0) is (name == "computed")  # nothing is built for indices of a caller


def test_a_model_without_indices_that_are_data_has_no_checks():
    clipped = model(lambda bb, x, i: op.take(x, i, axis=1, mode="clip"), X, ROWS)
    known = model(lambda bb, x: op.strided_slice(x, [1], [1], [3]), X)
    assert IndexChecks.of(clipped, LLVM) is IndexChecks.of(known, LLVM) is None


def test_the_extent_may_be_a_size_of_the_call_and_the_operator_has_its_place():
    n = tirx.Var("n", "int64")
    mod = model(lambda bb, x, i: op.take(x, i, axis=0), ("float32", (n, 5)), ("int64", (2,)))
    (binding,) = mod["main"].body.blocks[0].bindings[:1]
    origins = {binding.var.name: Origin("layers.3", "net.py:12")}
    checks = IndexChecks.of(mod, LLVM, origins)
    index = np.array([0, 4])
    checks(tensors(np.ones((5, 5), "float32"), index))
    with pytest.raises(OutOfRange, match=r"take \(net.py:12, in layers.3\): .* axis 0"):
        checks(tensors(np.ones((4, 5), "float32"), index))


def test_indices_that_are_read_at_indices_are_checked_in_order():
    mod = model(
        lambda bb, x, i, j: op.take(x, bb.emit(op.take(i, j, axis=0)), axis=0),
        ("float32", (6, 2)),
        ("int64", (4,)),
        ("int64", (3,)),
    )
    checks, x = IndexChecks.of(mod, LLVM), np.ones((6, 2), "float32")
    checks(tensors(x, np.array([0, 5, 9, 1]), np.array([0, 1, 3])))
    with pytest.raises(OutOfRange, match="6 elements"):
        checks(tensors(x, np.array([0, 5, 9, 1]), np.array([0, 1, 2])))
    with pytest.raises(OutOfRange, match="4 elements"):
        checks(tensors(x, np.array([0, 5, 9, 1]), np.array([0, 1, 7])))


def test_what_is_compiled_for_a_gpu_checks_its_calls_where_the_environment_says_so(monkeypatch):
    mod, right, _ = CASES["take"]
    hw = load_profile("nvidia_h100").to_target()
    assert tvm_fusion.compile(mod, hw, verify=False).index_checks is None
    monkeypatch.setenv(VARIABLE, "1")
    assert tvm_fusion.compile(mod, LLVM, verify=False).index_checks is None  # raises by itself
    checks = tvm_fusion.compile(mod, hw, verify=False).index_checks
    checks(tensors(*values(X), right))  # inputs of a caller are looked at on the CPU
    with pytest.raises(OutOfRange):
        checks(tensors(*values(X), OUT))


def test_each_call_is_checked_before_it_runs():
    mod, right, _ = CASES["take"]
    compiled, seen = tvm_fusion.compile(mod, "llvm", verify=False), []
    compiled.index_checks = lambda arguments: seen.append([x.shape for x in arguments])
    bound = compiled.bind(*values(X), right)
    assert not seen
    bound()
    for _ in range(3):
        compiled(*values(X), right)
    assert seen == [[(3, 5), (3, 2)]] * 4


@pytest.mark.parametrize("name", ["gather", "computed"])
def test_a_module_keeps_its_checks_when_it_is_saved(name, monkeypatch, tmp_path):
    mod, right, axis = CASES[name]
    compiled = tvm_fusion.compile(mod, LLVM, verify=False)
    compiled.index_checks = IndexChecks.of(mod, LLVM)
    compiled.save(tmp_path / "model.so")
    assert tvm_fusion.CompiledModule.load(tmp_path / "model.so").index_checks is None
    again = of_saved(compiled.index_checks.to_json(), LLVM)
    assert again is None  # nobody asks for them, and a CPU raises by itself
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(index_checks, "RAISE_BY_THEMSELVES", ())
    loaded = tvm_fusion.CompiledModule.load(tmp_path / "model.so")
    loaded.index_checks(tensors(*values(X), right))
    with pytest.raises(OutOfRange, match=rf"{axis}elements, is out of range .*a GPU reads"):
        loaded(*values(X), np.where(OUT == 8, OUT, right))
    assert loaded.facts()["index_checks"] == compiled.facts()["index_checks"]


def test_a_module_that_was_saved_without_checks_says_so(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "1")
    hw = load_profile("nvidia_h100").to_target()
    assert of_saved(None, hw) is None
    assert "saved without TVM_FUSION_CHECK_INDICES=1" in caplog.text


@I.ir_module
class Calling:
    @R.function(private=True)
    def rows(x: R.Tensor((3, 5), "float32"), i: R.Tensor((2,), "int64")):
        j = R.add(i, R.const(1, "int64"))
        y = R.take(x, j, axis=0)
        return y

    @R.function
    def main(x: R.Tensor((3, 5), "float32"), i: R.Tensor((2,), "int64")):
        cls = Calling
        y: R.Tensor((2, 5), "float32") = cls.rows(x, i)
        return y


@I.ir_module
class Branching:
    @R.function
    def main(
        x: R.Tensor((3, 5), "float32"), i: R.Tensor((2,), "int64"), yes: R.Tensor((), "bool")
    ) -> R.Tensor((2, 5), "float32"):
        if yes:  # noqa: SIM108 (it is Relax)
            j = R.add(i, R.const(1, "int64"))
        else:
            j = i
        z = R.take(x, j, axis=0)
        y = R.add(z, R.take(x, i, axis=0))
        return y


@I.ir_module
class Writing:
    @R.function
    def main(x: R.Tensor((3, 5), "float32"), i: R.Tensor((2,), "int64")):
        cls = Writing
        with R.dataflow():
            j = R.add(i, R.const(1, "int64"))
            w = R.call_tir_inplace(
                cls.shift, (x,), inplace_indices=[0], out_ty=R.Tensor((3, 5), "float32")
            )
            y = R.take(w, j, axis=0)
            R.output(y)
        return y

    @T.prim_func(private=True, s_tir=True)
    def shift(x: T.Buffer((3, 5), "float32")):
        for n, k in T.grid(3, 5):
            x[n, k] = x[n, k] + T.float32(1)


@pytest.mark.parametrize(
    ("mod", "wrong"), [(Calling, [0, 2]), (Branching, [0, 3]), (Writing, [0, 2])]
)
def test_functions_that_are_called_and_what_is_beside_branches_and_writes_is_checked(mod, wrong):
    checks = IndexChecks.of(mod, LLVM)
    x, right = np.ones((3, 5), "float32"), np.array([0, 1])
    rest = [np.array(False)] if mod is Branching else []
    given = tensors(x, right, *rest)
    checks(given)
    np.testing.assert_array_equal(given[0].numpy(), x)
    with pytest.raises(OutOfRange, match="along axis 0, which has 3 elements"):
        checks(tensors(x, np.array(wrong), *rest))


def test_inputs_that_a_gpu_would_read_clipped_are_not_checked_on():
    mod, right, _ = CASES["take"]
    checks = IndexChecks.of(mod, LLVM)

    class Drawn:
        def __init__(self, index):
            self.inputs = [*values(X), index]

    assert _takes(Drawn(right), checks)
    assert not _takes(Drawn(OUT), checks)
