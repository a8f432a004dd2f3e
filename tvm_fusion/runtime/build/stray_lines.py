"""Lines of TVM's C++ on standard error that say nothing to a user."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def without_lines(containing: str) -> Iterator[None]:
    """Hold back what is written to the file descriptor 2, and pass on all but some lines."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            lines = held.read().splitlines(keepends=True)
            rest = b"".join(line for line in lines if containing.encode() not in line)
            if rest:
                os.write(2, rest)
