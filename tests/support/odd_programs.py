"""Some sixty programs as benchmarks of kernels have them, at sizes that those never have: each
extent one more, three more, and five sevenths of what it is.

    python -m tests.support.odd_programs --lines FILE --out tests/results/odd_programs.json

Each is compiled without the check and with it, and judged by torch in float64
(`right_programs.judged`). What is in `--lines FILE` already is not tried again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
import tvm

import tvm_fusion
from tests.right_programs import Outcome, Program, judged

Sizes = dict[str, int]
Entry = tuple[str, str, Callable[[Sizes], Callable]]

ODD: dict[str, Callable[[int], int]] = {
    "+ 1": lambda extent: extent + 1,
    "+ 3": lambda extent: extent + 3,
    "x 5 / 7": lambda extent: max(1, extent * 5 // 7),
}


def plain(function: Callable) -> Callable[[Sizes], Callable]:
    """A program that does not ask for its sizes."""
    return lambda sizes: function


def _gru(x, h, w, u):
    r, z, n = (x @ w).chunk(3, -1)
    a, b, c = (h @ u).chunk(3, -1)
    r, z = torch.sigmoid(r + a), torch.sigmoid(z + b)
    return (1 - z) * torch.tanh(n + r * c) + z * h


def _attention(causal: bool) -> Callable:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _hinge(x, y):
    return torch.clamp(1 - x * y, min=0).mean()


def _triplet(a, p, n):
    return F.triplet_margin_loss(a, p, n)


def _cosine(x, y):
    return (1 - F.cosine_similarity(x, y, dim=1)).mean()


def _new_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# name: shapes, sizes, program
PROGRAMS: dict[str, Entry] = {
    # products
    "square product": ("N N, N N", "N=96", plain(lambda a, b: a @ b)),
    "product": ("M K, K N", "M=64 K=128 N=48", plain(lambda a, b: a @ b)),
    "tall product": ("M K, K N", "M=512 K=16 N=16", plain(lambda a, b: a @ b)),
    "deep product": ("M K, K N", "M=16 K=1024 N=16", plain(lambda a, b: a @ b)),
    "row and matrix": ("1 K, K N", "K=512 N=256", plain(lambda a, b: a @ b)),
    "matrix and vector": ("M K, K 1", "M=256 K=512", plain(lambda a, b: a @ b)),
    "turned left": ("K M, K N", "M=64 K=96 N=32", plain(lambda a, b: a.T @ b)),
    "turned right": ("M K, N K", "M=64 K=96 N=32", plain(lambda a, b: a @ b.T)),
    "both turned": ("K M, N K", "M=64 K=96 N=32", plain(lambda a, b: a.T @ b.T)),
    "batched product": ("B M K, B K N", "B=8 M=32 K=64 N=16", plain(torch.bmm)),
    "diagonal product": ("N, N M", "N=128 M=64", plain(lambda a, b: a[:, None] * b)),
    "triangular product": ("N N, N N", "N=64", plain(lambda a, b: torch.tril(a.tril() @ b.tril()))),
    "product of four axes": (
        "B I J L, L K",
        "B=2 I=8 J=16 L=32 K=24",
        plain(lambda a, b: torch.einsum("bijl,lk->bijk", a, b)),
    ),
    # element by element
    "leaky relu": ("N M", "N=64 M=512", plain(F.leaky_relu)),
    "gelu": ("N M", "N=64 M=512", plain(_new_gelu)),
    "selu": ("N M", "N=64 M=512", plain(F.selu)),
    "softplus": ("N M", "N=64 M=512", plain(F.softplus)),
    "hard sigmoid": ("N M", "N=64 M=512", plain(F.hardsigmoid)),
    "swish": ("N M", "N=64 M=512", plain(lambda x: x * torch.sigmoid(x))),
    "soft sign": ("N M", "N=64 M=512", plain(lambda x: x / (1 + x.abs()))),
    # along an axis
    "softmax": ("N M", "N=64 M=1024", plain(lambda x: torch.softmax(x, 1))),
    "log softmax": ("N M", "N=64 M=1024", plain(lambda x: torch.log_softmax(x, 1))),
    "softmax of columns": ("N M", "N=128 M=64", plain(lambda x: torch.softmax(x, 0))),
    "sum of the middle": ("B N M", "B=8 N=64 M=32", plain(lambda x: x.sum(1, keepdim=True))),
    "mean of the middle": ("B N M", "B=8 N=64 M=32", plain(lambda x: x.mean(1))),
    "largest of the middle": ("B N M", "B=8 N=64 M=32", plain(lambda x: x.amax(1))),
    "place of the largest": ("B N M", "B=8 N=64 M=32", plain(lambda x: x.argmax(1))),
    "place of the smallest": ("B N M", "B=8 N=32 M=64", plain(lambda x: x.argmin(2))),
    "running sum": ("N M", "N=32 M=256", plain(lambda x: x.cumsum(1))),
    "running sum from the end": (
        "N M",
        "N=32 M=128",
        plain(lambda x: x.flip(1).cumsum(1).flip(1)),
    ),
    # norms
    "layer norm": ("B N M", "B=4 N=16 M=256", lambda s: lambda x: F.layer_norm(x, (s["M"],))),
    "layer norm of images": (
        "B C H W",
        "B=4 C=8 H=16 W=16",
        lambda s: lambda x: F.layer_norm(x, (s["C"], s["H"], s["W"])),
    ),
    "rms norm": (
        "B C H W",
        "B=4 C=16 H=12 W=12",
        plain(lambda x: x / torch.sqrt((x**2).mean(1, keepdim=True) + 1e-5)),
    ),
    "group norm": (
        "B G*C H W",
        "B=2 G=4 C=4 H=16 W=16",
        lambda s: lambda x: F.group_norm(x, s["G"]),
    ),
    "instance norm": ("B C H W", "B=4 C=8 H=16 W=16", plain(F.instance_norm)),
    "batch norm": (
        "B C H W, C, C",
        "B=4 C=8 H=16 W=16",
        plain(lambda x, g, b: F.batch_norm(x, None, None, g, b, training=True)),
    ),
    "frobenius norm": ("N M", "N=64 M=128", plain(lambda x: x / torch.norm(x))),
    "length of rows": ("N M", "N=64 M=512", plain(lambda x: x / x.norm(dim=1, keepdim=True))),
    "sum of sizes": ("N M", "N=64 M=512", plain(lambda x: x / x.abs().mean(1, keepdim=True))),
    # windows
    "convolution": ("B C H W, K C 3 3", "B=2 C=8 H=16 W=16 K=16", plain(F.conv2d)),
    "convolution with steps": (
        "B C H W, K C 3 3",
        "B=2 C=8 H=17 W=16 K=8",
        plain(lambda x, w: F.conv2d(x, w, stride=2, padding=1)),
    ),
    "convolution of channels": (
        "B C H W, C 1 3 3",
        "B=2 C=16 H=16 W=16",
        lambda s: lambda x, w: F.conv2d(x, w, padding=1, groups=s["C"]),
    ),
    "convolution of points": ("B C H W, K C 1 1", "B=2 C=16 H=12 W=12 K=24", plain(F.conv2d)),
    "convolution of lines": (
        "B C L, K C 3",
        "B=4 C=8 L=128 K=16",
        plain(lambda x, w: F.conv1d(x, w, dilation=2)),
    ),
    "convolution turned": (
        "B C H W, C K 3 3",
        "B=2 C=8 H=8 W=8 K=8",
        plain(lambda x, w: F.conv_transpose2d(x, w, stride=2)),
    ),
    "largest of windows": ("B C H W", "B=2 C=8 H=32 W=32", plain(lambda x: F.max_pool2d(x, 3, 2))),
    "mean of windows": ("B C H W", "B=2 C=8 H=32 W=32", plain(lambda x: F.avg_pool2d(x, 4))),
    # losses
    "cross entropy": (
        "N C",
        "N=64 C=128",
        lambda s: lambda x: F.cross_entropy(x, torch.arange(s["N"]) % s["C"]),
    ),
    "squared error": ("N M, N M", "N=64 M=512", plain(F.mse_loss)),
    "huber loss": ("N M, N M", "N=64 M=512", plain(F.smooth_l1_loss)),
    "hinge loss": ("N M, M", "N=64 M=128", plain(_hinge)),
    "cosine loss": ("N M, N M", "N=64 M=256", plain(_cosine)),
    "triplet loss": ("N M, N M, N M", "N=32 M=256", plain(_triplet)),
    # several operators
    "product, bias and relu": (
        "M K, K N, N",
        "M=64 K=128 N=96",
        plain(lambda x, w, b: F.relu(x @ w + b)),
    ),
    "product, norm and gelu": (
        "M K, K G*N",
        "M=32 K=64 G=4 N=16",
        lambda s: lambda x, w: F.gelu(F.group_norm(x @ w, s["G"])),
    ),
    "product, sum and logarithm": (
        "M K, K N",
        "M=64 K=64 N=96",
        plain(lambda x, w: torch.logsumexp((x @ w) * 0.5, 1, keepdim=True)),
    ),
    "convolution, bias and norm": (
        "B C H W, G*K C 3 3, G*K",
        "B=2 C=4 H=12 W=12 G=2 K=4",
        lambda s: lambda x, w, b: F.group_norm(F.relu(F.conv2d(x, w, b)), s["G"]),
    ),
    "gated units": (
        "M K, K N, K N, N K",
        "M=32 K=64 N=96",
        plain(lambda x, g, u, d: (F.silu(x @ g) * (x @ u)) @ d),
    ),
    "attention": ("B H M D, B H N D, B H N D", "B=2 H=2 M=32 N=48 D=32", plain(_attention(False))),
    "causal attention": ("B H N D, B H N D, B H N D", "B=2 H=2 N=64 D=16", plain(_attention(True))),
    "gated recurrent unit": (
        "B N, B M, N 3*M, M 3*M",
        "B=16 N=64 M=48",
        plain(_gru),
    ),
}


def odd_program(name: str, change: str) -> Program:
    """A program with each of its extents changed."""
    shapes, sizes, make = PROGRAMS[name]
    known = (size.split("=") for size in sizes.split())
    values = {letter: ODD[change](int(extent)) for letter, extent in known}
    inputs = tuple(
        torch.zeros([_extent(term, values) for term in shape.split()])
        for shape in shapes.split(", ")
    )
    return Program(f"{name} {change}", 0, "float32", make(values), inputs)


def _extent(term: str, sizes: Sizes) -> int:
    """`G*C`, `W` or `3` in numbers."""
    return math.prod(int(f) if f.isdigit() else sizes[f] for f in term.split("*"))


def every() -> Iterator[tuple[str, str]]:
    return ((name, change) for name in PROGRAMS for change in ODD)


# ---- the command


def summary(outcomes: Sequence[Outcome]) -> dict:
    """The result that is committed."""
    return {
        "command": "python -m tests.support.odd_programs",
        "date": datetime.date.today().isoformat(),
        "versions": {
            "tvm_fusion": tvm_fusion.__version__,
            "tvm": tvm.__version__,
            "torch": torch.__version__,
        },
        "target": "llvm",
        "programs": len(PROGRAMS),
        "changes": list(ODD),
        "judged": len(outcomes),
        "wrong": [asdict(o) for o in outcomes if not o.near <= 1],
        "called_wrong": [asdict(o) for o in outcomes if o.called_wrong],
        "fell_back": [asdict(o) for o in outcomes if o.fell_back],
        "largest_error_over_allowed": round(max(o.near for o in outcomes), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=Path, required=True, help="a file for a line a program")
    parser.add_argument("--out", type=Path, help="a file for the result")
    options = parser.parse_args()
    known = options.lines.read_text().splitlines() if options.lines.exists() else []
    found = {o.kind: o for o in (Outcome(**json.loads(line)) for line in known)}
    for key in every():
        one = odd_program(*key)
        if one.kind in found:
            continue
        found[one.kind] = judged(one)
        with options.lines.open("a") as file:
            file.write(json.dumps(asdict(found[one.kind])) + "\n")
    text = json.dumps(summary(list(found.values())), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
