"""Worker processes: what one request does to itself costs that request only."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import tvm_fusion
from tvm_fusion.host.cores import usable_cores
from tvm_fusion.tuning.measure import processes
from tvm_fusion.tuning.measure.processes import (
    PREFIX,
    Worker,
    remove_abandoned,
    scratch_folder,
    wait_for,
)

from ..support import tune_requests as requests

SESSION = """
import sys, time
from tests.support import tune_requests
from tvm_fusion.tuning.measure.processes import Worker

worker = Worker("tested", torch=False)
worker.send(tune_requests.start_child, (sys.argv[1],), 60.0)
time.sleep(3600)
"""


LIGHT = """
import runpy, sys, types
sys.modules["torch"] = None
for name, folder in {folders!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def light(monkeypatch):
    """Processes begin without what the package imports, TVM above all: at once."""

    def command(module, torch):
        packages = (tvm_fusion, tvm_fusion.tuning)
        folders = {package.__name__: package.__path__[0] for package in packages}
        return [sys.executable, "-c", LIGHT.format(folders=folders, module=module)]

    monkeypatch.setattr(processes, "module_command", command)


@pytest.fixture
def worker(light):
    found = Worker("tested", torch=False)
    yield found
    found.stop()


class Clock:
    """The time of workers, which the tests move on."""

    sleep = staticmethod(time.sleep)
    passed_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.passed_s


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(processes, "time", found)
    monkeypatch.setattr(processes, "STARTING_S", 1000.0)
    monkeypatch.setattr(processes, "PREPARING_S", 1000.0)
    return found


def ask(worker, function, *arguments, limit_s=60.0, before=None):
    worker.send(function, arguments, limit_s, before)
    return answer_of(worker)


def answer_of(worker):
    answer = worker.wait()
    assert not worker.busy
    return answer


def test_values_come_back_and_the_process_stays(worker):
    assert ask(worker, requests.echo, {"a": (1, 2)}).value == {"a": (1, 2)}
    first, second = (ask(worker, requests.process_number).value for _ in range(2))
    assert first == second != os.getpid()


def test_an_exception_is_an_answer(worker):
    answer = ask(worker, requests.fail, "no such layout")
    assert (answer.status, answer.why) == ("error", "ValueError: no such layout")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "arguments", "status", "why"),
    [
        (requests.die, (), "crash", "SIGSEGV"),
        (requests.leave, (), "crash", "exit status 3): the driver is gone"),
        (requests.hang, (), "timeout", "no answer within 1 s"),
        (requests.fail, ("CUDA: out of memory",), "memory", "ValueError: CUDA: out of memory"),
    ],
)
def test_a_lost_process_is_replaced(worker, function, arguments, status, why):
    before = ask(worker, requests.process_number).value
    answer = ask(worker, function, *arguments, limit_s=1.0 if status == "timeout" else 60.0)
    assert answer.status == status
    assert why in answer.why
    after = ask(worker, requests.process_number)
    assert after.status == "ok"
    assert after.value != before


def test_what_comes_before_a_request_takes_none_of_its_time(worker, clock, tmp_path):
    assert ask(worker, requests.echo, 0).value == 0
    go = tmp_path / "go"
    worker.send(requests.echo, (1,), 30.0, (requests.wait_for_file, (str(go),)))
    clock.passed_s += 500.0
    go.touch()
    answer = answer_of(worker)
    assert (answer.status, answer.value) == ("ok", 1)
    assert answer.seconds >= 500.0
    worker.send(requests.hang, (), 30.0, (requests.echo, (2,)))
    while worker.left_s > 30.0:  # it prepares
        assert worker.collect() is None
        wait_for([worker], 0.1)
    clock.passed_s += 30.0
    hanging = answer_of(worker)
    assert (hanging.status, hanging.why) == ("timeout", "no answer within 30 s")


def test_the_start_of_a_process_takes_none_of_the_time_of_a_request(light, clock, tmp_path):
    go = tmp_path / "go"
    worker = Worker("tested", (requests.wait_for_file, (str(go),)), torch=False)
    worker.send(requests.echo, (1,), 30.0)
    clock.passed_s += 500.0
    go.touch()
    answer = answer_of(worker)
    worker.stop()
    assert (answer.status, answer.value) == ("ok", 1)
    assert answer.seconds < 500.0


def test_what_comes_before_a_request_may_fail(worker, monkeypatch):
    answer = ask(worker, requests.echo, 1, before=(requests.fail, ("no such tensor",)))
    assert (answer.status, answer.why) == ("error", "ValueError: no such tensor")
    assert ask(worker, requests.echo, 2).value == 2
    monkeypatch.setattr("tvm_fusion.tuning.measure.processes.PREPARING_S", 0.5)
    late = ask(worker, requests.echo, 1, before=(requests.hang, ()))
    assert (late.status, late.why) == ("timeout", "no answer within 0.5 s to prepare")
    assert ask(worker, requests.echo, 3).value == 3


