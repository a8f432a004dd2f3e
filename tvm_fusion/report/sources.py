"""The text of the kernels of a plan, for whoever wants to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx

from ..errors import Unsupported
from ..flow.planned import Planned
from ..plan.plan import UNWRITTEN
from ..runtime.build.build import Built
from ..runtime.build.cuda_compiler import kernel_names
from ..transform.apply.materialize import Materialized
from ..tuning.session.lookup import configuration


@dataclass(frozen=True, slots=True)
class SourceReport:
    """A kernel as text.

    Attributes
    ----------
    tensor_ir : str
        What it computes: the group's PrimFunc, without a schedule, as TVMScript.
    kernel : str or None
        As it was compiled: CUDA, and on a CPU the schedule as TVMScript; None where nothing was
        built of it.
    config : str or None
        The configuration that its class writes it in, where that has several.
    """

    tensor_ir: str
    kernel: str | None = None
    config: str | None = None


def sources_of(
    planned: Planned, materialized: Materialized, built: Built | None = None
) -> dict[str, SourceReport]:
    """The kernels of a plan by the name of their PrimFunc; of one that was not built the schedules
    that its kernels would have.
    """
    written = None if built is not None and built.cuda_sources else planned.write().mod
    cuda = {n: text for text in (built.cuda_sources if built else ()) for n in kernel_names(text)}
    found = {}
    for name, group in materialized.groups.items():
        func = materialized.mod[name]
        if written is not None and name in _names(written):
            kernel = written[name].script()
        else:
            kernel = "\n".join(_cuda_of(built, name, cuda)) or None
        config = None
        if group.kernel_class not in UNWRITTEN:
            config = _configuration(func, group.kernel_class, planned)
        found[name] = SourceReport(func.script(), kernel, config)
    return found


def _names(mod) -> set[str]:
    return {var.name_hint for var in mod.get_global_vars()}


def _cuda_of(built: Built | None, name: str, cuda: Mapping[str, str]) -> list[str]:
    kernels = built.kernels.get(name, ()) if built is not None else ()
    return list(dict.fromkeys(cuda[kernel] for kernel in kernels if kernel in cuda))


def _configuration(func: tirx.PrimFunc, kernel_class: str, planned: Planned) -> str | None:
    try:
        return configuration(func, kernel_class, planned.hw, planned.policy)
    except Unsupported:
        return None
