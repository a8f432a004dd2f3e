"""Random problems of each kernel class (`kernel_problems`), by a sample of the configurations that
its space offers; and modules of several launches, each kernel in a configuration of the sample.

    python -m tests.kernel_sweep --problems 300 --configs 12 --lines FILE --out FILE

Each kernel for a GPU runs on the emulator twice: outputs and shared memory hold other bytes the
second time. It is right if its numbers are (`check.rules`, float64 by `check.reference`), if both
runs give the same bytes (what is read was written), and if each byte of an output is stored once,
counted over all threads. Does not count: stores through tensor maps (Hopper) and bare pointers (the
fragments of an attention), stores on a CPU (`nest`) and in modules of several launches, whose
outputs and fresh memory are poisoned.

The kernels of some problems are compiled together. The result is written as they are done; what is
in `--lines FILE` already is not tried again.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tests.support import cuda_on_cpu, hopper_on_cpu
from tests.support.cuda_on_cpu import EmulationError, Lowered, Watch, run_cuda_on_cpu
from tests.support.kernel_cases import numpy_dtype
from tests.support.kernel_problems import CLASSES, MODULES, Problem, drawn_module
from tests.support.module_on_cpu import EmulatedModule
from tvm_fusion._version import __version__
from tvm_fusion.check.allowance import Reference, computed_dtypes
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.plain import plain_module
from tvm_fusion.check.reference import poisoned
from tvm_fusion.check.rules import check_output
from tvm_fusion.check.verify import judge_outputs
from tvm_fusion.config import (
    HardwareProfile,
    Policy,
    load_policy,
    load_profile,
    resolve_target,
)
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels.registry import family
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.transform.apply.write_kernels import write_kernel
from tvm_fusion.tuning.session.choices import text_of

DEVICES = ("nvidia_h200", "nvidia_a100", "nvidia_rtx4090")
ON_CPU = ("nest",)
POLICY = load_policy(None)
FILLS = (0xFF, 0x3C)
TOGETHER = 36  # problems whose kernels are compiled together
EVERYTHING = sorted({*CLASSES, *MODULES})


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
    return swept_together([(name, seed)], configs)[0]


def swept_together(problems: Iterable[tuple[str, int]], configs: int) -> list[Tried]:
    """As `swept`, for problems by class and seed, whose kernels are compiled together."""
    written = [_written(name, seed, configs) for name, seed in problems]
    cuda_on_cpu.compile_together(text for one in written for text in one.texts)
    for one in written:
        try:
            for config, why in one.judged():
                one.tried.right += not why
                one.tried.wrong += [f"{config}: {why}"] * bool(why)
        except Exception as error:  # the boundary of a problem: the others are still tried
            one.tried.wrong.append(f"{type(error).__name__}: {error}")
    return [one.tried for one in written]


@dataclass
class _Written:
    """Kernels of a problem: in C++ for the emulated device, and what runs and judges them, which
    gives what is wrong by configuration.
    """

    tried: Tried
    texts: list[str] = field(default_factory=list)
    judged: Callable[[], Iterable[tuple[str, str]]] = tuple


def _written(name: str, seed: int, configs: int) -> _Written:
    rng = random.Random(f"{name} {seed}")
    if name in ON_CPU:
        return _written_for_cpu(name, seed, rng)
    tried = Tried(name, seed, DEVICES[seed % len(DEVICES)])
    if name in MODULES:
        return _written_module(tried, rng, configs)
    problem = CLASSES[name](rng, tried.device)
    func, hw = problem.func, load_profile(tried.device)
    kernels: dict[str, Lowered] = {}
    try:
        offered = [c for _, c in family(name).ranked(func, hw, POLICY)]
    except Unsupported as why:
        tried.refused.append(str(why))
        return _Written(tried)
    for config in _sample(rng, offered, configs):
        try:
            kernel = write_kernel(func, name, hw, POLICY, config)
            kernels[str(config)] = cuda_on_cpu.lower(kernel)
        except Unsupported as why:
            tried.refused.append(f"{config}: {why}")
        except Exception as error:  # the boundary of a candidate: the others are still tried
            tried.wrong.append(f"{config}: {type(error).__name__}: {error}")

    def judged() -> Iterator[tuple[str, str]]:
        judge = _Judge(problem)
        yield from ((config, judge.wrong(kernel)) for config, kernel in kernels.items())

    plain = [cuda_on_cpu.translated(k) for k in kernels.values() if not _on_hopper(k)]
    return _Written(tried, plain, judged)


def _written_for_cpu(name: str, seed: int, rng: random.Random) -> _Written:
    """A class of CPUs has one way to write a kernel; the second run begins in other memory."""
    target, hw = resolve_target("llvm")
    tried = Tried(name, seed, "llvm")
    problem = CLASSES[name](rng, "llvm")
    with target:
        try:
            kernel = write_kernel(problem.func, name, hw, POLICY)
        except Unsupported as why:
            tried.refused.append(str(why))
            return _Written(tried)
    kernel = kernel.with_attr("global_symbol", "kernel")
    library, _ = build_functions(tvm.IRModule({"kernel": kernel}), target)
    return _Written(tried, judged=lambda: [("", _Judge(problem).wrong(library["kernel"]))])


def _written_module(tried: Tried, rng: random.Random, configs: int) -> _Written:
    """A module planned for a GPU, a few times, each kernel in some configuration of its class."""
    mod = drawn_module(tried.name, rng)
    inputs = random_inputs(mod["main"], tried.seed)
    hw = load_profile(tried.device)
    drawn, modules = [], []
    for _ in range(-(-configs // 3)):
        own = _Drawn(rng, hw)
        found = Planned.of(mod, hw.to_target(), hw, POLICY)
        modules.append(EmulatedModule.of(replace(found, tuned=own)))
        drawn.append(own.texts)
        tried.refused += modules[-1].cuts

    def judged() -> Iterator[tuple[str, str]]:
        reference = Reference(plain_module(mod, tvm.target.Target("llvm")), inputs)
        for module, texts in zip(modules, drawn, strict=True):
            try:
                yield str(texts), judge_outputs(module(inputs), reference).why
            except EmulationError as error:
                yield str(texts), str(error)

    return _Written(tried, [text for module in modules for text in module.texts()], judged)


class _Drawn:
    """Stands in for what tuning chose: for each function some configuration, of any form."""

    def __init__(self, rng: random.Random, hw: HardwareProfile) -> None:
        self._rng, self._hw = rng, hw
        self._config: Any = None
        self.texts: list[str] = []

    def choice(self, func: tirx.PrimFunc, class_name: str, policy: Policy) -> str:
        """Another one each time."""
        try:
            offered = [c for _, c in family(class_name).ranked(func, self._hw, policy)]
        except Unsupported:
            return ""
        of = self._rng.choice(list(_forms(offered).values()))
        self._config = self._rng.choice(of)
        return f"{class_name} {text_of(self._config)}"

    def kernel(
        self, func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
    ) -> tirx.PrimFunc | None:
        """The kernel of the last choice."""
        self.texts.append(text_of(self._config))
        return write_kernel(func, class_name, hw, policy, self._config)


def _sample(rng: random.Random, offered: Sequence[Any], count: int) -> list[Any]:
    """Some of each form in turn; where there are more forms than `count`, those of other problems
    are others.
    """
    forms = [rng.sample(of, len(of)) for of in _forms(offered).values()]
    rng.shuffle(forms)
    in_turn = [c for turn in itertools.zip_longest(*forms) for c in turn if c is not None]
    return in_turn[:count]


def _forms(offered: Sequence[Any]) -> dict[Any, list[Any]]:
    """Configurations by form."""
    forms: dict[Any, list[Any]] = collections.defaultdict(list)
    for config in offered:
        forms[type(config).__name__, getattr(config, "form", None)].append(config)
    return forms


class _Judge:
    """Runs kernels of one PrimFunc and compares them with its float64 reference."""

    def __init__(self, problem: Problem) -> None:
        func, inputs = problem.func, problem.inputs
        self.mod = _module(func, inputs)
        self.inputs = problem.given or [np.asarray(x) for x in random_inputs(self.mod["main"])]
        self.dtypes = [str(p.ty.dtype) for p in func.params[inputs:]]
        self.shapes = [tuple(int(e) for e in p.ty.shape) for p in func.params[inputs:]]
        self.reference = Reference(self.mod, self.inputs)
        self.computed = computed_dtypes(self.mod)

    def wrong(self, kernel: Lowered | Callable) -> str:
        """What is wrong with a kernel; empty if nothing is."""
        try:
            runs = [self._run(kernel, fill) for fill in FILLS]
        except EmulationError as error:
            return str(error)
        (outputs, watch), (again, _) = runs
        for i, (x, y) in enumerate(zip(outputs, again, strict=True)):
            if x.tobytes() != y.tobytes():
                return f"output {i} depends on what was in memory before"
        for i, counts in enumerate(watch.counts):
            if counts.any() and not (counts == 1).all():
                at = int(np.argmax(counts != 1)) // outputs[i].itemsize
                return f"element {at} of output {i} is stored {counts[counts != 1][0]} times"
        return self._numbers(outputs)

    def _run(self, kernel: Lowered | Callable, fill: int) -> tuple[list[np.ndarray], Watch]:
        outputs = [
            np.frombuffer(
                bytes([fill & 1 if d == "bool" else fill]) * _bytes(s, d), _of(d)
            ).reshape(s)
            for s, d in zip(self.shapes, self.dtypes, strict=True)
        ]
        outputs = [x.copy() for x in outputs]
        watch = Watch(len(outputs), fill)
        arrays = [*(x.copy() for x in self.inputs), *outputs]
        if not isinstance(kernel, Lowered):
            return _run_on_cpu(kernel, arrays)[len(self.inputs) :], watch
        if not _on_hopper(kernel):
            run_cuda_on_cpu(kernel, arrays, watch)
        else:
            hopper_on_cpu.run_hopper_on_cpu(kernel, arrays)
        return outputs, watch

    def _numbers(self, outputs: Sequence[np.ndarray]) -> str:
        for i, (x, ref) in enumerate(zip(outputs, self.reference.outputs, strict=True)):
            of = (x, None, ref, self.dtypes[i], self.computed[i])
            if not check_output(*of).passed:
                check = check_output(*of, self.reference.bounds[i])
                if not check.passed:
                    return f"output {i}: {check.why}"
        return ""


def _run_on_cpu(kernel: Callable, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a kernel makes of arrays, in memory full of other numbers."""
    device = tvm.cpu()
    tensors = [tvm.runtime.tensor(x, device) for x in arrays]
    with poisoned(device):
        kernel(*tensors)
    return [tensor.numpy() for tensor in tensors]


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


