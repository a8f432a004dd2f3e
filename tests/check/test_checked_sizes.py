"""Modules with symbolic sizes are checked at several of them, within what they allow."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import tvm_fusion
from tvm_fusion.check import compiled
from tvm_fusion.check.checked_sizes import SIZES, SMALL, checked_sizes, inputs_at
from tvm_fusion.check.compiled import _runs
from tvm_fusion.check.plain import plain_module
from tvm_fusion.errors import VerificationError
from tvm_fusion.kernels import registry
from tvm_fusion.runtime.build.version_names import edges_among

from ..support.graphs import module

LLVM = tvm.target.Target({"kind": "llvm"})


def symbols(count=1):
    return [tirx.Var(f"n{i}", "int64") for i in range(count)]


def doubled(bb, x):
    return bb.emit(op.sum(bb.emit(op.multiply(x, x)), [1]))


def main_of(emit, *inputs, **bounds):
    func = module(emit, *inputs)["main"]
    for name, value in bounds.items():
        func = func.with_attr(f"tir_var_{name}_bound", {"n0": value})
    return func


def drawn(func, lowered=None):
    return [list(checked_sizes(func, n, lowered).values()) for n in range(6)]


def test_sizes_are_small_odd_and_around_powers_of_two():
    (n,) = symbols()
    assert drawn(main_of(doubled, ((n, 7), "float32"))) == [[s] for s in SIZES]
    assert {1, 31, 32, 65} <= set(SIZES)


def test_odd_draws_give_each_symbol_another_size():
    n, m = symbols(2)
    found = drawn(main_of(doubled, ((n, m), "float32")))
    assert [len(set(sizes)) for sizes in found] == [1, 2, 1, 2, 1, 2]
    assert found[0] == [5, 5]


def test_a_module_without_symbols_has_no_sizes():
    assert drawn(main_of(doubled, ((3, 7), "float32"))) == [[]] * 6


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"lower": 2}, [5, 17, 32, 2, 31, 65]),
        ({"lower": 20, "upper": 40}, [20, 20, 32, 20, 31, 40]),
        ({"upper": 3}, [3, 3, 3, 1, 3, 3]),
    ],
)
def test_bounds_of_the_module_are_kept(bounds, expected):
    (n,) = symbols()
    func = main_of(doubled, ((n, 7), "float32"), **bounds)
    assert drawn(func) == [[size] for size in expected]


def test_no_more_is_read_of_a_table_than_it_has():
    (n,) = symbols()
    table = relax.const(np.zeros((9, 4), "float32"))

    def positions(bb, x):
        rows = bb.emit(op.take(table, bb.emit(op.arange(0, n, 1, "int64")), 0))
        return bb.emit(op.add(x, rows))

    func = main_of(positions, ((n, 4), "float32"))
    assert max(drawn(func)) == [4]


def test_rows_that_are_looked_up_by_an_input_set_no_limit():
    (n,) = symbols()

    def looked_up(bb, table, ids):
        return bb.emit(op.take(table, bb.emit(op.astype(ids, "int32")), 0))

    func = main_of(looked_up, ((9, 4), "float32"), ((n,), "int64"))
    assert drawn(func) == [[s] for s in SIZES]


def test_long_loops_are_checked_at_smaller_sizes():
    n, m, k = symbols(3)

    def products(bb, x, w):
        return bb.emit(op.matmul(x, w))

    mod = module(products, ((n, m, 512), "float32"), ((512, k), "float32"))
    lowered = plain_module(mod, LLVM)
    assert [max(s) for s in drawn(mod["main"], lowered)] == [5, 9, 8, 7, 7, 9]
    assert max(SMALL) == 9


# ---- planted: right at some sizes only


class RightAt:
    """A kernel class that writes nothing unless `holds` of the first symbolic size."""

    def __init__(self, like, holds):
        self.like, self.holds, self.name = like, holds, like.name

    def __getattr__(self, name):
        return getattr(self.like, name)

    def write(self, func, hw, policy, config=None):
        kernel = self.like.write(func, hw, policy, config)
        extents = [e for p in kernel.params for e in p.ty.shape if isinstance(e, tirx.Var)]
        return kernel.with_body(tirx.IfThenElse(self.holds(extents[0]), kernel.body, None))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "holds",
    [lambda n: n < 16, lambda n: n > 1, lambda n: n % 2 == 1, lambda n: n < 33],
    ids=["below 16", "above 1", "odd", "below 33"],
)
def test_a_kernel_that_is_wrong_at_some_sizes_is_not_returned(monkeypatch, holds):
    classes = {name: (RightAt(c, holds), kinds) for name, (c, kinds) in registry._FAMILIES.items()}
    monkeypatch.setattr(registry, "_FAMILIES", classes)
    (n,) = symbols()
    mod = module(doubled, ((n, 7), "float32"))
    try:
        compiled = tvm_fusion.compile(mod, "llvm")
    except VerificationError:
        return
    for rows in (1, 16, 33):
        x = np.random.default_rng(0).standard_normal((rows, 7)).astype("float32")
        np.testing.assert_allclose(compiled(x), (x * x).sum(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("kernels", "edges"),
    [
        (["f_upto_64_kernel", "f_upto_512_kernel", "f_beyond_kernel"], {64, 65, 512, 513}),
        (["f_upto_16_and_33_to_64_kernel", "f_beyond_kernel"], {16, 17, 32, 33, 64, 65}),
        (["f_of8_upto_1024_kernel", "f_of8_beyond_kernel", "f_beyond_kernel"], {1024, 1032}),
        (["f_upto_8_queries_512_keys_kernel", "f_beyond_kernel"], {8, 9, 512, 513}),
        (["f_upto_64_keys_kernel", "f_of8_rows_beyond_kernel", "f_beyond_kernel"], {64, 65}),
        (["f_upto_4096_results_kernel", "f_beyond_kernel", "g_kernel"], set()),
    ],
)
def test_edges_of_versions_are_told_by_names_of_kernels(kernels, edges):
    assert edges_among(kernels) == edges


def test_inputs_next_to_edges_are_drawn_within_bounds_and_while_references_are_quick():
    (n,) = symbols()
    mod = module(doubled, ((n, 512), "float32"))
    lowered = plain_module(mod, LLVM)

    def rows(sizes):
        return [inputs[0].shape[0] for inputs in inputs_at(mod, sizes, lowered)]

    assert rows({700, 65, 1 << 20, 64}) == [64, 65, 700]
    main = mod["main"].with_attr("tir_var_upper_bound", {"n0": 900})
    mod.update_func(mod.get_global_var("main"), main)
    assert rows({700, 65, 1 << 20, 4096}) == [65, 700, 900]


def test_a_kernel_that_is_wrong_beyond_an_edge_is_not_returned(monkeypatch):
    classes = {
        name: (RightAt(c, lambda n: n <= 200), kinds)
        for name, (c, kinds) in registry._FAMILIES.items()
    }
    monkeypatch.setattr(registry, "_FAMILIES", classes)
    mod = module(doubled, ((*symbols(), 7), "float32"))
    x = np.ones((201, 7), "float32")
    returned = tvm_fusion.compile(mod, "llvm")  # at other sizes it is right
    assert not np.allclose(returned(x), 7)
    monkeypatch.setattr(compiled, "edges_among", lambda _: {200, 201})
    try:
        returned = tvm_fusion.compile(mod, "llvm")
    except VerificationError:
        return
    np.testing.assert_allclose(returned(x), 7 * np.ones(201), rtol=1e-5)


def test_sizes_that_a_model_does_not_take_are_left_out(caplog):
    class Refusing:
        outputs = property(lambda self: 1 / 0)

    caplog.set_level("INFO", "tvm_fusion.check.compiled")
    assert not _runs(Refusing())
    assert "sizes that the model does not take: division by zero" in caplog.text
