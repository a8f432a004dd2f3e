"""Several kernels of an attention for ranges of its symbolic sizes: queries, keys, or both. Where a
bias or a mask has rows of a symbolic length, multiples of 8 are asked for on the host and have
kernels of their own, which read eight elements at once.

Where there may be queries without any key, those have a kernel of their own, too, which writes what
is made of zeros: maps of the TMA have elements, and tiles begin with a key that is there.

Of queries and keys that differ, both are compared; few queries have a decode kernel, written for
the most of a range. Other sizes (a batch, heads) count as the model assumes.

Does not handle: versions for multiples where there are several symbolic sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ...ir.extents import Bounds, bounds_within, known_sizes, symbols_of
from ..contraction.model import Output, size_of
from ..forms import Ranked, Writer
from ..gpu.frame import then
from ..gpu.product_frame import Frame, coordinates, f32, lower, open_kernel
from ..program.expr import (
    conjunction,
    constant,
    convert,
    dtype_of,
    linear_form,
    number,
    substitute,
)
from ..versions import (
    Box,
    Branch,
    Multiple,
    Size,
    Version,
    boxes_of,
    fewest_of,
    joined,
    kind_of,
    known_size,
    preceded,
    read_at,
    tables_by_size,
    with_size,
)
from .decode.config import DecodeConfig
from .decode.problem import read_decode
from .read.model import Attention

SIZES = (64, 128, 256, 512, 1024, 2048, 8192)
QUERIES, KEYS = (8, 64, 256, 1024, 4096), (64, 512, 2048, 8192)
"""Where both are compared."""
LAUNCH = 9e-7
"""Of predicted seconds those that are no kernel's: of few queries and keys 0.8 to 1.3 us more are
predicted than measured (H200, 2026-11-28), and versions are compared without."""
START, PART = 9e-7, 3.5e-8
"""Of the start of a decode kernel, what its end takes instead, by the partial results that a thread
reads one after the other: for 1 query of 16 heads of 64 and 3 keys, 16 of them take 1.95 us and 64
3.8; predicted are 2.3 and 2.6 (H200, 2026-11-28)."""
OF = 8
"""Halves of a vector; all `SIZES` are multiples."""
MOST, ALIGNED, ANYWHERE = 4, 3, 3
"""Most versions; those of multiples and of other sizes where both are apart."""

THREADS = 256  # of a block that fills outputs


def write_attention_versions(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc for ranges of its one symbolic size, or one that is as good
    at all; None where it has none or several.
    """
    size = known_size(func)
    if size is None:
        return _of_queries_and_keys(writer, func, hw, policy)
    exact = policy.rounding == "exact"
    problem = writer.read(func, exact)
    ends = read_at(SIZES, size.bounds)
    try:
        tables = tables_by_size(writer, func, size, problem, ends, hw, policy)
        found = _fewest(tables, MOST)
        tiled = any(not isinstance(version.config, DecodeConfig) for version in found)
        if not tiled or not _reads_symbolic_rows(problem):
            branches = _branches(writer, problem, found, size, hw, policy)
            return joined(branches, func) if branches else None
        multiple = Multiple.made(func, *size.vars, OF)
        aligned = writer.read(multiple.func, exact)
        others = tables_by_size(writer, func, size, aligned, ends, hw, policy)  # larger tiles fit
        if size.bounds.multiple % OF == 0:
            branches = _branches(writer, aligned, _fewest(others, MOST), size, hw, policy)
            branches = [replace(branch, sizes=multiple.sizes) for branch in branches]
            return joined(branches, func) if branches else None
        anywhere = _branches(writer, problem, _fewest(tables, ANYWHERE), size, hw, policy)
        branches = _branches(writer, aligned, _fewest(others, ALIGNED), size, hw, policy)
    except Unsupported:
        return None  # the one kernel is chosen among those that can be written
    found = [*(_of_multiples(branch, multiple) for branch in branches), *anywhere]
    return joined(found, func) if anywhere else None


# ---- queries and keys apart


