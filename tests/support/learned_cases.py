"""Launches that nobody measured, with times that the analytic model gets wrong in a known way."""

import math
import random
from dataclasses import replace

from tvm_fusion.cost.analytic import estimate
from tvm_fusion.cost.learned.features import Query, anchor_of, body_us, features_of
from tvm_fusion.cost.learned.samples import Sample
from tvm_fusion.cost.learned.training_rows import Pair, Row, Rows
from tvm_fusion.cost.traffic import Resources, Traffic
from tvm_fusion.kernels.base import Fit

NOISE = 0.03
CLASSES = {"pointwise": 1.05, "row": 1.3, "column": 1.5, "transpose": 0.8}


def a_query(rng, hw, name=None, rows=None, columns=None, inputs=None):
    """A launch of a drawn class and size; reductions read what they do not write."""
    name = name or rng.choice(sorted(CLASSES))
    rows = rows or rng.choice([64, 512, 1023, 4096, 16384])
    columns = columns or rng.choice([64, 777, 1024, 4096, 8192])
    inputs = inputs or rng.randint(1, 3)
    points = rows * columns
    written = points if name in ("pointwise", "transpose") else rows
    moved = 2.0 * (points * inputs + written)
    resident = rng.random() < 0.3
    work = {"arithmetic": 4.0 * points, "special": rng.randint(0, 2) * float(points)}
    traffic = Traffic(
        hbm_bytes=2.0 * written if resident else moved,
        l2_bytes=moved,
        operations=work,
        parallel=min(1.0, points / 1e6),
        sector_bytes=moved * (1.5 if columns % 8 else 1.0),
        wavefronts=moved / 128,
        blocks=points / 2048,
        in_flight_bytes=16384.0,
    )
    fit = Fit(name, rows, columns, (float(points),) * rng.randint(1, 4))
    resources = Resources(32 + 8 * inputs, 0, 256)
    return Query(name, fit, traffic, resources, estimate(traffic, resources, hw, "graph"))


def true_us(query):
    """What the launch "really" takes: by class, by alignment, and 1.5 us for any kernel."""
    odd = 1.35 if query.fit.columns % 8 else 1.0
    return 1.5 + body_us(query.estimate) * CLASSES[query.kernel_class] * odd


NEAR = ("l2_bytes", "sector_bytes", "wavefronts", "smem_bytes")
BYTES = {"all": ("hbm_bytes", *NEAR), "of memory": ("hbm_bytes",), "out of the L2": NEAR}


def with_bytes(query, hw, factor, which="all"):
    """The launch with that many times the bytes over the same space, moved in the same way."""
    t, names = query.traffic, BYTES[which]
    traffic = replace(t, **{name: factor * getattr(t, name) for name in names})
    return replace(query, traffic=traffic, estimate=estimate(traffic, query.resources, hw, "graph"))


def some_rows(hw, graphs=120, launches=8, seed=1):
    """Rows of graphs of `launches` launches; the first of each graph fuses the last two."""
    rng = random.Random(seed)
    rows, pairs = [], []
    for g in range(graphs):
        start = len(rows)
        for k in range(launches):
            query = a_query(rng, hw)
            time = true_us(query) * math.exp(rng.gauss(0, NOISE))
            ops = ("a", "b") if k == 0 else (f"op{k}",)
            sample = Sample(f"drawn:{g}", query.kernel_class, time, ops, ("t",), spread=0.01)
            rows.append(Row(sample, query, features_of(query, hw), anchor_of(query, hw), ops))
        pairs.append(Pair(start, (len(rows) - 2, len(rows) - 1)))
    return Rows(tuple(rows), tuple(pairs))
