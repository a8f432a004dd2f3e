"""LSTM, GRU and RNN beside PyTorch: they stay loops."""

import numpy as np
import pytest
import torch
from torch import nn
from tvm import tirx

from tests.support.frontend_tools import check, operators
from tests.support.models import run_unfused
from tests.support.module_on_cpu import EmulatedModule
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import FrontendError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.kernels.recurrence.problem import read_recurrence


class Layers(nn.Module):
    """Recurrent layers that are given their states one by one."""

    def __init__(self, kind, inputs, units, **options):
        super().__init__()
        self.layers = kind(inputs, units, **options)

    def forward(self, x, *states):
        given = states if len(states) > 1 else states[0] if states else None
        return self.layers(x, given)


def is_loop(func):
    """Whether a function has a loop over steps: it alone gives three results."""
    return isinstance(func, tirx.PrimFunc) and len(func.params) == 7


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_directions_and_states(kind):
    states = [torch.randn(4, 3, 7) for _ in range(2 if kind is nn.LSTM else 1)]
    layers = Layers(kind, 5, 7, num_layers=2, bidirectional=True, batch_first=True)
    check(layers, torch.randn(3, 6, 5), *states)
    check(Layers(kind, 5, 7, bias=False), torch.randn(6, 5))


def test_a_layer_is_one_product_and_one_loop_however_long_it_is():
    mod = check(Layers(nn.RNN, 5, 7, nonlinearity="relu"), torch.randn(300, 2, 5))
    assert operators(mod).count("relax.matmul") == 1
    (loop,) = (func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc))
    assert read_recurrence(loop).steps == 300


def test_the_batch_may_be_symbolic():
    model = nn.GRU(5, 7).eval()
    batch, x = torch.export.Dim("batch", max=100), torch.randn(4, 3, 5)
    mod = load(model, (x,), dynamic_shapes={"input": {1: batch}})
    x = torch.randn(4, 8, 5)
    with torch.no_grad():
        wanted = model(x)
    for found, expected in zip(run_unfused(mod, x.numpy()), wanted, strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-6)


def test_a_recurrence_becomes_a_kernel_on_a_gpu():
    model, x = Layers(nn.LSTM, 16, 64).half().eval(), torch.randn(4, 2, 16).half()
    hw = load_profile("nvidia_h200")
    planned = Planned.of(load(model, (x,)), hw.to_target(), hw, load_policy(None))
    (loop,) = (f for f in planned.write().mod.functions.values() if is_loop(f))
    assert loop.attrs["tirx.is_scheduled"]
    emulated = EmulatedModule.of(planned)
    found = emulated([x.numpy()])
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model.double()(x.double()))
    for result, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(result, expected.numpy(), rtol=0, atol=2e-3)
    assert not emulated.failures


def test_last_states_have_their_shape_where_torch_traces_another(monkeypatch):
    decompositions = torch._decomp.decompositions
    original = decompositions.one_layer_lstm

    def with_another_axis(*given, **options):
        y, last = original(*given, **options)
        return y, tuple(state.unsqueeze(0) for state in last)

    monkeypatch.setattr(decompositions, "one_layer_lstm", with_another_axis)
    model, x = Layers(nn.LSTM, 5, 7).double().eval(), torch.randn(4, 3, 5).double()
    shapes = [tuple(map(int, y.shape)) for y in load(model, (x,))["main"].ret_ty.fields]
    assert shapes == [(4, 3, 7), (1, 3, 7), (1, 3, 7)]


def test_projections_are_refused_by_name():
    with pytest.raises(FrontendError, match=r"aten.lstm.input .*projections \(proj_size\)"):
        load(Layers(nn.LSTM, 5, 7, proj_size=3).eval(), (torch.randn(4, 2, 5),))


def test_packed_sequences_are_refused_by_name():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.GRU(5, 7)

        def forward(self, x):
            lengths = torch.tensor([4, 2])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
            return self.layers(packed)[0].data

    with pytest.raises(FrontendError):
        load(Packed().eval(), (torch.randn(4, 2, 5),))
