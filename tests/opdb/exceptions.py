"""What is not right, and why: `exceptions.toml`, which a run is held to.

[random]                                    # a class
outcome = "refused"
why = "another value in each call"
all = ["bernoulli"]                         # operators, for all element types
float32 = ["normal"]                        # and for one
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from . import DTYPES, OUTCOMES

LIST = Path(__file__).with_name("exceptions.toml")
Entry = tuple[str, str]  # operator, element type


def read(path: Path = LIST) -> dict[Entry, tuple[str, str]]:
    """(class, outcome) by operator and element type.

    Raises
    ------
    ValueError
        A class has no reason or an unknown outcome or element type, or an entry is in two.
    """
    found: dict[Entry, tuple[str, str]] = {}
    for name, given in tomllib.loads(path.read_text(encoding="utf-8")).items():
        listed = {dtype: given[dtype] for dtype in given if dtype not in ("outcome", "why")}
        unknown = listed.keys() - {"all", *DTYPES}
        if given.get("outcome") not in OUTCOMES[1:] or not given.get("why") or unknown:
            raise ValueError(f"{path}: [{name}] needs an outcome of {OUTCOMES[1:]} and a reason")
        for dtype, operators in listed.items():
            for entry in ((op, one) for op in operators for one in _all(dtype)):
                if entry in found:
                    raise ValueError(f"{path}: {entry} is in [{found[entry][0]}] and [{name}]")
                found[entry] = name, given["outcome"]
    return found


def _all(dtype: str) -> tuple[str, ...]:
    return DTYPES if dtype == "all" else (dtype,)


def not_refused(listed: Mapping[Entry, tuple[str, str]]) -> dict[Entry, tuple[str, str]]:
    """The list without what is refused: where the rest runs in torch, nothing may be."""
    return {entry: given for entry, given in listed.items() if given[1] != "refused"}


def deviations(
    outcomes: Mapping[Entry, str], listed: Mapping[Entry, tuple[str, str]]
) -> tuple[list[str], list[str]]:
    """What is worse or other than the list says, and what has become right, a line each."""
    worse, better = [], []
    for entry, outcome in outcomes.items():
        expected = listed[entry][1] if entry in listed else "right"
        if outcome == expected:
            continue
        line = f"{entry[0]} of {entry[1]}: {outcome}, not {expected}"
        (better if outcome == "right" else worse).append(line)
    return worse, better
