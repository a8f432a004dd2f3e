"""Loops of recurrences for CPUs, beside the equations in float64."""

import numpy as np
import pytest
import tvm
from tvm import tirx

from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.cpu.contraction.panels import mark_constants, wanted_panels
from tvm_fusion.kernels.cpu.machine import Machine
from tvm_fusion.kernels.recurrence.cell import Cell
from tvm_fusion.kernels.recurrence.cpu import Cores, cpu_config, write_on_cpu
from tvm_fusion.kernels.recurrence.form import Recurrence, recurrence_form

from ...support.kernel_cases import numpy_dtype
from .test_recurrence import ATOL, drawn, expected

STEPS, BATCH = (tirx.Var(name, "int64") for name in ("steps", "batch"))
WIDE = Machine(64, 32, 2)


def tensor_of(array):
    tensor = tvm.runtime.empty(array.shape, str(array.dtype))
    tensor.copyfrom(array)
    return tensor


@pytest.mark.one_in(14)
@pytest.mark.parametrize(
    ("made", "machine", "sizes", "cores"),
    [
        (Recurrence(Cell.LSTM, 3, 7, 48, "float32", False), WIDE, {}, Cores.SEQUENCES),
        (Recurrence(Cell.GRU, 3, 1, 192, "float32", True), WIDE, {}, Cores.UNITS),
        (
            Recurrence(Cell.GRU, STEPS, BATCH, 20, "float32", False),
            Machine(32, 16, 1),
            {"steps": 2, "batch": 3},
            Cores.ONE,
        ),
        (Recurrence(Cell.TANH, 2, 1, 33, "float32", False), WIDE, {}, Cores.ONE),
        (Recurrence(Cell.RELU, 1, 30, 16, "float32", True), WIDE, {}, Cores.ONE),
        (Recurrence(Cell.LSTM, 3, 3, 32, "bfloat16", True), WIDE, {}, Cores.ONE),
        (Recurrence(Cell.GRU, 3, 2, 32, "float16", True), WIDE, {}, Cores.ONE),
    ],
    ids=["sequences", "units", "symbolic", "scalars", "one step", "bfloat16", "float16"],
)
@pytest.mark.parametrize("is_constant", [False, True], ids=["packed here", "packed ahead"])
def test_loops_for_cpus(made, machine, sizes, cores, is_constant):
    assert cpu_config(made, machine).cores is cores
    func = recurrence_form(made)
    written = write_on_cpu(mark_constants(func, [1] if is_constant else []), made, machine)
    given, outputs = drawn(made, sizes)
    arguments = dict(given)
    for position, panels in wanted_panels(written).items():
        arguments[list(given)[position]] = panels.of(list(given.values())[position])
    tensors = [tensor_of(a) for a in (*arguments.values(), *outputs)]
    module = tvm.IRModule({"main": written.with_attr("global_symbol", "main")})
    tvm.compile(module, "llvm")["main"](*tensors)
    for tensor, wanted in zip(tensors[len(given) :], expected(made, given), strict=True):
        atol = 2e-6 if made.dtype == "float32" else ATOL[made.dtype]
        found = tensor.numpy().view(numpy_dtype(made.dtype)).astype("float64")
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def test_other_types_stay_plain_loops():
    with pytest.raises(Unsupported, match="vectors of float64"):
        cpu_config(Recurrence(Cell.GRU, 3, 1, 16, "float64", False), WIDE)
