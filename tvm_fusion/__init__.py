"""Cost-model-driven operator fusion for Apache TVM Relax.

compiled = tvm_fusion.compile(model, target)
outputs = compiled(*inputs)
print(compiled.report)
"""

from . import _start  # isort: skip, an interrupt from here on is a line

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import (
    BuildError,
    ConfigError,
    FrontendError,
    InputError,
    PlanError,
    TargetError,
    TvmFusionError,
    VerificationError,
)

if TYPE_CHECKING:
    from . import extend, transform
    from .compilation.compiler import compile, explain
    from .extend import (
        register_family,
        register_profile,
        register_rewrite,
        unregister_family,
        unregister_profile,
        unregister_rewrite,
    )
    from .plan.plan import FusionPlan
    from .report.screen import FunctionReports, Report
    from .runtime.calls.compiled_module import CompiledFunctions, CompiledModule
    from .tuning.session.tune import tune
    from .tuning.tuning_database import TuningDatabase

_LATER = {
    "CompiledFunctions": "runtime.calls.compiled_module",
    "CompiledModule": "runtime.calls.compiled_module",
    "FunctionReports": "report.screen",
    "FusionPlan": "plan.plan",
    "Report": "report.screen",
    "TuningDatabase": "tuning.tuning_database",
    "compile": "compilation.compiler",
    "explain": "compilation.compiler",
    "register_family": "extend",
    "register_profile": "extend",
    "register_rewrite": "extend",
    "tune": "tuning.session.tune",
    "unregister_family": "extend",
    "unregister_profile": "extend",
    "unregister_rewrite": "extend",
}

__all__ = [
    "BuildError",
    "CompiledFunctions",
    "CompiledModule",
    "ConfigError",
    "FrontendError",
    "FunctionReports",
    "FusionPlan",
    "InputError",
    "PlanError",
    "Report",
    "TargetError",
    "TuningDatabase",
    "TvmFusionError",
    "VerificationError",
    "__version__",
    "compile",
    "explain",
    "extend",
    "register_family",
    "register_profile",
    "register_rewrite",
    "transform",
    "tune",
    "unregister_family",
    "unregister_profile",
    "unregister_rewrite",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """What needs more than the passes do is imported with all that when it is asked for."""
        if name == "extend":
            return import_module(".extend", __name__)
        if name in _LATER:
            return getattr(import_module(f".{_LATER[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not _start.COMMAND:
    _start.begin()
