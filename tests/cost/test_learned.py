"""The learned residual on launches whose "measured" times are made up: the truth is known."""

import argparse
import json
import logging
import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.support.counting import calls_of
from tests.support.learned_cases import BYTES, CLASSES, a_query, some_rows, true_us, with_bytes
from tvm_fusion.config import load_policy, load_profile, profile_file
from tvm_fusion.cost.learned import learned, refit
from tvm_fusion.cost.learned import refit as training
from tvm_fusion.cost.learned.features import BYTE_FEATURES, FEATURES, features_of
from tvm_fusion.cost.learned.hull import Intervals, quantile
from tvm_fusion.cost.learned.learned import Residual, load_residual, unused_residual
from tvm_fusion.cost.learned.samples import (
    HELD_OUT,
    Sample,
    SampleSet,
    fold_of,
    query_of,
    read_samples,
    work_of,
    write_samples,
)
from tvm_fusion.cost.learned.training_rows import rows_of, view_of
from tvm_fusion.cost.learned.trees import Trees, from_booster
from tvm_fusion.errors import InputError
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.plan import FusionPlan
from tvm_fusion.plan.search.search import search, unfused_plan
from tvm_fusion.report.assemble import planned_report
from tvm_fusion.transform.apply.materialize import group_views

from ..benchmarks.plans import refit as plans_refit
from ..benchmarks.plans.random_graphs import graph_of, module_of

HW = load_profile("h200")
POLICY = load_policy()
HEADER = {
    "version": 1,
    "device": HW.name,
    "date": "2026-11-20",
    "driver": "580",
    "cuda": "13.0",
    "tvm": "0.27.0",
    "command": "none",
}
LINE = {"graph": "random:1", "class": "row", "us": 3.5, "ops": ["lv", "lv1"], "stores": ["lv1"]}


@pytest.fixture(scope="module")
def rows():
    return some_rows(HW)


@pytest.fixture(scope="module")
def residual(rows) -> Residual:
    return training.train(rows, HW, {"made": "up"})


def apply(residual, query, **options):
    parts = (query.fit, query.traffic, query.resources, query.estimate)
    return residual.apply(query.kernel_class, *parts, HW, **options)


def queries(count, seed=99):
    rng = random.Random(seed)
    return [a_query(rng, HW) for _ in range(count)]


def launch_of(query):
    return query.estimate.terms["launch"]


# ---- what is learned


def test_a_known_distortion_is_learned(residual):
    figures = residual.figures
    assert figures["median_error"] < 0.05 < 0.2 < figures["analytic_median_error"]
    assert figures["p90_error"] < 0.12
    assert figures["kendall_tau"] > max(0.9, figures["analytic_kendall_tau"])


def test_a_launch_that_was_never_seen_is_predicted_near_its_time(residual):
    errors = [
        abs((apply(residual, q).time_us - launch_of(q)) / true_us(q) - 1) for q in queries(200)
    ]
    assert statistics.median(errors) < 0.05


def test_the_cost_of_the_launch_is_not_scaled(residual):
    for query in queries(20):
        terms = {**query.estimate.terms, "launch": launch_of(query) + 100}
        dearer = replace(
            query,
            estimate=replace(query.estimate, time_us=query.estimate.time_us + 100, terms=terms),
        )
        rise = apply(residual, dearer).time_us - apply(residual, query).time_us
        assert rise == pytest.approx(100)


def test_the_estimate_keeps_the_analytic_time_and_its_terms(residual):
    (query,) = queries(1)
    corrected = apply(residual, query)
    assert corrected.analytic_us == query.estimate.time_us
    assert corrected.terms == query.estimate.terms
    assert corrected.low_us < corrected.time_us < corrected.high_us


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9])
def test_intervals_hold_as_often_as_they_say(residual, coverage):
    rng = random.Random(4)
    inside = []
    for query in queries(400):
        estimate = apply(residual, query, coverage=coverage)
        measured = launch_of(query) + true_us(query) * math.exp(rng.gauss(0, 0.03))
        inside.append(estimate.low_us <= measured <= estimate.high_us)
    assert statistics.mean(inside) == pytest.approx(coverage, abs=0.08)


