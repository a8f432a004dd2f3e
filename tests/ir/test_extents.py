"""Bounds of symbolic extents, and what follows from them for others."""

import pytest
from tvm import tirx

from tvm_fusion.ir.extents import Bounds, bounds_within, known_sizes, with_known_sizes

N, M = (tirx.Var(name, "int64") for name in "nm")
KNOWN = {N: Bounds(8, 128, 8), M: Bounds(3)}


@pytest.mark.parametrize(
    ("extent", "wanted"),
    [
        (7, Bounds(7, 7)),
        (N, Bounds(8, 128, 8)),
        (N * 12, Bounds(96, 1536, 96)),
        (N // 8 * 2, Bounds(2, 32, 2)),
        (N - 100, Bounds(0, 28, 4)),
        (N + M, Bounds(11)),
        (tirx.Var("unknown", "int64"), Bounds()),
    ],
)
def test_bounds_of_an_extent_follow_from_those_of_its_symbols(extent, wanted):
    assert bounds_within(extent, KNOWN) == wanted


def test_hints_are_told_of_extents_of_one_symbol():
    known = {N: Bounds(hints=(1, 16, 512)), M: Bounds(hints=(3,))}
    assert bounds_within(N * 12, known).hints == (12, 192, 6144)
    assert bounds_within(N // 8, known).hints == (2, 64)
    assert bounds_within(N + M, known).hints == ()
    assert bounds_within(N, known).or_of(bounds_within(M, known)).hints == (1, 3, 16, 512)


@pytest.mark.parametrize(
    ("bounds", "nearest"),
    [
        (Bounds(), 128),
        (Bounds(0, 100), 100),
        (Bounds(200), 200),
        (Bounds(200, 1000, 48), 240),
        (Bounds(0, 4096, 200), 200),
        (Bounds(3, 100, 8), 96),
    ],
)
def test_the_nearest_value_is_within_bounds(bounds, nearest):
    assert bounds.nearest(128) == nearest
    assert bounds.refusal(nearest) is None


def test_values_of_two_calls_have_what_both_have():
    assert Bounds(8, 64, 8).or_of(Bounds(4, 100, 12)) == Bounds(4, 100, 4)
    assert Bounds(8, 64, 8).or_of(Bounds()) == Bounds()


def test_a_function_notes_the_bounds_of_its_sizes():
    x = tirx.decl_buffer((4, M * 2, N), "float32")
    func = tirx.PrimFunc([x], tirx.Evaluate(0))
    assert with_known_sizes(func, {}).same_as(func)
    assert known_sizes(func) == {}
    for known in (KNOWN, {N: Bounds(hints=(1, 16)), M: Bounds(3)}):
        assert known_sizes(with_known_sizes(func, known)) == known
    assert known_sizes(with_known_sizes(func, {M: Bounds(3)})) == {M: Bounds(3)}


def test_sizes_of_32_bits_have_bounds_too():
    pages = tirx.Var("pages", "int32")
    func = tirx.PrimFunc([tirx.decl_buffer((pages, N), "float16")], tirx.Evaluate(0))
    known = {pages: Bounds(1, 2048), N: Bounds(8, 128, 8)}
    assert known_sizes(with_known_sizes(func, known)) == known
