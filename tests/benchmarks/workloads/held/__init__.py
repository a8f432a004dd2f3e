"""Programs that nobody tuned for, drawn by a seed: classes of programs, a few of each.

A name is `held_<class>_<seed>_<number>`, and says the whole program: seeds 0 to 5 are in the suite
`held_classes`, others by `--seed`. What is drawn does not depend on the scale, but for sizes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from ..instance import Made, Sizes, Workload
from . import along, products, rows
from .draw import Draw

CLASSES: dict[str, Callable[[Draw], Made]] = {
    "odd_product": products.odd_product,
    "long_sum": products.long_sum,
    "off_row": rows.off_row,
    "row_work_summed": rows.row_work_summed,
    "by_sample": rows.by_sample,
    "places": along.places,
    "scan": along.scan,
    "pool": along.pool,
    "few_long_rows": rows.few_long_rows,
    "reduced_windows": products.reduced_windows,
    "product_group_norm": products.product_group_norm,
    "int8_rows": rows.int8_rows,
    "attention_float32": products.attention_float32,
}
SUITE = "held_classes"
SEEDS = range(6)  # those in the suite
EACH = 2  # programs of a class and a seed
DTYPES = ("float16", "bfloat16", "float32")

_NAME = re.compile(rf"held_({'|'.join(CLASSES)})_(\d+)_(\d+)")


def names_of_seed(seed: int) -> tuple[str, ...]:
    """The programs of a seed."""
    return tuple(f"held_{of}_{seed}_{number}" for of in CLASSES for number in range(EACH))


def class_of(name: str) -> str:
    """The class of a program's name; "" where it is no such name."""
    found = _NAME.fullmatch(name)
    return found[1] if found else ""


def held(name: str) -> Workload | None:
    """The program of a name; None where it is no such name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    of = found[1]
    dtype = random.Random(f"dtype of {name}").choice(DTYPES)
    if of == "attention_float32":
        dtype = "float32"

    def make(sizes: Sizes) -> Made:
        return CLASSES[of](Draw(name, sizes))

    return Workload(make, dtype)
