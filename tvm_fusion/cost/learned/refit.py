"""`calibrate --refit FILE...`: trains the learned residual from files of measured kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ...config import HardwareProfile, Policy, load_policy, resolve_target
from ...errors import InputError
from ...host.atomic_files import replace_file
from .learned import Residual, residual_file
from .samples import SampleSet, read_samples
from .training import train
from .training_rows import GraphOf, Rows, rows_of

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
        raise InputError(f"cannot write {out}: there is no such directory")
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
