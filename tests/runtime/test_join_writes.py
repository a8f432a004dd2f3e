"""Writes into several inputs at alike places: joined, right, and left apart where order counts."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import TensorType

from tvm_fusion.config import load_profile
from tvm_fusion.frontends.torch.written.writes import Write, write_function
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.build.join_writes import JoinWrites
from tvm_fusion.runtime.build.lowering import ScheduleLeftovers
from tvm_fusion.runtime.calls.compiled_module import CompiledModule

from ..support.cuda_on_cpu import run_cuda_on_cpu
from ..support.runtime_cases import LLVM

CACHE, NEW, PLACE = (1, 3, 7, 5), (1, 3, 1, 5), (1,)


def write_at(count: int = 1) -> tvm.tirx.PrimFunc:
    """x[:, :, i] = values, for this many positions."""
    indices = (None, None, ((count,), "int64"), None)
    values = (*NEW[:2], count, NEW[3])
    return write_function(Write(CACHE, "float32", indices, values, False, True, False), True)


def step(middle=None, second=1, returned=False) -> tvm.IRModule:
    """The sums of keys and values that are written to, and of what lies between the writes."""
    names = {"k": CACHE, "v": CACHE, "i": PLACE, "new": NEW, "more": (1, 3, second, 5)}
    builder = relax.BlockBuilder()
    given = {name: relax.Var(name, TensorType(shape, "float32")) for name, shape in names.items()}
    given["i"] = relax.Var("i", TensorType(PLACE, "int64"))
    given["j"] = relax.Var("j", TensorType((second,), "int64"))
    k, v = given["k"], given["v"]
    with builder.function("main", list(given.values())):
        with builder.dataflow():
            write = builder.add_func(write_at(), "write")
            other = write if second == 1 else builder.add_func(write_at(second), "write")
            call = relax.op.call_tir_inplace
            keys = builder.emit(call(write, [k, given["i"], given["new"]], [0], k.ty))
            between = None if middle is None else builder.emit(middle(keys, v))
            more = builder.emit(relax.op.negative(given["more"]))
            values = builder.emit(call(other, [v, given["j"], more], [0], v.ty))
            results = [relax.op.sum(x) for x in (keys, values, between) if x is not None]
            results = [builder.emit_output(x) for x in results]
        builder.emit_func_output(relax.Tuple([*results, *([v] if returned else [])]))
    return builder.get()


def writes_in(mod: tvm.IRModule) -> list[Call]:
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    name = "relax.call_tir_inplace"
    return [v for v in values if isinstance(v, Call) and getattr(v.op, "name", "") == name]


def arrays() -> list[np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    k, v, new, more = (draw(shape).astype("float32") for shape in (CACHE, CACHE, NEW, NEW))
    return [k, v, np.array([4]), new, more, np.array([2])]


def test_two_writes_are_one_that_writes_what_both_did():
    joined = JoinWrites()(step())
    (call,) = writes_in(joined)
    assert [int(n) for n in call.attrs.inplace_indices] == [0, 3]
    tvm.ir.assert_structural_equal(JoinWrites()(joined), joined)
    given = arrays()
    k, v, i, new, more, j = (a.copy() for a in given)
    sums = CompiledModule.of(build(joined, LLVM))(*given)
    k[:, :, i], v[:, :, j] = new, -more
    np.testing.assert_array_equal(given[0], k)
    np.testing.assert_array_equal(given[1], v)
    np.testing.assert_allclose(sums, [k.sum(), v.sum()], rtol=1e-5)


def test_the_joint_write_is_one_kernel():
    joined = JoinWrites()(step())
    target = load_profile("nvidia_h200").to_target()
    kernel = ScheduleLeftovers(target)(joined)[writes_in(joined)[0].args[0].name_hint]
    k, v, i, new, more, j = arrays()
    wanted = k.copy(), v.copy()
    wanted[0][:, :, i], wanted[1][:, :, j] = new, more
    assert run_cuda_on_cpu(kernel, [k, i, new, v, j, more]) == 1
    np.testing.assert_array_equal([k, v], wanted)


@pytest.mark.parametrize(
    "how",
    [
        {"middle": lambda keys, v: relax.op.sum(keys)},
        {"middle": lambda keys, v: relax.op.sum(v)},
        {"second": 2},
        {"returned": True},
    ],
    ids=["the first is read before", "the old one is read", "of other places", "it is returned"],
)
def test_writes_stay_apart_where_their_order_counts_or_their_places_differ(how):
    mod = step(**how)
    assert len(writes_in(JoinWrites()(mod))) == 2
