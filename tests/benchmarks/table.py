"""A benchmark's result as text."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .record import OURS, PRODUCTS, REFERENCES
from .workloads import SUITES, workload

_HEADINGS = {"torch.compile": "compile", "torch.max-autotune": "max-autotune"}
_ALLOWED = 0.98  # a ratio below it is named


def table(result: dict[str, Any]) -> str:
    """Return a result as a table, its geometric means and its failures."""
    rows = result["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    beside = [name for name in REFERENCES if any(row.get(f"{name}_us") for row in rows)]
    headings = ["workload", "shape", "dtype", "k", "ours us", *beside]
    headings += [_HEADINGS.get(name, name) for name in peers]
    headings += ["best/ours", *(f"{name}/ours" for name in beside)]
    headings += ["of limit", "regs", "spill B"]
    cells = [headings, *([*_facts(row, peers, beside)] for row in rows)]
    lines = [_heading(result), *_aligned(cells), *_means(result), *_walls(rows)]
    for name in beside:
        lines += _ratios(rows, name)
    return "\n".join([*lines, *_failures(rows)])


def listing() -> str:
    """Return the suites with their workloads."""
    lines = []
    for suite, names in SUITES.items():
        shown = [f"{n} ({dtype})" if (dtype := workload(n).dtype) else n for n in names]
        lines.append(f"{suite} ({len(names)})")
        lines += [f"    {name}" for name in shown]
    return "\n".join(lines)


def _heading(result: dict[str, Any]) -> str:
    return f"{result['device']}, {result['date']}, {result['method']}, scale {result['scale']:g}"


def _walls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Wall times of calls with CUDA graphs, and memory, of the rows where they are measured."""
    found = [row for row in rows if row.get("wall_us")]
    if not found:
        return []
    labels = list(dict.fromkeys(label for row in found for label in row["wall_us"]))
    cells = [["wall us, CUDA graphs", *labels, "best/ours", "MB of ours", "MB of the best"]]
    for row in found:
        memory, best = row["memory_bytes"], row["best_wall_peer"]
        cells.append(
            [
                row["name"],
                *(_number(row["wall_us"].get(label), ".1f") for label in labels),
                _ratio(row["best_wall_ratio"]),
                *(_megabytes(memory.get(label)) for label in (OURS, best)),
            ]
        )
    ratios = [row["best_wall_ratio"] for row in found if row["best_wall_ratio"]]
    lines = ["", *_aligned(cells, texts=1)]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        lines.append(f"best peer / ours, wall, over {len(ratios)} rows: geometric mean {mean:.3f}x")
    return lines


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


def _facts(row: dict[str, Any], peers: Sequence[str], beside: Sequence[str]) -> list[str]:
    shape = row["shape"] or "-"
    return [
        row["name"],
        shape if len(shape) <= 24 else shape[:21] + "...",
        row["dtype"] or "-",
        _number(row["launches"], "d"),
        _number(row["ours_us"], ".1f"),
        *(_marked(row, name, row.get(f"{name}_us")) for name in beside),
        *(_marked(row, name, row["peers_us"].get(name)) for name in peers),
        _ratio(row["best_peer_ratio"]),
        *(_ratio(row.get(f"{name}_ratio")) for name in beside),
        _number(row["limit_share"], ".2f"),
        _number(row["registers"], "d"),
        _number(row["spill_bytes"], "d"),
    ]


def _marked(row: dict[str, Any], name: str, us: float | None) -> str:
    """A time, marked where the result was wrong."""
    shown = _number(us, ".1f")
    return f"{shown}!" if name in row["failures"] and shown != "-" else shown


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _aligned(cells: Sequence[Sequence[str]], texts: int = 3) -> list[str]:
    """Columns, the first of them (`texts`) to the left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
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


def _ratios(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    """What our unfused build, or the matrix products alone, take over our time."""
    found = {row["name"]: row[f"{name}_ratio"] for row in rows if row.get(f"{name}_ratio")}
    plain = {row["name"] for row in rows if row.get("plain")}
    sets = {"rows": found}
    if name == PRODUCTS:
        alone = {key: ratio for key, ratio in found.items() if key in plain}
        around = {key: ratio for key, ratio in found.items() if key not in plain}
        sets = {"rows of a product alone": alone, "rows of products and more": around}
    lines = []
    for what, ratios in sets.items():
        if not ratios:
            continue
        least = min(ratios, key=ratios.__getitem__)
        mean = statistics.geometric_mean(ratios.values())
        lines.append(
            f"{name} / ours over {len(ratios)} {what}: geometric mean {mean:.3f}x, "
            f"least {ratios[least]:.2f}x ({least})"
        )
        below = [f"{key} {ratio:.2f}x" for key, ratio in ratios.items() if ratio < _ALLOWED]
        if below and what != "rows of products and more":
            lines.append(f"    below {_ALLOWED}: {', '.join(below)}")
    return lines


def _failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        lines += [f"{row['name']}: {name} is {note}" for name, note in row.get("notes", {}).items()]
        lines += [f"{row['name']}: {name}: {why}" for name, why in row["failures"].items()]
        reasons = Counter(row["fallbacks"] or ())
        lines += [f"{row['name']}: {count} fell back: {why}" for why, count in reasons.items()]
    return lines
