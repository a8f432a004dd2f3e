"""Constants that stand for weights: what they are to passes, and the numbers behind them."""

import gc
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_fusion
from tvm_fusion.ir import weights
from tvm_fusion.ir.weights import (
    LEAST_ELEMENTS,
    Weight,
    as_parameters,
    content_hash,
    made,
    numbers,
    value_of,
    weight_of,
    weights_of,
    with_stand_ins,
    with_values,
)

ROWS = 256
COLUMNS = LEAST_ELEMENTS // ROWS
RNG = np.random.default_rng(0)


def drawn(dtype="float32") -> np.ndarray:
    return RNG.standard_normal((ROWS, COLUMNS)).astype(dtype)


def module(*arrays: np.ndarray, dtype="float32"):
    """x @ weight for each, and what is small beside them."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, ROWS), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            factor, known = relax.const(2.0, dtype), {id(a): relax.const(a) for a in arrays}
            found = [relax.op.matmul(relax.op.multiply(x, factor), known[id(a)]) for a in arrays]
            y = builder.emit_output(relax.Tuple([builder.emit(value) for value in found]))
        builder.emit_func_output(y)
    return builder.get()


def constants(mod: tvm.IRModule) -> list:
    found = {}

    def look(expr):
        if isinstance(expr, tvm.ir.GenericConst) and len(expr.value.shape):
            found.setdefault(int(expr.value.data_ptr()), expr)

    relax.analysis.post_order_visit(mod["main"], look)
    return list(found.values())


def stand_in(array: np.ndarray):
    (constant,) = constants(with_stand_ins({"main": module(array)})["main"])
    return constant


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_weight_is_there_but_for_its_numbers(dtype):
    array = drawn(dtype)
    mod = module(array, array.copy(), dtype=dtype)
    hollow = with_stand_ins({"main": mod})["main"]
    first, second = constants(hollow)
    assert [tuple(map(int, c.ty.shape)) for c in (first, second)] == [array.shape] * 2
    assert not first.value.numpy()[1:].any()
    assert first.value.numpy()[0].tobytes() != second.value.numpy()[0].tobytes()
    assert weight_of(first).name != weight_of(second).name
    np.testing.assert_array_equal(numbers(first), array)
    tvm.ir.assert_structural_equal(with_values(hollow), mod)
    assert weights_of(hollow)
    assert not weights_of(with_values(hollow))


def test_memory_is_reserved_and_not_there():
    mapped = Weight("w", (1 << 20, 1 << 12), "float32", None).constant()  # 16 GiB
    assert mapped.value.numel() == 1 << 32
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * 4096
    assert resident < 8 << 30
    del mapped
    gc.collect()


def test_patterns_and_what_is_small_stay_constants():
    mask = np.where(np.tri(ROWS, COLUMNS, dtype=bool), 0, -np.inf).astype("float32")
    small = drawn()[:, : COLUMNS // 2]
    for array in (mask, np.ones_like(mask), small):
        mod = module(np.ascontiguousarray(array))
        assert with_stand_ins({"main": mod})["main"].same_as(mod)


def test_functions_share_the_weights_that_they_share():
    array = drawn()
    mods = with_stand_ins({"one": module(array), "other": module(drawn(), array.copy())})
    (alone,), (_, shared) = (constants(mod) for mod in mods.values())
    assert weight_of(alone) is weight_of(shared)


def test_what_is_made_of_a_weight_is_made_once_and_when_it_is_asked_for():
    calls, array = [], drawn()

    def doubled(given):
        calls.append(given.shape)
        return given * 2

    constant = stand_in(array)
    first, again = (made("doubled", doubled, constant, array.shape, "float32") for _ in range(2))
    other = made("doubled thrice", doubled, constant, array.shape, "float32")
    assert first.value.data_ptr() == again.value.data_ptr() != other.value.data_ptr()
    assert not calls
    np.testing.assert_array_equal(numbers(first), array * 2)
    assert calls == [array.shape]
    plain = made("doubled", doubled, relax.const(array), array.shape, "float32")
    assert weight_of(plain) is None
    np.testing.assert_array_equal(plain.value.numpy(), array * 2)


def test_a_weight_that_is_settled_lets_go_of_what_it_came_from():
    constant = stand_in(drawn())
    result = made("negative", np.negative, constant, (ROWS, COLUMNS), "float32")
    weight = weight_of(result)
    expected = numbers(result)
    weight.settle(value_of(result))
    assert (weight.recipe, weight.sources) == (None, ())
    np.testing.assert_array_equal(numbers(result), expected)


def test_stand_ins_live_as_long_as_their_constants():
    constant = stand_in(drawn())
    address = int(constant.value.data_ptr())
    assert address in weights._STAND_INS._weights
    del constant
    gc.collect()
    assert address not in weights._STAND_INS._weights


def test_parameters_stand_in_the_order_of_their_first_use():
    arrays = [drawn(), drawn()]
    mod, found = as_parameters(with_stand_ins({"main": module(*arrays)})["main"], ["main"])
    relax.analysis.well_formed(mod)
    assert [p.name for p in mod["main"].params] == ["x", "weight0", "weight1"]
    for weight, array in zip(found["main"], arrays, strict=True):
        np.testing.assert_array_equal(weight.tensor().numpy(), array)


def test_a_module_is_known_by_all_but_the_numbers_of_its_weights():
    def key(*arrays, dtype="float32"):
        return content_hash(with_stand_ins({"main": module(*arrays, dtype=dtype)})["main"])

    array = drawn()
    assert key(array, array.copy()) == key(drawn(), drawn())
    assert key(array, array) != key(array, array.copy())  # one weight, or two
    assert key(array) != key(array.astype("float16"), dtype="float16")
    assert key(array[:, :128]) != key(drawn()[:, :128])  # too small to be weights


def test_nobody_reads_the_memory_of_a_constant_which_may_be_a_stand_in():
    files = Path(tvm_fusion.__file__).parent.rglob("*.py")
    assert [str(f) for f in files if ".value.numpy()" in f.read_text(encoding="utf-8")] == []
