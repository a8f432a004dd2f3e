"""A profile as a trace: JSON in the format of Chrome's traces, which Perfetto (ui.perfetto.dev) and
`chrome://tracing` open.

Each module is a process of the trace, with the call whose length is the median one: a slice for
each launch, named by what it computes, its numbers as arguments, and a counter of bandwidth.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..host.atomic_files import replace_file
from .facts import ModuleProfile, Profile

BANDWIDTH = "bandwidth, GB/s"


def events(profiles: Mapping[str, Profile]) -> list[dict[str, Any]]:
    """The events of the modules of some functions; times in microseconds."""
    found: list[dict[str, Any]] = []
    for name, profile in profiles.items():
        function = f"{name}, " if len(profiles) > 1 else ""
        for words, module in (("before", profile.unfused), ("after", profile.fused)):
            number = 1 + sum(event["ph"] == "M" for event in found)
            title = f"{function}{words} fusion on {profile.target}"
            found.append(
                {"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}}
            )
            found += _slices(module, number)
    return found


def _slices(module: ModuleProfile, number: int) -> Iterator[dict[str, Any]]:
    where = {"pid": number, "tid": 1}
    for span, kernel in zip(module.example, module.kernels, strict=True):
        arguments = kernel.to_json()
        arguments |= {"this_call_us": span.busy_us, **arguments.pop("time")}
        yield {
            "ph": "X",
            "name": kernel.label,
            "cat": kernel.kernel_class or "library",
            "ts": span.begin_us,
            "dur": span.end_us - span.begin_us,
            "args": arguments,
            **where,
        }
        for at, rate in ((span.begin_us, kernel.bytes_per_s or 0.0), (span.end_us, 0.0)):
            yield {"ph": "C", "name": BANDWIDTH, "ts": at, "args": {"GB/s": rate / 1e9}, **where}


def write_trace(path: Path, profiles: Mapping[str, Profile]) -> None:
    """Writes a trace; raises InputError where the file cannot be written."""
    data = {"traceEvents": events(profiles), "displayTimeUnit": "ns"}
    replace_file(path, json.dumps(data, allow_nan=False) + "\n")
