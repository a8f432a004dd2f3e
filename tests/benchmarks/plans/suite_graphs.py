"""Workloads of the benchmark suites as modules without data: weights are inputs, shapes only."""

from __future__ import annotations

from typing import Any

import torch
import tvm

from tvm_fusion.errors import FrontendError, InputError
from tvm_fusion.frontends import load

from .. import workloads
from ..workloads.instance import Apply, Instance


def suite_module(rest: str) -> tvm.IRModule:
    """The module of `<suite>/<workload>[@<scale>][:<dtype>]`.

    Weights and buffers become inputs, so that nothing has to be drawn to read the graph.

    Raises
    ------
    InputError
        There is no such suite or workload.
    """
    name, scale, dtype = _parse(rest)
    given = dtype or workloads.dtype_of(name, "float16")
    with torch.no_grad():
        try:
            instance = workloads.make(name, "meta", given, scale)
            return _without_data(instance)
        except (FrontendError, NotImplementedError, RuntimeError):  # it looks at values
            return _without_data(workloads.make(name, "cpu", given, scale))


def suite_keys(rest: str) -> list[str]:
    """The keys of a whole suite; `rest` is `<suite>[@<scale>][:<dtype>]`."""
    suite = rest.partition(":")[0].partition("@")[0]
    if suite not in workloads.SUITES:
        raise InputError(f"unknown suite {suite!r}; there are {', '.join(workloads.SUITES)}")
    tail = rest[len(suite) :]
    return [f"suite:{suite}/{name}{tail}" for name in workloads.SUITES[suite]]


def _parse(rest: str) -> tuple[str, float, str]:
    path, _, dtype = rest.partition(":")
    path, _, scale = path.partition("@")
    suite, _, name = path.partition("/")
    if suite not in workloads.SUITES:
        raise InputError(f"unknown suite {suite!r}; there are {', '.join(workloads.SUITES)}")
    try:
        factor = float(scale or 1)
    except ValueError as error:
        raise InputError(f"{rest!r}: the scale {scale!r} is no number") from error
    return name, factor, dtype


def _without_data(instance: Instance) -> tvm.IRModule:
    module = instance.module
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names, count = tuple(state), len(instance.inputs)

    def call(*values: torch.Tensor) -> Any:
        weights = dict(zip(names, values[count:], strict=True))
        return torch.func.functional_call(module, weights, values[:count])

    weights = tuple(t.detach() for t in state.values())
    return load((Apply(call), (*instance.inputs, *weights)))
