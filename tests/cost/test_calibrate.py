"""`calibrate`: numbers from curves, the file it writes, real runs on the CPU, kernels of CUDA."""

import dataclasses
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda_on_cpu import cuda_source, lower, one_source, run_cuda_on_cpu
from tvm_fusion import cli
from tvm_fusion.calibrate import command
from tvm_fusion.calibrate import findings as curves
from tvm_fusion.calibrate.command import families_of
from tvm_fusion.calibrate.cpu import bandwidth as cpu_bandwidth
from tvm_fusion.calibrate.cuda import access as cuda_access
from tvm_fusion.calibrate.cuda import arithmetic as cuda_arithmetic
from tvm_fusion.calibrate.cuda import bandwidth as cuda_bandwidth
from tvm_fusion.calibrate.cuda import code_size as cuda_code_size
from tvm_fusion.calibrate.cuda import exchange as cuda_exchange
from tvm_fusion.calibrate.cuda import flight as cuda_flight
from tvm_fusion.calibrate.cuda import launch as cuda_launch
from tvm_fusion.calibrate.cuda import shared as cuda_shared
from tvm_fusion.calibrate.cuda import spill as cuda_spill
from tvm_fusion.calibrate.cuda.bench import FILL, Call, inline_kernel
from tvm_fusion.calibrate.findings import Family, Finding, Measured, NotMeasured
from tvm_fusion.calibrate.profile_file import notes_of, with_notes, with_values
from tvm_fusion.config import load_profile, profile_file, profile_names
from tvm_fusion.config import targets as _targets
from tvm_fusion.errors import ConfigError, InputError, TargetError
from tvm_fusion.host.atomic_files import replace_file
from tvm_fusion.host.interrupts import INTERRUPTED
from tvm_fusion.runtime.build import cubin_cache
from tvm_fusion.runtime.build.resources import parse_ptxas_log
from tvm_fusion.tuning.measure.processes import module_command

H200 = load_profile("h200")
MIB = 1 << 20
needs_nvcc = pytest.mark.usefixtures("nvcc")


# ---- numbers from curves


def curve_of(cache, fast, slow):
    """Reads of a device whose cache keeps all of `cache` bytes and nothing beyond."""
    return {size: fast if size <= cache else slow for size in (MIB << k for k in range(13))}


def test_the_memory_rate_is_that_of_sizes_far_beyond_the_cache():
    assert curves.memory_rate(curve_of(32 * MIB, 6e12, 4e12), 50 * MIB) == 4e12


def test_the_cache_rate_is_the_highest_of_sizes_that_fit():
    assert curves.cache_rate({MIB: 3e12, 16 * MIB: 6e12, 64 * MIB: 9e12}, 50 * MIB) == 6e12


def test_the_last_level_cache_is_not_mistaken_for_the_level_before_it():
    assert curves.cache_rate({MIB: 9e12, 16 * MIB: 6e12}, 50 * MIB, below=4 * MIB) == 6e12


@pytest.mark.parametrize("rate", [curves.memory_rate, curves.cache_rate])
def test_a_curve_without_a_fitting_size_gives_no_rate(rate):
    with pytest.raises(ValueError, match="was measured"):
        rate({50 * MIB: 1e12}, 50 * MIB)


def test_the_usable_cache_ends_where_the_rate_is_half_way_down():
    curve = {8 * MIB: 4e12, 16 * MIB: 4e12, 32 * MIB: 1e12, 64 * MIB: 1e12}
    assert curves.usable_bytes(curve, 4e12, 1e12) == pytest.approx(16 * MIB * math.sqrt(2))


def test_a_cache_that_is_no_faster_has_no_usable_size():
    with pytest.raises(ValueError, match="not faster"):
        curves.usable_bytes({MIB: 4e12}, 4e12, 3.9e12)


def test_littles_law_gives_back_the_latency_of_a_device_that_follows_it():
    rates = {size: min(size / 700e-9, 4e12) for size in range(100_000, 8_000_000, 100_000)}
    assert curves.littles_latency(rates) == pytest.approx(700e-9, rel=0.01)


def test_a_slope_is_that_of_the_line_through_the_points():
    assert curves.slope([(0, 5.0), (1, 7.0), (2, 9.0)]) == pytest.approx(2.0)


