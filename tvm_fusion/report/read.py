"""Reads a report's JSON back, so that every view can be made of what a command printed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import InputError
from ..host.text_files import read_json as read_file
from ..plan.search.bound import Bound
from .facts import FORMAT_VERSION
from .screen import FunctionReports, Report


def read_json(path: str | Path) -> Mapping[str, Any]:
    """The JSON of a report, or of several functions' reports, in a file.

    Raises
    ------
    InputError
        The file cannot be read, or holds no report of this version.
    """
    return require_report(read_file(path, "report"), path)


def require_report(data: Any, path: str | Path) -> Mapping[str, Any]:
    """What a file holds, where it is a report of this version; raises InputError."""
    if not isinstance(data, dict) or not {"groups", "functions"} & data.keys():
        raise InputError(f"{path} is no report: `explain --json` and `compile --json` print one")
    if data.get("version") != FORMAT_VERSION:
        raise InputError(
            f"{path} is a report of version {data.get('version')}, and this package reads version "
            f"{FORMAT_VERSION}: make it anew"
        )
    return data


def report_of(data: Mapping[str, Any]) -> Report | FunctionReports:
    """The report that `Report.to_json` or `FunctionReports.to_json` gave; it gives the same again.

    Raises
    ------
    InputError
        Something that every report has is not there, or is of another kind.
    """
    try:
        if "functions" not in data:
            return _report(data)
        functions = data["functions"].items()
        return FunctionReports(
            {n: f if isinstance(f, str) else f and _report(f) for n, f in functions}
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"no whole report: {error}; give what --json printed") from error


def _report(data: Mapping[str, Any]) -> Report:
    texts = data.get("sources") or {}
    bound = _value(Bound, data.get("bound"))
    return _value(Report, {**data, "bound": bound, "sources": lambda: texts})


def _value(kind: Any, data: Any) -> Any:
    """A value of a type from its JSON; what a dataclass lacks (sums, ratios) is left out."""
    arguments = [a for a in get_args(kind) if a is not NoneType]
    if data is None or callable(data):
        return data
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        known = [f.name for f in fields(kind) if f.name in data]
        return kind(**{name: _value(kinds[name], data[name]) for name in known})
    if get_origin(kind) is UnionType:
        return _value(arguments[0], data) if len(arguments) == 1 else data
    if get_origin(kind) is tuple:
        return tuple(_value(arguments[0], item) for item in data)
    if get_origin(kind) is Mapping:
        return {key: _value(arguments[1], item) for key, item in data.items()}
    return data
