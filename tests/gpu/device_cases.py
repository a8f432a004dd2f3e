"""Matrix products for `check_gemm.py`: a graph, its inputs, and the same in torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from tvm import relax, te
from tvm.relax import op

from tests.support import gemm_cases as graphs
from tests.support.grouped_cases import projections, separate
from tests.support.partial_cases import residual_squares

HALF, BRAIN, FLOAT = "float16", "bfloat16", "float32"
FP8, INT = "float8_e4m3fn", "int32"

# Largest error relative to the largest reference value: about two roundings of the output. Sums of
# 8-bit floats keep 14 bits in the tensor cores.
TOLERANCE = {HALF: 2e-3, BRAIN: 1.6e-2, FLOAT: 1e-5, FP8: 4e-3}


@dataclass(frozen=True)
class Case:
    """A graph, the shapes of its inputs, and the same in torch (for float64 and as the peer)."""

    name: str
    emit: Callable
    shapes: tuple[tuple[int, ...], ...]
    same: Callable[..., Sequence[Tensor]]
    flop: float
    dtype: str = HALF
    compiled: bool = False
    dtypes: tuple[str, ...] = ()  # of the inputs, where they differ
    peer: Callable[..., object] | None = None  # torch's, where it has an operator of its own

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes."""
        return list(zip(self.shapes, self.dtypes or (self.dtype,) * len(self.shapes), strict=True))


def float8(bb, x, w):
    """x W^T of 8-bit floats, in float16."""
    x, w = (bb.emit(op.astype(v, HALF)) for v in (x, w))
    product = bb.emit(op.matmul(x, bb.emit(op.permute_dims(w, (1, 0))), out_dtype=FLOAT))
    return op.astype(product, HALF)


