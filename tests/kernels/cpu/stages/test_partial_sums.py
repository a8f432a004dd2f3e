"""Long reductions that are cut in parts reduce the same elements, from the same initial value."""

import numpy as np
import pytest
from tvm import te, tirx

from tvm_fusion.kernels.cpu.write import write_cpu

from ....support.helpers_tir import call, compile_cpu, poisoned

REDUCTIONS = {
    "sum": (lambda a, b: a + b, 5, np.sum),
    "product": (lambda a, b: a * b, 3, np.prod),
    "maximum": (lambda a, b: tirx.Max(a, b), 7, np.max),
}
"""How two values are combined, the initial value, and what NumPy calls it."""


@pytest.mark.parametrize(("size", "rest"), [(2**18, False), (2**18 + 3, True)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_an_initial_value_is_combined_once_whatever_the_number_of_parts(name, size, rest):
    combine, initial, reduce = REDUCTIONS[name]
    reducer = te.comm_reducer(combine, lambda dtype: tirx.const(initial, dtype))
    x = te.placeholder((size,), "float32")
    k = te.reduce_axis((0, size))
    func = te.create_prim_func([x, te.compute((1,), lambda i: reducer(x[k], k))])
    kernel = write_cpu(func)
    script = kernel.script()
    assert "_parts" in script
    assert ("_rest" in script) == rest
    data = np.ones(size, "float32")
    data[::20_000] = 2  # 14 of them: all results are exact
    (got,) = call(compile_cpu(kernel), [data], [poisoned((1,), "float32")])
    assert got == reduce(data, initial=initial)
