"""No command: `python -m tvm_fusion bench` times models; what else was here is in a checkout."""

import sys

from ..errors import BAD_INPUT
from . import SUITES_ELSEWHERE

if __name__ == "__main__":
    print(f"tvm_fusion.bench: error: {SUITES_ELSEWHERE}", file=sys.stderr)
    raise SystemExit(BAD_INPUT)
