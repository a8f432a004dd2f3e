"""A language model's pipeline: one module with a prefill and a decode, fused and run.

    python tutorials/scripts/several_functions.py

Both functions share their weights; `Fuse` stands where TVM's own fusion would, between passes of
the user's, and plans each function by itself.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from tvm_fusion.transform import Fuse, FusedFunction

WIDTH, WORDS = 64, 100


class Layer(nn.Module):
    """A gated feed-forward layer between two norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, -1, 1e-5, bias=False)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def prefill(self, x: nn.Tensor) -> nn.Tensor:
        """Logits of all positions: (1, n, WIDTH) -> (1, n, WORDS)."""
        h = self.norm(x)
        h = self.down(nn.op.silu(self.gate(h)) * self.up(h)) + x
        return self.head(self.norm(h))

    def decode(self, x: nn.Tensor) -> nn.Tensor:
        """Logits of one position: (1, 1, WIDTH) -> (1, 1, WORDS)."""
        return self.prefill(x)


def exported() -> tuple[tvm.IRModule, list[tuple[str, nn.Parameter]]]:
    """The module, and its weights by name in the order of its parameters."""
    return Layer().export_tvm(
        {
            "prefill": {"x": nn.spec.Tensor((1, "n", WIDTH), "float32")},
            "decode": {"x": nn.spec.Tensor((1, 1, WIDTH), "float32")},
        }
    )


def show(fused: FusedFunction) -> None:
    """Print what became of a function."""
    launches = fused.report().launches
    print(f"{fused.name}: {launches.unfused:.0f} launches before, {launches.fused:.0f} now")


def main() -> None:
    """Build the module and run both functions."""
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    mod, parameters = exported()
    passes = [
        relax.transform.CanonicalizeBindings(),
        relax.transform.FuseTransposeMatmul(),
        Fuse(target, on_plan=show),
        relax.transform.DeadCodeElimination(),
    ]
    mod = tvm.transform.Sequential(passes)(mod)
    vm = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())

    random = np.random.default_rng(0)
    weights = [
        tvm.runtime.tensor(random.standard_normal(p.shape).astype(p.dtype) / 8)
        for _, p in parameters
    ]
    x = random.standard_normal((1, 5, WIDTH)).astype("float32")
    whole = vm["prefill"](tvm.runtime.tensor(x), *weights).numpy()
    last = vm["decode"](tvm.runtime.tensor(x[:, -1:]), *weights).numpy()
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-4, atol=1e-4)
    print(f"a prefill of {x.shape[1]} positions and a decode of the last one agree")


if __name__ == "__main__":
    main()
