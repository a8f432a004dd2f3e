# %% [markdown]
# # 6. Tuning, and shipping what was found
#
# **Question.** The cost model ranks the configurations of a kernel and the first one is taken.
# Could another one be faster on my machine, and if so, how does that get to where the model is
# built?
#
# Tuning measures. Each candidate is built and run in a process of its own, checked against
# float64 before its time counts, and kept in a folder. This notebook tunes one kernel with very
# few trials, ships the folder, and compiles with it elsewhere.

# %%
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion

root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "tests/results").is_dir())
folder = tempfile.TemporaryDirectory()
tuned, shipped = Path(folder.name) / "tuned", Path(folder.name) / "shipped"

# %% [markdown]
# ## Tune
#
# Three trials, one process that builds, few repetitions: enough to see what happens, not to find
# much. Without such settings a session takes minutes and goes on until nothing is left to try.


# %%
@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((128, 256), "float32"), y: R.Tensor((128, 256), "float32")):
        with R.dataflow():
            out = R.nn.softmax(R.add(R.multiply(x, y), x), axis=-1)
            R.output(out)
        return out


target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
quick = {"spaces": ["stock"], "builders": 1, "repeats": 3, "final_repeats": 9}
result = tvm_fusion.tune(Model, target, database=tuned, trials=3, settings=quick)
for task in result.tasks:
    kept = "the untuned kernel" if task.choice == "default" else "another schedule"
    print(f"{task.name}: {task.trials} trials, {kept} is kept")
assert [task.trials for task in result.tasks] == [3]

# %% [markdown]
# The choice is often `default`: the kernel that is written without tuning. It is the first trial
# of every task, and another one has to beat it by more than the noise, measured again in turns
# with it. So a tuned model is never slower than the untuned one, but for what nobody can measure.
#
# A session that is interrupted loses nothing: called again with the same folder it goes on where
# it was.

# %% [markdown]
# ## What is in the folder
#
# One file for each device and version, one line a trial, each line with a checksum. Two sessions
# may append to it at the same time, a torn line costs that line, and `tune --db-check` reads all
# of it.

# %%
lines = [line for file in tuned.rglob("*.jsonl") for line in file.read_text().splitlines()]
print(Counter(json.loads(line)["line"] for line in lines))
assert all("checksum" in json.loads(line) for line in lines)

# %% [markdown]
# ## Ship it
#
# Copy the folder to wherever models are built. `compile(..., database=...)` takes it, and around
# a pipeline of your own it is a context, like any database of MetaSchedule.

# %%
used = []
shutil.copytree(tuned, shipped)
with tvm_fusion.TuningDatabase(shipped) as database, target:
    print(len(database), "records were shipped")
    passes = [
        relax.transform.CanonicalizeBindings(),
        tvm_fusion.transform.Fuse(
            on_plan=lambda fused: used.append(fused.report().to_json()["groups"][0]["tuned"])
        ),
        relax.transform.DeadCodeElimination(),
    ]
    executable = tvm.compile(tvm.transform.Sequential(passes)(Model), target)

rng = np.random.default_rng(0)
x, y = (rng.standard_normal((128, 256), np.float32) for _ in "xy")
main = relax.VirtualMachine(executable, tvm.cpu())["main"]
found = main(tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
powers = np.exp((x * y + x).astype(np.float64))
np.testing.assert_allclose(found, powers / powers.sum(-1, keepdims=True), rtol=1e-5)
assert len(database) == 3
(kernel,) = used  # found by what it computes, whatever it is called here
assert (kernel["choice"] == "default") == (result.tasks[0].choice == "default")

# %% [markdown]
# A folder that has nothing of the target is an error if you passed it, and a note in the log if
# it is only the current one. Records of another version of this package are not used.

# %%
try:
    tvm_fusion.explain(Model, "nvidia_h200", database=shipped)
except tvm_fusion.InputError as error:
    print(error)

# %% [markdown]
# ## What it gains
#
# **Measured on an NVIDIA H100**, read from a committed file: 19 models, at most 64 trials a
# kernel.

# %%
gains = json.loads((root / "tests/results/tuning_h100.json").read_text())
rows = sorted(gains["rows"], key=lambda row: row["gain"])
print(gains["device"], gains["date"], f"{gains['minutes']:.1f} minutes")
fig, axis = plt.subplots(figsize=(8, 2.6))
axis.bar([row["name"] for row in rows], [row["gain"] for row in rows])
axis.set_yscale("log")
axis.set_ylabel("untuned / tuned")
axis.tick_params("x", rotation=60, labelsize=7)
plt.show()
same = sum(row["same_kernels"] for row in rows)
print(f"{same} of {len(rows)} models kept all of their kernels")
print(f"the largest gain is {rows[-1]['name']}: {rows[-1]['gain']:.2f}x")
assert rows[0]["gain"] > 0.98

# %% [markdown]
# Little, but for one. That is the point of a cost model: most kernels are as they should be
# before anything is measured. The exception was computed by TVM's own schedules at that time,
# since no family took it; there measuring finds what no model knew. So tune where `explain` shows
# the class `fallback` or `stock`, and where a kernel is far below its limit.
#
# ## What to try
#
# - `python -m tvm_fusion tune --demo --work-dir tuned --minutes 2`
# - `spaces=["class"]` measures configurations of this package's kernels only; `["stock"]`, as
#   here, only TVM's schedules.
# - Devices of other machines: `--rpc HOST:PORT --key KEY`, see [tuning](pages/tuning.md).

# %%
folder.cleanup()
