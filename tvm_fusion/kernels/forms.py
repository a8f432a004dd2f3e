"""Forms of a kernel: ways to write one kind of problem, ranked together by predicted time.

A writer reads a fused PrimFunc once, as the problem that its family solves, and has its forms rank
their configurations and write a kernel from one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import Unsupported

Ranked = list[tuple[float | None, Any]]
"""Predicted seconds of one launch, None where nothing predicts it, and configurations."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a problem (a contraction, an attention, a row program).

    Attributes
    ----------
    name : for messages.
    config : the class of its configurations, or several.
    rank : (problem, hw, policy) -> configurations, the best guess first, each with its predicted
        seconds (all of them, where forms compete); raises Unsupported where the form cannot compute
        the problem.
    emit : (problem, hw, config) -> the kernel.
    """

    name: str
    config: type | tuple[type, ...]
    rank: Callable[[Any, HardwareProfile, Policy], Ranked]
    emit: Callable[[Any, HardwareProfile, Any], tirx.PrimFunc]


@dataclass(frozen=True, slots=True)
class Writer:
    """How the kernels of a family are written for one kind of device.

    Attributes
    ----------
    what : the problem, for messages.
    read : (func, exact) -> the problem of a fused PrimFunc; with `exact`, keeping every rounding of
        the unfused graph. Raises Unsupported where the function is none.
    forms : the ways to write it.
    versions : (writer, func, hw, policy) -> one kernel for each range of a symbolic size, in one
        function; None where it has none (`versions`).
    finish : (kernel, problem) -> the kernel with what no form does; None where there is nothing.
    """

    what: str
    read: Callable[[tirx.PrimFunc, bool], Any]
    forms: tuple[Form, ...]
    versions: Callable[[Writer, tirx.PrimFunc, HardwareProfile, Policy], Any] | None = None
    finish: Callable[[tirx.PrimFunc, Any], tirx.PrimFunc] | None = None

    def ranked(self, problem: Any, hw: HardwareProfile, policy: Policy) -> Ranked:
        """Predicted seconds and configurations of all forms, the fastest first.

        Raises
        ------
        Unsupported
            No form takes the problem; the message has each one's reason.
        """
        if len(self.forms) == 1:
            return self.forms[0].rank(problem, hw, policy)
        lists, reasons = [], []
        for form in self.forms:
            try:
                lists.append(form.rank(problem, hw, policy))
            except Unsupported as why:
                reasons.append(f"{form.name}: {why}")
        found = list(heapq.merge(*lists, key=lambda entry: entry[0]))
        if not found:
            raise Unsupported("; ".join(reasons))
        return found

    def emit(
        self, problem: Any, hw: HardwareProfile, policy: Policy, config: Any = None
    ) -> tirx.PrimFunc:
        """The kernel of a configuration; where that is None, of the best guess, and where forms
        compete, of the first that can be written.

        Raises
        ------
        Unsupported
            The configuration, or no configuration at all, can be written.
        """
        if config is not None:
            return self.form_of(config).emit(problem, hw, config)
        found = self.ranked(problem, hw, policy)
        if len(self.forms) == 1:
            return self.forms[0].emit(problem, hw, found[0][1])
        reasons: dict[str, Unsupported] = {}
        for _, choice in found:
            form = self.form_of(choice)
            try:
                return form.emit(problem, hw, choice)
            except Unsupported as why:
                reasons[form.name] = why
        raise Unsupported("; ".join(f"{name}: {why}" for name, why in reasons.items()))

    def form_of(self, config: Any) -> Form:
        """The form that a configuration belongs to."""
        for form in self.forms:
            if isinstance(config, form.config):
                return form
        raise Unsupported(f"{type(config).__name__} is no configuration of {self.what}")
