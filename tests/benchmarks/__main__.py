"""Times of workloads, by us and by other compilers: `python -m tests.benchmarks --suite SUITE`."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tvm_fusion._arguments import TARGET_HELP
from tvm_fusion.cli import Parser, exit_status, only_results_on_stdout
from tvm_fusion.errors import CHECK_FAILED, InputError
from tvm_fusion.host.cores import available_physical_cores

from . import predicted, table, workloads
from .compile_time import suite as compile_time
from .peers import names
from .real_models import suite as real_models
from .record import OURS, merge, write
from .run import log, run_suite
from .symbolic import suite as symbolic
from .tensor_parallel import suite as tensor_parallel

_DEVICES = {"cuda": "cuda", "llvm": "cpu"}  # torch's names of them
_APART = {suite.NAME: suite for suite in (real_models, tensor_parallel, symbolic)}


def main(argv: Sequence[str] | None = None) -> int:
    """List, run or join suites, and print the result.

    Returns
    -------
    int
        The exit status: 0, or 1 if a row of ours failed, or 2 for bad arguments.
    """
    return exit_status(lambda: _main(_parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    if args.list:
        print(table.listing(), *(suite.listing() for suite in _APART.values()), sep="\n")
        return 0
    if args.predict:
        return _predict(args)
    if args.suite in compile_time.SUITES:
        return _compile_time(args)
    if args.suite == real_models.NAME:
        return _real_models(args)
    if args.suite == tensor_parallel.NAME:
        return _tensor_parallel(args)
    if args.suite == symbolic.NAME:
        return _symbolic(args)
    with only_results_on_stdout():
        result = _run(args) if args.merge is None else merge(args.merge)
    if args.merge is not None and args.out is not None:
        write(result, Path(args.out))
    suite = _APART.get(result.get("suite"))
    shown = suite.text if suite else table.table
    print(json.dumps(result, allow_nan=False) if args.json else shown(result))
    sys.stdout.flush()
    failed = any({OURS, "workload"} & row["failures"].keys() for row in result["rows"])
    return CHECK_FAILED if failed else 0


def _predict(args: argparse.Namespace) -> int:
    """Plan without a device; see `predicted`."""
    _check(args)
    if args.suite in (None, *_APART):
        raise InputError("--predict: give a suite of workloads by --suite")
    names = workloads.names_of(args.suite, args.only, args.seed)
    _log()
    with only_results_on_stdout():
        rows = predicted.predict(
            names,
            args.target,
            args.dtype,
            args.scale,
            lambda row: log.info("%s: %s", row.name, row.failure or f"{row.over_limit:.2f}"),
        )
    result = predicted.result(rows, args.target, args.scale)
    if args.out is not None:
        write(result, Path(args.out))
    print(json.dumps(result, allow_nan=False) if args.json else predicted.text(rows))
    return CHECK_FAILED if any(row.failure for row in rows) else 0


def _compile_time(args: argparse.Namespace) -> int:
    """Measure how long compiling takes; see `compile_time`."""
    _check(args)
    _log()
    with only_results_on_stdout():
        result = compile_time.measure(
            workloads.names_of(args.suite, args.only),
            compile_time.SUITES[args.suite],
            args.out,
            log.info,
            dtype=args.dtype,
            scale=args.scale,
            patience_s=args.patience,
        )
    print(json.dumps(result, allow_nan=False) if args.json else compile_time.text(result))
    return CHECK_FAILED if any(OURS in row["failures"] for row in result["rows"]) else 0


def _real_models(args: argparse.Namespace) -> int:
    """Measure whole models through `torch.compile`; see `real_models`."""
    return _through_torch_compile(
        real_models, args, lambda row: {OURS, "case"} & row["failures"].keys()
    )


def _through_torch_compile(
    suite: ModuleType,
    args: argparse.Namespace,
    has_failed: Callable[[dict[str, Any]], object],
    **options: Any,
) -> int:
    """Measure cases of a suite that compiles each in a process of its own."""
    device = _device(args)
    names = suite.names_of(args.only, args.part)
    with only_results_on_stdout():
        result = suite.measure(
            names,
            device,
            args.out,
            log.info,
            dtype=args.dtype,
            tiny=args.scale < 1,
            repeats=args.repeats,
            workers=args.workers,
            patience_s=args.patience,
            ready_s=args.ready,
            **options,
        )
    print(json.dumps(result, allow_nan=False) if args.json else suite.text(result))
    own = [row for row in result["rows"] if row["name"] in names]
    return CHECK_FAILED if any(map(has_failed, own)) else 0


def _tensor_parallel(args: argparse.Namespace) -> int:
    """Measure layers on several devices; see `tensor_parallel`."""
    device = _device(args)
    with only_results_on_stdout():
        result = tensor_parallel.measure(
            tensor_parallel.names_of(args.only),
            device,
            args.out,
            log.info,
            ranks=args.ranks,
            simulated=args.simulate,
            dtype=args.dtype,
            tiny=args.scale < 1,
            labels=tensor_parallel.labels_of(args.peers),
            repeats=args.repeats,
            workers=args.workers,
            ready_s=args.ready,
        )
    print(json.dumps(result, allow_nan=False) if args.json else tensor_parallel.text(result))
    return CHECK_FAILED if any({OURS, "case"} & r["failures"].keys() for r in result["rows"]) else 0


def _symbolic(args: argparse.Namespace) -> int:
    """Measure programs with symbolic sizes; see `symbolic`."""
    labels = symbolic.labels_of(args.peers)
    return _through_torch_compile(symbolic, args, symbolic.has_failed, labels=labels)


def _device(args: argparse.Namespace) -> str:
    """torch's name of the target, for suites of its modules."""
    _check(args)
    _log()
    target = args.target or "cuda"
    if target not in _DEVICES:
        raise InputError(f"--target: {target!r} is none of {', '.join(_DEVICES)}")
    return _DEVICES[target]


