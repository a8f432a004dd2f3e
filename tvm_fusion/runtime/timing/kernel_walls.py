"""How long each kernel of a call takes on a CPU, by the clock."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from ..calls.compiled_module import CompiledModule

_BUILTIN = "vm.builtin."
WARM_CALLS = 2


def kernel_walls(
    compiled: CompiledModule, inputs: Sequence[Any], repeats: int = 20
) -> list[tuple[str, float]]:
    """Return the kernels of a call in the order in which they run, and their median microseconds.

    The virtual machine calls back before and after each kernel, which takes about a microsecond;
    what lies between two kernels is not counted.
    """
    spans: list[tuple[str, float]] = []
    begun = 0.0

    def instrument(_function: Any, name: str, before: bool, _result: Any, *_arguments: Any) -> int:
        nonlocal begun
        now = time.perf_counter()
        if not name.startswith(_BUILTIN):
            if before:
                begun = time.perf_counter()
            else:
                spans.append((name, (now - begun) * 1e6))
        return 0  # the machine goes on as usual

    arguments = compiled.arguments(inputs)
    compiled.vm.set_instrument(instrument)
    runs = []
    for _ in range(WARM_CALLS + repeats):
        spans.clear()
        compiled.run(arguments)
        runs.append(list(spans))
    compiled.vm.set_instrument(None)
    measured = runs[WARM_CALLS:]
    return [
        (calls[0][0], statistics.median(us for _, us in calls))
        for calls in zip(*measured, strict=True)
    ]
