"""Profiles and policies: what is read, what is refused, and what they become."""

import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tvm

from tvm_fusion import config
from tvm_fusion.config import (
    HardwareProfile,
    Policy,
    files,
    load_policy,
    load_profile,
    resolve_target,
)
from tvm_fusion.config import targets as _targets
from tvm_fusion.errors import ConfigError, TargetError

CONFIGS = Path(__file__).parents[2] / "configs"
PROFILES = ["llvm_cpu", "nvidia_a100", "nvidia_h100", "nvidia_h200", "nvidia_rtx4090"]
POLICIES = ["aggressive", "conservative", "default"]


@pytest.fixture
def h200() -> HardwareProfile:
    return load_profile("nvidia_h200")


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Write configs/nvidia_h200.toml with one replacement; return the path. Where profiles were
    read is forgotten: one with the same numbers would be the file of the shipped one from then on.
    """
    monkeypatch.setattr(files, "_files", dict(files._files))

    def edit(old: str, new: str) -> Path:
        text = (CONFIGS / "nvidia_h200.toml").read_text()
        assert text.count(old) == 1
        path = tmp_path / "edited.toml"
        path.write_text(text.replace(old, new))
        return path

    return edit


@pytest.fixture
def policy_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "policy.toml"
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that GPU 0 has a name, an architecture and a number of SMs."""

    def pretend(name: str | None, arch: str = "sm_90", num_sms: int = 132) -> None:
        monkeypatch.setattr(_targets, "present_gpu", lambda: (name, arch))
        monkeypatch.setattr(_targets, "_present_sms", lambda: num_sms)

    return pretend


def test_the_shipped_profiles_and_policies_are_the_documented_ones():
    assert config.profile_names() == PROFILES
    assert config.policy_names() == POLICIES


@pytest.mark.parametrize("name", PROFILES)
def test_every_number_of_a_profile_has_a_value_a_unit_and_a_source(name):
    data = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    numbers = {k: v for k, v in data.items() if not isinstance(v, str | list)}
    assert len(numbers) > 25
    for entry in numbers.values():
        assert set(entry) == {"value", "unit", "source"}
        assert len(entry["source"]) > 5


@pytest.mark.parametrize("name", PROFILES)
def test_rates_reached_do_not_exceed_the_rates_of_the_datasheet(name):
    profile = load_profile(name)
    assert profile.hbm_bytes_per_s <= profile.hbm_peak_bytes_per_s <= profile.l2_bytes_per_s
    assert profile.smem_per_block_bytes <= profile.smem_per_sm_bytes
    assert profile.max_threads_per_block <= profile.max_threads_per_sm


def test_the_h200_has_the_numbers_of_its_datasheet(h200):
    assert (h200.num_sms, h200.l2_bytes, h200.smem_per_block_bytes) == (132, 50 << 20, 232448)
    assert h200.hbm_peak_bytes_per_s == 4.8e12
    assert h200.tensor_flop_per_s["float16"] == 774e12


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h200", "nvidia_h200"),
        ("H200", "nvidia_h200"),
        ("nvidia_h200", "nvidia_h200"),
        ("nvidia/nvidia-a100", "nvidia_a100"),
        ("llvm", "llvm_cpu"),
        ("cpu", "llvm_cpu"),
        (CONFIGS / "nvidia_h100.toml", "nvidia_h100"),
        (str(CONFIGS / "nvidia_h100.toml"), "nvidia_h100"),
    ],
)
def test_a_profile_is_found_by_name_alias_and_path(given, name):
    assert load_profile(given).name == name


def test_an_unknown_target_is_refused_with_the_nearest_name():
    with pytest.raises(TargetError, match=r"'nvidia_h2000' \(did you mean 'nvidia_h200'\?\)"):
        resolve_target("nvidia_h2000")


