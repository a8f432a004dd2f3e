"""Kernels of every family for each architecture, to machine code: what nvcc and ptxas say of them.

    python -m tests.portable --arch sm_86 --arch sm_120 --only 'gemm/*' --out FILE
    python -m tests.portable --arch sm_80 --random 200
    python -m tests.portable --random 200 --in-turn

No GPU is needed. A case is planned with the profile of the card that stands for the architecture,
its kernels are written, lowered and compiled by the flags of the package. The result has registers
and spilled bytes of each kernel, and what was refused; the status is 1 if a kernel was, or has
instructions that are of one architecture alone (sm_90a may have its own). Kernels that spill are
listed. With `--random`, the cases are random problems instead: graphs of Relax operators and
programs of torch in turn. With `--in-turn`, each case is compiled for one of the architectures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import tvm
from tvm.relax import op

from tests.benchmarks.golden import texts
from tests.benchmarks.golden_cases import cases, drawn
from tests.benchmarks.plans.random_graphs import module_of
from tests.support.graphs import module
from tvm_fusion._version import __version__
from tvm_fusion.config import HardwareProfile, load_policy, resolve_target
from tvm_fusion.config.architecture import read_architecture
from tvm_fusion.errors import BuildError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load_functions
from tvm_fusion.host.cores import available_cores
from tvm_fusion.runtime.build.cubin_cache import compile_source
from tvm_fusion.runtime.build.cuda_compiler import find_compiler
from tvm_fusion.runtime.build.resources import resources_of

ARCHITECTURES = (
    "sm_80",
    "sm_86",
    "sm_87",
    "sm_89",
    "sm_90",
    "sm_90a",
    "sm_100",
    "sm_103",
    "sm_110",
    "sm_120",
    "sm_121",
)
OF_ONE_ALONE = re.compile(r"wgmma|setmaxnreg|tcgen05|\bclusterlaunchcontrol\b")
"""Instructions that no portable form has."""

NAMED = (
    "attention/attention_d64",
    "attention/attention_causal_d128",
    "attention/attention_d256",
    "attention/attention_document",
    "attention/attention_mask",
    "attention/decode_16x2048",
    "conv/depthwise_28_5x5_240",
    "conv/grouped_56_3_128_128_g32",
    "conv/resnet_b1_28_3x3s2_256_256",
    "conv/resnet_b1_stem",
    "conv/up_8_4_512_512",
    "gemm/gate_up",
    "gemm/gemm_16x4096x14336",
    "gemm/gemm_256x4096x4096",
    "gemm/gemm_4096x4096x4096",
    "gemm/gemm_fp8_4096x4096x4096",
    "gemm/gemv_int4",
    "gemm/moe",
    "gemm/rmsnorm_qkv",
    "gemm_sweep/sweep_1000x1001x999_bias_gelu",
    "memory/cross_entropy",
    "memory/rmsnorm",
    "memory/transpose_add",
    "memory_more/bias_gradient",
    "memory_more/concat_slice_pad",
    "memory_more/groupnorm_silu_nhwc",
    "memory_more/rmsnorm_backward_bf16",
    "memory_more/softmax_65536",
    "memory_more/quantise_fp8",
    "memory_more/sum_middle_axis",
    "weights/int8",
)


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel."""

    name: str
    registers: int
    spill_bytes: int


@dataclass
class Compiled:
    """What came of a case for an architecture; `wrong` is empty where all is well."""

    case: str
    arch: str
    families: list[str]
    kernels: list[Kernel]
    wrong: list[str]


def _recurrence() -> tvm.IRModule:
    import torch

    from tvm_fusion.frontends import load

    lstm = torch.nn.LSTM(128, 128, batch_first=True).half().eval()
    return load((lstm, (torch.zeros(2, 16, 128, dtype=torch.float16),)))


def _attention() -> tvm.IRModule:
    inputs = [((2, 4, 128, 64), "float16")] * 3
    return module(lambda bb, q, k, v: op.nn.attention(q, k, v), *inputs)


def _tanh(emit: Callable) -> Callable:
    return lambda bb, x: bb.emit(op.tanh(emit(bb, x)))


OWN: dict[str, Callable[[], tvm.IRModule]] = {
    "small/product": lambda: module(
        lambda bb, x, w: op.matmul(x, w), ((64, 256), "float16"), ((256, 128), "float16")
    ),
    "small/square": lambda: module(
        lambda bb, x, w: op.matmul(x, w), ((1024, 1024), "float16"), ((1024, 1024), "float16")
    ),
    "small/attention": _attention,
    "small/softmax": lambda: module(lambda bb, x: op.nn.softmax(x), ((64, 1000), "float16")),
    "small/float8": lambda: module(
        lambda bb, x: op.astype(bb.emit(op.multiply(x, x)), "float8_e4m3fn"), ((64, 128), "float32")
    ),
    "small/from_float8": lambda: module(
        lambda bb, x: op.astype(x, "float32"), ((64, 128), "float8_e4m3fn")
    ),
    "small/scan": lambda: module(
        _tanh(lambda bb, x: op.cumsum(x, axis=-1)), ((64, 5000), "float32")
    ),
    "small/recurrence": _recurrence,
}