def test_training_twice_gives_the_same_bytes(rows, residual):
    assert training.train(rows, HW, {"made": "up"}).to_json() == residual.to_json()


# ---- more bytes never make a launch faster


def test_features_outside_the_byte_features_do_not_change_with_the_bytes():
    for query in queries(50):
        before = features_of(query, HW)
        after = features_of(with_bytes(query, HW, 1.7), HW)
        count = len(BYTE_FEATURES)
        assert all(b >= a for a, b in zip(before[:count], after[:count], strict=True))
        assert before[count:] == pytest.approx(after[count:], abs=1e-9)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("which", sorted(BYTES))
def test_the_prediction_never_falls_when_bytes_rise(residual, which):
    factors = np.geomspace(1e-4, 1e4, 61)  # from below what was seen to above it
    places = set()
    for query in queries(40):
        more = [with_bytes(query, HW, f, which) for f in factors]
        times = [apply(residual, q).time_us for q in more]
        places |= {
            residual.hull.place(q.kernel_class, np.array(features_of(q, HW), np.float32))
            for q in more
        }
        assert all(b >= a * (1 - 1e-6) for a, b in pairwise(times))
    assert {p.value for p in places} >= {"inside", "above"}


def test_trees_do_not_fall_in_any_byte_feature(residual, rows):
    table = rows.features[:200]
    for k in range(len(BYTE_FEATURES)):
        last = np.full(len(table), -np.inf)
        for value in np.linspace(table[:, k].min(), table[:, k].max(), 20):
            moved = table.copy()
            moved[:, k] = value
            found = residual.trees.predict_many(moved)
            assert (found >= last - 1e-6).all()
            last = found


# ---- outside the training data


@pytest.mark.parametrize(
    "change",
    [
        {"name": "mixed"},
        {"rows": 3, "columns": 5},
        {"rows": 1 << 22, "columns": 1 << 14},
    ],
    ids=["unknown class", "tiny", "huge"],
)
def test_a_launch_outside_the_training_data_keeps_its_analytic_time(residual, change, monkeypatch):
    rng = random.Random(3)
    name = change.get("name")
    query = a_query(rng, HW, "row", change.get("rows"), change.get("columns"))
    if name:
        query = replace(query, kernel_class=name, fit=replace(query.fit, kernel_class=name))
    inside = apply(residual, a_query(rng, HW, "row", 4096, 4096))
    outside = apply(residual, query)
    assert outside.time_us == query.estimate.time_us
    assert not residual.knows(query, HW)
    width = (outside.high_us - launch_of(query)) / (outside.low_us - launch_of(query))
    assert width >= 4  # the analytic model is off by up to a factor of two
    assert width > inside.high_us / inside.low_us


def test_a_launch_far_from_every_sample_is_refused_although_each_number_was_seen(residual, rows):
    own = rows.features[[c == "row" for c in rows.classes]]
    corner = own.max(axis=0)
    assert residual.hull.place("row", corner).value == "outside"
    assert residual.hull.place("row", own[0]).value == "inside"


# ---- comparisons


def test_the_ratio_factor_grows_with_the_coverage_and_is_small(residual):
    factors = [residual.ratio_quantile(c) for c in (0.0, 0.5, 0.8, 0.9)]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    assert 1.0 < factors[-1] < 1.2


def test_the_ratio_factor_of_a_class_with_few_pairs_is_that_of_all(residual):
    assert residual.ratio_quantile(0.8, "gemm") == residual.ratio_quantile(0.8)


def test_close_calls_are_judged_by_pairs_that_were_close(residual):
    ratios = {
        "all": np.linspace(-1, 1, 201),
        "row": np.linspace(-1, 1, 101),
        "close": np.linspace(-0.5, 0.5, 101),
        "close row": np.linspace(-0.1, 0.1, 101),
        "close gemm": np.linspace(-9, 9, 3),
    }
    known = replace(residual, ratios=ratios)
    assert known.ratio_quantile(0.9, "row") == pytest.approx(math.exp(0.8), rel=0.05)
    assert known.ratio_quantile(0.9, "row", close=True) == pytest.approx(math.exp(0.08), rel=0.05)
    assert known.ratio_quantile(0.9, "gemm", close=True) == pytest.approx(math.exp(0.4), rel=0.05)


