"""Sessions over one task of the class `Several`, in processes that tests share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tvm
from tvm import relax

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels import registry
from tvm_fusion.tuning.measure.building import Place, make_builders
from tvm_fusion.tuning.measure.measuring import LocalMeter
from tvm_fusion.tuning.measure.processes import Worker, stop_all
from tvm_fusion.tuning.search.task_search import TaskState
from tvm_fusion.tuning.session.choices import class_choices
from tvm_fusion.tuning.session.session import Session
from tvm_fusion.tuning.session.settings import load_settings
from tvm_fusion.tuning.session.tasks import tasks_of

from .tune_classes import HUNG, WAYS, Several

SIZE = (128, 1024)
SETTINGS = load_settings(
    {
        "spaces": ["class"],
        "trials": 20,
        "repeats": 5,
        "final_repeats": 11,
        "builders": 1,
        "build_memory_bytes": 4 << 30,
        "least_gain": 0.0,
    }
)


# A new process takes seconds to import TVM: the sessions of all tests build and measure in the same
# ones, and what a session ends or loses is started again.
BUILDERS = make_builders(SETTINGS)
METER = LocalMeter()
MEASURER = METER.worker
STARTED = [*BUILDERS, MEASURER]

ALONE = {"settings": SETTINGS, "policy": "aggressive"}  # in processes of its own
OPTIONS = {**ALONE, "builders": BUILDERS, "meters": [METER]}


_known: list[Sequence[str]] = []  # by the processes that tests share


@contextmanager
def several(ways: Sequence[str] = WAYS) -> Iterator[None]:
    """The class is known as long as the context lasts; to processes as they first heard of it."""
    if _known not in ([], [ways]):
        stop_all([*BUILDERS, MEASURER])
    _known[:] = [ways]
    registry.register(Several(ways), ("llvm",))
    try:
        yield
    finally:
        registry.unregister("tested")


def end_time_of_what_hangs(monkeypatch, folders):
    """The time of a process that says that it hangs is over; others have all that they need, on a
    machine that is busy too.
    """
    hung = folders.getbasetemp() / "hung"  # the same in all tests that share a process
    hung.unlink(missing_ok=True)
    left = Worker.left_s.fget

    def left_s(worker):
        process = hung.read_text() if hung.exists() else ""
        if worker._process is not None and process == str(worker._process.pid):
            return 0.0
        return left(worker)

    monkeypatch.setenv(HUNG, str(hung))
    monkeypatch.setattr(Worker, "left_s", property(left_s))


class Kept:
    """Trials in memory."""

    def __init__(self):
        self.found = []

    def add(self, workload, target, trial):
        self.found.append(trial)

    def of(self, text):
        return [t for t in self.found if f"way={text}" in t.text or t.text == text]


def chain_module(**sizes: tuple[int, int]) -> tvm.IRModule:
    """Functions y = tanh(x / 4) + 3 / 4 by name, of tensors of these sizes; a `main` by default."""
    builder = relax.BlockBuilder()
    for name, size in (sizes or {"main": SIZE}).items():
        x = relax.Var("x", relax.TensorType(size, "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                scaled = builder.emit(relax.op.multiply(x, relax.const(0.25, "float32")))
                bent = builder.emit(relax.op.tanh(scaled))
                out = builder.emit_output(relax.op.add(bent, relax.const(0.75, "float32")))
            builder.emit_func_output(out)
    return builder.get()


def make_session(settings=SETTINGS, trials=(), choices=None, meter=None, mod=None):
    """A session over one task; `choices` are those of its choices that are offered."""
    target, hw = resolve_target("llvm")
    policy = load_policy("aggressive")
    planned = Planned.of(mod or chain_module(), target, hw, policy)
    (task,) = tasks_of(planned.low, planned.graph, planned.plan, policy)
    assert mod is not None or task.kernel_class == "tested"
    offered = [c for c, _ in class_choices(task.workload, hw, policy)]
    if choices is not None:
        offered = [
            c for c in offered if c.text.partition("=")[2][:-1] in choices or c.text in choices
        ]
    state = TaskState(task, offered, settings)
    state.restore(trials)
    kept = Kept()
    place = Place("llvm", policy, registry.added())
    if meter is None:
        meter = LocalMeter()
        meter.worker = MEASURER
    STARTED.append(meter.worker)
    return Session([state], kept, place, settings, BUILDERS, [meter]), kept, state
