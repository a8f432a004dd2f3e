"""Tuned kernels that travel: tune where the device is, ship the folder, compile with it elsewhere.

    python tutorials/scripts/tune_and_ship.py

`tvm_fusion.tune` measures schedules for the kernels of a model and keeps them in a folder. Copied
to wherever models are built, it is a database around any pipeline, and nothing is tuned again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tvm
from tvm import relax

import tvm_fusion
from tvm_fusion.transform import Fuse, FusedFunction

ROWS, COLUMNS = 128, 256
TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})


def model() -> tvm.IRModule:
    """softmax(x * y + x): one kernel."""
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((ROWS, COLUMNS), "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            product = builder.emit(relax.op.multiply(x, y))
            total = builder.emit(relax.op.add(product, x))
            out = builder.emit_output(relax.op.nn.softmax(total, axis=-1))
        builder.emit_func_output(out)
    return builder.get()


def tuned_into(folder: Path) -> None:
    """Tune the model for a few seconds; without these settings it takes minutes."""
    few = {"spaces": ["stock"], "builders": 1, "repeats": 3, "final_repeats": 9}
    print(tvm_fusion.tune(model(), TARGET, database=folder, trials=3, settings=few))


def show(fused: FusedFunction) -> None:
    """Print what the database had for the kernels of a function."""
    for group in fused.report().to_json()["groups"]:
        tuned = group["tuned"]
        print(f"{fused.name}: {tuned['choice']}, {tuned['us']:.1f} us when it was tuned")


def built_with(folder: Path) -> tvm.runtime.Executable:
    """Compile the model through a pipeline of the user's, with what a folder has."""
    with tvm_fusion.TuningDatabase(folder) as database, TARGET:
        print(f"{len(database)} records in the folder that was shipped")
        passes = [
            relax.transform.CanonicalizeBindings(),
            Fuse(on_plan=show),
            relax.transform.DeadCodeElimination(),
        ]
        mod = tvm.transform.Sequential(passes)(model())
    return tvm.compile(mod, TARGET)


def main() -> None:
    """Tune, ship, compile, run."""
    with TemporaryDirectory() as here, TemporaryDirectory() as elsewhere:
        tuned_into(Path(here) / "tuned")
        shipped = shutil.copytree(Path(here) / "tuned", Path(elsewhere) / "shipped")
        executable = built_with(shipped)
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((ROWS, COLUMNS)).astype("float32") for _ in "xy")
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    result = main(tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
    powers = np.exp(x * y + x)
    np.testing.assert_allclose(result, powers / powers.sum(-1, keepdims=True), rtol=1e-5)
    print("the numbers are right")


if __name__ == "__main__":
    main()
