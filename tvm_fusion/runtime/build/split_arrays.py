"""Large arrays of registers become variables before nvcc reads a kernel.

    float acc[128];  mma(acc[0], acc[1], ...)     float acc__0, acc__1, ...;  mma(acc__0, ...)

TVM prints what a thread keeps as arrays. Where every index is a constant nvcc makes registers of
them, but late: a kernel whose tensor-core instructions name 128 accumulators each takes it three to
four times as long as the same kernel with variables, for the same machine code.
"""

import re
from collections import Counter

LEAST_ELEMENTS = 96  # nvcc is quick with fewer

_DECLARED = re.compile(r"^([ \t]*)alignas\(\d+\) (\w+) (\w+)\[(\d+)\];$", re.MULTILINE)


def split_arrays(source: str) -> str:
    """Return CUDA source in which thread-local arrays are variables, one per element.

    An array stays if it is small, if an index is no constant within it, if its name may mean
    something else as well, or where the address of an element is taken (what is read there may be
    wider than the element).
    """
    declared = Counter(match[3] for match in _DECLARED.finditer(source))
    for match in list(_DECLARED.finditer(source)):
        indent, dtype, name, size = match[1], match[2], match[3], int(match[4])
        if size < LEAST_ELEMENTS or declared[name] > 1 or f"{name}__" in source:
            continue
        if not _only_elements(source.replace(match[0], "", 1), name, size):
            continue
        variables = ", ".join(f"{name}__{i}" for i in range(size))
        source = source.replace(match[0], f"{indent}{dtype} {variables};", 1)
        source = re.sub(rf"\b{name}\[(\d+)\]", rf"{name}__\1", source)
    return source


def _only_elements(source: str, name: str, size: int) -> bool:
    """Whether all that the source says of an array is elements of it by constant indices."""
    before = r"(&[\s(]*|\w\s+|\.|->)?"  # its address, another declaration, a member
    uses = re.findall(rf"{before}\b{name}\b(?:\[(\d+)\])?", source)
    return all(not strange and index and int(index) < size for strange, index in uses)
