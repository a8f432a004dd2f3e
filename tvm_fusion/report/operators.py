"""``python -m tvm_fusion operators``: which operators are converted, as a table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ..frontends.coverage import Row, counted, onnx_rows, torch_rows


def main(args: argparse.Namespace) -> int:
    """Prints the operators of PyTorch or ONNX, a line each, and how many there are of each kind.

    Raises
    ------
    FrontendError
        The framework is not installed.
    """
    rows = torch_rows() if args.torch else onnx_rows()
    if args.json:
        print(json.dumps([{**asdict(row), "by": row.by.value} for row in rows]))
        return 0
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:{width}}  {row.by.value}{_opsets(row)}")
    print(f"{len(rows)} operators: {counted(rows)}")
    return 0


def _opsets(row: Row) -> str:
    return f", opset {', '.join(map(str, row.opsets))}" if row.opsets else ""
