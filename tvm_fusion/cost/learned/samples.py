"""Measured kernels in a file: one JSON object a line, nothing in it that can be computed again.

The first line is a header::

    {"version": 1, "device": "nvidia_h200", "date": "2026-11-20", "driver": ..., "cuda": ...,
     "tvm": ..., "command": ...}

Every other line is a measured launch (`Sample`) or a measured plan (`PlanSample`). A launch is
named by its operators, the tensors it stores and a key of its graph, such as "random:9" (see
`GraphOf` of `training_rows`); the features of the learned residual are computed from the graph
again, so that new features need no new measurements. A launch of a graph that no key stands for
carries its `work`: the numbers that the kernel class gave for it (`cost.learned.samples`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...config import HardwareProfile
from ...errors import InputError
from ...host.atomic_files import replace_file
from ...kernels.base import Fit
from ..analytic import estimate
from ..traffic import Resources, Traffic
from .features import Query

# A launch as plain numbers, for measurements of graphs that no key stands for.

WORK_VERSION = 1
_PARTS = {"fit": Fit, "traffic": Traffic, "resources": Resources}


def work_of(fit: Fit, traffic: Traffic, resources: Resources) -> dict[str, Any]:
    """What a line of a sample file holds as `work`."""
    parts = {"fit": fit, "traffic": traffic, "resources": resources}
    return {"version": WORK_VERSION, **{name: _plain(part) for name, part in parts.items()}}


def query_of(work: Mapping[str, Any], kernel_class: str, hw: HardwareProfile) -> Query:
    """The launch again, with its analytic estimate by the present model.

    Raises
    ------
    ValueError
        The work is of another version, or broken.
    """
    if work.get("version") != WORK_VERSION:
        raise ValueError(
            f"work of version {work.get('version')!r}, this program reads {WORK_VERSION}"
        )
    try:
        parts = {name: _part(cls, work[name]) for name, cls in _PARTS.items()}
        cost = estimate(parts["traffic"], parts["resources"], hw, "graph")
        return Query(kernel_class, **parts, estimate=cost)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"broken work: {error!r}") from error


def _plain(part: Any) -> dict[str, Any]:
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _part(cls: type, data: Mapping[str, Any]) -> Any:
    known = {f.name for f in fields(cls)}
    if data.keys() != known:
        raise ValueError(f"the fields of {cls.__name__} have changed")
    return cls(**{k: _tuples(v) for k, v in data.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


SAMPLES_VERSION = 1
HEADER_KEYS = ("version", "device", "date", "driver", "cuda", "tvm", "command")
FOLDS = 5
HELD_OUT = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured launch.

    Attributes
    ----------
    graph : key of the graph
    kernel_class : str
    us : median kernel time among the other launches of its plan
    ops, stores : names of the bindings it computes and of the tensors it writes
    recomputed : those of `ops` that another launch of the plan owns
    rewrites : rewrites of the graph before it was planned
    cold_us : median time alone, the L2 cleaned before each run
    spread : interquartile range of the times over their median
    registers, spill_bytes, smem_bytes, code_bytes : of the kernel as it was built
    context : how many of its inputs a launch before it had just written
    work : plain numbers of `cost.learned.samples`, for a graph without a key
    """

    graph: str
    kernel_class: str
    us: float
    ops: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    cold_us: float | None = None
    spread: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    smem_bytes: int | None = None
    code_bytes: int | None = None
    context: int | None = None
    work: Mapping[str, Any] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class PlanSample:
    """One measured plan of a graph: `span_us` from the start of its first launch to the end of the
    last, `sum_us` of the kernel times.
    """

    graph: str
    groups: tuple[tuple[str, ...], ...]
    span_us: float
    sum_us: float
    recomputed: tuple[tuple[str, ...], ...] = ()
    rewrites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something of a file that could not be used."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, slots=True)
class SampleSet:
    """What one or several files hold; `problems` are the lines that were set aside."""

    device: str
    headers: tuple[Mapping[str, Any], ...] = field(hash=False)
    launches: tuple[Sample, ...] = ()
    plans: tuple[PlanSample, ...] = ()
    problems: tuple[Problem, ...] = ()

    def only(self, graphs: Iterable[str]) -> SampleSet:
        """The samples of some graphs."""
        wanted = frozenset(graphs)
        launches = tuple(s for s in self.launches if s.graph in wanted)
        plans = tuple(p for p in self.plans if p.graph in wanted)
        return SampleSet(self.device, self.headers, launches, plans)


def fold_of(graph: str, folds: int = FOLDS) -> int:
    """The part of the data that a graph and all its launches belong to; fold `HELD_OUT` is never
    trained on. The same in every process.
    """
    digest = hashlib.sha256(graph.encode()).digest()
    return int.from_bytes(digest[:8], "big") % folds


