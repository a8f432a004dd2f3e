"""Operators that call graphs, through torch.compile: `scan` as a loop; `cond` and `while_loop`,
which torch runs, with their graphs compiled.
"""

import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops import scan, while_loop

from tvm_fusion.errors import FrontendError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(model, **options):
    return torch.compile(model, backend="tvm_fusion", options={"verify": False} | options)


def check(run, model, *inputs):
    """The numbers of eager mode, and no warning."""
    wanted = model(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        given = run(*inputs)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)


class Recurrent(nn.Module):
    """A cell of its own, between layers."""

    def __init__(self):
        super().__init__()
        self.into, self.across, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        def step(hidden, row):
            new = torch.relu(row + self.across(hidden))
            return new, {"hidden": new.clone(), "twice": new * 2}

        rows = self.into(x).transpose(0, 1)
        last, given = scan(step, torch.zeros_like(rows[0]), rows)
        return self.out(given["hidden"] + given["twice"]), last


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = torch.cond(
            x.sum() > 0,
            lambda x: torch.tanh(self.first(x)) * 2,
            lambda x: self.second(x).relu() + 1,
            (x,),
        )
        return y * 3


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, count):
        def step(i, x):
            return i + 1, torch.tanh(self.layer(x)) + x

        zero = torch.zeros((), dtype=torch.int64)
        i, y = while_loop(lambda i, x: i < count, step, (zero, x * 2))
        return i, y.softmax(-1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", [7, 1, 256])
def test_a_scan_is_compiled_with_what_stands_around_it(steps, modules):
    model = Recurrent().eval()
    run = compiled(model, strict=True)
    for _ in range(2):
        check(run, model, torch.randn(2, steps, 4))
    assert len(modules) == 1


# Always: a scan with others around it, below; symbolic sizes (`frontends/test_torch_steps`).
@pytest.mark.nightly
@pytest.mark.long
def test_a_scan_is_checked_and_follows_its_sizes(modules):
    model = Recurrent().eval()
    run = torch.compile(model, backend="tvm_fusion", options={"strict": True}, dynamic=True)
    for batch, steps in ((2, 5), (3, 9)):
        check(run, model, torch.randn(batch, steps, 4))


def test_branches_are_compiled(modules):
    model = Branching().eval()
    run, x = compiled(model, strict=True), torch.rand(3, 4)
    for given in (x, -x, x):
        check(run, model, given)
    assert len(modules) == 4  # the condition, both branches, and what comes behind


def test_steps_of_a_while_loop_are_compiled(modules):
    model = Repeated().eval()
    run, x = compiled(model, strict=True), torch.randn(3, 4)
    for count in (5, 0, 1, 33):
        check(run, model, x, torch.tensor(count))
    assert modules


def test_a_while_loop_may_count_with_numbers_of_python():
    def model(x):
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, torch.sin(x) + x), (0, x))

    check(compiled(model), model, torch.randn(4))


def test_a_scan_whose_steps_are_no_loop_is_called_by_torch():
    def model(h, xs):
        return scan(lambda h, x: (h + (x * 2).sort().values, (h * 2).tanh()), h, xs)

    run, x = compiled(model), (torch.randn(4), torch.randn(3, 4))
    with pytest.warns(UserWarning, match=r"scan.*a step"):
        run(*x)
    check(run, model, *x)
    torch._dynamo.reset()
    with pytest.raises(FrontendError, match="a step"):
        compiled(model, strict=True)(*x)