def int4(bb, x, packed, scales):
    """x W^T, eight weights in a word, zero point 8, a scale for 128 of them along K."""
    n, words = (int(extent) for extent in packed.ty.shape)
    shifts = bb.emit_te(lambda: te.compute((8,), lambda i: (i * 4).astype("int32")))
    bits = bb.emit(op.right_shift(bb.emit(op.reshape(packed, (n, words, 1))), shifts))
    bits = bb.emit(op.bitwise_and(bits, relax.const(15, "int32")))
    weights = bb.emit(op.astype(bb.emit(op.reshape(bits, (n, words // 16, 128))), HALF))
    weights = bb.emit(op.subtract(weights, relax.const(8, HALF)))
    factors = bb.emit(op.reshape(scales, (n, words // 16, 1)))
    weights = bb.emit(op.reshape(bb.emit(op.multiply(weights, factors)), (n, words * 8)))
    product = bb.emit(op.matmul(x, bb.emit(op.permute_dims(weights, (1, 0))), out_dtype=FLOAT))
    return op.astype(product, HALF)


def int4_weight(packed: Tensor, scales: Tensor) -> Tensor:
    """The weights of `int4` in the type of their scales."""
    n, words = packed.shape
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    bits = (packed.reshape(n, words, 1) >> shifts) & 15
    groups = bits.reshape(n, words // 16, 128).to(scales.dtype) - 8
    return (groups * scales.reshape(n, -1, 1)).reshape(n, words * 8)


def squares_beside(h: Tensor) -> list[Tensor]:
    """h and the sums of its squares over runs of 128 columns."""
    wide = h if h.dtype == torch.float64 else h.float()
    return [h, wide.square().reshape(h.shape[0], -1, 128).sum(-1)]


def heads(x: Tensor, count: int) -> Tensor:
    """[b, s, h * d] -> [b, h, s, d]."""
    b, s, w = x.shape
    return x.reshape(b, s, count, w // count).permute(0, 2, 1, 3)


def linear_of(x: Tensor, w: Tensor) -> list[Tensor]:
    return [x @ w.T]


def linear(name: str, m: int, n: int, k: int, dtype: str = HALF) -> Case:
    """x W^T."""
    return Case(name, graphs.linear, ((m, k), (n, k)), linear_of, 2.0 * m * n * k, dtype)


def scaled(x: Tensor, w: Tensor) -> Tensor:
    """torch's own product of 8-bit floats."""
    return torch._scaled_mm(x, w.t(), one(), one(), out_dtype=torch.float16)


@cache
def one() -> Tensor:
    return torch.ones((), device="cuda")


def square(*widths: int) -> tuple[tuple[int, int], ...]:
    return ((4096, 4096), *((4096, n) for n in widths))


L = 4096
CASES = [
    Case("plain", graphs.matmul, square(L), lambda x, w: [x @ w], 2 * L**3),
    Case("linear", graphs.linear, square(L), lambda x, w: [x @ w.T], 2 * L**3),
    Case(
        "bias gelu",
        graphs.bias_gelu,
        (*square(L), (L,)),
        lambda x, w, b: [F.gelu(x @ w + b)],
        2 * L**3,
        compiled=True,
    ),
    Case("residual", graphs.residual, square(L, L), lambda x, w, r: [x @ w + r], 2 * L**3),
    Case(
        "bias gelu residual",
        graphs.bias_gelu_residual,
        (*square(L), (L,), (L, L)),
        lambda x, w, b, r: [F.gelu(x @ w + b) + r],
        2 * L**3,
        compiled=True,
    ),
    Case(
        "gate up",
        graphs.gate_up,
        ((L, L), (L, 11008), (L, 11008)),
        lambda x, g, u: [F.silu(x @ g) * (x @ u)],
        4 * L * L * 11008,
        compiled=True,
    ),
    Case(
        "qkv",
        graphs.qkv,
        square(L, 1024, 1024),
        lambda x, *ws: [x @ w for w in ws],
        2 * L * L * 6144,
    ),
    Case(
        "qkv bias",
        graphs.qkv_bias,
        (*square(L, 1024, 1024), (L,), (1024,), (1024,)),
        lambda x, q, k, v, a, b, c: [x @ q + a, x @ k + b, x @ v + c],
        2 * L * L * 6144,
        compiled=True,
    ),
    Case(
        "scores",
        graphs.scores(16),
        ((2, 2048, 2048), (2, 2048, 2048)),
        lambda q, k: [heads(q, 16) @ heads(k, 16).transpose(-1, -2) * 0.125],
        2 * 2 * 16 * 2048 * 2048 * 128,
        compiled=True,
    ),
    Case(
        "values",
        graphs.values(16),
        ((2, 16, 2048, 2048), (2, 2048, 2048)),
        lambda p, v: [(p @ heads(v, 16)).permute(0, 2, 1, 3).reshape(v.shape)],
        2 * 2 * 16 * 2048 * 2048 * 128,
    ),
    Case(
        "project heads",
        graphs.project_heads(16),
        ((2, 2048, 2048), (2048, 2048)),
        lambda x, w: [heads(x @ w, 16).contiguous()],
        2 * 4096 * 2048 * 2048,
    ),
    linear("odd 1000", 1000, 1000, 1000),
    linear("1 row", 1, 11008, L),
    linear("16 rows", 16, 11008, L),
    linear("64 rows", 64, L, L),
    linear("300 rows", 300, L, L),
    linear("777 rows", 777, 1024, L),
    linear("split, 16 rows", 16, L, 14336),
    linear("split, 64 rows", 64, 128, 16384),
    linear("split, 512 rows", 512, 512, 16384),
    linear("pitch 808", 1500, 3000, 808),
    linear("tiny K", 2048, L, 16),
    linear("tall", 65536, 64, 128),
    Case(
        "16 rows, gate up",
        graphs.gate_up,
        ((16, L), (L, 11008), (L, 11008)),
        lambda x, g, u: [F.silu(x @ g) * (x @ u)],
        4 * 16 * L * 11008,
        compiled=True,
    ),
    Case("bfloat16", graphs.matmul, square(L), lambda x, w: [x @ w], 2 * L**3, BRAIN),
    Case(
        "bfloat16 bias gelu",
        graphs.bias_gelu,
        (*square(L), (L,)),
        lambda x, w, b: [F.gelu(x @ w + b)],
        2 * L**3,
        BRAIN,
        True,
    ),
    Case(
        "left transposed",
        graphs.left_transposed,
        square(L),
        lambda x, w: [x.T @ w],
        2 * L**3,
    ),
    Case(
        "two outputs",
        graphs.two_outputs,
        square(L),
        lambda x, w: [x @ w, F.relu(x @ w)],
        2 * L**3,
        compiled=True,
    ),
    Case("float32", graphs.matmul, square(L), lambda x, w: [x @ w], 2 * L**3, FLOAT),
    Case(
        "float32 linear",
        graphs.linear,
        ((1000, 1000),) * 2,
        lambda x, w: [x @ w.T],
        2e9,
        FLOAT,
    ),
    linear("float16 odd pitch", 1000, 1001, 999),
    linear("odd columns", 256, 333, L),
    linear("odd K", 256, L, 999),
    Case("float8", float8, square(L), linear_of, 2 * L**3, FP8, peer=scaled),
    Case("float8, 16 rows", float8, ((16, L), (L, L)), linear_of, 32 * L**2, FP8, peer=scaled),
    *(
        Case(
            name,
            int4,
            ((m, L), (n, L // 8), (n, L // 128)),
            lambda x, q, s: [x @ int4_weight(q, s).T],
            2 * m * n * L,
            dtypes=(HALF, INT, HALF),
            peer=lambda x, q, s: x @ int4_weight(q, s).T,
            compiled=True,
        )
        for name, m, n in (("int4, 1 row", 1, 11008), ("int4, 16 rows", 16, 11008))
    ),
    Case(
        "residual, sums of squares",
        residual_squares(128),
        square(L, L),
        lambda x, w, r: squares_beside(x @ w + r),
        2 * L**3,
        compiled=True,
    ),
    Case(
        "low-rank updates side by side",
        projections,
        ((L, L), *((L, 16),) * 3),
        lambda x, *ws: [x @ w for w in ws],
        96 * L**2,
    ),
    Case(
        "experts side by side",
        separate,
        tuple(s for m in (768, 256, 512, 64) for s in ((m, 2048), (2048, 1024))),
        lambda *t: [x @ w for x, w in zip(t[::2], t[1::2], strict=True)],
        2 * 1600 * 2048 * 1024,
    ),
]
