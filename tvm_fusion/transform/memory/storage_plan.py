"""Where tensors lie: each at an offset of a storage, storages as short-lived and as few as can be.

A storage lives from the first use of what lies in it to the last. Storages of one size follow each
other in the same memory, since the runtime keeps freed memory by size.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 256  # bytes; as device memory is given out, and more than any vector load asks for


@dataclass(frozen=True, slots=True)
class Life:
    """What one tensor needs.

    Attributes
    ----------
    size_bytes : int
    first, last : int
        The steps that write it first and read it last; it is needed in both, and in between.
    """

    size_bytes: int
    first: int
    last: int

    def meets(self, other: "Life") -> bool:
        """Whether both are needed in one step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies."""

    storage: int
    offset: int


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """Places of tensors.

    Attributes
    ----------
    places : tuple of Place
        One for each tensor.
    storages : tuple of Life
        Size and lifetime of each storage.
    peak_bytes : int
        The most that is alive in one step, what lies elsewhere included.
    pool_bytes : int
        What a pool that keeps freed memory by its size takes in all.
    """

    places: tuple[Place, ...]
    storages: tuple[Life, ...]
    peak_bytes: int
    pool_bytes: int


def plan_storages(tensors: Sequence[Life], others: Sequence[Life] = ()) -> StoragePlan:
    """Give every tensor a place.

    The least peak wins, of these the least memory of the pool.

    Parameters
    ----------
    tensors : sequence of Life
    others : sequence of Life
        What has storages of its own, such as outputs.

    Examples
    --------
    >>> plan = plan_storages([Life(512, 0, 1), Life(512, 1, 2), Life(1024, 3, 4)])
    >>> [(p.storage, p.offset) for p in plan.places], plan.peak_bytes
    ([(0, 0), (0, 512), (0, 0)], 1024)
    """
    rounded = [Life(_rounded(t.size_bytes), t.first, t.last) for t in tensors]
    fixed = [Life(_rounded(t.size_bytes), t.first, t.last) for t in others]
    plans = [_placed(rounded, fixed, order) for order in ORDERS]
    return min(plans, key=lambda plan: (plan.peak_bytes, plan.pool_bytes))


def least_peak_bytes(lives: Sequence[Life]) -> int:
    """The most that is needed in one step: no plan has a lower peak."""
    return int(_alive(lives, _steps(lives)).max(initial=0))


ORDERS: tuple[Callable[[Life], tuple[int, ...]], ...] = (
    lambda life: (-life.size_bytes, life.first),
    lambda life: (-life.size_bytes * (life.last - life.first + 1), life.first),
    lambda life: (-life.size_bytes, -life.last),
)


class _Storage:
    """A storage that is being filled."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.content: list[tuple[int, Life]] = []  # by offset

    def offset_for(self, life: Life) -> int | None:
        """The lowest offset where a tensor meets no other; None if there is none."""
        offset = 0
        for start, other in self.content:
            if not other.meets(life):
                continue
            if offset + life.size_bytes <= start:
                break
            offset = max(offset, start + other.size_bytes)
        return offset if offset + life.size_bytes <= self.size else None

    def put(self, offset: int, life: Life) -> None:
        self.content.append((offset, life))
        self.content.sort(key=lambda item: item[0])

    def life(self) -> Life:
        lives = [life for _, life in self.content]
        return Life(self.size, min(x.first for x in lives), max(x.last for x in lives))


def _placed(
    tensors: Sequence[Life], others: Sequence[Life], order: Callable[[Life], tuple[int, ...]]
) -> StoragePlan:
    """Place one tensor after another where the peak stays lowest, in an old storage before a new
    one, and where it prolongs the storage least.
    """
    steps = _steps([*tensors, *others])
    alive = _alive(others, steps)
    least = least_peak_bytes([*tensors, *others])
    storages: list[_Storage] = []
    places: dict[int, Place] = {}
    for index in sorted(range(len(tensors)), key=lambda i: (*order(tensors[i]), i)):
        tensor = tensors[index]
        options = []
        for number, storage in enumerate(storages):
            offset = storage.offset_for(tensor)
            if offset is not None:
                more = _added(storage.life(), tensor, steps)
                peak = max(least, int((alive + more).max()))
                options.append((peak, 0, int(more.sum()), storage.size, number, offset))
        more = _alive([tensor], steps)
        peak = max(least, int((alive + more).max()))
        options.append((peak, 1, 0, tensor.size_bytes, len(storages), 0))
        *_, number, offset = min(options)
        if number == len(storages):
            storages.append(_Storage(tensor.size_bytes))
            alive += more
        else:
            alive += _added(storages[number].life(), tensor, steps)
        storages[number].put(offset, tensor)
        places[index] = Place(number, offset)
    lives = tuple(storage.life() for storage in storages)
    return StoragePlan(
        tuple(places[i] for i in range(len(tensors))),
        lives,
        int(alive.max(initial=0)),
        _pool_bytes([*lives, *others]),
    )


def _added(storage: Life, tensor: Life, steps: int) -> np.ndarray:
    """What a storage adds to each step if it has to live for a tensor too."""
    longer = Life(
        storage.size_bytes, min(storage.first, tensor.first), max(storage.last, tensor.last)
    )
    return _alive([longer], steps) - _alive([storage], steps)


def _alive(lives: Sequence[Life], steps: int) -> np.ndarray:
    alive = np.zeros(steps, np.int64)
    for life in lives:
        alive[life.first : life.last + 1] += life.size_bytes
    return alive


def _steps(lives: Sequence[Life]) -> int:
    return 1 + max((life.last for life in lives), default=0)


def _pool_bytes(lives: Sequence[Life]) -> int:
    """What a pool holds in the end that gives out blocks of exactly the size that is asked for."""
    free: Counter[int] = Counter()
    alive: list[tuple[int, int]] = []  # the last step, and the size
    total = 0
    for life in sorted(lives, key=lambda life: life.first):
        while alive and alive[0][0] < life.first:
            free[heapq.heappop(alive)[1]] += 1
        if free[life.size_bytes]:
            free[life.size_bytes] -= 1
        else:
            total += life.size_bytes
        heapq.heappush(alive, (life.last, life.size_bytes))
    return total


def _rounded(size: int) -> int:
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
