"""Orders of axes: how a tensor lies in memory, as the axes of the model in that order.

x: [N, C, H, W] in the order (0, 2, 3, 1)        lies as permute_dims(x, (0, 2, 3, 1)): NHWC
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm.ir import Expr

from ..rewrites.factors import is_one
from ..rewrites.relabeling import Relabeling

Order = tuple[int, ...]


def plain(rank: int) -> Order:
    """The order of the model."""
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Axis 1 behind all others: NWC, NHWC, NDHWC."""
    return (0, *range(2, rank), 1) if rank > 2 else plain(rank)


def of_letters(source: str, target: str) -> Order:
    """The order in which a tensor of layout `source` has layout `target`."""
    return tuple(source.index(letter) for letter in target)


def kept(order: Order, axes: Iterable[int]) -> Order:
    """The order of what is left of a tensor, of which only some axes stay."""
    left = sorted(axes)
    return tuple(left.index(axis) for axis in order if axis in left)


def ordered(values: Sequence, order: Order) -> list:
    """What is told for each axis, in another order."""
    return [values[axis] for axis in order]


def moved(shape: Sequence[Expr], order: Order) -> Order:
    """An order without the axes of one element: equal for two orders that lie in memory alike."""
    return tuple(axis for axis in order if not is_one(shape[axis]))


def change(shape: Sequence[Expr], old: Order, new: Order) -> Relabeling | None:
    """From a tensor in one order to the same in another; `shape` is that of the model."""
    return Relabeling.permutation(ordered(shape, old), [old.index(axis) for axis in new])


def natural(relabeling: Relabeling) -> Order:
    """The order of the result's axes in which the fewest elements move."""
    place = {atom: i for i, atom in enumerate(a for group in relabeling.source for a in group)}
    last, keys = -1, []
    for axis, group in enumerate(relabeling.target):
        last = place[group[0]] if group else last
        keys.append((last, axis))
    return tuple(axis for _, axis in sorted(keys))
