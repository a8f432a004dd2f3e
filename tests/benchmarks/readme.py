"""Puts results into a text, between the lines that name their files.

    <!-- from tests/results/cpu.json -->
    ... replaced: a table of a suite's result, or the text of a .txt file
    <!-- end -->

Of several files, with spaces between them, the table has a line for each, of files of the suite
`held_classes` for each class. `python -m tests.benchmarks.readme README.md
tutorials/pages/figures.md` remakes them all; run it in the root of the checkout.
"""

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compile_time.suite import INDUCTOR
from .record import OURS

_BLOCK = re.compile(r"(<!-- from (\S+(?: \S+)*) -->\n).*?(<!-- end -->)", re.S)
WHAT = {
    "memory": "norms, softmax, chains, float16",
    "memory_more": "the same, other shapes and types",
    "gemm": "products with what stands around them, float16",
    "transformers": "attention and layers of transformers, float16",
    "vision_h200": "convolutional networks, float16",
    "conv_h200": "single convolutions, float16",
    "cpu": "operators and layers, float32",
    "cpu_models": "transformers and ResNet-18, float32",
    "cpu_networks": "convolutional networks, float32",
}
"""What the results of an overview are of, by the names of their files."""
MOST_ROWS = 16  # of a table; the programs of SHOWN where a result has more
SHOWN = (  # one or two of each family
    "chain_1024x1024",
    "sigmoid_tanh_513x1023",
    "softmax_512x1000",
    "layernorm_512x768",
    "cross_entropy_512x5003",
    "column_sums_2048x1024",
    "transpose_add_1000x1031",
    "linear_1x1024x1024",
    "linear_gelu_128x256x1024",
    "linear_silu_37x331x517",
    "swiglu_128x256x688",
    "attention_by_hand_1x8x128",
    "encoder_layer_1x128x256",
    "conv_bn_relu_1x64x56x56",
)


def filled(text: str, root: Path) -> str:
    """Return a text with its blocks made anew of the files below `root`."""

    def block(found: re.Match[str]) -> str:
        path, *more = (root / name for name in found[2].split())
        if more:
            of = drawn if path.stem.startswith("held_classes") else overview
            content = of([path, *more])
        elif path.suffix == ".txt":
            content = "```\n" + path.read_text().rstrip() + "\n```"
        else:
            result = json.loads(path.read_text())
            content = OF_SUITES.get(result.get("suite"), table)(result)
        return f"{found[1]}{content}\n{found[3]}"

    return _BLOCK.sub(block, text)