def test_a_coverage_that_the_pairs_cannot_tell_is_infinitely_uncertain(residual):
    assert residual.ratio_quantile(0.9999) == math.inf


def test_the_ratio_factor_holds_as_often_as_it_says(rows, residual):
    held = [p for p in rows.pairs if rows.folds[p.together] == HELD_OUT]
    inside = []
    for pair in held:
        times = [rows.rows[i].sample.us for i in (pair.together, *pair.apart)]
        known = [rows.rows[i].query for i in (pair.together, *pair.apart)]
        guess = [apply(residual, q).time_us - launch_of(q) for q in known]
        ratio, wanted = guess[0] / sum(guess[1:]), times[0] / sum(times[1:])
        inside.append(wanted <= ratio * residual.ratio_quantile(0.8))
    assert len(inside) >= 20
    assert statistics.mean(inside) >= 0.65


def test_quantiles_are_those_of_split_conformal_prediction():
    scores = np.arange(1.0, 10.0)  # 1 to 9: the 9th of 9 covers 90 %
    assert quantile(scores, 0.9) == 9.0
    assert quantile(scores, 0.5) == 5.0
    assert quantile(scores, 0.95) == math.inf


def test_kinds_that_are_predicted_badly_get_wider_intervals():
    rng = random.Random(0)
    kinds = ["good"] * 100 + ["bad"] * 100
    intervals = Intervals.of([rng.gauss(0, 0.3 if k == "bad" else 0.03) for k in kinds], kinds)
    assert intervals.width("bad", 0.9) > 5 * intervals.width("good", 0.9)
    assert intervals.width("unheard of", 0.9) == intervals.width("bad", 0.9)


# ---- trees


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_the_trees_give_what_xgboost_gives(depth):
    import xgboost

    rng = np.random.default_rng(depth)
    x = rng.normal(size=(300, 7)).astype(np.float32)
    y = np.sin(3 * x[:, 0]) + x[:, 1] * (x[:, 2] > 0)
    settings = {**training.SETTINGS, "max_depth": depth, "min_child_weight": 1}
    del settings["monotone_constraints"]
    booster = xgboost.train(settings, xgboost.DMatrix(x, y), num_boost_round=60)
    trees = from_booster(booster)
    edges = trees.threshold[np.isfinite(trees.threshold)]
    on_edges = rng.choice(edges, size=(100, 7)).astype(np.float32)
    points = np.concatenate([x, rng.normal(size=(100, 7)).astype(np.float32), on_edges])
    expected = booster.predict(xgboost.DMatrix(points))
    np.testing.assert_allclose(trees.predict_many(points), expected, rtol=1e-6, atol=1e-6)
    single = [trees.predict(p) for p in points]
    np.testing.assert_array_equal(single, trees.predict_many(points))
    again = Trees.from_json(json.loads(json.dumps(trees.to_json())))
    np.testing.assert_array_equal(again.predict_many(points), trees.predict_many(points))


def test_broken_trees_are_reported():
    with pytest.raises(InputError, match="broken trees"):
        Trees.from_json({"depth": 2, "leaf": [[1.0]], "feature": [], "threshold": [], "base": 0})


def test_one_query_takes_some_hundred_calls(residual):
    """165 when this was written: about 35 us with features and hull, 12 of them in the trees."""
    some = queries(50)
    apply(residual, some[0])
    calls = calls_of(lambda: [apply(residual, query) for query in some])
    assert calls < 250 * len(some)


def test_many_queries_at_once_are_answered_as_one_by_one(residual):
    some = queries(50)
    together = residual.apply_many(some, HW)
    for query, estimate in zip(some, together, strict=True):
        assert apply(residual, query).time_us == pytest.approx(estimate.time_us, rel=1e-6)
    assert residual.apply_many([], HW) == []


# ---- the file of a residual


