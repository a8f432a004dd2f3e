"""Windows over axes of symbolic size: numbers on the emulator, ranges and their edges."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.flow.planned import Planned
from tvm_fusion.ir.extents import Bounds, sizes_of, with_known_sizes
from tvm_fusion.kernels.window import versions
from tvm_fusion.kernels.window.config import WindowConfig, fits
from tvm_fusion.kernels.window.kernel import emit_windows, write_windows
from tvm_fusion.kernels.window.problem import read_windows
from tvm_fusion.kernels.window.versions import WRITER, write_window_versions
from tvm_fusion.runtime.build.version_names import versions_among

from ...support.cuda_on_cpu import lower, one_source, ptxas_report, run_cuda_on_cpu
from ...support.graphs import module
from ...support.helpers_tir import poisoned
from ...support.kernel_cases import assert_close, fuse
from ...support.module_on_cpu import EmulatedModule

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")
FEW_SMS = dataclasses.replace(H200, num_sms=1)  # small sizes fill it as large ones do a whole one
POLICY = load_policy(None)
HALF, FLOAT, BRAIN = "float16", "float32", "bfloat16"
N, M, B, C = (tirx.Var(name, "int64") for name in "nmbc")


def max_of(dims, taps, stride, padding, dilation=1):
    pool = getattr(op.nn, f"max_pool{dims}d")
    torch_pool = getattr(F, f"max_pool{dims}d")

    def emit(bb, x):
        x = bb.emit(op.negative(x))
        return op.tanh(bb.emit(pool(x, taps, stride, padding, dilation=dilation)))

    return emit, lambda x: torch_pool(-x, taps, stride, padding, dilation).tanh()


def mean_of(dims, taps, stride, padding, whole=False):
    pool, torch_pool = getattr(op.nn, f"avg_pool{dims}d"), getattr(F, f"avg_pool{dims}d")

    def emit(bb, x):
        mean = bb.emit(pool(bb.emit(op.exp(x)), taps, stride, padding, count_include_pad=whole))
        return op.multiply(mean, mean)

    return emit, lambda x: torch_pool(x.exp(), taps, stride, padding, False, whole).square()


def max_channels_last(taps, stride, padding):
    def emit(bb, x):
        return op.nn.max_pool2d(bb.emit(op.nn.relu(x)), taps, stride, padding, layout="NHWC")

    def reference(x):
        pooled = F.max_pool2d(x.relu().permute(0, 3, 1, 2), taps, stride, padding)
        return pooled.permute(0, 2, 3, 1)

    return emit, reference


# What is computed, and the shape of its input.
POOLS = {
    "square": (*max_of(2, (3, 3), (2, 2), (1, 1)), (2, 3, N, N)),
    "image": (*max_of(2, (3, 2), (1, 1), (1, 0)), (1, 2, N, M)),
    "batch": (*mean_of(2, (2, 2), (2, 2), (0, 0)), (B, 3, 6, 16)),
    "channels": (*max_of(2, (3, 3), (1, 1), (1, 1)), (2, C, 9, 8)),
    "all": (*mean_of(2, (3, 3), (2, 1), (1, 1)), (B, C, N, M)),
    "channels last": (*max_channels_last((3, 3), (2, 2), (1, 1)), (1, N, N, 16)),
    "channels last, odd": (*max_channels_last((2, 3), (1, 2), (0, 1)), (B, N, M, 3)),
    "line": (*mean_of(1, (9,), (4,), (4,)), (2, 3, N)),
    "line, whole": (*mean_of(1, (3,), (1,), (1,), True), (1, 3, N)),
    "apart": (*max_of(2, (2, 3), (2, 3), (0, 1), (2, 2)), (1, 2, N, M)),
    "volume": (*mean_of(3, (3, 2, 4), (1, 2, 2), (1, 0, 2)), (1, 2, N, 5, M)),
}


def sizes_within(shape):
    return list(dict.fromkeys(extent for extent in shape if not isinstance(extent, int)))


def with_first(sizes, n):
    """Values of sizes, the first one's of n."""
    return dict(zip(sizes, itertools.chain([n], [5, 8, 6, 4]), strict=False))


