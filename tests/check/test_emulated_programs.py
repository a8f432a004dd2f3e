"""Random torch programs, planned for each GPU profile, run kernel by kernel on the CPU emulator.

Those of the ordinary suite are small, fused greedily, and 25 are exported and compiled together.
"""

import pytest

from tests.support.emulated_programs import (
    GREEDY,
    PROFILES,
    emulated,
    emulated_seeds,
    emulated_together,
    explained,
)
from tvm_fusion.fuzz.torch_program import Input, Program, Statement
from tvm_fusion.fuzz.verdict import REFUSED, RIGHT, WRONG
from tvm_fusion.kernels.column.config import WARP, ColumnConfig
from tvm_fusion.kernels.column.sweeps import LaneExchange


def assert_right(outcomes):
    for outcome in outcomes:
        assert outcome.verdict.kind in (RIGHT, REFUSED), explained(outcome)


@pytest.mark.long
@pytest.mark.one_in(15)
@pytest.mark.parametrize("first", range(0, 150, 10))
def test_random_programs_are_right_on_the_emulator(first):
    outcomes = list(emulated_seeds(range(first, first + 10), 8, GREEDY, batch=10))
    assert_right(outcomes)
    assert sum(o.verdict.kind == RIGHT for o in outcomes) >= 7


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 3000, 50))
def test_thousands_of_random_programs_are_right_on_the_emulator(first):
    assert_right(emulated_seeds(range(first, first + 50), 40))


def of(code, *inputs):
    """The program of one statement."""
    names = tuple(f"x{n}" for n in range(len(inputs)))
    declared = tuple(Input(n, c) for n, c in zip(names, inputs, strict=True))
    return Program(declared, (Statement("v0", "{out} = " + code, names),), ("v0",))


SMALL = [
    of("torch.softmax({0}, 0)", "torch.randn((7, 7))"),
    of("{0}.sum(0)", "torch.randn((5, 4, 5))"),
    of("{0}.amax((0, 1))", "torch.randn((3, 3, 7))"),
    of("F.normalize({0}, dim=1)", "torch.randn((3, 9, 3, 4))"),
    of("F.instance_norm({0})", "torch.randn((2, 3, 6, 5))"),
    of("torch.rot90({0} * 2, 3)", "torch.randn((16, 17))"),
    of("F.linear({0}, {1})", "torch.randn((9, 17))", "torch.randn((5, 17))"),
    of("torch.sort({0}, 0)[0]", "torch.randn((9, 5))"),
    of("{0}.argmax(0)", "torch.randint(0, 4, (4, 3), dtype=torch.uint8)"),
    of("torch.median({0}, 1)[0]", "torch.randn((3, 8))"),
    # indices that are read behind the edge of padding
    of(
        "F.pad(torch.gather({0}, 0, {1}), (2, 1), value=-1.5)",
        "torch.randn((2,))",
        "torch.randint(0, 2, (2,))",
    ),
    of(
        "F.pad(F.embedding({1}, {0}), (0, 0, 2, 1)).softmax(1)",
        "torch.randn((5, 40))",
        "torch.randint(0, 5, (7,))",
    ),
    # scans of short rows, and of long ones in parts
    of("torch.cumsum({0}, 0)", "torch.randn((5, 3, 5)).to(torch.float16)"),
    of("torch.cumprod({0}, 0)", "torch.rand((300, 2)) + 0.5"),
    of("torch.cumsum({0}, 1).relu()", "torch.randn((2, 9000))"),
    of("torch.cumsum({0}, -1)", "torch.randn((3, 140)) > 0"),
    of("torch.cat([torch.cumsum({0}, 1), {1}], 1)", "torch.randn((6, 50))", "torch.randn((6, 3))"),
    of(
        "torch.softmax(torch.cumsum(torch.cumsum({0}.flip(1), 1).flip(1), 0), 1)",
        "torch.randn((6, 50))",
    ),
    of("F.pad(torch.cumsum({0}[:, ::2], 1), (1, 2))", "torch.randn((6, 50)).to(torch.bfloat16)"),
    of("{0}.mean(-1)", "torch.randn((3, 31)).to(torch.float64)"),
    of("-{0}", "torch.randint(0, 9, (3, 5), dtype=torch.uint8)"),
    of(
        "F.prelu({0}, F.prelu({1}, torch.where({2} > 0, {2}, {3}) + {3}))",
        *["torch.randn((1,))"] * 4,
    ),
    of("{0} & {1}", "torch.rand((3, 5)) < 0.5", "torch.rand((3, 5)) < 0.5"),
    # reductions across threads, for more rows than there are
    of(
        "F.conv1d({0}, {1}, stride=2, padding=1)",
        "torch.randn((1, 1, 2))",
        "torch.randn((1, 1, 2))",
    ),
    of("F.conv1d({0}, {1})", "torch.randn((1, 3, 5))", "torch.randn((1, 3, 2))"),
    of(
        "F.conv_transpose1d({0}, {1}, stride=2)", "torch.randn((1, 2, 2))", "torch.randn((2, 1, 1))"
    ),
    # a vector of a flipped matrix crosses its rows
    of("{0}.flatten().flip(0)", "torch.randn((17, 31, 2)).to(torch.float16)"),
    of("{0}.permute((1, 0))", "torch.randint(-8, 9, (33, 27))"),
]


def test_operators_of_each_kind_are_right_on_each_device():
    pairs = [(p, PROFILES[n % len(PROFILES)]) for n, p in enumerate(SMALL)]
    assert [o.verdict.kind for o in emulated_together(pairs)] == [RIGHT] * len(SMALL)


def lost_walkers(monkeypatch):
    """Shuffles are counted on where a block has a warp, and done where it is whole warps."""
    shuffle = LaneExchange._shuffle

    def by_shuffle(config):
        return WARP // config.lanes if 0 < config.lanes < WARP <= config.threads else 1

    def shuffled(self, group):
        if self.config.threads % WARP == 0:
            shuffle(self, group)

    monkeypatch.setattr(ColumnConfig, "by_shuffle", property(by_shuffle))
    monkeypatch.setattr(LaneExchange, "_shuffle", shuffled)


def test_walkers_that_do_not_meet_are_found(monkeypatch):
    lost_walkers(monkeypatch)
    outcome = emulated(SMALL[0], "nvidia_h200")
    assert outcome.verdict.kind == WRONG
    assert "torch.softmax" in explained(outcome, 10)
