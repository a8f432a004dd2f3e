"""Ctrl-C while a command starts, and while it works."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tvm_fusion.host.interrupts import BEGINNING, INTERRUPTED

ROOT = Path(__file__).parents[2]
SAID = "importing\n"
# What stands for TVM: its import takes a minute, and makes another error of what ends it.
SLOW_TVM = f"""
import sys, time
sys.stderr.write({SAID!r})
sys.stderr.flush()
try:
    time.sleep(60)
except BaseException as error:
    raise RuntimeError("import of a module of C++ failed") from error
"""


def begun(*arguments: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tvm_fusion", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, **pipes)


def interrupted(process: subprocess.Popen) -> str:
    """What a process says on standard error after an interrupt; nothing on standard output."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (INTERRUPTED, "")
    return err


def test_an_interrupt_while_tvm_is_imported_is_a_line(tmp_path):
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text(SLOW_TVM)
    process = begun("compile", "--demo", PYTHONPATH=str(tmp_path))
    assert process.stderr.readline() == SAID
    assert interrupted(process) == BEGINNING.decode()


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", ["compile --demo --peers none", "explain --demo", "profile"])
def test_an_interrupt_at_any_moment_is_a_line(tmp_path, arguments):
    words = [*arguments.split(), *(["--demo"] if "--demo" not in arguments else [])]
    line = re.compile(
        r"tvm_fusion: interrupted; plans and kernels that were ready are kept in .+, "
        r"and this goes on: .+\n"
    )
    seen = set()
    for moment_s in (0.5, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0):
        process = begun(*words, "--target", "llvm", "--quiet", TVM_FUSION_CACHE=str(tmp_path))
        time.sleep(moment_s)
        if process.poll() is not None:
            break
        said = interrupted(process)
        assert said == BEGINNING.decode() or line.fullmatch(said)
        seen.add(said)
    assert len(seen) == 2
