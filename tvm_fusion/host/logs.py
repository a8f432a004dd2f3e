"""What is logged, by topic: `TVM_FUSION_LOG=plan,cost,kernels,time`.

    plan      what is fused into which kernel, what was tried, and what was refused
    cost      predicted times by their terms
    kernels   which kernels are written in which configuration, and what compiling them took
    time      how long each stage took

Each topic is a logger of Python's `logging`, `tvm_fusion.TOPIC`, silent by default: a program may
set levels and handlers of its own. The variable sets the level of its topics to DEBUG and writes
their lines to standard error.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from ..errors import ConfigError

VARIABLE = "TVM_FUSION_LOG"
DUMP = "TVM_FUSION_DUMP"
TOPICS = ("plan", "cost", "kernels", "time")


class _Standard(logging.StreamHandler):
    """Writes to what standard error is when a line is written."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def topic(name: str) -> logging.Logger:
    """The logger of a topic."""
    return logging.getLogger(f"tvm_fusion.{name}")


def dump_folder() -> str | None:
    """Where `TVM_FUSION_DUMP` wants files of each stage; None where nowhere."""
    return os.environ.get(DUMP) or None


def is_observed() -> bool:
    """Whether anybody listens to a topic, or wants files."""
    return dump_folder() is not None or any(topic(t).isEnabledFor(logging.INFO) for t in TOPICS)


def configure() -> None:
    """Does what the variable asks for.

    Raises
    ------
    ConfigError
        It names a topic that does not exist.
    """
    asked = os.environ.get(VARIABLE, "")
    names = [name.strip() for name in asked.split(",") if name.strip()]
    unknown = [name for name in names if name not in TOPICS]
    if unknown:
        raise ConfigError(
            f"{VARIABLE}={asked}: there is no topic {unknown[0]!r}; "
            f"name some of {', '.join(TOPICS)}"
        )
    for name in names:
        logger = topic(name)
        logger.setLevel(logging.DEBUG)
        if not any(isinstance(handler, _Standard) for handler in logger.handlers):
            handler = _Standard()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
