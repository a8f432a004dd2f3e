"""What is written down of a benchmark: where, when, with which versions, and what failed."""

import datetime
import importlib.metadata
import json
import math
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_fusion._version import __version__
from tvm_fusion.errors import InputError
from tvm_fusion.host.cores import available_cores, physical_cores, usable_cores

OURS = "tvm_fusion"
UNFUSED, PRODUCTS = "unfused", "cublas"  # ours without fusion, and the matrix products alone
REFERENCES = (UNFUSED, PRODUCTS)  # measured beside a row, and no peers of it
FORMAT = 2
_SAME = ("device", "profile", "date", "versions", "method", "scale")
_PACKAGES = (
    "apache-tvm",
    "apache-tvm-ffi",
    "torch",
    "triton",
    "jax",
    "numpy",
    "transformers",
    "onnxruntime",
    "openvino",
)
_VECTOR_FLAGS = re.compile(r"(avx|fma|amx|asimd|sve|neon)")
_FACTS = ("us", "ratio", "launches", "error")


def header(
    profile: str,
    on_gpu: bool,
    scale: float,
    repeats: int,
    threads: int | None = None,
    instructions: str | None = None,
) -> dict[str, Any]:
    """Return a result without rows; `threads` if each compiler has a process with as many, and
    `instructions` if all keep to a set of them.
    """
    import torch

    method = "kernel time (CUPTI), L2 cleaned before each call" if on_gpu else "wall time"
    if threads is not None:
        method = f"wall time, each in a process of its own, {threads} threads"
    if instructions is not None:
        method += f", none with more than {instructions}"
    return {
        "format": FORMAT,
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "profile": profile,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": _versions(torch.version.cuda),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "method": method,
        **({} if on_gpu else {"cpu": _cpu_facts(), "threads": threads}),
        "scale": scale,
        "repeats": repeats,
        "rows": [],
    }


def empty_row(name: str, labels: Sequence[str], plain: bool = False) -> dict[str, Any]:
    """Return the row of a workload of which nothing is known; `labels` may hold `REFERENCES`."""
    peers = [label for label in labels if label not in REFERENCES]
    return {
        "name": name,
        "shape": None,
        "dtype": None,
        "plain": plain,
        "ours_us": None,
        "launches": None,
        "limit_us": None,
        "limit_share": None,
        "best_peer": None,
        "best_peer_ratio": None,
        "error": None,
        "registers": None,
        "spill_bytes": None,
        "fallbacks": None,
        "kernels": None,
        "peers_us": dict.fromkeys(peers),
        "peers_launches": dict.fromkeys(peers),
        "peers_error": dict.fromkeys(peers),
        **{f"{label}_{fact}": None for label in REFERENCES for fact in _FACTS},
        "notes": {},
        "wall_us": {},
        "best_wall_peer": None,
        "best_wall_ratio": None,
        "memory_bytes": {},
        "memory_taken_bytes": {},
        "failures": {},
        "spent_s": None,
    }


def note_error(row: dict[str, Any], label: str, error: float, ceiling: float) -> None:
    """Write down the error of ours or of a peer, as a failure if it is above the ceiling."""
    shown = error if math.isfinite(error) else None
    if label == OURS:
        row["error"] = shown
    elif label in REFERENCES:
        row[f"{label}_error"] = shown
    elif label in row["peers_us"]:
        row["peers_error"][label] = shown
    if why := too_wrong(error, ceiling):
        row["failures"][label] = why


def too_wrong(error: float, ceiling: float) -> str | None:
    """Say that an error is above the ceiling; None if it is not."""
    if error <= ceiling:
        return None
    found = f"an error of {error:.1e}" if math.isfinite(error) else "a value that is not finite"
    return f"{found} against float64; {ceiling:.0e} is allowed"


