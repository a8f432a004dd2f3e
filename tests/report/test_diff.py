"""Two plans or reports side by side: what differs in kernels, bytes, times and refusals."""

import dataclasses
import json
import re

import pytest
from tvm.relax import op

import tvm_fusion
from tvm_fusion import InputError, cli
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.report.diff.changes import Change, difference
from tvm_fusion.report.diff.sides import Side, matched, read_sides
from tvm_fusion.report.diff.text import COLUMNS, text
from tvm_fusion.runtime.timing.timing import TimeReport

from ..support.graphs import module

X = ((256, 512), "float32")


def layers(count, first=()):
    """`count` layers of a norm and a product with an activation, with operators before them."""

    def emit(bb, x, gamma, *weights):
        for operator in first:
            x = bb.emit(operator(x))
        for weight in weights:
            normed = bb.emit(op.nn.rms_norm(x, gamma, axes=[-1]))
            x = bb.emit(op.nn.relu(bb.emit(op.matmul(normed, weight))))
        return x

    return module(emit, X, ((512,), "float32"), *[((512, 512), "float32")] * count)


def side(mod, target="llvm", name="a.json", **options):
    return Side.of_report(name, tvm_fusion.explain(mod, target, **options))


TWO = layers(2)
FUSED, APART = side(TWO), side(TWO, name="b.json", policy={"max_group_ops": 1})


def kinds(found):
    return {k.change for k in found.changed}


def test_a_side_does_not_differ_from_itself():
    found = difference(FUSED, FUSED)
    assert found.changed == ()
    assert (found.came, found.went, found.made) == ((), (), {})
    assert f"the same {len(FUSED.kernels)} kernels" in text(found)


def test_kernels_that_were_joined_and_split_are_told_with_what_that_saves():
    found = difference(APART, FUSED)
    assert kinds(found) == {Change.JOINED}
    assert sum(k.saved_us for k in found.changed) == pytest.approx(
        APART.predicted_us - FUSED.predicted_us
    )
    assert {r.code for r in found.went} == {"group_size"}
    back = difference(FUSED, APART)
    assert kinds(back) == {Change.SPLIT}
    assert {r.code for r in back.came} == {"group_size"}
    shown = text(found)
    assert "policy: custom -> default" in shown


def test_equal_changes_of_equal_layers_are_one_line():
    mod = layers(5)
    shown = text(difference(side(mod, policy={"max_group_ops": 1}), side(mod)))
    assert re.search(r"^  joined x[34]: ", shown, re.M), shown
    assert shown.count("  joined") < 5


def test_another_class_of_the_same_kernel():
    plan = FusionPlan.from_dict(tvm_fusion.explain(TWO, "llvm").plan)
    before = Side.of_plan("a", plan)
    wrong = tuple(
        dataclasses.replace(g, kernel_class="nest") if g.kernel_class == "gemm" else g
        for g in plan.groups
    )
    found = difference(before, Side.of_plan("b", dataclasses.replace(plan, groups=wrong)))
    assert kinds(found) == {Change.CLASS}
    assert "(gemm -> nest)" in text(found)


def test_operators_are_matched_by_structure_where_names_moved():
    """One operator more in front: every later name is another one."""
    longer = side(layers(2, first=(op.tanh,)), name="b.json")
    same_names = set(FUSED.tokens) & set(longer.tokens)
    found = difference(FUSED, longer)
    pairs = matched(FUSED, longer)
    assert found.only_before == ()
    assert len(found.only_after) == 1
    assert any(new != old for new, old in pairs.items())
    assert any(pairs.get(name) != name for name in same_names)
    assert all(FUSED.tokens[a][1:] == longer.tokens[b][1:] for b, a in pairs.items())
    assert len(found.changed) < len(found.kernels)


def test_a_layer_more_is_new_kernels():
    found = difference(FUSED, side(layers(3), name="b.json"))
    (new,) = [k for k in found.changed if k.change is Change.NEW]
    assert new.saved_us == pytest.approx(-new.after[0].predicted_us)
    assert found.only_before == ()


def test_two_devices_of_one_model():
    found = difference(FUSED, side(TWO, "nvidia_h200", "b.json"))
    assert found.made["device"] == ("llvm_cpu", "nvidia_h200")
    assert found.matched > 0.7 * len(FUSED.tokens)
    assert "device: llvm_cpu -> nvidia_h200" in text(found)


def timed(low, median, high):
    time = TimeReport(median, low, high, 20, "wall")
    kernels = tuple(dataclasses.replace(k, measured=time) for k in FUSED.kernels)
    return dataclasses.replace(FUSED, time=time, kernels=kernels)


@pytest.mark.parametrize(
    ("after", "said", "verdict"),
    [
        ((9, 10, 11), "no difference measured", "no difference"),
        ((12, 13, 14), "+30.0%", "slower"),
        ((4, 5, 6), "-50.0%", "faster"),
    ],
)
def test_times_are_told_apart_where_their_quartiles_are(after, said, verdict):
    found = difference(timed(8, 10, 11), timed(*after))
    (line,) = [x for x in text(found).splitlines() if x.startswith("measured")]
    assert said in line
    assert "10 us (8 us - 11 us)" in line
    assert found.to_json()["verdict"] == verdict
    assert {k["verdict"] for k in found.to_json()["kernels"]} == {verdict}


def test_the_command_reads_plans_and_reports_and_fits_the_screen(tmp_path, capsys):
    report = tvm_fusion.explain(TWO, "llvm")
    other = tvm_fusion.explain(TWO, "llvm", policy={"max_group_ops": 1})
    (tmp_path / "a.json").write_text(json.dumps(report.to_json()))
    FusionPlan.from_dict(other.plan).save(tmp_path / "b.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert cli.main(["diff", *files]) == 0
    shown = capsys.readouterr().out
    assert "split" in shown
    assert max(map(len, shown.splitlines())) <= COLUMNS
    assert cli.main(["diff", *files, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["launches"] == [report.launches.fused, other.launches.fused]
    assert {k["change"] for k in data["kernels"]} == {"same", "split"}
    several = {"version": 3, "functions": {"f": report.to_json(), "g": other.to_json()}}
    (tmp_path / "c.json").write_text(json.dumps(several))
    assert cli.main(["diff", str(tmp_path / "c.json"), str(tmp_path / "c.json")]) == 0
    assert capsys.readouterr().out.count("function ") == 2
    assert cli.main(["diff", files[0], str(tmp_path / "c.json")]) == 2
    assert "no function in common: main in" in capsys.readouterr().err


def test_what_is_no_plan_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="is no plan and no report"):
        read_sides(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"groups": [], "version": 2}')
    with pytest.raises(InputError, match="a report of version 2"):
        read_sides(tmp_path / "x.json")
