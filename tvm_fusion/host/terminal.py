"""What may be written to a stream: colours and moving bars, or plain lines."""

from __future__ import annotations

import os
from typing import TextIO


def is_plain(file: TextIO) -> bool:
    """Whether neither colours nor control characters may be written: the file is no terminal, the
    terminal can do neither, or the user wants none (https://no-color.org).
    """
    return not file.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
