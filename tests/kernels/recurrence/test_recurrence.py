"""Kernels of recurrences on the CPU emulator, beside the equations in float64."""

from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.recurrence.alone import AloneConfig, alone_configs, emit_alone
from tvm_fusion.kernels.recurrence.cell import Cell
from tvm_fusion.kernels.recurrence.form import Recurrence, recurrence_form
from tvm_fusion.kernels.recurrence.kept import KeptConfig, emit_kept, kept_configs
from tvm_fusion.kernels.recurrence.kernel import WRITER
from tvm_fusion.kernels.recurrence.problem import read_recurrence
from tvm_fusion.kernels.recurrence.spread import SpreadConfig, emit_spread, spread_configs
from tvm_fusion.kernels.recurrence.spread_floats import FloatsConfig, emit_floats, floats_configs

from ...support.cuda_on_cpu import lower, run_cuda_on_cpu
from ...support.kernel_cases import numpy_dtype

H200 = load_profile("nvidia_h200")
ATOL = {"float64": 1e-14, "float32": 1e-6, "float16": 3e-3, "bfloat16": 2e-2}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected(made, given):
    """The parameters that are computed, by PyTorch's equations."""
    given = {name: value.astype("float64") for name, value in given.items()}
    h, c = given["h0"], given.get("c0")
    y = np.zeros((*given["x"].shape[:2], made.units))
    times = range(len(y))
    for t in reversed(times) if made.backward else times:
        x, p = (np.split(a, made.cell.gates, 1) for a in (given["x"][t], h @ given["w"].T))
        if made.cell is Cell.LSTM:
            i, f, g, o = (a + b for a, b in zip(x, p, strict=True))
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        elif made.cell is Cell.GRU:
            r, z = (sigmoid(x[n] + p[n]) for n in range(2))
            h = (1 - z) * np.tanh(x[2] + r * (p[2] + given["bias"])) + z * h
        else:
            h = np.tanh(x[0] + p[0]) if made.cell is Cell.TANH else np.maximum(x[0] + p[0], 0)
        y[t] = h
    return [y, h] if c is None else [y, h, c]


def drawn(made, sizes):
    """Parameters that are read, by name, and poisoned ones; `sizes` are those of symbols."""

    def number(extent):
        return extent if isinstance(extent, int) else sizes[extent.name]

    rng = np.random.default_rng(0)
    shapes = {name: tuple(map(number, shape)) for name, shape in made.shapes().items()}
    names, dtype = list(shapes), numpy_dtype(made.dtype)
    given = {name: rng.standard_normal(shapes[name]) for name in names[: -made.results]}
    given["w"] /= made.units**0.5
    given = {name: value.astype(dtype) for name, value in given.items()}
    return given, [np.full(shapes[name], np.nan, dtype) for name in names[-made.results :]]


def check(made, kernel, sizes=None, seed=None):
    """Runs a kernel on the emulator."""
    given, outputs = drawn(made, sizes)
    assert run_cuda_on_cpu(kernel, [*given.values(), *outputs], seed=seed) == 1
    for output, wanted in zip(outputs, expected(made, given), strict=True):
        np.testing.assert_allclose(output.astype("float64"), wanted, rtol=0, atol=ATOL[made.dtype])


STEPS, BATCH = (tirx.Var(name, "int64") for name in ("steps", "batch"))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("cell", Cell)
def test_a_recurrence_is_read_from_its_form_whatever_its_name(cell, backward):
    made = Recurrence(cell, STEPS, 3, 7, "float16", backward)
    func = recurrence_form(made).with_attr("global_symbol", "anything")
    found = read_recurrence(func)
    assert (found.cell, found.units, found.backward) == (cell, 7, backward)


