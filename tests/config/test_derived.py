"""Profiles of GPUs that nobody measured: by name, by architecture, by a faked driver."""

import argparse
import ctypes
import logging
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import tvm

from tvm_fusion.calibrate.command import _device, _files
from tvm_fusion.config import card_names, load_profile, profile_text, resolve_target
from tvm_fusion.config import targets as _targets
from tvm_fusion.config.cards import Card, cards
from tvm_fusion.config.files import profile_of_card
from tvm_fusion.config.links import link_of
from tvm_fusion.config.toml import number_fields
from tvm_fusion.errors import ConfigError, TargetError
from tvm_fusion.extend import register_profile
from tvm_fusion.host import gpu_driver


class Driver:
    """A libcuda with one GPU, or none; what is not given it does not know."""

    def __init__(self, **attributes: int) -> None:
        self.memory_bytes = attributes.pop("memory_bytes", 0)
        self.known = {gpu_driver._ATTRIBUTES[name]: value for name, value in attributes.items()}

    def cuInit(self, _flags: int) -> int:
        return 0

    def cuDeviceGet(self, _device: object, _number: int) -> int:
        return 0 if self.known else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetAttribute(self, value: object, number: int, _device: object) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.known.get(number, 0)
        return 0 if number in self.known else 1

    def cuDeviceTotalMem_v2(self, size: object, _device: object) -> int:
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = self.memory_bytes
        return 0


