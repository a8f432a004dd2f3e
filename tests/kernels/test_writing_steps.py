"""No kernel of a network takes more than two seconds of a core to write: calls of functions are
counted in their place, which a busy machine does not stretch.
"""

import pytest
import torch

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.transform.apply import write_kernels

from ..benchmarks.plans.suite_graphs import suite_module
from ..benchmarks.workloads.vision import Inception
from ..support.counting import calls_of

MOST_CALLS = 5_500_000
"""About two seconds: the demo's block takes 1.3 s and 3.3 million calls."""

NETWORKS = ("googlenet_b1", "densenet201_b1", "mobilenet_v2_b1", "efficientnet_b0_b1", "vit_b16")


def inception():
    """Four branches side by side, one of them pooled, and a pool behind their concatenation."""
    module = torch.nn.Sequential(
        Inception(528, (256, 160, 320, 32, 128, 128)), torch.nn.MaxPool2d(3, 2, 1)
    )
    module = module.half().eval().to(memory_format=torch.channels_last)
    data = torch.randn(1, 528, 14, 14, dtype=torch.float16)
    return load((module, (data.to(memory_format=torch.channels_last),)))


def network(name):
    return lambda: suite_module(f"compile_time/{name}")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(inception, id="inception"),
        *(pytest.param(network(n), id=n, marks=pytest.mark.nightly) for n in NETWORKS),
    ],
)
def test_no_kernel_takes_more_than_two_seconds_to_write(make, monkeypatch):
    target, hw = resolve_target("nvidia_h200")
    planned = Planned.of(make(), target, hw, load_policy({"probe": "off"}))
    write, calls = write_kernels.write_kernel, []

    def counted(func, class_name, *arguments):
        written = []
        took = calls_of(lambda: written.append(write(func, class_name, *arguments)))
        calls.append((took, class_name))
        return written[0]

    monkeypatch.setattr(write_kernels, "write_kernel", counted)
    assert not planned.write().planned.cuts
    assert len(calls) > 3
    assert max(calls)[0] < MOST_CALLS, max(calls)
