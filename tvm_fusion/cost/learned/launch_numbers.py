"""A launch as plain numbers, for measurements of graphs that no key stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...config import HardwareProfile
from ...kernels.base import Fit
from ..analytic import estimate
from ..traffic import Resources, Traffic
from .features import Query

WORK_VERSION = 1
_PARTS = {"fit": Fit, "traffic": Traffic, "resources": Resources}


def work_of(fit: Fit, traffic: Traffic, resources: Resources) -> dict[str, Any]:
    """What a line of a sample file holds as `work`."""
    parts = {"fit": fit, "traffic": traffic, "resources": resources}
    return {"version": WORK_VERSION, **{name: _plain(part) for name, part in parts.items()}}


def query_of(work: Mapping[str, Any], kernel_class: str, hw: HardwareProfile) -> Query:
    """The launch again, with its analytic estimate by the present model.

    Raises
    ------
    ValueError
        The work is of another version, or broken.
    """
    if work.get("version") != WORK_VERSION:
        raise ValueError(
            f"work of version {work.get('version')!r}, this program reads {WORK_VERSION}"
        )
    try:
        parts = {name: _part(cls, work[name]) for name, cls in _PARTS.items()}
        cost = estimate(parts["traffic"], parts["resources"], hw, "graph")
        return Query(kernel_class, **parts, estimate=cost)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"broken work: {error!r}") from error


def _plain(part: Any) -> dict[str, Any]:
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _part(cls: type, data: Mapping[str, Any]) -> Any:
    known = {f.name for f in fields(cls)}
    if data.keys() != known:
        raise ValueError(f"the fields of {cls.__name__} have changed")
    return cls(**{k: _tuples(v) for k, v in data.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