def _log() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)


def _check(args: argparse.Namespace) -> None:
    """Raises InputError for numbers out of range."""
    if not 0 < args.scale <= 1:
        raise InputError(f"--scale: expected a number above 0, at most 1, got {args.scale:g}")
    if args.seed is not None and args.seed < 0:
        raise InputError(f"--seed: expected 0 or more, got {args.seed}")
    if args.repeats < 1:
        raise InputError(f"--repeats: expected 1 or more, got {args.repeats}")
    if args.ranks < 1:
        raise InputError(f"--ranks: expected 1 or more, got {args.ranks}")
    if args.workers < 0:
        raise InputError(f"--workers: expected 0 or more, got {args.workers}")
    if args.patience is not None and not args.patience > 0:
        raise InputError(f"--patience: expected more than 0, got {args.patience:g}")


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments say; raises InputError for unknown names and numbers out of range."""
    _check(args)
    chosen = workloads.names_of(args.suite, args.only, args.seed)
    peers = names.peers_of(args.peers or names.CPU_PEERS.get(args.suite))
    threads = args.threads
    if threads is None and args.suite in names.CPU_PEERS:
        threads = available_physical_cores()
    plain_peers = peers if args.plain_peers is None else names.peers_of(args.plain_peers)
    _log()
    return run_suite(
        chosen,
        peers,
        args.target,
        args.out,
        dtype=args.dtype,
        scale=args.scale,
        repeats=args.repeats,
        workers=args.workers,
        plain_peers=plain_peers,
        patience_s=args.patience,
        threads=threads,
        instructions=args.instructions,
    )


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, got {text!r}")
    return int(part), int(parts)


def _counts(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(count.isdigit() and int(count) for count in counts):
        raise argparse.ArgumentTypeError(f"expected numbers by commas, got {text!r}")
    return tuple(map(int, counts))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tests.benchmarks", description=__doc__.partition(":")[0])
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--suite", metavar="SUITE", help="a suite, or workloads by commas")
    work.add_argument("--list", action="store_true", help="show the suites and their workloads")
    work.add_argument(
        "--merge", nargs="+", metavar="FILE", help="join results of a machine and day"
    )
    parser.add_argument("--only", metavar="NAME,...", help="these workloads of the suite")
    parser.add_argument(
        "--seed",
        type=int,
        help=f"for {workloads.HELD_CLASSES}: the programs of this seed; default: those of seeds "
        f"{workloads.SEEDS[0]} to {workloads.SEEDS[-1]}",
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="plan, and compare the predicted times with the limits; no device is needed",
    )
    parser.add_argument(
        "--peers",
        metavar="PEER,...",
        help="torch (eager, torch.compile and max-autotune), torch.eager, torch.compile, "
        "torch.max-autotune, torch.matmul (of products, with transposed weights), sdpa and flex "
        "(torch's attention), jax, tvm, onnxruntime, openvino, or none; and beside them unfused "
        "(ours, one kernel an operator) and cublas (the matrix products alone); default: "
        f"{names.DEFAULT_PEERS}; "
        + "; ".join(f"for {suite} {peers}" for suite, peers in names.CPU_PEERS.items()),
    )
    parser.add_argument(
        "--plain-peers",
        metavar="PEER,...",
        help="those of the rows that are a matrix product alone; default: as --peers",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write JSON, again after every row; for suites of models rows of others stay",
    )
    parser.add_argument("--dtype", help="for all rows; default: each workload's own, else float16")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on the extents; default: 1"
    )
    parser.add_argument("--repeats", type=int, default=20, help="samples of each time; default: 20")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="compile in N processes first, which fill the caches of the compilers; default: 0",
    )
    parser.add_argument(
        "--patience",
        type=float,
        metavar="S",
        help="give a peer up in a row for which it compiles longer; default: never",
    )
    real = f"for {real_models.NAME} and {symbolic.NAME}:"
    parser.add_argument(
        "--part", type=_part, default=(1, 1), help=f"{real} K/N, every Nth model from the Kth on"
    )
    parser.add_argument(
        "--ready",
        type=float,
        metavar="S",
        help=f"{real} give up what is not compiled then, and time the rest; default: "
        f"{real_models.READY_S:g} and {symbolic.READY_S:g}; --patience is max-autotune's, "
        f"{real_models.PATIENCE_S:g}, and that of each compile by inductor",
    )
    ranks = f"for {tensor_parallel.NAME}:"
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help=f"{ranks} processes; default: 2"
    )
    parser.add_argument(
        "--simulate",
        type=_counts,
        default=(),
        metavar="N,...",
        help=f"{ranks} so many processes, of which only the first is there",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="on a CPU: each compiler in a process of its own, on the same N cores; the default of "
        "the suites for CPUs is all physical cores",
    )
    parser.add_argument(
        "--instructions",
        metavar="SET",
        help="with --threads or a suite for CPUs: ours and the peers keep to avx2",
    )
    parser.add_argument("--target", help=TARGET_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
