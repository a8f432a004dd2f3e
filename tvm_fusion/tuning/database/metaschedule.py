"""Between trials and MetaSchedule: workloads and records, as its JSON has them.

    workload   ["<structural hash>", "<base64 of the module's JSON>"]
    record     [<trace>, <seconds>, <target>, <arguments>]

A configuration of a kernel class is a trace that puts it on the root block of the workload, which
changes no kernel and which MetaSchedule can read:

    sch.annotate(sch.get_sblock("root"), "tvm_fusion.config", "RowConfig(form=reg,threads=256)")
"""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import TuningRecord, Workload

from ...errors import InputError
from ...ir.quick_stacks import register_tensor_intrinsics
from .trial import Trial, check_text

ENTRY = "main"
ANNOTATION = "tvm_fusion.config"
WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
_BLOCK = "b0"


def workload_key(workload: tirx.PrimFunc) -> str:
    """The structural hash of a PrimFunc's module as MetaSchedule writes it, in decimal digits."""
    return hash_of(_module_of(workload))


def hash_of(mod: tvm.IRModule) -> str:
    """`workload_key` of a module of one function `main`."""
    return str(tvm_ffi.structural_hash(mod) & (2**64 - 1))


def _module_of(workload: tirx.PrimFunc) -> tvm.IRModule:
    return tvm.IRModule({ENTRY: workload.with_attr("global_symbol", ENTRY)})


def short_key(key: str) -> str:
    """A key as reports name it: 16 hexadecimal digits."""
    return f"{int(key):016x}"


def workload_text(workload: tirx.PrimFunc) -> str:
    """The base64 of the JSON of a PrimFunc's module.

    Raises
    ------
    InputError
        It has no root block: it is not an unscheduled function of TVM's s_tir.
    """
    if root_of(workload) is None:
        raise InputError(
            "a workload is the PrimFunc of a group before any schedule, with a root block; this "
            f"one has none; take it from a module after Materialize:\n{str(workload)[:400]}"
        )
    return str(Workload(_module_of(workload)).as_json()[1])


def load(key: str, module: str) -> Workload:
    """The `Workload` of a line whose checksum is right: TVM may crash on any other."""
    return Workload.from_json([key, module])


def root_of(func: tirx.PrimFunc) -> str | None:
    """The name of the root block of a PrimFunc; None where it has none."""
    name = getattr(getattr(func.body, "block", None), "name_hint", None)
    return None if name is None else str(name)


def arguments_of(mod: tvm.IRModule) -> list[Any] | None:
    """The parameters of a module's function as records have them; None for symbolic shapes."""
    try:
        infos = ArgInfo.from_entry_func(mod, remove_preproc=False)
    except (TypeError, ValueError, RuntimeError):  # a symbolic extent is no integer
        return None
    return [info.as_json() for info in infos]


def target_json(target: tvm.target.Target) -> dict[str, Any]:
    """A target as records hold it."""
    return json.loads(str(target))


def payload_of(trial: Trial, mod: tvm.IRModule, target: dict[str, Any]) -> list[Any]:
    """The record of an ok trial of a workload's module."""
    if trial.kind == "class":
        place = ["GetSBlock", [], [root_of(mod[ENTRY]), ENTRY], [_BLOCK]]
        trace = [[place, ["Annotate", [_BLOCK, f'"{trial.text}"'], [ANNOTATION], []]], []]
    else:
        trace = json.loads(trial.text)
    return [trace, [us * 1e-6 for us in trial.samples_us], target, arguments_of(mod)]


def choice_of(payload: list[Any]) -> tuple[str, str]:
    """Kind and text of the choice that a record is of."""
    trace = payload[0]
    match trace:
        case [
            [
                ["GetSBlock", [], [str(), _], [str(block)]],
                ["Annotate", [str(where), str(quoted)], [str(name)], []],
            ],
            [],
        ] if (where, name) == (block, ANNOTATION) and quoted == f'"{quoted[1:-1]}"':
            with suppress(ValueError):
                check_text("class", quoted[1:-1])
                return "class", quoted[1:-1]
    return "trace", json.dumps(trace, separators=(",", ":"))


def foreign_trial(payload: list[Any], day: str) -> Trial:
    """The trial that a record of MetaSchedule's tells of; ValueError or TypeError if none does.

    Nothing says that its numbers were compared, so that its `error` is None.
    """
    kind, text = choice_of(payload)
    samples = tuple(second * 1e6 for second in payload[1])
    us = statistics.median(samples)
    why = "read from a record of MetaSchedule"
    return Trial(kind, text, "ok", us, samples_us=samples, why=why, date=day)


def load_record(payload: list[Any], workload: Workload) -> TuningRecord:
    """The `TuningRecord` of a record that replays: TVM may crash on any other."""
    if any(instruction[0] == "Tensorize" for instruction in payload[0][0]):
        register_tensor_intrinsics()
    return TuningRecord.from_json(payload, workload)
