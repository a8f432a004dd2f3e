"""All cases: their processes compile at once, and are timed one case at a time."""

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm_fusion.bench.peers import EAGER
from tvm_fusion.errors import InputError, TargetError

from ..real_models.suite import GRAPHS, TUNED, Crew, compare
from ..record import OURS, beside, header, write
from ..rows.setup import is_gpu
from .child import LABELS, PLAIN, Work
from .models import CASES

NAME = "tensor_parallel"
PEERS = (EAGER, GRAPHS)
READY_S, TIMING_S = 150.0, 45.0
CHILD = (sys.executable, "-m", f"{__package__}.child")
HEADS = {OURS: "ours", EAGER: "eager", GRAPHS: "reduce-overhead", TUNED: "max-autotune"}
HEADS[PLAIN] = "plain model"


def listing() -> str:
    """Return the suite with its cases."""
    return "\n".join([f"{NAME} ({len(CASES)})", *(f"    {name}" for name in CASES)])


def names_of(only: str | None) -> tuple[str, ...]:
    """Cases by commas, or all.

    Raises
    ------
    InputError
        There is no such case.
    """
    return known(only, CASES, tuple(CASES), "--only")


def labels_of(peers: str | None) -> tuple[str, ...]:
    """Ours and the peers, by commas; raises InputError for others."""
    return OURS, *(x for x in known(peers, LABELS, PEERS, "--peers") if x != OURS)


