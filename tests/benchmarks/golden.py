"""Whether a change of the source changes what is compiled: digests of plans and kernels.

    python -m tests.benchmarks.golden                           compares all cases; 1 if one differs
    python -m tests.benchmarks.golden --only 'gemm/*' --device nvidia_h200 --part 1/4
    python -m tests.benchmarks.golden --update                  writes what was found

Each case of `golden_cases` is planned for each device, and its kernels are written and lowered; no
GPU is needed. `tests/golden/<device>.json` holds, a case a line, the first 16 hexadecimal digits of
the sha256 of each function's plan (its JSON), of its calls with the memory that they get (as the
lowered function's script) and of each kernel: its CUDA source, on a CPU its TIR.
Caches, probing and calibration are off, the profiles are those that ship, and the CPU is one by
name, so that the machine does not matter. Cases that need a tool (torch, nvcc) of another version
than the digests were made with are left out.

A file of digests changes only in a commit whose message lists the workloads that changed, and why.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from tests.benchmarks.golden_cases import cases
from tvm_fusion.config import HardwareProfile, load_policy, load_profile
from tvm_fusion.errors import BuildError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load_functions
from tvm_fusion.host.cores import available_cores
from tvm_fusion.ir.quick_stacks import register_tensor_intrinsics
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.runtime.build.cuda_compiler import find_compiler
from tvm_fusion.runtime.build.kernel_code import KernelBuildError, kernel_sources
from tvm_fusion.runtime.build.lowering import lowering_pipeline

FOLDER = Path(__file__).parents[1] / "golden"
DEVICES = ("nvidia_h200", "nvidia_a100", "nvidia_rtx4090", "llvm_cpu")
CPU = {
    "kind": "llvm",
    "mtriple": "x86_64-unknown-linux-gnu",
    "mcpu": "znver4",
    "num-cores": 2,
}
SETTINGS = {
    "TVM_FUSION_PLAN_CACHE": "0",
    "TVM_FUSION_KERNEL_CACHE": "0",
    "TVM_FUSION_CALIBRATE": "0",
    "TVM_FUSION_EARLY_LAUNCHES": "0",  # waits are put in by the build, loads in front of them here
    "OMP_NUM_THREADS": "1",  # each process has a core
}
MADE_WITH = "made with"  # the versions of tools, among the cases of a file
LINE_EVERY_S = 15.0

Digests = dict[str, dict[str, str]]
"""Of a case for a device: "plan" and "calls" by function, "kernels" by PrimFunc."""


# ---- what is found


def digests(mod: tvm.IRModule, device: str, policy: Mapping[str, Any]) -> Digests:
    """The digests of a module for a device."""
    target, hw = device_of(device)
    found: Digests = {"plan": {}, "calls": {}, "kernels": {}}
    functions = load_functions(mod)
    for function, part in functions.items():
        planned = Planned.of(part, target, hw, load_policy({"probe": "off", **policy}))
        prefix = f"{function}." if len(functions) > 1 else ""
        planned, sources = texts(planned)
        for name, (kind, parts) in sources.items():
            text = "\n".join(parts)
            found[kind][prefix + name] = digest(text)
        found["plan"][function] = digest(replace(planned.plan, versions={}).to_json())
    return found


Parts = tuple[str, tuple[str, ...]]


def texts(planned: Planned) -> tuple[Planned, dict[str, Parts]]:
    """The lowered functions of a module and the sources of its kernels, each what it is and its
    texts (a function of TVM's may be several sources), by name, and the plan that was left: groups
    whose kernels do not lower are cut, as they are in a build.
    """
    target = planned.target
    while True:
        written = planned.write()
        with target:
            lowered = lowering_pipeline(target)(written.mod)
        functions = {gvar.name_hint: func for gvar, func in lowered.functions_items()}
        try:
            found = {name: _text(name, func, target) for name, func in functions.items()}
        except KernelBuildError as error:
            planned, changed = written.without(error.failures, RefusalCode.BUILD)
            if not changed:
                raise
        else:
            known = {name: text for name, text in found.items() if text is not None}
            return written.planned, known


def _text(name: str, func: tvm.ir.BaseFunc, target: tvm.target.Target) -> Parts | None:
    """What it is, and its texts; None for TVM's computation of symbolic sizes, whose order is that
    of addresses.
    """
    if not isinstance(func, tirx.PrimFunc):
        return "calls", (func.script(),)
    if func.attrs.get("tirx.is_host_func", False):
        return None
    units = kernel_sources(func, target, name) if target.kind.name == "cuda" else ()
    return "kernels", tuple(unit.source for unit in units) or (func.script(),)


def digest(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def device_of(name: str) -> tuple[tvm.target.Target, HardwareProfile]:
    """The target and the shipped profile of a device."""
    hw = load_profile(name)
    return (tvm.target.Target(CPU) if hw.kind == "llvm" else hw.to_target()), hw


def versions() -> dict[str, str]:
    """The tools that cases may need, by name."""
    try:
        compiler = find_compiler()
        nvcc = compiler.version if compiler.kind == "nvcc" else "none"
    except BuildError:
        nvcc = "none"
    return {"torch": metadata.version("torch").partition("+")[0], "nvcc": nvcc}


def found_of(name: str, devices: Iterable[str]) -> tuple[str, dict[str, Digests]]:
    """A case and its digests by device; what it raised is one of "error"."""
    case = cases()[name]
    found: dict[str, Digests] = {}
    mod = None
    for device in devices:
        try:
            mod = case.make() if mod is None else mod
            found[device] = digests(mod, device, case.policy)
        except Exception as error:  # the other cases are compared all the same
            found[device] = {"error": {f"{type(error).__name__}: {error}".splitlines()[0]: ""}}
    return name, found


# ---- what is stored


def stored(device: str, folder: Path = FOLDER) -> dict[str, Any]:
    """What a device's file holds: digests by case, and `MADE_WITH`."""
    file = folder / f"{device}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def store(device: str, kept: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Writes a device's file, a sorted line a case."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(kept[name], sort_keys=True)}" for name in sorted(kept)
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"{device}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def change(before: Digests | None, after: Digests) -> str:
    """What differs, by names: "plan, kernels fused_add -fused_exp +exp"; "" if nothing does."""
    if "error" in after:
        return "error " + " ".join(after["error"])
    if before is None:
        return "new"
    told = []
    for part in sorted({*before, *after}, reverse=True):
        old, new = before.get(part, {}), after.get(part, {})
        names = [n for n in old if n in new and old[n] != new[n]]
        names += [f"-{n}" for n in old if n not in new] + [f"+{n}" for n in new if n not in old]
        if names:
            told.append(part if names == ["main"] else " ".join([part, *names]))
    return ", ".join(told)


