"""``python -m tvm_fusion diff A B``: what differs between two plans or reports."""

from __future__ import annotations

import argparse
import json

from ...errors import InputError
from .changes import difference
from .sides import read_sides
from .text import text


def main(args: argparse.Namespace) -> int:
    """Show the difference of two files, function by function, and return the exit status.

    Raises
    ------
    InputError
        A file holds neither plan nor report, or the two have no function in common.
    """
    before, after = read_sides(args.before), read_sides(args.after)
    if len(before) == len(after) == 1:
        pairs = {"": (next(iter(before.values())), next(iter(after.values())))}
    else:
        pairs = {name: (before[name], after[name]) for name in before if name in after}
    if not pairs:
        names = [", ".join(side) for side in (before, after)]
        raise InputError(
            f"no function in common: {names[0]} in {args.before}, {names[1]} in {args.after}; "
            "give two of one model"
        )
    found = {name: difference(*pair) for name, pair in pairs.items()}
    if args.json:
        data = {name: one.to_json() for name, one in found.items()}
        only = {"functions": data} if len(data) > 1 else next(iter(data.values()))
        print(json.dumps(only, allow_nan=False))
        return 0
    for name, one in found.items():
        print("\n".join([*([f"function {name}"] if name else []), text(one, args.full)]))
    alone = sorted(set(before) ^ set(after)) if len(pairs) > 1 or "" not in pairs else []
    for name in alone:
        print(f"function {name}: only in {args.before if name in before else args.after}")
    return 0