def compare(row: dict[str, Any]) -> None:
    """Fill in the best peer that was right, its time over ours, and our share of the limit.

    Our own unfused build and the matrix products alone have ratios of their own, and are no peers.
    """
    if row["ours_us"] is None or OURS in row["failures"]:
        return
    if row["limit_us"] is not None:
        row["limit_share"] = row["limit_us"] / row["ours_us"]
    for label in REFERENCES:
        us = row[f"{label}_us"]
        if us is not None and label not in row["failures"]:
            row[f"{label}_ratio"] = us / row["ours_us"]
    right = {
        name: us
        for name, us in row["peers_us"].items()
        if us is not None and name not in row["failures"]
    }
    if right:
        row["best_peer"] = min(right, key=right.__getitem__)
        row["best_peer_ratio"] = right[row["best_peer"]] / row["ours_us"]
    wall = {name: us for name, us in row.get("wall_us", {}).items() if name not in row["failures"]}
    ours = wall.pop(OURS, None)
    if ours is not None and wall:
        row["best_wall_peer"] = min(wall, key=wall.__getitem__)
        row["best_wall_ratio"] = wall[row["best_wall_peer"]] / ours


def line(row: dict[str, Any]) -> str:
    """Return a row in one line, for the log of a run."""

    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    beside = {label: row[f"{label}_us"] for label in REFERENCES if row[f"{label}_us"] is not None}
    others = ", ".join(f"{name} {us(value)}" for name, value in (beside | row["peers_us"]).items())
    failed = "".join(f" | {name}: {why}" for name, why in row["failures"].items())
    return (
        f"{row['name']} {row['shape']}: ours {us(row['ours_us'])} us ({row['launches']} launches, "
        f"limit {us(row['limit_us'])}), {others}; {row['spent_s']} s{failed}"
    )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return geometric mean and least of the best peers' ratios, and the rows without one."""
    found = {row["name"]: row["best_peer_ratio"] for row in rows if row["best_peer_ratio"]}
    missing = [row["name"] for row in rows if row["name"] not in found]
    if not found:
        return {"geomean_ratio": None, "least_ratio": None, "rows": 0, "missing": missing}
    return {
        "geomean_ratio": statistics.geometric_mean(found.values()),
        "least_ratio": min(found.values()),
        "rows": len(found),
        "missing": missing,
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result; a reader finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def merge(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Join results of one machine, day and method; of a row that two have, the later file's counts.

    Raises
    ------
    InputError
        If a file is no result, or was made elsewhere, on another day, or in another way.
    """
    results = [_read(Path(path)) for path in paths]
    first = results[0]
    rows: dict[str, dict[str, Any]] = {}
    for path, result in zip(paths, results, strict=True):
        _refuse_others(Path(path), result, str(paths[0]), first, _SAME)
        rows |= {row["name"]: row for row in result["rows"]}
    commands = "; ".join(dict.fromkeys(result["command"] for result in results))
    joined = list(rows.values())
    return first | {"command": commands, "rows": joined, "summary": summary(joined)}


def beside(path: Path, result: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A result without rows, with those that a file has of an earlier run; not those of `names`,
    which are measured again.

    Raises
    ------
    InputError
        The file is no result, or was made elsewhere, with other versions, or in another way.
    """
    if not path.exists():
        return result
    earlier = _read(path)
    _refuse_others(path, earlier, "this run", result, [key for key in _SAME if key != "date"])
    rows = [{"date": earlier["date"]} | row for row in earlier["rows"] if row["name"] not in names]
    return result | {"command": f"{earlier['command']}; {result['command']}", "rows": rows}


def _refuse_others(
    path: Path, result: dict[str, Any], name: str, first: dict[str, Any], keys: Sequence[str]
) -> None:
    for key in keys:
        if result.get(key) != first.get(key):
            raise InputError(
                f"{path} does not go with {name}: {key} is {result.get(key)!r} and "
                f"{first.get(key)!r}"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise InputError(f"{path} is no result of a suite in the format {FORMAT}: run it again")
    return result


def cpu_name() -> str:
    """The model of this machine's CPU."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _cpu_facts() -> dict[str, Any]:
    """Cores that this process may use, and the instructions for vectors and tiles."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    flags = found[1].split() if found else []
    return {
        "cores": len(physical_cores(usable_cores())),
        "hardware_threads": available_cores(),
        "flags": sorted(flag for flag in flags if _VECTOR_FLAGS.match(flag)),
    }


def _versions(cuda: str | None) -> dict[str, str]:
    found = {"python": platform.python_version(), OURS: __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"cuda": cuda} if cuda else {})