# ---- the command


def summary(tried: Sequence[Tried], command: str) -> dict[str, Any]:
    """The result that is committed: counts, and all that is wrong."""
    classes = {}
    for name in sorted({t.name for t in tried}):
        of = [t for t in tried if t.name == name]
        classes[name] = {
            "problems": len(of),
            "seeds": [min(t.seed for t in of), max(t.seed for t in of)],
            "right": sum(t.right for t in of),
            "refused": len([why for t in of for why in t.refused]),
            "wrong": [f"{t.seed} {t.device} {why}" for t in of for why in t.wrong],
        }
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "versions": {"tvm_fusion": __version__, "tvm": tvm.__version__},
        "right": sum(t.right for t in tried),
        "wrong": sum(len(t.wrong) for t in tried),
        "classes": classes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=300, help="of each class")
    parser.add_argument("--configs", type=int, default=12, help="of each problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", nargs="+", default=EVERYTHING)
    parser.add_argument("--lines", type=Path, help="a file for a line a problem")
    parser.add_argument("--out", type=Path, help="a file for the result")
    options = parser.parse_args()
    lines = options.lines.read_text().splitlines() if _exists(options.lines) else []
    found = {(t.name, t.seed): t for t in (Tried(**json.loads(line)) for line in lines)}
    seeds = range(options.seed, options.seed + options.problems)
    keys = [(name, seed) for seed in seeds for name in options.classes]
    keys = [key for key in keys if key not in found]
    command = "python -m tests.kernel_sweep --problems {problems} --configs {configs} --seed {seed}"
    for first in range(0, len(keys), TOGETHER):
        for tried in swept_together(keys[first : first + TOGETHER], options.configs):
            found[tried.name, tried.seed] = tried
            if options.lines:
                with options.lines.open("a") as file:
                    file.write(json.dumps(asdict(tried)) + "\n")
            for why in tried.wrong:
                print(tried.name, tried.seed, tried.device, why, flush=True)
        cuda_on_cpu.forget_together()
        if options.out:
            told = summary(list(found.values()), command.format(**vars(options)))
            options.out.write_text(json.dumps(told, indent=1) + "\n")


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
