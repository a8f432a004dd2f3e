"""Outputs that are lent to a caller as NumPy arrays, and those that have to be copied."""

import gc

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tests.support.growth import private_bytes
from tvm_fusion.runtime.calls.compiled_module import CompiledModule

F32 = "float32"


def compiled(emit, *shapes, dtype=F32):
    """A module whose `main` returns what `emit` gives for inputs of these shapes."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(bb.normalize(emit(bb, *params)))
        bb.emit_func_output(out)
    return tvm_fusion.compile(bb.get(), "llvm", verify=False)


def numbers(*shape, dtype=F32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def lent(array):
    """Whether an array is somebody else's memory."""
    return not array.flags.owndata


WEIGHT = np.arange(7, dtype=F32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("emit", "own"),
    [
        (lambda bb, x: op.exp(x), (True,)),
        (lambda bb, x: op.reshape(bb.emit(op.exp(x)), (-1,)), (True,)),
        (lambda bb, x: x, (False,)),
        (lambda bb, x: op.reshape(x, (7, 5)), (True,)),  # a kernel copies it
        (lambda bb, x: relax.const(WEIGHT), (False,)),
        (lambda bb, x: relax.Tuple([bb.emit(op.exp(x)), x]), (True, False)),
        (lambda bb, x: relax.Tuple([x, relax.Tuple([bb.emit(op.exp(x))])]), (False, True)),
        (lambda bb, x: relax.Tuple([y := bb.emit(op.exp(x)), y]), (True, False)),
        (lambda bb, x: relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.sum(x))]), (True, True)),
        (lambda bb, x: bb.emit(op.split(x, 5)), (True,) * 5),
    ],
)
def test_only_memory_that_a_call_takes_for_an_output_alone_is_lent(emit, own):
    module = compiled(emit, (5, 7))
    assert module.own == own
    x = numbers(5, 7)
    outputs = _flat(module(x))
    assert tuple(map(lent, outputs)) == own
    before = [output.copy() for output in outputs]
    for i, output in enumerate(outputs):  # each is the caller's to write to
        assert output.flags.writeable
        output[...] = i
    for i, output in enumerate(outputs):
        assert (output == i).all()
    np.testing.assert_array_equal(x, numbers(5, 7))
    for output, expected in zip(_flat(module(x)), before, strict=True):
        np.testing.assert_array_equal(output, expected)


def _flat(value):
    return [leaf for v in value for leaf in _flat(v)] if isinstance(value, tuple) else [value]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 1), (13, 17), (64, 4096)])
def test_what_a_caller_holds_is_not_written_to_again(shape):
    module = compiled(lambda bb, x: op.add(x, x), shape)
    x = np.ones(shape, F32)
    held, pieces = [], []
    for i in range(8):
        output = module(np.asarray(x * i, F32))
        held.append(output)
        if output.ndim:
            pieces.append(module(np.asarray(x * i, F32))[:1])  # a view outlives the array
        gc.collect(1)  # cycles of this call; older objects hold no output of it
    for i, output in enumerate(held):
        np.testing.assert_array_equal(output, np.full(shape, 2 * i, F32))
    for i, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece, np.full(shape, 2 * i, F32)[:1])


def test_memory_is_used_again_when_the_caller_let_go_of_it():
    module = compiled(lambda bb, x: op.add(x, x), (256, 1031))
    x = numbers(256, 1031)
    for given in (x, torch.from_numpy(x)):
        module(given)
        before = private_bytes()
        for _ in range(100):
            output = module(given)
        assert private_bytes() - before < 10 * x.nbytes  # one is held while the next is computed
        del output


def test_an_output_can_be_the_next_call_s_input():
    module = compiled(lambda bb, x: op.add(x, x), (33, 5))
    x = np.ones((33, 5), F32)
    for i in range(6):
        assert (x == 2**i).all()
        x = module(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8", "bool", "bfloat16"])
def test_every_dtype_comes_back_as_it_was(dtype):
    import ml_dtypes

    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    module = compiled(lambda bb, x: op.permute_dims(x), (3, 5), dtype=dtype)
    x = np.arange(15).reshape(3, 5).astype(numpy_dtype)
    output = module(x)
    assert output.dtype == x.dtype
    np.testing.assert_array_equal(output, x.T)


def test_a_saved_module_lends_the_same_outputs(tmp_path):
    module = compiled(lambda bb, x: relax.Tuple([bb.emit(op.exp(x)), x]), (5, 7))
    loaded = CompiledModule.load(module.save(tmp_path / "model.so"))
    assert loaded.own == (True, False)
    first, second = loaded(numbers(5, 7))
    assert (lent(first), lent(second)) == (True, False)


def test_branches_lend_nothing():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), F32))
    flag = relax.Var("flag", relax.TensorType((), "bool"))
    with bb.function("main", [x, flag]):
        out = bb.emit(relax.If(flag, relax.SeqExpr([], x), relax.SeqExpr([], x)))
        bb.emit_func_output(out)
    from tvm_fusion.runtime.build.build import build

    built = build(bb.get(), tvm.target.Target("llvm"))
    assert built.own == (False,)
