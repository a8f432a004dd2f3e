"""Kernels of an attention for ranges of a symbolic size: which, and right at the edges of each."""

import numpy as np
import pytest
from tvm import tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.extents import Bounds, sizes_of, with_known_sizes
from tvm_fusion.ir.graph import OUTPUTS_ATTR, VERSIONS_ATTR
from tvm_fusion.kernels.attention import versions
from tvm_fusion.kernels.attention.forms import WRITER
from tvm_fusion.kernels.attention.versions import write_attention_versions
from tvm_fusion.kernels.versions import MOST
from tvm_fusion.runtime.build.version_names import launches_of, versions_among
from tvm_fusion.transform.apply.write_kernels import write_kernel

from ...support.cuda_on_cpu import lower, run_cuda_on_cpu
from ...support.helpers_tir import poisoned
from ...support.hopper_on_cpu import run_hopper_on_cpu
from ...support.kernel_cases import fuse, softmax_of

H200 = load_profile("nvidia_h200")
POLICY = load_policy(None)
HALF, HEAD = "float16", 64


def weighted(bb, q, k, v, *bias):
    scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
    for term in bias:
        scores = bb.emit(op.add(scores, term))
    scores = bb.emit(op.nn.softmax(bb.emit(op.astype(scores, "float32"))))
    return op.matmul(bb.emit(op.astype(scores, HALF)), v)


def biased(heads, n):
    points = ((1, heads, n, HEAD), HALF)
    return fuse(weighted, points, points, points, ((1, heads, n, n), HALF))


def decoded(heads, keys):
    points = ((1, heads, keys, HEAD), HALF)
    return fuse(weighted, ((1, heads, 1, HEAD), HALF), points, points)


def run(lowered, arrays, bias=0.0, on_cpu=run_hopper_on_cpu):
    q, k, v = (x.astype(float) for x in arrays[:3])
    out = poisoned(q.shape, HALF)
    assert on_cpu(lowered, [*arrays, out]) == 1
    expected = softmax_of(q @ k.swapaxes(-1, -2) + bias) @ v
    assert np.abs(out - expected).max() <= 2e-3 * np.abs(expected).max()


def test_each_range_is_right_at_its_edges(monkeypatch):
    monkeypatch.setattr(versions, "SIZES", (64, 4096))
    func = biased(1, tirx.Var("n", "int64"))
    kernel = write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "attention", H200, POLICY)
    assert [*map(str, kernel.attrs[VERSIONS_ATTR])] == ["of8_upto_64", "of8_beyond", "64"]
    lowered = lower(kernel)
    multiple = next(v for v in (lowered, *lowered.versions) if v.kernel == "main_of8_beyond_kernel")
    assert "load_four" in multiple.source
    rng = np.random.default_rng(0)
    for n in (1, 64, 65, 72):
        arrays = [rng.standard_normal((1, 1, n, HEAD)).astype(HALF) / 3 for _ in "qkv"]
        bias = rng.standard_normal((1, 1, n, n)).astype(HALF)
        run(lowered, [*arrays, bias], bias.astype(float))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("bounds", "names"),
    [
        (Bounds(0, 4096, 8), ["64"]),
        (Bounds(0, 64, 8), []),
        (Bounds(0, 60), ["of8_beyond"]),
        (Bounds(72), ["of8_beyond"]),
    ],
    ids=str,
)
def test_within_bounds_there_is_no_kernel_for_other_sizes(bounds, names, monkeypatch):
    monkeypatch.setattr(versions, "SIZES", (64, 4096))
    n = tirx.Var("n", "int64")
    func = biased(1, n)
    func = with_known_sizes(func, dict.fromkeys(sizes_of(func), bounds))
    kernel = write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "attention", H200, POLICY)
    assert [*map(str, kernel.attrs.get(VERSIONS_ATTR, ()))] == names
    lowered, rng = lower(kernel), np.random.default_rng(0)
    assert "load_four" in lowered.source or bounds.multiple % 8
    for n in (8, 64, 72):
        if bounds.refusal(n) is None:
            arrays = [rng.standard_normal((1, 1, n, HEAD)).astype(HALF) / 3 for _ in "qkv"]
            bias = rng.standard_normal((1, 1, n, n)).astype(HALF)
            run(lowered, [*arrays, bias], bias.astype(float))


