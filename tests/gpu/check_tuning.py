"""Trials that go wrong on a GPU: each costs itself only.

    python tests/gpu/check_tuning.py [--json F]

A kernel class with configurations that are right, write wrong numbers, write beyond the tensor (an
error that ends the CUDA context) and never end is tuned; what came of each trial is compared with
what should. Needs TVM, and torch with CUDA.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if shutil.which("nvcc"):
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")

import tvm
from tvm import relax

import tvm_fusion
from tests.support.tune_deadly import WAYS, Deadly
from tvm_fusion.kernels import registry
from tvm_fusion.tuning.database import find_database

WANTED = {"default": "ok", **WAYS}


def module():
    """A chain of pointwise operators."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4096, 4096), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            half = builder.emit(relax.op.multiply(x, relax.const(0.5, "float16")))
            out = builder.emit_output(relax.op.add(half, relax.const(0.75, "float16")))
        builder.emit_func_output(out)
    return builder.get()


def main() -> int:
    """The exit status: 0 if each trial came to what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    registry.register(Deadly(), ("cuda",))
    settings = {"spaces": ["class"], "builders": 6, "run_timeout_s": 5.0, "least_gain": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        result = tvm_fusion.tune(
            module(), "cuda", database=folder, settings=settings, policy="aggressive"
        )
        target, hw = tvm_fusion.config.resolve_target("cuda")
        kept = find_database(Path(folder), hw, target, read_only=True)
        trials = [t for w in kept.workloads() for t in kept.trials(w)]
    found = {}
    for trial in trials:
        way = trial.text.partition("=")[2].rstrip(")") or trial.text
        found[way] = {"status": trial.status, "us": trial.us, "why": trial.why}
        print(f"{way:8} {trial.status:8} {trial.us or 0:8.1f} us  {trial.why[:150]}")
    wrong = [w for w, s in WANTED.items() if found.get(w, {}).get("status") != s]
    print("as wanted" if not wrong else f"NOT as wanted: {wrong}")
    if args.json:
        facts = {"seconds": round(result.seconds, 1), "trials": found, "tvm": tvm.__version__}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
