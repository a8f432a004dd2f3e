"""What `gpu` has that needs no GPU: cases of products, each one kernel's work; plans compared."""

import json

import pytest
import torch
import tvm

from tvm_fusion.kernels.contraction.reader import analyze_contraction

from .gpu import check_derived
from .gpu.device_cases import CASES, int4, int4_weight
from .support.kernel_cases import fuse


def test_no_two_cases_have_one_name():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_contraction_with_the_outputs_that_torch_gives(case):
    func = fuse(case.emit, *case.inputs)
    assert analyze_contraction(func).segments
    inputs = []
    for shape, dtype in case.inputs:  # torch has no arithmetic of 8-bit floats
        kind = torch.float16 if dtype.startswith("float8") else getattr(torch, dtype)
        inputs.append(torch.empty(shape, dtype=kind, device="meta"))
    given = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in case.same(*inputs)]
    outputs = func.params[len(inputs) :]
    assert given == [(tuple(map(int, p.ty.shape)), str(p.ty.dtype)) for p in outputs]
    assert case.flop > 0


def test_packed_weights_are_the_same_numbers_in_relax_and_in_torch():
    func = fuse(int4, ((2, 256), "float16"), ((5, 32), "int32"), ((5, 2), "float16"))
    torch.manual_seed(0)
    x, scales = torch.randn(2, 256).half(), (torch.rand(5, 2) / 16).half()
    packed = torch.randint(-(2**31), 2**31, (5, 32)).int()
    given = torch.zeros(2, 5).half()
    built = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), "llvm")
    built["main"](*(tvm.runtime.from_dlpack(t) for t in (x, packed, scales, given)))
    wanted = x.double() @ int4_weight(packed, scales).double().T
    torch.testing.assert_close(given.double(), wanted, rtol=2e-3, atol=2e-3)


def test_kernels_of_a_derived_profile_are_compared_with_digests_and_kept(tmp_path, monkeypatch):
    for name, value in check_derived.golden.SETTINGS.items():
        monkeypatch.setenv(name, value)
    file, kept = tmp_path / "differing.json", {"before": "plan"}
    check_derived.differing("nvidia_h200", "weights/norm", kept, 1, file)
    assert json.loads(file.read_text())["cases"] == {"before": "plan", "weights/norm": ""}
    monkeypatch.setattr(check_derived.golden, "stored", lambda device: {"weights/norm": {}})
    check_derived.differing("nvidia_h200", "weights/norm", found := {}, 1, file)
    assert found["weights/norm"].startswith("kernels +")
