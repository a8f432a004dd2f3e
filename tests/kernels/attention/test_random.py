"""Random configurations of attention where there is no GPU: plans, cubins, numbers on the emulator.

At full size and on a GPU: gpu/check_attention.py.
"""

import dataclasses
import hashlib

import ml_dtypes
import numpy as np
import pytest
import torch
from tvm import relax

from tests.support.attention_graphs import one_group
from tests.support.attention_random import (
    CONFIGURATIONS,
    HEAD_SIZES,
    LAYOUTS,
    OUTPUTS,
    POSITIONS,
    SPELLINGS,
    configuration,
)
from tests.support.attention_random_graphs import inputs_of, module_of
from tests.support.attention_random_numbers import ceilings, error, expected, numbers
from tests.support.cuda_on_cpu import run_cuda_on_cpu
from tests.support.graphs import plan_of
from tests.support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.attention.forms import WRITER
from tvm_fusion.kernels.attention.kernel_class import AttentionClass
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.attention.roles import attention_cores
from tvm_fusion.plan.group_view import GroupView
from tvm_fusion.plan.refusal import Refusal

H200 = load_profile("nvidia_h200")
TINY_H200 = dataclasses.replace(H200, num_sms=2)

COMPILED = (0, 5, 13, 26, 33, 38)
EMULATED = {2: "mma", 3: "decode", 5: "hopper", 17: "hopper", 22: "mma", 27: "hopper"}


def test_a_seed_is_a_configuration_for_good():
    text = "\n".join(map(repr, CONFIGURATIONS))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e6b3c0a4a16aa618"


def test_they_differ_in_everything():
    def seen(name):
        return {getattr(c, name) for c in CONFIGURATIONS}

    assert len(CONFIGURATIONS) == 40
    assert seen("layout") == set(LAYOUTS)
    assert seen("output") == set(OUTPUTS)
    assert seen("spelling") == set(SPELLINGS)
    assert seen("position") == set(POSITIONS)
    assert seen("D") == set(HEAD_SIZES)
    assert seen("dtype") == {"float16", "bfloat16"}
    assert seen("scale") == {"scores", "query", "divide"}
    assert seen("epilogue") == {"", "residual", "gate", "float32"}
    assert {"", "N", "MN", "B", "BMN"} <= seen("symbolic")
    assert {1, 16} <= seen("H")
    for name in ("documents", "alibi", "softcap", "lse"):
        assert seen(name) == {False, True}
    assert {c.added_dtype for c in CONFIGURATIONS if c.added} >= {"float16", "float32"}
    assert {bool(c.boolean) for c in CONFIGURATIONS} == {False, True}
    assert any(c.guard for c in CONFIGURATIONS)
    assert any(c.E != c.D for c in CONFIGURATIONS)
    assert any(c.G not in (1, c.H) for c in CONFIGURATIONS)
    for lengths in (seen("M"), seen("N")):
        assert 1 in lengths
        assert any(n % 2 and n > 1 for n in lengths)
        assert any(n % 8 == 0 for n in lengths)
        assert max(lengths) > 2000


@pytest.mark.one_in(40)
@pytest.mark.parametrize("c", CONFIGURATIONS, ids=str)
def test_each_is_one_launch_of_attention_or_there_is_a_reason(c):
    planned = plan_of(module_of(c))
    attentions = [g for g in planned.plan.groups if g.kernel_class == "attention"]
    if c.apart is None:
        assert len(attentions) == 1
        # Whether a row sees a key is a reduction of the mask, in front; what follows may be cheaper
        # by itself.
        apart = planned.launches - 1 - (c.guard == "result")
        assert apart in (0, int(bool(c.epilogue)))
        return
    assert not attentions
    (core,) = attention_cores(planned.graph)
    written = [t for o in core for t in planned.graph.ops[o].outputs]
    tensors = planned.graph.tensors
    outputs = [
        t for t in written if tensors[t].is_output or not set(tensors[t].consumers) <= set(core)
    ]
    view = GroupView(planned.graph, core, tuple(outputs))
    found = AttentionClass().accepts(view, H200, load_policy(None))
    assert isinstance(found, Refusal)
    assert c.apart in found.why


SPILLED = {26: 48}
"""Bytes a thread: document ids with symbolic lengths leave a few registers too little."""


# Always: registers of the first choices (`test_mma`, `test_decode_config`).
@pytest.mark.nightly
@pytest.mark.one_in(10)
@pytest.mark.parametrize("seed", COMPILED)
def test_kernels_of_full_size_do_not_spill(seed):
    func = one_group(module_of(configuration(seed))).func
    kernel = AttentionClass().write(func, H200, load_policy(None))
    compiled = compile_hopper(kernel)
    assert compiled.spill_bytes <= SPILLED.get(seed, 0)
    assert compiled.remarks == ()


def to_numpy(x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("seed", "form"), EMULATED.items())
def test_numbers_of_small_ones_are_close_to_float64(seed, form):
    c = configuration(seed).small()
    mod = module_of(c)
    group = one_group(mod)
    inputs = numbers(c)
    named = dict(zip((p.name for p in mod["main"].params), inputs.values(), strict=True))
    arrays = [
        to_numpy(named[i.name]) if isinstance(i, relax.Var) else i.value.numpy()
        for i in group.inputs
        if not isinstance(i, relax.ShapeExpr)
    ]
    wanted = expected(c, inputs)
    kernel = written(group.func, form)
    outputs = poisoned(group, len(arrays), wanted)
    run = run_hopper_on_cpu if form == "hopper" else run_cuda_on_cpu
    assert run(kernel, [*arrays, *outputs]) == 1
    got = [torch.from_numpy(x.astype(np.float64)) for x in outputs]
    got = [got[group.outputs.index(i)] for i in range(len(got))]
    limits = ceilings(c)
    assert all(found <= limits[name] for name, found in error(c, got, wanted).items())


def written(func, name):
    """The best kernel of one form."""
    (form,) = (f for f in WRITER.forms if f.name == name)
    attention = analyze_attention(func)
    return form.emit(attention, TINY_H200, form.rank(attention, TINY_H200, load_policy(None))[0][1])


def poisoned(group, inputs, wanted):
    """Outputs full of NaN; their symbolic extents are those of the results."""
    params = [p for p in group.func.params if hasattr(p.ty, "shape")][inputs:]
    found = []
    for param, place in zip(params, group.outputs, strict=True):
        dtype = str(param.ty.dtype)
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        found.append(np.full(tuple(wanted[place].shape), np.nan, kind))
    return found


def test_numbers_are_the_same_in_each_call():
    c = configuration(0).small()
    for one, other in zip(numbers(c).values(), numbers(c).values(), strict=True):
        assert torch.equal(one, other)
    assert {name: tuple(x.shape) for name, x in numbers(c).items()} == {
        name: shape for name, (shape, _) in inputs_of(c).items()
    }
