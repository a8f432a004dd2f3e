"""AssignLayouts: convolutions with channels last, changes of layout at borders, same numbers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import nn
from tvm import relax, tirx
from tvm.relax import op

from tests.support.convolutional_blocks import BLOCKS
from tests.support.helpers_tir import quick_executable
from tvm_fusion.config import resolve_target
from tvm_fusion.frontends import load
from tvm_fusion.transform import AssignLayouts, Decompose
from tvm_fusion.transform.functions.functions import operator_name
from tvm_fusion.transform.functions.unique_names import UniqueNames
from tvm_fusion.transform.layouts.ways import CONVOLUTIONS
from tvm_fusion.transform.pipeline import legalize, lower
from tvm_fusion.transform.rewrites.cancel_layouts import CancelLayouts
from tvm_fusion.transform.rewrites.factors import is_constant, is_one


def calls(mod: tvm.IRModule) -> list[relax.Call]:
    """All calls of operators in `main`."""
    found = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    return [value for value in found if operator_name(value)]


def names(mod: tvm.IRModule) -> list[str]:
    return [operator_name(call).removeprefix("relax.") for call in calls(mod)]


def moving(mod: tvm.IRModule) -> list[relax.Call]:
    """The permutations of what is no constant by which elements move."""
    found = []
    for call in calls(mod):
        if operator_name(call) != "relax.permute_dims" or is_constant(call.args[0]):
            continue
        extents = call.args[0].ty.shape
        order = [int(a) for a in call.attrs.axes if not is_one(extents[int(a)])]
        if order != sorted(order):
            found.append(call)
    return found


def torch_module(model, shapes):
    torch.manual_seed(0)
    model = model.eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    inputs = tuple(torch.randn(shape) for shape in shapes)
    return model, inputs, UniqueNames()(load((model, inputs)))


def run(mod: tvm.IRModule, inputs) -> list[np.ndarray]:
    """The results of a module on this CPU, its operators as TVM computes them."""
    low = legalize(mod, tvm.target.Target("llvm"))
    found = relax.VirtualMachine(quick_executable(low), tvm.cpu())["main"](
        *(tvm.runtime.tensor(np.asarray(x)) for x in inputs)
    )
    return [found.numpy()] if hasattr(found, "numpy") else [part.numpy() for part in found]


def check_numbers(model, inputs, mod, atol=2e-5):
    with torch.no_grad():
        expected = model(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for found, wanted in zip(run(mod, inputs), expected, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), atol=atol, rtol=1e-4)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", BLOCKS)
def test_layouts_of_a_network_change_at_its_borders_only(name):
    make, shapes, stay = BLOCKS[name]
    model, inputs, mod = torch_module(make(), shapes)
    assigned = AssignLayouts()(mod)
    opened = tvm.transform.Sequential([Decompose(), CancelLayouts()])(assigned)
    keys = name == "unet"  # which the attention of one head, opened for a CPU, turns
    assert len(moving(opened)) == stay + keys
    for call in calls(assigned):
        if operator_name(call) in CONVOLUTIONS:
            assert str(call.attrs.data_layout)[-1] == str(call.attrs.out_layout)[-1] == "C"
            assert str(call.attrs.kernel_layout)[0::99] == "O"
            assert str(call.attrs.kernel_layout)[-1] == "I"
            assert is_constant(call.args[1])  # packed at once
    check_numbers(model, inputs, opened)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", BLOCKS)
def test_running_twice_equals_running_once(name):
    make, shapes, _ = BLOCKS[name]
    _, _, mod = torch_module(make(), shapes)
    once = AssignLayouts()(mod)
    assert not once.same_as(mod)
    assert AssignLayouts()(once).same_as(once)


class Behind(nn.Module):
    """A convolution, and a function of what it gives."""

    def __init__(self, function, rank=4) -> None:
        super().__init__()
        kinds = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
        self.conv, self.function = kinds[rank](4, 8, 3, padding=1), function

    def forward(self, x):
        return self.function(self.conv(x))


FOLLOWERS = {
    "reflect": lambda y: F.pad(y, (1, 1, 2, 1), mode="reflect"),
    "pad_channels": lambda y: F.pad(y, (0, 0, 1, 0, 0, 8), value=2.0),
    "bilinear": lambda y: F.interpolate(y, size=(5, 7), mode="bilinear"),
    "adaptive": lambda y: F.adaptive_avg_pool2d(y, (2, 3)),
    "pixel_shuffle": lambda y: F.pixel_shuffle(y, 2),
    "glu": lambda y: F.glu(y, 1),
    "log_softmax": lambda y: F.log_softmax(y, 1),
    "argmax": lambda y: y.argmax(1),
    "max": lambda y: y.max(1).values,
    "max_of_rows": lambda y: y.amax((1, 2)),
    "cumsum": lambda y: y.cumsum(1),
    "bias": lambda y: y + torch.arange(8.0).view(8, 1, 1),
    "per_column": lambda y: y * torch.arange(64.0).view(8, 8),
    "where": lambda y: torch.where(y.sum(1, keepdim=True) > 0, y, y * 2),
    "hardtanh": F.hardtanh,
    "layer_norm": lambda y: F.layer_norm(y, (8, 8, 8), torch.arange(512.0).view(8, 8, 8)),
    "layer_norm_rows": lambda y: F.layer_norm(y, (8,)),
    "normalize": lambda y: F.normalize(y, dim=1),
    "slice": lambda y: y[:, 2:6:2, 1:-1],
    "take": lambda y: y[:, [3, 1]],
    "select": lambda y: y[:, 3],
    "flip": lambda y: y.flip(1),
    "stack": lambda y: torch.stack([y, y * 2], 1),
    "repeat": lambda y: y.repeat(1, 2, 1, 3),
    "repeat to more axes": lambda y: y.repeat(2, 1, 2, 1, 3),
    "split": lambda y: sum(y.split([2, 2, 4], 1)[:2]),
    "unsqueeze": lambda y: y.unsqueeze(2) * 2,
    "expand": lambda y: y.mean((2, 3), keepdim=True).expand(2, 8, 8, 8) * 2 + y,
    "matmul": lambda y: y @ y,
    "variance": lambda y: y.var((2, 3), keepdim=True) + y.std(1, keepdim=True),
    "sort": lambda y: y.sort(1).values,
    "gather": lambda y: y.gather(1, torch.zeros(2, 2, 8, 8, dtype=torch.int64)),
    "lp_pool": lambda y: F.lp_pool2d(y, 2, 2),
    "product": lambda y: y.prod(1),
    "topk": lambda y: y.topk(3, 1).values,
    "triangle": lambda y: y.tril(),
}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_follows_a_convolution_computes_the_same(name):
    model, inputs, mod = torch_module(Behind(FOLLOWERS[name]), [(2, 4, 8, 8)])
    assigned = AssignLayouts()(mod)
    assert len(moving(assigned)) <= 3 if name in ("pixel_shuffle", "topk") else 2
    check_numbers(model, inputs, assigned, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("rank", "function"),
    [
        (3, lambda y: F.max_pool1d(y, 3, 2)),
        (3, lambda y: F.adaptive_avg_pool1d(y, 1)),
        (3, lambda y: F.group_norm(y, 2, torch.arange(8.0))),
        (5, lambda y: F.avg_pool3d(y, 3, 1)),
        (5, lambda y: F.group_norm(y, 2, torch.arange(8.0))),
    ],
)
def test_one_and_three_dimensions(rank, function):
    model, inputs, mod = torch_module(Behind(function, rank), [(2, 4, *[6] * (rank - 2))])
    assigned = AssignLayouts()(mod)
    assert len(moving(assigned)) <= 2
    check_numbers(model, inputs, assigned)


TRANSPOSED = {
    "stride": dict(kernel_size=4, stride=2, padding=1),
    "output_padding": dict(kernel_size=3, stride=2, output_padding=1),
    "dilation": dict(kernel_size=3, dilation=2),
    "groups": dict(kernel_size=3, stride=3, groups=2),
    "depthwise": dict(kernel_size=3, stride=2, groups=8),
    "cropped": dict(kernel_size=2, stride=3, padding=2),
    "one_tap": dict(kernel_size=1),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("options", TRANSPOSED.values(), ids=list(TRANSPOSED))
def test_transposed_convolutions(options, rank):
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    model, inputs, mod = torch_module(kind(8, 16, **options), [(2, 8, *range(5, 5 + rank))])
    assigned = AssignLayouts()(mod)
    product = options == TRANSPOSED["one_tap"]
    assert ("matmul" in names(assigned)) == product
    assert (f"nn.conv{rank}d_transpose" in names(assigned)) != product
    check_numbers(model, inputs, assigned)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_of_one_tap_is_a_product(rank):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    model, inputs, mod = torch_module(kind(8, 16, 1), [(2, 8, *[5] * rank)])
    assigned = AssignLayouts()(mod)
    (product,) = [call for call in calls(assigned) if operator_name(call) == "relax.matmul"]
    assert [int(e) for e in product.args[0].ty.shape] == [2, *[5] * rank, 8]
    (weight,) = [c for c in calls(assigned) if c.op.name == "relax.permute_dims" and c.ty.ndim == 2]
    assert [int(e) for e in weight.args[0].ty.shape] == [16, 8]
    assert is_constant(weight.args[0])
    check_numbers(model, inputs, assigned)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [dict(stride=2), dict(padding=1), dict(groups=2)])
def test_other_convolutions_of_one_tap_stay(options):
    model, inputs, mod = torch_module(nn.Conv2d(8, 16, 1, **options), [(2, 8, 5, 5)])
    assigned = AssignLayouts()(mod)
    assert "matmul" not in names(assigned)
    check_numbers(model, inputs, assigned)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("before", "layout"), [(False, "NCHW"), (True, "NHWC")])
def test_a_depthwise_convolution_stays_as_it_is_where_nothing_around_it_changes(before, layout):
    depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), *depthwise) if before else depthwise
    model, inputs, mod = torch_module(model, [(2, 16, 40, 40)])
    assigned = AssignLayouts()(mod)
    (found,) = [c for c in calls(assigned) if "groups" in dir(c.attrs) and c.attrs.groups > 1]
    assert found.attrs.data_layout == layout
    assert bool(moving(assigned)) == before
    check_numbers(model, inputs, assigned)


def conv_of_parameters(attrs=None, shape=(2, 4, 8, 8), blocks=relax.BlockBuilder.dataflow):
    """relu(conv2d(x, w)) + conv2d(x, w), x and w parameters."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    w = relax.Var("w", relax.TensorType((4, 4, 3, 3), "float32"))
    with builder.function("main", [x, w], attrs=attrs):
        with blocks(builder):
            y = builder.emit(op.nn.conv2d(x, w, padding=1))
            z = builder.emit(op.nn.conv2d(builder.emit(op.nn.relu(y)), w, padding=1))
            result = builder.emit_output(builder.emit(op.add(y, z)))
        builder.emit_func_output(result)
    return builder.get()


