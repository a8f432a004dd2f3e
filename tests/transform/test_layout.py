"""CancelLayouts: permutations and reshapes that undo each other are taken out, numbers stay."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op

import tvm_fusion
from tests.support.helpers_tir import quick_executable
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.plan.decide.decide import decide
from tvm_fusion.plan.explain.reasons import layout_changes, with_layout_reasons
from tvm_fusion.transform.pipeline import lower
from tvm_fusion.transform.rewrites.cancel_layouts import CancelLayouts

LAYOUTS = ("permute_dims", "reshape", "expand_dims", "squeeze", "flatten", "broadcast_to")
BASE = (2, 3, 4, 6)  # the first axis may be symbolic


def calls(func: relax.Function) -> list[str]:
    """The operators of a function by their names."""
    found = [b.value for block in func.body.blocks for b in block.bindings]
    return [v.op.name.removeprefix("relax.") for v in found if isinstance(v, relax.Call)]


def cancelled(func: relax.Function) -> relax.Function:
    return CancelLayouts()(tvm.IRModule({"main": func}))["main"]


def function(build, *shapes, dtype="float32") -> relax.Function:
    """The function of parameters of these shapes whose result `build(emit, *parameters)` is."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            result = build(builder.emit, *params)
            fields = result if isinstance(result, tuple) else (result,)
            outputs = [builder.emit_output(field) for field in fields]
        builder.emit_func_output(relax.Tuple(outputs) if isinstance(result, tuple) else outputs[0])
    return builder.get()["main"]