def test_a_missing_profile_file_is_refused_with_its_path():
    with pytest.raises(ConfigError, match=r"no such file: nowhere/gpu\.toml"):
        load_profile("nowhere/gpu.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[num_sms]", "[num_sm]", r"unknown key 'num_sm' \(did you mean 'num_sms'\?\)"),
        ("value = 132\n", "", "num_sms: value is missing"),
        ('value = 132\nunit = "count"\n', "value = 132\n", "num_sms: unit is missing"),
        ("value = 132\n", 'value = "many"\n', "num_sms: expected int, got 'many'"),
        ("value = 132\n", "value = 132.5\n", "num_sms: expected int, got 132.5"),
        ("value = 132\n", "value = true\n", "num_sms: expected int, got True"),
        ("value = 132\n", "value = -1\n", "num_sms = -1 must be at least 0"),
        ("value = 132\n", "values = 132\n", "num_sms: unknown key 'values'"),
        ('unit = "GHz"', 'unit = "MHz"', "clock_ghz: unit must be 'GHz', not 'MHz'"),
        ('kind = "cuda"', 'kind = "rocm"', "kind = 'rocm' is none of"),
        ('arch = "sm_90a"\n', "", "missing arch"),
        ('arch = "sm_90a"', "arch = 90", "arch: expected str, got 90"),
        ("[warp_size]", "[warp_size", "not a TOML file"),
        ("value = 4.27e12\n", "value = nan\n", "hbm_bytes_per_s = nan must be at least 0"),
    ],
)
def test_a_broken_profile_is_refused(edited, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load_profile(edited(old, new))


def test_an_empty_source_is_refused(edited):
    path = edited('source = "measured on H200 2026-11-20, copy of a large array"', 'source = "  "')
    with pytest.raises(ConfigError, match="hbm_bytes_per_s: source must say where"):
        load_profile(path)


def test_a_bare_number_is_refused_with_the_form_to_use(policy_file):
    with pytest.raises(ConfigError, match=r"min_gain: write it as \{ value = "):
        load_policy(policy_file("min_gain = 0.5"))


def test_a_profile_from_a_file_can_have_numbers_of_its_own(edited, h200):
    assert load_profile(edited("value = 132\n", "value = 100\n")) == replace(h200, num_sms=100)


def test_fingerprints_tell_profiles_apart_and_repeat(h200):
    prints = [load_profile(name).fingerprint() for name in PROFILES]
    assert len(set(prints)) == len(PROFILES)
    assert replace(h200).fingerprint() == h200.fingerprint()
    assert replace(h200, launch_us=h200.launch_us + 1).fingerprint() != h200.fingerprint()


def test_the_fingerprint_does_not_depend_on_sources(edited, h200):
    path = edited("copy of a large array", "copy of a huge array")
    assert load_profile(path).fingerprint() == h200.fingerprint()


def test_profiles_and_policies_are_hashable_and_frozen(h200):
    assert {h200: 1}[load_profile("h200")] == 1
    assert hash(load_policy()) == hash(load_policy("default"))
    with pytest.raises(TypeError):
        h200.tensor_flop_per_s["float16"] = 0.0


def test_the_default_policy_is_loaded_for_none():
    assert load_policy() == load_policy("default") == load_policy({"name": "default"})
    assert load_policy().rounding == "fast"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_found_by_name_and_by_path(name):
    assert load_policy(name) == load_policy(CONFIGS / f"policy_{name}.toml")
    assert load_policy(name).name == name


def test_a_policy_passes_through():
    policy = load_policy("aggressive")
    assert load_policy(policy) is policy


def test_a_mapping_changes_only_the_keys_it_names():
    policy = load_policy({"rounding": "exact", "min_gain": 0})
    assert policy == replace(load_policy(), name="custom", rounding="exact", min_gain=0.0)
    assert isinstance(policy.min_gain, float)


def test_a_file_changes_only_the_keys_it_names(policy_file):
    path = policy_file(
        """
        name = "mine"
        [max_recompute]
        value = 2
        unit = "1"
        source = "choice: for a test"
        """
    )
    assert load_policy(path) == replace(load_policy(), name="mine", max_recompute=2.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("agressive", r"unknown policy 'agressive' \(did you mean 'aggressive'\?\)"),
        ({"min_gian": 0.1}, r"unknown key 'min_gian' \(did you mean 'min_gain'\?\)"),
        ({"min_gain": "much"}, "min_gain: expected float, got 'much'"),
        ({"min_gain": -0.1}, "min_gain must be at least 0"),
        ({"min_gain": float("nan")}, "min_gain must be at least 0"),
        ({"max_group_ops": 1.5}, "max_group_ops: expected int, got 1.5"),
        ({"max_recompute": 0.5}, "max_recompute must be at least 1"),
        ({"verify": 1}, "verify: expected bool, got 1"),
        ({"rounding": "exakt"}, "rounding = 'exakt' is none of"),
        ({"launch": "graphs"}, "launch = 'graphs' is none of"),
    ],
)
def test_a_broken_policy_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        load_policy(given)


