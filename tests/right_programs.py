"""Right programs of 37 kinds at random odd sizes: the check must not call one of them wrong.

    python -m tests.right_programs --programs 1000 --out tests/results/right_programs.json

Each is compiled and checked. That it is right is said by torch: eager execution in float64 of the
same inputs, with an error of at most `NEAR` times that of eager execution in the program's own
type, or of `LAST_PLACES` units in the last place. `--lines FILE --part I/N` runs a part of them and
writes a line for each; `--gather FILE...` makes the result of such files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tvm

from tvm_fusion.check.checked_sizes import drawn_inputs
from tvm_fusion.check.compiled import check_compiled
from tvm_fusion.check.reference import run_built
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.tuning.session.lookup import OtherKernels

NEAR = 16.0
LAST_PLACES = 16  # units that pass beside an exact eager result
DTYPES = ("float32", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Program:
    """One program: a function of tensors."""

    kind: str
    seed: int
    dtype: str
    function: Callable[..., object]
    inputs: tuple[torch.Tensor, ...]

    def module(self) -> torch.nn.Module:
        return FunctionModule(self.function)


class FunctionModule(torch.nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)


class Sizes:
    """Draws sizes; the same seed draws the same."""

    def __init__(self, seed: int, dtype: str) -> None:
        self._random = random.Random(seed)
        self.dtype = getattr(torch, dtype)

    def size(self, most: int) -> int:
        """Small and large ones alike, most of them odd."""
        size = round(2 ** self._random.uniform(0, math.log2(most)))
        return size + 1 - size % 2 if self._random.random() < 0.8 else size

    def pick(self, *of):
        return self._random.choice(of)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    def integers(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)


Made = tuple[Callable[..., object], tuple[torch.Tensor, ...]]
KINDS: dict[str, Callable[[Sizes], Made]] = {}


def kind(make: Callable[[Sizes], Made]) -> Callable[[Sizes], Made]:
    KINDS[make.__name__] = make
    return make


def program(name: str, seed: int, dtype: str) -> Program:
    """The program of a kind, a seed and a type."""
    function, inputs = KINDS[name](Sizes(seed, dtype))
    return Program(name, seed, dtype, function, inputs)


def programs(count: int, seed: int) -> list[tuple[str, int, str]]:
    """Kinds in turn, each with a seed of its own and a type."""
    names = sorted(KINDS)
    return [
        (names[n % len(names)], seed + n, DTYPES[n // len(names) % len(DTYPES)])
        for n in range(count)
    ]


# ---- norms ---------------------------------------------------------------------------------------


@kind
def layer_norm(s: Sizes) -> Made:
    rows, n = s.size(300), s.size(900)
    return lambda x, w, b: F.layer_norm(x, (n,), w, b), (
        s.floats(rows, n),
        s.floats(n),
        s.floats(n),
    )


@kind
def layer_norm_far_from_zero(s: Sizes) -> Made:
    rows, n = s.size(200), s.size(500)
    return lambda x: F.layer_norm(x + 3, (n,)), (s.floats(rows, n),)


@kind
def layer_norm_of_two_axes(s: Sizes) -> Made:
    a, b = s.size(30), s.size(40)
    return lambda x: F.layer_norm(x, (a, b)), (s.floats(s.size(20), a, b),)


@kind
def layer_norm_then_product(s: Sizes) -> Made:
    rows, n, m = s.size(64), s.size(300), s.size(200)
    return (
        lambda x, w, b: F.linear(F.layer_norm(x, (n,), w), b),
        (s.floats(rows, n), s.floats(n), s.floats(m, n)),
    )


@kind
def rms_norm(s: Sizes) -> Made:
    n = s.size(900)
    return lambda x, w: F.rms_norm(x, (n,), w, 1e-6), (s.floats(s.size(100), n), s.floats(n))


@kind
def group_norm(s: Sizes) -> Made:
    groups = s.pick(1, 2, 3, 4, 8)
    channels = groups * s.pick(1, 2, 3, 5)
    shape = (s.size(4), channels, s.size(20), s.size(20))
    return (
        lambda x, w, b: F.group_norm(x, groups, w, b),
        (s.floats(*shape), s.floats(channels), s.floats(channels)),
    )


@kind
def instance_norm(s: Sizes) -> Made:
    return lambda x: F.instance_norm(x), (s.floats(s.size(4), s.size(9), s.size(20), 5),)


@kind
def batch_norm(s: Sizes) -> Made:
    c = s.size(30)
    return (
        lambda x, m, v, w, b: F.relu(F.batch_norm(x, m, v.abs() + 0.5, w, b)),
        (s.floats(s.size(4), c, s.size(20), 7), s.floats(c), s.floats(c), s.floats(c), s.floats(c)),
    )


@kind
def unit_rows(s: Sizes) -> Made:
    return lambda x: F.normalize(x, dim=-1), (s.floats(s.size(100), s.size(700)),)


@kind
def unit_columns(s: Sizes) -> Made:
    return lambda x: F.normalize(x, dim=1), (s.floats(s.size(5), s.size(99), s.size(60)),)


@kind
def variance(s: Sizes) -> Made:
    return lambda x: x.var(-1, correction=0), (s.floats(s.size(99), s.size(1300)),)


@kind
def variance_over_rows(s: Sizes) -> Made:
    return lambda x: x.var(0, correction=0), (s.floats(s.size(900), s.size(60)),)


@kind
def standard_deviation(s: Sizes) -> Made:
    return (
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + 0.1),
        (s.floats(s.size(80), s.size(400)),),
    )


# ---- softmaxes -----------------------------------------------------------------------------------


@kind
def softmax(s: Sizes) -> Made:
    return lambda x: torch.softmax(3 * x, -1), (s.floats(s.size(99), s.size(900)),)


@kind
def softmax_over_rows(s: Sizes) -> Made:
    return lambda x: torch.softmax(x, 0), (s.floats(s.size(200), s.size(70)),)


@kind
def log_softmax(s: Sizes) -> Made:
    return lambda x: F.log_softmax(3 * x, -1), (s.floats(s.size(99), s.size(900)),)


@kind
def masked_softmax(s: Sizes) -> Made:
    rows, n = s.size(60), s.size(200)
    return (
        lambda x, keep: torch.softmax(x.masked_fill(keep == 0, -1e4), -1),
        (s.floats(rows, n), s.integers(rows, n)),
    )


@kind
def softmax_of_primitives(s: Sizes) -> Made:
    return lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), (
        s.floats(s.size(99), s.size(500)),
    )


@kind
def log_of_summed_exponentials(s: Sizes) -> Made:
    return lambda x: torch.logsumexp(x, -1), (s.floats(s.size(99), s.size(900)),)


# ---- losses --------------------------------------------------------------------------------------


@kind
def cross_entropy(s: Sizes) -> Made:
    rows, n = s.size(99), s.size(900) + 1
    return F.cross_entropy, (s.floats(rows, n), s.integers(rows))


@kind
def squared_error(s: Sizes) -> Made:
    shape = (s.size(99), s.size(300))
    return F.mse_loss, (s.floats(*shape), s.floats(*shape))


@kind
def absolute_error(s: Sizes) -> Made:
    shape = (s.size(99), s.size(300))
    return lambda x, y: (x - y).abs().mean(), (s.floats(*shape), s.floats(*shape))


@kind
def binary_cross_entropy(s: Sizes) -> Made:
    shape = (s.size(99), s.size(300))
    return (
        lambda x, y: (x.clamp(min=0) - x * y + torch.log1p(torch.exp(-x.abs()))).mean(),
        (s.floats(*shape), s.floats(*shape)),
    )


@kind
def divergence(s: Sizes) -> Made:
    shape = (s.size(60), s.size(300))
    return (
        lambda x, y: (torch.softmax(y, -1) * (F.log_softmax(y, -1) - F.log_softmax(x, -1))).sum(-1),
        (s.floats(*shape), s.floats(*shape)),
    )


@kind
def cosine(s: Sizes) -> Made:
    shape = (s.size(99), s.size(300))
    return (
        lambda x, y: (x * y).sum(-1) / ((x * x).sum(-1) * (y * y).sum(-1) + 1e-3).sqrt(),
        (s.floats(*shape), s.floats(*shape)),
    )


# ---- products and convolutions -------------------------------------------------------------------


@kind
def product(s: Sizes) -> Made:
    m, k, n = s.size(99), s.size(700), s.size(99)
    return torch.matmul, (s.floats(m, k), s.floats(k, n))


@kind
def batched_product(s: Sizes) -> Made:
    b, m, k, n = s.size(9), s.size(30), s.size(200), s.size(40)
    return lambda x, y: torch.tanh(torch.matmul(x, y) * 0.1), (s.floats(b, m, k), s.floats(b, k, n))


@kind
def linear_gelu(s: Sizes) -> Made:
    rows, k, n = s.size(60), s.size(400), s.size(200)
    return (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        (s.floats(rows, k), s.floats(n, k), s.floats(n)),
    )


@kind
def gated_units(s: Sizes) -> Made:
    rows, k, n = s.size(40), s.size(200), s.size(150)
    return (
        lambda x, u, v, d: x + F.linear(F.silu(F.linear(x, u)) * F.linear(x, v), d),
        (s.floats(rows, k), s.floats(n, k), s.floats(n, k), s.floats(k, n)),
    )


@kind
def convolution(s: Sizes) -> Made:
    c, o = s.size(12), s.size(12)
    return (
        lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)),
        (s.floats(s.size(3), c, s.size(15) + 2, s.size(15) + 2), s.floats(o, c, 3, 3), s.floats(o)),
    )


@kind
def depthwise_convolution(s: Sizes) -> Made:
    c = s.size(20)
    return (
        lambda x, w: F.conv2d(x, w, padding=2, groups=c),
        (s.floats(1, c, s.size(15) + 4, s.size(15) + 4), s.floats(c, 1, 5, 5)),
    )


@kind
def pooling(s: Sizes) -> Made:
    return lambda x: F.avg_pool2d(x * 2 + 1, 3, 2), (s.floats(2, s.size(9), s.size(20) + 3, 9),)


# ---- attention -----------------------------------------------------------------------------------


@kind
def attention(s: Sizes) -> Made:
    shape = (s.size(2), s.size(4), s.size(50), s.pick(8, 16, 20))
    return F.scaled_dot_product_attention, tuple(s.floats(*shape) for _ in range(3))


@kind
def attention_written_out(s: Sizes) -> Made:
    h, n, d = s.size(4), s.size(50), s.pick(8, 16, 20)
    return (
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * d**-0.5, -1) @ v,
        tuple(s.floats(h, n, d) for _ in range(3)),
    )


# ---- sums and chains -----------------------------------------------------------------------------


@kind
def sum_of_squares(s: Sizes) -> Made:
    return lambda x: (x * x).sum(), (s.floats(s.size(99), s.size(900)),)


@kind
def column_sums(s: Sizes) -> Made:
    return lambda x: (x * 2 + 1).sum(0) * 3, (s.floats(s.size(900), s.size(70)),)


@kind
def gate(s: Sizes) -> Made:
    return lambda x: torch.sigmoid(x) * torch.tanh(x + 1), (s.floats(s.size(99), s.size(400)),)


# ---- judging -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the check says of a program, and what torch does.

    Attributes
    ----------
    called_wrong : str
        Why; empty where the check passed and cut nothing for its numbers.
    fell_back : str
        Why a group was cut for anything else.
    error, limit : float
        Of the output that is nearest to its limit, as the check has them.
    near : float
        The error against torch in float64 over what is allowed there; a right program has at most
        1.
    """

    kind: str
    seed: int
    dtype: str
    shapes: str
    called_wrong: str
    fell_back: str
    error: float
    limit: float
    near: float

    @property
    def ratio(self) -> float:
        """The error over its limit."""
        return self.error / self.limit if self.limit else 0.0


