"""The demo model: one pre-norm transformer block, written as a user would write it in Relax.

    x -> RMSNorm -> Q, K, V -> heads -> RoPE(Q, K) -> causal attention -> output projection -> + x
      -> RMSNorm -> SwiGLU MLP (silu(gate) * up, down) -> + residual

The weights are constants from a fixed seed, laid out (in, out), scaled by 1 / sqrt(in).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import Expr, op

from .errors import InputError

_SEED = 2026
_ROPE_BASE = 10000.0
_EPSILON = 1e-5
_DTYPES = ("float16", "float32")


@dataclass(frozen=True, slots=True)
class DemoShape:
    """Sizes of a transformer block: `x` is [batch, seq, hidden], the MLP is `mlp` wide."""

    batch: int
    seq: int
    hidden: int
    heads: int
    mlp: int
    dtype: str

    def __post_init__(self) -> None:
        sizes = (self.batch, self.seq, self.hidden, self.heads, self.mlp)
        if min(sizes) < 1:
            raise InputError(f"demo block: every size has to be at least 1, got {sizes}")
        if self.hidden % (2 * self.heads):
            raise InputError(
                f"demo block: hidden ({self.hidden}) has to be a multiple of twice the heads "
                f"({self.heads}), since RoPE rotates the halves of each head"
            )
        if self.dtype not in _DTYPES:
            raise InputError(f"demo block: dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")

    @property
    def width(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads


DEMO_SHAPES = {
    "llvm": DemoShape(batch=1, seq=128, hidden=256, heads=4, mlp=688, dtype="float32"),
    "cuda": DemoShape(batch=2, seq=2048, hidden=2048, heads=16, mlp=5504, dtype="float16"),
}


def demo_module(kind: str) -> tvm.IRModule:
    """The demo block in the size for a kind of target.

    Parameters
    ----------
    kind : str
        "llvm" (float32, 1x128x256) or "cuda" (float16, 2x2048x2048).

    Returns
    -------
    tvm.IRModule
        `main(x) -> y`, both [batch, seq, hidden].

    Examples
    --------
    >>> from tvm_fusion.demo import demo_module
    >>> [p.name for p in demo_module("llvm")["main"].params]
    ['x']
    """
    shape = _shape_for(kind)
    return demo_block(shape.batch, shape.seq, shape.hidden, shape.heads, shape.mlp, shape.dtype)


def demo_weights(hidden: int, mlp: int, dtype: str) -> dict[str, np.ndarray]:
    """The weights of the demo block by name, (in, out) each; the norms' are vectors near 1."""
    extents = {
        "q": (hidden, hidden),
        "k": (hidden, hidden),
        "v": (hidden, hidden),
        "o": (hidden, hidden),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }
    seeds = range(_SEED + 10, _SEED + 10 + len(extents))
    with ThreadPoolExecutor() as pool:
        values = pool.map(lambda s, e: _normal(s, e, e[0] ** -0.5, dtype), seeds, extents.values())
        weights = dict(zip(extents, values, strict=True))
    for i, name in enumerate(("attention_norm", "mlp_norm")):
        weights[name] = 1 + _normal(_SEED + 20 + i, (hidden,), 0.1, dtype)
    return weights


def rope_tables(seq: int, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of RoPE's angles, [1, seq, 1, width], the two halves of each row alike."""
    frequencies = _ROPE_BASE ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(seq), np.concatenate([frequencies, frequencies]))
    angles = angles.reshape(1, seq, 1, width)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def causal_mask(seq: int, dtype: str) -> np.ndarray:
    """[1, 1, seq, seq]: 0 where a key is visible, the lowest finite value where it is not."""
    hidden = np.triu(np.ones((seq, seq), bool), k=1)
    return np.where(hidden, np.finfo(dtype).min, 0).astype(dtype)[None, None]


