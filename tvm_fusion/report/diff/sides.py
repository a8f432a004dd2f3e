"""A plan or a report as a side of a comparison, and which operator of one side is which of the
other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...host.text_files import read_json
from ...plan.plan import FREE, FusionPlan, PlannedGroup
from ...runtime.timing.timing import FUSED, TimeReport
from ..facts import GroupReport, RefusalReport
from ..read import report_of, require_report
from ..screen import Report

Token = tuple[Any, ...]
"""What an operator is known by; the first is the most particular one."""


@dataclass(frozen=True)
class Kernel:
    """A group of one side.

    Attributes
    ----------
    ops : tuple of str
    label : str
        Its place in the model, else its first and last operator.
    kernel_class : str
    bytes : float
    predicted_us : float
    measured : TimeReport or None
    """

    ops: tuple[str, ...]
    label: str
    kernel_class: str
    bytes: float
    predicted_us: float
    measured: TimeReport | None = None

    @classmethod
    def of_report(cls, group: GroupReport) -> Kernel:
        label = group.label if any(group.modules) else _ends(group.ops)
        shown = "unfused" if group.fallback else group.kernel_class
        size, time_us = group.bytes_fused, group.predicted_us
        return cls(group.ops, label, shown, size, time_us, group.measured)

    @classmethod
    def of_plan(cls, group: PlannedGroup) -> Kernel:
        return cls(group.ops, _ends(group.ops), group.kernel_class, group.bytes, group.predicted_us)


@dataclass(frozen=True)
class Side:
    """One function's plan or report.

    Attributes
    ----------
    name : str
        Of the file.
    made : Mapping of str to str
        What it was made for and by: device, policy, rewrites, versions.
    kernels : tuple of Kernel
        Without views and what is left to others.
    tokens : mapping of str to Token
        Of each operator, in order.
    refusals : tuple of RefusalReport
    launches : int
    bytes : float
    time : TimeReport
        Of a call, where it was measured.
    has_graph : bool
        Whether tokens say more of operators than their names.
    """

    name: str
    made: Mapping[str, str]
    kernels: tuple[Kernel, ...]
    tokens: Mapping[str, Token]
    refusals: tuple[RefusalReport, ...]
    launches: int
    bytes: float
    time: TimeReport = field(default_factory=TimeReport)
    has_graph: bool = False

    @property
    def predicted_us(self) -> float:
        return sum(kernel.predicted_us for kernel in self.kernels)

    @classmethod
    def of_plan(cls, name: str, plan: FusionPlan) -> Side:
        kernels = tuple(Kernel.of_plan(g) for g in plan.groups if g.kernel_class not in FREE)
        refusals = tuple(
            RefusalReport(r.code.value, r.where, r.why, dict(r.numbers)) for r in plan.refusals
        )
        names = dict.fromkeys(op for group in plan.groups for op in group.ops)
        tokens = {op: _named(op) for op in names}
        size = sum(kernel.bytes for kernel in kernels)
        return cls(name, _made(plan), kernels, tokens, refusals, len(kernels), size)

    @classmethod
    def of_report(cls, name: str, report: Report) -> Side:
        plan = FusionPlan.from_dict(dict(report.plan), name)
        kernels = tuple(map(Kernel.of_report, report.groups))
        known = {op.name: op for op in report.graph.ops} if report.graph else {}
        tensors = {t.id: t for t in report.graph.tensors} if report.graph else {}
        tokens = {}
        for op in dict.fromkeys(op for group in plan.groups for op in group.ops):
            if (found := known.get(op)) is None:
                tokens[op] = _named(op)
                continue
            shapes = tuple((tensors[t].shape, tensors[t].dtype) for t in found.outputs)
            kind = (_stem(found.operator), found.module)
            tokens[op] = ((op, *kind, shapes), (*kind, shapes), kind, kind[0])
        return cls(
            name,
            _made(plan),
            kernels,
            tokens,
            report.refusals,
            int(report.launches.fused or 0),
            report.bytes.fused or 0,
            report.times.get(FUSED, TimeReport()),
            has_graph=bool(known),
        )


def _made(plan: FusionPlan) -> dict[str, str]:
    made = {"device": plan.device, "policy": plan.policy, "rewrites": ", ".join(plan.rewrites)}
    host = plan.measured.get("host")
    return made | ({"rates of": str(host)} if host else {}) | plan.versions


def _ends(ops: Sequence[str]) -> str:
    return ops[0] if len(ops) == 1 else f"{ops[0]}..{ops[-1]}"


def _stem(name: str) -> str:
    """A name without its numbers, which count what stands before."""
    return re.sub(r"[\d#]+", "", name)


def read_sides(path: str | Path) -> dict[str, Side]:
    """The functions of a plan, a report or the reports of several functions; "main" for one.

    Raises
    ------
    InputError
        The file cannot be read, or holds neither.
    """
    name, data = str(path), read_json(path, "plan or report")
    if not isinstance(data, dict) or not {"groups", "functions"} & data.keys():
        raise InputError(f"{path} is no plan and no report: give what `explain --json` prints")
    if "fingerprint" in data:
        return {"main": Side.of_plan(name, FusionPlan.from_dict(data, name))}
    report = report_of(require_report(data, path))
    if isinstance(report, Report):
        return {"main": Side.of_report(name, report)}
    return {n: Side.of_report(name, r) for n, r in report.items() if isinstance(r, Report)}


def matched(a: Side, b: Side) -> dict[str, str]:
    """Operators of the second side with those of the first that they are, by name: aligned in order
    by all that is known of them (name, kind, place in the model, sizes), then by less and less.
    """
    both = a.tokens, b.tokens
    if not all(side.has_graph for side in (a, b)):  # names are all that a plan says
        both = tuple({name: _named(name) for name in tokens} for tokens in both)
    depth = max(len(t) for tokens in both for t in (*tokens.values(), ()))
    found: dict[str, str] = {}
    for level in range(depth):
        left = _level(both[0], level, found.values()), _level(both[1], level, found)
        names, tokens = [list(x) for x in left], [list(x.values()) for x in left]
        blocks = SequenceMatcher(None, *tokens, autojunk=False).get_matching_blocks()
        for start, other, size in blocks:
            found |= zip(
                names[1][other : other + size], names[0][start : start + size], strict=True
            )
    return found


def _named(name: str) -> Token:
    return name, _stem(name)


def _level(tokens: Mapping[str, Token], level: int, taken: Any) -> dict[str, Any]:
    """How the operators that are left are known at one level; the last one of those that have
    fewer.
    """
    gone = set(taken)
    return {n: t[min(level, len(t) - 1)] for n, t in tokens.items() if n not in gone}