class RandomGraph:
    """A function of layout operators and pointwise ones between them, and what it computes."""

    def __init__(self, seed: int, builder: relax.BlockBuilder) -> None:
        self.rng, self.builder = np.random.default_rng(seed), builder
        first = tirx.Var("n", "int64") if seed % 3 == 0 else BASE[0]
        shape = (first, *BASE[1:])
        self.inputs = [self.array(BASE), self.array((BASE[-1],))]
        x = relax.Var("x", relax.TensorType(shape, "float32"))
        bias = relax.Var("bias", relax.TensorType((BASE[-1],), "float32"))
        with builder.function(f"graph{seed}", [x, bias]):
            with builder.dataflow():
                self.values = [(x, self.inputs[0])]
                for _ in range(9):
                    self.step(bias)
                results = [self.values[-1], self.values[int(self.rng.integers(len(self.values)))]]
                outputs = [builder.emit_output(op.negative(var)) for var, _ in results[:1]]
                outputs.append(builder.emit_output(results[1][0]))
            builder.emit_func_output(relax.Tuple(outputs))
        self.expected = [-results[0][1], results[1][1]]

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.integers(-8, 8, shape).astype("float32")

    def step(self, bias: relax.Var) -> None:
        back = 1 + int(self.rng.integers(min(3, len(self.values))))
        var, array = self.values[-back if self.rng.random() < 0.3 else -1]
        shape = list(var.ty.shape)
        kind = self.rng.choice(["permute", "undo", "merge", "split", "unit", "unary", "binary"])
        if kind in ("permute", "undo"):
            axes = [int(a) for a in self.rng.permutation(array.ndim)]
            self.add(op.permute_dims(var, axes), array.transpose(axes))
            if kind == "undo":
                self.unary()
                var, array = self.values[-1]
                axes = [int(a) for a in np.argsort(axes)]
                self.add(op.permute_dims(var, axes), array.transpose(axes))
        elif kind == "merge" and array.ndim > 1:
            at = int(self.rng.integers(array.ndim - 1))
            self.reshape(var, array, at, at + 2, [shape[at] * shape[at + 1]])
        elif kind == "split":
            even = [i for i, e in enumerate(shape) if _static(e) and int(e) % 2 == 0]
            if even:
                at = even[int(self.rng.integers(len(even)))]
                self.reshape(var, array, at, at + 1, [2, int(shape[at]) // 2])
        elif kind == "unit":
            at = int(self.rng.integers(array.ndim + 1))
            self.reshape(var, array, at, at, [1])
        elif kind == "unary":
            self.unary()
        else:
            self.binary(var, array, bias)

    def unary(self) -> None:
        var, array = self.values[-1]
        self.add(op.nn.relu(var), np.maximum(array, 0))

    def binary(self, var: relax.Var, array: np.ndarray, bias: relax.Var) -> None:
        shape = list(var.ty.shape)
        alike = [v for v in self.values if tvm_ffi.structural_equal(v[0].ty, var.ty)]
        if array.shape[-1] == BASE[-1] and self.rng.random() < 0.5:
            self.add(op.add(var, bias), array + self.inputs[1])
        elif all(map(_static, shape)) and self.rng.random() < 0.4:
            kept = [e if self.rng.random() < 0.6 else 1 for e in array.shape]
            constant = self.array(tuple(kept))
            self.add(op.maximum(var, relax.const(constant)), np.maximum(array, constant))
        else:
            other = alike[int(self.rng.integers(len(alike)))]
            self.add(op.subtract(var, other[0]), array - other[1])

    def reshape(self, var, array, start: int, stop: int, extents: list) -> None:
        shape = list(var.ty.shape)
        new = [*shape[:start], *extents, *shape[stop:]]
        sizes = [*array.shape[:start], *[-1] * (stop > start), *array.shape[stop:]]
        if len(extents) == 2:
            sizes = [*array.shape[:start], *extents, *array.shape[stop:]]
        elif stop == start:
            sizes = [*array.shape[:start], 1, *array.shape[stop:]]
        self.add(op.reshape(var, new), array.reshape(sizes))

    def add(self, value: relax.Expr, array: np.ndarray) -> None:
        self.values.append((self.builder.emit(value), array))


def _static(extent) -> bool:
    return isinstance(extent, tirx.IntImm)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(3))
def test_random_graphs_keep_their_numbers_and_gain_no_operators(part):
    builder = relax.BlockBuilder()
    graphs = {seed: RandomGraph(seed, builder) for seed in range(20 * part, 20 * part + 20)}
    before = builder.get()
    after = CancelLayouts()(before)
    assert relax.analysis.check_well_formed(after)
    fewer = 0
    for seed in graphs:
        old, new = ([n for n in calls(m[f"graph{seed}"]) if n in LAYOUTS] for m in (before, after))
        assert new.count("permute_dims") <= old.count("permute_dims")
        assert len(calls(after[f"graph{seed}"])) <= len(calls(before[f"graph{seed}"]))
        fewer += new.count("permute_dims") < old.count("permute_dims")
    assert fewer >= 8
    machine = relax.VirtualMachine(quick_executable(after), tvm.cpu())
    for seed, graph in graphs.items():
        found = machine[f"graph{seed}"](*map(tvm.runtime.tensor, graph.inputs))
        for result, expected in zip(found, graph.expected, strict=True):
            np.testing.assert_array_equal(result.numpy(), expected, err_msg=f"graph{seed}")
    tvm.ir.assert_structural_equal(CancelLayouts()(after), after)


def test_a_permutation_and_its_inverse_cancel():
    func = function(
        lambda e, x: op.exp(e(op.permute_dims(e(op.permute_dims(x, [0, 2, 1])), [0, 2, 1]))),
        (2, 3, 4),
    )
    assert calls(cancelled(func)) == ["exp"]


def test_they_cancel_through_a_reshape_that_merges_what_they_keep_together():
    def build(emit, x):
        nhwc = emit(op.permute_dims(x, [0, 2, 3, 1]))
        flat = emit(op.reshape(nhwc, (2, 20, 3)))
        return op.exp(emit(op.permute_dims(flat, [0, 2, 1])))

    assert calls(cancelled(function(build, (2, 3, 4, 5)))) == ["reshape", "exp"]


@pytest.mark.parametrize("dtype", ["float16", "int8", "bool"])
def test_they_cancel_through_a_cast(dtype):
    def build(emit, x):
        cast = emit(op.astype(emit(op.permute_dims(x, [1, 2, 0])), "float32"))
        return op.permute_dims(cast, [2, 0, 1])

    assert calls(cancelled(function(build, (2, 3, 4), dtype=dtype))) == ["astype"]


def test_a_reshape_that_cuts_across_axes_keeps_both_permutations():
    def build(emit, x):
        turned = emit(op.permute_dims(x, [1, 0]))
        return op.permute_dims(emit(op.reshape(turned, (3, 4))), [1, 0])

    mod = tvm.IRModule({"main": function(build, (6, 2))})
    assert CancelLayouts()(mod).same_as(mod)


def test_a_module_without_something_to_take_out_stays_the_same_object():
    heads = function(
        lambda e, x: op.permute_dims(e(op.reshape(x, (2, 3, 4, 8))), [0, 2, 1, 3]), (2, 3, 32)
    )
    for func in (heads, function(lambda _, x: op.exp(x), (4,))):
        mod = tvm.IRModule({"main": func})
        assert CancelLayouts()(mod).same_as(mod)


def test_two_permutations_become_one():
    func = function(
        lambda e, x: op.permute_dims(e(op.permute_dims(x, [1, 2, 0])), [0, 2, 1]), (2, 3, 4)
    )
    assert calls(cancelled(func)) == ["permute_dims"]


def test_an_axis_of_one_is_moved_by_a_reshape():
    func = function(lambda e, x: op.exp(e(op.permute_dims(x, [0, 2, 1, 3]))), (2, 1, 5, 8))
    assert calls(cancelled(func)) == ["reshape", "exp"]


def test_merged_symbolic_axes_cancel():
    n = tirx.Var("n", "int64")

    def build(emit, x):
        turned = emit(op.permute_dims(x, [0, 2, 1, 3]))
        flat = emit(op.reshape(turned, (n * 6, 4, 8)))
        turned = emit(op.permute_dims(emit(op.reshape(flat, (n, 6, 4, 8))), [0, 2, 1, 3]))
        return op.exp(turned)

    assert calls(cancelled(function(build, (n, 4, 6, 8)))) == ["exp"]


def test_constants_between_are_permuted_and_vectors_reshaped():
    weight = np.arange(60, dtype="float32").reshape(1, 4, 5, 3)

    def build(emit, x, scale):
        nhwc = emit(op.permute_dims(x, [0, 2, 3, 1]))
        both = emit(op.add(emit(op.multiply(nhwc, scale)), relax.const(weight)))
        return op.permute_dims(both, [0, 3, 1, 2])

    func = cancelled(function(build, (2, 3, 4, 5), (3,)))
    assert calls(func) == ["reshape", "multiply", "add"]
    constant = func.body.blocks[0].bindings[-1].value.args[1]
    np.testing.assert_array_equal(constant.value.numpy(), weight.transpose(0, 3, 1, 2))


def test_another_full_operand_in_the_old_order_keeps_the_number_of_permutations():
    def build(emit, x, y):
        turned = emit(op.add(emit(op.permute_dims(x, [0, 2, 1])), y))
        return op.permute_dims(turned, [0, 2, 1])

    mod = tvm.IRModule({"main": function(build, (2, 3, 4), (2, 4, 3))})
    assert calls(CancelLayouts()(mod)["main"]).count("permute_dims") == 1


def test_a_result_in_the_old_order_is_made_of_the_new_one():
    def build(emit, x):
        turned = emit(op.exp(emit(op.permute_dims(x, [1, 0]))))
        return turned, op.permute_dims(turned, [1, 0])

    func = cancelled(function(build, (3, 4)))
    assert calls(func) == ["exp", "permute_dims"]


def test_what_is_written_in_place_is_not_made_of_its_source():
    def build(emit, x, new):
        copy = emit(op.permute_dims(emit(op.permute_dims(x, [1, 0])), [1, 0]))
        write = relax.ExternFunc("write")
        ty = relax.TensorType((3, 4), "float32")
        return emit(op.call_inplace_packed(write, copy, new, inplace_indices=[0], ty_args=[ty]))

    builder = relax.BlockBuilder()
    params = [relax.Var(n, relax.TensorType((3, 4), "float32")) for n in ("x", "new")]
    with builder.function("main", params):
        builder.emit_func_output(build(builder.emit, *params))
    mod = builder.get()
    assert CancelLayouts()(mod).same_as(mod)


# What reaches the planner

BATCH, LENGTH, HEADS, WIDTH = 2, 128, 8, 64


class Applied(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, apply) -> None:
        super().__init__()
        self.apply_ = apply

    def forward(self, *args):
        return self.apply_(*args)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def explained(apply, *inputs: torch.Tensor):
    return tvm_fusion.explain(Applied(apply), "nvidia_h200", example_inputs=inputs)


def split(x: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    return x.view(BATCH, LENGTH, heads, WIDTH).transpose(1, 2)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * WIDTH)


def bert(x, wq, wk, wv, wo, mask):
    q, k, v = (split(x @ w) for w in (wq, wk, wv))
    weights = F.softmax(q @ k.transpose(-1, -2) / 8.0 + mask, -1)
    return merged(weights @ v) @ wo + x


def vit(x, wqkv, wo):
    qkv = (x @ wqkv).reshape(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    return merged(((q * 0.125) @ k.transpose(-2, -1)).softmax(-1) @ v) @ wo + x


def llama(x, wq, wk, wv, wo, cos, sin):
    def rotated(y):
        turned = torch.cat([-y[..., WIDTH // 2 :], y[..., : WIDTH // 2]], -1)
        return y * cos + turned * sin

    def repeated(y):
        spread = y[:, :, None].expand(BATCH, 2, HEADS // 2, LENGTH, WIDTH)
        return spread.reshape(BATCH, HEADS, LENGTH, WIDTH)

    q, k, v = rotated(split(x @ wq)), rotated(split(x @ wk, 2)), split(x @ wv, 2)
    future = torch.full((LENGTH, LENGTH), float("-inf"), dtype=x.dtype).triu(1)
    scores = q @ repeated(k).transpose(2, 3) * 0.125 + future
    return merged(F.softmax(scores.float(), -1).to(x.dtype) @ repeated(v)) @ wo


X, SQUARE = half(BATCH, LENGTH, HEADS * WIDTH), half(HEADS * WIDTH, HEADS * WIDTH)
NARROW, ANGLES = half(HEADS * WIDTH, 2 * WIDTH), half(1, 1, LENGTH, WIDTH)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("apply", "inputs"),
    [
        (bert, (X, SQUARE, SQUARE, SQUARE, SQUARE, half(BATCH, 1, 1, LENGTH))),
        (vit, (X, half(HEADS * WIDTH, 3 * HEADS * WIDTH), SQUARE)),
        (llama, (X, SQUARE, NARROW, NARROW, SQUARE, ANGLES, ANGLES)),
    ],
)
def test_attention_written_out_has_no_launch_for_a_layout(apply, inputs):
    report = explained(apply, *inputs)
    assert report.layouts == ()
    assert report.launches.fused == 3  # projections, attention, projection


def test_heads_that_are_split_and_turned_belong_to_the_products_around():
    report = explained(lambda x, w, v: split(x @ w) @ v, X, SQUARE, half(WIDTH, WIDTH))
    assert {g.kernel_class for g in report.groups} == {"gemm"}
    keys = half(BATCH * HEADS, LENGTH, WIDTH)
    report = explained(lambda q, k: q @ k.transpose(-1, -2), keys, keys)
    assert [g.kernel_class for g in report.groups] == ["gemm"]


def test_nhwc_around_a_pointwise_chain_is_one_plain_kernel():
    def apply(x, scale):
        return (torch.relu(x.permute(0, 2, 3, 1) * scale) + 1).permute(0, 3, 1, 2).contiguous()

    report = explained(apply, half(8, 64, 56, 56), half(64))
    assert [g.kernel_class for g in report.groups] == ["pointwise"]
    assert report.layouts == ()


def test_inverse_permutations_between_convolutions_cost_no_launch():
    def apply(x, w):
        nhwc = F.conv2d(x, w).permute(0, 2, 3, 1).contiguous()
        return F.conv2d(nhwc.permute(0, 3, 1, 2).contiguous(), w)

    inputs = torch.zeros(1, 8, 16, 16), torch.zeros(8, 8, 3, 3)
    without = explained(lambda x, w: F.conv2d(F.conv2d(x, w), w), *inputs).launches.fused
    assert explained(apply, *inputs).launches.fused == without


def test_a_permuted_result_stays_and_is_explained():
    report = explained(lambda x: x.permute(0, 2, 3, 1).contiguous(), half(8, 64, 56, 56))
    (change,) = report.layouts
    assert change.writes == change.ops
    assert len(change.reads) == 1
    assert change.neighbours == ()
    assert change.predicted_us == report.groups[0].predicted_us > 0
    assert change.bytes == 2 * 2 * 8 * 64 * 56 * 56
    assert "it writes" in report.full()
    assert "a result in this order of axes" in report.full()
    assert json.loads(json.dumps(report.to_json()))["layouts"][0]["ops"] == list(change.ops)


def test_a_refused_permutation_names_each_neighbour_and_its_reason():
    numbers = torch.zeros(64, 128, dtype=torch.int32)
    report = explained(lambda x: torch.sort(x.t(), -1)[0].t().contiguous(), numbers)
    first = report.layouts[0]
    assert first.readers == 2
    assert {"opaque", "cycle"} <= {r.code for r in first.neighbours}
    assert all(r.flip for r in first.neighbours)
    report = explained(lambda x: F.softmax(x.transpose(1, 2), -1), half(4, 1024, 1024))
    (change,) = report.layouts
    (refusal,) = change.neighbours
    assert refusal.code == "not_profitable"
    assert refusal.numbers["together_us"] > refusal.numbers["apart_us"]
    assert refusal.why in report.full().split("launches that only change a layout:")[1]


def test_reasons_that_a_plan_has_lost_are_asked_for_again():
    def build(emit, x):
        return op.nn.softmax(emit(op.permute_dims(x, [0, 2, 1])))

    target, hw = resolve_target("nvidia_h200")
    policy = load_policy(None)
    mod = tvm.IRModule({"main": function(build, (4, 1024, 1024))})
    graph = build_graph(lower(mod, target, hw=hw))
    plan = decide(graph, hw, policy)
    assert len(layout_changes(graph, plan)) == 1
    assert with_layout_reasons(graph, hw, policy, plan) is plan
    again = with_layout_reasons(graph, hw, policy, replace(plan, refusals=()))
    assert [r.code for r in again.refusals] == [plan.refusals[0].code]
