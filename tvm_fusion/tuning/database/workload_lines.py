"""Between a PrimFunc and its line in ``database_workload.json``: the calls into TVM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from ...errors import InputError
from ...ir.quick_stacks import register_tensor_intrinsics
from .lines import WorkloadLine, canonical, digest

ENTRY = "main"


@dataclass(frozen=True, slots=True)
class Facts:
    """What records say of their workload.

    Attributes
    ----------
    root : str
        The name of its root block.
    arguments : list or None
        Its parameters as MetaSchedule describes them; None where a shape is symbolic.
    """

    root: str
    arguments: list[Any] | None


def module_of(workload: tirx.PrimFunc) -> tvm.IRModule:
    """The module by which MetaSchedule knows a PrimFunc: with the name `main`."""
    return tvm.IRModule({ENTRY: workload.with_attr("global_symbol", ENTRY)})


def workload_key(workload: tirx.PrimFunc) -> str:
    """The structural hash of `module_of(workload)` in decimal digits, as MetaSchedule writes it."""
    return str(tvm_ffi.structural_hash(module_of(workload)) & (2**64 - 1))


def short_key(key: str) -> str:
    """A key as reports name it: 16 hexadecimal digits."""
    return f"{int(key):016x}"


def line_of(workload: tirx.PrimFunc) -> WorkloadLine:
    """The line of a PrimFunc.

    Raises
    ------
    InputError
        It has no root block: it is not an unscheduled function of TVM's s_tir.
    """
    from tvm.s_tir.meta_schedule.database import Workload

    mod = module_of(workload)
    facts_of(mod)
    text = canonical(Workload(mod).as_json())
    return WorkloadLine(json.loads(text)[0], text, digest(text))


def load(line: WorkloadLine) -> Any:
    """The `Workload` of a line whose digest is known: TVM may crash on any other."""
    from tvm.s_tir.meta_schedule.database import Workload

    return Workload.from_json(json.loads(line.text))


def trace_text(trace: Any) -> str:
    """The text of a choice of kind "trace": a `tvm.s_tir.schedule.Trace` as compact JSON."""
    return json.dumps(_plain(trace.as_json()), separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON with the numbers that TVM wraps."""
    if isinstance(value, list | tuple | tvm_ffi.Array):
        return [_plain(x) for x in value]
    if isinstance(value, dict | tvm_ffi.Map):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value.value
    return str(value) if isinstance(value, str) else value


def load_record(payload: list[Any], workload: Any) -> Any:
    """The `TuningRecord` of a record that replays: TVM may crash on any other."""
    from tvm.s_tir.meta_schedule.database import TuningRecord

    if any(instruction[0] == "Tensorize" for instruction in payload[0][0]):
        register_tensor_intrinsics()
    return TuningRecord.from_json(payload, workload)


def check_replay(payload: list[Any], workload: Any) -> None:
    """InputError unless the trace of a record replays on its `Workload`."""
    try:
        load_record(payload, workload)
    except (RuntimeError, ValueError, TypeError) as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        raise InputError(f"the trace does not replay on the workload: {last[:300]}") from error


def facts_of(mod: tvm.IRModule) -> Facts:
    """The facts of a workload's module."""
    root = root_of(mod[ENTRY])
    if root is None:
        raise InputError(
            "a workload is the PrimFunc of a group before any schedule, with a root block; this "
            f"one has none:\n{str(mod[ENTRY])[:400]}"
        )
    return Facts(root, _arguments(mod))


def root_of(func: tirx.PrimFunc) -> str | None:
    """The name of the root block of a PrimFunc; None where it has none."""
    name = getattr(getattr(func.body, "block", None), "name_hint", None)
    return None if name is None else str(name)


def _arguments(mod: tvm.IRModule) -> list[Any] | None:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    try:
        infos = ArgInfo.from_entry_func(mod, remove_preproc=False)
    except (TypeError, ValueError, RuntimeError):  # a symbolic extent is no integer
        return None
    return [info.as_json() for info in infos]


def target_json(target: tvm.target.Target) -> dict[str, Any]:
    """A target as records hold it."""
    return json.loads(str(target))


def identity(target: Mapping[str, Any]) -> dict[str, Any]:
    """What of a target decides which kernels are fast: all but its host and its tag."""
    return {name: value for name, value in target.items() if name not in ("host", "tag")}
