"""The suites of attention and of layers of models: what they hold and compute."""

import math

import pytest
import torch

from tvm_fusion.config import load_profile, resolve_target
from tvm_fusion.errors import InputError, Unsupported

from .. import workloads
from ..peers.attention import own_peer
from ..peers.names import OWN_PEERS
from ..peers.registry import outputs_of, peer
from ..record import compare, empty_row, too_wrong
from ..rows import wall
from ..rows.accuracy import output_shapes, reference, relative_error
from ..rows.setup import Setup
from ..rows.together import limit_us
from ..run import run_suite
from ..table import table
from .transformers import Caches, grouped_attention

SMALL = 0.02
ATTENTION, ALL = workloads.SUITES["attention"], workloads.SUITES["transformers"]
LAYERS = [name for name in ALL if name not in workloads.SUITES["models"] and name not in ATTENTION]
# The others differ from these in extents alone
COMPILED = [
    "attention_causal_d64",
    "attention_called",
    "attention_rows",
    "attention_grouped",
    "attention_alibi",
    "attention_window",
    "attention_document",
    "decode_1x2048",
    "llama_prefill_8x512",
    "llama_decode_16",
    "bert_large_16x512",
    "vit_base_32x197",
]


def small(name, scale=SMALL):
    return workloads.make(name, "cpu", "float16", scale)


def test_the_suites_hold_attention_alone_and_layers():
    assert len(ATTENTION) == 19
    assert set(ATTENTION) < set(ALL)
    assert {"attention", "block", "demo_block", *LAYERS} == set(ALL) - set(ATTENTION)
    assert len(LAYERS) == 6
    assert all(workloads.WORKLOADS[name].wall for name in ALL)
    assert all(workloads.dtype_of(name, "float16") == "float16" for name in ALL)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", [*ATTENTION, *LAYERS])
def test_a_module_and_its_own_peers_compute_the_same(name):
    instance = small(name)
    wanted, _ = reference(instance)
    with torch.no_grad():
        given = {"torch": outputs_of(instance.module(*instance.inputs))}
        given |= {label: outputs_of(own_peer(label, instance)()) for label in instance.peers}
    assert [t.shape for t in output_shapes(instance)] == [t.shape for t in wanted]
    for label, outputs in given.items():
        assert relative_error(outputs, wanted) < 5e-3, label
    assert float(wanted[0].std()) > 0.02


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", COMPILED)
def test_every_kind_of_attention_and_layer_compiles_and_is_right_on_the_cpu(name):
    (row,) = run_suite([name], [], "llvm", scale=SMALL, repeats=1, budget_s=0.01)["rows"]
    assert row["failures"] == {}
    assert row["fallbacks"] == []
    assert row["error"] < 2e-3
    assert row["ours_us"] > 0


def test_a_row_names_the_kernel_that_its_peer_found_fastest_and_has_no_other_peer():
    peers = ["torch", *OWN_PEERS]
    (row,) = run_suite(["attention_d64"], peers, "llvm", scale=SMALL, repeats=1)["rows"]
    assert row["peers_us"].keys() == {"torch", "sdpa"}
    assert row["notes"]["sdpa"] in ("flash", "math")
    assert row["peers_us"]["sdpa"] > 0
    result = {"rows": [row], "device": "x", "date": "y", "method": "z", "scale": SMALL}
    assert f"attention_d64: sdpa is {row['notes']['sdpa']}" in table(result)


def test_a_peer_that_a_workload_does_not_bring_is_refused():
    with pytest.raises(Unsupported, match="attention_d64 brings no peer 'flex'"):
        peer("flex")(small("attention_d64"), None)
    with pytest.raises(InputError, match="did you mean 'sdpa'"):
        peer("spda")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attention_grouped", "2x32x2048x128, 2x8x2048x128, 2x8x2048x128"),
        ("attention_cross", "2x16x2048x128, 2x16x1500x128, 2x16x1500x128"),
        ("attention_rows", "2x2048x2048, 2x2048x2048, 2x2048x2048"),
        ("decode_32x8192", "32x32x1x128, 32x8x8192x128, 32x8x8192x128"),
        ("llama_decode_16", "16x1x4096, 1, 16x8x2048x128, 16x8x2048x128"),
        ("llama_prefill_8x512", "8x512x4096"),
        ("bert_large_16x512", "16x512x1024"),
        ("vit_base_32x197", "32x197x768"),
    ],
)
def test_full_sizes_are_those_of_the_models(name, shape, monkeypatch):
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, *_, **__: tensor)
    instance = workloads.make(name, "meta", "float16")
    assert instance.shape == shape


