"""What a report says of the model: where its operators come from, what flows, what repeats."""

import pytest

import tvm_fusion
from tvm_fusion.report.network import Repeat, common_module, common_pattern, repeats_of
from tvm_fusion.report.screen import title

torch = pytest.importorskip("torch")
F = torch.nn.functional
WIDTH, LAYERS, ROWS = 32, 3, 4


class Block(torch.nn.Module):
    """A norm and a small MLP with a residual."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Blocks, a head and a softmax."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.softmax(self.head(x), -1)


MODEL = (Model().eval(), (torch.zeros(ROWS, WIDTH),))


@pytest.fixture(scope="module", params=["llvm", "nvidia_h200"])
def report(request):
    return tvm_fusion.explain(MODEL, request.param)


def test_operators_know_their_module_and_the_line_of_their_source(report):
    found = {(op.operator.split("#")[0], op.module) for op in report.graph.ops}
    for n in range(LAYERS):
        expected = {("layer_norm", f"layers.{n}.norm"), ("gelu", f"layers.{n}")}
        assert expected | {("matmul", f"layers.{n}.up"), ("matmul", f"layers.{n}.down")} <= {
            (operator.rstrip("0123456789"), module) for operator, module in found
        }
    assert ("softmax", "") in found
    assert {op.source.split(":")[0] for op in report.graph.ops} == {"test_network.py"}


@pytest.mark.parametrize("report", ["llvm"], indirect=True)
def test_groups_are_called_after_the_modules_they_compute(report):
    titles = {title([group]) for group in report.groups}
    for n in range(LAYERS):
        assert {f"layers.{n}.norm", f"layers.{n}.up", f"layers.{n}.down"} <= titles


@pytest.mark.parametrize("report", ["llvm"], indirect=True)
def test_equal_layers_are_one_repeat(report):
    (repeat,) = report.repeats
    assert (repeat.groups * repeat.count, repeat.count) == (3 * LAYERS, LAYERS)
    firsts = [group.same_as for group in report.groups[: 3 * LAYERS]]
    assert firsts == [None, None, None, *(0, 1, 2) * (LAYERS - 1)]


def test_the_bytes_of_the_header_are_those_of_the_groups(report):
    assert sum(group.bytes_fused for group in report.groups) == report.bytes.fused
    apart = sum(group.bytes_unfused for group in report.groups)
    assert apart + report.bytes_elsewhere == report.bytes.unfused


def test_every_tensor_that_a_group_reads_was_written_or_given(report):
    tensors = {tensor.id: tensor for tensor in report.graph.tensors}
    known = {t.id for t in tensors.values() if t.role in ("input", "constant")}
    for group in report.groups:
        assert set(group.reads) <= known
        known |= set(group.writes)
    assert all(t.id in known for t in tensors.values() if t.role == "output")


def test_the_timeline_has_what_is_alive_at_each_launch(report):
    fused = report.timeline["fused"]
    assert len(fused) == len(report.groups)
    # a layer's wide activations, between its residual and its result
    assert max(fused) == 4 * ROWS * (64 + 2 * WIDTH)
    assert fused[-1] == 4 * ROWS * (10 + 10)


def test_a_matrix_product_counts_two_operations_a_term(report):
    up = next(group for group in report.groups if title([group]) == "layers.0.up")
    product = 2 * ROWS * WIDTH * 64
    assert product < up.flops < 1.1 * product


def test_the_json_has_the_texts_of_kernels_only_where_they_are_asked_for(report):
    assert report.to_json()["sources"] == {}
    sources = report.to_json(sources=True)["sources"]
    assert set(sources) == {group.name for group in report.groups}
    assert all("T.prim_func" in text["tensor_ir"] and text["kernel"] for text in sources.values())


def test_names_of_the_model_are_in_no_plan():
    """Another path and another line give the same plan."""

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = MODEL[0]

        def forward(self, x):
            return self.inner(x)

    plans = [tvm_fusion.explain((m, MODEL[1]), "nvidia_h200").plan for m in (MODEL[0], Wrapped())]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ("", ()),
        ("abc", ()),
        ("xababaaby", (Repeat(1, 2, 2), Repeat(5, 1, 2))),
        ("aaaa", (Repeat(0, 1, 4),)),
        ("abcabcabd", (Repeat(0, 3, 2),)),
    ],
)
def test_runs_of_equal_blocks_are_found(items, found):
    assert repeats_of(items) == found


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ((), ""),
        (("", "head"), "head"),
        (("layers.0", "layers.0.up"), "layers.0.up"),
        (("layers.0.q", "layers.0.k"), "layers.0"),
    ],
)
def test_the_common_module(modules, found):
    assert common_module(modules) == found


def test_modules_that_differ_in_numbers_are_one_pattern():
    assert common_pattern(["layers.0.up", "layers.11.up"]) == "layers.*.up"
    assert common_pattern(["encoder.up", "decoder.up"]) == "encoder.up"
