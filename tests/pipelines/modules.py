"""The modules that pipelines of users hold, with inputs and their results in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """A module and a call of each of its functions.

    Attributes
    ----------
    make : callable
        Makes the module, anew each time.
    calls : mapping of str to callable
        By function: given a random generator, the inputs and the result.
    """

    make: Callable[[], tvm.IRModule]
    calls: dict[str, Callable[[np.random.Generator], tuple[Arrays, Arrays]]]


def _floats(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.uniform(-1, 1, shape).astype("float32")


# ---- a block: a product with bias and activation, a residual, a norm


@I.ir_module
class _Block:
    @R.function
    def main(
        x: R.Tensor((24, 48), "float32"),
        w: R.Tensor((48, 48), "float32"),
        b: R.Tensor((48,), "float32"),
        gamma: R.Tensor((48,), "float32"),
        beta: R.Tensor((48,), "float32"),
    ) -> R.Tensor((24, 48), "float32"):
        with R.dataflow():
            h = R.matmul(x, w)
            h1 = R.add(h, b)
            h2 = R.nn.relu(h1)
            r = R.add(h2, x)
            y = R.nn.layer_norm(r, gamma, beta, axes=[-1])
            R.output(y)
        return y


def _block_call(random: np.random.Generator) -> tuple[Arrays, Arrays]:
    x, w = _floats(random, 24, 48), _floats(random, 48, 48)
    b, gamma, beta = (_floats(random, 48) for _ in range(3))
    r = np.maximum(x @ w + b, 0) + x
    scaled = (r - r.mean(-1, keepdims=True)) / np.sqrt(r.var(-1, keepdims=True) + 1e-5)
    return [x, w, b, gamma, beta], [scaled * gamma + beta]


# ---- rows: a softmax between products of elements, a transpose, two results


@I.ir_module
class _Rows:
    @R.function
    def main(x: R.Tensor((7, 33), "float32"), y: R.Tensor((7, 33), "float32")):
        with R.dataflow():
            a = R.multiply(x, y)
            s = R.nn.softmax(a, axis=-1)
            b = R.add(s, x)
            t = R.permute_dims(b)
            m = R.sum(b, axis=[0])
            R.output(t, m)
        return (t, m)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rows_call(random: np.random.Generator) -> tuple[Arrays, Arrays]:
    x, y = _floats(random, 7, 33), _floats(random, 7, 33)
    b = _softmax(x * y) + x
    return [x, y], [b.T, b.sum(0)]


# ---- symbolic: the head of a language model behind a prefill of any length


@I.ir_module
class _Symbolic:
    @R.function
    def main(
        x: R.Tensor((1, "n", 32), "float32"),
        gamma: R.Tensor((32,), "float32"),
        w: R.Tensor((32, 40), "float32"),
    ) -> R.Tensor((1, 1, 40), "float32"):
        n = T.int64()
        with R.dataflow():
            h = R.nn.rms_norm(x, gamma, axes=[-1])
            s = R.nn.silu(h)
            last = R.strided_slice(s, axes=[1], begin=[n - 1], end=[n])
            flat = R.reshape(last, R.shape([1, 1, 32]))
            y = R.matmul(flat, w)
            R.output(y)
        return y


def _rms(x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma


def _symbolic_call(random: np.random.Generator) -> tuple[Arrays, Arrays]:
    x, gamma, w = _floats(random, 1, 5, 32), _floats(random, 32), _floats(random, 32, 40)
    h = _rms(x, gamma)
    return [x, gamma, w], [(h / (1 + np.exp(-h)))[:, -1:, :] @ w]


# ---- several functions: prefill and decode share weights and a private function; a branch


@I.ir_module
class _Several:
    @R.function(private=True)
    def norm(x: R.Tensor(("n", 32), "float32"), gamma: R.Tensor((32,), "float32")) -> R.Tensor(
        ("n", 32), "float32"
    ):
        with R.dataflow():
            h = R.nn.rms_norm(x, gamma, axes=[-1])
            y = R.multiply(h, R.const(0.5, "float32"))
            R.output(y)
        return y

    @R.function
    def prefill(
        x: R.Tensor(("n", 32), "float32"),
        gamma: R.Tensor((32,), "float32"),
        w: R.Tensor((32, 32), "float32"),
    ) -> R.Tensor(("n", 32), "float32"):
        cls = _Several
        with R.dataflow():
            h = cls.norm(x, gamma)
            p = R.matmul(h, w)
            g = R.nn.gelu(p)
            y = R.add(g, x)
            R.output(y)
        return y

    @R.function
    def decode(
        x: R.Tensor((1, 32), "float32"),
        gamma: R.Tensor((32,), "float32"),
        w: R.Tensor((32, 32), "float32"),
        hot: R.Tensor((), "bool"),
    ) -> R.Tensor((1, 32), "float32"):
        cls = _Several
        with R.dataflow():
            h = cls.norm(x, gamma)
            p = R.matmul(h, w)
            R.output(p)
        if hot:
            e = R.exp(p)
            y = R.add(e, x)
        else:
            y = R.subtract(p, x)
        return y


def _gelu(x: np.ndarray) -> np.ndarray:
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def _prefill_call(random: np.random.Generator) -> tuple[Arrays, Arrays]:
    x, gamma, w = _floats(random, 6, 32), _floats(random, 32), _floats(random, 32, 32)
    return [x, gamma, w], [_gelu(_rms(x, gamma) * 0.5 @ w) + x]


def _decode_call(random: np.random.Generator) -> tuple[Arrays, Arrays]:
    x, gamma, w = _floats(random, 1, 32), _floats(random, 32), _floats(random, 32, 32)
    p = _rms(x, gamma) * 0.5 @ w
    hot = bool(random.integers(2))
    return [x, gamma, w, np.array(hot)], [np.exp(p) + x if hot else p - x]


# ---- what nn.Module.export_tvm writes: one function, not called `main`


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(20, 36)
        self.down = nn.Linear(36, 20, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.silu(self.up(x))) + x


def _export() -> tvm.IRModule:
    mod, _ = _Network().export_tvm({"forward": {"x": nn.spec.Tensor((9, 20), "float32")}})
    return mod


def _export_call(random: np.random.Generator) -> tuple[Arrays, Arrays]:
    x, up, bias = _floats(random, 9, 20), _floats(random, 36, 20), _floats(random, 36)
    down = _floats(random, 20, 36)
    h = x @ up.T + bias
    return [x, up, bias, down], [(h / (1 + np.exp(-h))) @ down.T + x]


# ---- virtual devices


def _vdevice_module(target: dict) -> Callable[[], tvm.IRModule]:
    def make() -> tvm.IRModule:
        here = relax.VDevice(target)
        builder = relax.BlockBuilder()
        kind = relax.TensorType((12, 18), "float32", vdevice=here)
        x, y = relax.Var("x", kind), relax.Var("y", kind)
        with builder.function("main", [x, y]):
            with builder.dataflow():
                a = builder.emit(relax.op.multiply(x, y))
                b = builder.emit(relax.op.tanh(a))
                out = builder.emit_output(relax.op.sum(b, axis=[1]))
            builder.emit_func_output(out)
        mod = builder.get()
        mod.update_global_info("vdevice", [here])
        return mod

    return make


def _vdevice_call(random: np.random.Generator) -> tuple[Arrays, Arrays]:
    x, y = _floats(random, 12, 18), _floats(random, 12, 18)
    return [x, y], [np.tanh(x * y).sum(1)]


def cases(target: dict) -> dict[str, Case]:
    """The modules by name, for a target."""
    return {
        "block": Case(lambda: _Block, {"main": _block_call}),
        "rows": Case(lambda: _Rows, {"main": _rows_call}),
        "symbolic": Case(lambda: _Symbolic, {"main": _symbolic_call}),
        "several": Case(lambda: _Several, {"prefill": _prefill_call, "decode": _decode_call}),
        "export": Case(_export, {"forward": _export_call}),
        "vdevice": Case(_vdevice_module(target), {"main": _vdevice_call}),
    }
