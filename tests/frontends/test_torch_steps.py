"""`scan` and `while_loop` beside PyTorch: they stay loops."""

import time

import pytest
import torch
import tvm_ffi
from torch import nn
from torch._higher_order_ops import scan, while_loop
from tvm import tirx

import tvm_fusion
from tests.support.frontend_tools import Function, array_of, assert_close, check
from tests.support.models import run_unfused
from tests.support.module_on_cpu import EmulatedModule
from tvm_fusion.check import source
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import FrontendError, OutOfRange
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.runtime.build.plain_schedule import ONE_BLOCK
from tvm_fusion.transform.functions.loop_function import DATA, KNOWN, STEPS_ATTR


class Cell(nn.Module):
    """A recurrent cell that torch has none of, step by step."""

    def __init__(self, inputs, units):
        super().__init__()
        self.into, self.across = nn.Linear(inputs, units), nn.Linear(units, units)
        self.norm = nn.LayerNorm(units)

    def forward(self, hidden, total, xs):
        def step(carried, x):
            new = self.norm(torch.tanh(self.into(x) + self.across(carried["hidden"])))
            return {"hidden": new, "total": carried["total"] + new.abs().sum()}, (
                new.clone(),
                x * 2,
            )

        return scan(step, {"hidden": hidden, "total": total}, xs)


class Gated(nn.Module):
    """Memories that an input opens and closes, backwards, of an axis within."""

    def forward(self, memory, inputs, gates):
        def step(memory, given):
            x, gate = given
            memory = memory * torch.sigmoid(gate) + x
            return memory, memory.clone()

        return scan(step, memory, (inputs, gates), dim=1, reverse=True)


def cell_inputs(steps, inputs=5, units=7, batch=3):
    return torch.randn(batch, units), torch.zeros(()), torch.randn(steps, batch, inputs)


def loops(mod):
    """The PrimFuncs that are loops over steps."""
    functions = (f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))
    return [f for f in functions if STEPS_ATTR in (f.attrs or {})]


def newton(x, tolerance):
    """Square roots until all are near."""

    def goes_on(root, error):
        return error > tolerance

    def step(root, error):
        better = 0.5 * (root + x / root)
        return better, (better - root).abs().max()

    return while_loop(goes_on, step, (x.clone(), torch.tensor(torch.inf)))


def counted(x, count):
    def step(i, x):
        return i + 1, torch.sin(x) * 1.5 + 1

    return while_loop(lambda i, x: i < count, step, (torch.zeros((), dtype=torch.int64), x))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", [1, 7, 256])
def test_a_scan_is_one_loop_however_long_it_is(steps):
    mod = check(Cell(5, 7), *cell_inputs(steps))
    (loop,) = loops(mod)
    assert loop.attrs[STEPS_ATTR] == KNOWN


def test_a_scan_goes_backwards_along_any_axis():
    check(Gated(), torch.randn(4, 6), torch.randn(4, 9, 6), torch.randn(4, 9, 6))


def test_what_is_carried_may_change_places():
    def fibonacci(a, b, xs):
        return scan(
            lambda c, x: ((c[1].clone(), c[0] + c[1]), (x + c[0], c[1].clone())), (a, b), xs
        )

    check(fibonacci, torch.randn(3), torch.randn(3), torch.randn(6, 3))


def test_integers_booleans_constants_and_halves_are_carried():
    def step(carried, x):
        count, seen, total = carried
        table, seen = torch.arange(3.0) * 0.5, seen | (x > 1)
        return (count + 1, seen, total + x.double() * table), (count.clone(), seen.to(x.dtype))

    def run(count, seen, total, xs):
        return scan(step, (count, seen, total), xs)

    given = torch.zeros((), dtype=torch.int32), torch.zeros(3, dtype=torch.bool)
    check(run, *given, torch.zeros(3, dtype=torch.float64), torch.randn(9, 3).half())


def test_a_scan_may_stand_in_a_scan():
    def outer(h, rows):
        def step(h, row):
            last, within = scan(lambda a, x: (a * 0.5 + x, a + x), h, row)
            return last, within.sum(0)

        return scan(step, h, rows)

    assert len(loops(check(outer, torch.randn(3), torch.randn(4, 5, 3)))) == 1


def test_element_wise_operators_are_computed_where_they_are_read_unless_that_repeats_them():
    def run(h, xs):
        def step(h, x):
            y = h
            for _ in range(24):
                y = y * y * 0.5 + x
            z = torch.tanh(y)
            return z + 1, (z[:, None] * z).sum(0) + z.softmax(0)

        return scan(step, h, xs)

    (loop,) = loops(check(run, torch.rand(5), torch.rand(3, 5)))
    stores = []
    tvm_ffi.structural_walk(loop.body, [(tirx.BufferStore, stores.append)])
    assert 24 < len(stores) < 40


