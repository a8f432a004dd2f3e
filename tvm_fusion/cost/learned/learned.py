"""Tier 3 of the cost model: what the analytic model gets wrong, learned from measured kernels.

    T = T_launch + exp(anchor + trees(features))

The anchor is made of the analytic time without the launch and of the size of the launch's space
(`cost.learned.features`). The trees are constrained not to fall in any feature that grows with the
bytes moved, and the anchor does not fall in them either, so the whole does not. Outside the
training data the analytic time stands, with an interval as wide as its largest error; where only
the bytes are beyond what was seen, the higher of both times above it and the lower of both below
it, so that the prediction does not fall at the border of the data either.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from ...config import HardwareProfile, file_of, shipped_file
from ...errors import InputError
from ...kernels.base import Fit
from ..analytic import Estimate
from ..traffic import Resources, Traffic
from .features import FEATURES, FEATURES_VERSION, Query, anchor_of, features_of
from .hull import Hull, Intervals, Place, quantile
from .trees import Trees

logger = logging.getLogger(__name__)

RESIDUAL_VERSION = 1
DEFAULT_COVERAGE = 0.9
# Pairs of one kernel class with which its ratio is judged by them alone.
ENOUGH_PAIRS = 40
# Predicted ratios "together / apart" above this are close calls, kept under their own name.
CLOSE_RATIO = 0.6
CLOSE = "close"
OWN_NOISE = 0.1
"""Log of what is added to the time of a class that predicts it itself, up to which it is taken for
noise: plans of products are within a few per cent of one another, and what the trees say of each
launch by itself would decide between them. The errors on held-out graphs stay the same."""


@dataclass(frozen=True)
class Residual:
    """A trained correction for one device.

    Attributes
    ----------
    device : name of the profile
    profile : fingerprint of the profile's numbers
    trees : of the log of the measured time, less the anchor
    hull : of the training data
    intervals : of the corrected times
    wide : largest log error of the analytic model on the training data
    ratios : signed log errors of predicted ratios "together / apart", ascending, by kernel class
    figures : how good it is on graphs that it was not trained on
    source : headers of the sample files, versions
    """

    device: str
    profile: str
    trees: Trees
    hull: Hull
    intervals: Intervals
    wide: float
    ratios: Mapping[str, np.ndarray] = field(hash=False)
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)
    source: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def apply(
        self,
        kernel_class: str,
        fit: Fit,
        traffic: Traffic,
        resources: Resources,
        estimate: Estimate,
        hw: HardwareProfile,
        coverage: float = DEFAULT_COVERAGE,
    ) -> Estimate:
        """The corrected estimate of one launch, with an interval.

        Parameters
        ----------
        kernel_class : str
        fit, traffic, resources : what the kernel class says of the launch
        estimate : Estimate
            Of the analytic model.
        hw : HardwareProfile
        coverage : float
            How often the measured time is to lie in the interval.

        Returns
        -------
        Estimate
            The terms are those of the analytic model, whose time is `analytic_us`.
        """
        query = Query(kernel_class, fit, traffic, resources, estimate)
        row = np.array(features_of(query, hw), np.float32)
        place = self.hull.place(kernel_class, row)
        log = 0.0 if place is Place.OUTSIDE else self.trees.predict(row)
        return self._corrected(query, place, anchor_of(query, hw) + log, coverage)

    def apply_many(
        self, queries: Sequence[Query], hw: HardwareProfile, coverage: float = DEFAULT_COVERAGE
    ) -> list[Estimate]:
        """`apply` for many launches at once."""
        if not queries:
            return []
        rows = np.array([features_of(q, hw) for q in queries], np.float32)
        logs = self.trees.predict_many(rows)
        places = [
            self.hull.place(q.kernel_class, row) for q, row in zip(queries, rows, strict=True)
        ]
        return [
            self._corrected(q, place, anchor_of(q, hw) + float(log), coverage)
            for q, place, log in zip(queries, places, logs, strict=True)
        ]

    def knows(self, query: Query, hw: HardwareProfile) -> bool:
        """Whether a launch lies within the training data."""
        row = np.array(features_of(query, hw), np.float32)
        return self.hull.place(query.kernel_class, row) is Place.INSIDE

    def ratio_quantile(
        self, coverage: float, kernel_class: str | None = None, close: bool = False
    ) -> float:
        """By what factor the predicted ratio of a launch's time to that of its operators' own
        launches, both without what a launch itself costs, is exceeded at most, as often as
        `coverage` says.

        Parameters
        ----------
        coverage : float
            0 takes the prediction as it is.
        kernel_class : str or None
            Of the launch. Classes with few measured pairs are judged by all pairs.
        close : bool
            Over those pairs only whose predicted ratio is above `CLOSE_RATIO`. Fusions that are
            predicted to save more err by more, and still gain.

        Returns
        -------
        float
            At least 1; infinity if there are too few pairs to say. "Together" is faster than
            "apart" with the wanted confidence if predicted together / apart times this factor is
            below 1.
        """
        if coverage <= 0:
            return 1.0
        kinds = (f"{CLOSE} {kernel_class}", CLOSE) if close else (kernel_class,)
        known = [self.ratios[k] for k in kinds if len(self.ratios.get(k, ())) >= ENOUGH_PAIRS]
        errors = known[0] if known else self.ratios["all"]
        return math.exp(max(0.0, quantile(errors, coverage)))

    def _corrected(self, query: Query, place: Place, log: float, coverage: float) -> Estimate:
        analytic, body = query.estimate, query.body_us
        launch = analytic.time_us - body
        if query.traffic.seconds is not None:
            learned = body * math.exp(_beyond_noise(log - math.log(body)))
        else:
            learned = math.exp(log)
        width = self.intervals.width(query.kernel_class, coverage)
        if place is not Place.INSIDE or not math.isfinite(width):
            width = max(self.wide, width if math.isfinite(width) else 0.0)
        if place is Place.OUTSIDE:
            learned = body
        elif place is Place.BELOW:
            learned = min(body, learned)
        elif place is Place.ABOVE:
            learned = max(body, learned)
        return Estimate(
            time_us=analytic.time_us if learned == body else launch + learned,
            terms=analytic.terms,
            analytic_us=analytic.time_us,
            low_us=launch + learned * math.exp(-width),
            high_us=launch + learned * math.exp(width),
        )

    def to_json(self) -> str:
        """The residual as text: equal residuals give equal text."""
        data = {
            "version": RESIDUAL_VERSION,
            "device": self.device,
            "profile": self.profile,
            "features_version": FEATURES_VERSION,
            "features": list(FEATURES),
            "source": dict(self.source),
            "figures": {k: round(v, 4) for k, v in sorted(self.figures.items())},
            "wide": round(self.wide, 4),
            "intervals": self.intervals.to_json(),
            "ratios": {k: np.round(v, 4).tolist() for k, v in sorted(self.ratios.items())},
            "trees": self.trees.to_json(),
            "hull": self.hull.to_json(),
        }
        lines = (f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in data.items())
        return "{" + ",\n".join(lines) + "}\n"

    @staticmethod
    def from_json(text: str, where: str = "residual") -> Residual:
        """Reads `to_json` back.

        Raises
        ------
        InputError
            It is no residual, or one of other features.
        """
        try:
            data = json.loads(text)
            version = data["version"], data["features_version"], data["features"]
            if version != (RESIDUAL_VERSION, FEATURES_VERSION, list(FEATURES)):
                raise InputError(
                    f"{where}: made for other features (version {data['features_version']}, this "
                    f"program has {FEATURES_VERSION}); make it again with `calibrate --refit`"
                )
            return Residual(
                str(data["device"]),
                str(data["profile"]),
                Trees.from_json(data["trees"]),
                Hull.from_json(data["hull"]),
                Intervals.from_json(data["intervals"]),
                float(data["wide"]),
                {k: np.array(v, float) for k, v in data["ratios"].items()},
                data["figures"],
                data["source"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}: no residual: {error!r}; make it again with `calibrate --refit`"
            ) from error


def residual_file(hw: HardwareProfile) -> Traversable:
    """Where a device's residual lies: beside its profile, `h200.toml` -> `h200.residual.json`."""
    profile = file_of(hw)
    name = profile.name.removesuffix(".toml") + ".residual.json"
    return profile.with_name(name) if isinstance(profile, Path) else profile.parent / name