def judged(one: Program, target: str = "llvm") -> Outcome:
    """Compile a program, check it, and compare it with torch in float64 on the same inputs."""
    planned = planned_function((one.module(), one.inputs), target)
    made = planned.build()
    fell_back = "; ".join(made.planned.cuts.values())
    inputs = drawn_inputs(planned.mod)
    given = [torch.from_numpy(_wide(x)) for x in run_built(made.built, inputs)]
    checked = check_compiled(made, OtherKernels)
    worst = max(checked.verification.outputs, key=lambda o: o.error / (o.limit or 1.0))
    tensors = [_tensor(x) for x in inputs]
    exact = _flat(one.function(*(_double(x) for x in tensors)))
    eager = _flat(one.function(*tensors))
    near = max(_near(*x, one.dtype) for x in zip(given, eager, exact, strict=True))
    shapes = ",".join("x".join(map(str, x.shape)) for x in tensors)
    why = checked.verification.why or "; ".join(checked.tried[1:])
    key = (one.kind, one.seed, one.dtype, shapes)
    return Outcome(*key, why, fell_back, worst.error, worst.limit, near)


def _near(given: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, dtype: str) -> float:
    scale = float(exact.abs().max()) or 1.0
    error, eager_error = (
        float((x.double().reshape(exact.shape) - exact).abs().max()) / scale for x in (given, eager)
    )
    return error / max(NEAR * eager_error, LAST_PLACES * torch.finfo(getattr(torch, dtype)).eps)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("float64") if "float" in array.dtype.name else array


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _flat(value: object) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


