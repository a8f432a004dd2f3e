"""How long a transformer block is planned and its kernels are written: of one core, with room for
a slow and busy machine (it takes about 2.5 and 1.3 seconds).
"""

import time

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.demo import demo_module
from tvm_fusion.job import Job

PLAN_LIMIT_S, WRITE_LIMIT_S = 8.0, 5.0


def test_the_demo_block_is_planned_and_written_in_seconds():
    target, hw = resolve_target("nvidia_h200")
    mod = demo_module("cuda")
    started = time.process_time()
    job = Job.from_module(mod, target, hw, load_policy({"probe": "off"}))
    planned = time.process_time()
    written, _ = job.write()
    ended = time.process_time()
    assert job.plan.predicted_us < 0.5 * job.plan.unfused_us
    assert len(written.functions) > len(job.plan.groups) / 2
    assert not job.cuts
    assert planned - started <= PLAN_LIMIT_S
    assert ended - planned <= WRITE_LIMIT_S