def overview(paths: Sequence[Path]) -> str:
    """Return a table with a line for each result: how many programs, and beside the best peer."""
    lines = [
        "| what | on | programs | beside the best of | in the mean | least | below 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in paths:
        result = json.loads(path.read_text())
        rows = [row for row in result["rows"] if row["best_peer_ratio"]]
        ratios = [row["best_peer_ratio"] for row in rows]
        peers = dict.fromkeys(name for row in rows for name in row["peers_us"])
        device = result["device"].removesuffix(" 80GB HBM3")
        threads = f", {_threads(result)}" if result.get("threads") else ""
        cells = (
            f"[{WHAT[path.stem]}](tutorials/pages/figures.md)",
            f"{device}{threads}, {result['date']}",
            str(len(rows)),
            ", ".join(peers),
            f"{statistics.geometric_mean(ratios):.2f}x",
            f"{min(ratios):.2f}x",
            str(sum(ratio < 1 for ratio in ratios)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def drawn(paths: Sequence[Path]) -> str:
    """Return a table of the classes of drawn programs, all files together."""
    results = [json.loads(path.read_text()) for path in paths]
    classes: dict[str, list[dict[str, Any]]] = {}
    for row in (row for result in results for row in result["rows"]):
        found = re.fullmatch(r"held_(\w+)_\d+_\d+", row["name"])
        classes.setdefault(found[1], []).append(row)
    lines = [
        f"{results[0]['device']}, {results[0]['date']}; `{_command(results[0])}`, and other seeds:",
        "",
        "| class | programs | launches each | best peer / ours | least | below 0.97 |",
        "|---|---|---|---|---|---|",
    ]
    every = [row for rows in classes.values() for row in rows]
    for name, rows in (*classes.items(), ("all", every)):
        ratios = [row["best_peer_ratio"] for row in rows]
        cells = (
            name.replace("_", " "),
            str(len(rows)),
            f"{statistics.mean(row['launches'] for row in rows):.1f}",
            f"{statistics.geometric_mean(ratios):.2f}x",
            f"{min(ratios):.2f}x",
            str(sum(ratio < 0.97 for ratio in ratios)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    """Return a suite's result as a table, a sentence before it and the means behind it."""
    rows = result["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    shown = [r for r in rows if r["name"] in SHOWN] if len(rows) > MOST_ROWS else rows
    of = f", {_threads(result)}" if result.get("threads") else ", kernels"
    lines = [
        f"{result['device']}{of}, {result['date']}, microseconds a call "
        f"({_versions(result, peers)}); `{_command(result)}`:",
        "",
        f"| | launches | tvm_fusion | {' | '.join(peers)} | best peer / ours |",
        "|---" * (len(peers) + 4) + "|",
    ]
    for row in shown:
        times = [_us(row["ours_us"]), *(_us(row["peers_us"].get(name)) for name in peers)]
        cells = [row["name"], str(row["launches"]), *times, _ratio(row["best_peer_ratio"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _means(rows)])


SHOWN_SYMBOLIC = ("softmax_columns", "swiglu", "bert_layer", "llama_layer", "t5_attention")


def symbolic(result: dict[str, Any]) -> str:
    """Return the result of `tests.benchmarks.symbolic` as a table of some programs, at all their
    sizes each, and the means of all.
    """
    rows = {row["name"]: row for row in result["rows"]}
    columns = {
        "once": "tvm_fusion",
        "for the size": "tvm_fusion.for_size",
        "inductor, dynamic": "torch.compile.dynamic",
        "eager": "torch",
    }
    packages = _versions(result, ["tvm_fusion", "torch"])
    lines = [
        f"{result['device']}, {result['date']}, microseconds a call ({packages}); "
        f"`{_command(result)}`:",
        "",
        f"| | sizes | {' | '.join(columns)} | once / for the size | best peer / once |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for row in (rows[name] for name in SHOWN_SYMBOLIC if name in rows):
        unknown = [None] * len(row["sizes"])
        cells = [row["name"], " / ".join(map(str, row["sizes"]))]
        cells += [" / ".join(map(_us, row["us"].get(label, unknown))) for label in columns.values()]
        cells += [_ratio(row["once_ratio"]), _ratio(row["best_peer_ratio"])]
        lines.append(f"| {' | '.join(cells)} |")
    once, peers = (
        [ratio for row in rows.values() for ratio in row[key] if ratio]
        for key in ("once_ratios", "best_peer_ratios")
    )
    if once and peers:
        lines += [
            "",
            f"All {len(rows)} programs, {len(once)} sizes: compiled once "
            f"{statistics.geometric_mean(once):.2f}x of the time of a compile for the size in the "
            f"geometric mean, {max(once):.2f}x at most; the best of inductor with dynamic shapes "
            f"and eager execution takes {statistics.geometric_mean(peers):.2f}x as long, "
            f"{min(peers):.2f}x at least.",
        ]
    return "\n".join(lines)


def calls(result: dict[str, Any]) -> str:
    """Return whole calls, of `real_models` or `tensor_parallel`, as a table; what the latter has
    beside, of our calls, in columns of their own.
    """
    rows = result["rows"]
    labels = dict.fromkeys(label for row in rows for label, us in row["wall_us"].items() if us)
    peers = [label for label in labels if label != OURS]
    names = [label.removeprefix("torch.") if "." in label else "eager" for label in peers]
    more = [name for name, key in OF_OURS.items() if any(key in row for row in rows)]
    head = ["", OURS, *names, "best peer / ours", *more, "error"]
    lines = [
        f"{result['device']}, {result['date']}, microseconds a call "
        f"({_versions(result, labels)}); `{_command(result)}`:",
        "",
        f"| {' | '.join(head)} |".replace("|  |", "| |"),
        "|---" * len(head) + "|",
    ]
    for row in rows:
        cells = [row["name"], *(_us(row["wall_us"].get(label)) for label in (OURS, *peers))]
        cells += [_ratio(row["best_peer_ratio"])]
        cells += [_told(row.get(OF_OURS[name], {}).get(OURS), name) for name in more]
        lines.append(f"| {' | '.join([*cells, _told(row['errors'].get(OURS), 'error')])} |")
    return "\n".join([*lines, "", _means(rows)])


def compiling(result: dict[str, Any]) -> str:
    """Return the result of `tests.benchmarks.compile_time` as a table, and its means."""
    stages = ("cold", "warm")
    columns = [(who, stage) for stage in stages for who in (OURS, INDUCTOR)]
    heads = [f"{who}, {stage}" for who, stage in columns]
    lines = [
        f"{result['device']}, {result['date']}, seconds of the first call "
        f"({_versions(result, ['tvm_fusion', 'torch'])}); `{_command(result)}`:",
        "",
        f"| | {' | '.join(heads)} | cold, ours / inductor's | host memory, MiB |",
        "|---" * (len(columns) + 3) + "|",
    ]
    ratios: dict[str, list[float]] = {stage: [] for stage in stages}
    for row in result["rows"]:
        found = {column: (row[column[0]].get(column[1]) or {}).get("first_s") for column in columns}
        for stage in stages:
            ours, theirs = found[OURS, stage], found[INDUCTOR, stage]
            if ours and theirs:
                ratios[stage].append(ours / theirs)
        ours, theirs = found[OURS, "cold"], found[INDUCTOR, "cold"]
        name = f"{row['name']} ({row['date']})" if "date" in row else row["name"]
        cells = [name, *("-" if s is None else f"{s:.1f}" for s in found.values())]
        cells += [_ratio(ours / theirs if ours and theirs else None)]
        lines.append(f"| {' | '.join(cells)} | {row[OURS]['cold']['host_mib']:.0f} |")
    means = (
        f"{stage} {statistics.geometric_mean(each):.2f} ({len(each)} models, "
        f"{max(each):.2f} at most)"
        for stage, each in ratios.items()
        if each
    )
    return "\n".join([*lines, "", f"Ours / inductor's, geometric mean: {', '.join(means)}."])


OF_OURS = {
    "our kernels": "kernel_us",
    "launches": "launches",
    "outside of kernels and collectives": "outside_share",
}
_FORMATS = {"our kernels": ".0f", "launches": ".0f", "error": ".1e"}


def _told(value: float | None, name: str) -> str:
    return "-" if value is None else format(value, _FORMATS.get(name, ".0%"))


OF_SUITES = {
    "symbolic": symbolic,
    "tensor_parallel": calls,
    "real_models": calls,
    "compile_time": compiling,
}


def _threads(result: dict[str, Any]) -> str:
    count = result["threads"]
    return f"{count} threads" if count > 1 else "1 thread"


def _versions(result: dict[str, Any], peers: Sequence[str]) -> str:
    packages = dict.fromkeys(name.split(".")[0] for name in peers)
    found = [
        f"{name} {result['versions'][name]}" for name in packages if name in result["versions"]
    ]
    return ", ".join(found)


def _command(result: dict[str, Any]) -> str:
    """The command without where its result was written."""
    return re.sub(r" --out [^\s;]+", "", result["command"])


def _us(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _means(rows: Sequence[dict[str, Any]]) -> str:
    ratios = {row["name"]: row["best_peer_ratio"] for row in rows if row["best_peer_ratio"]}
    if not ratios:
        return "No row has a peer to compare with."
    least = min(ratios, key=ratios.__getitem__)
    mean = statistics.geometric_mean(ratios.values())
    behind = sum(ratio < 1 for ratio in ratios.values())
    return (
        f"All {len(ratios)}: {mean:.2f}x in the geometric mean, the least {ratios[least]:.2f}x "
        f"({least}), {behind} below 1."
    )


def main(paths: Sequence[str]) -> None:
    """Remake the blocks of files."""
    for path in map(Path, paths):
        path.write_text(filled(path.read_text(), Path()))


if __name__ == "__main__":
    main(sys.argv[1:])
