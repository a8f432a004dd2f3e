"""A database for the module `block` of `pipelines.modules`, whose trials nobody ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tvm
from tvm import relax, s_tir, tirx

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.tuning.database import Database, Trial, find_database, trace_text
from tvm_fusion.tuning.session.choices import DEFAULT
from tvm_fusion.tuning.session.tasks import Task, tasks_of, without_stamps

from ..pipelines.cells import LLVM
from ..pipelines.modules import cases

TARGET = tvm.target.Target(LLVM)
PRODUCT = "fused_matmul_add_relu_add1"  # its kernel that is tuned
OTHER = tvm.target.Target({**LLVM, "num-cores": 4})
UNTUNED_US, BEST_US = 20.0, 10.0


def block() -> tvm.IRModule:
    """A product with its epilogue, then a norm: two kernels."""
    return cases(LLVM)["block"].make()


def tasks() -> list[Task]:
    """Its kernels: that of the product first."""
    target, hw = resolve_target(TARGET)
    planned = Planned.of(block(), target, hw, load_policy(None))
    return tasks_of(planned.low, planned.graph, planned.plan, planned.policy, planned.hw)


def fill(path: Path) -> Database:
    """A database by which a schedule of TVM is best for the product, and the untuned kernel for the
    norm.
    """
    database = find_database(path, resolve_target(TARGET)[1], TARGET)
    product, norm = tasks()
    for task in (product, norm):
        database.add(task.workload, TARGET, _trial("class", DEFAULT, UNTUNED_US))
    database.add(product.workload, TARGET, _trial("trace", _parallel(product), BEST_US))
    return database


def _trial(kind: str, text: str, us: float) -> Trial:
    return Trial(kind, text, "ok", us, 0.0, (us,) * 9, 0.0)


def _parallel(task: Task) -> str:
    """A schedule that no kernel class writes: each block by itself, its first loop in parallel."""
    mod = tvm.IRModule({"main": without_stamps(task.workload).with_attr("global_symbol", "main")})
    schedule = s_tir.Schedule(mod)
    for name in ("matmul", "T_add"):
        schedule.parallel(schedule.get_loops(schedule.get_sblock(name))[0])
    return trace_text(schedule.trace)


def kernels(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    return {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}


def check_numbers(executable) -> None:
    inputs, [wanted] = cases(LLVM)["block"].calls["main"](np.random.default_rng(0))
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs))
    np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-4, atol=1e-5)