def demo_block(batch: int, seq: int, hidden: int, heads: int, mlp: int, dtype: str) -> tvm.IRModule:
    """A pre-norm transformer block in high-level Relax.

    Parameters
    ----------
    batch, seq, hidden, heads, mlp : int
        `x` is [batch, seq, hidden]; `hidden` is a multiple of 2 * heads.
    dtype : str
        "float32" or "float16".

    Returns
    -------
    tvm.IRModule
        `main(x) -> y`, both [batch, seq, hidden]; weights, RoPE tables and mask are constants.

    Raises
    ------
    InputError
        If a size or the dtype does not fit.
    """
    shape = DemoShape(batch, seq, hidden, heads, mlp, dtype)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((batch, seq, hidden), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = _Block(builder, shape)(x)
            y = builder.emit_output(y, name_hint="y")
        builder.emit_func_output(y)
    return builder.get()


class _Block:
    """Emits the block; every method returns the variable of its result."""

    def __init__(self, builder: relax.BlockBuilder, shape: DemoShape):
        self._builder = builder
        self._shape = shape
        weights = demo_weights(shape.hidden, shape.mlp, shape.dtype)
        self._weights = {name: relax.const(value) for name, value in weights.items()}
        tables = rope_tables(shape.seq, shape.width, shape.dtype)
        self._cos, self._sin = (relax.const(table) for table in tables)

    def __call__(self, x: Expr) -> Expr:
        normal = self._norm("attention_norm", x)
        x = self._emit("attention_residual", op.add(x, self._attention(normal)))
        normal = self._norm("mlp_norm", x)
        return op.add(x, self._mlp(normal))

    def _attention(self, x: Expr) -> Expr:
        s = self._shape
        q = self._permute("q_heads", self._rope("q", self._heads("q", x)), [0, 2, 1, 3])
        k = self._permute("k_heads", self._rope("k", self._heads("k", x)), [0, 2, 3, 1])
        v = self._permute("v_heads", self._heads("v", x), [0, 2, 1, 3])
        scores = self._emit("scores", op.matmul(q, k))
        scale = relax.const(s.width**-0.5, s.dtype)
        scores = self._emit("scaled", op.multiply(scores, scale))
        scores = self._emit("masked", op.add(scores, relax.const(causal_mask(s.seq, s.dtype))))
        weights = self._emit("weights", op.nn.softmax(scores, axis=-1))
        mixed = self._permute("mixed", self._emit("pv", op.matmul(weights, v)), [0, 2, 1, 3])
        mixed = self._emit("merged", op.reshape(mixed, (s.batch, s.seq, s.hidden)))
        return self._project("o", mixed)

    def _mlp(self, x: Expr) -> Expr:
        gate = self._emit("silu", op.nn.silu(self._project("gate", x)))
        return self._project("down", self._emit("gated", op.multiply(gate, self._project("up", x))))

    def _rope(self, name: str, x: Expr) -> Expr:
        """x * cos + rotate_half(x) * sin, rotate_half([a, b]) = [-b, a]."""
        half = self._shape.width // 2
        first = self._emit(f"{name}_first", op.strided_slice(x, [3], [0], [half]))
        second = self._emit(f"{name}_second", op.strided_slice(x, [3], [half], [2 * half]))
        negative = self._emit(f"{name}_negative", op.negative(second))
        rotated = self._emit(f"{name}_rotated", op.concat([negative, first], axis=3))
        cosine = self._emit(f"{name}_cos", op.multiply(x, self._cos))
        sine = self._emit(f"{name}_sin", op.multiply(rotated, self._sin))
        return self._emit(f"{name}_rope", op.add(cosine, sine))

    def _heads(self, name: str, x: Expr) -> Expr:
        s = self._shape
        shape = (s.batch, s.seq, s.heads, s.width)
        return self._emit(f"{name}_split", op.reshape(self._project(name, x), shape))

    def _norm(self, name: str, x: Expr) -> Expr:
        norm = op.nn.rms_norm(x, self._weights[name], axes=[-1], epsilon=_EPSILON)
        return self._emit(name, norm)

    def _project(self, name: str, x: Expr) -> Expr:
        return self._emit(f"{name}_proj", op.matmul(x, self._weights[name]))

    def _permute(self, name: str, x: Expr, axes: list[int]) -> Expr:
        return self._emit(name, op.permute_dims(x, axes))

    def _emit(self, name: str, value: Expr) -> Expr:
        return self._builder.emit(value, name_hint=name)


def _shape_for(kind: str) -> DemoShape:
    if kind not in DEMO_SHAPES:
        raise InputError(f"demo: kind {kind!r} is none of {', '.join(DEMO_SHAPES)}")
    return DEMO_SHAPES[kind]


def _normal(seed: int, shape: tuple[int, ...], scale: float, dtype: str) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values * np.float32(scale)).astype(dtype)