def test_another_order_of_gates_is_no_recurrence():
    made = Recurrence(Cell.GRU, 4, 3, 7, "float32", False)
    func = recurrence_form(made)
    other = func.with_body(tirx.SeqStmt([func.body, func.body]))
    with pytest.raises(Unsupported, match="form of a recurrence"):
        read_recurrence(other)


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (Recurrence(Cell.LSTM, 3, 2, 20, "float32", False), {}),
        (Recurrence(Cell.GRU, STEPS, BATCH, 33, "bfloat16", True), {"steps": 3, "batch": 2}),
        (Recurrence(Cell.TANH, 1, 1, 33, "float64", False), {}),
        (Recurrence(Cell.RELU, 2, 1, 1, "float16", False), {}),
    ],
    ids=lambda value: value.cell.value if isinstance(value, Recurrence) else "",
)
def test_a_block_takes_a_sequence(made, sizes):
    (config,) = alone_configs(made, H200)
    check(made, emit_alone(made, H200, config), sizes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("made", "sizes", "options"),
    [
        (Recurrence(Cell.LSTM, 3, 3, 64, "float16", False), {}, {}),
        (Recurrence(Cell.GRU, STEPS, 11, 64, "bfloat16", True), {"steps": 2}, {"kept": 1}),
        (Recurrence(Cell.TANH, 3, 9, 96, "float16", False), {}, {}),
        (
            Recurrence(Cell.LSTM, 2, BATCH, 64, "float16", False),
            {"batch": 9},
            {"sequences": 8, "kept": 0, "folds": True},
        ),
    ],
    ids=["lstm", "gru", "rnn", "passes"],
)
def test_blocks_exchange_hidden_states_over_a_grid_barrier(made, sizes, options):
    (config,) = spread_configs(made, H200)
    lowered = lower(emit_spread(made, H200, replace(config, **options)))
    assert "tirx.use_cooperative_launch" in lowered.launch_params
    check(made, lowered, sizes)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("made", "sizes", "config"),
    [
        (Recurrence(Cell.LSTM, 3, 3, 64, "float32", False), {}, None),
        (Recurrence(Cell.GRU, STEPS, BATCH, 32, "float32", True), {"steps": 2, "batch": 9}, None),
        (Recurrence(Cell.LSTM, 2, 9, 32, "float32", False), {}, FloatsConfig(16, 4)),
    ],
    ids=["lstm", "gru", "two gates a lane"],
)
def test_float32_is_spread_without_tensor_cores(made, sizes, config):
    config = config or floats_configs(made, H200)[0]
    check(made, emit_floats(made, H200, config), sizes)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("made", "sizes", "blocks"),
    [
        (Recurrence(Cell.LSTM, 3, 3, 64, "float16", False), {}, 1),
        (Recurrence(Cell.GRU, STEPS, 11, 64, "bfloat16", True), {"steps": 4}, 1),
        (Recurrence(Cell.TANH, 1, BATCH, 96, "float16", False), {"batch": 9}, 1),
        (Recurrence(Cell.LSTM, 3, 9, 64, "float16", False), {}, 2),
        (Recurrence(Cell.GRU, 2, 2, 128, "float16", False), {}, 4),
    ],
    ids=["lstm", "gru", "rnn", "cluster of 2", "cluster of 4"],
)
def test_a_block_or_a_cluster_keeps_all_weights(made, sizes, blocks):
    check(made, emit_kept(made, H200, KeptConfig(blocks)), sizes)


def test_small_recurrences_are_kept_and_large_ones_spread():
    def form(cell, units, batch=4):
        made = Recurrence(cell, STEPS, batch, units, "float16", False)
        return WRITER.ranked(made, H200, load_policy(None))[0][1]

    assert form(Cell.LSTM, 128) == KeptConfig(1)
    assert form(Cell.GRU, 256) == KeptConfig(4)
    assert isinstance(form(Cell.LSTM, 512), SpreadConfig)
    assert isinstance(form(Cell.LSTM, 50), AloneConfig)
    with pytest.raises(Unsupported, match="do not fit in 132"):
        floats_configs(Recurrence(Cell.LSTM, 3, 4, 2048, "float32", False), H200)
    with pytest.raises(Unsupported, match="256 registers of weights"):
        kept_configs(Recurrence(Cell.LSTM, 3, 4, 512, "float16", False), H200)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emit", [emit_kept, emit_spread])
def test_barriers_are_enough(emit):
    made = Recurrence(Cell.LSTM, 3, 2, 64, "float16", False)
    (config,) = spread_configs(made, H200) if emit is emit_spread else [KeptConfig(2)]
    check(made, emit(made, H200, config), seed=1)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Recurrence(Cell.LSTM, 3, 2, 64, "float32", False), "tensor cores for float32"),
        (Recurrence(Cell.LSTM, 3, 2, 40, "float16", False), "no multiple of 32"),
        (Recurrence(Cell.LSTM, 3, 2, 4096, "float16", False), "do not fit in 132"),
    ],
    ids=["type", "units", "weights"],
)
def test_what_cannot_be_spread_is_refused(made, why):
    with pytest.raises(Unsupported, match=why):
        spread_configs(made, H200)


def test_states_that_do_not_fit_in_shared_memory_are_refused():
    with pytest.raises(Unsupported, match="bytes of shared memory"):
        alone_configs(Recurrence(Cell.LSTM, 3, 2, 8192, "float32", False), H200)