@pytest.mark.parametrize("name", ["attention_causal_d64", "attention_window", "attention_document"])
def test_the_limit_counts_what_the_mask_leaves(name):
    h200 = load_profile("nvidia_h200")
    instance = workloads.make(name, "meta", "float16")
    visible = torch.ones(2048, 2048, dtype=torch.bool).tril()
    if name == "attention_window":
        visible = visible.triu(-255)
    if name == "attention_document":
        number = torch.arange(2048) * 5 // 2048
        visible &= number[:, None] == number
    width = instance.inputs[0].shape[-1]
    flop = 2 * 2 * 2 * 16 * width * int(visible.sum())
    assert instance.flop_share == pytest.approx(float(visible.double().mean()), rel=2e-3)
    outputs = [torch.empty(instance.inputs[0].shape, device="meta", dtype=torch.float16)]
    all_flop = 2 * 2 * 2 * 16 * width * 2048 * 2048
    limit = limit_us(instance, outputs, round(all_flop * instance.flop_share), h200)
    moved = 4 * outputs[0].nbytes + sum(x.nbytes for x in instance.inputs[3:])
    least = max(flop / h200.tensor_flop_per_s["float16"], moved / h200.hbm_bytes_per_s)
    assert limit == pytest.approx(1e6 * least, rel=2e-3)


def test_a_step_of_llama_writes_its_caches_and_is_the_end_of_a_prefill():
    step, prefill = small("llama_decode_1"), small("llama_prefill_1x2048")
    prefill.module.layer.load_state_dict(step.module.layer.state_dict())
    module, whole = step.module.float(), prefill.module.float()
    _, _, keys, values = (torch.zeros_like(x).float() for x in step.inputs)
    x = torch.randn(1, keys.shape[2], step.inputs[0].shape[-1])
    with torch.no_grad():
        wanted = whole(x)[:, :4]
        given = [module(x[:, i : i + 1], torch.tensor([i]), keys, values) for i in range(4)]
    torch.testing.assert_close(torch.cat(given, 1), wanted, rtol=1e-4, atol=1e-4)


def test_grouped_attention_is_attention_with_repeated_keys():
    q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    given, _ = grouped_attention(torch.nn.Identity(), q, k, v, None, 16**-0.5)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(given, wanted.transpose(1, 2))


def test_caches_give_back_what_was_written():
    keys, values = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    caches = Caches(torch.tensor([2]), keys, values)
    found = caches.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2) * 3, 0)
    assert found[0] is keys
    assert keys[0, 0, :, 0].tolist() == [0, 0, 1, 0]
    assert values[0, 0, :, 0].tolist() == [0, 0, 3, 0]


def test_wall_times_and_memory_are_noted_and_wrong_graphs_are_left_out():
    x = torch.ones(4)
    calls = {"tvm_fusion": lambda: x * 2, "torch": lambda: x * 2, "tvm": lambda: x * 2}
    ours = wall.Probe(lambda _call: (16, 64), lambda call: call)
    others = wall.Probe(lambda _call: (32, 96), lambda _call: lambda: x * 3)
    target, hw = resolve_target("llvm")
    setup = Setup("llvm", target, hw, (), "float32", 1.0, 2, 0.1)
    row = empty_row("attention_d64", ["torch", "tvm"]) | {"ours_us": 1.0}
    instance = workloads.Instance("double", torch.nn.Identity(), (x,), "float32")
    wall.fill(row, instance, [x.double() * 2], ours, calls, setup, others)
    compare(row)
    assert row["wall_us"].keys() == {"tvm_fusion"}
    assert row["memory_bytes"] == {"tvm_fusion": 16, "torch": 32}
    assert row["memory_taken_bytes"] == {"tvm_fusion": 64, "torch": 96}
    assert row["failures"].keys() == {"torch, CUDA graph"}
    assert row["best_wall_ratio"] is None
    row["wall_us"] |= {"torch": row["wall_us"]["tvm_fusion"] * 2}
    compare(row)
    assert (row["best_wall_peer"], row["best_wall_ratio"]) == ("torch", 2)
    result = {"rows": [row], "device": "x", "date": "y", "method": "z", "scale": 1}
    assert "wall us, CUDA graphs" in table(result)


@pytest.mark.parametrize(("error", "wrong"), [(0.5, False), (2.0, True), (math.inf, True)])
def test_an_error_is_allowed_up_to_the_ceiling(error, wrong):
    assert (too_wrong(error, 1.0) is not None) == wrong


@pytest.mark.gpu
def test_a_row_of_attention_has_wall_times_and_memory_on_the_gpu():
    names = ["attention_d64", "llama_decode_1"]
    for row in run_suite(names, ["torch", "sdpa"], "cuda", scale=0.25, repeats=5)["rows"]:
        assert row["failures"] == {}
        assert {"tvm_fusion", "torch"} <= row["wall_us"].keys()
        assert min(row["wall_us"].values()) > 0
        assert row["memory_bytes"]["torch"] > 0