def test_one_place_has_no_slope():
    with pytest.raises(ValueError, match="different places"):
        curves.slope([(1, 5.0), (1, 6.0)])


def test_the_instruction_cache_ends_before_the_first_slow_size():
    assert curves.cache_knee({16: 1.05, 32: 1.0, 64: 1.02, 128: 1.6, 256: 2.5}) == 64


def test_code_that_never_slows_down_has_no_end_of_the_cache():
    assert curves.cache_knee({16: 1.05, 32: 1.0, 64: 1.02}) is None


@pytest.mark.parametrize(("value", "wanted"), [(30.0, 32), (70.0, 64), (5.0, 32), (900.0, 256)])
def test_traffic_of_an_access_is_a_power_of_two_within_bounds(value, wanted):
    assert curves.power_of_two(value, 32, 256) == wanted


# ---- families, on a bench whose device follows a model


class ModelBench:
    """A device of known rates instead of a GPU."""

    def __init__(self, seconds_of):
        self.hw, self.bytes, self.failures, self.seconds_of = H200, 4 << 30, {}, seconds_of

    def times(self, calls, repeats=5):
        return {key: self.seconds_of(call) for key, call in calls.items()}

    def slopes(self, calls, repeats=5):
        ends = {k: [self.seconds_of(call) for call in pair] for k, pair in calls.items()}
        return {k: (ends[k][1] - ends[k][0]) / (b.trips - a.trips) for k, (a, b) in calls.items()}


def values_of(finding):
    return {value.field: value.value for value in finding.values}


def test_bandwidth_gives_back_the_rates_of_memory_and_l2():
    def seconds(call):
        size = call.count * 16 * (2 if call.kernel == "mb_copy" else 1)
        return 3e-6 + call.trips * size / (6e12 if size <= 30 * MIB else 4e12)

    found = values_of(cuda_bandwidth.measure(ModelBench(seconds)))
    assert found["hbm_bytes_per_s"] == pytest.approx(4e12, rel=0.05)
    assert found["l2_bytes_per_s"] == pytest.approx(6e12)
    assert 0.55 < found["l2_usable_share"] < 0.7


def test_sizes_reach_from_64_kib_to_4_gib():
    sizes = cuda_bandwidth.sizes(H200, 4 << 30)
    assert (sizes[0], sizes[-1]) == (64 << 10, 4 << 30)


@pytest.mark.parametrize("traffic", [32, 64])
def test_isolated_accesses_give_back_their_traffic(traffic):
    def seconds(call):
        apart = call.extra * int(call.kernel[-1])
        return call.count * min(apart, traffic) / 4e12

    found = values_of(cuda_access.measure(ModelBench(seconds)))
    assert found["hbm_access_bytes"] == traffic


def test_bytes_in_flight_give_back_the_latency():
    def seconds(call):
        flight = call.blocks * call.extra * 64
        return call.trips * call.count * 16 / min(4e12, flight / 800e-9)

    found = values_of(cuda_flight.measure(ModelBench(seconds)))
    assert found["bytes_in_flight_latency_s"] == pytest.approx(800e-9, rel=0.1)


def test_a_spill_rate_is_the_slope_without_the_loop():
    def seconds(call):
        values = int(call.kernel.removeprefix("mb_spill"))
        return call.trips * (1e-7 + 8 * values * 1024 * call.blocks / 5e12)

    found = values_of(cuda_spill.measure(ModelBench(seconds)))
    assert found["spill_bytes_per_s"] == pytest.approx(5e12)


def test_code_beyond_the_cache_gives_its_size_and_rate():
    def seconds(call):
        size = int(call.kernel.removeprefix("mb_code")) << 10
        return call.trips * size / (8e10 if size <= 128 << 10 else 2e10)

    found = values_of(cuda_code_size.measure(ModelBench(seconds)))
    assert found["instruction_cache_bytes"] == 128 << 10
    assert found["code_bytes_per_s"] == pytest.approx(1 / (1 / 2e10 - 1 / 8e10))


def test_conflicts_that_cost_their_lanes_have_the_factor_one():
    found = values_of(cuda_shared.measure(ModelBench(lambda c: c.trips * c.extra * 1e-6)))
    assert found["smem_conflict_factor"] == pytest.approx(1.0)