def test_kernels_for_multiples_have_tiles_that_vectors_leave_registers_for(monkeypatch):
    func = biased(12, tirx.Var("n", "int64"))
    func = with_known_sizes(func, dict.fromkeys(sizes_of(func), Bounds(0, 2000)))
    written_as, branches = [], versions._branches

    def noted(writer, problem, found, *others):
        written_as.append([version.config for version in found])
        return branches(writer, problem, found, *others)

    monkeypatch.setattr(versions, "_branches", noted)
    assert write_attention_versions(WRITER, func, H200, POLICY) is not None
    anywhere, multiples = written_as
    wanted = WRITER.ranked(WRITER.read(biased(12, 2000), False), H200, POLICY)[0][1]
    assert multiples[-1] == wanted
    assert anywhere[-1] != wanted


def apart(heads, queries, keys, *bias):
    """Queries and keys of their own numbers."""
    points = ((1, heads, keys, HEAD), HALF)
    others = [((1, heads, queries, keys), HALF)] * len(bias)
    return fuse(weighted, ((1, heads, queries, HEAD), HALF), points, points, *others)


def written(func, monkeypatch=None, queries=(), keys=()):
    """The versions of a function, by their names."""
    if monkeypatch is not None:
        monkeypatch.setattr(versions, "QUERIES", queries)
        monkeypatch.setattr(versions, "KEYS", keys)
    kernel = write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "attention", H200, POLICY)
    return kernel, [*map(str, kernel.attrs.get(VERSIONS_ATTR, ()))]


@pytest.mark.parametrize("bias", [(), ("bias",)], ids=["plain", "bias"])
def test_queries_and_keys_are_compared_apart(bias, monkeypatch):
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    func = apart(1, n, m, *bias)
    kernel, names = written(func, monkeypatch, (8, 2048), (32, 4096))
    assert "0" in names
    assert any("8_queries" in name for name in names)
    lowered, rng = lower(kernel), np.random.default_rng(0)
    for queries, keys in ((1, 1), (7, 33), (8, 32), (9, 32), (9, 33), (1, 70)):
        shapes = ((queries, HEAD), (keys, HEAD), (keys, HEAD), *[(queries, keys)] * len(bias))
        arrays = [rng.standard_normal((1, 1, *shape)).astype(HALF) / 3 for shape in shapes]
        run(lowered, arrays, arrays[-1].astype(float) if bias else 0.0)


def test_few_queries_have_a_decode_kernel_that_is_not_asked_without_any(monkeypatch):
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    kernel, names = written(apart(2, n, m), monkeypatch, (16, 2048), (64, 4096))
    first = next(name for name in names if "16_queries" in name)
    lowered = lower(kernel)
    few = next(v for v in (lowered, *lowered.versions) if v.kernel == f"main_{first}_kernel")
    assert "mma.sync" in few.source
    assert "wgmma" not in few.source
    for queries, keys in ((0, 3), (1, 3), (15, 64), (16, 65), (17, 64)):
        rng = np.random.default_rng(queries)
        shapes = ((queries, HEAD), (keys, HEAD), (keys, HEAD))
        arrays = [rng.standard_normal((1, 2, *shape)).astype(HALF) / 3 for shape in shapes]
        if queries:
            run(lowered, arrays)
        else:
            assert run_hopper_on_cpu(lowered, [*arrays, poisoned(arrays[0].shape, HALF)]) <= 1


def test_keys_that_are_a_sum_of_sizes_are_read_by_the_tma():
    past, added = tirx.Var("past", "int64"), tirx.Var("added", "int64")
    func = apart(2, added, past + added)
    past = next(size for size in sizes_of(func) if size.name == "past")
    params = [*func.params[:-1], past, func.params[-1]]  # as a size is passed that no shape tells
    func = tirx.PrimFunc(params, func.body, func.ret_type, attrs=func.attrs)
    problem = WRITER.read(func, False)
    config = WRITER.ranked(problem, H200, POLICY)[0][1]
    assert WRITER.form_of(config).name == "hopper"
    kernel, names = written(func)
    assert any("queries" in name for name in names)
    rng = np.random.default_rng(0)
    whole = WRITER.emit(problem, H200, POLICY, config)
    for one, sizes in ((kernel, ((1, 1), (3, 67), (65, 5))), (whole, ((1, 1), (65, 5)))):
        lowered = lower(one)
        for queries, before in sizes:
            shapes = ((queries, HEAD), *[(before + queries, HEAD)] * 2)
            arrays = [rng.standard_normal((1, 2, *shape)).astype(HALF) / 3 for shape in shapes]
            run(lowered, [*arrays, before])


def test_few_keys_are_not_split_and_many_are():
    n = tirx.Var("n", "int64")
    kernel = write_attention_versions(WRITER, decoded(32, n), H200, POLICY)
    edges = [int(most) for most in kernel.attrs[VERSIONS_ATTR]]
    assert edges == sorted(set(edges) & set(versions.SIZES))
    lowered = lower(kernel)
    clusters = ["clusterCtaIdx.x" in one.launch_params for one in (lowered, *lowered.versions)]
    assert not clusters[0]
    assert clusters[-1]


