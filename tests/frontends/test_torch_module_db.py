"""The layers of `torch.nn` on the samples that PyTorch tests them with, beside eager execution."""

import importlib
import inspect

import pytest
import torch

import tvm_fusion
from tvm_fusion.errors import FrontendError

SAMPLES = 3  # of each
PARTS = 40  # of all layers, the first of which runs always
# `_detect_is_causal_mask` asks the values of a mask, so that PyTorch cannot export them
NOT_EXPORTED = ("nn.Transformer", "nn.TransformerEncoder")
# their samples ask for float64
NOT_RUN = ("nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d")


def samples_of(info):
    """Layers in evaluation mode, and what they are called with."""
    torch.manual_seed(0)
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": False}
    samples = list(info.module_inputs_func(info, **options))
    for sample in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
        made, given = sample.constructor_input, sample.forward_input
        layer = info.module_cls(*made.args, **made.kwargs).eval()
        bound = inspect.signature(layer.forward).bind(*given.args, **given.kwargs)
        bound.apply_defaults()
        yield layer, tuple(bound.arguments.values())


@pytest.fixture(scope="module")
def layers():
    """Known when a test runs: to import what lists them takes three seconds."""
    return importlib.import_module("torch.testing._internal.common_modules").module_db


@pytest.mark.one_in(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_layers_are_right(layers, part):
    assert len(layers) >= PARTS
    for info in layers[part::PARTS]:
        assert_right(info)


def assert_right(info):
    compared = 0
    for layer, inputs in samples_of(info):
        try:
            with torch.no_grad():
                wanted = layer(*inputs)
        except RuntimeError:
            if info.name in NOT_RUN:
                continue
            raise
        try:
            compiled = tvm_fusion.compile(layer, "llvm", example_inputs=inputs)
        except FrontendError as error:
            if info.name in NOT_EXPORTED and "data-dependent" in str(error):
                continue
            raise
        torch.testing.assert_close(compiled(*inputs), wanted, atol=1e-4, rtol=2e-3, equal_nan=True)
        compared += 1
    assert compared or info.name in NOT_RUN
