"""Fits the constants of models of a kernel's time to kernels measured on a device: those of
`kernels.gemm.hopper.cost`, and of `kernels.convolution.depthwise.time`.

    python -m tests.fit_gemm_cost freeze SWEEP.jsonl ...   writes data/gemm_sweep_h200.json
    python -m tests.fit_gemm_cost fit                      prints the constants and what they reach
    python -m tests.fit_gemm_cost windows [SWEEP.json ...]  the same of convolutions; writes
                                                           data/conv_sweep_<device>.json first
    python -m tests.fit_gemm_cost depthwise [SWEEP.json ...]  the same of direct convolutions;
                                                           writes data/depthwise_sweep_h100.json

The data's "layers" are kernels with epilogues and other operands, next to the `GemmWork` of each.

A line of a sweep: {"shape": [M, N, K], "us": median time, "config": fields of HopperConfig}, of a
float16 product whose operands have neighbouring terms side by side; a "config" that is no object is
cuBLAS; lines of another "kind" than "split" or "multicast" are left out; the first time of a
kernel counts.
"""

import ast
import dataclasses
import datetime
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

from tests.support.convolutions import Conv
from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.depthwise import time as direct
from tvm_fusion.kernels.convolution.depthwise.config import DepthwiseConfig
from tvm_fusion.kernels.convolution.depthwise.problem import Numbers, direct_problem
from tvm_fusion.kernels.convolution.depthwise.rank import moved_bytes
from tvm_fusion.kernels.convolution.depthwise.shape import Roles, Shape
from tvm_fusion.kernels.convolution.geometry import read_convolution
from tvm_fusion.kernels.convolution.hopper import read_windows
from tvm_fusion.kernels.gemm.epilogue import operations_of
from tvm_fusion.kernels.gemm.hopper.config import HopperConfig
from tvm_fusion.kernels.gemm.hopper.configs import hopper_work, tile_of
from tvm_fusion.kernels.gemm.hopper.cost import (
    FITTED,
    LINE_BYTES,
    WINDOWS,
    GemmTile,
    GemmWork,
    gemm_time,
    stripe,
)
from tvm_fusion.kernels.gemm.hopper.plan import make_plan

CONVOLUTIONS = {
    device: Path(__file__).parent / "data" / f"conv_sweep_{device}.json"
    for device in ("h100", "h200")
}
DEPTHWISE = Path(__file__).parent / "data" / "depthwise_sweep_h100.json"
DATA = Path(__file__).parent / "data" / "gemm_sweep_h200.json"
H200 = load_profile("nvidia_h200")
# The same but for its memory, of which the data sheets say 3.35 and 4.8 TB/s.
H100 = dataclasses.replace(H200, hbm_bytes_per_s=H200.hbm_bytes_per_s * 3.35 / 4.8)
FIELDS = [f.name for f in dataclasses.fields(GemmTile) if f.name not in ("ahead", "taps", "rim")]
GUESSED = ("cached_columns",)
MANY = 10
"""Kernels of a shape among which there is a choice."""


def work_of(m, n, k):
    """The work of one float16 product with plain operands."""
    whole = k * 2 % LINE_BYTES == 0
    return GemmWork(
        1, m, (n,), k, a_whole_lines=whole, b_whole_lines=whole, written_bytes=2.0 * m * n
    )


def load(path=DATA, group="shapes"):
    """{(M, N, K): {GemmTile: microseconds}} and {(M, N, K): microseconds of cuBLAS}; of the group
    "held_out" those that nothing is fitted to.
    """
    data = json.loads(Path(path).read_text())
    kernels, library = {}, {}
    for entry in data[group]:
        shape = tuple(entry["shape"])
        library[shape] = entry["cublas_us"]
        kernels[shape] = _kernels(data, entry)
    return kernels, library


def load_layers(path=DATA):
    """{name: (GemmWork, {GemmTile: microseconds})} of products with more around them."""
    data = json.loads(Path(path).read_text())
    found = {}
    for entry in data["layers"]:
        work = GemmWork(**{**entry["work"], "columns": tuple(entry["work"]["columns"])})
        found[entry["name"]] = work, _kernels(data, entry)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """What a convolution computes, measured on one device."""

    name: str
    device: str
    work: GemmWork


def load_convolutions():
    """{Layer: {GemmTile: microseconds}}."""
    return {
        Layer(name, device, work): times
        for device, path in CONVOLUTIONS.items()
        for name, (work, times) in load_layers(path).items()
    }


def _kernels(data, entry):
    columns = data["columns"][1:]
    return {
        GemmTile(**dict(zip(columns, row[1:], strict=True))): row[0] for row in entry["kernels"]
    }


def predicted_us(shape, tile, fitted=None):
    """Of a plain product by its (M, N, K), of a `GemmWork` or of a `Layer`."""
    work = shape.work if isinstance(shape, Layer) else shape
    work = work if isinstance(work, GemmWork) else work_of(*work)
    return gemm_time(work, tile, H200, fitted).seconds * 1e6


@dataclasses.dataclass(frozen=True, eq=False)
class Direct:
    """A convolution for the direct form: what its time depends on, beside the configuration."""

    name: str
    numbers: Numbers
    moved: float
    operations: float


