"""Right programs are not called wrong; results by numbers of programs are in
`tests/results/right_programs_*.json`.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.right_programs import KINDS, Program, judged, program, programs


def assert_right(one):
    outcome = judged(one)
    assert outcome.near <= 1, f"{outcome} is wrong: torch says so"
    assert outcome.called_wrong == "", outcome


@pytest.mark.one_in(20)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_right_program_passes(kind):
    assert_right(program(kind, seed=20_000 + len(kind), dtype="float32"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", [41149, 41297])
def test_halves_in_an_exponential_of_extreme_numbers_pass(seed):
    assert_right(program("attention_written_out", seed, "bfloat16"))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_right_programs_pass(part):
    for key in programs(1000, seed=10_000)[part::20]:
        assert_right(program(*key))


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


def layer_norm_then_product(x, w):
    return layer_norm(x) @ w


def group_norm(groups):
    return lambda x: F.group_norm(x, groups)


def variance_of_columns(x):
    return x.var(0)


def argmax_of_product(x, w):
    return (x @ w).argmax(-1)


def rounded(x, y):
    return (x * y * 3.7).round().to(torch.int32)


def running_sum(x):
    return x.cumsum(-1)


NAMED = [
    ("float32", layer_norm, [(512, 768)]),
    ("float32", layer_norm_then_product, [(64, 256), (256, 130)]),
    ("float32", group_norm(4), [(3, 16, 13, 13)]),
    pytest.param("float32", group_norm(8), [(2, 32, 33, 17)], marks=pytest.mark.nightly),
    pytest.param("float32", group_norm(1), [(2, 9, 35, 21)], marks=pytest.mark.nightly),
    ("float32", variance_of_columns, [(603, 129)]),
    ("float32", argmax_of_product, [(301, 33), (33, 1000)]),
    pytest.param("float16", argmax_of_product, [(301, 33), (33, 1000)], marks=pytest.mark.nightly),
    ("bfloat16", argmax_of_product, [(301, 33), (33, 1000)]),
    ("bfloat16", rounded, [(301, 33), (301, 33)]),
    ("float16", running_sum, [(7, 503)]),
]


@pytest.mark.parametrize(("dtype", "function", "shapes"), NAMED)
def test_what_was_or_might_be_called_wrong_passes(dtype, function, shapes):
    inputs = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in shapes)
    outcome = judged(Program("named", 0, dtype, function, inputs))
    assert outcome.called_wrong == "", outcome
