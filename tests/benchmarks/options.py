"""What the words of the command line stand for, and the run that they ask for."""

import argparse
import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_fusion.bench.peers import COMPILED, DEPLOYED, EAGER, named
from tvm_fusion.errors import InputError
from tvm_fusion.host.cores import available_physical_cores

from .record import REFERENCES

ALL_OF_TORCH = (EAGER, COMPILED, "torch.max-autotune")
SDPA, FLEX = "sdpa", "flex"  # torch's own attention
OWN_PEERS = (SDPA, FLEX)  # of the workloads that bring them
MATMUL = "torch.matmul"
WORDS = {
    "torch": ALL_OF_TORCH,
    "torch.eager": (EAGER,),
    **{
        name: (name,)
        for name in (*ALL_OF_TORCH[1:], MATMUL, *OWN_PEERS, "jax", "tvm", *DEPLOYED, *REFERENCES)
    },
}
DEFAULT_PEERS = "torch,sdpa,flex,jax,tvm"
CPU_PEERS = {  # of the suites for CPUs
    "cpu": "torch.eager,torch.compile",
    "cpu_products": "torch.eager,torch.matmul",
    "cpu_models": "torch.eager,torch.compile,onnxruntime,openvino",
}


def peers_of(text: str | None) -> tuple[str, ...]:
    """Return the peers that a list of words names; raises InputError for an unknown one."""
    return named(DEFAULT_PEERS if text is None else text, WORDS)


def names_of(suite: str, only: str | None) -> tuple[str, ...]:
    """Return the workloads of suites or workloads given by commas, or the chosen ones of them.

    Raises
    ------
    InputError
        If there is no such suite or workload.
    """
    from .workloads import SUITES, WORKLOADS

    names: dict[str, None] = {}
    for word in _words(suite):
        if word not in SUITES and word not in WORKLOADS:
            close = difflib.get_close_matches(word, (*SUITES, *WORKLOADS), 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the suites are {', '.join(SUITES)}"
            raise InputError(f"unknown suite or workload {word!r}; {hint}")
        names |= dict.fromkeys(SUITES.get(word, (word,)))
    chosen = names if only is None else _words(only)
    for name in chosen:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
            raise InputError(f"--only: {name!r} is no workload of {suite}; {hint}")
    if not chosen:
        raise InputError("no workload is named")
    return tuple(name for name in names if name in chosen)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments say and return the result.

    Raises
    ------
    InputError
        Before anything runs, for unknown names and for numbers out of range.
    """
    from .run import log, run_suite

    if not 0 < given.scale <= 1:
        raise InputError(f"--scale: expected a number above 0, at most 1, got {given.scale:g}")
    if given.repeats < 1:
        raise InputError(f"--repeats: expected 1 or more, got {given.repeats}")
    if given.workers < 0:
        raise InputError(f"--workers: expected 0 or more, got {given.workers}")
    if given.patience is not None and not given.patience > 0:
        raise InputError(f"--patience: expected more than 0, got {given.patience:g}")
    suite = given.suite
    names, peers = names_of(suite, given.only), peers_of(given.peers or CPU_PEERS.get(suite))
    threads = given.threads
    if threads is None and suite in CPU_PEERS:
        threads = available_physical_cores()
    plain_peers = peers if given.plain_peers is None else peers_of(given.plain_peers)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    return run_suite(
        names,
        peers,
        given.target,
        given.out,
        dtype=given.dtype,
        scale=given.scale,
        repeats=given.repeats,
        workers=given.workers,
        plain_peers=plain_peers,
        patience_s=given.patience,
        threads=threads,
        instructions=given.instructions,
    )


def merged(paths: Sequence[str], out: str | None) -> dict[str, Any]:
    """Join result files, and write them if `out` says where."""
    from .record import merge, write

    result = merge(paths)
    if out is not None:
        write(result, Path(out))
    return result


def failed(result: dict[str, Any]) -> bool:
    """Whether a row of ours failed."""
    from .record import OURS

    return any({OURS, "workload"} & row["failures"].keys() for row in result["rows"])


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
