"""Exchanges between the warps of a row: right in whatever order these run."""

import dataclasses

import pytest

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.program.analysis import analyze
from tvm_fusion.kernels.row.config import Form, RowConfig
from tvm_fusion.kernels.row.exchange import Exchange
from tvm_fusion.kernels.row.kernel import emit_row

from ...support.cuda_on_cpu import without_each_barrier
from ...support.kernel_cases import Case, softmax_of
from ...support.kernel_checks import is_race
from ...support.row_graphs import softmax

FEW_SMS = dataclasses.replace(load_profile("nvidia_h200"), num_sms=3)
SOFTMAX = Case("softmax", softmax, (((7, 1040), "float16"),), lambda x: [softmax_of(x)])
FUNC = SOFTMAX.func()
RING = RowConfig(Form.BULK, 96, resident=1)
"""Blocks that stay for several rows: each exchange may meet what is left of the one before."""

FORMS = {
    "registers": RowConfig(threads=96),
    "more_partials_than_few": RowConfig(threads=512),
    "rows_of_two_warps": RowConfig(threads=64, rows=2),
    "a_loop_of_phases": RowConfig(Form.LOOP, 64, unroll=1, online=False),
    "a_cluster": RowConfig(threads=64, cluster=2),
    "a_ring": RING,
    "a_ring_of_one_warp": RowConfig(Form.BULK, 32, resident=1),
    "a_ring_of_clusters": RowConfig(Form.BULK, 32, resident=1, cluster=2),
}


def kernel_of(config):
    return emit_row(analyze(FUNC), config, FEW_SMS)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("form", FORMS)
def test_a_softmax_is_right_in_any_order_of_warps(form):
    assert not is_race(SOFTMAX, FUNC, kernel_of(FORMS[form]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", ["registers", "a_loop_of_phases", "a_ring", "a_ring_of_one_warp"])
def test_each_barrier_is_needed(form):
    kernels = without_each_barrier(kernel_of(FORMS[form]))
    assert kernels
    assert all(is_race(SOFTMAX, FUNC, kernel) for kernel in kernels)


def test_resident_blocks_need_two_sets_of_slots(monkeypatch):
    begin = Exchange.__init__

    def with_one_set(self, threads, turn, finish, after_barrier):
        begin(self, threads, None, finish, after_barrier)

    monkeypatch.setattr(Exchange, "__init__", with_one_set)
    assert is_race(SOFTMAX, FUNC, kernel_of(RING))
