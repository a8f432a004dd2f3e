"""Inspects the analytic cost model against measured launches, and fits numbers of the profile.

    python -m tests.fit_analytic show SAMPLES.jsonl [class] [number of worst cases]
    python -m tests.fit_analytic fit SAMPLES.jsonl FIELD ...      least squares of the log error

Times are those among the other launches of a plan. A fit changes only the named fields of the
profile; it prints values, and writes nothing. Weights make each graph count alike.
"""

import dataclasses
import math
import pickle
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.cost.analytic import estimate
from tvm_fusion.cost.learned.samples import read_samples
from tvm_fusion.cost.learned.training_rows import view_of
from tvm_fusion.kernels.base import Fit
from tvm_fusion.kernels.registry import family
from tvm_fusion.plan.group_view import GroupView

H200 = load_profile("nvidia_h200")
SIZES = (3.0, 10.0, 50.0, math.inf)  # microseconds


@dataclasses.dataclass
class Case:
    """A measured launch."""

    graph: str
    name: str
    kernel_class: str
    us: float
    view: GroupView


def cases_of(file, cache=None):
    """The launches of a sample file whose graphs can be made again."""
    from .benchmarks.plans.random_graphs import graph_of

    if cache and Path(cache).exists():
        return pickle.loads(Path(cache).read_bytes())
    graphs, found = {}, []
    for sample in read_samples(file).launches:
        key = sample.graph, sample.rewrites
        if key not in graphs:
            graphs[key] = graph_of(sample.graph, H200, load_policy(None), sample.rewrites)[1]
        try:
            view = view_of(graphs[key], sample)
        except ValueError:
            continue
        name = f"{sample.graph} {'+'.join(sample.ops)[:60]}"
        found.append(Case(sample.graph, name, sample.kernel_class, sample.us, view))
    if cache:
        Path(cache).write_bytes(pickle.dumps(found))
    return found


def predictions(cases, hw=H200, only=None):
    """(case, traffic, resources, estimate) of those that their class still accepts."""
    found = []
    for case in cases:
        if only and case.kernel_class != only:
            continue
        kernel = family(case.kernel_class)
        view = GroupView(case.view.graph, case.view.ops, case.view.outputs, case.view.duplicated)
        fit = kernel.accepts(view, hw, load_policy(None))
        if isinstance(fit, Fit):
            traffic, resources = kernel.traffic(view, fit, hw), kernel.resources(view, fit, hw)
            found.append((case, traffic, resources, estimate(traffic, resources, hw)))
    return found


def error(case, found, hw=H200):
    """log(predicted / measured), launches left out."""
    return math.log(max(found.time_us - hw.launch_us, 1e-3) / case.us)


def table(rows, hw=H200):
    """Prints errors by class and by measured time."""
    groups = defaultdict(list)
    for case, _, _, found in rows:
        size = next(s for s in SIZES if case.us <= s)
        for key in ((case.kernel_class, 0.0), (case.kernel_class, size), ("all", 0.0)):
            groups[key].append(error(case, found, hw))
    for (name, size), errors in sorted(groups.items()):
        off = sorted(math.expm1(abs(e)) for e in errors)
        print(
            f"{name:10} {'up to ' + str(size) if size else 'all':12} {len(off):5}"
            f"  median {statistics.median(off):6.1%}  p90 {off[int(0.9 * len(off))]:6.1%}"
            f"  bias {math.exp(statistics.median(errors)):5.2f}"
        )


def worst(rows, count, hw=H200):
    """Prints the cases that are furthest off."""
    rows = sorted(rows, key=lambda row: -abs(error(row[0], row[3], hw)))
    seen = Counter()
    for case, traffic, resources, found in rows:
        seen[case.graph] += 1
        if seen[case.graph] > 2 or count <= 0:
            continue
        count -= 1
        terms = sorted(found.terms.items(), key=lambda item: -item[1])
        shown = " ".join(f"{n} {t:.2f}" for n, t in terms if n != "launch" and t > 0.1)
        print(
            f"{case.kernel_class:9} {case.us:8.2f} {found.time_us - hw.launch_us:8.2f}  {shown}"
            f"  [{traffic.blocks:.0f} x {resources.threads}] {case.name}"
        )


def fit(rows, fields):
    """Values of profile fields with the least squares of log errors; a robust loss."""
    weights = Counter(case.graph for case, *_ in rows)
    weight = np.array([weights[case.graph] ** -0.5 for case, *_ in rows])
    start = np.log([getattr(H200, name) for name in fields])

    def errors(values):
        changes = dict(zip(fields, np.exp(values), strict=True))
        hw = dataclasses.replace(H200, **changes)
        again = [(case, estimate(t, r, hw)) for case, t, r, _ in rows]
        return weight * np.array([error(case, found, hw) for case, found in again])

    result = least_squares(errors, start, loss="soft_l1", f_scale=0.2)
    before, after = (np.abs(errors(v) / weight) for v in (start, result.x))
    for name, old, new in zip(fields, np.exp(start), np.exp(result.x), strict=True):
        print(f"{name:28} {old:.4g} -> {new:.4g}")
    print(f"median error {math.expm1(np.median(before)):.1%} -> {math.expm1(np.median(after)):.1%}")


def main(what, file, *rest):
    """See the module's text."""
    cases = cases_of(file, file + ".pickle")
    if what == "fit":
        fit([r for r in predictions(cases) if r[1].seconds is None], rest)
        return
    rows = predictions(cases, only=rest[0] if rest and rest[0] != "all" else None)
    table(rows)
    worst(rows, int(rest[1]) if len(rest) > 1 else 20)


if __name__ == "__main__":
    main(*sys.argv[1:])
