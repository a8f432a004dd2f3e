"""Training rows: every measured launch as its kernel class sees it now, with present features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import tvm

from ...config import HardwareProfile, Policy
from ...errors import TvmFusionError
from ...ir.graph import FusionGraph, OpKind, bits
from ...kernels.registry import family
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal
from ..analytic import estimate
from .features import Query, anchor_of, features_of
from .samples import Problem, Sample, SampleSet, fold_of, query_of

LAUNCH = "graph"

GraphOf = Callable[
    [str, HardwareProfile, Policy, tuple[str, ...]], tuple[tvm.IRModule, FusionGraph]
]
"""Makes a graph again, by key and rewrites: its lowered module, and itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured launch and what the model knows of it; `lone` are its operators that are no views,
    by name, if it stands for itself (nothing in it is recomputed).
    """

    sample: Sample
    query: Query
    features: tuple[float, ...]
    anchor: float
    lone: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """The log of measured over analytic time, without the launch."""
        return float(np.log(self.sample.us / self.query.body_us))


@dataclass(frozen=True, slots=True)
class Pair:
    """A fused launch and the launches of its operators, as numbers of rows."""

    together: int
    apart: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """All rows, pairs of rows to compare, and what was set aside."""

    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    problems: tuple[Problem, ...] = ()

    @cached_property
    def features(self) -> np.ndarray:
        return np.array([row.features for row in self.rows], np.float32)

    @property
    def errors(self) -> np.ndarray:
        return np.array([row.error for row in self.rows])

    @property
    def anchors(self) -> np.ndarray:
        return np.array([row.anchor for row in self.rows])

    @cached_property
    def measured(self) -> np.ndarray:
        return np.array([row.sample.us for row in self.rows])

    @property
    def classes(self) -> list[str]:
        return [row.query.kernel_class for row in self.rows]

    @cached_property
    def folds(self) -> np.ndarray:
        return np.array([fold_of(row.sample.graph) for row in self.rows])


def rows_of(
    samples: SampleSet, hw: HardwareProfile, policy: Policy, graph_of: GraphOf | None = None
) -> Rows:
    """Asks the kernel classes about every launch, of graphs that are made again.

    Parameters
    ----------
    samples : SampleSet
    hw : HardwareProfile
        Of the device they were measured on.
    policy : Policy
    graph_of : GraphOf or None
        For launches whose graph has a key; without, only those that carry their work are rows.

    Returns
    -------
    Rows
        In the order of graphs and samples. A launch that its class no longer accepts, or whose
        graph has no such operators, is among the problems.
    """
    found: list[Row] = []
    problems: list[Problem] = []
    ordered = sorted(samples.launches, key=lambda s: (s.graph, s.rewrites))
    for (key, rewrites), launches in groupby(ordered, key=lambda s: (s.graph, s.rewrites)):
        own = list(launches)
        keyed = [s for s in own if s.work is None]
        graph = _graph(key, rewrites, hw, policy, graph_of) if keyed else None
        for sample in own:
            row = _row(sample, graph, hw, policy)
            if isinstance(row, str):
                problems.append(Problem(f"{key} {'+'.join(sample.ops)}", row))
            else:
                found.append(row)
    return Rows(tuple(found), tuple(_pairs(found)), tuple(problems))


def _graph(
    key: str,
    rewrites: tuple[str, ...],
    hw: HardwareProfile,
    policy: Policy,
    graph_of: GraphOf | None,
) -> FusionGraph | str:
    if graph_of is None:
        return "only the key of its graph is known: python -m tests.benchmarks.plans.refit makes it"
    try:
        return graph_of(key, hw, policy, rewrites)[1]
    except TvmFusionError as error:
        return f"its graph cannot be made again: {error}"


def _row(
    sample: Sample, graph: FusionGraph | str | None, hw: HardwareProfile, policy: Policy
) -> Row | str:
    """The sample's row, or why there is none."""
    lone: tuple[str, ...] = ()
    try:
        if sample.work is not None:
            query = query_of(sample.work, sample.kernel_class, hw)
        elif isinstance(graph, str):
            return graph
        else:
            view = view_of(graph, sample)
            query = ask(view, sample.kernel_class, hw, policy)
            lone = () if sample.recomputed else _working(view)
    except (ValueError, KeyError) as error:
        return str(error)
    return Row(sample, query, features_of(query, hw), anchor_of(query, hw), lone)


def view_of(graph: FusionGraph, sample: Sample) -> GroupView:
    """The launch as a set of the graph's operators.

    Raises
    ------
    ValueError
        The graph has no such operator or tensor.
    """
    ops = {op.name: op.id for op in graph.ops}
    tensors = {t.name: t.id for t in graph.tensors}
    missing = [n for n in sample.ops if n not in ops] + [
        n for n in sample.stores if n not in tensors
    ]
    if missing:
        raise ValueError(f"the graph has no {missing[0]}: it has changed since it was measured")
    stores = sorted(tensors[n] for n in sample.stores)
    copies = bits(ops[n] for n in sample.recomputed)
    return GroupView(graph, tuple(sorted(ops[n] for n in sample.ops)), tuple(stores), copies)


def ask(view: GroupView, name: str, hw: HardwareProfile, policy: Policy) -> Query:
    """What a kernel class says of a group.

    Raises
    ------
    ValueError
        There is no such class, or it does not accept the group.
    """
    try:
        kernel = family(name)
    except KeyError as error:
        raise ValueError(f"there is no kernel class {name!r}") from error
    fit = kernel.accepts(view, hw, policy)
    if isinstance(fit, Refusal):
        raise ValueError(f"class {name} does not accept it: {fit.why}")
    traffic, resources = kernel.traffic(view, fit, hw), kernel.resources(view, fit, hw)
    return Query(name, fit, traffic, resources, estimate(traffic, resources, hw, LAUNCH))


def _working(view: GroupView) -> tuple[str, ...]:
    ops = (view.graph.ops[i] for i in view.ops)
    return tuple(op.name for op in ops if op.kind is not OpKind.VIEW)


def _pairs(rows: Sequence[Row]) -> list[Pair]:
    """Fused launches all of whose operators were also measured each by itself."""
    alone: dict[tuple, int] = {}  # the first: the unfused plan is measured first
    for i, row in enumerate(rows):
        if len(row.lone) == 1:
            alone.setdefault((row.sample.graph, row.sample.rewrites, row.lone[0]), i)
    pairs = []
    for i, row in enumerate(rows):
        if len(row.lone) < 2:
            continue
        places = [alone.get((row.sample.graph, row.sample.rewrites, name)) for name in row.lone]
        if None not in places:
            pairs.append(Pair(i, tuple(places)))
    return pairs
