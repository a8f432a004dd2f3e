"""Predicted beside measured times of kernels on this CPU: `python -m tests.fit_cpu_cost`.

The CPU is calibrated first, then each program is built as planned without caution, and timed; what
a call takes beside its kernels (`call_us`) is not part of `measured_us`. The file holds every
program with its terms, and by family the quartiles of predicted / measured; the analytic model is
right where the medians lie between 0.7 and 1.4. Takes about a minute and wants a machine at rest.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import tvm
from tvm.relax import op

from tests.support.graphs import module
from tvm_fusion.calibrate.cpu.host_profile import calibrated
from tvm_fusion.calibrate.profile_file import cpu_name
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.calls.compiled_module import CompiledModule

F32 = "float32"
PAUSE_S = 0.02
SAMPLES = 9


def f32(*shape):
    return shape, F32


def chain(*steps):
    def emit(bb, x, *more):
        for step in steps:
            x = bb.emit(step(x, *more))
        return x

    return emit


def attention(bb, q, k, v):
    scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
    return op.matmul(bb.emit(op.nn.softmax(scores, -1)), v)


def norm(x, gamma, beta):
    return op.nn.layer_norm(x, gamma, beta, [-1])


def linear(x, w, bias):
    return op.add(op.matmul(x, w), bias)


add_relu = chain(lambda x, y: op.add(x, y), lambda x, y: op.nn.relu(x))
gate = chain(lambda x: op.multiply(op.sigmoid(x), op.tanh(x)))
deep = chain(*[lambda x: op.tanh(x)] * 2, lambda x: op.exp(x), lambda x: op.sqrt(x))
row_sum, column_sum = (chain(lambda x, a=a: op.sum(x, a)) for a in (-1, 0))
squares = chain(lambda x: op.multiply(x, x), lambda x: op.sum(x, -1))
turned = chain(lambda x: op.permute_dims(x, [1, 0]))
heads = chain(lambda x: op.permute_dims(x, [0, 2, 1, 3]))
gelu_linear = chain(linear, lambda x, *_: op.nn.gelu(x))

FAMILIES = {
    "pointwise": [
        *((add_relu, f32(m, n), f32(m, n)) for m, n in ((64, 64), (255, 513), (1024, 2048))),
        *((gate, f32(m, n)) for m, n in ((31, 257), (256, 768), (2048, 2048))),
        *((deep, f32(m, n)) for m, n in ((128, 100), (1000, 1000))),
        *((chain(lambda x: op.nn.gelu(x)), f32(m, n)) for m, n in ((300, 300), (512, 3072))),
        (add_relu, f32(4096, 4096), f32(4096, 4096)),
    ],
    "row": [
        *((chain(lambda x: op.nn.softmax(x, -1)), f32(m, n)) for m, n in ((64, 100), (512, 777))),
        *((chain(norm), f32(m, n), f32(n), f32(n)) for m, n in ((128, 256), (512, 768))),
        *((row_sum, f32(m, n)) for m, n in ((33, 1000), (1024, 1024), (4096, 4096))),
        *((squares, f32(m, n)) for m, n in ((256, 768), (2048, 512))),
        (chain(lambda x: op.nn.log_softmax(x, -1)), f32(256, 1000)),
        (chain(norm), f32(4096, 2048), f32(2048), f32(2048)),
    ],
    "column": [
        *((column_sum, f32(m, n)) for m, n in ((64, 64), (512, 768), (1023, 257), (4096, 4096))),
        (chain(lambda x: op.mean(x, [0, 2, 3])), f32(8, 32, 28, 28)),
        (chain(lambda x: op.max(x, 0)), f32(300, 5000)),
    ],
    "gemm": [
        *(
            (chain(linear), f32(m, k), f32(k, n), f32(n))
            for m, k, n in ((128, 256, 256), (100, 304, 512), (512, 768, 768), (37, 129, 1000))
        ),
        *(
            (gelu_linear, f32(m, k), f32(k, n), f32(n))
            for m, k, n in ((64, 256, 688), (256, 512, 512))
        ),
        (chain(linear), f32(1, 1024), f32(1024, 1024), f32(1024)),
        (chain(linear), f32(1024, 1024), f32(1024, 1024), f32(1024)),
    ],
    "attention": [
        (attention, f32(b, h, s, d), f32(b, h, s, d), f32(b, h, s, d))
        for b, h, s, d in ((1, 4, 64, 32), (1, 4, 128, 64), (2, 8, 256, 64), (1, 3, 200, 48))
    ],
    "transpose": [
        *((turned, f32(m, n)) for m, n in ((64, 64), (512, 768), (1000, 1001), (4096, 2048))),
        (heads, f32(2, 128, 8, 64)),
        (heads, f32(1, 77, 4, 32)),
    ],
}
"""Programs by family: how to build one, and its inputs."""


def timed_us(compiled: CompiledModule, inputs) -> float:
    """Median of calls, in runs after a pause, each of at least half a millisecond."""
    call = compiled.bind(*inputs)
    began = time.perf_counter()
    call()
    call()
    number = max(1, int(1e-3 / max(time.perf_counter() - began, 1e-7)))
    found = []
    for _ in range(SAMPLES):
        time.sleep(PAUSE_S)
        call()
        call()
        began = time.perf_counter()
        for _ in range(number):
            call()
        found.append((time.perf_counter() - began) / number * 1e6)
    return statistics.median(found)


def built(emit, inputs, hw):
    """A program as planned by the predictions alone, its kernels ready; and its plan."""
    policy = load_policy({"coverage": 0.0, "min_gain": 0.0})
    own = Planned.of(module(emit, *inputs), hw.to_target(), hw, policy)
    return CompiledModule.of(own.build().built), own


def call_us(hw) -> float:
    """What a call takes beside its kernels: inputs looked at, outputs made."""
    program = chain(lambda x: op.nn.relu(x)), f32(8)
    compiled, _ = built(program[0], program[1:], hw)
    return max(0.0, timed_us(compiled, [np.ones(8, F32)]) - hw.kernel_gap_us)


def measured(family, emit, inputs, hw, around_us) -> dict:
    compiled, own = built(emit, inputs, hw)
    generator = np.random.default_rng(0)
    values = [generator.standard_normal(shape, dtype=dtype) for shape, dtype in inputs]
    groups = [g for g in own.plan.groups if g.kernel_class != "view"]
    us, predicted = timed_us(compiled, values) - around_us, own.plan.predicted_us
    return {
        "family": family,
        "shapes": [list(shape) for shape, _ in inputs],
        "launches": [{"class": g.kernel_class, "terms": g.terms} for g in groups],
        "predicted_us": round(predicted, 2),
        "measured_us": round(us, 2),
        "ratio": round(predicted / us, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", metavar="FAMILY,...", help=", ".join(FAMILIES))
    args = parser.parse_args()
    base = load_profile("llvm_cpu")
    for family, programs in FAMILIES.items():  # compiles all before anything is measured
        for program in programs if args.only is None or family in args.only.split(",") else ():
            built(program[0], program[1:], base)
    found = calibrated(base)
    hw = found.profile(base)
    around_us = call_us(hw)
    rows = []
    for family, programs in FAMILIES.items():
        for program in programs if args.only is None or family in args.only.split(",") else ():
            rows.append(measured(family, program[0], program[1:], hw, around_us))
            print(
                family,
                rows[-1]["shapes"],
                rows[-1]["predicted_us"],
                rows[-1]["measured_us"],
                rows[-1]["ratio"],
                file=sys.stderr,
            )
    ratios = {row["family"]: [] for row in rows}
    for row in rows:
        ratios[row["family"]].append(row["ratio"])
    data = {
        "device": cpu_name(),
        "threads": found.threads,
        "date": datetime.date.today().isoformat(),
        "tvm": tvm.__version__,
        "command": "python -m tests.fit_cpu_cost",
        "rates": found.values,
        "call_us": round(around_us, 3),
        "families": {
            name: dict(zip(("low", "median", "high"), statistics.quantiles(r, n=4), strict=True))
            for name, r in ratios.items()
        },
        "programs": rows,
    }
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    for name, quartiles in data["families"].items():
        print(f"{name:10} {quartiles['low']:.2f} {quartiles['median']:.2f} {quartiles['high']:.2f}")


if __name__ == "__main__":
    main()