# ---- the command ---------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome], command: str, target: str) -> dict:
    """The result that is committed: counts, and each kind's errors over their limits."""
    kinds = {}
    for name in sorted(KINDS):
        found = [o for o in outcomes if o.kind == name]
        worst = max(found, key=lambda o: o.ratio, default=None)
        ratios = [o.ratio for o in found]
        kinds[name] = {
            "programs": len(found),
            "called_wrong": sum(bool(o.called_wrong) for o in found),
            "median_error_over_limit": round(statistics.median(ratios or [0.0]), 3),
            "largest_error_over_limit": round(max(ratios, default=0.0), 3),
            "there": worst and f"{worst.seed} {worst.dtype} {worst.shapes}",
        }
    return {
        "target": target,
        "machine": _machine(target),
        "date": datetime.date.today().isoformat(),
        "tvm": tvm.__version__,
        "torch": torch.__version__,
        "command": command,
        "programs": len(outcomes),
        "seeds": [min(o.seed for o in outcomes), max(o.seed for o in outcomes)],
        "dtypes": {d: sum(o.dtype == d for o in outcomes) for d in sorted(set(DTYPES))},
        "right_by_torch": sum(o.near <= 1 for o in outcomes),
        "called_wrong": [asdict(o) for o in outcomes if o.called_wrong],
        "fell_back": [f"{o.kind} {o.seed}: {o.fell_back}"[:200] for o in outcomes if o.fell_back],
        "kinds": kinds,
    }