def test_a_residual_survives_its_file(residual, tmp_path):
    file = tmp_path / "x.residual.json"
    file.write_text(residual.to_json())
    again = load_residual(HW, file)
    for query in queries(30):
        assert apply(again, query).time_us == apply(residual, query).time_us
    assert again.ratio_quantile(0.9) == pytest.approx(residual.ratio_quantile(0.9), abs=1e-3)
    assert again.to_json() == residual.to_json()


def test_a_device_without_a_residual_has_none(tmp_path):
    assert load_residual(replace(HW, name="nobody_has_this")) is None
    assert load_residual(HW, tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d | {"features_version": 0}, "other features"),
        (lambda d: d | {"features": d["features"][1:]}, "other features"),
        (lambda d: d | {"device": "nvidia_a100"}, "not of nvidia_h200"),
        (lambda d: d | {"profile": "0123"}, "numbers have changed"),
        (lambda d: {k: v for k, v in d.items() if k != "trees"}, "no residual"),
        (lambda d: [], "no residual"),
    ],
    ids=["version", "features", "device", "profile", "no trees", "a list"],
)
def test_a_stale_or_broken_residual_is_not_used_and_a_warning_says_so(
    residual, tmp_path, caplog, change, why
):
    file = tmp_path / "x.residual.json"
    file.write_text(json.dumps(change(json.loads(residual.to_json()))))
    with caplog.at_level(logging.WARNING):
        assert load_residual(HW, file) is None
    assert why in caplog.text
    assert why in unused_residual(HW, file)


def test_a_report_says_that_a_changed_profile_has_lost_its_learned_correction():
    changed = replace(HW, hbm_bytes_per_s=HW.hbm_bytes_per_s * 0.9)
    said = []
    for hw in (HW, changed):
        planned = Planned.of(module_of("random:1"), hw.to_target(), hw, POLICY)
        report = planned_report(planned)
        said.append("learned correction is not used: the profile's numbers" in str(report))
    assert said == [False, True]


def test_a_new_file_replaces_the_one_that_was_loaded(residual, tmp_path):
    file = tmp_path / "x.residual.json"
    file.write_text("{")
    assert load_residual(HW, file) is None
    file.write_text(residual.to_json())
    assert load_residual(HW, file) is not None


# ---- sample files


def write(file, *lines):
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("\n".join(texts) + "\n")
    return file


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting"),
        ("[1]", "expected an object"),
        ({**LINE, "us": 0}, "not possible"),
        ({**LINE, "us": -1}, "not possible"),
        ({**LINE, "us": "3"}, "no number"),
        ('{"graph":"g","class":"row","us":NaN,"ops":["a"],"stores":["a"]}', "no number"),
        ({**LINE, "uss": 1}, "unknown key 'uss'"),
        ({**LINE, "ops": "lv"}, "no list"),
        ({**LINE, "ops": [1]}, "no name"),
        ({**LINE, "graph": ""}, "no name"),
        ({**LINE, "registers": 1.5}, "not possible"),
        ({**LINE, "recomputed": ["other"]}, "recomputed"),
        ({k: v for k, v in LINE.items() if k != "stores"}, "needs ops and stores"),
        ({k: v for k, v in LINE.items() if k != "class"}, "kernel_class"),
        ({"graph": "g", "groups": [], "span_us": 1, "sum_us": 1}, "without launches"),
    ],
)
def test_a_broken_line_is_reported_and_the_others_are_read(tmp_path, line, why):
    file = write(tmp_path / "samples.jsonl", HEADER, LINE, line, {**LINE, "us": 4, "context": 1})
    samples = read_samples(file)
    assert [s.us for s in samples.launches] == [3.5, 4]
    (problem,) = samples.problems
    assert problem.where == "samples.jsonl:3"
    assert why in problem.why


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no header"),
        ([LINE], "no header"),
        ([{**HEADER, "version": 2}], "version 2"),
        ([{k: v for k, v in HEADER.items() if k != "date"}], "does not give date"),
    ],
)
def test_a_file_without_a_header_is_refused(tmp_path, lines, why):
    with pytest.raises(InputError, match=why):
        read_samples(write(tmp_path / "samples.jsonl", *lines))


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(InputError, match="cannot read the samples"):
        read_samples(tmp_path / "none.jsonl")


