"""Random problems of each kernel class, by a sample of the configurations that its space offers.

    python -m tests.kernel_sweep --problems 300 --configs 12 --out FILE

Each kernel runs on the emulator twice: outputs and shared memory hold other bytes the second time.
It is right if its numbers are (`check.rules`, float64 by `check.reference`), if both runs give the
same bytes (what is read was written), and if each byte of an output is stored once, counted over
all threads. Does not count: stores of tensor maps (Hopper), kernels of several launches.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests import cuda_on_cpu, hopper_on_cpu
from tests.cuda_on_cpu import EmulationError, Lowered, Watch, run_cuda_on_cpu
from tests.kernel_cases import fuse, numpy_dtype
from tvm_fusion.check.bounds import Reference
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.precision import computed_dtypes
from tvm_fusion.check.rules import check_output
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.registry import kernel_class
from tvm_fusion.transform.write_kernels import write_kernel

SIZES = sorted({*range(1, 12), 15, 16, 17, 19, 23, 31, 32, 33, 37, 47, 63, 64, 65, 67, 70})
ELEMENTS = 6000
DTYPES = ("float32", "float16", "bfloat16", "float32")
DEVICES = ("nvidia_h200", "nvidia_a100", "nvidia_rtx4090")
POLICY = load_policy(None)
FILLS = (0xFF, 0x3C)

Made = tuple[Callable, list[tuple[tuple[int, ...], str]]]
CLASSES: dict[str, Callable[[random.Random], Made]] = {}


@dataclass
class Tried:
    """What came of the configurations of a problem."""

    name: str
    seed: int
    device: str
    right: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def swept(name: str, seed: int, configs: int) -> Tried:
    """Tries a sample of the configurations of one problem."""
    rng = random.Random(f"{name} {seed}")
    emit, inputs = CLASSES[name](rng)
    tried = Tried(name, seed, DEVICES[seed % len(DEVICES)])
    hw = load_profile(tried.device)
    func = fuse(emit, *inputs)
    kernels: dict[str, Lowered] = {}
    try:
        offered = kernel_class(name).configs(func, hw, POLICY)
    except Unsupported as why:
        tried.refused.append(str(why))
        return tried
    for config in _sample(rng, offered, configs):
        try:
            kernel = write_kernel(func, name, hw, POLICY, config)
            kernels[str(config)] = cuda_on_cpu.lower(kernel)
        except Unsupported as why:
            tried.refused.append(f"{config}: {why}")
    plain = [k for k in kernels.values() if not _on_hopper(k)]
    cuda_on_cpu.compile_together(map(cuda_on_cpu.translated, plain))
    judge = _Judge(func, len(inputs))
    for config, kernel in kernels.items():
        why = judge.wrong(kernel)
        tried.right += not why
        if why:
            tried.wrong.append(f"{config}: {why}")
    return tried


def _sample(rng: random.Random, offered: Sequence[Any], count: int) -> list[Any]:
    """The first, and some of each form, of which there may be few."""
    forms: dict[Any, list[Any]] = collections.defaultdict(list)
    for config in offered[1:]:
        forms[type(config).__name__, getattr(config, "form", None)].append(config)
    each = -(-count // max(1, len(forms)))
    some = [c for of in forms.values() for c in rng.sample(of, min(each, len(of)))]
    return [*offered[:1], *some]


class _Judge:
    """Runs kernels of one PrimFunc and compares them with its float64 reference."""

    def __init__(self, func: tirx.PrimFunc, inputs: int) -> None:
        self.mod = _module(func, inputs)
        self.inputs = [np.asarray(x) for x in random_inputs(self.mod["main"])]
        self.dtypes = [str(p.ty.dtype) for p in func.params[inputs:]]
        self.shapes = [tuple(int(e) for e in p.ty.shape) for p in func.params[inputs:]]
        self.reference = Reference(self.mod, self.inputs)
        self.computed = computed_dtypes(self.mod)

    def wrong(self, kernel: Lowered) -> str:
        """What is wrong with a kernel; empty if nothing is."""
        try:
            runs = [self._run(kernel, fill) for fill in FILLS]
        except EmulationError as error:
            return str(error)
        (outputs, watch), (again, _) = runs
        for i, (x, y) in enumerate(zip(outputs, again, strict=True)):
            if x.tobytes() != y.tobytes():
                return f"output {i} depends on what was in memory before"
        for i, counts in enumerate(() if _on_hopper(kernel) else watch.counts):
            if not (counts == 1).all():
                at = int(np.argmax(counts != 1)) // outputs[i].itemsize
                return f"element {at} of output {i} is stored {counts[counts != 1][0]} times"
        return self._numbers(outputs)

    def _run(self, kernel: Lowered, fill: int) -> tuple[list[np.ndarray], Watch]:
        outputs = [
            np.frombuffer(
                bytes([fill & 1 if d == "bool" else fill]) * _bytes(s, d), _of(d)
            ).reshape(s)
            for s, d in zip(self.shapes, self.dtypes, strict=True)
        ]
        outputs = [x.copy() for x in outputs]
        watch = Watch(len(outputs), fill)
        with hopper_on_cpu.translation(_on_hopper(kernel)):
            run_cuda_on_cpu(kernel, [*(x.copy() for x in self.inputs), *outputs], watch)
        return outputs, watch

    def _numbers(self, outputs: Sequence[np.ndarray]) -> str:
        for i, (x, ref) in enumerate(zip(outputs, self.reference.outputs, strict=True)):
            of = (x, None, ref, self.dtypes[i], self.computed[i])
            if not check_output(*of).passed:
                check = check_output(*of, self.reference.bounds[i])
                if not check.passed:
                    return f"output {i}: {check.why}"
        return ""


def _module(func: tirx.PrimFunc, inputs: int) -> tvm.IRModule:
    """A module whose `main` calls a PrimFunc."""
    builder = relax.BlockBuilder()
    called = builder.add_func(func, "kernel")
    types = [relax.TensorType([int(e) for e in p.ty.shape], str(p.ty.dtype)) for p in func.params]
    params = [relax.Var(f"x{i}", ty) for i, ty in enumerate(types[:inputs])]
    with builder.function("main", params):
        with builder.dataflow():
            of = types[inputs:]
            call = relax.call_tir(called, params, of if len(of) > 1 else of[0])
            out = builder.emit_output(call)
        builder.emit_func_output(out)
    return builder.get()


def _of(dtype: str) -> np.dtype:
    return numpy_dtype(dtype)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype="int64")) * _of(dtype).itemsize


def _on_hopper(kernel: Lowered) -> bool:
    return any(word in kernel.source for word in ("CUtensorMap", "wgmma"))


# ---- problems


def problem(make: Callable[[random.Random], Made]) -> Callable[[random.Random], Made]:
    CLASSES[make.__name__] = make
    return make


def _shape(rng: random.Random, axes: Sequence[int], most: int = ELEMENTS) -> tuple[int, ...]:
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice(axes)))
        if np.prod(shape) <= most:
            return shape


def _reduced(rng: random.Random, x: Any, bb: Any, axes: list[int]) -> Any:
    """A reduction over axes, alone or with what stands around it; or two that depend."""
    reduce = rng.choice((op.sum, op.max, op.min, op.mean))
    kind = rng.choice(("plain", "before", "behind", "softmax", "variance", "centred"))
    if kind == "softmax" and len(axes) == 1:
        return op.nn.softmax(x, axes[0])
    if kind == "variance":
        mean = bb.emit(op.mean(x, axes, keepdims=True))
        centred = bb.emit(op.subtract(x, mean))
        return op.mean(bb.emit(op.multiply(centred, centred)), axes)
    if kind == "centred":
        return op.subtract(x, bb.emit(reduce(x, axes, keepdims=True)))
    x = bb.emit(op.exp(x)) if kind == "before" else x
    result = bb.emit(reduce(x, axes))
    return op.multiply(result, result) if kind == "behind" else result


@problem
def column(rng: random.Random) -> Made:
    shape = _shape(rng, (2, 2, 3))
    axes = rng.choice([[0], [0]] if len(shape) == 2 else [[0], [0, 1], [1]])
    return _wide(lambda bb, x: _reduced(rng, x, bb, axes)), [(shape, rng.choice(DTYPES))]


@problem
def row(rng: random.Random) -> Made:
    shape = _shape(rng, (1, 2, 2, 3))
    first = rng.randrange(len(shape))
    axes = list(range(first, len(shape)))
    return _wide(lambda bb, x: _reduced(rng, x, bb, axes)), [(shape, rng.choice(DTYPES))]


@problem
def pointwise(rng: random.Random) -> Made:
    shape = _shape(rng, (1, 2, 3))
    other = tuple(1 if rng.random() < 0.3 else e for e in shape)
    dtype = rng.choice((*DTYPES, "int32", "int8"))
    combine = rng.choice((op.add, op.multiply, op.maximum))

    def emit(bb, x, y):
        both = bb.emit(combine(x, y))
        return op.maximum(both, bb.emit(op.multiply(x, x))) if rng.random() < 0.5 else both

    return emit, [(shape, dtype), (other, dtype)]


@problem
def transpose(rng: random.Random) -> Made:
    shape = _shape(rng, (2, 2, 3))
    order = sorted(range(len(shape)), key=lambda a: (a != len(shape) - 1, a))
    turned = tuple(shape[a] for a in order)
    dtype = rng.choice((*DTYPES, "int8", "float64"))
    inputs = [(shape, dtype), (turned, dtype)]
    return lambda bb, x, y: op.add(bb.emit(op.permute_dims(x, order)), y), inputs


@problem
def gemm(rng: random.Random) -> Made:
    m, k, n = (rng.choice(SIZES) for _ in range(3))
    dtype, turned = rng.choice(DTYPES), rng.random() < 0.5
    kind = rng.choice(("plain", "bias", "relu", "residual", "tanh"))

    others = {"bias": [(n,)], "relu": [(n,)], "residual": [(m, n)], "tanh": [(m, n)]}

    def emit(bb, x, w, *more):
        w = bb.emit(op.permute_dims(w)) if turned else w
        y = bb.emit(op.matmul(x, w, out_dtype="float32"))
        y = bb.emit(op.astype(y, dtype)) if dtype != "float32" else y
        if kind == "plain":
            return op.multiply(y, relax.const(2, dtype))
        if kind == "tanh":
            return op.multiply(bb.emit(op.tanh(y)), *more)
        y = op.add(y, *more)
        return op.nn.relu(bb.emit(y)) if kind == "relu" else y

    shapes = [(m, k), (n, k) if turned else (k, n), *others.get(kind, [])]
    return emit, [(s, dtype) for s in shapes]


def _wide(emit: Callable) -> Callable:
    """The same in float32 for halves, as `Decompose` does it."""

    def emit_wide(bb: Any, x: Any) -> Any:
        dtype = str(x.ty.dtype)
        if dtype == "float32":
            return emit(bb, x)
        return op.astype(bb.emit(emit(bb, bb.emit(op.astype(x, "float32")))), dtype)

    return emit_wide


# ---- the command


def sweep(classes: Sequence[str], problems: int, configs: int, seed: int) -> Iterator[Tried]:
    """Problems of each class in turn."""
    for n in range(seed, seed + problems):
        for name in classes:
            yield swept(name, n, configs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=300, help="of each class")
    parser.add_argument("--configs", type=int, default=12, help="of each problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", nargs="+", default=sorted(CLASSES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {
        name: {"problems": 0, "right": 0, "refused": 0, "wrong": []} for name in options.classes
    }
    for tried in sweep(options.classes, options.problems, options.configs, options.seed):
        entry = found[tried.name]
        entry["problems"] += 1
        entry["right"] += tried.right
        entry["refused"] += len(tried.refused)
        entry["wrong"] += [f"{tried.seed} {tried.device} {why}" for why in tried.wrong]
        for why in tried.wrong:
            print(tried.name, tried.seed, tried.device, why, flush=True)
    command = (
        f"python -m tests.kernel_sweep --problems {options.problems} --configs {options.configs}"
    )
    text = json.dumps({"command": command, "classes": found}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
