"""A benchmark's result as text."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

_HEADINGS = {"torch.compile": "compile", "torch.max-autotune": "max-autotune"}


def table(result: dict[str, Any]) -> str:
    """Return a result as a table, its geometric mean and its failures."""
    rows = result["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    headings = ["workload", "shape", "dtype", "k", "ours us"]
    headings += [_HEADINGS.get(name, name) for name in peers]
    headings += ["best/ours", "of limit", "regs", "spill B"]
    cells = [headings, *([*_facts(row, peers)] for row in rows)]
    lines = [_heading(result), *_aligned(cells), *_means(result), *_failures(rows)]
    return "\n".join(lines)


def listing() -> str:
    """Return the suites with their workloads."""
    from .workloads import SUITES, WORKLOADS

    lines = []
    for suite, names in SUITES.items():
        shown = (
            f"{name} ({WORKLOADS[name].dtype})" if WORKLOADS[name].dtype else name for name in names
        )
        lines.append(f"{suite} ({len(names)})")
        lines += [f"    {name}" for name in shown]
    return "\n".join(lines)


def _heading(result: dict[str, Any]) -> str:
    return f"{result['device']}, {result['date']}, {result['method']}, scale {result['scale']:g}"


def _facts(row: dict[str, Any], peers: Sequence[str]) -> list[str]:
    shape = row["shape"] or "-"
    ratio, share = row["best_peer_ratio"], row["limit_share"]
    return [
        row["name"],
        shape if len(shape) <= 24 else shape[:21] + "...",
        row["dtype"] or "-",
        _number(row["launches"], "d"),
        _number(row["ours_us"], ".1f"),
        *(_peer(row, name) for name in peers),
        "-" if ratio is None else f"{ratio:.2f}x",
        _number(share, ".2f"),
        _number(row["registers"], "d"),
        _number(row["spill_bytes"], "d"),
    ]


def _peer(row: dict[str, Any], name: str) -> str:
    """A time, marked where the result was wrong."""
    shown = _number(row["peers_us"].get(name), ".1f")
    return f"{shown}!" if name in row["failures"] and shown != "-" else shown


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = 3  # left-aligned columns
    return [
        "  ".join(
            cell.ljust(width) if index < texts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _means(result: dict[str, Any]) -> list[str]:
    found = result.get("summary") or {}
    if not found.get("rows"):
        return ["no row has a best peer to compare with"]
    lines = [
        f"best peer / ours over {found['rows']} rows: geometric mean {found['geomean_ratio']:.3f}x,"
        f" least {found['least_ratio']:.2f}x"
    ]
    if found["missing"]:
        lines.append(f"not in the mean: {', '.join(found['missing'])}")
    return lines


def _failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        lines += [f"{row['name']}: {name}: {why}" for name, why in row["failures"].items()]
        reasons = Counter(row["fallbacks"] or ())
        lines += [f"{row['name']}: {count} fell back: {why}" for why, count in reasons.items()]
    return lines
