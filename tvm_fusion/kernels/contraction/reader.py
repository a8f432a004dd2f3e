"""Reads a fused PrimFunc as a contraction: matrix products with pointwise work before and after.

    T[i, j] = sum_k x[i, k] * w[j, k]          segment batch () M (i0) N (i1)
    y[i, j] = relu(T[i, j] + b[j])        ->     acc0 = sum over (k0) of x[i0, k0] * w[i1, k0]
                                                 y[i0, i1] = max(acc0 + b[i1], 0)

The parts live in `model` (the values), `segments` (which products and
outputs belong together) and `inline` (expressions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import Unsupported
from ..program.definitions import Definition, read_definitions, read_params
from ..program.expr import constant, dtype_of, number, same, substitute, variables, widened
from ..program.program import Param
from .inline import Inliner, collapse
from .model import (
    INDEX,
    Axis,
    Binding,
    Contraction,
    Operand,
    Output,
    Partners,
    Product,
    Segment,
    Simplifier,
    equal_sizes,
    fresh_var,
    size_of,
)
from .pairs import Runs
from .results import (
    Position,
    Result,
    Sum,
    coordinates,
    follows_columns,
    inverted,
    partial_of,
    read_result,
    rounded_dtype,
    scaled_dtype,
    sum_dtype,
    sums_and_partials,
    two_factors,
)

# Finds the segments of a contraction: which products meet in which outputs, and over which axes.
#
# An output reads an accumulator at indices that are functions of the output's own ones,
#
#     y[b, s, c] = T[b, c // 64, s, c % 64]
#
# Inverted (y's index as a function of T's axes) this says where in y the result at a point of the
# space goes, and puts every other tensor of the epilogue into the same coordinates.

# Which axes of a product are rows, columns and batch, and which factor is A.
#
# acc[i, j] = sum_k x[i, k] * w[k, j]     axes only A reads are rows, axes only B reads columns,
#                                         axes of both (or of neither) are batch

Factors = tuple[tuple[Operand, Operand], tuple[Axis, ...]]
"""Both factors of a product, and the axes of its sum."""

Orientation = tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...], tuple[bool, ...]]
"""Batch, row and column axes, and for each product whether its second factor is A."""


def _used(operand: Operand, axes: Sequence[Axis]) -> set[Var]:
    """The axes, but those of the sum, that an operand depends on."""
    return {axis.var for axis in axes} & set(
        variables(operand.value, *(b.value for b in operand.bindings))
    )


def orientations(
    factors: Sequence[Factors], axes: Sequence[Axis], output: Output
) -> list[Orientation]:
    """Both ways to call one factor A and the other B, the one with contiguous columns first."""
    found = [_orientation(factors, axes, flip) for flip in (False, True)]
    inner = next((i for i in reversed(output.indices) if number(i) is None), None)
    if inner is None:
        return found
    columns = [_moves(inner, {axis.var for axis in n}, axes) for _, _, n, _ in found]
    return found if columns[0] or not columns[1] else found[::-1]


def _moves(index: Expr, wanted: set[Var], axes: Sequence[Axis]) -> bool:
    """Whether a step along one of the axes `wanted` moves `index` by one."""
    zero = {axis.var: constant(0, INDEX) for axis in axes}
    simplify = Simplifier(axes)
    start = simplify(substitute(index, zero))
    for var in variables(index):
        if var in wanted:
            step = simplify(substitute(index, {**zero, var: constant(1, INDEX)}) - start)
            if number(step) == 1:
                return True
    return False


def _orientation(factors: Sequence[Factors], axes: Sequence[Axis], flip: bool) -> Orientation:
    """Axes only A's read are rows, axes only B's read are columns, the others are batch."""
    pairs = [(_used(x, axes), _used(y, axes)) for (x, y), _ in factors]
    first = pairs[0][::-1] if flip else pairs[0]
    rows, columns = first[0] - first[1], first[1] - first[0]
    flipped = []
    for x, y in pairs:
        flipped.append(bool(x & columns or y & rows) and not (y & columns or x & rows))
    flipped[0] = flip
    a = set().union(*(y if f else x for (x, y), f in zip(pairs, flipped, strict=True)))
    b = set().union(*(x if f else y for (x, y), f in zip(pairs, flipped, strict=True)))
    m = tuple(axis for axis in axes if axis.var in a - b)
    n = tuple(axis for axis in axes if axis.var in b - a)
    batch = tuple(axis for axis in axes if (axis.var in a) == (axis.var in b))
    return batch, m, n, tuple(flipped)


def fitting(
    candidates: Sequence[Orientation], before: Sequence[Segment], factors: Sequence[Factors]
) -> Orientation:
    """The orientation of a segment beside those before it.

    Siblings call the same tensor A, so that batch and rows are those of the first segment. A
    segment of its own sizes or operands takes the orientation with contiguous columns.
    """
    if not before:
        return candidates[0]
    first = before[0]
    fitting = [
        c
        for c in candidates
        if equal_sizes(size_of(c[0]), size_of(first.batch))
        and equal_sizes(size_of(c[1]), size_of(first.m))
    ]
    if not fitting:
        return candidates[0]
    shared = first.products[0].a.load
    for candidate in fitting:
        pair = factors[0][0]
        load = pair[1 if candidate[3][0] else 0].load
        if shared is not None and load is not None and load.source.same_as(shared.source):
            return candidate
    return fitting[0] if shared is None else candidates[0]


def find_segments(
    definitions: Sequence[Definition], params: Sequence[Param], exact: bool
) -> list[Segment]:
    """The segments of a PrimFunc with these definitions; see `contraction.analyze_contraction`."""
    by_buffer = {d.buffer: d for d in definitions}
    products, runs = sums_and_partials(definitions)
    sums = {d.buffer: Sum(d, i) for i, d in enumerate(products)}
    if not sums:
        raise Unsupported("no reduction: not a contraction")
    results = [
        read_result(by_buffer[p.var], i, by_buffer, exact, runs.get(p.var))
        for i, p in enumerate(params)
        if p.var in by_buffer
    ]
    read = {buffer for r in results for buffer in r.reads}
    for found in sums.values():
        if found.definition.buffer not in read:
            raise Unsupported(f"{found.name} feeds no output, or only through another product")
    segments: list[Segment] = []
    for group in _groups(list(sums.values()), results):
        members = [r for r in results if group[0].definition.buffer in _reached(r, group)]
        segments.append(
            _Builder(by_buffer, sums, exact, len(segments)).build(group, members, segments)
        )
    return segments


def _reached(result: Result, group: Sequence[Sum]) -> set[Var]:
    """The buffers of the whole group if the result reads any of them."""
    buffers = {s.definition.buffer for s in group}
    return buffers if buffers & set(result.reads) else set()


def _groups(sums: Sequence[Sum], results: Sequence[Result]) -> list[list[Sum]]:
    """Sums that meet in an output, directly or through others, in the order of their blocks."""
    label = {s.definition.buffer: s.number for s in sums}
    for result in results:
        met = {label[buffer] for buffer in result.reads}
        label = {buffer: min(met) if number in met else number for buffer, number in label.items()}
    return [
        [s for s in sums if label[s.definition.buffer] == first]
        for first in sorted(set(label.values()))
    ]


@dataclass(slots=True, eq=False)
class _Builder:
    """Builds one segment in the coordinates of its first sum."""

    definitions: dict[Var, Definition]
    sums: dict[Var, Sum]
    exact: bool
    number: int

    def build(
        self, group: Sequence[Sum], results: Sequence[Result], before: Sequence[Segment]
    ) -> Segment:
        prefix = f"i{self.number}_" if self.number else "i"
        axes, group[0].position = coordinates(group[0].definition.shape, prefix)
        self._place(group, results, axes)
        factors = [self._factors(s, axes) for s in group]
        runs = self._runs(results, axes)
        outputs, bindings, accumulators, partners = self._outputs(group, results, axes, runs)
        candidates = orientations(factors, axes, _first_whole(outputs))
        candidates = _along_runs(candidates, results, axes)
        if runs is not None:
            candidates = _along_pairs(candidates, runs)
        batch, m, n, flipped = fitting(candidates, before, factors)
        products = []
        for s, (pair, k), flip in zip(group, factors, flipped, strict=True):
            a, b = reversed(pair) if flip else pair
            accumulator = accumulators[s.definition.buffer]
            is_output = any(r.definition is s.definition for r in results)
            stored = (
                s.definition.dtype
                if is_output
                else rounded_dtype(s.definition, self.definitions.values())
            )
            scaled = None
            if not is_output:
                stored_whole = [r.definition for r in results]
                scaled = scaled_dtype(s.definition, self.definitions.values(), stored_whole)
            products.append(Product(accumulator, a, b, k, dtype_of(accumulator), stored, scaled))
        return Segment(batch, m, n, tuple(products), bindings, outputs, partners)

    def _runs(self, results: Sequence[Result], axes: Sequence[Axis]) -> Runs | None:
        """The runs whose columns are read in pairs."""
        found: list[Runs] = []
        for result in results:
            for buffer, pair in result.pairs.items():
                at = self.sums[buffer].position[pair.index]
                axis = next((a for a in axes if a.var.same_as(at)), None)
                extent = 0 if axis is None else axis.extent
                if not isinstance(extent, int) or not extent or extent % pair.width:
                    raise Unsupported(f"{buffer.name} is read in pairs that are no columns")
                found.append(Runs(axis, tuple(axes), pair.width, pair.distance))
        if not found:
            return None
        first = found[0]
        alike = all(
            r.axis is first.axis and (r.width, r.distance) == (first.width, first.distance)
            for r in found
        )
        if not alike or any(r.is_partial for r in results):
            raise Unsupported("pairs of columns beside other pairs, or beside reductions")
        return first

    def _place(self, group: Sequence[Sum], results: Sequence[Result], axes: Sequence[Axis]) -> None:
        """Positions of all sums and results in the coordinates `axes`."""
        waiting = list(results)
        while waiting:
            result, base = next(
                (r, self.sums[b])
                for r in waiting
                for b in r.reads
                if self.sums[b].position is not None
            )
            waiting.remove(result)
            env = inverted(result, base, axes)
            simplify = Simplifier(axes)
            result.position = tuple(simplify(substitute(i, env)) for i in result.indices)
            if result.run is not None:
                result.place = simplify(substitute(result.run.var, env))
            elif result.terms:
                result.place = simplify(substitute(result.axes[-1].var, env))
            result.terms = {v: simplify(substitute(e, env)) for v, e in result.terms.items()}
            if result.finish is not None:
                result.finish = result.finish.map(lambda e, env=env: substitute(e, env))
            if result.over_rows is not None:
                moved = result.over_rows.map(lambda e, env=env: substitute(e, env))
                pairs = ((env[axis], n) for axis, n in moved.heights.items())
                heights = {axis: n for axis, n in pairs if isinstance(axis, Var)}
                result.over_rows = replace(moved, heights=heights)
            for buffer, read in result.reads.items():
                self._place_sum(
                    self.sums[buffer], [simplify(substitute(i, env)) for i in read], axes
                )

    def _place_sum(self, found: Sum, position: Sequence[Expr], axes: Sequence[Axis]) -> None:
        real = [i for i in position if number(i) is None]
        complete = set(real) == {axis.var for axis in axes} and len(real) == len(axes)
        known = found.position or position
        if not complete or not all(same(a, b) for a, b in zip(known, position, strict=True)):
            raise Unsupported(f"{found.name} is read at other points than the first product")
        found.position = tuple(position)

    def _factors(
        self, found: Sum, axes: Sequence[Axis]
    ) -> tuple[tuple[Operand, Operand], tuple[Axis, ...]]:
        definition = found.definition
        env = definition.at(found.position)
        k, inner = [], {}
        for var, extent in definition.reduced:
            inner[var] = constant(0, INDEX) if extent == 1 else fresh_var(f"k{found.number}", INDEX)
            if len(definition.reduced) > 1 and extent != 1:
                inner[var] = fresh_var(f"k{found.number}_{len(k)}", INDEX)
            if extent != 1:
                k.append(Axis(inner[var], extent))
        simplify = Simplifier([*axes, *k])
        pair = []
        for factor in two_factors(definition):
            inliner = Inliner(self.definitions, self.exact, simplify, _refuse_product_of_product)
            root = inliner.resolve(factor, {**env, **inner})
            (value,), bindings = collapse([root], inliner.bindings)
            pair.append(Operand(value, bindings))
        return (pair[0], pair[1]), tuple(k)

    def _outputs(
        self,
        group: Sequence[Sum],
        results: Sequence[Result],
        axes: Sequence[Axis],
        runs: Runs | None,
    ) -> tuple[tuple[Output, ...], tuple[Binding, ...], dict[Var, Var], Partners | None]:
        accumulators = {
            s.definition.buffer: fresh_var(f"acc{s.number}", sum_dtype(s.definition.dtype))
            for s in group
        }

        others: dict[Var, Var] = {}  # accumulators of partners

        def accumulate(read: Definition, at: Position) -> Expr:
            position = self.sums[read.buffer].position
            value = accumulators[read.buffer]
            if not all(same(a, b) for a, b in zip(position, at, strict=True)):
                kinds = runs and runs.kinds(at, position, inliner.conditions)
                if not kinds:
                    raise Unsupported(
                        f"{read.buffer.name} is read at other points than are written"
                    )
                away = [part for part, is_partner in kinds.items() if is_partner]
                if away:
                    number = self.sums[read.buffer].number
                    fresh = fresh_var(f"pair{number}", dtype_of(value))
                    other = others.setdefault(read.buffer, fresh)
                    whole = len(away) == len(kinds)
                    value = other if whole else runs.select(away, other, value)
            dtype = widened(read.dtype)
            return value if dtype_of(value) == dtype else tirx.Cast(dtype, value)

        inliner = Inliner(self.definitions, self.exact, Simplifier(axes), accumulate, runs=runs)
        values = [r.value(inliner, r.position, r.place) for r in results]
        roots, bindings = collapse(values, inliner.bindings)
        outputs = tuple(
            Output(
                r.param,
                r.position,
                value,
                r.dtype,
                partial_of(r),
            )
            for r, value in zip(results, roots, strict=True)
        )
        partners = None
        if runs is not None:
            found = tuple(others.get(s.definition.buffer) for s in group)
            partners = Partners(runs.width, runs.distance, runs.part, found)
        return outputs, bindings, accumulators, partners


def _first_whole(outputs: Sequence[Output]) -> Output:
    """The first output that is no partial, if there is one."""
    return next((o for o in outputs if o.partial is None), outputs[0])


def _along_runs(
    candidates: Sequence[Orientation], results: Sequence[Result], axes: Sequence[Axis]
) -> list[Orientation]:
    """The orientations in which all partials reduce columns, or runs of rows."""
    partials = [r for r in results if r.is_partial]

    def fits(result: Result, m: tuple[Axis, ...], n: tuple[Axis, ...]) -> bool:
        if result.run is None:
            return not _moves(result.place, {axis.var for axis in m}, axes)
        return follows_columns(result.position, result.place, result.run.extent, n, axes)

    found = [c for c in candidates if all(fits(r, c[1], c[2]) for r in partials)]
    if not found:
        raise Unsupported(
            f"{partials[0].definition.buffer.name} is no sum of products, nor one of aligned runs "
            "of columns"
        )
    return found


def _along_pairs(candidates: Sequence[Orientation], runs: Runs) -> list[Orientation]:
    """The orientations in which the runs lie along the innermost axis of the columns."""
    found = [c for c in candidates if c[2] and c[2][-1].var.same_as(runs.axis.var)]
    if not found:
        raise Unsupported("pairs of elements of a product that are not in one row")
    return found


def _refuse_product_of_product(read: Definition, _: Position) -> Expr:
    raise Unsupported(f"a product reads {read.buffer.name}, a reduction of the same kernel")


def analyze_contraction(func: tirx.PrimFunc, exact: bool = False) -> Contraction:
    """Read a fused PrimFunc as matrix products with pointwise work before and after.

    Parameters
    ----------
    func : tirx.PrimFunc
        s_tir blocks over buffers that are parameters or local, as FuseTIR leaves them.
    exact : bool
        Keep every rounding of the unfused graph: what it stores as half is rounded and widened
        again.

    Returns
    -------
    contraction : Contraction
        Segments in the order of their products. An operand may be any expression: a convolution, a
        gather or a cast in front of a product are contractions too. The columns (N) of a segment
        are the axes along which its first output is contiguous, where the operands allow it.

    Raises
    ------
    Unsupported
        For another reduction than a sum of products or one of runs of a product's columns, a
        product of a product, an output without a product, and an epilogue that reads the
        accumulator at other points than it writes (a shift, a broadcast), but for pairs of columns
        at one distance within aligned runs (see `Partners`).
    """
    definitions = read_definitions(func)
    params = read_params(func)
    segments = find_segments(definitions, params, exact)
    name = func.attrs.get("global_symbol") if func.attrs is not None else None
    return Contraction(None if name is None else str(name), params, tuple(segments), exact)
