"""Kernels of a PrimFunc of which a call launches one, by its size, are named by their ranges.

    f_kernel, f_kernel_1, f_kernel_2  ->  f_upto_64_kernel, f_upto_512_kernel, f_beyond_kernel

"up to" is from where the ranges before end. One may have several: f_upto_64_and_129_to_192_kernel.

Profiles and reports say by these names which one ran, and launches of a call are counted by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import tvm
import tvm_ffi
from tvm import tirx

from ...ir.graph import VERSIONS_ATTR

_RANGE = (
    r"(?:of\d+_(?:rows_)?)?"
    r"(?:upto_(?:\d+_keys|\d+_results|\d+_queries(?:_\d+_keys)?|\d+(?:_and_\d+_to_\d+)*)|beyond)"
)
_VERSION = re.compile(rf"(.*?)_({_RANGE})_kernel")


def launches_of(kernels: Iterable[str]) -> int:
    """How many of a function's kernels, by their names, one call launches."""
    matches = [(_VERSION.fullmatch(name), name) for name in kernels]
    ways = {match[1] for match, _ in matches if match}
    return len(ways) + sum(match is None for match, _ in matches)


def is_kernel_of(kernel: str, function: str) -> bool:
    """Whether a kernel, by its name, may be one of a function's."""
    return re.match(rf"{re.escape(function)}(_{_RANGE})?_kernel", kernel) is not None


def versions_among(kernels: Iterable[str]) -> tuple[str, ...]:
    """The ranges that a function's kernels are for, by their names: "up to 64", "beyond"."""
    matches = map(_VERSION.fullmatch, kernels)
    return tuple(_told(match[2]) for match in matches if match)


def edges_among(kernels: Iterable[str]) -> set[int]:
    """The sizes on both sides of where versions take turns, by the names of kernels; those of
    results are none.
    """
    found: set[int] = set()
    for match in filter(None, map(_VERSION.fullmatch, kernels)):
        name = re.sub(r"\d+_results", "", match[2])
        multiple = re.match(r"of(\d+)_", name)
        for start, end in re.findall(r"(?:upto|(\d+)_to|keys|queries)_(\d+)", name):
            found |= {int(end), int(end) + (int(multiple[1]) if multiple else 1)}
            found |= {int(start) - 1, int(start)} if start else set()
    return found


def _told(name: str) -> str:
    """``of8_upto_64`` is "multiples of 8 up to 64"."""
    told = re.sub(r"of(\d+)_", r"multiples of \1 ", name.replace("upto_", "up to "))
    return told.replace("queries_", "queries, ").replace("_", " ")


def with_version_names(written: tvm.IRModule, lowered: tvm.IRModule) -> tvm.IRModule:
    """Lowered functions, with kernels named by the ranges of versions of the `written` ones."""
    renamed: dict[str, str] = {}
    for gvar, func in written.functions_items():
        if isinstance(func, tirx.PrimFunc) and VERSIONS_ATTR in (func.attrs or {}):
            symbol = str(func.attrs.get("global_symbol", gvar.name_hint))
            ranges = [r if isinstance(r, str) else int(r) for r in func.attrs[VERSIONS_ATTR]]
            renamed |= _names(symbol, ranges, lowered)
    if not renamed:
        return lowered

    def rename(text: tvm.ir.StringImm) -> tvm.ir.StringImm:
        return tvm.ir.StringImm(renamed.get(text.value, text.value))

    functions = {}
    for gvar, func in lowered.functions_items():
        name = renamed.get(gvar.name_hint)
        if name is not None:
            gvar, func = tvm.ir.GlobalVar(name), func.with_attr("global_symbol", name)
        elif isinstance(func, tirx.PrimFunc):
            func = func.with_body(tvm_ffi.structural_map(func.body, [(tvm.ir.StringImm, rename)]))
        functions[gvar] = func
    return tvm.IRModule(functions, attrs=lowered.attrs)


def _names(symbol: str, ranges: list[int | str], lowered: tvm.IRModule) -> dict[str, str]:
    """New names of the kernels of a function, by their names in the order of the versions; none
    where a version has several kernels.
    """
    own = re.compile(re.escape(symbol) + r"_kernel(?:_(\d+))?")
    found = [m for m in (own.fullmatch(g.name_hint) for g in lowered.get_global_vars()) if m]
    if len(found) != len(ranges) + 1:
        return {}
    found.sort(key=lambda match: int(match[1] or 0))
    ends = [*(r if isinstance(r, str) else f"upto_{r}" for r in ranges), "beyond"]
    return {m[0]: f"{symbol}_{end}_kernel" for m, end in zip(found, ends, strict=True)}