def load_residual(hw: HardwareProfile, file: Path | Traversable | None = None) -> Residual | None:
    """The residual of a device, or None if it has none that can be used.

    Parameters
    ----------
    hw : HardwareProfile
    file : path or None
        None takes the one beside the profile, else the shipped one of the device's name.

    Notes
    -----
    A residual that was made for other features, another device or other numbers of the profile
    corrects errors that the analytic model no longer makes: it is not used, and a warning and the
    report (`unused_residual`) say so.
    """
    return _found(hw, file)[0]


def unused_residual(hw: HardwareProfile, file: Path | Traversable | None = None) -> str | None:
    """Why a residual that the device has is not used; None if it has none or it is."""
    return _found(hw, file)[1]


def _found(
    hw: HardwareProfile, file: Path | Traversable | None
) -> tuple[Residual | None, str | None]:
    files = [residual_file(hw), shipped_file(f"{hw.name}.residual.json")]
    file = next((f for f in files if f.is_file()), None) if file is None else file
    if file is None or not file.is_file():
        return None, None
    stamp = file.stat().st_mtime_ns if isinstance(file, Path) else 0
    return _load(file, stamp, hw.name, hw.fingerprint())


@lru_cache(maxsize=8)
def _load(file: Any, stamp: int, device: str, profile: str) -> tuple[Residual | None, str | None]:
    """A residual, or why it is not used."""
    try:
        residual, why = Residual.from_json(file.read_text(encoding="utf-8"), str(file)), ""
    except (InputError, OSError, UnicodeDecodeError) as error:
        residual, why = None, str(error)
    if residual is not None and residual.device != device:
        why = f"{file} is of {residual.device}, not of {device}"
    elif residual is not None and residual.profile != profile:
        why = f"the profile's numbers have changed since {file} was made"
        why += "; make it again with `calibrate --refit`"
    if why:
        logger.warning("the learned residual is not used: %s", why)
        return None, why
    return residual, None


def _beyond_noise(log: float) -> float:
    """What is left of a correction beside noise; it never falls where the correction rises."""
    return math.copysign(max(0.0, abs(log) - OWN_NOISE), log)