def load_direct(path=DEPTHWISE):
    """{Direct: {Shape: microseconds}}."""
    data, found = json.loads(Path(path).read_text()), {}
    for entry in data["layers"]:
        problem = read_convolution(_case(entry).func(), entry["case"].get("exact", False))
        numbers = direct_problem(problem).numbers
        work = Direct(
            entry["name"],
            numbers,
            moved_bytes(problem),
            float(operations_of(problem.segment).total()),
        )
        found[work] = {}
        for us, *values in entry["kernels"]:
            config = DepthwiseConfig(*values)
            found[work][Shape(Roles(numbers, config.rolls), config)] = us
    return found


def direct_us(work, shape, fitted=None):
    """Of the direct form on an H100."""
    known = fitted or direct.FITTED
    return direct.direct_seconds(shape, H100, work.moved, work.operations, known) * 1e6


def _case(row):
    return Conv(**{k: tuple(v) if isinstance(v, list) else v for k, v in row["case"].items()})


def accuracy(kernels, fitted=None, predicted_us=predicted_us):
    """Regret of the choice, relative error of the time and rank correlation over configurations, by
    shape.
    """
    found = {}
    for shape, times in kernels.items():
        guess = {tile: predicted_us(shape, tile, fitted) for tile in times}
        choice = min(times, key=guess.get)
        found[shape] = (
            times[choice] / min(times.values()),
            [abs(guess[t] / times[t] - 1) for t in times],
            kendall(list(guess.values()), list(times.values())),
        )
    return found


