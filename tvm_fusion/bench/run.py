"""Measure the workloads beside other compilers: one process, interleaved, checked, written down.

    python -m tvm_fusion.bench memory --target cuda --out tests/results/memory.json

On a GPU a time is the sum of the kernels of one call (CUPTI), with the L2 cleaned before each timed
call; on a CPU it is wall-clock time. What fails is recorded with its reason, and the run goes on.
`bench` does the same for one model of the user's.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm

from ..config import resolve_target
from ..errors import TargetError
from .compare import bench as bench
from .record import OURS, header, line

_log = logging.getLogger(__name__)


def run_suite(
    names: Sequence[str],
    peers: Sequence[str] | None = None,
    target: Any = None,
    out: str | Path | None = None,
    *,
    dtype: str | None = None,
    scale: float = 1.0,
    repeats: int = 20,
    budget_s: float = 5.0,
) -> dict[str, Any]:
    """Compile, check and time workloads by us and by the peers.

    Parameters
    ----------
    names : sequence of str
        Workloads; `workloads.SUITES["memory"]` for a suite.
    peers : sequence of str, optional
        Keys of `peers.PEERS`; all of them by default.
    target : Any
        See `tvm_fusion.config.resolve_target`.
    out : path, optional
        A JSON file, written again after every workload.
    dtype : str, optional
        "float16" on a GPU, "float32" on a CPU by default.
    scale : float
        Factor on the extents; 1 is the size that results are compared at.
    repeats : int
        Samples of every time.
    budget_s : float
        On a CPU, the time for all samples of a workload; at least three are taken.

    Returns
    -------
    dict
        What is written to `out`. A row's time, error or count is None where it failed; `failures`
        then says why.

    Raises
    ------
    InputError
        An unknown workload, peer or target.
    """
    from . import suite, workloads
    from .peers import PEERS, peer

    peers = tuple(PEERS) if peers is None else tuple(peers)
    tvm_target, hw = resolve_target(target)
    workloads.require(names)
    for name in peers:
        peer(name)
    if not tvm.runtime.device_from_target(tvm_target).exist:
        raise TargetError(f"this machine has no {tvm_target.kind.name} device to measure on")
    default = "float16" if tvm_target.kind.name == "cuda" else "float32"
    setup = suite.Setup(
        target, tvm_target, hw, peers, dtype or default, float(scale), repeats, budget_s
    )
    result = header(hw.name, setup.device == "cuda", setup.scale, repeats)
    for name in names:
        row = suite.measure(name, setup)
        result["rows"].append(row)
        _log.info("%s", line(row))
        if out is not None:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite from the command line; the exit status is 1 if any of our rows failed."""
    from .peers import PEERS
    from .workloads import SUITES

    parser = argparse.ArgumentParser(prog="python -m tvm_fusion.bench", description=__doc__)
    parser.add_argument("names", help='a suite ("memory", "all") or workloads, by commas')
    parser.add_argument("--peers", default=",".join(PEERS), help="by commas; default: %(default)s")
    parser.add_argument("--target", help="cuda, llvm, or a profile; default: the GPU if any")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--dtype", help="float16 on a GPU, float32 on a CPU")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the extents")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _log.setLevel(logging.INFO)
    suite = SUITES.get(given.names) or tuple(given.names.split(","))
    result = run_suite(
        suite,
        tuple(filter(None, given.peers.split(","))),
        given.target,
        given.out,
        dtype=given.dtype,
        scale=given.scale,
        repeats=given.repeats,
    )
    return int(any({OURS, "workload"} & row["failures"].keys() for row in result["rows"]))