def first_beyond(shape, reference, sizes, results):
    """The first sizes with more results than given numbers, and those before."""
    for wanted in results:
        counts = (
            (n, reference(torch.zeros(at(shape, with_first(sizes, n)))).numel())
            for n in range(4, 200)
        )
        found = next((n for n, count in counts if count > wanted), None)
        if found is not None:
            yield from (found - 1, found)


def at(shape, values):
    return tuple(values.get(extent, extent) for extent in shape)


def drawn(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    return rng.standard_normal(shape).astype(poisoned((), dtype).dtype)


def check(run, reference, shape, dtype):
    """Beside float64; outputs are NaN before."""
    x = drawn(shape, dtype)
    wanted = reference(torch.from_numpy(x.astype(np.float64))).numpy()
    assert_close(run(x, wanted.shape), wanted, dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BRAIN])
@pytest.mark.parametrize("config", [(128, 4, 1), (128, 2, 2), (256, 8, 1)], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_a_kernel_is_right_at_all_sizes(name, config, dtype):
    """Results in multiples of what a thread computes, and others."""
    emit, reference, shape = POOLS[name]
    problem, config = read_windows(fuse(emit, (shape, dtype))), WindowConfig(*config)
    if not fits(problem.axes, config):
        with pytest.raises(Unsupported, match="WindowConfig"):
            write_windows(problem, H200, config)
        return
    kernel = lower(write_windows(problem, H200, config))

    def run(x, shape):
        y = poisoned(shape, dtype)
        assert run_cuda_on_cpu(kernel, [x, y]) == 1
        return y

    for n, m in ((32, 33), (35, 32), (40, 41)):
        values = {N: n, M: m, B: 2, C: 3}
        check(run, reference, at(shape, values), dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("hw", [H200, FEW_SMS], ids=("filled late", "filled early"))
@pytest.mark.parametrize("name", POOLS)
def test_each_range_is_right_at_its_edges(name, hw, monkeypatch):
    emit, reference, shape = POOLS[name]
    monkeypatch.setattr(versions, "SIZES", (3, 7, 16, 1024))
    plan = Planned.of(module(emit, (shape, HALF)), hw.to_target(), hw, POLICY)
    assert [group.kernel_class for group in plan.plan.groups] == ["window"]
    written = EmulatedModule.of(plan)
    assert not written.cuts
    names = versions_among(list(written.kernels))
    assert len(names) <= versions.MOST
    sizes = sizes_within(shape)
    edges = {int(text.split()[-1]) for text in names if text.split()[-1].isdigit()}
    least = 1 if sizes[0] in (B, C) else 4
    numbers = {least, 8, 21} | {n + off for n in edges if n < 40 for off in (-1, 0, 1)}
    results = [int(text.split()[-2]) for text in names if text.endswith(" results")]
    numbers |= set(first_beyond(shape, reference, sizes, results))
    for n in sorted(n for n in numbers if n >= least):
        values = with_first(sizes, n)
        check(lambda x, _: written([x])[0], reference, at(shape, values), HALF)


@pytest.mark.parametrize("name", ["square", "all", "channels last"])
def test_places_that_int32_does_not_count_have_a_kernel_of_their_own(name, monkeypatch):
    emit, reference, shape = POOLS[name]
    monkeypatch.setattr(versions, "_narrow", lambda problem: 12)
    written = EmulatedModule.of(
        Planned.of(module(emit, (shape, HALF)), H200.to_target(), H200, POLICY)
    )
    wide = {name: kernel.source.count("(int64_t)") for name, kernel in written.kernels.items()}
    (beyond,) = (count for name, count in wide.items() if "beyond" in name)
    assert beyond
    # beside it only one for too few results, of all sizes
    assert sum(count > 0 for name, count in wide.items() if "beyond" not in name) <= 1
    sizes = sizes_within(shape)
    for n in (11, 12, 13, 16):
        values = dict.fromkeys(sizes, 5) | {sizes[-1]: n}
        check(lambda x, _: written([x])[0], reference, at(shape, values), HALF)


def test_lines_that_vectors_divide_are_counted_in_32_bits():
    emit, _, shape = POOLS["all"]
    written = EmulatedModule.of(
        Planned.of(module(emit, (shape, HALF)), H200.to_target(), H200, POLICY)
    )
    divided = [kernel for name, kernel in written.kernels.items() if "_of8_" in name]
    assert divided
    assert not any("(int64_t)" in kernel.source for kernel in divided)


@pytest.mark.parametrize("name", ["batch", "channels last, odd"])
def test_no_results_are_no_error(name):
    emit, _, shape = POOLS[name]
    written = EmulatedModule.of(
        Planned.of(module(emit, (shape, HALF)), H200.to_target(), H200, POLICY)
    )
    (found,) = written([np.empty(at(shape, {B: 0, N: 5, M: 6}), HALF)])
    assert found.size == 0


def func_of(name, dtype=HALF, **bounds):
    emit, _, shape = POOLS[name]
    func = fuse(emit, (shape, dtype))
    return with_known_sizes(func, {v: bounds[v.name] for v in sizes_of(func) if v.name in bounds})


def names_of(kernel):
    return [str(name) for name in kernel.attrs.get("tvm_fusion.versions", ())]


def test_lines_that_vectors_divide_have_versions_of_their_own():
    names = names_of(write_window_versions(WRITER, func_of("square"), H200, POLICY))
    assert any(name.startswith("of8_") for name in names)
    assert any(name.isdigit() for name in names)
    assert len(names) + 1 <= versions.MOST
    multiples = func_of("square", n=Bounds(0, 1024, 8))
    kernel = write_window_versions(WRITER, multiples, H200, POLICY)
    assert all(name.startswith("of8_") for name in names_of(kernel))
    last = write_window_versions(WRITER, func_of("channels last"), H200, POLICY)
    assert not any(name.startswith("of8_") for name in names_of(last))


def test_several_sizes_are_compared_by_their_results():
    names = names_of(write_window_versions(WRITER, func_of("all"), H200, POLICY))
    assert any(name.endswith("_results") for name in names)
    assert names[0].isdigit()  # lines too short for what the others compute of one


def test_ranges_end_where_the_size_does():
    names = names_of(
        write_window_versions(WRITER, func_of("channels last", n=Bounds(0, 12)), H200, POLICY)
    )
    assert not names  # nothing but small images: one kernel


def test_what_may_be_more_than_there_is_is_refused():
    problem = read_windows(func_of("square"))
    with pytest.raises(Unsupported, match="WindowConfig"):
        emit_windows(problem, H200, WindowConfig(128, 2, 1))
    emit_windows(problem, H200, WindowConfig(128, 1, 1))
    known = read_windows(func_of("square", n=Bounds(4, None)))
    emit_windows(known, H200, WindowConfig(128, 2, 2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "hw", "name"),
    [
        pytest.param("sm_80", A100, "channels last", marks=pytest.mark.nightly),
        ("sm_90a", H200, "square"),
    ],
)
def test_all_ranges_compile_without_spills(arch, hw, name):
    emit, _, shape = POOLS[name]
    plan = Planned.of(module(emit, (shape, HALF)), hw.to_target(), hw, POLICY)
    kernels = EmulatedModule.of(plan).kernels
    report = ptxas_report(one_source(kernels), arch)
    assert len(kernels) > 2
    assert report.count("0 bytes spill stores, 0 bytes spill loads") == len(kernels)