def known(text: str | None, names: Any, default: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Names by commas, or the default; raises InputError for others than `names`."""
    chosen = default if text is None else tuple(filter(None, map(str.strip, text.split(","))))
    for name in chosen:
        if name not in names:
            raise InputError(f"{option}: {name!r} is none of {', '.join(names)}")
    return chosen


def measure(
    names: Sequence[str],
    device: str,
    out: str | Path | None,
    say: Callable[..., None],
    *,
    ranks: int = 2,
    simulated: Sequence[int] = (),
    dtype: str | None = None,
    tiny: bool = False,
    labels: Sequence[str] = (OURS, *PEERS),
    repeats: int = 20,
    workers: int = 0,
    ready_s: float | None = None,
) -> dict[str, Any]:
    """Compile and time cases.

    Parameters
    ----------
    names : sequence of str
        Of `CASES`.
    device : str
        torch's name of a device.
    out : path, optional
        A JSON file, written again after every case.
    say : callable
        Takes a format and its values.
    ranks : int
        Processes, each with a device.
    simulated : sequence of int
        Instead, numbers of processes of which only the first is there, on one device.
    dtype : str, optional
        By default bfloat16, on a CPU float32.
    tiny : bool
        Small layers, for trying.
    labels : sequence of str
        Compilers, of `child.LABELS`.
    repeats : int
        Batches of calls of each compiler.
    workers : int
        Cases that compile at once; by default all.
    ready_s : float, optional
        After so long, what is not compiled is given up, and the rest is timed.

    Returns
    -------
    dict
        What is written to `out`.

    Raises
    ------
    TargetError
        torch has fewer devices here.
    InputError
        `out` has rows of another device or of other versions, or several processes are to be
        compared with a plain model.
    """
    on_gpu = is_gpu(device, "measure on")
    if PLAIN in labels and (simulated or ranks != 1):
        raise InputError(f"--peers: {PLAIN} is for --ranks 1, where nothing is cut")
    _require(device, 1 if simulated else ranks)
    result = header("", on_gpu, 0.0 if tiny else 1.0, repeats)
    result["suite"] = NAME
    result["method"] = (
        "wall time of calls back to back, in batches of 30 ms each that all processes begin "
        "together, interleaved; kernels by torch's profiler (CUPTI)"
    )
    work = Work(
        "",
        device,
        dtype or ("bfloat16" if on_gpu else "float32"),
        tiny,
        tuple(labels),
        repeats,
        ranks,
    )
    works = {
        key(name, n, bool(simulated)): replace(
            work, name=name, ranks=n, is_simulated=bool(simulated)
        )
        for n in simulated or [ranks]
        for name in names
    }
    if out is not None:
        result = beside(Path(out), result, list(works))
    ready_s = READY_S if ready_s is None else ready_s
    with (
        tempfile.TemporaryDirectory(prefix="tvm_fusion_ranks_") as folder,
        Crew(works, folder, workers or len(works), CHILD, TIMING_S) as crew,
    ):
        for row in crew.rows(ready_s):
            of = works[row["name"]]
            result["rows"].append(row | {"ranks": of.ranks, "is_simulated": of.is_simulated})
            compare(result["rows"][-1])
            total(result["rows"][-1])
            beside_plain(result["rows"][-1])
            say("%s", line(result["rows"][-1]))
            if out is not None:
                write(result, Path(out))
    return result


def key(name: str, ranks: int, is_simulated: bool) -> str:
    """The name of a row."""
    return f"{name}_{'1_of_' if is_simulated else 'x'}{ranks}"


def _require(device: str, count: int) -> None:
    import torch

    if device == "cuda" and torch.cuda.device_count() < count:
        raise TargetError(
            f"--ranks: {count} processes need {count} GPUs, and there are "
            f"{torch.cuda.device_count()}"
        )


def total(row: dict[str, Any]) -> None:
    """Fill in what a call should take: where processes are simulated, what the kernels of one took
    (on a CPU, its call), and what its collectives would take one after the other; else what is
    predicted of both. Stand-ins of collectives run on the host, one by one, between the kernels.
    """
    predicted = [one.get("predicted_us") for one in row.get("collectives", ())]
    row["step_us"] = None
    if None in predicted or OURS not in row["wall_us"]:
        return
    of_parts = row["predicted_us"]
    if row["is_simulated"]:
        of_parts = row.get("kernel_us", {}).get(OURS) or row["wall_us"][OURS]
    row["step_us"] = of_parts + sum(predicted)


def beside_plain(row: dict[str, Any]) -> None:
    """Fill in times of the plain model over those of the one that is cut, where both are there."""
    for of in ("wall_us", "kernel_us"):
        times = row.get(of, {})
        if times.get(OURS) and times.get(PLAIN):
            row[f"plain_{of.removesuffix('_us')}_ratio"] = times[PLAIN] / times[OURS]


def line(row: dict[str, Any]) -> str:
    """A case in one line of text."""
    parts = [f"{row['name']:26} {row['shape']:14}"]
    for label, us in row["wall_us"].items():
        share = row.get("outside_share", {}).get(label)
        said = "" if share is None else f" ({share:.0%} outside)"
        parts.append(f"{HEADS[label]} {us:.0f} us{said}")
    ratio = row["best_peer_ratio"]
    parts.append("-" if ratio is None else f"{ratio:.2f}x")
    for of in ("wall", "kernel"):
        if (of_plain := row.get(f"plain_{of}_ratio")) is not None:
            parts.append(f"plain / ours, {of}: {of_plain:.3f}")
    if (is_equal := row.get("is_as_plain")) is not None:
        parts.append("equal to the plain model's" if is_equal else "NOT the plain model's numbers")
    if row.get("step_us") is not None:
        parts.append(f"predicted {row['step_us']:.0f} us")
    if row.get("outside"):
        parts.append(f"in torch: {row['outside']}")
    said = [f"{who}: {why}" for who, why in row["failures"].items()]
    return "  ".join([*parts, *row["notes"], *said])


def text(result: dict[str, Any]) -> str:
    """All cases as lines, and the means of the best peer's time over ours."""
    lines = [f"{result['device']}, {result['date']}: {result['method']}"]
    lines += map(line, result["rows"])
    ratios = {r["name"]: r["best_peer_ratio"] for r in result["rows"] if r["best_peer_ratio"]}
    if ratios:
        mean, least = statistics.geometric_mean(ratios.values()), min(ratios, key=ratios.get)
        lines.append(
            f"best peer / ours ({len(ratios)}): geometric mean {mean:.2f}x, "
            f"least {ratios[least]:.2f}x ({least})"
        )
    return "\n".join(lines)
