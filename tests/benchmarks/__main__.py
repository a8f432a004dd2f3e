"""Times of workloads, by us and by other compilers: `python -m tests.benchmarks --suite SUITE`."""

import argparse
import json
import sys
from collections.abc import Sequence

from tvm_fusion._arguments import TARGET_HELP
from tvm_fusion.cli import Parser, exit_status, only_results_on_stdout
from tvm_fusion.errors import CHECK_FAILED

from . import options, table


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
        print(table.listing())
        return 0
    with only_results_on_stdout():
        merging = args.merge is not None
        result = options.merged(args.merge, args.out) if merging else options.run(args)
    print(json.dumps(result, allow_nan=False) if args.json else table.table(result))
    sys.stdout.flush()
    return CHECK_FAILED if options.failed(result) else 0


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
        "--peers",
        metavar="PEER,...",
        help="torch (eager, torch.compile and max-autotune), torch.eager, torch.compile, "
        "torch.max-autotune, torch.matmul (of products, with transposed weights), sdpa and flex "
        "(torch's attention), jax, tvm, onnxruntime, openvino, or none; and beside them unfused "
        "(ours, one kernel an operator) and cublas (the matrix products alone); default: "
        f"{options.DEFAULT_PEERS}; "
        + "; ".join(f"for {suite} {peers}" for suite, peers in options.CPU_PEERS.items()),
    )
    parser.add_argument(
        "--plain-peers",
        metavar="PEER,...",
        help="those of the rows that are a matrix product alone; default: as --peers",
    )
    parser.add_argument("--out", metavar="FILE", help="write JSON, again after every row")
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
