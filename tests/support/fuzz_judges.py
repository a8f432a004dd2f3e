"""Judges for the tests of `tvm_fusion.fuzz`, in a module of their own since processes import it."""

import os
import signal
import time
from pathlib import Path

from tvm_fusion.fuzz.torch_program import Program
from tvm_fusion.fuzz.verdict import ERROR, REFUSED, RIGHT, WRONG, Verdict

from .tune_classes import HUNG


def by_seed(program: Program, target: str) -> Verdict:
    """Each kind of end in turn; the process dies of two of them, and hangs in the last."""
    kinds = (_right, _refused, _wrong, _error, _division, _segmentation, _hang)
    return kinds[program.seed % len(kinds)](program)


def fails_of_softmax(program: Program, target: str) -> Verdict:
    """An internal error if there is a softmax."""
    return Verdict(ERROR, "KeyError: x") if "softmax" in program.source() else Verdict(RIGHT)


def _right(program: Program) -> Verdict:
    return Verdict(RIGHT)


def _refused(program: Program) -> Verdict:
    return Verdict(REFUSED, "FrontendError: no")


def _wrong(program: Program) -> Verdict:
    return Verdict(WRONG, "output 0: 1 off", 0)


def _error(program: Program) -> Verdict:
    return Verdict(ERROR, "KeyError: 3")


def _division(program: Program) -> Verdict:
    os.kill(os.getpid(), signal.SIGFPE)


def _segmentation(program: Program) -> Verdict:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(program: Program) -> Verdict:
    Path(os.environ[HUNG]).write_text(str(os.getpid()))
    time.sleep(600)
