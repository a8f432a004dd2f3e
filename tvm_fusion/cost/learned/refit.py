"""`calibrate --refit FILE...`: trains the learned residual from files of measured kernels."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ...config import HardwareProfile, Policy, load_policy, resolve_target
from ...errors import InputError
from ...host.atomic_files import replace_file
from .features import BYTE_FEATURES, FREE_FEATURES
from .hull import ALL, Hull, Intervals
from .learned import CLOSE, CLOSE_RATIO, DEFAULT_COVERAGE, Residual, residual_file
from .samples import FOLDS, HELD_OUT, SampleSet, read_samples
from .training_rows import GraphOf, Rows, rows_of
from .trees import Trees, from_booster

# Training of the learned residual (needs xgboost, which only this module imports).
#
# The graphs are dealt into folds by a hash of their keys. Fold `HELD_OUT` is never trained on: it
# gives the figures. Each other fold is predicted by trees that were trained on the rest; the errors
# of these predictions give the intervals (cross-conformal prediction; Vovk, Annals of Mathematics
# and
# Artificial Intelligence 74, 2015), so that all of the data serve both purposes.

LEAST_ROWS = 100
ROUNDS = 160
MONOTONE = (1,) * len(BYTE_FEATURES) + (0,) * len(FREE_FEATURES)
SETTINGS: dict[str, Any] = {
    "objective": "reg:pseudohubererror",
    "huber_slope": 0.2,
    "tree_method": "exact",
    "base_score": 0.0,
    "eta": 0.12,
    "max_depth": 5,
    "min_child_weight": 4,
    "lambda": 2.0,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "seed": 5,
    "nthread": 1,
    "monotone_constraints": MONOTONE,
}
# Measurements that spread as much count half.
USUAL_SPREAD = 0.05


def train(rows: Rows, hw: HardwareProfile, source: Mapping[str, Any]) -> Residual:
    """Trains a residual and judges it on the held-out graphs.

    Parameters
    ----------
    rows : Rows
    hw : HardwareProfile
    source : mapping
        Where the samples are from; kept with the residual.

    Raises
    ------
    InputError
        There are too few samples or graphs to learn from.
    """
    features, folds = rows.features, rows.folds
    wanted = np.log(rows.measured) - rows.anchors
    learn, held = np.flatnonzero(folds != HELD_OUT), np.flatnonzero(folds == HELD_OUT)
    _check(len(learn), len(held), len(set(folds[learn])))
    classes, weights = np.array(rows.classes), _weights(rows)
    graphs = np.array([row.sample.graph for row in rows.rows])
    crossed = np.full(len(wanted), np.nan)
    for fold in sorted(set(folds[learn])):
        rest, own = learn[folds[learn] != fold], np.flatnonzero(folds == fold)
        trees = fit_trees(features[rest], wanted[rest], weights[rest])
        crossed[own] = trees.predict_many(features[own])
    trees = fit_trees(features[learn], wanted[learn], weights[learn])
    residual = Residual(
        device=hw.name,
        profile=hw.fingerprint(),
        trees=trees,
        hull=Hull.of(features[learn], list(classes[learn]), list(graphs[learn])),
        intervals=Intervals.of(wanted[learn] - crossed[learn], list(classes[learn])),
        wide=max(math.log(2), float(np.abs(rows.errors[learn]).max())),
        ratios=ratio_errors(rows, rows.anchors + crossed),
        source=source,
    )
    return replace(residual, figures=figures_of(residual, rows, held, hw))


def fit_trees(features: np.ndarray, wanted: np.ndarray, weights: np.ndarray) -> Trees:
    """Trees for logs of times: the same ones for the same numbers, on one thread."""
    import xgboost

    base = float(np.float32(np.median(wanted)))
    data = xgboost.DMatrix(features, wanted - base, weight=weights)
    return from_booster(xgboost.train(SETTINGS, data, num_boost_round=ROUNDS), base)


def ratio_errors(rows: Rows, logs: np.ndarray) -> dict[str, np.ndarray]:
    """Log of the measured over the predicted ratio "together / apart" of every pair whose
    predicted `logs` are known, ascending, by kernel class; without what launches themselves cost.

    Those that are predicted to gain little, or to lose, are also kept by themselves (`CLOSE`):
    where a prediction decides between together and apart, it is among these.
    """
    measured, predicted = rows.measured, np.exp(logs)
    found: dict[str, list[float]] = {ALL: []}
    for pair in rows.pairs:
        if np.isnan(logs[[pair.together, *pair.apart]]).any():
            continue
        places = [pair.together, *pair.apart]
        expected, name = _log_ratio(predicted[places]), rows.rows[pair.together].query.kernel_class
        kinds = [ALL, name]
        if expected > math.log(CLOSE_RATIO):
            kinds += [CLOSE, f"{CLOSE} {name}"]
        for kind in kinds:
            found.setdefault(kind, []).append(_log_ratio(measured[places]) - expected)
    return {name: np.sort(np.array(errors)) for name, errors in found.items()}


def _log_ratio(times: np.ndarray) -> float:
    return math.log(times[0] / times[1:].sum())


def _weights(rows: Rows) -> np.ndarray:
    spread = np.array([row.sample.spread or 0.0 for row in rows.rows])
    return 1 / (1 + (spread / USUAL_SPREAD) ** 2)


def _check(learn: int, held: int, folds: int) -> None:
    if learn < LEAST_ROWS or not held or folds < 2:
        raise InputError(
            f"{learn} launches of {folds} parts to learn from and {held} to judge by are too few: "
            f"at least {LEAST_ROWS}, of graphs in each of {FOLDS} parts, are needed; measure more "
            "graphs, or refit together with a larger file of the same device"
        )


def figures_of(
    residual: Residual, rows: Rows, held: np.ndarray, hw: HardwareProfile
) -> dict[str, float]:
    """How well a residual predicts some rows: errors of kernel times relative to the measured ones,
    rank correlation, and how often the interval holds.
    """
    from scipy.stats import kendalltau

    chosen = [rows.rows[i] for i in held]
    estimates = residual.apply_many([r.query for r in chosen], hw)
    launch = np.array([r.query.estimate.time_us - r.query.body_us for r in chosen])
    measured = np.array([r.sample.us for r in chosen])
    predicted = np.array([e.time_us for e in estimates]) - launch
    analytic = np.array([r.query.body_us for r in chosen])
    low = np.array([e.low_us for e in estimates]) - launch
    high = np.array([e.high_us for e in estimates]) - launch
    known = np.array([residual.knows(r.query, hw) for r in chosen])
    error, plain = np.abs(predicted / measured - 1), np.abs(analytic / measured - 1)
    inside = (low <= measured) & (measured <= high)
    return {
        "rows": float(len(rows.rows)),
        "graphs": float(len({r.sample.graph for r in rows.rows})),
        "held_out": float(len(chosen)),
        "median_error": float(np.median(error)),
        "p90_error": float(np.quantile(error, 0.9)),
        "kendall_tau": float(kendalltau(predicted, measured).statistic),
        "analytic_median_error": float(np.median(plain)),
        "analytic_kendall_tau": float(kendalltau(analytic, measured).statistic),
        "coverage": float(np.mean(inside)),
        "wanted_coverage": DEFAULT_COVERAGE,
        "known": float(np.mean(known)),
        "pairs": float(len(residual.ratios[ALL])),
    }


SHOWN_PROBLEMS = 10


def refit(
    sample_files: Sequence[str | Path],
    hw: HardwareProfile,
    policy: Policy | None = None,
    graph_of: GraphOf | None = None,
) -> Residual:
    """Trains the residual of a device from sample files.

    Parameters
    ----------
    sample_files : sequence of str or Path
        See `cost.learned.samples`.
    hw : HardwareProfile
        Of the device that the samples were measured on.
    policy : Policy or None
        None is the default policy.
    graph_of : GraphOf or None
        See `training_rows.rows_of`.

    Returns
    -------
    Residual
        Equal files give equal residuals.

    Raises
    ------
    InputError
        A file cannot be read, is of another device, or holds too little.
    """
    return train_samples(_samples(sample_files, hw), hw, policy, graph_of)[0]


def train_samples(
    samples: SampleSet,
    hw: HardwareProfile,
    policy: Policy | None = None,
    graph_of: GraphOf | None = None,
) -> tuple[Residual, Rows]:
    """The residual of some samples, and the rows it was trained from."""
    rows = rows_of(samples, hw, policy or load_policy(), graph_of)
    return train(rows, hw, _source(samples)), rows


def _source(samples: SampleSet) -> dict[str, Any]:
    return {
        "samples": [dict(h) for h in samples.headers],
        "xgboost": _version("xgboost-cpu") or _version("xgboost"),
    }


def main(args: argparse.Namespace, graph_of: GraphOf | None = None) -> int:
    """Runs the command: `args.refit` are the files, `args.target` names the device (None: the one
    that the files name), `args.out` the file to write (None: beside the profile). `graph_of`
    makes graphs that only a key stands for.
    """
    device = args.target or read_samples(*args.refit).device
    hw = resolve_target(device)[1]
    samples = _samples(args.refit, hw)
    out = Path(args.out) if getattr(args, "out", None) else Path(str(residual_file(hw)))
    if not out.absolute().parent.is_dir():
        raise InputError(f"cannot write {out}: there is no such directory; make it first")
    print(f"{len(samples.launches)} launches", file=sys.stderr)
    rows = rows_of(samples, hw, load_policy(), graph_of)
    problems = [*samples.problems, *rows.problems]
    for problem in problems[:SHOWN_PROBLEMS]:
        print(f"set aside: {problem}", file=sys.stderr)
    if len(problems) > SHOWN_PROBLEMS:
        print(f"set aside: {len(problems) - SHOWN_PROBLEMS} more", file=sys.stderr)
    residual = train(rows, hw, _source(samples))
    replace_file(out, residual.to_json())
    print(summary(residual))
    print(f"wrote {out}")
    return 0


def summary(residual: Residual) -> str:
    """The figures in a few lines."""
    f = residual.figures
    return "\n".join(
        (
            f"{residual.device}: {f['rows']:.0f} launches of {f['graphs']:.0f} graphs, "
            f"{f['held_out']:.0f} held out (of other graphs)",
            f"held out: median error {f['median_error']:.1%}, 90th percentile "
            f"{f['p90_error']:.1%}, Kendall tau {f['kendall_tau']:.3f}",
            f"analytic alone: median error {f['analytic_median_error']:.1%}, Kendall tau "
            f"{f['analytic_kendall_tau']:.3f}",
            f"intervals of {f['wanted_coverage']:.0%} hold for {f['coverage']:.1%}; "
            f"{f['known']:.1%} lie within the training data",
            f"ratio together/apart: {f['pairs']:.0f} pairs, at most "
            f"{residual.ratio_quantile(f['wanted_coverage']):.3f} times the predicted one in "
            f"{f['wanted_coverage']:.0%}",
        )
    )


def _samples(files: Sequence[str | Path], hw: HardwareProfile) -> SampleSet:
    samples = read_samples(*files)
    names = {_plain(name) for name in (hw.name, *hw.aliases)}
    if _plain(samples.device) not in names:
        raise InputError(
            f"the samples are of {samples.device}, not of {hw.name}; name their device with "
            "--target"
        )
    return samples


def _plain(device: str) -> str:
    """A device's name without case and punctuation: drivers write them differently."""
    return "".join(c for c in device.lower() if c.isalnum())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
