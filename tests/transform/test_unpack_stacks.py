"""Stacked parts of packed integers: what becomes one shift, and what stays."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

import tvm_fusion
from tvm_fusion.config import load_profile
from tvm_fusion.transform.pipeline import open_composites
from tvm_fusion.transform.rewrites.unpack_stacks import UnpackStacks

from ..support.graphs import module
from ..support.helpers_tir import quick_executable


def nibbles(bb, q, *, mask=15, shift=4, stacked=False, masked=True, behind=False):
    """The lower and the upper bits of bytes, side by side or one behind the other."""
    low = bb.emit(op.bitwise_and(q, relax.const(mask, "uint8")))
    high = bb.emit(op.right_shift(q, relax.const(shift, "uint8")))
    if masked:
        high = bb.emit(op.bitwise_and(high, relax.const(mask, "uint8")))
    if behind:
        return op.concat((low, high), axis=1)
    if stacked:
        return op.stack((low, high), axis=-1)
    parts = [bb.emit(op.expand_dims(part, 2)) for part in (low, high)]
    return op.concat(parts, axis=2)


def operators(mod: tvm.IRModule) -> list[str]:
    """Names of the operators of `main`, in order."""
    bindings = (b for block in mod["main"].body.blocks for b in block.bindings)
    return [b.value.op.name.removeprefix("relax.") for b in bindings if hasattr(b.value, "op")]


def build(**options) -> tvm.IRModule:
    return module(lambda bb, q: nibbles(bb, q, **options), ((4, 6), "uint8"))


@pytest.mark.parametrize(
    "options",
    [{}, {"masked": False}, {"stacked": True}, {"behind": True}],
    ids=["concat", "unmasked", "stack", "behind"],
)
def test_stacked_nibbles_become_one_shift_with_the_same_numbers(options):
    mod = build(**options)
    rewritten = UnpackStacks()(mod)
    moved = ["reshape"] if "behind" in options else []
    assert operators(rewritten) == ["expand_dims", "right_shift", "bitwise_and", *moved]
    q = np.random.default_rng(2).integers(0, 256, (4, 6)).astype("uint8")
    found = []
    for each in (mod, rewritten):
        vm = relax.VirtualMachine(quick_executable(each), tvm.cpu())
        found.append(vm["main"](tvm.runtime.tensor(q)).numpy())
    assert np.array_equal(*found)
    both = np.concatenate if "behind" in options else np.stack
    assert np.array_equal(found[0], both([q & 15, q >> 4], -1))


@pytest.mark.parametrize(
    "options", [{"shift": 2}, {"mask": 5}, {"mask": 7}], ids=["overlap", "holes", "gap"]
)
def test_other_stacks_stay(options):
    mod = build(**options)
    assert UnpackStacks()(mod).same_as(mod)


def test_weights_stacked_from_bytes_stay_packed_up_to_the_product():
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("q", torch.randint(0, 256, (4096, 2048), dtype=torch.uint8))

        def forward(self, x):
            w = torch.stack([self.q & 15, self.q >> 4], -1).reshape(4096, 4096)
            return x @ (w.to(x.dtype) - 8).t()

    model = Linear(), (torch.randn(1, 4096).half(),)
    compiled = tvm_fusion.compile(model, "nvidia_h200", verify=False)
    assert compiled.launches == 1
    assert "tvmf_masked" in compiled.built.cuda_source


def test_only_devices_with_fused_kernels_rewrite():
    mod = build()
    profile = load_profile("nvidia_h200")
    opened = open_composites(mod, profile.to_target(), True, profile)
    assert "concat" not in operators(opened)
    assert "concat" in operators(open_composites(mod, tvm.target.Target("llvm"), True, None))
