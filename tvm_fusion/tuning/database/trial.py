"""Trial: one way to write a kernel, tried once, and what came of it."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

KINDS = ("class", "trace")
STATUSES = ("ok", "build", "crash", "timeout", "memory", "wrong", "error")
LASTING = ("ok", "wrong")  # said of the kernel, not of the state of the machine
MOST_US = 1e9  # no launch takes a quarter of an hour; MetaSchedule writes 1e10 s for a failure
_CLASS_TEXT = re.compile(r"[ !#-&(-\[\]-~]{1,4096}")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial of one choice.

    Attributes
    ----------
    kind : "class" or "trace"
        A configuration of a kernel class, or a MetaSchedule trace.
    text : str
        The choice, such as ``RowConfig(form=reg,threads=256)`` or ``default``, in ASCII without
        quotes and backslashes; for a trace the compact JSON of `Trace.as_json()`.
    status : str
        "ok", or why there is no time: one of `STATUSES`, with words in `why`.
    us, samples_us : float or None, tuple of float
        Microseconds of an "ok" trial: the median, and all.
    spread : float or None
        Of the samples, relative to their median.
    error : float or None
        Largest error relative to max|reference|; None where nothing is compared or an output is
        not finite.
    predicted_us : float or None
    date : str
        ISO day; today by default.

    Raises
    ------
    ValueError
        A field has a value that no trial has: an infinite time, a failure with a time, ...
    """

    kind: str
    text: str
    status: str
    us: float | None = None
    spread: float | None = None
    samples_us: tuple[float, ...] = ()
    error: float | None = None
    predicted_us: float | None = None
    why: str = ""
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("status", STATUSES)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} = {value!r} is none of {', '.join(allowed)}")
        check_text(self.kind, self.text)
        for name in ("us", "spread", "error", "predicted_us"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _number(name, getattr(self, name)))
        samples = self.samples_us
        if isinstance(samples, str | bytes) or not isinstance(samples, Iterable):
            raise ValueError(f"samples_us = {samples!r} is no sequence of numbers")
        object.__setattr__(self, "samples_us", tuple(_number("samples_us", x) for x in samples))
        self._check_numbers()
        if not isinstance(self.why, str):
            raise ValueError(f"why = {self.why!r} is no text")
        if not isinstance(self.date, str) or not _DAY.fullmatch(self.date):
            raise ValueError(f"date = {self.date!r} is no ISO day such as 2026-01-31")
        datetime.date.fromisoformat(self.date)

    def _check_numbers(self) -> None:
        times = (*self.samples_us, *(() if self.us is None else (self.us,)))
        if strange := [us for us in times if not 0 < us < MOST_US]:
            raise ValueError(f"a time of {strange[0]} us is not between 0 and {MOST_US:g} us")
        if self.ok and (self.us is None or not self.samples_us):
            raise ValueError("an ok trial has a median and samples")
        if not self.ok and times:
            raise ValueError(f"a trial with status {self.status!r} has no times")
        if self.predicted_us is not None and self.predicted_us <= 0:
            raise ValueError(f"predicted_us = {self.predicted_us} is not greater than 0")
        for name in ("spread", "error"):
            if (getattr(self, name) or 0.0) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} is negative")

    @property
    def ok(self) -> bool:
        """Whether it has a time."""
        return self.status == "ok"

    @property
    def checked(self) -> bool:
        """Whether it counts as measured: False for a time taken over from MetaSchedule's files,
        whose numbers nobody compared. Nothing is chosen by it, and tuning measures it again.
        """
        return not self.ok or self.error is not None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return found | {"samples_us": list(self.samples_us)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The inverse of `as_dict`; ValueError for anything else."""
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise ValueError(f"fields {sorted(names ^ set(data))} are missing or not of a trial")
        return cls(**data)


def check_text(kind: str, text: str) -> None:
    """ValueError unless the text of a choice comes back from JSON and from TVM as it is.

    The one check of a trace's form: whether TVM takes it is found by replaying it, in a process of
    its own where nobody vouches for it (`foreign`).
    """
    if not isinstance(text, str):
        raise ValueError(f"text = {text!r} is no text")
    if kind == "class":
        if not _CLASS_TEXT.fullmatch(text):
            raise ValueError(
                f"text = {text[:80]!r}: the text of a class choice is 1 to 4096 ASCII characters "
                "without quotes and backslashes"
            )
        return
    try:
        trace = json.loads(text)
        same = json.dumps(trace, separators=(",", ":"), allow_nan=False) == text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"text = {text[:80]!r} is no JSON: {error}") from error
    if not same:
        raise ValueError(f"text = {text[:80]!r} is not compact JSON")
    if not (isinstance(trace, list) and [type(x) for x in trace] == [list, list]):
        raise ValueError(f"text = {text[:80]!r} is no trace: instructions and decisions")


def _number(name: str, value: Any) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise ValueError(f"{name} = {value!r} is not a finite number")