def test_decode_is_right_where_splits_begin():
    kernel = write_attention_versions(WRITER, decoded(2, tirx.Var("n", "int64")), H200, POLICY)
    edge = int(kernel.attrs[VERSIONS_ATTR][0])
    lowered = lower(kernel)
    for keys in (edge - 1, edge, edge + 1):
        rng = np.random.default_rng(keys)
        q = rng.standard_normal((1, 2, 1, HEAD)).astype(HALF)
        k, v = (rng.standard_normal((1, 2, keys, HEAD)).astype(HALF) / 3 for _ in "kv")
        run(lowered, [q, k, v], on_cpu=run_cuda_on_cpu)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["hopper", "decode", "mma"])
def test_without_keys_results_are_zeros(form):
    """As in torch, whose products over no terms are 0."""
    n = tirx.Var("n", "int64")
    points, queries = ((1, 1, n, HEAD), HALF), 9
    func = fuse(weighted, ((1, 1, queries, HEAD), HALF), points, points, ((1, 1, queries, n), HALF))
    problem = WRITER.read(func, False)
    ranked = WRITER.ranked(problem, H200, POLICY)
    config = next(c for _, c in ranked if WRITER.form_of(c).name == form)
    kernel = write_kernel(func.with_attr(OUTPUTS_ATTR, 1), "attention", H200, POLICY, config)
    on_cpu = run_hopper_on_cpu if form == "hopper" else run_cuda_on_cpu
    lowered = lower(kernel)
    rng = np.random.default_rng(0)
    for keys in (0, 1):
        shapes = ((queries, HEAD), (keys, HEAD), (keys, HEAD), (queries, keys))
        arrays = [rng.standard_normal((1, 1, *shape)).astype(HALF) for shape in shapes]
        if keys:
            run(lowered, arrays, arrays[-1].astype(float), on_cpu)
            continue
        out = poisoned(arrays[0].shape, HALF)
        assert on_cpu(lowered, [*arrays, out]) == 1
        assert not out.any()


@pytest.mark.parametrize(
    ("keys", "may"), [("n", True), ("m", False), ("n + m", False), ("n + 1", False), (7, False)]
)
def test_keys_that_are_as_many_as_queries_at_all_sizes_are_never_missing(keys, may):
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    keys = eval(keys, {"n": n, "m": m}) if isinstance(keys, str) else keys
    points = ((1, 1, keys, HEAD), HALF)
    func = fuse(weighted, ((1, 1, m, HEAD), HALF), points, points)
    assert WRITER.read(func, False).may_lack_keys == may


@pytest.mark.parametrize(("queries", "parts"), [(1, 16), (16, 32), (64, 64)])
def test_partial_results_take_time_at_the_end_of_a_decode_kernel(queries, parts):
    attention = WRITER.read(apart(16, queries, 64), False)
    ranked = WRITER.ranked(attention, H200, POLICY)
    alone = {config: seconds for seconds, config in versions._of_kernels(ranked, attention, H200)}
    own = {config: seconds - versions.LAUNCH for seconds, config in ranked}
    more = {type(config).__name__: alone[config] - own[config] for config in own}
    assert more.pop("DecodeConfig") == pytest.approx(parts * versions.PART - versions.START)
    assert set(more.values()) <= {0.0}


def test_few_versions_lose_little():
    n = tirx.Var("n", "int64")
    kernel = write_attention_versions(WRITER, biased(12, n), H200, POLICY)
    assert 1 < len(kernel.attrs[VERSIONS_ATTR]) < MOST


def test_of_a_symbolic_batch_queries_and_keys_are_compared():
    n, heads = tirx.Var("n", "int64"), tirx.Var("h", "int64")
    _, names = written(decoded(heads, n))
    assert any("keys" in name for name in names)
    _, names = written(apart(heads, n, n))
    assert any("queries" in name for name in names)
    assert not any("keys" in name for name in names)


def test_fixed_sizes_have_no_versions():
    assert write_attention_versions(WRITER, biased(1, 64), H200, POLICY) is None


def test_versions_by_queries_and_keys_are_one_launch_and_told_by_both():
    ends = ("upto_0", "upto_16_queries_64_keys", "upto_64_queries", "upto_512_keys", "beyond")
    kernels = [f"f_{end}_kernel" for end in ends]
    assert launches_of(kernels) == 1
    told = ("up to 0", "up to 16 queries, 64 keys", "up to 64 queries", "up to 512 keys", "beyond")
    assert versions_among(kernels) == told
