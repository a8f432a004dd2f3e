"""A GPU whose profile is derived is measured at first use: what is kept, and what is not."""

import logging
from dataclasses import replace

import pytest

from tvm_fusion.calibrate.cpu.host_profile import VARIABLE
from tvm_fusion.calibrate.cuda import first_use, tensor
from tvm_fusion.calibrate.cuda.bench import build_kernels
from tvm_fusion.calibrate.findings import NotMeasured
from tvm_fusion.config import load_profile

L4 = load_profile("nvidia_l4")
FLOAT16 = L4.tensor_flop_per_s["float16"]


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(first_use, "driver_version", lambda: "580.1")
    first_use._gpu_profile.cache_clear()
    yield
    first_use._gpu_profile.cache_clear()


@pytest.fixture
def steps(monkeypatch):
    """Pretend that the benchmarks give these numbers, or raise; counts how often they are run."""
    runs = []

    def pretend(**values: float | Exception) -> list[str]:
        def step(name: str, value: float | Exception):
            def measure(_bench: object) -> float:
                runs.append(name)
                if isinstance(value, Exception):
                    raise value
                return value

            known = FLOAT16 if name == "float16" else getattr(L4, name)
            return measure, known

        made = {name: step(name, value) for name, value in values.items()}
        monkeypatch.setattr(first_use, "CudaBench", lambda *_args, **_more: None)
        monkeypatch.setattr(first_use, "_steps", lambda *_: made)
        return runs

    return pretend


def test_measured_rates_stand_in_place_of_derived_ones_and_are_kept(steps):
    runs = steps(hbm_bytes_per_s=2.6e11, float16=0.9 * FLOAT16, launch_us=6.0)
    profile = first_use.gpu_profile(L4)
    assert (profile.hbm_bytes_per_s, profile.launch_us) == (2.6e11, 6.0)
    for dtype, rate in L4.tensor_flop_per_s.items():
        assert profile.tensor_flop_per_s[dtype] == pytest.approx(0.9 * rate)
    assert profile.l2_bytes_per_s == L4.l2_bytes_per_s
    assert profile.derived.endswith("at first use: float16, hbm_bytes_per_s, launch_us")
    assert profile.measured["hbm_bytes_per_s"] == 2.6e11
    first_use._gpu_profile.cache_clear()
    assert first_use.gpu_profile(L4) == profile
    assert len(runs) == 3


def test_another_driver_or_card_is_measured_for_itself(steps, monkeypatch):
    runs = steps(launch_us=6.0)
    first_use.gpu_profile(L4)
    first_use.gpu_profile(replace(L4, num_sms=48))
    monkeypatch.setattr(first_use, "driver_version", lambda: "590.2")
    first_use._gpu_profile.cache_clear()
    first_use.gpu_profile(L4)
    assert len(runs) == 3


def test_what_fails_or_is_far_off_stays_as_derived(steps):
    steps(hbm_bytes_per_s=NotMeasured("no memory"), float16=10 * FLOAT16, launch_us=6.0)
    profile = first_use.gpu_profile(L4)
    assert profile.hbm_bytes_per_s == L4.hbm_bytes_per_s
    assert profile.tensor_flop_per_s == L4.tensor_flop_per_s
    assert profile.launch_us == 6.0


def test_where_nothing_can_be_measured_a_warning_says_so(monkeypatch, caplog):
    def broken(*_args: object, **_more: object) -> None:
        raise RuntimeError("CUDA: out of memory")

    monkeypatch.setattr(first_use, "CudaBench", broken)
    with caplog.at_level(logging.WARNING):
        assert first_use.gpu_profile(L4) is L4
        assert first_use.gpu_profile(L4) is L4
    (record,) = caplog.records
    assert "not measured at first use (RuntimeError: CUDA: out of memory)" in record.message


def test_a_damaged_file_is_measured_again(steps):
    runs = steps(launch_us=6.0)
    path = first_use.calibration_file(L4)
    path.parent.mkdir(parents=True)
    path.write_text('{"values": {"launch_us": -1}}')
    assert first_use.gpu_profile(L4).launch_us == 6.0
    assert runs == ["launch_us"]


def test_it_can_be_switched_off(steps, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    runs = steps(launch_us=6.0)
    assert first_use.gpu_profile(L4) is L4
    assert runs == []


def test_it_ends_when_the_time_is_over(steps):
    runs = steps(launch_us=6.0, hbm_bytes_per_s=2.6e11)
    assert first_use.measured(L4, budget_s=-1.0) == {}
    assert runs == []


class Bench:
    """A device that moves, reads out of the L2 and multiplies at these rates."""

    hw, bytes, failures, device = L4, 1 << 30, (), None
    MEMORY, L2, PRODUCT = 2.5e11, 2.0e12, 9.0e13

    def times(self, calls, repeats):
        return {key: 2 * call.count * 16 / self.MEMORY for key, call in calls.items()}

    def slopes(self, calls, repeats):
        assert all(3 * short.trips == long.trips for short, long in calls.values())
        return {key: short.count * 16 / self.L2 for key, (short, _) in calls.items()}

    def kernel_seconds(self, calls):
        return {name: 2 * 4096**3 / self.PRODUCT for name in calls}


def test_rates_are_bytes_and_flop_over_seconds(monkeypatch):
    made = {"mb_product_float16_128x128": ("float16", "128x128", None)}
    monkeypatch.setattr(tensor, "_random", lambda *_: None)
    monkeypatch.setattr("tvm.runtime.empty", lambda *_: None)
    monkeypatch.setattr(first_use.launch, "in_machine_us", lambda _bench: 5.0)
    found = {name: step(Bench()) for name, (step, _) in first_use._steps(L4, made, 0.9).items()}
    assert found == {
        "hbm_bytes_per_s": pytest.approx(Bench.MEMORY),
        "float16": pytest.approx(Bench.PRODUCT / 0.9),
        "launch_us": 5.0,
        "l2_bytes_per_s": pytest.approx(first_use.L2_SHARE * Bench.L2),
    }


@pytest.mark.nightly
@pytest.mark.usefixtures("nvcc")
@pytest.mark.parametrize("card", ["nvidia_a10", "nvidia_l4", "nvidia_gh200", "nvidia_rtx5090"])
def test_what_is_measured_compiles_for_each_generation(card):
    hw = load_profile(card)
    kernels, products, share = first_use.kernels_of(hw)
    assert 0.8 < share <= 1.0
    built, failures = build_kernels(hw, kernels)
    assert failures == {}
    assert len(products) == 1
    assert built.executable is not None