def _of_queries_and_keys(
    writer: Writer, func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc | None:
    """The kernels of a fused PrimFunc of several symbolic sizes, by ranges of its queries and keys;
    None where neither is symbolic, or what they are made of is not known.
    """
    try:
        problem = writer.read(func, policy.rounding == "exact")
        tables = _tables(writer, func, problem, hw, policy)
        boxes = boxes_of(tables)
        branches = [_branch(writer, func, problem, box, hw, policy) for box in boxes]
    except Unsupported:
        return None  # the one kernel is chosen among those that can be written
    return joined(branches, func) if branches else None


def _tables(
    writer: Writer, func: tirx.PrimFunc, problem: Attention, hw: HardwareProfile, policy: Policy
) -> dict[tuple[int, int], Ranked]:
    """What the configurations that a problem can run with take at numbers of queries and keys."""
    if isinstance(problem.M, int) and isinstance(problem.N, int):
        return {}
    known, exact = known_sizes(func), policy.rounding == "exact"
    bounds = bounds_within(problem.M, known)
    queries = read_at(QUERIES, bounds)
    keys = read_at(KEYS, bounds_within(problem.N, known))
    if symbols_of([problem.N]) and set(symbols_of([problem.N])) <= set(symbols_of([problem.M])):
        keys = [0]  # told by the queries
    allowed = {kind_of(config) for _, config in writer.ranked(problem, hw, policy)}
    found: dict[tuple[int, int], Ranked] = {}
    few: dict[tuple[int, int], Ranked] = {}
    for pair in itertools.product(queries, keys):
        sizes = _sizes_at(problem, *pair)
        if sizes is None or any(known.get(v, Bounds()).refusal(n) for v, n in sizes.items()):
            continue
        there = func
        for size, value in sizes.items():
            there = with_size(there, size, value)
        attention = writer.read(there, exact)
        ranked = _of_kernels(writer.ranked(attention, hw, policy), attention, hw)
        found[pair] = [entry for entry in ranked if kind_of(entry[1]) in allowed]
        if not isinstance(problem.M, int) and _may_be_most(pair[0], queries, bounds):
            few[pair] = [
                (seconds, replace(config, queries=pair[0]))
                for seconds, config in ranked
                if isinstance(config, DecodeConfig)
            ]
    for (most, count), ranked in few.items():
        for pair, table in found.items():
            if pair[0] <= most and pair[1] == count:
                table += ranked
    return found


def _of_kernels(ranked: Ranked, attention: Attention, hw: HardwareProfile) -> Ranked:
    """Predicted seconds of kernels alone, with what partial results take."""
    decodes = any(isinstance(config, DecodeConfig) for _, config in ranked)
    rows = read_decode(attention, hw).block_rows if decodes else 0
    found = []
    for seconds, config in ranked:
        more = 0.0
        if isinstance(config, DecodeConfig):
            each = math.ceil(rows * attention.E / config.threads)
            more = each * config.warps * PART - START
        found.append((seconds - LAUNCH + more, config))
    return sorted(found, key=lambda entry: entry[0])


def _may_be_most(most: int, queries: Sequence[int], bounds: Bounds) -> bool:
    """Whether a kernel may be for so many queries at most: where another one is for more, or there
    are never more, nor none.
    """
    never_more = bounds.most is not None and bounds.most <= most and bounds.least > 0
    return most < queries[-1] or never_more


def _sizes_at(problem: Attention, queries: int, keys: int) -> dict[Var, int] | None:
    """What symbolic sizes are where there are so many queries and keys; None where there cannot."""
    found: dict[Var, int] = {}
    for extent, wanted in ((problem.M, queries), (problem.N, keys)):
        known = {var: constant(n, dtype_of(var)) for var, n in found.items()}
        left = extent if isinstance(extent, int) else substitute(extent, known)
        unknown = symbols_of([left])
        if not unknown:
            continue
        form = linear_form(left, unknown) if len(unknown) == 1 else None
        rest = None if form is None else number(tvm.sym.Analyzer().simplify(form[1]))
        if rest is None or number(form[0][0]) != 1:
            raise Unsupported(f"sizes that {extent} does not tell")
        if wanted < rest:
            return None
        found[unknown[0]] = wanted - int(rest)
    return found


def _branch(
    writer: Writer,
    func: tirx.PrimFunc,
    problem: Attention,
    box: Box,
    hw: HardwareProfile,
    policy: Policy,
) -> Branch:
    """The kernel of a version by queries and keys."""
    asked, name = [], "upto"
    for extent, most, what in zip(
        (problem.M, problem.N), box.most, ("queries", "keys"), strict=True
    ):
        if most is not None and not isinstance(extent, int):
            asked.append(extent <= constant(most, dtype_of(extent)))
            name += f"_{most}_{what}"
    few = isinstance(box.config, DecodeConfig) and box.config.queries > 0
    if few and bounds_within(problem.M, known_sizes(func)).least < 1:
        asked.append(tirx.GT(problem.M, constant(0, dtype_of(problem.M))))
    kernel = writer.emit(problem, hw, policy, box.config)
    return Branch(kernel, conjunction(*asked) if asked else None, name)


def with_keyless(kernel: tirx.PrimFunc, attention: Attention) -> tirx.PrimFunc:
    """The kernel of an attention, which is not asked where there are queries and no key."""
    if not attention.may_lack_keys:
        return kernel
    keyless = emit_keyless(attention)
    sizes = {}
    for own, other in zip(keyless.params, kernel.params, strict=True):
        if isinstance(own.ty, tirx.BufferType):
            sizes |= dict(zip(own.ty.shape, other.ty.shape, strict=True))
    sizes = {own: other for own, other in sizes.items() if isinstance(own, Var)}
    condition = tirx.EQ(attention.N, constant(0, dtype_of(attention.N)))
    condition = tvm_ffi.structural_map(condition, [(Var, lambda var: sizes.get(var, var))])
    return preceded(kernel, Branch(keyless, condition, 0, sizes))


def emit_keyless(attention: Attention) -> tirx.PrimFunc:
    """What an attention gives without any key: its result is 0, its `lse` -inf."""
    axes = (*attention.batch, *attention.queries, *attention.features)
    with open_kernel(attention) as frame:
        points = frame.size(size_of(axes))
        T.device_entry()
        blocks = (points + (THREADS - 1)) // THREADS
        block = T.cta_id([blocks if isinstance(blocks, int) else convert(blocks, "int32")])
        number = convert(block, frame.index) * THREADS + T.thread_id([THREADS])
        number = T.Bind(convert(number, frame.index))
        with then(number < points):
            env = coordinates(axes, number, frame)
            env[attention.result] = T.Bind(f32(0))
            env[attention.lse] = T.Bind(f32(-math.inf))
            if attention.row_outputs:
                with then(tirx.EQ(tirx.FloorMod(number, frame.size(attention.E)), 0)):
                    _store(frame, attention.row_outputs, env)
            for binding in attention.output_bindings:
                env[binding.var] = T.Bind(lower(frame.rewrite(binding.value, env), False))
            _store(frame, attention.outputs, env)
    return frame.func


def _store(frame: Frame, outputs: Sequence[Output], env: Mapping[Var, Expr]) -> None:
    for output in outputs:
        value = lower(frame.rewrite(output.value, env), False)
        place = frame.place(output.indices, env)
        T.buffer_store(frame.output(output.param), convert(value, output.dtype), place)


def _fewest(tables: dict[int, list], most: int) -> list[Version]:
    return fewest_of(list(tables.values()), list(tables), most)


def _branches(
    writer: Writer,
    problem: Attention,
    versions: Sequence[Version],
    size: Size,
    hw: HardwareProfile,
    policy: Policy,
) -> list[Branch]:
    """The kernels of versions; the last is for any size."""
    found = []
    for version in versions:
        kernel = writer.emit(problem, hw, policy, version.config)
        found.append(Branch(kernel, size.upto(version.most), version.most))
    return found


def _of_multiples(branch: Branch, multiple: Multiple) -> Branch:
    """A kernel over the quotient as one over the size, where it divides."""
    end = "beyond" if branch.condition is None else f"upto_{branch.name}"
    condition = conjunction(multiple.divides, branch.condition)
    return Branch(branch.kernel, condition, f"of{OF}_{end}", multiple.sizes)


def _reads_symbolic_rows(problem: Attention) -> bool:
    """Whether a parameter beside queries, keys, values and results has symbolic rows."""
    loads = (operand.load for operand in (problem.q, problem.k, problem.v))
    used = [load.source for load in loads if load is not None]
    used += [problem.params[output.param].var for output in problem.outputs]
    others = (p for p in problem.params if not any(p.var.same_as(var) for var in used))
    return any(p.shape and not isinstance(p.shape[-1], int) for p in others)