def read_samples(*files: str | Path) -> SampleSet:
    """Reads sample files of one device as one set; launches that were measured twice stay once, as
    they were measured last.

    Raises
    ------
    InputError
        A file cannot be read, has no header of this version, or is of another device. A broken line
        raises nothing: it is among the problems.
    """
    if not files:
        raise InputError("no sample files were given; name what `--measure` kept")
    read = [_read(Path(file)) for file in files]
    devices = list(dict.fromkeys(s.device for s in read))
    if len(devices) > 1:
        raise InputError(
            f"samples of several devices cannot be mixed: {', '.join(devices)}; refit each by "
            "itself"
        )
    launches = {_identity(s): s for part in read for s in part.launches}
    plans = {(p.graph, p.rewrites, p.groups, p.recomputed): p for r in read for p in r.plans}
    return SampleSet(
        devices[0],
        tuple(h for part in read for h in part.headers),
        tuple(launches.values()),
        tuple(plans.values()),
        tuple(p for part in read for p in part.problems),
    )


def write_samples(file: str | Path, samples: SampleSet) -> None:
    """Writes a set to one file, which is complete or not there at all.

    Of the headers of merged files the first one leads, the others are kept under `merged`.
    """
    header = dict(samples.headers[0])
    if len(samples.headers) > 1:
        header["merged"] = [dict(h) for h in samples.headers[1:]]
    lines = [header, *map(_to_json, samples.launches), *map(_to_json, samples.plans)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    replace_file(Path(file), text)


def _read(file: Path) -> SampleSet:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(
            f"{file}: cannot read the samples: {error.strerror}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}: not a text file: {error}; name a file that `--measure` kept"
        ) from error
    header = _header(file, lines[0] if lines else "")
    launches, plans, problems = [], [], []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            found = _sample(json.loads(line))
        except (ValueError, RecursionError) as error:
            problems.append(Problem(f"{file.name}:{number}", str(error)))
            continue
        (launches if isinstance(found, Sample) else plans).append(found)
    return SampleSet(header["device"], (header,), tuple(launches), tuple(plans), tuple(problems))


def _header(file: Path, line: str) -> Mapping[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or "version" not in header:
        raise InputError(
            f"{file}: the first line is no header of a sample file"
            "; name a file that `--measure` kept"
        )
    if header["version"] != SAMPLES_VERSION:
        raise InputError(
            f"{file}: samples of version {header['version']!r}, this program reads version "
            f"{SAMPLES_VERSION}"
            "; measure them again"
        )
    missing = [key for key in HEADER_KEYS if key not in header]
    if missing:
        raise InputError(
            f"{file}: the header does not give {', '.join(missing)}; measure them again"
        )
    if not isinstance(header["device"], str) or not header["device"]:
        raise InputError(f"{file}: the header names no device; measure them again")
    return header


def _sample(data: Any) -> Sample | PlanSample:
    """One line as a sample; ValueError says what is wrong with it."""
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, got {type(data).__name__}")
    cls, names = (PlanSample, {}) if "groups" in data else (Sample, {"class": "kernel_class"})
    known = {f.name: f for f in fields(cls)}
    given = {names.get(key, key): value for key, value in data.items()}
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    values = {key: _value(key, known[key].type, value) for key, value in given.items()}
    try:
        sample = cls(**values)
    except TypeError as error:
        raise ValueError(str(error).partition("() ")[2]) from error
    _check(sample)
    return sample


def _value(key: str, kind: str, value: Any) -> Any:
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple[tuple"):
        return tuple(_names(key, group) for group in _list(key, value))
    if kind.startswith("tuple"):
        return _names(key, value)
    if kind.startswith("Mapping"):
        if not isinstance(value, dict):
            raise ValueError(f"{key} is no object")
        return value
    if kind == "str":
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key} is no name: {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is no number: {value!r}")
    if value < 0 or (kind.startswith("int") and value != int(value)):
        raise ValueError(f"{key} = {value!r} is not possible")
    return int(value) if kind.startswith("int") else float(value)


def _list(key: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{key} is no list")
    return value


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in _list(key, value)):
        raise ValueError(f"{key} holds something that is no name")
    return tuple(value)


def _check(sample: Sample | PlanSample) -> None:
    if isinstance(sample, PlanSample):
        if not sample.groups or not sample.span_us > 0:
            raise ValueError("a plan without launches, or without time")
        return
    if not sample.us > 0:
        raise ValueError(f"us = {sample.us} is not possible")
    if sample.work is None and not (sample.ops and sample.stores):
        raise ValueError("a launch needs ops and stores, or its work")
    if not set(sample.recomputed) <= set(sample.ops):
        raise ValueError("recomputed names operators that ops does not")


def _identity(sample: Sample) -> tuple:
    work = json.dumps(sample.work, sort_keys=True) if sample.work is not None else ""
    key = (sample.graph, sample.rewrites, sample.ops, sample.stores, sample.recomputed, work)
    return (*key, sample.context)


def _to_json(sample: Sample | PlanSample) -> dict[str, Any]:
    found = {}
    for f in fields(sample):
        value = getattr(sample, f.name)
        if value is None or value == ():
            continue
        found["class" if f.name == "kernel_class" else f.name] = value
    return found
