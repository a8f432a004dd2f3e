"""Elements of a row that are read at another place of it, behind a reduction: one row kernel."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from tvm import tirx

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.fuzz.verdict import as_array, as_tensor
from tvm_fusion.kernels.row import kernel_class
from tvm_fusion.kernels.row.pieces import read_rows
from tvm_fusion.kernels.row.work import row_work

from ...support.module_on_cpu import EmulatedModule

H200 = load_profile("nvidia_h200")
POLICY = dataclasses.replace(load_policy(None), probe="off")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class _Module(torch.nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program

    def forward(self, *args):
        return self.program(*args)


def planned(program, inputs, profile=H200, **options):
    found = load((_Module(program), tuple(inputs)), **options)
    return Planned.of(found, profile.to_target(), profile, POLICY)


def classes(plan):
    return [g.kernel_class for g in plan.plan.groups if g.kernel_class != "view"]


def codes(plan):
    return {refusal.code.value for refusal in plan.plan.refusals}


def check(program, inputs, launches=("row",), **options):
    """Plans, writes and runs a program; its numbers beside float64."""
    plan = planned(program, inputs, **options)
    if launches is not None:
        assert classes(plan) == list(launches)
    module = EmulatedModule.of(plan)
    assert not module.cuts
    results = module([as_array(x) for x in inputs])
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = program(*wide)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for result, reference in zip(results, expected, strict=True):
        got = as_tensor(result).double()
        most = TOLERANCE[inputs[0].dtype] * max(1.0, reference.abs().max().item())
        assert (got - reference).abs().max().item() <= most


def rms(x, weight):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    return (wide * scale).to(x.dtype) * weight


def rotated(y, cos, sin):
    left, right = y.chunk(2, -1)
    return y * cos + torch.cat((-right, left), -1) * sin


def interleaved(y, cos, sin):
    even, odd = y[..., ::2], y[..., 1::2]
    turned = torch.stack((-odd, even), -1).flatten(-2)
    return y * cos + turned * sin


def shuffled(y, groups):
    rows, width = y.shape
    return y.view(rows, groups, width // groups).transpose(1, 2).reshape(rows, width)


PROGRAMS = {
    "rotary embedding": (
        lambda x, w, c, s: rotated(rms(x, w), c, s),
        [(5, 3, 64), (64,), (5, 1, 64), (5, 1, 64)],
    ),
    "rotary embedding of neighbours": (
        lambda x, w, c, s: interleaved(rms(x, w), c, s),
        [(5, 3, 64), (64,), (5, 1, 64), (5, 1, 64)],
    ),
    "roll": (lambda x: torch.softmax(x, -1).roll(5, -1) + x, [(33, 200)]),
    "flip": (lambda x, w: rms(x, w).flip(-1) * x, [(33, 199), (199,)]),
    "gate": (
        lambda x, w: (lambda y: y[0] * F.silu(y[1]))(rms(x, w).chunk(2, -1)),
        [(33, 272), (272,)],
    ),
    "odd gate": (
        lambda x, w: (lambda y: y[0] * torch.tanh(y[1]))(rms(x, w).chunk(2, -1)),
        [(33, 202), (202,)],
    ),
    "gate of thirds": (
        lambda x, w: (lambda y: y[0] * y[1] - y[2])(rms(x, w).chunk(3, -1)),
        [(9, 3 * 64), (3 * 64,)],
    ),
    "shuffle": (lambda x, w: shuffled(rms(x, w), 4), [(33, 160), (160,)]),
    "gather": (
        lambda x, w, p: rms(x, w)[:, p] - x,
        [(17, 96), (96,), torch.randperm(96, generator=torch.Generator().manual_seed(0))],
    ),
    "halves that change places": (
        lambda x: torch.cat(torch.softmax(x, -1).chunk(2, -1)[::-1], -1),
        [(21, 128)],
    ),
    "before a second reduction": (
        lambda x, w: torch.softmax(rms(x, w).roll(64, -1) + x, -1),
        [(21, 128), (128,)],
    ),
    "two outputs": (
        lambda x, w: (rms(x, w), rms(x, w).flip(-1)),
        [(21, 136), (136,)],
    ),
    "a row and its gate": (
        lambda x, w: (rms(x, w), rms(x, w)[:, :64] * rms(x, w)[:, 64:]),
        [(21, 128), (128,)],
    ),
}


def drawn(shapes, dtype, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        s if isinstance(s, torch.Tensor) else torch.randn(s, generator=generator).to(dtype)
        for s in shapes
    ]


@pytest.mark.one_in(36)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_another_place_of_the_row_is_read_in_its_kernel(name, dtype):
    program, shapes = PROGRAMS[name]
    check(program, drawn(shapes, dtype))


def programs_of(plan):
    """The row programs of a plan's fused functions."""
    functions = plan.fused_functions().functions.values()
    return [read_rows(func) for func in functions if isinstance(func, tirx.PrimFunc)]