def test_slots_are_times_relative_to_one_instruction():
    slow = {"mb_tanh": 3.0, "mb_convert": 2.0}
    bench = ModelBench(lambda call: call.trips * slow.get(call.kernel, 1.0) * 1e-6)
    found = values_of(cuda_arithmetic.measure(bench))
    assert found["special_slots"]["tanh"] == pytest.approx(3.0)
    assert found["special_slots"]["exp2"] == 1.0
    assert found["fma_per_s_f32"] == pytest.approx(2 * found["special_per_s"])


def test_a_function_that_does_not_compile_leaves_the_others():
    bench = ModelBench(lambda call: call.trips * 1e-6)
    bench.failures["mb_tanh"] = "no such instruction"
    finding = cuda_arithmetic.measure(bench)
    assert "tanh" not in values_of(finding)["special_slots"]
    assert finding.missing == ["tanh: no such instruction"]


# ---- the file


def text_of(name="h200"):
    return profile_file(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", profile_names())
def test_measured_values_are_read_back_and_all_others_stay(name, tmp_path):
    profile = load_profile(name)
    values = [Measured("hbm_bytes_per_s", 1.23456e12, "a copy"), Measured("num_sms", 7, "counted")]
    out = tmp_path / "device.toml"
    text = with_values(text_of(name), profile, values, "today")
    replace_file(out, text, check=load_profile)
    read = load_profile(out)
    assert (read.hbm_bytes_per_s, read.num_sms) == (1.235e12, 7)
    changed = {"hbm_bytes_per_s", "num_sms"}
    for field in type(profile).__slots__:
        assert field in changed or getattr(read, field) == getattr(profile, field)


def test_comments_and_order_of_the_file_stay():
    values = [Measured("launch_us", 3.3, "a chain")]
    old, new = (t.splitlines() for t in (text_of(), with_values(text_of(), H200, values, "today")))
    different = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    source = 'source = "measured by `tvm_fusion calibrate` today: a chain"'
    assert [b for _, b in different] == ["value = 3.3", source]


def test_of_a_table_only_measured_keys_change_and_the_others_keep_their_source():
    values = [Measured("tensor_flop_per_s", {"float16": 7e14}, "a product")]
    text = with_values(text_of(), H200, values, "today")
    line = next(li for li in text.splitlines() if "a product" in li)
    assert "bfloat16, tfloat32" in line
    assert "cuBLAS" in line
    assert f"bfloat16 = {H200.tensor_flop_per_s['bfloat16']:.4g}" in text


def test_a_source_with_quotes_is_still_toml(tmp_path):
    values = [Measured("launch_us", 3.3, 'a "chain" of C:\\kernels')]
    replace_file(tmp_path / "x.toml", with_values(text_of(), H200, values, "now"), load_profile)
    assert load_profile(tmp_path / "x.toml").launch_us == 3.3


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match="speed_of_light"):
        with_values(text_of(), H200, [Measured("speed_of_light", 3e8, "a mirror")], "today")


def test_notes_replace_the_notes_of_the_run_before():
    once = with_notes(text_of(), ["bandwidth: 1"])
    again = with_notes(once, ["bandwidth: 2", "flight: 3"])
    assert notes_of(again) == ["bandwidth: 2", "flight: 3"]
    assert notes_of(with_notes(again, [])) == []
    assert with_notes(with_notes(again, []), ["bandwidth: 1"]) == once


def test_what_does_not_load_does_not_replace_the_old_file(tmp_path):
    out = tmp_path / "device.toml"
    out.write_text(text_of())
    with pytest.raises(ConfigError):
        replace_file(out, text_of().replace("[launch_us]", "[lunch_us]"), load_profile)
    assert out.read_text() == text_of()
    assert [p.name for p in tmp_path.iterdir()] == ["device.toml"]


# ---- the command


def family(name, measure):
    return Family(name, name, (), measure)


def failing(bench):
    raise RuntimeError("the device fell off the bus")


def missing(bench):
    raise NotMeasured("no such unit here")


def fake_families(monkeypatch, *families):
    monkeypatch.setattr(command, "families_of", lambda hw: families)


def run_command(tmp_path, *options):
    return cli.main(["calibrate", "--target", "llvm", "--out", str(tmp_path / "c.toml"), *options])


def good(bench):
    return Finding([Measured("launch_us", 4.5, "a chain")], ["a note"])


