"""Random inputs for a graph, and whether its launches compute what the unfused ones do."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tvm_fusion.check.inputs import ranges_of
from tvm_fusion.check.plan_runner import PlanRunner
from tvm_fusion.runtime.timing.launch_kernels import LaunchSpec, LaunchWriter, build_launches

from .graph_launches import PreparedGraph
from .random_graphs import module_of

# Largest |fused - unfused| / max |unfused|. The unfused launches round every intermediate value,
# the fused ones do not, so that this is above the error of either.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
TOLERANCE_8_BITS = 0.3
DIFFERENT_INTEGERS = 1e-3  # share of elements; a rounding may flip an argmax


def fill_inputs(runner: PlanRunner, key: str) -> None:
    """Random values for all parameters, drawn on the device, the same for the same key.

    Floats are normal; matrices of suites other than the first are scaled down, so that products
    stay within half precision. Integers are within what their readers take (`ranges_of`), or 0 and
    1.
    """
    ranges = ranges_of(module_of(key)["main"])
    for number, name in enumerate(runner.buffers.params):
        shape, dtype = runner.buffers.type_of(name)
        generator = torch.Generator(device=_torch_device(runner))
        generator.manual_seed(zlib.crc32(name.encode()))
        value = _draw(shape, dtype, ranges.get(name, range(2)), generator)
        if key.startswith("suite:") and number and len(shape) > 1 and value.is_floating_point():
            value = (value.float() * shape[-1] ** -0.5).to(value.dtype)
        bytes_of(runner, name).copy_(value.reshape(-1).view(torch.uint8))


def _draw(shape: tuple[int, ...], dtype: str, integers: range, generator: Any) -> torch.Tensor:
    kind = getattr(torch, dtype)
    device = generator.device
    if kind is torch.bool or not kind.is_floating_point:
        low = integers.start if kind.is_signed else 0
        high = 2 if kind is torch.bool else integers.stop
        return torch.randint(low, high, shape, generator=generator, device=device).to(kind)
    wide = kind if kind.itemsize > 1 else torch.float32
    return torch.randn(shape, generator=generator, device=device, dtype=wide).to(kind)


def _torch_device(runner: PlanRunner) -> str:
    return "cuda" if runner.device.type == "cuda" else "cpu"


def bytes_of(runner: PlanRunner, key: str) -> torch.Tensor:
    """The bytes of a tensor as a torch tensor: the memory itself."""
    shape, dtype = runner.buffers.type_of(key)
    size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return torch.from_dlpack(runner.buffers.memory(key))[:size]


def check_launches(
    runner: PlanRunner, prepared: PreparedGraph, say: Callable[[str], None]
) -> dict[LaunchSpec, str]:
    """Launches whose numbers are not those of the unfused plan, with the reason.

    Each launch gets the unfused plan's values as inputs, and finds NaN where it writes.
    """
    unfused = prepared.plans[0]
    if not runner.can_run(unfused.specs):
        raise RuntimeError("the unfused plan cannot run")
    for spec in unfused.specs:
        say(f"unfused launch {names_of(runner.graph, spec)}")
        for t in spec.stores:
            runner.buffers.poison(runner.graph.tensors[t].name)
        runner.launch(spec)
    runner.device.sync()
    wrong: dict[LaunchSpec, str] = {}
    known = set(unfused.specs)
    for spec in dict.fromkeys(s for p in prepared.plans for s in p.specs):
        if spec in known or runner.kernel(spec) is None:
            continue
        say(f"launch {names_of(runner.graph, spec)} {spec.kernel_class}")
        found = _difference(runner, spec)
        if found and (found.missing or not _is_rounding(runner, spec)):
            wrong[spec] = found.why
    return wrong


@dataclass(frozen=True, slots=True)
class Difference:
    """What is wrong with some values; `missing` of them were not written, or are nan."""

    why: str
    missing: int = 0


def _is_rounding(runner: PlanRunner, spec: LaunchSpec) -> bool:
    """Whether the launch is right if it rounds every value as the unfused launches do.

    The kernel is written once more, with `rounding="exact"`: what is wrong in it stays wrong, and
    an error that came from rounding less is gone.
    """
    exact = dataclasses.replace(runner.policy, rounding="exact")
    writer = LaunchWriter(runner.low, runner.graph, runner.hw, exact)
    built = build_launches(writer, [spec], runner.target)
    if not built.kernels:
        return False
    (kernel,) = built.kernels
    tensors = [runner.buffers.tensor(key) for key in kernel.arguments]
    return not _difference(runner, spec, lambda: built.library[kernel.symbol](*tensors))


def _difference(runner: PlanRunner, spec: LaunchSpec, call: Callable[[], Any] | None = None) -> str:
    names = [runner.graph.tensors[t].name for t in spec.stores]
    kept = {name: bytes_of(runner, name).clone() for name in names}
    for name in names:
        runner.buffers.poison(name)
    if call is None:
        runner.launch(spec)
    else:
        call()
    runner.device.sync()
    found, tolerance = [], _tolerance(runner, spec)
    for name in names:
        dtype = getattr(torch, runner.buffers.type_of(name)[1])
        given = bytes_of(runner, name)
        if why := difference(given.view(dtype), kept[name].view(dtype), tolerance):
            found.append(dataclasses.replace(why, why=f"{name}: {why.why}"))
        given.copy_(kept[name])
    if not found:
        return None
    return Difference("; ".join(f.why for f in found), sum(f.missing for f in found))


def _tolerance(runner: PlanRunner, spec: LaunchSpec) -> float:
    """By the narrowest dtype that a value may have gone through."""
    ops = [runner.graph.ops[i] for i in spec.ops]
    dtypes = {runner.graph.tensors[t].dtype for op in ops for t in (*op.inputs, *op.outputs)}
    floats = [d for d in dtypes if "float" in d]
    return max((TOLERANCE.get(d, TOLERANCE_8_BITS) for d in floats), default=0.0)


def difference(given: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Difference | None:
    """What is wrong with a flat tensor; None where it is near enough to the wanted one.

    `tolerance` is the largest error allowed, relative to the largest wanted value.
    Where the wanted value is not finite nothing is asked.
    """
    if not wanted.is_floating_point():
        share = (given != wanted).float().mean().item()
        near = wanted.dtype is not torch.bool and wanted.dtype.itemsize == 1
        if near and share > DIFFERENT_INTEGERS:  # quantised values: one step is a rounding
            share = ((given.int() - wanted.int()).abs() > 1).float().mean().item()
        why = f"{share:.2%} of the integers differ"
        return Difference(why) if share > DIFFERENT_INTEGERS else None
    wide = torch.float64 if wanted.dtype is torch.float64 else torch.float32
    given, wanted = given.to(wide), wanted.to(wide)
    finite = wanted.isfinite()
    largest = torch.where(finite, wanted, 0).abs().max().item()
    error = torch.where(finite, (given - wanted).abs(), 0).nan_to_num(torch.inf).max().item()
    if error > tolerance * max(largest, 1e-6):
        count = int((torch.where(finite, (given - wanted).abs(), 0) > tolerance * largest).sum())
        missing = int((given.isnan() & finite).sum())
        why = (
            f"largest error {error:.3g} where values go up to {largest:.3g}; {count} elements "
            f"above {tolerance:g}, {missing} nan, of {wanted.numel()}"
        )
        return Difference(why, missing)
    return None


def names_of(graph: Any, spec: LaunchSpec) -> dict[str, list[str]]:
    """Operators and written tensors of a launch by their names."""
    return {
        "ops": [graph.ops[i].name for i in spec.ops],
        "stores": [graph.tensors[t].name for t in spec.stores],
    }