def test_files_of_one_device_merge_and_the_last_measurement_stands(tmp_path):
    plan = {"graph": "random:1", "groups": [["lv"], ["lv1"]], "span_us": 9, "sum_us": 8}
    first = write(tmp_path / "a.jsonl", HEADER, LINE, plan)
    second = write(tmp_path / "b.jsonl", HEADER, {**LINE, "us": 7}, {**LINE, "graph": "random:2"})
    merged = read_samples(first, second)
    assert [(s.graph, s.us) for s in merged.launches] == [("random:1", 7), ("random:2", 3.5)]
    assert len(merged.plans) == 1
    write_samples(tmp_path / "c.jsonl", merged)
    again = read_samples(tmp_path / "c.jsonl")
    assert (again.launches, again.plans) == (merged.launches, merged.plans)
    other = write(tmp_path / "d.jsonl", {**HEADER, "device": "nvidia_a100"}, LINE)
    with pytest.raises(InputError, match="several devices"):
        read_samples(first, other)


def test_the_folds_are_the_same_in_every_process():
    assert [fold_of(f"random:{i}") for i in range(12)] == [2, 3, 3, 1, 1, 3, 0, 0, 1, 4, 3, 2]


# ---- rows from samples


def samples_of(graphs, seed=2) -> SampleSet:
    """Launches of the unfused and of the searched plan of random graphs, with made-up times."""
    rng = random.Random(seed)
    found = []
    for key in graphs:
        graph = graph_of(key, HW, POLICY)[1]
        for plan in (unfused_plan(graph, HW, POLICY), search(graph, HW, POLICY)):
            found += list(samples_of_plan(key, graph, plan, rng))
    return SampleSet(HW.name, (HEADER,), tuple(found))


def samples_of_plan(key, graph, plan: FusionPlan, rng):
    for view, group in zip(group_views(graph, plan), plan.groups, strict=True):
        if group.kernel_class in ("view", "opaque"):
            continue
        stores = tuple(graph.tensors[t].name for t in view.outputs)
        us = max(0.5, group.predicted_us - 2) * CLASSES.get(group.kernel_class, 1.2)
        us *= math.exp(rng.gauss(0, 0.03))
        yield Sample(key, group.kernel_class, us, group.ops, stores, group.recomputed)


@pytest.fixture(scope="module")
def drawn() -> SampleSet:
    return samples_of([f"random:{i}" for i in range(20)])


def test_every_launch_of_a_plan_is_found_again_in_its_graph(drawn):
    rows = rows_of(drawn, HW, POLICY, graph_of)
    assert rows.problems == ()
    assert len(rows.rows) == len(drawn.launches)
    assert np.isfinite(rows.features).all()
    assert rows.features.shape[1] == len(FEATURES)
    assert rows.pairs
    for pair in rows.pairs:
        together = rows.rows[pair.together]
        apart = [rows.rows[i].sample.ops for i in pair.apart]
        assert {op for ops in apart for op in ops} <= set(together.sample.ops)
        assert {rows.rows[i].sample.graph for i in pair.apart} == {together.sample.graph}


def test_a_launch_sees_what_the_planner_saw():
    key = "random:5"
    graph = graph_of(key, HW, POLICY)[1]
    plan = search(graph, HW, replace(POLICY, learned=False))
    views = group_views(graph, plan)
    samples = list(samples_of_plan(key, graph, plan, random.Random(0)))
    assert samples
    for sample in samples:
        view = view_of(graph, sample)
        (twin,) = [v for v in views if v.ops == view.ops and v.duplicated == view.duplicated]
        assert set(view.outputs) == set(twin.outputs)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ops": ("nobody",)}, "the graph has no nobody"),
        ({"stores": ("nothing",)}, "the graph has no nothing"),
        ({"kernel_class": "square"}, "no kernel class 'square'"),
        ({"kernel_class": "gemm"}, "does not accept it"),
        ({"graph": "circle:3"}, "no key of a graph"),
    ],
)
def test_a_launch_that_cannot_be_found_again_is_set_aside(drawn, change, why):
    good = next(s for s in drawn.launches if s.kernel_class == "pointwise")
    broken = replace(good, **change)
    rows = rows_of(replace(drawn, launches=(good, broken)), HW, POLICY, graph_of)
    assert [r.sample for r in rows.rows] == [good]
    assert why in rows.problems[0].why