L4 = {
    "clock_khz": 2_040_000,
    "num_sms": 58,
    "memory_clock_khz": 6_251_000,
    "memory_bus_bits": 192,
    "l2_bytes": 50_331_648,
    "max_threads_per_sm": 1536,
    "smem_per_sm_bytes": 102_400,
    "smem_per_block_bytes": 101_376,
    "memory_bytes": 23_580_639_232,
}


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that GPU 0 has a name and an architecture, and that its driver says this."""

    def pretend(name: str | None, arch: str = "", **said: int) -> None:
        monkeypatch.setattr(_targets, "present_gpu", lambda: (name, arch))
        monkeypatch.setattr(_targets, "_present_sms", lambda: said.get("num_sms", 0))
        monkeypatch.setattr(gpu_driver, "_library", lambda: Driver(**said))
        _targets._tell_of_newer.cache_clear()

    return pretend


# ---- By name.


def test_there_are_forty_cards_and_more_each_found_by_its_names():
    assert len(set(card_names())) == len(cards()) >= 40
    for card in cards():
        for name in (card.name, *card.aliases):
            assert load_profile(name).name == card.name


@pytest.mark.parametrize("name", card_names())
def test_every_number_of_a_derived_profile_has_a_source_and_is_read_back(name, tmp_path):
    profile = load_profile(name)
    text = profile_text(profile)
    entries = tomllib.loads(text)
    for number in number_fields(type(profile)):
        assert entries[number.name]["source"].strip()
        assert entries[number.name]["unit"] == number.metadata["unit"]
    file = tmp_path / "card.toml"
    file.write_text(text)
    assert load_profile(file).fingerprint() == profile.fingerprint()
    assert profile.derived.endswith("the rest as nvidia_h200")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("nvidia_a30", 165),
        ("nvidia_a10", 125),
        ("nvidia_a10g", 70),
        ("nvidia_a40", 149.7),
        ("nvidia_rtx_a6000", 154.8),
        ("nvidia_rtx3090", 71),
        ("nvidia_l4", 121),
        ("nvidia_l40s", 362),
        ("nvidia_rtx4080", 97.5),
        ("nvidia_h20", 148),
        ("nvidia_rtx5090", 209.5),
        ("nvidia_rtx_pro_6000", 503.8),
    ],
)
def test_the_rate_of_tensor_cores_is_that_of_the_datasheet_less_what_is_not_reached(name, tflops):
    reached = load_profile(name).tensor_flop_per_s["float16"] / (tflops * 1e12)
    assert 0.7 < reached < 0.93


def test_geforce_has_half_of_the_rates_with_sums_in_float32_and_all_of_int8():
    geforce, other = load_profile("rtx3090"), load_profile("rtx_a6000")
    ratio = 82 * 1.695 / (84 * 1.8)
    for dtype, share in (("float16", 0.5), ("tfloat32", 0.5), ("int8", 1.0)):
        found = geforce.tensor_flop_per_s[dtype] / other.tensor_flop_per_s[dtype]
        assert found == pytest.approx(share * ratio)


def test_a_card_like_the_measured_one_gets_what_was_measured():
    """The H200, its own profile hidden."""
    h200 = load_profile("h200")
    said = {"num_sms": 132, "clock_ghz": 1.98, "memory_gb": 141, "bandwidth_gb_per_s": 4800}
    card = Card("other", "Other", "sm_90a", l2_mib=50, source="the data sheet", **said)
    derived = profile_of_card(card)
    for number in number_fields(type(h200)):
        old, new = getattr(h200, number.name), getattr(derived, number.name)
        pairs = [(old[k], new[k]) for k in old] if number.metadata.get("table") else [(old, new)]
        for one, other in pairs:
            assert other == pytest.approx(one, rel=0.02), number.name


def test_a_name_that_nobody_knows_is_refused_with_the_nearest_one():
    with pytest.raises(TargetError, match=r"did you mean 'nvidia_l40'.*more GPUs by name"):
        load_profile("nvidia_l40x")
    with pytest.raises(TargetError, match="did you mean 'nvidia/nvidia-l4'"):
        resolve_target("nvidia/nvidia-l5")


def test_a_card_without_a_size_is_refused():
    said = {"clock_ghz": 1.0, "memory_gb": 1, "bandwidth_gb_per_s": 1, "l2_mib": 1}
    with pytest.raises(ConfigError, match="A100: num_sms = 0 is not above 0"):
        Card("a", "A100", "sm_80", num_sms=0, source="none", **said)


# ---- By a target.


@pytest.mark.parametrize(
    ("target", "name", "arch"),
    [
        ("nvidia/nvidia-l4", "nvidia_l4", "sm_89"),
        ("nvidia/nvidia-h200", "nvidia_h200", "sm_90a"),
        ({"tag": "nvidia/geforce-rtx-3060"}, "nvidia_rtx3060", "sm_86"),
        ("nvidia/geforce-rtx-3090", "nvidia_rtx3090", "sm_86"),
        ("nvidia/rtx-a6000", "nvidia_rtx_a6000", "sm_86"),
        ("RTX PRO 6000", "nvidia_rtx_pro_6000", "sm_120"),
        ("jetson-agx-orin-64gb", "nvidia_jetson_agx_orin_64gb", "sm_87"),
        ("NVIDIA GeForce RTX 5070 Ti", "nvidia_rtx5070_ti", "sm_120"),
        ("nvidia/jetson-agx-thor", "nvidia_jetson_agx_thor", "sm_110a"),
        ("nvidia/nvidia-b100", "nvidia_b200", "sm_100a"),
        ({"kind": "cuda", "arch": "sm_86"}, "nvidia_a10", "sm_86"),
        ({"kind": "cuda", "arch": "sm_120a"}, "nvidia_rtx5090", "sm_120a"),
        ({"kind": "cuda", "arch": "sm_88"}, "nvidia_sm_88", "sm_88"),
        ({"kind": "cuda", "arch": "sm_90"}, "nvidia_h100", "sm_90"),
    ],
)
def test_tags_and_dicts_find_their_card(gpu, target, name, arch):
    gpu(None)
    found, profile = resolve_target(target)
    assert (profile.name, profile.arch) == (name, arch)
    assert str(found.attrs["arch"]) == arch


def test_every_tag_of_tvm_from_8_0_on_has_a_profile(gpu):
    gpu(None)
    for tag in filter(lambda tag: tag.startswith("nvidia/"), tvm.target.list_tags()):
        arch = _targets.architecture_of(tvm.target.Target(tag))
        if arch.number >= 80:
            assert resolve_target(tag)[1].architecture == arch
        else:
            with pytest.raises(TargetError, match=r"kernels need 8\.0"):
                resolve_target(tag)


# ---- By the driver.


def test_an_l4_is_what_its_driver_says(gpu):
    gpu("NVIDIA L4", "sm_89", **L4)
    target, profile = resolve_target()
    assert profile.name == "nvidia_l4"
    assert (profile.num_sms, profile.clock_ghz, profile.l2_bytes) == (58, 2.04, 48 * 2**20)
    assert profile.hbm_peak_bytes_per_s == pytest.approx(3.0e11, rel=1e-3)
    assert profile.memory_bytes == pytest.approx(23_580_639_232)
    assert profile.derived.startswith("reported by the driver of NVIDIA L4")
    assert profile.measured["derived"] == profile.derived
    assert profile.measured["hbm_bytes_per_s"] == profile.hbm_bytes_per_s
    assert str(target.attrs["arch"]) == "sm_89"
    assert resolve_target("cuda")[1] == profile
    assert resolve_target({"kind": "cuda", "arch": "sm_89"})[1] == profile


@pytest.mark.parametrize(
    ("device", "arch", "said", "name", "float16"),
    [
        ("NVIDIA A10", "sm_86", {"num_sms": 72, "clock_khz": 1_695_000}, "nvidia_a10", 1.12e14),
        ("NVIDIA A10G", "sm_86", {"num_sms": 80, "clock_khz": 1_710_000}, "nvidia_a10g", 6.3e13),
        (
            "NVIDIA GeForce RTX 5090",
            "sm_120",
            {"num_sms": 170, "clock_khz": 2_407_000},
            "nvidia_rtx5090",
            1.89e14,
        ),
        (
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "sm_89",
            {"num_sms": 76, "clock_khz": 2_040_000},
            "nvidia_geforce_rtx_4090_laptop_gpu",
            7.14e13,
        ),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "sm_120",
            {"num_sms": 188, "clock_khz": 2_617_000},
            "nvidia_rtx_pro_6000",
            4.53e14,
        ),
        ("NVIDIA B200", "sm_100", {"num_sms": 148, "clock_khz": 1_965_000}, "nvidia_b200", 5.06e14),
        ("NVIDIA H20", "sm_90", {"num_sms": 78, "clock_khz": 1_980_000}, "nvidia_h20", 1.14e14),
    ],
)
def test_other_cards_are_told_apart(gpu, caplog, device, arch, said, name, float16):
    gpu(device, arch, **said)
    _, profile = resolve_target("cuda")
    assert profile.name == name
    assert profile.tensor_flop_per_s["float16"] == pytest.approx(float16, rel=0.01)
    assert profile.architecture.has_wgmma == (arch == "sm_90")
    assert not caplog.records


def test_a_gpu_newer_than_all_is_planned_as_the_newest_with_one_warning(gpu, caplog):
    said = {"num_sms": 200, "clock_khz": 3_000_000, "smem_per_block_bytes": 262_144}
    gpu("NVIDIA GeForce RTX 7090", "sm_130", **said)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _, profile = resolve_target()
    assert (profile.name, profile.arch) == ("nvidia_geforce_rtx_7090", "sm_130")
    assert (profile.num_sms, profile.smem_per_block_bytes) == (200, 262_144)
    assert not profile.architecture.has_wgmma
    assert profile.architecture.has_tma
    (record,) = caplog.records
    assert "sm_130 is newer than all that is known: rates are those of sm_121" in record.message


def test_a_gpu_whose_driver_says_nothing_has_the_numbers_of_its_card(gpu):
    gpu("NVIDIA A10", "sm_86")
    profile, known = resolve_target()[1], load_profile("nvidia_a10")
    assert {
        f.name for f in fields(known) if getattr(profile, f.name) != getattr(known, f.name)
    } <= {
        "description",
        "aliases",
        "derived",
    }


def test_without_a_driver_there_are_no_attributes(monkeypatch):
    def missing(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu_driver.gpu_attributes() == {}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 3080", "nvidia_geforce_rtx_3080"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "nvidia_geforce_rtx_4090_laptop_gpu"),
        ("NVIDIA L4", "nvidia_l4"),
    ],
)
def test_calibrate_makes_a_profile_that_the_gpu_gets(gpu, tmp_path, monkeypatch, device, name):
    gpu(device, "sm_89", **L4)
    monkeypatch.chdir(tmp_path)
    hw = _device("cuda")
    out, text, known = _files(argparse.Namespace(target="cuda", out=None), hw)
    assert (out, known) == (Path(f"{name}.toml"), hw)
    assert tomllib.loads(text)["num_sms"]["source"] == f"reported by the driver of {device}"
    out.write_text(text.replace("a derived profile", "measured"))
    registered = register_profile(out)
    try:
        assert resolve_target("cuda")[1].description.endswith("measured")
    finally:
        registered.undo()


def test_calibrate_measures_no_card_that_is_not_there(gpu):
    gpu("NVIDIA L4", "sm_89", **L4)
    with pytest.raises(TargetError, match="the GPU of this machine is NVIDIA L4, not nvidia_a10"):
        _device("nvidia_a10")


@pytest.mark.parametrize(
    ("operator", "size_bytes", "ranks", "us"),
    [
        ("all_reduce", 8192, 2, 6.6 + 2 * 0.6 + 2 * 4096 / 3.29e5 / 0.5),
        ("all_reduce_", 1 << 30, 2, 8.4 + 2 * 3.4 + (1 << 30) / 3.29e5),
        ("all_reduce_", 1 << 30, 8, 8.4 + 14 * 3.4 + 1.75 * (1 << 30) / 3.29e5),
        ("all_gather_into_tensor", 1 << 30, 4, 8.4 + 3 * 3.4 + 0.75 * (1 << 30) / 3.29e5),
        ("all_reduce", 8192, 1, 0.0),
        ("all_to_all_single", 8192, 2, None),
    ],
)
def test_a_collective_takes_what_a_ring_of_links_does(operator, size_bytes, ranks, us):
    found = link_of(90).ring_us(operator, size_bytes, ranks)
    assert found == (us if us is None else pytest.approx(us))


def test_a_link_that_nobody_measured_is_unknown():
    assert link_of(120) is None
