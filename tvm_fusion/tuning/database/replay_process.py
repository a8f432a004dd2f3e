"""The process in which lines of unknown origin are handed to TVM: a script, not a module.

    python replay_process.py <suspects> <verdicts> <done>

Each line of the file of suspects is ``[<workload line>, [<record without line number>, ...]]``. The
file of verdicts begins with a line ``["ready"]``; then one line ``[<reason or null>]`` goes to it
for each part, the workload before its records. The first `done` parts are passed over: a process
before this one judged them.
"""

import json
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "host" / "no_torch.py"))["hide_torch"]()

import tvm
import tvm_ffi
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import TuningRecord, Workload

INTRINSICS = str(Path(__file__).parents[2] / "ir" / "quick_stacks.py")


def check_workload(value):
    """The workload, if its module is one PrimFunc with the hash that the line names."""
    workload = Workload.from_json(value)
    mod = workload.mod
    names = [var.name_hint for var in mod.functions]
    if names != ["main"] or not isinstance(mod["main"], tvm.tirx.PrimFunc):
        raise ValueError(f"the module holds {names}, not one PrimFunc called main")
    found = str(tvm_ffi.structural_hash(mod) & (2**64 - 1))
    if found != value[0]:
        raise ValueError(f"the module's structural hash is {found}, not {value[0]}")
    return workload


def check_record(payload, workload):
    """Replays the record's trace on its workload."""
    if any(instruction[0] == "Tensorize" for instruction in payload[0][0]):
        runpy.run_path(INTRINSICS)["register_tensor_intrinsics"]()
    TuningRecord.from_json(payload, workload)
    if payload[3] is not None and payload[3] != arguments_of(workload):
        raise ValueError("the arguments are not those of the workload")


def arguments_of(workload):
    return [x.as_json() for x in ArgInfo.from_entry_func(workload.mod, remove_preproc=False)]


def judge(check, *args):
    """What a check returns, and why it fails or None."""
    try:
        return check(*args), None
    except Exception as error:  # whatever TVM says of a line is the verdict on it
        return None, (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def main(suspects_file, verdicts_file, done):
    left = int(done)
    with open(suspects_file) as suspects, open(verdicts_file, "a") as verdicts:

        def say(why):
            verdicts.write(json.dumps([why]) + "\n")
            verdicts.flush()

        say("ready")
        for line in suspects:
            value, payloads = json.loads(line)
            if left > len(payloads):
                left -= 1 + len(payloads)
                continue
            workload, why = judge(check_workload, value)
            if left == 0:
                say(why)
            left = max(left - 1, 0)
            for payload in payloads:
                if left:
                    left -= 1
                    continue
                reason = "its workload is damaged"
                say(reason if workload is None else judge(check_record, payload, workload)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
