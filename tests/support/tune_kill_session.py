"""A session for `test_tune_kills`: a class of many cheap choices, of which some go wrong.

python -m tests.support.tune_kill_session DATABASE SETTINGS [--compile]
"""

import json
import sys
from pathlib import Path

from tvm_fusion.kernels import registry

from ..benchmarks.tuning.session import run
from .tune_classes import Several
from .tune_sessions import chain_module

WAYS = ("plain", "fast", "wrong", "refused", *(f"plain{number}" for number in range(200)))


def main() -> None:
    """See the module docstring."""
    database, settings, *compiled = sys.argv[1:]
    registry.register(Several(WAYS), ("llvm",))
    run(
        chain_module(),
        "llvm",
        Path(database),
        json.loads(settings),
        policy="aggressive",
        compiled=bool(compiled),
    )


if __name__ == "__main__":
    main()
