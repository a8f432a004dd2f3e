"""Architectures as numbers, and what each can do."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tvm

import tvm_fusion
from tvm_fusion.config import load_profile
from tvm_fusion.config.architecture import NO_GPU, Architecture, read_architecture
from tvm_fusion.config.targets import architecture_of
from tvm_fusion.errors import ConfigError

QUESTIONS = sorted(n for n in vars(Architecture) if n.startswith(("has_", "is_")))
AMPERE = {"has_cp_async", "has_mma"}
ADA = {*AMPERE, "has_float8_mma"}
LATER = {*ADA, "has_tma", "has_clusters", "has_dependent_launch"}
BLACKWELL = {*LATER, "is_unrolled_to_spills"}
DATACENTER = {*BLACKWELL, "has_float8_as_halves"}
HOPPER = {*LATER, "is_rated_by_wgmma", "has_float8_as_halves"}


@pytest.mark.parametrize(
    ("name", "can"),
    [
        ("sm_75", set()),
        ("sm_80", AMPERE),
        ("sm_86", AMPERE),
        ("sm_87", AMPERE),
        ("sm_89", ADA),
        ("sm_90", HOPPER),
        ("sm_90a", {*HOPPER, "has_wgmma"}),
        ("sm_100", DATACENTER),
        ("sm_100a", DATACENTER),
        ("sm_103f", DATACENTER),
        ("sm_110a", DATACENTER),
        ("sm_120", BLACKWELL),
        ("sm_121a", BLACKWELL),
        ("sm_130", BLACKWELL),
    ],
)
def test_what_each_architecture_can_do(name, can):
    architecture = read_architecture(name)
    assert {question for question in QUESTIONS if getattr(architecture, question)} == can
    assert architecture.name == name


def test_a_name_is_read_as_numbers_and_a_suffix():
    assert read_architecture("sm_121a") == Architecture(12, 1, "a")
    assert read_architecture("sm_89").number == 89


@pytest.mark.parametrize("name", ["", "sm_9", "sm_90b", "sm_90aa", "compute_90", "90", " sm_90"])
def test_what_names_no_architecture_is_refused(name):
    with pytest.raises(ConfigError, match=r"sm_89 for 8\.9"):
        read_architecture(name)


def test_a_profile_of_no_architecture_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="profile nvidia_a100: arch = 'ampere' is no"):
        replace(load_profile("nvidia_a100"), arch="ampere")


def test_a_cpu_can_nothing_of_what_gpus_can():
    assert load_profile("llvm_cpu").architecture == NO_GPU
    assert not any(getattr(NO_GPU, question) for question in QUESTIONS)
    assert architecture_of(tvm.target.Target("llvm")) == NO_GPU


def test_no_other_file_asks_an_architecture_by_its_name():
    """Text compares wrongly: "sm_120" < "sm_80"."""
    package = Path(tvm_fusion.__file__).parent
    asks = re.compile(r"""arch\w*\s*(?:[<>]=?|[!=]=)\s*["']sm_|\barch\.(?:startswith|removepre)""")
    found = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if asks.search(file.read_text(encoding="utf-8"))
    ]
    assert found == []