def test_a_launch_whose_graph_nobody_makes_is_set_aside_with_the_command_that_does(drawn):
    rows = rows_of(replace(drawn, launches=drawn.launches[:1]), HW, POLICY)
    assert rows.rows == ()
    assert "tests.benchmarks.plans.refit" in rows.problems[0].why


def test_a_launch_without_a_graph_carries_its_work():
    (query,) = queries(1)
    work = json.loads(json.dumps(work_of(query.fit, query.traffic, query.resources)))
    again = query_of(work, query.kernel_class, HW)
    assert features_of(again, HW) == features_of(query, HW)
    sample = Sample("model:1", query.kernel_class, 5.0, work=work)
    samples = SampleSet(HW.name, (HEADER,), (sample, replace(sample, work={**work, "version": 0})))
    rows = rows_of(samples, HW, POLICY)
    assert len(rows.rows) == 1
    assert "version 0" in rows.problems[0].why


# ---- the command


def test_the_command_writes_a_residual_that_loads(drawn, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "ROUNDS", 20)
    source, out = tmp_path / "samples.jsonl", tmp_path / "out.residual.json"
    write_samples(source, drawn)
    source.write_text(source.read_text() + "broken\n")
    command = [str(source), "--target", "h200", "--out", str(out)]
    assert plans_refit.main(command) == 0
    printed = capsys.readouterr()
    assert "median error" in printed.out
    assert "Kendall tau" in printed.out
    assert f"samples.jsonl:{len(drawn.launches) + 2}" in printed.err
    assert load_residual(HW, out).figures["held_out"] > 0
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name or p.name[0] == "."] == []


def test_too_few_samples_are_refused_and_the_old_file_stays(drawn, tmp_path, capsys):
    source, out = tmp_path / "samples.jsonl", tmp_path / "out.residual.json"
    write_samples(source, replace(drawn, launches=drawn.launches[:20]))
    source.write_text(source.read_text() + "broken\n")
    out.write_text("old")
    args = argparse.Namespace(refit=[str(source)], target="h200", out=str(out))
    with pytest.raises(InputError, match="too few"):
        refit.main(args, graph_of)
    assert out.read_text() == "old"
    assert "set aside: samples.jsonl:22" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["nvidia_a100", "NVIDIA A100"])
def test_samples_of_another_device_are_refused(drawn, tmp_path, device):
    header = {**HEADER, "device": device}
    write_samples(tmp_path / "s.jsonl", replace(drawn, headers=(header,)))
    with pytest.raises(InputError, match="not of nvidia_h200"):
        refit.refit([tmp_path / "s.jsonl"], HW)


def test_the_name_a_driver_gives_is_the_same_device(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "ROUNDS", 5)
    header = {**HEADER, "device": "NVIDIA H200"}
    write_samples(tmp_path / "s.jsonl", replace(drawn, headers=(header,)))
    assert refit.refit([tmp_path / "s.jsonl"], HW, graph_of=graph_of).device == HW.name


def test_a_residual_lies_beside_its_profile(residual, tmp_path):
    assert str(learned.residual_file(HW)).endswith("configs/nvidia_h200.residual.json")
    text = profile_file("h200").read_text().replace("value = 132", "value = 131", 1)
    (tmp_path / "mine.toml").write_text(text)
    mine = load_profile(tmp_path / "mine.toml")
    assert learned.residual_file(mine) == tmp_path / "mine.residual.json"
    assert load_residual(mine) is None
    own = replace(residual, profile=mine.fingerprint())
    learned.residual_file(mine).write_text(own.to_json())
    assert load_residual(mine).profile == mine.fingerprint()


def test_a_copy_of_a_shipped_profile_keeps_the_shipped_residual(tmp_path):
    copy = tmp_path / "mine.toml"
    copy.write_text(profile_file("nvidia_h200").read_text())
    assert load_residual(load_profile(copy)) is not None
    assert load_residual(load_profile("nvidia_h200")) is not None