def _machine(target: str) -> str:
    if target != "llvm":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th program from the I-th on")
    parser.add_argument("--lines", type=Path, help="a file for a line a program")
    parser.add_argument("--gather", type=Path, nargs="+", help="files of lines to sum up")
    parser.add_argument("--out", type=Path, help="a file for the result")
    options = parser.parse_args()
    outcomes = list(_gathered(options.gather)) if options.gather else _all_judged(options)
    command = "python -m tests.right_programs --programs {programs} --seed {seed} --target {target}"
    found = summary(outcomes, command.format(**vars(options)), options.target)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text if not options.lines else f"{len(outcomes)} programs")


def _all_judged(options: argparse.Namespace) -> list[Outcome]:
    part, parts = map(int, options.part.split("/"))
    outcomes = []
    for key in programs(options.programs, options.seed)[part - 1 :: parts]:
        outcomes.append(judged(program(*key), options.target))
        if options.lines:
            with options.lines.open("a") as lines:
                lines.write(json.dumps(asdict(outcomes[-1])) + "\n")
    return outcomes


def _gathered(files: Sequence[Path]) -> Iterator[Outcome]:
    for file in files:
        for line in file.read_text().splitlines():
            yield Outcome(**json.loads(line))


if __name__ == "__main__":
    main()
