"""What is told of the parts of graphs: to the option `report`, and to torch's own traces."""

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch._guards import CompileId
from torch._logging import trace_structured

from tvm_fusion.config.links import link_of
from tvm_fusion.config.targets import architecture_of
from tvm_fusion.frontends.finish import first_line
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.report.screen import Report
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.calls.launch_count import llvm_sources
from tvm_fusion.torch_backend.collectives import Collective

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartReport:
    """A part that was compiled.

    Attributes
    ----------
    graph, part : int
        The graph, of those that this process compiled, and the part of it, from 0 on.
    module : CompiledModule
    operators : int
        Operators of the whole graph, without views.
    outside : Mapping of str to int
        The operators of the graph that run in torch, and how often each stands there.
    outside_us : Mapping of str to float
        How long these took in the second call of the graph, in microseconds; empty before.
    collectives : tuple of Collective
        What the graph asks of other processes, in its order; all of them run in torch.
    collective_us : Mapping of str to float
        How long each took in the second call, by itself, by its name in the graph.
    """

    graph: int
    part: int
    module: CompiledModule
    operators: int
    outside: Mapping[str, int]
    outside_us: Mapping[str, float]
    collectives: tuple[Collective, ...]
    collective_us: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"graph{self.graph}_part{self.part}"

    @property
    def report(self) -> Report:
        return self.module.report

    @property
    def plan(self) -> FusionPlan:
        return self.module.plan

    def kernels(self) -> str:
        """The source of its kernels: CUDA, or LLVM IR for a CPU."""
        sources = self.module.built.cuda_sources or llvm_sources(self.module.executable.mod)
        return "\n".join(sources)

    def save(self, path: str | Path) -> Path:
        """Write the part as a library; see `CompiledModule.save`."""
        return self.module.save(path)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what is in the graph and outside of its parts, and the report. Of each
        collective `us` is `collective_us`, and `predicted_us` what it should take over the links of
        the device, where these are known (`config.links`).
        """
        link = link_of(architecture_of(self.module.target).number)
        return {
            "graph": self.graph,
            "part": self.part,
            "operators": self.operators,
            "outside": dict(self.outside),
            "outside_us": dict(self.outside_us),
            "collectives": [
                asdict(one)
                | {
                    "us": self.collective_us.get(one.name),
                    "predicted_us": one.predicted_us(link),
                }
                for one in self.collectives
            ],
            "report": self.report.to_json(),
        }


def tell(
    report: PartReport,
    to: Callable[[PartReport], Any] | str | Path | None,
    compile_id: CompileId | None = None,
) -> None:
    """Hand a report to whom the option names, and to torch's traces, where it stands with the
    compilation of Dynamo that the part is of.
    """
    _log.info("%s of %d operators is compiled", report.name, report.operators)
    trace(f"{report.name}_report", lambda: json.dumps(report.to_json()), compile_id, "json")
    trace(f"{report.name}_plan", lambda: json.dumps(report.plan.to_json()), compile_id, "json")
    trace(f"{report.name}_kernels", report.kernels, compile_id)
    try:
        _hand_over(report, to)
    except Exception as error:  # the user's function, or a folder: the part is as good without
        why = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"tvm_fusion: option report: {report.name}: {why}", stacklevel=2)


def _hand_over(report: PartReport, to: Callable[[PartReport], Any] | str | Path | None) -> None:
    if to is None:
        return
    if callable(to):
        to(report)
        return
    folder = Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    _write(report, folder)
    report.report.write_html(folder / f"{report.name}.html")


def _write(report: PartReport, folder: Path) -> None:
    (folder / f"{report.name}.json").write_text(json.dumps(report.to_json()), encoding="utf-8")


def tell_of_times(
    reports: Sequence[PartReport], to: Callable[[PartReport], Any] | str | Path | None
) -> None:
    """Write reports again that know now how long the operators outside took."""
    if to is None or callable(to):  # who has them sees it
        return
    for report in reports:
        try:
            _write(report, Path(to))
        except OSError as error:
            warnings.warn(f"tvm_fusion: option report: {report.name}: {error}", stacklevel=2)


def trace(
    name: str, payload: Callable[[], str], compile_id: CompileId | None, encoding: str = "string"
) -> None:
    """An artifact for `tlparse`; its payload is made where somebody listens."""
    name = f"tvm_fusion_{name}"
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # a part is compiled in its first call, when Dynamo is done
        compile_id=compile_id,
    )