def test_sizes_may_be_symbolic():
    model = Cell(5, 7).eval()
    batch, x = torch.export.Dim("batch", max=100), cell_inputs(6)
    mod = load(model, x, dynamic_shapes={"hidden": {0: batch}, "total": None, "xs": {1: batch}})
    x = cell_inputs(6, batch=9)
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(*x))
    assert_close(run_unfused(mod, *map(array_of, x)), [array_of(y) for y in wanted])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_numbers_decide_how_often_a_loop_goes_round(count):
    mod = check(counted, torch.randn(4), torch.tensor(count))
    (loop,) = loops(mod)
    assert loop.attrs[STEPS_ATTR] == DATA


def test_a_loop_ends_when_its_numbers_are_near():
    check(newton, torch.rand(5) + 1, torch.tensor(1e-3))


def test_a_scan_of_steps_that_end_by_data_ends_by_data():
    def run(h, xs):
        def step(h, x):
            again = while_loop(lambda y: y.sum() < 9, lambda y: y * 1.5 + 1, (x.clone(),))
            return h + again[0], h * 2

        return scan(step, h, xs)

    mod = load(Function(run), (torch.randn(4), torch.randn(5, 4)))  # eager mode fails on it
    assert [loop.attrs[STEPS_ATTR] for loop in loops(mod)] == [DATA]


# Always: a scan is one loop however long it is.
@pytest.mark.nightly
@pytest.mark.long
def test_loops_are_compiled_and_checked_in_the_same_time_whatever_their_length(monkeypatch):
    monkeypatch.setattr(source, "SPECIAL_S", 1e9)  # with NaN and infinities, too
    seconds = []
    for steps in (16, 512):
        model, x = Cell(16, 32).eval(), cell_inputs(steps, 16, 32, batch=2)
        began = time.monotonic()
        module = tvm_fusion.compile(model, "llvm", example_inputs=x, verify=True)
        seconds.append(time.monotonic() - began)
        with torch.no_grad():
            wanted = torch.utils._pytree.tree_leaves(model(*x))
        for found, expected in zip(
            torch.utils._pytree.tree_leaves(module(*x)), wanted, strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert max(seconds) < 60  # some of which PyTorch takes for its steps


def test_a_loop_that_ends_by_data_is_compared_on_the_example_inputs():
    x = torch.rand(5) + 1, torch.tensor(1e-3)
    module = tvm_fusion.compile(Function(newton), "llvm", example_inputs=x, verify=True)
    torch.testing.assert_close(module(*x), newton(*x))
    assert module.verification is None


def test_places_out_of_range_in_a_step_are_an_error():
    def run(h, xs, places):
        return scan(lambda h, r: (h * 0.5 + r[0][r[1]], h * 2), h, (xs, places))

    x = torch.randn(4), torch.randn(3, 4), torch.randint(0, 4, (3, 4))
    module = tvm_fusion.compile(Function(run), "llvm", example_inputs=x, verify=False)
    with pytest.raises(OutOfRange, match=r"scan.*4 elements"):
        module(x[0], x[1], torch.full((3, 4), 9))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda h, x: (h + x.sort().values, h * 2), "a step"),
        (lambda h, x: (h + torch.rand_like(x), h * 2), "a step.*random numbers"),
    ],
)
def test_steps_that_are_no_loops_are_refused(step, why):
    model = Function(lambda h, xs: scan(step, h, xs))
    with pytest.raises(FrontendError, match=f"scan.*{why}"):
        load(model, (torch.randn(4), torch.randn(3, 4)))


def planned_for_a_gpu(model, inputs):
    hw = load_profile("nvidia_h200")
    return Planned.of(load(model.eval(), inputs), hw.to_target(), hw, load_policy(None))


CASES = {
    "cell": lambda: (Cell(5, 7), cell_inputs(4)),
    "large": lambda: (Cell(3, 130), cell_inputs(2, 3, 130, batch=9)),
    "gated": lambda: (Gated(), (torch.randn(4, 6), *(torch.randn(4, 3, 6) for _ in range(2)))),
    "counted": lambda: (Function(counted), (torch.randn(40), torch.tensor(3))),
    "newton": lambda: (Function(newton), (torch.rand(40) + 1, torch.tensor(1e-3))),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_a_loop_is_a_kernel_of_one_block_on_a_gpu(case):
    model, x = CASES[case]()
    emulated = EmulatedModule.of(planned_for_a_gpu(model, x))
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(*x))
    assert_close(emulated([array_of(y) for y in x]), [array_of(y) for y in wanted])
    assert not emulated.failures


def test_long_sums_of_few_are_added_by_warps():
    emulated = EmulatedModule.of(planned_for_a_gpu(*CASES["large"]()))
    (text,) = (text for text in emulated.texts() if "scan" in text)
    assert text.count("__shfl_down_sync(") >= 3 * 5  # a mean, a variance and a sum


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["cell", "newton"])
def test_a_loop_compiles_for_a_gpu(case, nvcc):
    model, x = CASES[case]()
    module = tvm_fusion.compile(model.eval(), "nvidia_h200", example_inputs=x)
    assert ONE_BLOCK in module.report.plain.values()