def test_weights_that_are_parameters_are_permuted_once_and_can_be_lifted():
    mod = conv_of_parameters({"num_input": 1})
    assigned = AssignLayouts()(mod)
    of_weight = [c for c in moving(assigned) if c.args[0].name == "w"]
    assert len(of_weight) == 1
    assert len(moving(assigned)) == 3
    lifted = relax.transform.LiftTransformParams()(assigned)
    assert len(moving(lifted)) == 2
    (turned,) = lifted["main_transform_params"].body.blocks[0].bindings[-2:-1]
    assert operator_name(turned.value) == "relax.permute_dims"


def test_a_symbolic_batch_stays_symbolic():
    n = tirx.Var("n", "int64")
    assigned = AssignLayouts()(conv_of_parameters(shape=(n, 4, 8, 8)))
    assert len(moving(assigned)) == 3
    inputs = [np.random.default_rng(0).normal(size=s).astype("float32") for s in _SHAPES]
    expected = run(conv_of_parameters(), inputs)
    np.testing.assert_allclose(run(assigned, inputs)[0], expected[0], atol=1e-4)


_SHAPES = ((2, 4, 8, 8), (4, 4, 3, 3))


def test_bindings_outside_of_dataflow_blocks():
    builder = relax.BlockBuilder()
    x, w = (
        relax.Var(n, relax.TensorType(s, "float32")) for n, s in zip("xw", _SHAPES, strict=True)
    )
    with builder.function("main", [x, w]):
        y = builder.emit(op.nn.conv2d(x, w, padding=1))
        with builder.dataflow():
            z = builder.emit_output(op.nn.conv2d(builder.emit(op.nn.relu(y)), w, padding=1))
        parts = builder.emit(op.split(z, 2, 1))
        builder.emit_func_output(relax.Tuple([y, builder.emit(op.exp(parts[1]))]))
    mod = builder.get()
    assigned = AssignLayouts()(mod)
    relax.analysis.well_formed(assigned)
    # x and w, in each of the two blocks that read the weights, and both results
    assert len(moving(assigned)) == 5
    inputs = [np.random.default_rng(0).normal(size=s).astype("float32") for s in _SHAPES]
    for found, wanted in zip(run(assigned, inputs), run(mod, inputs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_branch_reads_tensors_as_the_model_has_them():
    builder = relax.BlockBuilder()
    x, w = (
        relax.Var(n, relax.TensorType(s, "float32")) for n, s in zip("xw", _SHAPES, strict=True)
    )
    condition = relax.Var("c", relax.TensorType((), "bool"))
    with builder.function("main", [x, w, condition]):
        y = builder.emit(op.nn.conv2d(x, w, padding=1))
        branches = [
            relax.SeqExpr([relax.BindingBlock([relax.VarBinding(v, f(y))])], v)
            for f, v in ((op.exp, relax.Var("a", y.ty)), (op.nn.relu, relax.Var("b", y.ty)))
        ]
        builder.emit_func_output(builder.emit(relax.If(condition, *branches)))
    mod = relax.transform.Normalize()(builder.get())
    assigned = AssignLayouts()(mod)
    relax.analysis.well_formed(assigned)
    assert len(moving(assigned)) == 3  # x, w and what both branches read
    arrays = [np.random.default_rng(0).normal(size=s).astype("float32") for s in _SHAPES]
    for chosen in (True, False):
        inputs = [*arrays, np.array(chosen)]
        found, wanted = (run(m, inputs)[0] for m in (assigned, mod))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_data_in_another_layout_is_taken_as_it_lies():
    def module(**layouts) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((2, 8, 8, 4), "float32"))
        w = np.arange(144, dtype="float32").reshape(3, 3, 4, 4)
        with builder.function("main", [x]):
            conv = op.nn.conv2d(x, relax.const(w), kernel_layout="HWIO", **layouts)
            builder.emit_func_output(builder.emit(conv))
        return builder.get()

    assigned = AssignLayouts()(module(data_layout="NHWC", out_layout="NCHW"))
    (change,) = moving(assigned)
    assert change.args[0].name != "x"
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 4)).astype("float32")
    (wanted,) = run(module(data_layout="NHWC"), [x])
    np.testing.assert_allclose(run(assigned, [x])[0], wanted.transpose(0, 3, 1, 2), rtol=1e-4)


