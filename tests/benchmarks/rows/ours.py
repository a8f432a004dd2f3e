"""Our builds of a workload: fused, and one kernel an operator; in memory, or in files."""

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tvm_fusion.compilation.one_function import Wishes, compile_function
from tvm_fusion.errors import InputError
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.calls.compiled_module import CompiledModule

from ..record import OURS, UNFUSED
from ..workloads.instance import Instance
from .setup import Saved, Setup

_log = logging.getLogger(__name__)


class Ours:
    """A workload compiled by us, fused and one kernel an operator; or loaded, if it was saved."""

    def __init__(self, instance: Instance, setup: Setup) -> None:
        self._instance, self._setup = instance, setup
        self._saved = setup.saved.get(instance.name)

    @cached_property
    def _planned(self) -> Planned:
        model = (self._instance.module, self._instance.inputs)
        return planned_function(model, self._setup.named)

    @cached_property
    def fused(self) -> CompiledModule:
        """As `tvm_fusion.compile` gives it."""
        # Checked by us against torch in float64; the compiler's own check takes long in full size
        return self._loaded(OURS) or compile_function(self._planned, Wishes())

    @cached_property
    def unfused(self) -> CompiledModule:
        """The module that fusion is compared with."""
        found = self._loaded(UNFUSED)
        if found is None:
            found = CompiledModule.of(self._planned.build_unfused())
            found.signature = found.signature.in_formats(self._planned.formats)
        return found

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What `kernel_facts` says of the fused build."""
        return self._saved.facts if self.fused.built is None else kernel_facts(self.fused)

    def save(self, folder: Path, labels: Sequence[str]) -> Saved:
        """Compile and write to files what is asked for of the fused and the unfused build."""
        paths = {}
        for label in labels:
            module = self.fused if label == OURS else self.unfused
            paths[label] = str(module.save(folder / f"{self._instance.name}-{label}.so"))
        return Saved(self.facts, paths)

    def _loaded(self, label: str) -> CompiledModule | None:
        path = self._saved and self._saved.paths.get(label)
        try:
            return CompiledModule.load(path) if path else None
        except InputError as error:
            _log.warning("compiling %s again: %s", self._instance.name, error)
            return None


def kernel_facts(compiled: CompiledModule) -> dict[str, Any]:
    """Return launches, what fell back and why, and what ptxas says of every kernel."""
    resources = compiled.built.resources.values()
    return {
        "launches": compiled.launches,
        "registers": max((r.registers for r in resources), default=None),
        "spill_bytes": sum(r.spill_bytes for r in resources) if resources else None,
        "fallbacks": [g.fallback for g in compiled.report.groups if g.fallback],
        "kernels": [
            {
                "name": r.name,
                "registers": r.registers,
                "spill_bytes": r.spill_bytes,
                "static_smem_bytes": r.smem_bytes,
            }
            for r in resources
        ],
    }
