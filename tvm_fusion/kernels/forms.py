"""Forms of a kernel: ways to write one kind of problem, ranked together by predicted time.

A form ranks its own configurations, in seconds of one launch, and writes a kernel from one of them;
lists of several forms are merged by those seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import Unsupported

Ranked = list[tuple[float, Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a problem (a contraction, an attention).

    Attributes
    ----------
    what, name : what it writes, and how, for messages.
    config : the class of its configurations.
    rank : (problem, hw, policy) -> predicted seconds and configuration, the fastest first; raises
        Unsupported where the form cannot compute the problem.
    emit : (problem, hw, config) -> the kernel.
    """

    what: str
    name: str
    config: type
    rank: Callable[[Any, HardwareProfile, Policy], Ranked]
    emit: Callable[[Any, HardwareProfile, Any], tirx.PrimFunc]


def ranked(forms: Sequence[Form], problem: Any, hw: HardwareProfile, policy: Policy) -> Ranked:
    """Predicted seconds and configurations of all forms, the fastest first.

    Raises
    ------
    Unsupported
        No form takes the problem; the message has each one's reason.
    """
    lists, reasons = [], []
    for form in forms:
        try:
            lists.append(form.rank(problem, hw, policy))
        except Unsupported as why:
            reasons.append(f"{form.name}: {why}")
    found = list(heapq.merge(*lists, key=lambda entry: entry[0]))
    if not found:
        raise Unsupported("; ".join(reasons))
    return found


def emitted(
    forms: Sequence[Form], problem: Any, hw: HardwareProfile, policy: Policy, config: Any = None
) -> tirx.PrimFunc:
    """The kernel of a configuration; where that is None, of the first that can be written.

    Raises
    ------
    Unsupported
        The configuration, or no configuration at all, can be written.
    """
    if config is not None:
        return form_of(forms, config).emit(problem, hw, config)
    reasons = {}
    for _, choice in ranked(forms, problem, hw, policy):
        form = form_of(forms, choice)
        try:
            return form.emit(problem, hw, choice)
        except Unsupported as why:
            reasons[form.name] = f"{form.name}: {why}"
    raise Unsupported("; ".join(reasons.values()))


def form_of(forms: Sequence[Form], config: Any) -> Form:
    """The form that a configuration belongs to."""
    for form in forms:
        if type(config) is form.config:
            return form
    raise Unsupported(f"{type(config).__name__} is no configuration of {forms[0].what}")
