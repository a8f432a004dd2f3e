"""Cost-model-driven operator fusion for Apache TVM Relax.

compiled = tvm_fusion.compile(model, target)
outputs = compiled(*inputs)
print(compiled.report)
"""

from . import _pins

_pins.check()

from . import transform  # noqa: E402
from ._version import __version__  # noqa: E402
from .compiler import compile, explain  # noqa: E402
from .errors import (  # noqa: E402
    BuildError,
    ConfigError,
    FrontendError,
    InputError,
    PlanError,
    TargetError,
    TvmFusionError,
    VerificationError,
)
from .plan.plan import FusionPlan  # noqa: E402
from .tuning import TuningDatabase, tune  # noqa: E402

transform.register()

__all__ = [
    "BuildError",
    "ConfigError",
    "FrontendError",
    "FusionPlan",
    "InputError",
    "PlanError",
    "TargetError",
    "TuningDatabase",
    "TvmFusionError",
    "VerificationError",
    "__version__",
    "compile",
    "explain",
    "transform",
    "tune",
]
