"""Real models that nobody here wrote, end to end on the CPU: fewer launches, right numbers."""

import numpy as np
import pytest
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import tvm_fusion
from tests.support import models

# (model, most launches allowed fused, fewest expected unfused, verify): a plan that gets worse is
# noticed.
TORCH = [(models.tiny_llama, 28, 90, False), (models.tiny_bert, 20, 40, True)]
TORCH += [pytest.param(models.tiny_llama, 28, 90, True, marks=pytest.mark.nightly)]
ONNX = [
    ("light_squeezenet", 40, 90),
    pytest.param("light_resnet50", 110, 170, marks=pytest.mark.nightly),
    pytest.param("light_densenet121", 230, 650, marks=pytest.mark.nightly),
]


def check(compiled, case, most, least):
    report = compiled.report
    assert compiled.launches == report.launches.fused <= most
    assert report.launches.unfused >= least
    assert [g.fallback for g in report.groups if g.fallback] == []
    given = tree_leaves(compiled(*case.arrays))
    assert len(given) == len(case.expected)
    for x, want in zip(given, case.expected, strict=True):
        np.testing.assert_allclose(x, want, atol=1e-4 * np.abs(want).max(), rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(("build", "most", "least", "verify"), TORCH)
def test_a_model_of_transformers(build, most, least, verify):
    case = build()
    compiled = tvm_fusion.compile(case.model, "llvm", example_inputs=case.inputs, verify=verify)
    assert not verify or compiled.report.verify.passed
    check(compiled, case, most, least)


# Always: `test_onnx`, its operators and another squeezenet.
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "most", "least"), ONNX)
def test_a_model_of_onnx(name, most, least):
    case = models.onnx_light_random(name)
    check(tvm_fusion.compile(case.model, "llvm", verify=False), case, most, least)


# Always: BERT's import (`test_torch`), a model of each kind (`zoo`), attention of symbolic sizes.
@pytest.mark.nightly
def test_a_model_of_transformers_compiles_once_for_all_batches_and_lengths():
    case = models.tiny_bert(sequence=16, batch=2)
    sizes = {"input_ids": {0: Dim("batch"), 1: Dim("length", max=256)}}
    compiled = tvm_fusion.compile(
        case.model, "llvm", example_inputs=case.inputs, dynamic_shapes=sizes, verify=False
    )
    assert compiled.launches < compiled.report.launches.unfused
    for batch, length in ((3, 21), (1, 1)):
        other = models.tiny_bert(length, batch)
        for x, want in zip(tree_leaves(compiled(*other.arrays)), other.expected, strict=True):
            np.testing.assert_allclose(x, want, atol=1e-4 * np.abs(want).max(), rtol=0)
