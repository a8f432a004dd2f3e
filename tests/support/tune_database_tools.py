"""Small databases for tests, and what MetaSchedule makes of their files."""

import json
import multiprocessing
import tempfile

import tvm
import tvm_ffi
from tvm import s_tir
from tvm.script import tirx as T

from tvm_fusion.tuning.database import Database, Trial, export, replay, trace_text, workload_key
from tvm_fusion.tuning.database.metaschedule import choice_of

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
    database = Database.open(folder, device, target=target)
    for func, trial in trials_of_all():
        database.add(func, target, trial)
    return database


def content(database):
    """All trials with the keys of their workloads."""
    return database.all_trials()


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
    from tvm.s_tir.meta_schedule.database import JSONDatabase

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


def judge_by_fork(suspects):
    """`replay.judge` with a copy of this process in place of one that imports TVM first."""
    return [_judge_by_fork(suspect) for suspect in suspects]


def _judge_by_fork(suspect):
    try:
        workload, *payloads = in_child(_verdicts, suspect)
    except AssertionError as error:
        workload, *payloads = [str(error)] * (1 + len(suspect.payloads))
    return replay.Verdict(workload, tuple(payloads))


def _verdicts(suspect):
    line = json.dumps([[suspect.key, suspect.module], suspect.payloads])
    return list(replay.verdicts_on([line], 0))
