"""Functions of a GPU module that look at none of their arguments."""

import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import StringImm
from tvm.relax import op

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.build import build as building
from tvm_fusion.runtime.build.trusted_calls import without_checks

from ..support.graphs import module

TARGET, H200 = resolve_target("nvidia_h200")
POLICY = load_policy({"probe": "off"})


def chain(bb, x):
    """Of the input, of what that gave, of a view of it, and what is returned."""
    first = bb.emit(op.cumsum(x, axis=1))
    second = bb.emit(op.nn.softmax(first))
    view = bb.emit(op.reshape(second, (32, 128)))
    third = bb.emit(op.matmul(view, bb.emit(op.permute_dims(view))))
    return bb.emit(op.cumsum(third, axis=0))


@pytest.fixture
def checks(monkeypatch):
    """How many checks each host function of a built module has, before and after."""
    found = {}

    def noted(host, trusted):
        kept = without_checks(host, trusted)
        for gvar, func in host.functions_items():
            found[gvar.name_hint] = _count(func), _count(kept[gvar.name_hint])
        return kept

    monkeypatch.setattr(building, "without_checks", noted)
    return found


def _count(func):
    asserts = []
    tvm_ffi.structural_walk(func.body, [(tirx.AssertStmt, asserts.append)])
    return len(asserts)


def build(emit, size):
    mod = module(emit, ((size, 64), "float32"))
    kernels = Planned.of(mod, TARGET, H200, POLICY).as_it_is().fuse()
    return building.build(kernels, TARGET, compile_kernels=False)


def test_what_a_module_made_is_not_looked_at_again(checks):
    build(chain, 64)
    assert all(before > 20 for before, _ in checks.values())
    assert {name for name, (_, after) in checks.items() if not after} == {
        "softmax",
        "matmul",
        "transpose",
    }
    # given by callers: the input, and the output of the function that is given one
    assert checks["cumsum"][0] == checks["cumsum"][1]
    assert checks["cumsum1"][0] == checks["cumsum1"][1]


def test_arguments_of_sizes_that_calls_tell_are_looked_at(checks):
    def body(bb, x):
        return bb.emit(op.cumsum(bb.emit(op.nn.softmax(bb.emit(op.cumsum(x, axis=1)))), axis=1))

    build(body, tirx.Var("n", "int64"))
    assert len(checks) > 1
    assert all(before == after > 0 for before, after in checks.values())


def test_checks_that_are_not_of_arguments_stay():
    def check(kind):
        return tirx.AssertStmt(tirx.const(False, "bool"), StringImm(kind), [StringImm("no")])

    kinds = ("TypeError", "OutOfRange", "ValueError", "DividedByZero")
    func = tirx.PrimFunc([], tirx.SeqStmt([check(kind) for kind in kinds]))
    host = tvm.IRModule({"known": func, "other": func})
    kept = without_checks(host, {"known"})
    assert (_count(kept["known"]), _count(kept["other"])) == (2, 4)