def test_a_process_that_cannot_be_started_is_told(worker, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr("tvm_fusion.tuning.measure.processes.subprocess.Popen", refuse)
        with pytest.raises(OSError, match="no more processes"):
            worker.send(requests.echo, (1,), 1.0)
    assert not worker.busy
    assert ask(worker, requests.echo, 1).value == 1


def test_a_process_that_died_between_requests_is_replaced(worker):
    number = ask(worker, requests.process_number).value
    os.kill(number, signal.SIGKILL)
    worker._process.wait()
    assert ask(worker, requests.echo, 1).value == 1
    assert ask(worker, requests.echo, 2).value == 2


def test_memory_is_limited_in_every_new_process(light):
    worker = Worker("tested", (requests.limit_memory, (600 << 20,)), torch=False)
    try:
        for _ in range(2):
            assert ask(worker, requests.eat, 2 << 30).status == "memory"
        assert ask(worker, requests.eat, 1 << 20).value == 1 << 20
    finally:
        worker.stop()


def test_a_setup_that_fails_is_told(light):
    worker = Worker("tested", (requests.fail, ("no device",)), torch=False)
    try:
        for _ in range(2):
            answer = ask(worker, requests.echo, 1)
            assert (answer.status, answer.why) == ("error", "ValueError: no device")
    finally:
        worker.stop()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_run_on_as_many_threads_as_here(worker, monkeypatch, threads):
    monkeypatch.setattr("tvm_fusion.tuning.measure.processes.kernel_threads", lambda: threads)
    assert ask(worker, requests.threads).value == min(threads, len(usable_cores()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("torch", [False, True])
def test_a_process_that_needs_no_torch_imports_none(torch):
    worker = Worker("tested", torch=torch)
    try:
        assert ask(worker, requests.torch_seen).value == (torch, torch, torch)
    finally:
        worker.stop()


def test_stopping_ends_what_the_process_started(worker, tmp_path):
    file = tmp_path / "child"
    worker.send(requests.start_child, (str(file),), 60.0)
    until = time.monotonic() + 30
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    child = int(file.read_text())
    worker.stop()
    while _is_alive(child):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.usefixtures("no_torch")
def test_what_a_killed_session_started_ends(tmp_path):
    file = tmp_path / "child"
    session = subprocess.Popen([sys.executable, "-c", SESSION, str(file)])
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    child = int(file.read_text())
    session.kill()
    session.wait()
    while _is_alive(child):
        assert time.monotonic() < until
        time.sleep(0.05)


# Always: what a killed session started ends.
@pytest.mark.nightly
@pytest.mark.usefixtures("no_torch")
def test_a_worker_whose_parent_ended_before_it_began_ends():
    command = [
        sys.executable,
        "-m",
        "tvm_fusion.tuning.measure.processes",
        "0",
        str(os.getpid() + 1),
    ]
    assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 1


def test_temporary_files_of_a_process_go_with_it(worker):
    folder = ask(worker, requests.make_temporary).value
    assert os.path.exists(folder)
    worker.stop()
    assert not os.path.exists(folder)


def _is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- folders of libraries that sessions build: they go with the session, or with the next one

OWNER = """
import sys, time
from tvm_fusion.tuning.measure.processes import scratch_folder
with scratch_folder() as folder:
    (folder / "0.so").write_text("a library")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(place, no_torch):
    """A process that has a scratch folder, and the folder."""
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_goes_with_its_context(place):
    with scratch_folder() as folder:
        (folder / "0.so").write_text("a library")
        assert folder.parent == place
    assert not list(place.iterdir())


def test_a_folder_stays_as_long_as_its_process_and_goes_with_the_next_session(owner):
    process, folder = owner
    with scratch_folder():
        assert (folder / "0.so").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "0.so").exists()
    with scratch_folder() as other:
        assert not folder.exists()
        assert other.exists()


def test_only_folders_of_sessions_are_removed(place):
    for name in (f"{PREFIX}abandoned", "another"):
        (place / name).mkdir()
    (place / f"{PREFIX}file").write_text("no folder")
    (place / f"{PREFIX}link").symlink_to(place / "another")
    remove_abandoned()
    left = sorted(path.name for path in place.iterdir())
    assert left == ["another", f"{PREFIX}file", f"{PREFIX}link"]


def test_a_folder_that_another_session_takes_for_abandoned_is_made_again(place, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def making(prefix):
        made.append(Path(make(prefix=prefix)))
        if len(made) == 1:
            remove_abandoned()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", making)
    with scratch_folder() as folder:
        assert folder == made[1]
        assert folder.exists()
        assert not made[0].exists()
