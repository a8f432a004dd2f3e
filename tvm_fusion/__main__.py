"""Entry point of ``python -m tvm_fusion`` and of the script ``tvm-fusion``."""

import sys

from .cli import main as run
from .host import interrupts


def main() -> int:
    """Runs the command line; the exit status. An interrupt while Python ends is nothing."""
    status = run()
    interrupts.ignore()
    return status


if __name__ == "__main__":
    sys.exit(main())
