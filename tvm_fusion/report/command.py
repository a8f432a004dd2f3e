"""``python -m tvm_fusion report``: the views of a report that a command printed as JSON."""

from __future__ import annotations

import argparse
import sys

from .html.write import write_html
from .read import read_json, report_of
from .screen import FunctionReports, screen
from .text import show


def main(args: argparse.Namespace) -> int:
    """Show a report's JSON in the terminal, or write it as a page, and return the exit status."""
    data = read_json(args.report)
    report = report_of(data)
    if args.html is not None:
        write_html(data, args.html)
        return 0
    found = report.items() if isinstance(report, FunctionReports) else [("", report)]
    for name, one in found:
        if name:
            print(f"function {name}")
        if one is None or isinstance(one, str):
            print(one or "no report")
        elif args.full:
            show(one, sys.stdout)
        else:
            print(screen(one, "MODEL"))
    return 0
