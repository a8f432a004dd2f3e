"""Compiled modules in a child of a fork, which has none of its parent's threads."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")

PATIENCE_S = 120


class Rows(Dataset):
    """Rows that a compiled module makes, in workers of a loader."""

    def __init__(self, run, x):
        self.run, self.x = run, x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        with torch.no_grad():
            return self.run(self.x[place])


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256)).eval()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seen", [False, True])
def test_workers_of_a_loader_call_and_compile(seen):
    model, x = mlp(), torch.randn(4, 128, 64)
    run = torch.compile(model, backend="tvm_fusion", options={"verify": False})
    with torch.no_grad():
        wanted = torch.stack([model(row) for row in x])
        if seen:
            run(x[0])
        loader = DataLoader(
            Rows(run, x), 2, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE_S
        )
        torch.testing.assert_close(torch.cat(list(loader)), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(run(x[0]), wanted[0], rtol=1e-4, atol=1e-4)


ALONE = """if True:
    import os, sys
    import numpy as np
    if {without}:
        sys.modules["torch"] = None
    from tvm.relax import BlockBuilder, TensorType, Var, op
    import tvm_fusion
    from tvm_fusion.host.threads import thread_count
    bb, x = BlockBuilder(), Var("x", TensorType((512, 256), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit_output(bb.emit(op.exp(op.add(x, x))))
        bb.emit_func_output(y)
    module = tvm_fusion.compile(bb.get(), "llvm", verify=False)
    numbers = np.linspace(-1, 1, 512 * 256, dtype="float32").reshape(512, 256)
    first = module(numbers)
    before = thread_count()
    child = os.fork()
    if not child:
        same = all(np.array_equal(module(numbers), first) for _ in range(3))
        again = os.fork()
        if not again:
            os._exit(0 if np.array_equal(module(numbers), first) else 1)
        right = os.waitstatus_to_exitcode(os.waitpid(again, 0)[1]) == 0
        print(same, right, thread_count(), flush=True)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(np.array_equal(module(numbers), first), thread_count() == before)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("without", [True, False])
def test_a_child_runs_kernels_in_its_own_thread_and_ends(without):
    run = subprocess.Popen(
        [sys.executable, "-c", ALONE.format(without=without)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = run.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert said.split() == ["True", "True", "1", "0", "True", "True"]