def names() -> list[str]:
    """All cases."""
    return [*OWN, *NAMED]


RANDOM = "drawn/"


def random_names(count: int) -> list[str]:
    """So many random problems."""
    return [f"{RANDOM}{number}" for number in range(count)]


def made(name: str) -> tvm.IRModule:
    """The module of a case."""
    if name.startswith(RANDOM):
        seed, is_program = divmod(int(name.removeprefix(RANDOM)), 2)
        return drawn(seed) if is_program else module_of(f"random:{seed}")
    return OWN[name]() if name in OWN else cases()[name].make()


def profile_for(arch: str) -> tuple[tvm.target.Target, HardwareProfile]:
    """The target of an architecture and the profile that stands for it where no GPU is."""
    _, hw = resolve_target({"kind": "cuda", "arch": arch})
    return hw.to_target(), hw


def sources(name: str, arch: str) -> tuple[list[str], dict[str, str]]:
    """The families of a case's groups, and the CUDA sources of its kernels."""
    target, hw = profile_for(arch)
    families, found = set(), {}
    for function, part in load_functions(made(name)).items():
        planned = Planned.of(part, target, hw, load_policy({"probe": "off"}))
        planned, written = texts(planned)
        families |= {group.kernel_class for group in planned.plan.groups}
        found |= {
            f"{function}.{kernel}" + (f"_{number}" if number else ""): text
            for kernel, (kind, parts) in written.items()
            for number, text in enumerate(parts)
            if kind == "kernels" and "__global__" in text
        }
    return sorted(families), found


def compiled(name: str, arch: str, pool: ThreadPoolExecutor) -> Compiled:
    """The kernels of a case as machine code."""
    families, found = sources(name, arch)
    portable = not read_architecture(arch).has_wgmma
    wrong = [
        f"{kernel}: {match[0]}"
        for kernel, text in found.items()
        if portable and (match := OF_ONE_ALONE.search(text))
    ]
    kernels = []
    codes = {kernel: pool.submit(compile_source, text, arch) for kernel, text in found.items()}
    for kernel, code in codes.items():
        try:
            for k in resources_of(code.result()):
                kernels.append(Kernel(k.name, k.registers, k.spill_bytes))
        except BuildError as error:
            wrong.append(f"{kernel}: {error}")
    return Compiled(name, arch, families, kernels, wrong)


def pairs_of(
    chosen: Iterable[str], archs: Sequence[str], in_turn: bool = False
) -> list[tuple[str, str]]:
    """Each case with each architecture, or with one of them in turn."""
    if in_turn:
        return list(zip(chosen, itertools.cycle(archs), strict=False))
    return list(itertools.product(chosen, archs))


def swept(pairs: Iterable[tuple[str, str]], jobs: int | None = None) -> list[Compiled]:
    """Cases, each for an architecture."""
    found = []
    with ThreadPoolExecutor(jobs or available_cores()) as pool:
        for name, arch in pairs:
            found.append(compiled(name, arch, pool))
            _say(found[-1])
    return found


def _say(one: Compiled) -> None:
    most = max(one.kernels, key=lambda k: (k.spill_bytes, k.registers), default=None)
    said = f"{most.registers} registers, {most.spill_bytes} bytes spilled" if most else "no kernel"
    print(f"{one.case} {one.arch}: {'; '.join(one.wrong) or said}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.portable", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", action="append", help=f"all by default: {ARCHITECTURES}")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name")
    parser.add_argument("--random", type=int, metavar="N", help="N random problems instead")
    parser.add_argument("--in-turn", action="store_true", help="a case for one architecture each")
    parser.add_argument("--jobs", type=int, help="compilers at a time, one a core by default")
    parser.add_argument("--out", type=Path, help="where the result is written, as JSON")
    args = parser.parse_args(argv)
    began = time.monotonic()
    chosen = names() if args.random is None else random_names(args.random)
    chosen = [name for name in chosen if fnmatch(name, args.only)]
    pairs = pairs_of(chosen, args.arch or ARCHITECTURES, args.in_turn)
    found = swept(pairs, args.jobs)
    wrong = [f"{one.case} {one.arch}: {why}" for one in found for why in one.wrong]
    if args.out:
        result = {
            "version": __version__,
            "compiler": find_compiler().version,
            "seconds": round(time.monotonic() - began),
            "cases": [asdict(one) for one in found],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(wrong) or f"{len(found)} cases compile")
    spilling = [
        f"{one.case} {one.arch}: {kernel.name} spills {kernel.spill_bytes} bytes"
        for one in found
        for kernel in one.kernels
        if kernel.spill_bytes
    ]
    kernels = sum(len(one.kernels) for one in found)
    print("\n".join([*spilling, f"{len(spilling)} of {kernels} kernels spill"]))
    return int(bool(wrong) or not found)


if __name__ == "__main__":
    sys.exit(main())
