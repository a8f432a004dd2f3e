"""Arguments of the benchmark's suites on the command line, and the run they ask for.

`python -m tvm_fusion bench --suite memory` and `python -m tvm_fusion.bench memory` share them.
"""

import argparse
import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..host.cores import available_physical_cores
from .record import REFERENCES

EAGER = "torch"
ALL_OF_TORCH = (EAGER, "torch.compile", "torch.max-autotune")
SDPA, FLEX = "sdpa", "flex"  # torch's own attention
OWN_PEERS = (SDPA, FLEX)  # of the workloads that bring them
MATMUL = "torch.matmul"
DEPLOYED = ("onnxruntime", "openvino")
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
MODEL_PEERS = ("tvm", EAGER, "torch.compile")  # of a model of the user's
_OF_SUITES_ONLY = (ALL_OF_TORCH[2], MATMUL, *OWN_PEERS, *REFERENCES)
_FOR_SUITES = (
    "only",
    "plain_peers",
    "out",
    "dtype",
    "scale",
    "repeats",
    "workers",
    "patience",
    "threads",
    "instructions",
)
_FOR_MODELS = ("policy", "plan", "cuda_graph", "full")


def add_suite_arguments(parser: argparse.ArgumentParser, work: Any) -> None:
    """Add what says how a suite is run, and to the choices of `work` those beside a run."""
    work.add_argument("--list", action="store_true", help="show the suites and their workloads")
    work.add_argument(
        "--merge", nargs="+", metavar="FILE", help="join results of a machine and day"
    )
    group = parser.add_argument_group("suites")
    group.add_argument("--only", metavar="NAME,...", help="these workloads of the suite")
    group.add_argument(
        "--peers",
        metavar="PEER,...",
        help="torch (eager, torch.compile and max-autotune), torch.eager, torch.compile, "
        "torch.max-autotune, torch.matmul (of products, with transposed weights), sdpa and flex "
        "(torch's attention), jax, tvm, onnxruntime, openvino, or none; and beside them unfused "
        "(ours, one kernel an operator) and cublas (the matrix products alone); default: "
        f"{DEFAULT_PEERS}; "
        + "; ".join(f"for {suite} {peers}" for suite, peers in CPU_PEERS.items()),
    )
    group.add_argument(
        "--plain-peers",
        metavar="PEER,...",
        help="those of the rows that are a matrix product alone; default: as --peers",
    )
    group.add_argument("--out", metavar="FILE", help="write JSON, again after every row")
    group.add_argument("--dtype", help="for all rows; default: each workload's own, else float16")
    group.add_argument("--scale", type=float, help="factor on the extents; default: 1")
    group.add_argument("--repeats", type=int, help="samples of each time; default: 20")
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="compile in N processes first, which fill the caches of the compilers; default: 0",
    )
    group.add_argument(
        "--patience",
        type=float,
        metavar="S",
        help="give a peer up in a row for which it compiles longer; default: never",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="on a CPU: each compiler in a process of its own, on the same N cores; the default of "
        "the suites for CPUs is all physical cores",
    )
    group.add_argument(
        "--instructions",
        metavar="SET",
        help="with --threads or a suite for CPUs: ours and the peers keep to avx2",
    )


def asks_for_suite(given: argparse.Namespace) -> bool:
    """Whether the arguments are about suites and not about a model.

    Raises
    ------
    InputError
        For an option that means nothing there.
    """
    suites = given.suite is not None or given.list or given.merge is not None
    for name in _FOR_MODELS if suites else _FOR_SUITES:
        if getattr(given, name, None) is not None:
            wanted, other = ("model", "suite") if suites else ("suite", "model")
            shown = name.replace("_", "-")
            raise InputError(f"--{shown} is for a {wanted}, not for a {other}")
    return suites


def peers_of(text: str | None) -> tuple[str, ...]:
    """Return the peers that a list of words names; raises InputError for an unknown one."""
    text = DEFAULT_PEERS if text is None else text
    found: dict[str, None] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word == "none":
            continue
        if word not in WORDS:
            close = difflib.get_close_matches(word, WORDS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(WORDS)}, none"
            raise InputError(f"unknown peer {word!r}; {hint}")
        found |= dict.fromkeys(WORDS[word])
    return tuple(found)


def model_peers_of(text: str | None) -> tuple[str, ...]:
    """Return the peers of a model that a list of words names, `MODEL_PEERS` by default.

    Raises
    ------
    InputError
        For an unknown one, and for one that only suites have.
    """
    found = MODEL_PEERS if text is None else peers_of(text)
    for name in found:
        if text is not None and name in _OF_SUITES_ONLY and "torch" not in text.split(","):
            raise InputError(f"--peers: {name} is for a suite, not for a model")
    return tuple(name for name in found if name not in _OF_SUITES_ONLY)


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


def run(suite: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments say and return the result.

    Raises
    ------
    InputError
        Before anything runs, for unknown names and for numbers out of range.
    """
    from .run import log, run_suite

    scale = 1.0 if given.scale is None else given.scale
    repeats = 20 if given.repeats is None else given.repeats
    if not 0 < scale <= 1:
        raise InputError(f"--scale: expected a number above 0, at most 1, got {scale:g}")
    if repeats < 1:
        raise InputError(f"--repeats: expected 1 or more, got {repeats}")
    if given.workers is not None and given.workers < 0:
        raise InputError(f"--workers: expected 0 or more, got {given.workers}")
    if given.patience is not None and not given.patience > 0:
        raise InputError(f"--patience: expected more than 0, got {given.patience:g}")
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
        scale=scale,
        repeats=repeats,
        workers=given.workers or 0,
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