def test_the_error_of_one_family_leaves_the_others(tmp_path, monkeypatch, capsys):
    fake_families(monkeypatch, family("bad", failing), family("gone", missing), family("ok", good))
    assert run_command(tmp_path) == command.CHECK_FAILED
    assert load_profile(tmp_path / "c.toml").launch_us == 4.5
    said = capsys.readouterr()
    assert "fell off the bus" in said.err
    assert "no such unit here" in said.err
    assert re.search(rf"launch_us +{load_profile('llvm_cpu').launch_us} +4\.5 +us", said.out)


def test_a_family_that_measures_nothing_writes_no_file(tmp_path, monkeypatch, capsys):
    fake_families(monkeypatch, family("bad", failing))
    assert run_command(tmp_path) == command.CHECK_FAILED
    assert not (tmp_path / "c.toml").exists()
    assert "nothing was measured" in capsys.readouterr().err


def test_a_second_run_keeps_what_the_first_measured(tmp_path, monkeypatch):
    def other(bench):
        return Finding([Measured("int_per_s", 5e10, "sums")], ["other note"])

    fake_families(monkeypatch, family("ok", good), family("more", other))
    assert run_command(tmp_path, "--only", "ok") == 0
    assert run_command(tmp_path, "--only", "more") == 0
    read = load_profile(tmp_path / "c.toml")
    assert (read.launch_us, read.int_per_s) == (4.5, 5e10)
    assert notes_of((tmp_path / "c.toml").read_text()) == ["ok: a note", "more: other note"]


def test_an_interrupted_run_says_so_and_writes_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(bench):
        raise KeyboardInterrupt

    fake_families(monkeypatch, family("ok", good), family("long", interrupted))
    assert run_command(tmp_path) == INTERRUPTED
    assert not (tmp_path / "c.toml").exists()
    assert "interrupted" in capsys.readouterr().err


def test_families_do_not_start_after_the_budget(tmp_path, monkeypatch, capsys):
    fake_families(monkeypatch, family("ok", good))
    assert run_command(tmp_path, "--budget", "0") == command.CHECK_FAILED
    assert "--budget" in capsys.readouterr().err


def test_an_unknown_family_is_named_with_its_nearest(tmp_path, capsys):
    assert run_command(tmp_path, "--only", "bandwith") == cli.BAD_INPUT
    assert "did you mean 'bandwidth'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--only", ","), ("--budget", "nan"), ("--budget", "-1")])
def test_options_that_leave_nothing_to_do_are_bad_input(tmp_path, capsys, options):
    assert run_command(tmp_path, *options) == cli.BAD_INPUT
    assert options[0] in capsys.readouterr().err


def test_a_file_that_is_no_profile_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "c.toml").write_text("name = 'notes'")
    assert run_command(tmp_path) == cli.BAD_INPUT
    assert (tmp_path / "c.toml").read_text() == "name = 'notes'"


def test_the_profile_of_another_device_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "c.toml").write_text(text_of("a100"))
    assert run_command(tmp_path) == cli.BAD_INPUT
    assert "nvidia_a100" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(InputError, match="no such directory"):
        command.main(cli._parser().parse_args(["calibrate", "--target=llvm", "--out=/no/x.toml"]))


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_a_device_that_is_not_there_cannot_be_measured():
    with pytest.raises(TargetError, match="no nvidia_a100"):
        command.main(cli._parser().parse_args(["calibrate", "--target=nvidia_a100"]))


def test_a_variant_of_a_device_gets_its_own_count_of_multiprocessors(tmp_path, monkeypatch):
    variant = dataclasses.replace(H200, num_sms=114)
    seen = []
    fake_families(monkeypatch, family("ok", good))
    monkeypatch.setattr(command, "_device", lambda target: variant)
    monkeypatch.setattr(command, "_bench", lambda profile, *rest: seen.append(profile))
    monkeypatch.setattr(command, "described", lambda profile: "today")
    assert cli.main(["calibrate", "--out", str(tmp_path / "c.toml")]) == 0
    assert load_profile(tmp_path / "c.toml").num_sms == seen[0].num_sms == 114


def test_a_gpu_of_another_name_is_not_measured_as_the_named_one(monkeypatch):
    monkeypatch.setattr(_targets, "present_gpu", lambda: ("NVIDIA H200", "sm_90"))
    with pytest.raises(TargetError, match="is NVIDIA H200, not nvidia_a100"):
        command._device("a100")
    assert command._device("h200") == H200


