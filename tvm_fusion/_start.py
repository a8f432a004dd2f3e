"""What the package does when it begins: it checks the versions of TVM, and tells TVM of its passes.

`import tvm_fusion` begins at once. A process that is the command line begins when it has read its
arguments: `--version` and `--help` need no TVM, whose import takes seconds, and who has no TVM, or
interrupts its import, is told so in a line.
"""

import os
import sys

from .host import interrupts
from .host.collector import others_set_aside

NAME = "tvm_fusion"


def is_command() -> bool:
    """Whether this process is `python -m tvm_fusion` or the script `tvm-fusion`."""
    if len(sys.argv) not in range(1, len(sys.orig_argv) + 1):
        return False
    word = sys.orig_argv[-len(sys.argv)]  # the script, or what follows -m
    if sys.argv[0] == "-m":  # a module that is being looked for, its package imported
        return word == NAME or (word[0] == "-" and word.endswith(f"m{NAME}"))
    return os.path.basename(word).partition(".")[0] == "tvm-fusion"


COMMAND = is_command()
if COMMAND:
    interrupts.leave_at_once()


def begin() -> None:
    """Raises ImportError for other versions than those of `_pins`."""
    with others_set_aside():  # TVM is tens of thousands of objects, none of them garbage
        from ._registration import register

        register()
