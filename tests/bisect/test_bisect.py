"""Kernels that give wrong numbers or are slow are found by running parts of the plan, and shown
again by a program.
"""

import contextlib
import json
import runpy
from itertools import combinations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.relax import op

from tvm_fusion import cli
from tvm_fusion.bisect.parts import Parts, smallest
from tvm_fusion.bisect.reproducer import _packed, _value
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.kernels import registry
from tvm_fusion.plan.plan import STOCK

from ..planted import Planted
from ..support.graphs import module

N = 48


def layers(bb, x, gamma, first, second):
    for weight in (first, second):
        normed = bb.emit(op.nn.rms_norm(x, gamma, axes=[-1]))
        x = bb.emit(op.nn.relu(bb.emit(op.matmul(normed, weight))))
    return bb.emit(op.sum(bb.emit(op.exp(bb.emit(op.negative(x)))), axis=0))


SQUARE = ((N, N), "float32")
MODEL = module(layers, ((33, N), "float32"), ((N,), "float32"), SQUARE, SQUARE)


class Slow(Planted):
    """A kernel class whose kernels do their work 200 times."""

    def write(self, func, hw, policy, config=None):
        kernel = self.like.write(func, hw, policy, config)
        begin, times = (tirx.IntImm("int32", n) for n in (0, 200))
        again = tirx.Var("again", "int32")
        return kernel.with_body(tirx.For(again, begin, times, tirx.ForKind.SERIAL, kernel.body))


@contextlib.contextmanager
def broken(name, how):
    """One kernel class with a bug."""
    family, kinds = registry._FAMILIES[name]
    registry._FAMILIES[name] = (how(family), kinds)
    try:
        yield
    finally:
        registry._FAMILIES[name] = (family, kinds)


def wrong(family):
    return Planted(family, "short loop", 1)


def slow(family):
    return Slow(family, "", 0)


@pytest.fixture
def bisect(tmp_path, capsys):
    """Runs the command on the model; its status, its JSON, and the folder."""
    file = tmp_path / "model.json"
    file.write_text(tvm.ir.save_json(MODEL))

    def run(*options):
        folder = tmp_path / "out"
        arguments = [str(file), "--target", "llvm", "--out", str(folder), "--quiet", *options]
        status = cli.main(["bisect", *arguments])
        out = capsys.readouterr()
        return status, out.out, folder

    return run


def reproduced(folder, capsys):
    """What the program says, and its status."""
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(folder / "reproduce.py"), run_name="__main__")
    return int(stop.value.code), capsys.readouterr().out


@pytest.mark.parametrize("name", ["column", pytest.param("gemm", marks=pytest.mark.nightly)])
def test_a_wrong_kernel_is_found_and_shown_again(name, bisect, capsys):
    with broken(name, wrong):
        status, said, folder = bisect("--json")
        found = json.loads(said)
        again = reproduced(folder, capsys)
    assert status == 1
    (kernel,) = found["kernels"]
    assert set(kernel["classes"]) == {name}
    assert kernel["error"] > 1e-3
    assert again[0] == 1
    assert "above" in again[1]
    held = tvm.ir.load_json((folder / "module.json").read_text())
    whole = sum(isinstance(f, tirx.PrimFunc) for f in held.functions.values())
    assert whole <= len(kernel["groups"][0])  # the operators of the kernel alone
    status, said = reproduced(folder, capsys)  # the kernel is mended
    assert (status, said.startswith("right: worst error")) == (0, True)


def test_a_right_module_is_right_and_a_tolerance_is_of_the_users(bisect):
    status, said, folder = bisect()
    assert (status, folder.exists()) == (0, False)
    assert said.startswith("right with all ")
    status, said, _ = bisect("--tolerance", "0", "--json")
    assert status == 2  # TVM's code rounds, too


# Always: a wrong one, above.
@pytest.mark.nightly
def test_a_slow_kernel_is_found_and_shown_again(bisect, capsys):
    with broken("column", slow):
        status, said, folder = bisect("--slower", "--json")
        again = reproduced(folder, capsys)
    assert status == 1
    kernel = json.loads(said)["kernels"][0]
    assert kernel["classes"] == ["column"]
    assert kernel["together_us"][0] > 5 * kernel["apart_us"][2]
    assert again[0] == 1
    assert "what it stands for" in again[1]


@pytest.mark.parametrize("guilty", [{5}, {0, 9}, {2, 3, 7}, set(range(10))], ids=str)
def test_the_smallest_set_has_all_that_are_needed_and_no_more(guilty):
    asked = []

    def is_bad(suspects):
        asked.append(suspects)
        return guilty <= set(suspects)

    assert set(smallest(range(10), is_bad)) == guilty
    if len(guilty) == 1:
        assert len(asked) <= 8


def test_of_several_that_are_bad_alone_one_is_left():
    for guilty in combinations(range(6), 2):
        (found,) = smallest(range(6), lambda suspects, g=guilty: bool(set(suspects) & set(g)))
        assert found in guilty


def test_equal_kernels_are_one_part_and_all_others_can_be_tvms():
    target, hw = resolve_target("llvm")
    parts = Parts(Planned.of(MODEL, target, hw, load_policy(None)))
    owned = [g.ops for part in parts.every for g in part]
    assert len(owned) == len(set(owned)) == len(parts.planned.plan.groups)
    (products,) = [part for part in parts.every if part[0].kernel_class == "gemm"]
    assert len(products) == 2
    assert parts.label(products).endswith("(gemm) x2")
    only = parts.only([products]).plan
    assert {g.ops for g in only.groups if g.kernel_class != STOCK} == {g.ops for g in products}
    assert {op for g in only.groups for op in g.ops} == {op for ops in owned for op in ops}


def test_inputs_of_all_kinds_come_back():
    half = np.arange(6, dtype="float16").reshape(2, 3)
    wide = np.ones((), "int64")
    narrow = np.arange(4).astype(ml_dtypes.bfloat16)
    given = [half, (3, 4), 7, [wide, narrow]]
    arrays, kinds = _packed(given)
    back = [_value(kind, arrays) for kind in json.loads(json.dumps(kinds))]
    assert back[1:3] == [(3, 4), 7]
    for a, b in zip([half, wide, narrow], [back[0], *back[3]], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slower", "--tolerance", "1"], "leave it, or --slower"),
        (["--tolerance", "-1"], "at least 0"),
        (["--plan", "nowhere.json"], "there is no such plan file"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said, tmp_path, capsys):
    out = ["--out", str(tmp_path / "x"), "--target", "llvm"]
    assert cli.main(["bisect", "--demo", *out, *options]) == 2
    assert said in capsys.readouterr().err