# ---- the command


def main(argv: list[str] | None = None, folder: Path = FOLDER) -> int:
    """Runs the command on the files of a folder; returns its exit status."""
    args, known, here = _arguments(argv), cases(), versions()
    start = time.monotonic()
    kept = {device: stored(device, folder) for device in args.device}
    others = {device: other_tools(held, here) for device, held in kept.items()}
    names = _share([name for name in sorted(known) if fnmatch(name, args.only)], args.part)
    if not any(fnmatch(n, args.only) for n in {*known, *itertools.chain(*kept.values())}):
        sys.exit(f"--only: no case is called {args.only}")
    pairs = [(n, d) for n in names for d in args.device if known[n].is_for(d)]
    if not args.update:
        pairs, every = [(n, d) for n, d in pairs if known[n].needs not in others[d]], pairs
    elif any(others.values()) and len(names) < len(known):
        sys.exit(f"the digests are of {_listed(others)}: update all of them at once")
    changed, failed = [], 0
    for name, found in _shown(_all_found(pairs, args.jobs), len({name for name, _ in pairs})):
        for device, now in found.items():
            if what := change(kept[device].get(name), now):
                changed.append(f"{name} {device}: {what}")
            if "error" in now:
                failed += 1
            else:
                kept[device][name] = now
    for device, held in kept.items():
        for name in [n for n in held if n != MADE_WITH and fnmatch(n, args.only)]:
            if name not in known or not known[name].is_for(device):
                changed.append(f"{name} {device}: gone")
                del held[name]
    for line in sorted(changed):
        print(line)
    minutes = (time.monotonic() - start) / 60
    print(f"{len(changed)} of {len(pairs)} changed, {failed} failed, in {minutes:.1f} minutes")
    if args.update:
        for device, held in kept.items():
            store(device, held | {MADE_WITH: here}, folder)
    elif len(pairs) < len(every):
        print(f"{len(every) - len(pairs)} left out: their digests are of {_listed(others)}")
    return int(failed > 0 or (len(changed) > 0 and not args.update))


def other_tools(held: Mapping[str, Any], here: Mapping[str, str]) -> dict[str, str]:
    """The tools of which the digests are of another version, which it tells."""
    return {t: version for t, version in held.get(MADE_WITH, {}).items() if here[t] != version}


def _listed(others: Mapping[str, Mapping[str, str]]) -> str:
    return ", ".join(
        sorted({" ".join(item) for found in others.values() for item in found.items()})
    )


def _share(names: list[str], part: str) -> list[str]:
    first, parts = (int(n) if n.isdecimal() else 0 for n in part.partition("/")[::2])
    if not 1 <= first <= parts:
        sys.exit(f"--part: expected I/N with I from 1 to N, got {part}")
    return names[first - 1 :: parts]


def _all_found(
    pairs: Iterable[tuple[str, str]], jobs: int
) -> Iterator[tuple[str, dict[str, Digests]]]:
    """`found_of` of each case with its devices."""
    grouped = itertools.groupby(pairs, key=lambda pair: pair[0])
    tasks = [(name, [device for _, device in group]) for name, group in grouped]
    if jobs == 1:
        yield from itertools.starmap(found_of, tasks)
        return
    context, prepare = multiprocessing.get_context("spawn"), register_tensor_intrinsics
    with ProcessPoolExecutor(jobs, context, prepare) as pool:  # which DLight imports, at length
        yield from pool.map(found_of, [name for name, _ in tasks], [d for _, d in tasks])


def _shown(found: Iterable, total: int) -> Iterable:
    """The same, with a bar of `rich` where it is installed and someone looks, else lines."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            pass
        else:
            console = Console(stderr=True)
            return track(found, "cases", total, console=console, transient=True)
    return _with_lines(found, total)


def _with_lines(found: Iterable, total: int) -> Iterator:
    said = time.monotonic()
    for done, one in enumerate(found, 1):
        if time.monotonic() - said >= LINE_EVERY_S:
            said = time.monotonic()
            print(f"{done} of {total} cases", file=sys.stderr, flush=True)
        yield one


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.golden", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--update", action="store_true", help="write what is found")
    add("--only", default="*", metavar="PATTERN", help="cases by name, with * and ?")
    add("--device", action="append", choices=DEVICES, help="all by default")
    add("--part", default="1/1", metavar="I/N", help="each N-th case, from the I-th")
    add("--jobs", type=int, default=available_cores(), help="processes, one a core by default")
    args = parser.parse_args(argv)
    args.device = args.device or list(DEVICES)
    return args


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    sys.exit(main())
