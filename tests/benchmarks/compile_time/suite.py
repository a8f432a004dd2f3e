"""The models of a suite, compiled by each backend in processes of their own, cold and warm."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm_fusion.bench.apart import reason
from tvm_fusion.errors import InputError

from ..record import OURS, header, write
from ..rows.setup import is_gpu, usual_dtype

INDUCTOR = "inductor"
BACKENDS = (OURS, INDUCTOR)
STAGES = ("cold", "warm")
SUITES = {"compile_time": "cuda", "compile_time_cpu": "cpu"}
"""By suite torch's name of the device that it compiles for."""
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
Said = Callable[..., None]


def measure(
    names: Sequence[str],
    device: str,
    out: str | Path | None,
    say: Said,
    *,
    dtype: str | None,
    scale: float,
    patience_s: float | None,
) -> dict[str, Any]:
    """Compile all models, one process at a time.

    Parameters
    ----------
    names : sequence of str
        Workloads.
    device : str
        torch's name of a device.
    out : path, optional
        A JSON file, written again after every model.
    say : Callable
        Takes a format and its values.
    dtype : str, optional
        By default float16, on a CPU float32.
    scale : float
        Factor on extents.
    patience_s : float, optional
        Time after which a process is given up; by default none is.

    Returns
    -------
    dict
        What is written to `out`.

    Raises
    ------
    TargetError
        torch has no such device here.
    """
    on_gpu = is_gpu(device, "compile for")
    result = header("", on_gpu, scale, 1)
    result["suite"] = "compile_time"
    result["method"] = (
        "seconds from the first call to its synchronised result, in a process of its own: with "
        "empty caches (cold), then with those that this left (warm)"
    )
    kind = dtype or usual_dtype(on_gpu)
    for name in names:
        row: dict[str, Any] = {"name": name, "dtype": kind, "failures": {}}
        for backend in BACKENDS:
            what = {
                "name": name,
                "backend": backend,
                "device": device,
                "dtype": kind,
                "scale": scale,
            }
            row[backend] = _cold_and_warm(what, row["failures"], patience_s)
        result["rows"].append(row)
        say("%s", line(row))
        if out is not None:
            write(result, Path(out))
    return result


def _cold_and_warm(
    what: dict[str, Any], failures: dict[str, str], patience_s: float | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_cold_") as folder:
        environment = {**os.environ, **{name: f"{folder}/{name}" for name in CACHES}}
        for stage in STAGES:
            try:
                found[stage] = _child(what, environment, patience_s)
            except InputError as error:
                failures[what["backend"]] = f"{stage}: {error}"
                found[stage] = None
                break
    return found


def _child(
    what: dict[str, Any], environment: dict[str, str], patience_s: float | None
) -> dict[str, float]:
    command = [sys.executable, "-m", f"{__package__}.child", json.dumps(what)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=patience_s
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"not ready after {time.monotonic() - began:.0f} s") from error
    if done.returncode:
        raise InputError(reason(RuntimeError(done.stderr.strip()[-2000:] or "it ended")))
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: round(value, 4) for key, value in found.items()}


def line(row: dict[str, Any]) -> str:
    """A model in one line of text."""
    parts = [f"{row['name']:20}"]
    for backend in BACKENDS:
        for stage in STAGES:
            found = row[backend].get(stage)
            seconds = f"{found['first_s']:7.2f} s" if found else "      -  "
            parts.append(f"{backend} {stage} {seconds}")
    return "  ".join([*parts, *(f"{who}: {why}" for who, why in row["failures"].items())])


def text(result: dict[str, Any]) -> str:
    """All models as lines, and the geometric means of our seconds over inductor's."""
    lines = [f"{result['device']}, {result['date']}: {result['method']}"]
    lines += [line(row) for row in result["rows"]]
    for stage in STAGES:
        both = [[row[b].get(stage) for b in BACKENDS] for row in result["rows"]]
        ratios = [ours["first_s"] / theirs["first_s"] for ours, theirs in both if ours and theirs]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"{stage}: {mean:.2f} of {INDUCTOR}'s time (geometric mean), ")
            lines[-1] += f"{max(ratios):.2f} at most, {len(ratios)} models"
    return "\n".join(lines)
