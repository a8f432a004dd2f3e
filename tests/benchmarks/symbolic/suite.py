"""All programs: processes that compile at once, and are timed one at a time."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm_fusion.bench.peers import COMPILED, EAGER
from tvm_fusion.host.cores import available_cores

from ..real_models.suite import Crew
from ..record import OURS, beside, header, write
from ..rows.setup import is_gpu, usual_dtype
from ..tensor_parallel.suite import known
from .child import DYNAMIC, FOR_SIZE, LABELS, TIMES, Work
from .programs import PROGRAMS

NAME = "symbolic"
READY_S, TIMING_S = 400.0, 45.0
CHILD = (sys.executable, "-m", f"{__package__}.child")
HEADS = {
    OURS: "once",
    FOR_SIZE: "for the size",
    DYNAMIC: "inductor dynamic",
    COMPILED: "inductor",
    EAGER: "eager",
}
RATIOS = {
    "once_ratio": "once / for the size",
    "best_peer_ratio": "the best of inductor dynamic and eager / once",
    "compile_ratio": "time to compile, once / for a size",
    "host_ratio": "a call of the smallest size, once / for the size",
}
"""Of a row, and what they are; the first two are means of `once_ratios` and `best_peer_ratios`."""


def listing() -> str:
    """Return the suite with its programs."""
    return "\n".join([f"{NAME} ({len(PROGRAMS)})", *(f"    {name}" for name in PROGRAMS)])


def names_of(only: str | None, part: tuple[int, int] = (1, 1)) -> tuple[str, ...]:
    """Programs by commas, or all; of these every Nth one.

    Raises
    ------
    InputError
        There is no such program.
    """
    chosen = known(only, PROGRAMS, tuple(PROGRAMS), "--only")
    return chosen[part[0] - 1 :: part[1]]


def labels_of(peers: str | None) -> tuple[str, ...]:
    """Ours and the peers, by commas; raises InputError for others."""
    asked = known(peers, LABELS, LABELS, "--peers")
    return tuple(label for label in LABELS if label in (OURS, *asked))


def measure(
    names: Sequence[str],
    device: str,
    out: str | Path | None,
    say: Callable[..., None],
    *,
    dtype: str | None = None,
    tiny: bool = False,
    labels: Sequence[str] = LABELS,
    repeats: int = 20,
    workers: int = 0,
    patience_s: float | None = None,
    ready_s: float | None = None,
) -> dict[str, Any]:
    """Compile and time programs.

    Parameters
    ----------
    names : sequence of str
        Of `PROGRAMS`.
    device : str
        torch's name of a device.
    out : path, optional
        A JSON file, written again after every program. Rows of other programs that it has stay.
    say : callable
        Takes a format and its values.
    dtype : str, optional
        By default float16, on a CPU float32.
    tiny : bool
        Narrow programs of small sizes, for trying.
    labels : sequence of str
        Of `child.LABELS`.
    repeats : int
        Samples of each time.
    workers : int
        Processes that compile at once; by default as many as there are cores.
    patience_s : float, optional
        For each compile by inductor.
    ready_s : float, optional
        After so long, what is not compiled is given up, and the rest is timed.

    Returns
    -------
    dict
        What is written to `out`.

    Raises
    ------
    TargetError
        torch has no such device here.
    InputError
        `out` has rows of another device, or of other versions.
    """
    on_gpu = is_gpu(device, "measure on")
    ready_s = READY_S if ready_s is None else ready_s
    result = header("", on_gpu, 0.0 if tiny else 1.0, repeats)
    result["suite"] = NAME
    result["method"] += ", interleaved in a process for each program"
    if out is not None:
        result = beside(Path(out), result, names)
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_symbolic_") as folder:
        lock = f"{folder}/device" if on_gpu else None
        kind = dtype or usual_dtype(on_gpu)
        work = Work("", device, kind, tiny, tuple(labels), repeats, patience_s, ready_s, lock)
        works = {name: replace(work, name=name) for name in names}
        crew = Crew(works, folder, workers or available_cores(), CHILD, TIMING_S, TIMES)
        with crew:
            for row in crew.rows(ready_s):
                result["rows"].append({"sizes": []} | row | {"date": result["date"]})
                compare(result["rows"][-1])
                say("%s", line(result["rows"][-1]))
                if out is not None:
                    write(result, Path(out))
    return result


def compare(row: dict[str, Any]) -> None:
    """Fill in the `RATIOS`, and the first two at each size."""
    times = row[TIMES]
    once, for_size = times.get(OURS, ()), times.get(FOR_SIZE, ())
    peers = zip(*(times[label] for label in (DYNAMIC, EAGER) if label in times), strict=True)
    best = [min(filter(None, of_size), default=None) for of_size in peers]
    row |= {
        "once_ratios": _quotients(once, for_size),
        "best_peer_ratios": _quotients(best, once),
    }
    row |= {
        "once_ratio": _mean(row["once_ratios"]),
        "best_peer_ratio": _mean(row["best_peer_ratios"]),
        "compile_ratio": _over(row["ready_s"], OURS, FOR_SIZE),
        "host_ratio": _over(row.get("host_us", {}), OURS, FOR_SIZE),
    }


def _quotients(some: Sequence[float | None], others: Sequence[float | None]) -> list[float | None]:
    """Times over others, None where one is not known."""
    return [x / y if x and y else None for x, y in zip(some, others, strict=False)]


def has_failed(row: Mapping[str, Any]) -> bool:
    """Whether something of ours, or the whole row, is not there or is wrong."""
    return any(key == "case" or key == "timing" or key.startswith(OURS) for key in row["failures"])


def line(row: dict[str, Any]) -> str:
    """A program in lines of text: one, and one for each of its sizes."""
    parts = [f"{row['name']} ({row['shape'] or '-'})"]
    parts += [f"{text} {row[key]:.2f}x" for key, text in RATIOS.items() if row[key]]
    parts += [f"{who}: {why}" for who, why in row["failures"].items()]
    unknown = [None] * len(row["sizes"])
    times = [row[TIMES].get(label) or unknown for label in HEADS]
    ratios = [row[key] or unknown for key in ("once_ratios", "best_peer_ratios")]
    lines = ["; ".join(parts)]
    for size, *numbers in zip(row["sizes"], *times, *ratios, strict=True):
        shown = ["-" if number is None else f"{number:.1f}" for number in numbers[: len(HEADS)]]
        of = ["-" if number is None else f"{number:.2f}x" for number in numbers[len(HEADS) :]]
        us = ", ".join(map(" ".join, zip(HEADS.values(), shown, strict=True)))
        lines.append(f"    {size:6}: {us} us; {' '.join(of)}")
    return "\n".join(lines)


def text(result: dict[str, Any]) -> str:
    """All programs as lines, and means and extrema of the ratios."""
    lines = [f"{result['device']}, {result['date']}: {result['method']}"]
    lines += map(line, result["rows"])
    return "\n".join([*lines, *summary(result["rows"])])


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Means and extrema: over all sizes of all programs; of compiling, and of calls that the host
    takes, over programs.
    """
    lines = []
    for key, what in RATIOS.items():
        found = {}
        for row in rows:
            of_sizes = zip(row["sizes"], row[f"{key}s"], strict=False) if f"{key}s" in row else ()
            found |= {f"{row['name']} {size}": ratio for size, ratio in of_sizes if ratio}
            if f"{key}s" not in row and row[key]:
                found[row["name"]] = row[key]
        if found:
            is_gain = key == "best_peer_ratio"
            worst = (min if is_gain else max)(found, key=found.__getitem__)
            lines.append(
                f"{what} ({len(found)}): geometric mean "
                f"{statistics.geometric_mean(found.values()):.2f}x, "
                f"{'least' if is_gain else 'largest'} {found[worst]:.2f}x ({worst})"
            )
    return lines


def _mean(ratios: Iterable[float | None]) -> float | None:
    found = [ratio for ratio in ratios if ratio]
    return statistics.geometric_mean(found) if found else None


def _over(values: Mapping[str, float], one: str, other: str) -> float | None:
    return values[one] / values[other] if values.get(one) and values.get(other) else None
