"""What a command shows while it works, and stray lines of TVM that it does not."""

import io
import os
import threading

import numpy as np
import pytest
from tvm import relax

import tvm_fusion
from tvm_fusion.report import progress
from tvm_fusion.report.progress import shown, stages
from tvm_fusion.runtime.calls.sidecar import without_lines
from tvm_fusion.runtime.timing.spans import kernel_walls

from ..support.runtime_cases import LLVM, relax_module
from .test_report import Terminal


class Announced(io.StringIO):
    """A file that says when a line was written."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def write(self, text):
        super().write(text)
        if text.endswith("\n"):
            self.written.set()


def test_a_stage_that_lasts_is_a_line_and_a_short_one_is_none(monkeypatch):
    file = Announced()
    with shown(file):
        monkeypatch.setattr(progress, "PATIENCE_S", 1e6)
        stages.info("short")
        monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
        stages.info("timing %d kernels", 3)
        assert file.written.wait(60)
    assert file.getvalue() == "tvm_fusion: timing 3 kernels ...\n"


def test_a_terminal_shows_the_running_stage_and_clears_it():
    pytest.importorskip("rich")
    file = Terminal()
    with shown(file):
        stages.info("planning")
        stages.info("building")
    assert "building" in file.getvalue()
    assert not stages.handlers


def test_nobody_who_does_not_listen_hears_of_stages(capfd):
    stages.info("planning")
    assert capfd.readouterr() == ("", "")


def test_lines_are_held_back_and_others_passed_on(capfd):
    with without_lines(containing="Scope"):
        os.write(2, b"[1] Warning: Scope Saving:\n[2] something else\n")
    assert capfd.readouterr().err == "[2] something else\n"
    with pytest.raises(ValueError, match="of its own"), without_lines(containing="Scope"):
        raise ValueError("of its own")


@pytest.fixture(scope="module")
def compiled():
    weight = relax.const(np.ones((64, 64), "float32"))

    def model(bb, x):
        return relax.op.nn.softmax(bb.emit(relax.op.matmul(x, weight)))

    return tvm_fusion.compile(relax_module(model, ("x", (8, 64), "float32")), LLVM)


def test_a_module_that_has_run_is_saved_without_a_word(compiled, capfd, tmp_path):
    compiled(np.ones((8, 64), "float32"))
    compiled.save(tmp_path / "model.so")
    assert capfd.readouterr().err == ""


def test_each_kernel_of_a_call_has_a_time_and_calls_go_on_as_before(compiled):
    x = np.ones((8, 64), "float32")
    before = compiled(x)
    found = kernel_walls(compiled, [x], repeats=3)
    assert len(found) == compiled.launches
    for _, timing in found:
        assert 0 < timing.low_us <= timing.median_us <= timing.high_us
        assert timing.samples == 3
    np.testing.assert_array_equal(compiled(x), before)
