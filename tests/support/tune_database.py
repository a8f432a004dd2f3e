"""Small databases for tests: written, damaged, read again, and what MetaSchedule makes of them."""

import faulthandler
import json
import multiprocessing
import shutil
import tempfile
from functools import cache
from pathlib import Path

import tvm
import tvm_ffi
from tvm import s_tir
from tvm.s_tir.meta_schedule.database import JSONDatabase
from tvm.script import tirx as T

from tvm_fusion.tuning.database import Database, Trial, export, trace_text, workload_key
from tvm_fusion.tuning.database.metaschedule import choice_of
from tvm_fusion.tuning.database.store import DAMAGED, TRIALS
from tvm_fusion.tuning.measure.processes import Answer, answer

DEVICE = "test_cpu-tvm0-llvm0-fusion0"
DAY = "2026-01-31"
TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})
FORK = multiprocessing.get_context("fork")


def workload(rows, constant=1.5):
    """A PrimFunc that adds a constant to a matrix of `rows` rows."""

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((rows, 8), "float32"), B: T.Buffer((rows, 8), "float32")):
        for i, j in T.grid(rows, 8):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] + T.float32(constant)

    return main.with_attr("tvm_fusion.class", "pointwise")


WORKLOADS = (workload(16), workload(32), workload(64))


def ok(text, us, kind="class", error=0.0, **others):
    """A trial that took `us` microseconds."""
    samples = (us * 0.75, us, us * 1.5)
    return Trial(kind, text, "ok", us=us, samples_us=samples, error=error, date=DAY, **others)


def failed(text, status="crash", **others):
    """A trial without a time."""
    return Trial("class", text, status, why="signal 11", date=DAY, **others)


def split_text(func):
    """A MetaSchedule trace that splits the first loop of a workload."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    sch = s_tir.Schedule(mod)  # changes the function itself unless something holds the module
    loop = sch.get_loops(sch.get_sblock("add", func_name="main"))[0]
    sch.split(loop, [None, 4])
    return trace_text(sch.trace)


def trials_of_all():
    """Pairs of a workload and a trial, in the order in which they are written."""
    a, b, c = WORKLOADS
    return [
        (a, ok("Config(tile=1)", 4.0, spread=0.125, error=1e-7, predicted_us=3.5)),
        (a, failed("Config(tile=2)")),
        (b, ok("Config(tile=1)", 8.0)),
        (a, ok("Config(tile=4)", 3.0)),
        (b, ok(split_text(b), 7.0, kind="trace")),
        (c, ok("default", 16.0)),
        (c, failed("Config(tile=2)", "wrong", error=0.5)),
    ]


def fill(folder, device=DEVICE, target=TARGET):
    """A database with `trials_of_all`."""
    database = Database(folder, device, target=target)
    for func, trial in trials_of_all():
        database.add(func, target, trial)
    return database


def content(database):
    """All trials with the keys of their workloads."""
    return list(database.content().entries)


def expected():
    """`content` of a sound database."""
    return [(workload_key(func), trial) for func, trial in trials_of_all()]


def in_child(function, *args):
    """What a function returns in a process of its own; AssertionError if that process dies."""
    here, there = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_send, args=(there, function, args))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        child.join()
        raise AssertionError(f"the process ends with {child.exitcode}") from None
    finally:
        child.join()


def _send(pipe, function, args):
    faulthandler.disable()  # a crash here is on purpose
    pipe.send(function(*args))


def stock_records(folder):
    """What MetaSchedule's own database reads: hashes of the workloads, choices and seconds."""
    return in_child(_stock_records, folder)


def exported(database):
    """`stock_records` of an export."""
    with tempfile.TemporaryDirectory() as place:
        export(database.path, place)
        return stock_records(place)


def _stock_records(folder):
    found = []
    for record in JSONDatabase(work_dir=str(folder)).get_all_tuning_records():
        key = str(tvm_ffi.structural_hash(record.workload.mod) & (2**64 - 1))
        payload = record.as_json()
        found.append((key, *choice_of(payload), tuple(round(s * 1e9) for s in payload[1])))
    return sorted(found)


def records_of(trials):
    """`stock_records` of these pairs of keys and trials."""
    return sorted(
        (key, trial.kind, trial.text, tuple(round(us * 1e3) for us in trial.samples_us))
        for key, trial in trials
        if trial.ok
    )


def times(records):
    """Keys, kinds and seconds: MetaSchedule's files have 1 and 0 for true and false in traces."""
    return [(key, kind, seconds) for key, kind, _, seconds in records]


# ---- files


@cache
def _sound():
    place = tempfile.TemporaryDirectory()  # removed when the process ends
    return place, fill(Path(place.name) / "D").path


def copy_of_sound(path):
    """A database with `trials_of_all` in a folder that does not exist."""
    return Path(shutil.copytree(_sound()[1], path))


def open_(folder):
    """The database, for writing."""
    return Database(folder, DEVICE, target=TARGET)


def lines(folder, name=TRIALS):
    """The lines of a file, with their ends."""
    return (folder / name).read_bytes().splitlines(keepends=True)


def write(folder, found, name=TRIALS):
    """The inverse of `lines`."""
    (folder / name).write_bytes(b"".join(found))


def insert(folder, number, raw, name=TRIALS):
    """Put a line into a file."""
    found = lines(folder, name)
    found.insert(number, raw)
    write(folder, found, name)


def taken_out(folder):
    """Reasons of the lines that were damaged."""
    path = folder / DAMAGED
    return (
        [json.loads(line)["why"] for line in path.read_text().splitlines()] if path.exists() else []
    )


def reopened(folder):
    """The database, after it is repaired: sound in itself, for MetaSchedule, and lasting."""
    database = open_(folder)
    found, modules = content(database), database.content().workloads
    assert exported(database) == records_of([x for x in database.counted() if x[0] in modules])
    before = (folder / TRIALS).read_bytes()
    again = Database(folder, DEVICE)
    assert content(again) == found
    assert [p for p in again.problems if p.remedy] == []
    assert (folder / TRIALS).read_bytes() == before
    return database


def reasons(database):
    """All problems as one text."""
    return " | ".join(map(str, database.problems))


def without(found, *numbers):
    """A list without some of its elements."""
    return [x for n, x in enumerate(found) if n not in numbers]


class ForkedWorker:
    """A `Worker` that is a copy of this process for each request: it need not import TVM first."""

    def __init__(self, name, setup, torch):
        self.name = name

    def send(self, function, arguments, limit_s):
        try:
            status, value = in_child(answer, function, arguments)
        except AssertionError as error:
            status, value = "crash", error
        self._answer = Answer(status, value, "" if status == "ok" else str(value))

    def wait(self):
        return self._answer

    def stop(self):
        pass
