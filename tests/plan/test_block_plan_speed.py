"""How much it takes to plan a transformer block and to write its kernels: about 2.5 and 1.3 seconds
of one core.
"""

import pytest

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.demo import demo_module
from tvm_fusion.flow.planned import Planned

from ..support.counting import calls_of, searched

# Half as much again as was counted.
ASKED, COSTED = 17_000, 3_700  # groups
CALLS = 5_000_000  # while kernels are written


# Always: `test_plan_speed`, and `test_writing_steps` of kernels.
@pytest.mark.nightly
def test_the_demo_block_is_planned_and_written_in_so_many_steps(monkeypatch):
    target, hw = resolve_target("nvidia_h200")
    mod = demo_module("cuda")
    with searched(monkeypatch) as work:
        planned = Planned.of(mod, target, hw, load_policy({"probe": "off"}))
    written = []
    calls = calls_of(lambda: written.append(planned.write()))
    assert planned.plan.predicted_us < 0.5 * planned.plan.unfused_us
    assert len(written[0].mod.functions) > len(planned.plan.groups) / 2
    assert not written[0].planned.cuts
    assert work["asked"] < ASKED
    assert work["costed"] < COSTED
    assert calls < CALLS
