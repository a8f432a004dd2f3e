"""Tensors that are parts of larger ones: kernels read and write them at the pitch of these, and
touch nothing beside them.
"""

import random

import numpy as np
import pytest

from tests.kernel_sweep import DEVICES, FILLS, POLICY, _Judge, _on_hopper, _sample
from tests.support import hopper_on_cpu
from tests.support.convolutions import random_convolution
from tests.support.cuda_on_cpu import lower, run_cuda_on_cpu
from tests.support.kernel_cases import numpy_dtype
from tests.support.kernel_problems import CLASSES, Problem
from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.registry import family
from tvm_fusion.transform.apply.place_parts import with_pitches
from tvm_fusion.transform.apply.write_kernels import write_kernel

from .convolution.test_hopper import drawn as drawn_for_hopper

NAMES = ("column", "convolution", "gemm", "pointwise", "row", "transpose", "window")


def drawn(name, seed, rng, device):
    """A problem of a class; every other convolution is one that the TMA can read."""
    if name != "convolution":
        return CLASSES[name](rng, device)
    case = drawn_for_hopper(seed) if seed % 2 else random_convolution(seed)
    given = case.arrays(seed)
    return Problem(case.func(), len(given), given)


def whole_of(rng, shape):
    """A shape that holds another as a part along one of its axes but the first."""
    if len(shape) < 2:
        return shape
    axis = rng.randrange(1, len(shape))
    more = rng.choice((1, 3, 8, 16, 64))
    return (*shape[:axis], shape[axis] + more, *shape[axis + 1 :])


def part_of(array, shape):
    return array[(*(slice(n) for n in shape), ...)]


def tried(name, seed, configs):
    """How many configurations were right with other pitches; what is wrong with others."""
    rng = random.Random(f"pitch {name} {seed}")
    device = "nvidia_h200" if name == "convolution" else DEVICES[seed % len(DEVICES)]
    problem = drawn(name, seed, rng, device)
    hw = load_profile(device)
    shapes = [tuple(int(e) for e in p.ty.shape) for p in problem.func.params]
    dtypes = [numpy_dtype(str(p.ty.dtype)) for p in problem.func.params]
    wholes = [
        whole_of(rng, shape) if i >= problem.inputs or (i == 0 and rng.random() < 0.5) else shape
        for i, shape in enumerate(shapes)
    ]
    func = with_pitches(problem.func, wholes)
    judge = _Judge(problem)
    try:
        offered = [c for _, c in family(name).ranked(func, hw, POLICY)]
    except Unsupported:
        return 0, []
    right, wrong = 0, []
    for config in _sample(rng, offered, configs):
        try:
            kernel = lower(write_kernel(func, name, hw, POLICY, config))
        except Unsupported:
            continue
        run = hopper_on_cpu.run_hopper_on_cpu if _on_hopper(kernel) else run_cuda_on_cpu
        arrays = [
            np.frombuffer(bytes([FILLS[0]]) * int(np.prod(w)) * d.itemsize, d).reshape(w).copy()
            for w, d in zip(wholes, dtypes, strict=True)
        ]
        for array, given in zip(arrays, judge.inputs, strict=False):
            part_of(array, given.shape)[...] = given
        before = [x.copy() for x in arrays]
        run(kernel, arrays)
        parts = [part_of(x, s).copy() for x, s in zip(arrays, shapes, strict=True)]
        why = judge._numbers(parts[problem.inputs :])
        for array, old, shape in zip(arrays, before, shapes, strict=True):
            part_of(array, shape)[...] = part_of(old, shape)
            if array.tobytes() != old.tobytes():
                why = why or "something beside a part was written"
        right += not why
        wrong += [f"{seed} {config}: {why}"] * bool(why)
    return right, wrong


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_read_and_written_at_their_pitch(name):
    found = [tried(name, seed, 1) for seed in range(2)]
    assert [wrong for _, wrong in found if wrong] == []
    assert sum(right for right, _ in found) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_many_problems_are_read_and_written_at_their_pitch(name):
    found = [tried(name, seed, 4) for seed in range(2, 40)]
    assert [wrong for _, wrong in found if wrong] == []
