"""The forms of a convolution's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean
from types import NoneType
from typing import Any

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ..base import OnCPU, unranked, write_on_cpu
from ..cpu.machine import machine_of
from ..forms import Form, Ranked, Writer
from ..gemm.epilogue import operations_of
from ..gemm.hopper.config import HopperConfig
from ..gemm.mma.kernel import emit_gemm_mma
from ..gemm.mma.plan import MmaConfig
from ..gemm.mma.rank import mma_ranked
from ..gemm.runs.shape import RunsConfig
from ..gemm.simt.config import SimtConfig
from ..gemm.simt.kernel import emit_gemm_simt, simt_ranked
from ..gpu.memory import WIDEST
from ..program.expr import conjunction
from ..versions import (
    Branch,
    Multiple,
    Size,
    fewest_of,
    joined,
    known_size,
    of_both_ends,
    read_at,
    tables_by_size,
)
from .cpu.kernel import write_convolution
from .depthwise.config import DepthwiseConfig
from .depthwise.kernel import emit_depthwise
from .depthwise.problem import direct_problem
from .depthwise.rank import depthwise_ranked, moved_bytes
from .depthwise.rank import ranked as direct_ranked
from .geometry import Convolution, read_convolution
from .hopper import (
    RimConfig,
    StreamConfig,
    emit_hopper,
    emit_rims,
    emit_streams,
    hopper_ranked,
    rims_ranked,
    streams_ranked,
)
from .products import as_products
from .runs import emit_convolution_runs, runs_ranked
from .typical import several, with_sizes


def _read_on_cpu(func: tirx.PrimFunc, exact: bool) -> tuple[OnCPU, Convolution | None]:
    """The function, and the convolution that it is if it can be read as one."""
    problem = OnCPU(func, exact)
    try:
        convolution = read_convolution(func, exact)
    except Unsupported:
        return problem, None
    return problem, None if convolution.contraction.has_partials else convolution


def _emit_on_cpu(
    problem: tuple[OnCPU, Convolution | None], hw: HardwareProfile, config: None
) -> tirx.PrimFunc:
    """The loops of a convolution; those of any group where no form takes it."""
    loops, convolution = problem
    try:
        if convolution is not None:
            return write_convolution(loops.func, convolution, machine_of(hw))
    except Unsupported:
        pass
    return write_on_cpu(loops, hw)


SIZES, EXTENTS = (8, 32, 128, 1024), (4, 32, 64, 128, 1024)
"""Of images, their sides, or lengths: for the direct form, and for products. Sides of 33 read at 8,
32 and 112 alone took 11.1 us in tiles of 256 x 128, 7.3 in those for this side (H200, 2026-11-28).
"""
LENGTHS = (16, 64, 256, 1024, 8192)
"""Of lines that the direct form slides along."""
MOST, OF_MULTIPLES = 3, 2
"""Versions, and those of lines that vectors divide."""


def _whole(form: Form) -> Form:
    """A form that computes all results, and reduces none."""

    def checked(convolution: Convolution) -> Convolution:
        if convolution.contraction.has_partials:
            raise Unsupported("reductions of results")
        return convolution

    return replace(
        form,
        rank=lambda convolution, hw, policy: form.rank(checked(convolution), hw, policy),
        emit=lambda convolution, hw, config: form.emit(checked(convolution), hw, config),
    )


def _of_any_size(form: Form) -> Form:
    """A form whose configurations for some sizes are those for any: where several are typical, by
    the geometric mean of what they take.
    """

    def rank(convolution: Convolution, hw: HardwareProfile, policy: Policy) -> Ranked:
        lists = [form.rank(c, hw, policy) for c in several(convolution)]
        return lists[0] if len(lists) == 1 else _in_the_mean(lists)

    return replace(form, rank=rank)


def _in_the_mean(lists: Sequence[Ranked]) -> Ranked:
    """The configurations that all lists have, by the geometric mean of their seconds; all of the
    last one where there is none.
    """
    found: dict[Any, list[float]] = {}
    own: dict[Any, Any] = {}
    for ranked in lists:
        for seconds, config in ranked:
            alike = _without_order(config)
            found.setdefault(alike, []).append(seconds)
            own[alike] = config
    common = [alike for alike, each in found.items() if len(each) == len(lists)]
    ranked = [(geometric_mean(found[alike]), own[alike]) for alike in common]
    return sorted(ranked, key=lambda entry: entry[0]) or lists[-1]


def _without_order(config: Any) -> Any:
    """A configuration without the order of its tiles, which each size has its own of."""
    return replace(config, group_m=1) if hasattr(config, "group_m") else config


def _of_products(form: Form) -> Form:
    """A form of matrix products, for convolutions as such."""
    return replace(
        form,
        rank=lambda convolution, hw, policy: form.rank(as_products(convolution), hw, policy),
        emit=lambda convolution, hw, config: form.emit(as_products(convolution), hw, config),
    )


def write_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of its one symbolic size (images, their side, or
    length), or one that is as good at all; None where it has none or several.
    """
    size = known_size(func)
    if size is None:
        return None
    try:
        problem = writer.read(func, policy.rounding == "exact")
        if isinstance(writer.ranked(problem, hw, policy)[0][1], DepthwiseConfig):
            branches = _of_direct(writer, func, size, problem, hw, policy)
            return joined(branches, func) if branches else None
        ends = read_at(EXTENTS, size.bounds)
        tables = tables_by_size(writer, func, size, problem, ends, hw, policy)
        found = of_both_ends(tables, MOST)
        found = found or fewest_of(list(tables.values()), list(tables), MOST)
        if any(isinstance(v.config, DepthwiseConfig) for v in found):
            return None  # the one kernel is another's, which the direct form beats at few sizes
        branches = [
            Branch(writer.emit(problem, hw, policy, v.config), size.upto(v.most), v.most)
            for v in found
        ]
    except Unsupported:
        return None  # the one kernel is chosen among those that can be written
    return joined(branches, func) if branches else None


