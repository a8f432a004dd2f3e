"""Equal calls are legalized once, to what each would be legalized to by itself."""

from functools import partial

import tvm
from tvm import relax

from tvm_fusion.transform.lower.legalized_once import once

F32 = "float32"


def _module(*calls):
    """A function of x [4, 8] and w [8, 8] that returns all calls of (x, w)."""
    x = relax.Var("x", relax.TensorType((4, 8), F32))
    w = relax.Var("w", relax.TensorType((8, 8), F32))
    return _of([x, w], [call(x, w) for call in calls])


def _of(params, results):
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(relax.Tuple([builder.emit(call) for call in results]))
        builder.emit_func_output(out)
    return builder.get()


def _asked(mod):
    """The module legalized, which is as TVM legalizes it, and what TVM was asked for."""
    asked = []

    def watched(name, usual, builder, call):
        asked.append(name)
        return usual(builder, call)

    names = {call.op.name for call in _calls(mod)}
    usual = {name: tvm.ir.Op.get(name).get_attr("FLegalize") for name in names}
    table = once({name: partial(watched, name, legalize) for name, legalize in usual.items()})
    found = relax.transform.LegalizeOps(table)(mod)
    tvm.ir.assert_structural_equal(found, relax.transform.LegalizeOps()(mod))
    return asked


def _calls(mod):
    return [b.value for b in mod["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]


def _times(number):
    return lambda x, _: relax.op.multiply(x, relax.const(number, F32))


def test_equal_calls_are_legalized_once():
    mod = _module(*[lambda x, w: relax.op.matmul(x, w)] * 3, _times(2.0), _times(2.0))
    assert _asked(mod) == ["relax.matmul", "relax.multiply"]


def test_another_number_is_another_call():
    assert _asked(_module(_times(2.0), _times(3.0), _times(-0.0), _times(0.0))) == (
        ["relax.multiply"] * 4
    )


def test_other_attributes_are_another_call():
    by_axis = [lambda x, _, axis=axis: relax.op.sum(x, axis) for axis in (0, 1, 0)]
    assert _asked(_module(*by_axis)) == ["relax.sum"] * 2


def test_operands_that_are_the_same_tensor_are_another_call():
    calls = [
        lambda x, w: relax.op.matmul(w, w),
        lambda x, w: relax.op.matmul(w, relax.const([[1.0] * 8] * 8, F32)),
    ]
    assert _asked(_module(*calls, *calls)) == ["relax.matmul"] * 2


def test_parts_of_a_tuple_are_operands():
    calls = [lambda x, w, k=k: relax.op.concat([x, w][::k], 0) for k in (1, -1, 1)]
    assert _asked(_module(*calls)) == ["relax.concat"] * 2


def test_symbolic_sizes_are_legalized_each_time():
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 8), F32))
    assert _asked(_of([x], [relax.op.exp(x), relax.op.exp(x)])) == ["relax.exp"] * 2