@pytest.mark.parametrize("name", ["llvm", "h200"])
def test_every_field_of_a_family_is_a_number_of_the_profile(name):
    profile = load_profile(name)
    fields = [field for known in families_of(profile) for field in known.fields]
    assert fields
    assert [field for field in fields if not hasattr(profile, field)] == []


FITTED = {
    "memory_latency_s",
    "l2_latency_s",
    "block_start_s",
    "barrier_s",
    "shuffle_s",
    "warp_issue_cycles",
    "sm_bytes_per_s",
    "wavefronts_per_s",
    "thread_bytes_in_flight",
    "blocks_per_s",
    "kernel_gap_us",
    "row_l2_share",
}


def test_numbers_fitted_to_whole_kernels_are_no_familys():
    assert not FITTED & {field for known in families_of(H200) for field in known.fields}


def test_refit_hands_its_files_to_the_learned_residual(monkeypatch):
    given = []
    refit = types.ModuleType("tvm_fusion.cost.learned.refit")
    refit.main = lambda args: given.append(args.refit) or 7
    monkeypatch.setitem(sys.modules, "tvm_fusion.cost.learned.refit", refit)
    assert cli.main(["calibrate", "--target", "h200", "--refit", "a.jsonl", "b.jsonl"]) == 7
    assert given == [["a.jsonl", "b.jsonl"]]


# ---- on the CPU, for real


def test_a_copy_loop_copies_in_every_round():
    import tvm

    kernel = tvm.compile(tvm.IRModule({"main": cpu_bandwidth.copy_loop(2, 32)}), target="llvm")
    x = np.arange(64, dtype="float32").reshape(2, 32)
    y = tvm.runtime.tensor(np.zeros_like(x))
    kernel["main"](tvm.runtime.tensor(x), y, 3)
    np.testing.assert_array_equal(y.numpy(), x + 2)


def test_the_cpu_is_measured_and_its_profile_loads(tmp_path):
    assert run_command(tmp_path, "--only", "bandwidth,launch", "--budget", "8") == 0
    old, new = load_profile("llvm"), load_profile(tmp_path / "c.toml")
    assert 0 < new.launch_us < 10_000
    assert 0 < new.kernel_gap_us < 10_000
    assert new.smem_bytes_per_s > new.hbm_bytes_per_s > 1e8
    assert new.registers_per_sm == old.registers_per_sm
    assert "`tvm_fusion calibrate`" in (tmp_path / "c.toml").read_text()


def test_a_killed_run_leaves_the_old_file(tmp_path):
    out = tmp_path / "c.toml"
    out.write_text(text_of("llvm"))
    options = ["--target", "llvm", "--out", str(out), "--only", "bandwidth"]
    run = subprocess.Popen(
        [*module_command("tvm_fusion", torch=False), "calibrate", *options],
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
    )
    assert "building" in run.stderr.readline()
    time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stderr.close()
    assert run.returncode == -signal.SIGKILL
    assert out.read_text() == text_of("llvm")
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


# ---- kernels of CUDA

MODULES = (
    cuda_bandwidth,
    cuda_access,
    cuda_flight,
    cuda_arithmetic,
    cuda_shared,
    cuda_exchange,
    cuda_spill,
    cuda_launch,
)
SOURCES = {n: f for module in MODULES for n, f in module.kernels(H200).items()}
CODE = {n: f for n, f in cuda_code_size.kernels(H200).items() if n in ("mb_code16", "mb_code32")}

LDL, STL, LDG, LDS, SHFL, BAR = 0x183, 0x187, 0x181, 0x184, 0x189, 0x11D
FFMA, MUFU, IMAD, F16_OUT = 0x023, 0x108, 0x024, 0x03E
STEPS = cuda_arithmetic.CHAINS * cuda_arithmetic.INNER