def test_the_halves_of_a_rotary_embedding_are_vectors_of_one_thread():
    program, shapes = PROGRAMS["rotary embedding"]
    (found,) = programs_of(planned(program, drawn(shapes, torch.float16)))
    assert found.columns == 32
    assert not found.elements
    assert [output.param for output in found.outputs] == [found.outputs[0].param] * 2


def test_what_is_turned_is_read_once_more_from_the_caches():
    program, shapes = PROGRAMS["flip"]
    (found,) = programs_of(planned(program, drawn(shapes, torch.float16)))
    assert len(found.elements) == 2  # of the row and of the weights
    work = row_work(found, [8], H200.special_slots)
    assert (work.streamed, work.reread) == (6, 4)


REFUSED = {
    "another row": (lambda x, w: rms(x, w).flip(0), "off_row"),
    "five pieces": (lambda x, w: rms(x, w)[:, :64] * rms(x, w)[:, 64:128], "space_mismatch"),
    "a part that starts anywhere": (lambda x, w: rms(x, w)[:, 3:163] * 2, "space_mismatch"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("program", "code"), REFUSED.values(), ids=REFUSED)
def test_what_no_row_kernel_can_read_is_another_launch_with_the_right_numbers(program, code):
    inputs = drawn([(21, 320), (320,)], torch.float32)
    plan = planned(program, inputs)
    assert len(classes(plan)) > 1
    assert code in codes(plan)
    check(program, inputs, None)


def test_too_many_orders_of_a_row_are_another_launch(monkeypatch):
    monkeypatch.setattr(kernel_class, "MOST_ORDERS", 1)
    inputs = drawn([(33, 200), (200,)], torch.float32)
    plan = planned(lambda x, w: (lambda y: y + y.flip(-1))(rms(x, w)), inputs)
    assert len(classes(plan)) == 2
    assert "recompute" in codes(plan)


def test_a_cpu_keeps_two_launches():
    program, shapes = PROGRAMS["flip"]
    plan = planned(program, drawn(shapes, torch.float32), load_profile("llvm_cpu"))
    assert len(classes(plan)) == 2
    assert "off_row" in codes(plan)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["flip", "rotary embedding", "gate"])
def test_the_number_of_rows_may_be_symbolic(name):
    program, shapes = PROGRAMS[name]
    inputs = drawn(shapes, torch.float32)
    rows = torch.export.Dim("rows", max=4096)
    first = shapes[0][0]
    dynamic = tuple({0: rows} if shape[0] == first else None for shape in shapes)
    check(program, inputs, dynamic_shapes=(dynamic,))


def test_the_length_of_rows_may_be_symbolic():
    program, shapes = PROGRAMS["flip"]
    width = torch.export.Dim("width", max=4096)
    check(program, drawn(shapes, torch.float32), dynamic_shapes=(({1: width}, {0: width}),))


def test_a_shuffle_of_symbolic_rows_is_another_launch_with_the_right_numbers():
    program, shapes = PROGRAMS["shuffle"]
    rows = torch.export.Dim("rows", max=4096)
    check(program, drawn(shapes, torch.float32), None, dynamic_shapes=(({0: rows}, None),))


NORMS = (
    lambda x: torch.softmax(x, -1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x / (1 + x.abs().amax(-1, keepdim=True)),
    lambda x: x - x.mean(-1, keepdim=True),
)


def drawn_program(seed):
    """A norm, its elements at other places, and what is made of them; with the shape it takes."""
    rng = random.Random(seed)
    norm, groups = rng.choice(NORMS), rng.randint(2, 4)
    width = groups * rng.choice([rng.randint(2, 40), 8 * rng.randint(1, 12)])
    step = rng.randint(1, width - 1)
    turn = rng.choice(
        [
            lambda y: y.roll(step, -1),
            lambda y: y.flip(-1),
            lambda y: shuffled(y, groups),
            lambda y: torch.cat((y[:, step:], -y[:, :step]), -1),
            lambda y: torch.cat(y.chunk(groups, -1)[::-1], -1),
            lambda y: y.roll(step, -1).flip(-1),
        ]
    )
    behind = rng.choice(
        [
            lambda x, y: turn(y),
            lambda x, y: turn(y) * y + x,
            lambda x, y: torch.softmax(turn(y) + x, -1),
            lambda x, y: (turn(y), y * y),
            lambda x, y: (turn(y) - x).sum(-1),
            lambda x, y: y.chunk(groups, -1)[0] * y.chunk(groups, -1)[-1],
            lambda x, y: (turn(y), torch.tanh(y.chunk(groups, -1)[1])),
        ]
    )
    return lambda x: behind(x, norm(x)), (rng.randint(1, 40), width)


@pytest.mark.one_in(32)
@pytest.mark.parametrize("seed", range(48))
def test_drawn_programs_have_the_right_numbers(seed):
    program, shape = drawn_program(seed)
    dtype = list(TOLERANCE)[seed % 3]
    check(program, drawn([shape], dtype, seed), None)
