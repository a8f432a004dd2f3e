"""One program, in this process: `python -m tests.benchmarks.symbolic.child WHAT`, as
`real_models.child`.

It is compiled once by us and once by inductor, with symbolic sizes, and for each size by both. The
sizes are the smallest, an odd one, those on both sides of where a version of a kernel gives way to
the next, and the largest.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

import tvm_fusion
from tvm_fusion.bench.apart import reason
from tvm_fusion.bench.patience import within
from tvm_fusion.bench.peers import COMPILED, EAGER
from tvm_fusion.runtime.build.version_names import versions_among
from tvm_fusion.runtime.timing.timing import time_calls

from ..peers.registry import outputs_of
from ..real_models.child import AS_FAR, LEAST_S, DeviceLock, Work, begins, on_command_line
from ..real_models.models import Where, exact
from ..record import OURS, too_wrong
from ..rows.accuracy import CEILINGS, checked_error
from ..rows.prepare import time_candidates_alone
from ..rows.setup import exact_float32
from ..rows.small import batch_times
from .programs import ODD, PROGRAMS, made

FOR_SIZE, DYNAMIC = f"{OURS}.for_size", f"{COMPILED}.dynamic"
LABELS = (OURS, FOR_SIZE, DYNAMIC, COMPILED, EAGER)
TIMES = "us"
USUAL_EDGE = 64  # where no kernel has versions
MOST_GRAPHS = 64  # that Dynamo makes of one module
HOST_CALLS = 100  # of a batch

Call = Callable[[], Any]


def main(work: Work, say: Callable[[dict[str, Any]], None], wait: Callable[[], bool]) -> None:
    """Compile, say so, wait, and say the times; arguments as of `real_models.child.main`."""
    from torch._dynamo import config

    ends = math.inf if work.ready_s is None else time.monotonic() + work.ready_s
    config.recompile_limit = MOST_GRAPHS
    exact_float32()
    if work.lock is not None:
        time_candidates_alone(DeviceLock(work.lock))
    with torch.no_grad():
        program = Compiling(work, ends)
        program.run()
        say(program.row)
        if program.calls and wait():
            program.row |= timed(program.calls, program.row["sizes"], work)
            say(program.row)


def timed(
    calls: dict[tuple[str, int], Call], sizes: Sequence[int], work: Work
) -> dict[str, dict[str, Any]]:
    """Times by label and size, of the kernels of a call on a GPU, of calls elsewhere; and of calls
    of the smallest size back to back, which on a GPU the host takes.
    """
    found = time_calls(calls, torch.device(work.device), work.repeats)
    labels = dict.fromkeys(label for label, _ in calls)
    of_size = {key: timing.median_us for key, timing in found.items()}
    smallest = {label: call for (label, size), call in calls.items() if size == sizes[0]}
    return {
        TIMES: {label: [of_size.get((label, size)) for size in sizes] for label in labels},
        "host_us": batch_times(smallest, work.repeats, HOST_CALLS) if smallest else {},
    }


def sizes_of(least: int, most: int, edges: Iterable[int]) -> list[int]:
    """The sizes of a program, those on both sides of the middle one of the edges among them."""
    inner = sorted({edge for edge in edges if ODD < edge < most - 1})
    edge = inner[len(inner) // 2] if inner else min(USUAL_EDGE, most // 2)
    return sorted({least, ODD, edge, edge + 1, most})


class Compiling:
    """A program on its way.

    Attributes
    ----------
    row : dict
        Of the result, without times.
    calls : dict
        What is right, by label and size.
    """

    def __init__(self, work: Work, ends: float) -> None:
        self.calls: dict[tuple[str, int], Call] = {}
        self.row: dict[str, Any] = {
            "name": work.name,
            "dtype": work.dtype,
            "shape": "",
            "sizes": [],
            "versions": {},
            TIMES: {},
            "host_us": {},
            "ready_s": {},
            "errors": {},
            "notes": [],
            "failures": {},
        }
        self._work, self._ends = work, ends
        where = Where(work.device, getattr(torch, work.dtype), work.tiny)
        self._program = PROGRAMS[work.name]
        self._module, self._inputs_of = made(work.name, where)
        self._inputs: dict[int, tuple[torch.Tensor, ...]] = {ODD: self._inputs_of(ODD)}
        self._wanted: dict[int, list[torch.Tensor]] = {}
        self._allowed: dict[int, float] = {}

    def run(self) -> None:
        """Compile it in all ways, first in those that serve all sizes."""
        # the first compile of a process takes longer: it is none of the one that is compared
        runs = {ODD: self._compiled(FOR_SIZE, ODD)}
        once = self._compiled(OURS)
        kernels = once.built.kernels if once else {}
        versions = {name: versions_among(of) for name, of in kernels.items()}
        self.row["versions"] = {name: list(of) for name, of in versions.items() if of}
        edges = re.findall(r"up to (\d+)", " ".join(map(" ".join, versions.values())))
        most = self._program.most(self._work.tiny)
        sizes = sizes_of(self._program.least, most, map(int, edges))
        self._prepare(sizes)
        if EAGER in self._work.labels:
            self._check(EAGER, self._module, sizes)
        self._check(OURS, once, sizes)
        self._check(DYNAMIC, self._compiled(DYNAMIC), sizes)
        for size in sizes:
            run = runs[size] if size in runs else self._compiled(FOR_SIZE, size)
            self._check(FOR_SIZE, run, [size])
            self._check(COMPILED, self._compiled(COMPILED, size), [size])
        ready = self.row["ready_s"]
        ready |= {label: round(statistics.median(spent), 2) for label, spent in ready.items()}
        self._wanted.clear()

    def _prepare(self, sizes: list[int]) -> None:
        """Inputs, and what torch computes of the same numbers in float64."""
        module = exact(self._module, torch.float64)
        for size in sizes:
            given = self._inputs.setdefault(size, self._inputs_of(size))
            doubled = [x.double() if x.is_floating_point() else x for x in given]
            self._wanted[size] = outputs_of(module(*doubled))
        largest = self._inputs[sizes[-1]]
        self.row["sizes"] = sizes
        self.row["shape"] = ", ".join("x".join(map(str, x.shape)) for x in largest)
        self.row["errors"] = {label: [None] * len(sizes) for label in self._work.labels}

    def _compiled(self, label: str, size: int | None = None) -> Callable[..., Any] | None:
        """What is compiled for a size, or once, and how long that took; None if it fails."""
        if label not in self._work.labels:
            return None
        began = time.monotonic()
        begins(label)
        with self._trial(label, size):
            run = self._ours(size) if label in (OURS, FOR_SIZE) else self._inductors(size)
            self.row["ready_s"].setdefault(label, []).append(time.monotonic() - began)
            return run
        return None

    def _ours(self, size: int | None) -> Callable[..., Any]:
        module, shapes = self._module, None
        if size is None:
            shapes = self._program.dynamic_shapes(module, self._work.tiny)
        return tvm_fusion.compile(
            module,
            "cuda" if self._work.device == "cuda" else "llvm",
            example_inputs=self._inputs[ODD if size is None else size],
            dynamic_shapes=shapes,
            verify=False,  # all that is timed is checked here
        )

    def _inductors(self, size: int | None) -> Callable[..., Any]:
        run = torch.compile(self._module, dynamic=size is None)
        run(*self._inputs[ODD if size is None else size])
        return run

    def _check(self, label: str, run: Callable[..., Any] | None, sizes: Sequence[int]) -> None:
        """Keep calls that are right."""
        for size in sizes if run is not None else ():
            given = self._inputs[size]

            def call(given: tuple[torch.Tensor, ...] = given) -> Any:
                return run(*given)

            with self._trial(label, size):
                error = checked_error(call, given, self._wanted[size])
                place = self.row["sizes"].index(size)
                self.row["errors"][label][place] = error if math.isfinite(error) else None
                if label == EAGER:
                    self._allowed[size] = AS_FAR * error
                allowed = max(CEILINGS[self._work.dtype], self._allowed.get(size, 0.0))
                if why := too_wrong(error, allowed):
                    self._fail(label, size, why)
                else:
                    self.calls[label, size] = call

    @contextlib.contextmanager
    def _trial(self, label: str, size: int | None) -> Iterator[None]:
        """What fails, or takes longer than there is time, is written down."""
        left = self._ends - time.monotonic()
        if label in (DYNAMIC, COMPILED):
            left = min(left, self._work.patience_s or math.inf)
        try:
            if left < LEAST_S:
                raise TimeoutError("no time was left for it")
            with within(None if math.isinf(left) else left):
                yield
        except Exception as failure:  # a trial
            self._fail(label, size, reason(failure))

    def _fail(self, label: str, size: int | None, why: str) -> None:
        self.row["failures"][label if size is None else f"{label} at {size}"] = why


if __name__ == "__main__":
    on_command_line(sys.argv[1], main)
