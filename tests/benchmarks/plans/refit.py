"""Fits the learned residual to launches that `collect` measured, whose graphs have keys.

    python -m tests.benchmarks.plans.refit samples.jsonl --target h200 --out h200.residual.json

As `python -m tvm_fusion calibrate --refit`, which knows no keys.
"""

import argparse
from collections.abc import Sequence

from tvm_fusion._arguments import TARGET_HELP
from tvm_fusion.cli import exit_status
from tvm_fusion.cost.learned import refit

from .random_graphs import graph_of


def main(argv: Sequence[str] | None = None) -> int:
    """See the module docstring; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.plans.refit", description=__doc__.splitlines()[0]
    )
    parser.add_argument("refit", metavar="FILE", nargs="+", help="samples of one device")
    parser.add_argument("--target", help=TARGET_HELP)
    parser.add_argument("--out", metavar="FILE", help="default: beside the device's profile")
    return exit_status(lambda: refit.main(parser.parse_args(argv), graph_of))


if __name__ == "__main__":
    raise SystemExit(main())
