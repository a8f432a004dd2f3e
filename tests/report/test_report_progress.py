"""What a command shows while it works, and stray lines of TVM that it does not."""

import io
import os
import re
import threading
import time

import numpy as np
import pytest
from tvm import relax

import tvm_fusion
from tvm_fusion.host import progress
from tvm_fusion.host.progress import shown
from tvm_fusion.host.stages import Stage, stage, stepped, table
from tvm_fusion.host.stages import progress as stages
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
        with stage("short"):
            pass
        monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
        with stage("kernels compiled", 3) as one:
            one.step()
            assert file.written.wait(60)
    assert file.getvalue().splitlines()[0] == "tvm_fusion: kernels compiled: 1 of 3 ..."


def test_a_count_that_grows_is_said_again_and_one_that_stands_is_not(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "AGAIN_S", 0.0)
    file = Announced()
    with shown(file), stage("building"), stage("kernels compiled", 3) as one:
        for _ in range(3):
            file.written.clear()
            one.step()
            assert file.written.wait(60)
        time.sleep(5 * progress.LEAST_S)
    lines = [line for line in file.getvalue().splitlines() if "compiled" in line]
    assert lines[-3:] == [f"tvm_fusion: kernels compiled: {n} of 3 ..." for n in (1, 2, 3)]


def test_a_stage_of_many_short_ones_is_said(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    file = Announced()
    with shown(file), stage("outer", 2) as one:
        one.step()
        while not file.written.is_set():
            with stage("inner"):
                time.sleep(0.001)
    assert file.getvalue() == "tvm_fusion: outer: 1 of 2 ...\n"


def test_a_terminal_shows_the_running_stage_and_clears_it():
    pytest.importorskip("rich")
    file = Terminal()
    with shown(file):
        for _ in stepped("kernels compiled", range(7), 7):
            pass
        with stage("building"), stage("kernels written", 3) as one:
            one.step(2)
            until = time.monotonic() + 60
            while "2 of 3" not in file.getvalue() and time.monotonic() < until:
                time.sleep(0.02)
    for text in ("building", "kernels written", "2 of 3"):
        assert text in file.getvalue()
    assert not stages.handlers


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_wants_no_colours_gets_plain_lines(monkeypatch, variable):
    monkeypatch.setenv(*variable)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    file = Announced()
    file.isatty = lambda: True
    with shown(file), stage("planning"):
        assert file.written.wait(60)
    assert file.getvalue() == "tvm_fusion: planning ...\n"


def test_a_quiet_command_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    file = Announced()
    with shown(file, quiet=True), stage("planning"):
        time.sleep(5 * progress.LEAST_S)
    assert file.getvalue() == ""
    assert not stages.handlers


def test_what_a_stage_took_is_logged(caplog):
    with caplog.at_level("INFO", logger="tvm_fusion.time"), stage("kernels written", 2) as one:
        one.step()
    assert re.fullmatch(r"kernels written: 1 of 2: 0\.\d+ s", caplog.messages[-1])
    assert str(Stage("programs run", done=5)) == "programs run: 5"


def test_stages_within_are_logged_as_a_table_with_equal_ones_together(caplog):
    with caplog.at_level("INFO", logger="tvm_fusion.time"), table("compile"):
        for _ in range(2):
            with stage("planning"), stage("lowering"):
                time.sleep(0.02)
        with stage("building"), table("compile"):
            pass
    lines = [re.sub(r" +", " ", line) for line in caplog.messages[-5:]]
    shapes = [r"compile {s}", r" planning \(2\) {s} \d+%", r" lowering \(2\) {s} \d+%"]
    shapes += [r" building {s} \d+%", r" compile {s} \d+%"]
    for line, shape in zip(lines, shapes, strict=True):
        assert re.fullmatch(shape.format(s=r"\d\.\d\d s"), line)
    assert float(lines[0].split()[-2]) >= float(lines[1].split()[-3]) >= 0.04


def test_nobody_who_does_not_listen_hears_of_stages(capfd):
    with stage("planning"):
        pass
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