WORK = [
    ("mb_fma", FFMA, STEPS),
    ("mb_exp2", MUFU, STEPS),
    ("mb_rsqrt", MUFU, STEPS),
    ("mb_divide", MUFU, STEPS),
    ("mb_sigmoid", MUFU, 2 * STEPS),
    ("mb_tanh", MUFU, 2 * STEPS),
    ("mb_erf", FFMA, 6 * STEPS),
    ("mb_convert", F16_OUT, STEPS // 2),
    ("mb_int_multiply_add", IMAD, STEPS),
    ("mb_int_divide", IMAD, 4 * STEPS),
    ("mb_int_modulo", IMAD, 4 * STEPS),
    ("mb_read", LDG, 5),
    ("mb_copy", LDG, 5),
    ("mb_stride2", LDG, 8),
    ("mb_flight", LDG, cuda_flight.AHEAD),
    ("mb_shared", LDS, cuda_shared.READS),
    ("mb_shuffle", SHFL, cuda_exchange.STEPS),
    ("mb_barrier256", BAR, cuda_exchange.STEPS),
    ("mb_exchange256", BAR, 1),
    ("mb_spill32", LDL, 32),
    ("mb_spill32", STL, 32),
]


def opcodes(funcs):
    """How often each machine instruction (its lowest 9 bits) is in each kernel for sm_90a."""
    source = one_source({name: lower(func) for name, func in funcs.items()})
    binary = cubin_cache.compile_source(source, "sm_90a").binary
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, table + i * size) for i in range(count)]
    found = {}
    for name, _, _, _, start, length in headers:
        text = binary[headers[names][4] + name :].split(b"\0", 1)[0].decode()
        if text.startswith(".text."):
            places = range(start, start + length, 16)
            words = (struct.unpack_from("<Q", binary, at)[0] for at in places)
            found[text.removeprefix(".text.")] = Counter(word & 0x1FF for word in words)
    return found


@pytest.fixture(scope="module")
def machine_code():
    """`opcodes` of kernels whose work a compiler might remove, compiled at once."""
    return opcodes({name: SOURCES[name] for name, *_ in WORK})


@needs_nvcc
@pytest.mark.parametrize(("kernel", "opcode", "least"), WORK)
def test_the_compiler_does_not_remove_the_work(machine_code, kernel, opcode, least):
    assert machine_code[kernel][opcode] >= least


@needs_nvcc
def test_reads_of_shared_memory_stay_in_their_loop():
    func = SOURCES["mb_shared"]
    log = cubin_cache.compile_source(cuda_source(func), "sm_90a").log
    (kernel,) = parse_ptxas_log(log)
    assert kernel.registers < cuda_shared.READS  # hoisted values would fill as many


@needs_nvcc
def test_straight_line_code_has_the_size_of_its_name():
    found = opcodes(CODE)
    assert found.keys() == CODE.keys()
    for name, count in found.items():
        size = 16 * count.total()
        assert size == pytest.approx(int(name.removeprefix("mb_code")) << 10, rel=0.1)


@needs_nvcc
@pytest.mark.nightly
def test_every_kernel_compiles_for_hopper():
    with cubin_cache.Compiling("sm_90a") as compiling:
        begun = [compiling.begin(cuda_source(f)) for f in SOURCES.values()]
        codes = [future.result() for future in begun]
    assert [str(code) for code in codes if isinstance(code, Exception)] == []


def arrays(vectors):
    x = np.arange(4 * vectors, dtype="float32") % 61
    return x, np.zeros_like(x)


@pytest.mark.parametrize("vectors", [1, 255, 256, 1024, 2051])
def test_a_fill_reaches_every_vector(vectors):
    x, y = arrays(vectors)
    run_cuda_on_cpu(inline_kernel("mb_fill", 256, FILL), [x, y, 3, 1, vectors, 0])
    assert y.min() >= 1.0


@pytest.mark.parametrize("vectors", [1, 255, 1024, 2051])
def test_a_write_reaches_every_vector(vectors):
    x, y = arrays(vectors)
    run_cuda_on_cpu(SOURCES["mb_write"], [x, y, 2, 1, vectors, 0])
    np.testing.assert_array_equal(y.reshape(-1, 4), np.tile([1.0, 2.0, 1.0, 0.0], (vectors, 1)))


@pytest.mark.parametrize("kernel", ["mb_fma", "mb_int_divide", "mb_shuffle", "mb_barrier128"])
def test_loops_end_and_stay_within_their_tensors(kernel):
    x, y = arrays(64)
    call = Call(kernel, 1, 2, extra=3)
    run_cuda_on_cpu(SOURCES[kernel], [x, y, call.blocks, call.trips, call.count, call.extra])
    assert not y.any()