def test_blocks_of_channels_and_functions_without_convolutions_stay():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 1, 8, 8, 4), "float32"))
    w = relax.const(np.ones((1, 1, 3, 3, 4, 4), "float32"))
    with builder.function("main", [x]):
        layouts = {"data_layout": "NCHW4c", "kernel_layout": "OIHW4i4o"}
        builder.emit_func_output(builder.emit(op.nn.conv2d(x, w, **layouts)))
    blocked = builder.get()
    assert AssignLayouts()(blocked).same_as(blocked)
    _, _, mod = torch_module(nn.Sequential(nn.MaxPool2d(2), nn.Softmax(1)), [(2, 4, 8, 8)])
    assert AssignLayouts()(mod).same_as(mod)


POOLS = {
    "maximum": (lambda x: F.max_pool2d(torch.relu(x), 3, 2, 1), (2, 4, 9, 8)),
    "mean, windows that are not whole": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True) + 1,
        (2, 4, 9, 8),
    ),
    "one dimension": (lambda x: F.max_pool1d(x, 3), (2, 4, 9)),
    "three": (lambda x: F.avg_pool3d(x, 2), (2, 4, 4, 6, 8)),
    "larger": (lambda x: F.interpolate(x, scale_factor=2.0), (2, 4, 9, 8)),
}