def kendall(a, b):
    """Kendall's tau of two lists."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    return sum(_sign(a[i] - a[j]) * _sign(b[i] - b[j]) for i, j in pairs) / max(1, len(pairs))


def _sign(x):
    return (x > 0) - (x < 0)


def summary(kernels, fitted=None, predicted_us=predicted_us):
    found = accuracy(kernels, fitted, predicted_us).values()
    errors = [e for _, all_errors, _ in found for e in all_errors]
    regrets = [r for r, _, _ in found]
    return (
        f"chosen over best: median {statistics.median(regrets):.3f}, worst {max(regrets):.3f}; "
        f"error of the time: median {statistics.median(errors):.3f}, "
        f"90 % below {statistics.quantiles(errors, n=10)[-1]:.3f}; "
        f"Kendall's tau over configurations {statistics.mean(t for _, _, t in found):.3f}"
    )


def with_choice(kernels):
    """The shapes of which many kernels were measured."""
    return {shape: times for shape, times in kernels.items() if len(times) >= MANY}


def _near(slower, kernels):
    """Weight of a kernel's error, by how much slower it is than the best of its shape's."""
    return 1.0 if slower < 1.5 else 0.5


def _near_and_many(slower, kernels):
    """The same where some layers have one or two kernels, and many of others are as fast."""
    if kernels < MANY:
        return 0.3
    return 2.0 if slower < 1.1 else 1.0 if slower < 1.5 else 0.4


def fit(kernels, known=FITTED, predicted_us=predicted_us, weight=_near):
    """Constants with the least squared logarithmic errors; kernels near the best count most."""
    from scipy.optimize import least_squares

    names = [f.name for f in dataclasses.fields(known) if f.name not in GUESSED]
    names = [name for name in names if math.isfinite(getattr(known, name))]
    start = [getattr(known, name) for name in names]
    best = {s: min(t.values()) for s, t in kernels.items()}

    def of(factors):
        values = {n: float(x * f) for n, x, f in zip(names, start, factors, strict=True)}
        return dataclasses.replace(known, **values)

    def errors(factors):
        fitted = of(factors)
        return [
            math.log(predicted_us(shape, tile, fitted) / us) * weight(us / best[shape], len(times))
            for shape, times in kernels.items()
            for tile, us in times.items()
        ]

    bounds = ([0.3] * len(names), [3.0] * len(names))
    found = least_squares(
        errors, [1.0] * len(names), bounds=bounds, loss="soft_l1", f_scale=0.05, diff_step=1e-3
    )
    return of(found.x)


def _measured(paths, form):
    """The device of sweeps of `tests/gpu/check_conv.py --json`, and [(row, {text of a
    configuration: microseconds})] of the kernels of one form.
    """
    layers, device = {}, None
    for path in paths:
        sweep = json.loads(Path(path).read_text())
        device = sweep["device"]
        for row in sweep["rows"]:
            known = layers.setdefault(json.dumps(row.get("case")), (row, {}))[1]
            for kernel in row.get("kernels", ()):
                if kernel["form"] == form and kernel.get("us"):
                    known.setdefault(kernel["config"], round(kernel["us"], 2))
    return device, [(row, configs) for row, configs in layers.values() if configs]


def _write(path, device, command, columns, lines):
    head = {
        "device": device,
        "date": str(datetime.date.today()),
        "versions": "TVM 0.27.0, torch 2.11.0, CUDA 13.0",
        "command": command,
        "clock": "median kernel time in us (CUPTI), the L2 cleaned before each launch",
        "columns": ["time_us", *columns],
    }
    text = json.dumps(head)[:-1] + ', "layers": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]}\n"
    path.write_text(text)


def freeze_convolutions(paths):
    """Writes what was measured of the Hopper form."""
    device, rows = _measured(paths, "hopper")
    lines = []
    for row, configs in rows:
        problem = read_windows(read_convolution(_case(row).func()))
        work, kernels = hopper_work(problem, H200), []
        for text, us in configs.items():
            config = parsed(text, HopperConfig)
            try:
                plan = make_plan(problem, config, H200)
            except Unsupported:
                continue  # what was offered when the sweep was made, and is not any more
            tile = dataclasses.asdict(tile_of(config, plan.ahead))
            kernels.append([us, *(tile[f] for f in [*FIELDS, "ahead"])])
        lines.append({"name": row["name"], "work": dataclasses.asdict(work), "kernels": kernels})
    command = "tests/gpu/check_conv.py --form hopper --apart --configs 18 --suite resnet50 "
    command += "(also --batch 1) and --suite kinds; on an H200 --configs 40 of four layers"
    name = next(name for name in CONVOLUTIONS if name.upper() in device)
    _write(CONVOLUTIONS[name], device, command, [*FIELDS, "ahead"], lines)


def freeze_direct(paths):
    """Writes what was measured of the direct form."""
    device, rows = _measured(paths, "depthwise")
    lines = []
    for row, configs in rows:
        kernels = [
            [us, *dataclasses.astuple(parsed(text, DepthwiseConfig))]
            for text, us in configs.items()
        ]
        lines.append({"name": row["name"], "case": row["case"], "kernels": kernels})
    command = "tests/gpu/check_conv.py --form depthwise --apart --configs 30 --suite depthwise, "
    command += "and --configs 2 --suite random"
    columns = [f.name for f in dataclasses.fields(DepthwiseConfig)]
    _write(DEPTHWISE, device, command, columns, lines)


def parsed(text, kind):
    """A configuration from what it prints."""
    inside = text[text.index("(") + 1 : -1]
    pairs = (part.split("=") for part in inside.split(", "))
    return kind(**{name: ast.literal_eval(value) for name, value in pairs})


def _is_offered(shape, config):
    """Whether blocks take tiles in the order that is offered for such a tile."""
    fields = (f.name for f in dataclasses.fields(GemmTile))
    tile = GemmTile(**{name: config[name] for name in fields if name in config})
    rows, columns = -(-shape[0] // tile.block_m), -(-shape[1] // tile.block_n)
    return tile.group_m == stripe(tile, rows, columns, windows=False)


def freeze(paths):
    shapes = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            entry = json.loads(line)
            if entry.get("kind", "split") not in ("split", "multicast"):
                continue
            shape = shapes.setdefault(tuple(entry["shape"]), {"cublas_us": None, "kernels": {}})
            config, us = entry["config"], round(entry["us"], 2)
            if not isinstance(config, dict):
                shape["cublas_us"] = shape["cublas_us"] or us
                continue
            if not _is_offered(entry["shape"], config):
                continue
            values = {"split": 1, "multicast": 1, **config}
            shape["kernels"].setdefault(tuple(values[f] for f in FIELDS), us)
    for shape in shapes.values():
        shape["kernels"] = [[us, *tile] for tile, us in shape["kernels"].items()]
    head = {
        "device": "NVIDIA H200",
        "date": "2026-11-20",
        "versions": "TVM 0.27.0, torch 2.11.0 (cuBLAS), CUDA 13.0",
        "command": "a sweep over configurations of the Hopper form of each shape, float16 "
        "x[M, K] w[N, K]^T, next to torch.matmul",
        "clock": "median kernel time in us (CUPTI), the L2 cleaned before each launch",
        "columns": ["time_us", *FIELDS],
    }
    lines = [json.dumps({"shape": s, **e}) for s, e in sorted(shapes.items())]
    text = json.dumps(head)[:-1] + ', "shapes": [\n' + ",\n".join(lines)
    held = json.loads(DATA.read_text())
    for group in ("held_out", "layers"):
        text += f'\n], "{group}": [\n' + ",\n".join(map(json.dumps, held[group]))
    DATA.write_text(text + "\n]}\n")


def main(command, paths):
    known, predict, weight, chosen = FITTED, predicted_us, _near, None
    if command == "windows":
        if paths:
            freeze_convolutions(paths)
        known, kernels = WINDOWS, load_convolutions()
    elif command == "depthwise":
        if paths:
            freeze_direct(paths)
        known, predict, weight = direct.FITTED, direct_us, _near_and_many
        kernels = load_direct()
        chosen = with_choice(kernels)
    else:
        if command == "freeze":
            freeze(paths)
        kernels, _ = load()
        kernels |= dict(load_layers().values())
    chosen = chosen or kernels
    print(summary(chosen, None, predict))
    if command != "freeze":
        better = fit(kernels, known, predict, weight)
        for f in dataclasses.fields(better):
            print(f.name, f"{getattr(better, f.name):.4g}")
        print(summary(chosen, better, predict))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
