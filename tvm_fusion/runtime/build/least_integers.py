"""The least int32 as an int: what TVM prints for it is another type to nvcc.

    max(x, c ? y : -2147483648)        max(x, c ? y : (-2147483647 - 1))

In C the number without its sign is too large for an int, so the literal is a long, and a function
that is overloaded for int and long refuses an int beside it. For int64 TVM writes the difference.
"""

import re

_LEAST = re.compile(r"(?<![\w.])-2147483648(?![\w.])")


def least_integers(source: str) -> str:
    """Return CUDA source in which the least int32 is an int."""
    return _LEAST.sub("(-2147483647 - 1)", source)