class Turned(nn.Module):
    """A function of a tensor with channels last, and given so, too."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.movedim(-1, 1)).movedim(1, -1)


@pytest.mark.parametrize("name", POOLS)
def test_pools_without_convolutions_have_channels_last_where_their_tensors_do(name):
    function, (batch, channels, *sides) = POOLS[name]
    model, inputs, mod = torch_module(Turned(function), [(batch, *sides, channels)])
    assigned = AssignLayouts()(mod)
    opened = CancelLayouts()(assigned)
    assert not moving(opened)
    check_numbers(model, inputs, opened)
    assert AssignLayouts()(assigned).same_as(assigned)
    _, _, plain = torch_module(Apart(function), [(batch, channels, *sides)])
    assert AssignLayouts()(plain).same_as(plain)


class Apart(nn.Module):
    """A function, beside something that is turned."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x), x.movedim(-1, 1)


@pytest.mark.parametrize(("target", "changes"), [("nvidia_h200", True), ("llvm", False)])
def test_pipelines_for_gpus_assign_layouts(target, changes):
    _, _, mod = torch_module(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), [(1, 8, 8, 8)])
    target, hw = resolve_target(target)

    def has_channels_last(low: tvm.IRModule) -> bool:
        shapes = [[int(extent) for extent in call.ty.shape] for call in calls(low)]
        return [1, 6, 6, 8] in shapes

    assert has_channels_last(lower(mod, target, hw=hw)) == changes
    assert not has_channels_last(lower(mod, target, decompose=False))


class LongConcat(nn.Module):
    """The input, and what layers make of all before them, as one result."""

    def __init__(self) -> None:
        super().__init__()
        widths = range(8, 40, 4)
        self.layers = nn.ModuleList(nn.Conv2d(width, 4, 3, padding=1) for width in widths)

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def test_one_change_is_made_in_place_of_many_small_ones():
    _, _, mod = torch_module(LongConcat(), [(1, 8, 16, 16)])
    assert len(moving(AssignLayouts()(mod))) == 2


def test_a_function_with_an_empty_tensor_stays_as_it_is():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((0, 8, 6, 6), "float32"))
    w = relax.Var("w", relax.TensorType((4, 8, 3, 3), "float32"))
    with bb.function("main", [x, w]):
        with bb.dataflow():
            out = bb.emit_output(bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(x, w)))))
        bb.emit_func_output(out)
    mod = bb.get()
    assert AssignLayouts()(mod)["main"].same_as(mod["main"])
