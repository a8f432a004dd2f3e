"""The fusion graph of a Relax function."""

from tvm import relax, te
from tvm.relax import op

from tests.support.graphs import module, plan_of
from tvm_fusion.ir.graph import OpKind, build_graph

M = ((8, 16), "float32")


def graph_of(emit, *inputs):
    return build_graph(relax.transform.LegalizeOps()(module(emit, *inputs)))


def diamond(bb, x):
    a = bb.emit(op.exp(x))
    b = bb.emit(op.tanh(a))
    c = bb.emit(op.sqrt(a))
    return bb.emit(op.add(b, c))


def test_a_diamond_has_its_reachability():
    g = graph_of(diamond, M)
    assert len(g.ops) == 4
    assert g.ancestors == (0, 0b1, 0b1, 0b111)
    assert g.descendants == (0b1110, 0b1000, 0b1000, 0)
    assert g.consumers(0) == (1, 2)
    assert g.producers(3) == (1, 2)


def test_only_the_result_is_an_output():
    g = graph_of(diamond, M)
    assert [t.name for t in g.tensors if t.is_output] == [g.ops[3].name]


def test_a_reshape_is_a_view():
    g = graph_of(lambda bb, x: op.exp(bb.emit(op.reshape(x, (16, 8)))), M)
    assert [o.kind for o in g.ops] == [OpKind.VIEW, OpKind.CALL_TIR]


def test_a_split_is_one_operator_with_two_tensors():
    def emit(bb, x):
        parts = bb.emit(op.split(x, 2, axis=1))
        return bb.emit(op.add(bb.emit(parts[0]), bb.emit(parts[1])))

    g = graph_of(emit, M)
    assert [len(o.outputs) for o in g.ops] == [2, 1]
    assert g.ops[1].inputs == g.ops[0].outputs


def test_a_packed_call_is_opaque():
    def emit(bb, x):
        y = bb.emit(
            relax.call_dps_packed("somewhere.f", (x,), out_ty=relax.TensorType((8, 16), "float32"))
        )
        return bb.emit(op.exp(y))

    g = graph_of(emit, M)
    assert g.ops[0].kind is OpKind.OPAQUE
    assert g.producers(1) == (0,)


def test_one_constant_is_one_tensor():
    c = relax.const([1.0] * 16, "float32")

    def emit(bb, x):
        return bb.emit(op.add(bb.emit(op.multiply(x, c)), c))

    g = graph_of(emit, M)
    assert sum(t.is_constant for t in g.tensors) == 1


def test_the_fingerprint_sees_shapes_and_operators():
    same = [graph_of(diamond, M).fingerprint() for _ in range(2)]
    other_shape = graph_of(diamond, ((8, 17), "float32")).fingerprint()
    other_op = graph_of(lambda bb, x: op.exp(x), M).fingerprint()
    assert same[0] == same[1]
    assert len({same[0], other_shape, other_op}) == 3


def test_composites_are_remembered():
    p = plan_of(module(lambda bb, x: op.nn.softmax(x), M))
    assert {o.composite for o in p.graph.ops} == {"softmax#1"}


def test_a_leading_slice_is_no_view():
    g = graph_of(lambda bb, x: op.exp(bb.emit(op.strided_slice(x, [0], [0], [1]))), M)
    assert [o.kind for o in g.ops] == [OpKind.CALL_TIR, OpKind.CALL_TIR]


def test_an_operator_of_two_tensors_is_no_view():
    """One element at an index in reach is that element, and waits for its index all the same."""

    def emit(bb, x, index):
        index = bb.emit(op.negative(index))
        y = bb.emit_te(lambda x, index: te.compute(x.shape, lambda *i: x(*i)), x, index)
        return bb.emit(op.exp(y))

    g = graph_of(emit, M, ((8, 16), "int64"))
    assert [o.kind for o in g.ops] == [OpKind.CALL_TIR] * 3
    assert g.producers(1) == (0,)


def test_a_reshape_that_is_a_result_is_no_view():
    g = graph_of(lambda bb, x: op.reshape(x, (16, 8)), M)
    assert [o.kind for o in g.ops] == [OpKind.CALL_TIR]