def _of_direct(
    writer: Writer,
    func: tirx.PrimFunc,
    size: Size,
    problem: Convolution,
    hw: HardwareProfile,
    policy: Policy,
) -> list[Branch]:
    """Kernels of the direct form for ranges of a size: the shortest lines, those that vectors
    divide, and all others.
    """
    direct, branches = direct_problem(problem), []
    lines = not direct.numbers.along_channels and direct.numbers.windows[-1].is_open
    ends, multiple = read_at(LENGTHS if lines else SIZES, size.bounds), None
    if lines and direct.load is not None:
        widest = WIDEST // direct.numbers.bytes
        divided = Multiple.dividing(func, direct.load.source.ty.shape[-1], widest)
        if divided is not None and direct.numbers.width < widest:
            multiple = divided
    every = fewest_of([_direct_table(problem, n, hw) for n in ends], ends, MOST)
    for version in every:
        kernel = writer.emit(problem, hw, policy, version.config)
        branches.append(Branch(kernel, size.upto(version.most), version.most))
    if multiple is None or not branches:
        return branches
    aligned = writer.read(multiple.func, policy.rounding == "exact")
    short = branches[:-1][:1]  # the shortest lines, also those that vectors divide
    ends = [n for n in ends if not short or n > short[0].name]
    tables = [_direct_table(aligned, n // multiple.of, hw) for n in ends]
    apart = []
    for version in fewest_of(tables, ends, OF_MULTIPLES):
        kernel = writer.emit(aligned, hw, policy, version.config)
        end = "beyond" if version.most is None else f"upto_{version.most}"
        divides = conjunction(multiple.divides, size.upto(version.most))
        apart.append(Branch(kernel, divides, f"of{multiple.of}_{end}", multiple.sizes))
    return [*short, *apart, *branches[len(short) :]]


def _direct_table(problem: Convolution, size: int, hw: HardwareProfile) -> Ranked:
    """What the direct form takes for a convolution of one symbolic size at about a value of it."""
    known = with_sizes(problem, images=size, positions=size)
    operations = float(operations_of(problem.segment).total())
    return direct_ranked(direct_problem(problem, known).numbers, hw, moved_bytes(known), operations)


CUDA_WRITER = Writer(
    "a convolution",
    read_convolution,
    (
        _of_any_size(Form("rims", RimConfig, rims_ranked, emit_rims)),
        _of_any_size(Form("streams", StreamConfig, streams_ranked, emit_streams)),
        _of_any_size(Form("hopper", HopperConfig, hopper_ranked, emit_hopper)),
        _whole(Form("depthwise", DepthwiseConfig, depthwise_ranked, emit_depthwise)),
        _of_any_size(_whole(Form("runs", RunsConfig, runs_ranked, emit_convolution_runs))),
        _of_any_size(_of_products(Form("mma", MmaConfig, mma_ranked, emit_gemm_mma))),
        _of_any_size(_of_products(Form("simt", SimtConfig, simt_ranked, emit_gemm_simt))),
    ),
    write_versions,
)

CPU_WRITER = Writer(
    "a convolution", _read_on_cpu, (Form("loops", NoneType, unranked, _emit_on_cpu),)
)