def test_the_fingerprint_of_a_policy_leaves_out_its_name():
    default = load_policy()
    assert replace(default, name="other").fingerprint() == default.fingerprint()
    assert load_policy("aggressive").fingerprint() != default.fingerprint()
    assert isinstance(default, Policy)


def test_the_target_of_a_gpu_holds_the_limits_of_its_profile(h200):
    target = h200.to_target()
    assert target.kind.name == "cuda"
    assert target.attrs["arch"] == "sm_90a"
    assert target.attrs["max_shared_memory_per_block"] == h200.smem_per_block_bytes
    assert target.host.kind.name == "llvm"


def test_the_target_of_the_cpu_names_no_instruction_that_the_machine_lacks():
    import tvm_ffi

    target, profile = resolve_target("llvm")
    assert profile.kind == "llvm"
    assert target.attrs["num-cores"] >= 1
    enabled = set(map(str, tvm_ffi.get_global_func("target.llvm_get_cpu_features")(target)))
    present = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    assert "avx" not in enabled or "f16c" in enabled
    assert not {f for f in enabled if f in present and not bool(present[f])}


def test_without_a_gpu_the_default_target_is_the_cpu(gpu):
    gpu(None)
    assert resolve_target()[1].name == "llvm_cpu"


def test_without_a_gpu_the_target_cuda_is_refused_and_devices_are_named(gpu):
    gpu(None)
    with pytest.raises(TargetError, match=r"no CUDA device in this machine.*nvidia_h200"):
        resolve_target("cuda")


@pytest.mark.parametrize(
    ("device", "arch", "sms", "name"),
    [
        ("NVIDIA H200", "sm_90", 132, "nvidia_h200"),
        ("NVIDIA H100 80GB HBM3", "sm_90", 132, "nvidia_h100"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", 108, "nvidia_a100"),
        ("NVIDIA GeForce RTX 4090", "sm_89", 128, "nvidia_rtx4090"),
    ],
)
def test_the_gpu_of_the_machine_gives_the_default_target(gpu, device, arch, sms, name):
    gpu(device, arch, sms)
    assert resolve_target()[1] == resolve_target("cuda")[1] == load_profile(name)


def test_a_smaller_variant_of_a_gpu_has_its_own_number_of_sms(gpu, h200):
    gpu("NVIDIA H200 NVL", num_sms=114)
    assert resolve_target("cuda")[1] == replace(h200, num_sms=114)


def test_a_gpu_that_is_too_old_leaves_the_cpu_and_cuda_is_refused(gpu):
    gpu("NVIDIA T4", "sm_75", 40)
    assert resolve_target()[1].name == "llvm_cpu"
    with pytest.raises(TargetError, match=r"GPU NVIDIA T4: sm_75 is .* 7\.5; kernels need 8\.0"):
        resolve_target("cuda")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({"kind": "llvm"}, "llvm_cpu"),
        ({"kind": "cuda", "arch": "sm_80"}, "nvidia_a100"),
        ({"kind": "cuda", "arch": "sm_89"}, "nvidia_rtx4090"),
        ("nvidia/nvidia-h100", "nvidia_h100"),
    ],
)
def test_a_tvm_target_is_kept_and_gets_the_profile_that_fits(gpu, target, name):
    gpu(None)
    target = tvm.target.Target(target)
    resolved, profile = resolve_target(target)
    assert resolved is target
    assert profile.name == name


def test_a_tvm_target_of_one_architecture_prefers_the_gpu_of_the_machine(gpu):
    gpu("NVIDIA H200")
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    assert resolve_target(target)[1].name == "nvidia_h200"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"kind": "cuda", "arch": "sm_70"}, "sm_70 is compute capability 7.0; kernels need 8.0"),
        ({"kind": "vulkan"}, "target kind 'vulkan' is not supported"),
    ],
)
def test_a_tvm_target_of_no_device_of_ours_is_refused(target, message):
    with pytest.raises(TargetError, match=message):
        resolve_target(tvm.target.Target(target))


def test_something_else_than_a_target_is_refused():
    with pytest.raises(TargetError, match="not int"):
        resolve_target(7)
