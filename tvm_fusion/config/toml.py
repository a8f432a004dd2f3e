"""Strict reading of TOML into dataclasses: no unknown key, no missing value, no bare number."""

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, field, fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError
from ..host.text_files import read_text


def number(unit: str, least: float = -math.inf) -> Any:
    """Field of a number that a TOML file gives as {value, unit, source}; who reads it checks that
    it is not below `least`.
    """
    return field(metadata={"unit": unit, "least": least})


def table(unit: str) -> Any:
    """Field of a mapping from names to numbers of one unit and one source."""
    return field(metadata={"unit": unit, "table": True}, hash=False)


def lists() -> Any:
    """Field of lists of whole numbers by name, none by default: as pairs of a name and a tuple."""
    return field(default=(), metadata={"lists": True})


def config_folder() -> Traversable:
    """configs/ inside the installed package, or beside the package in a source checkout."""
    installed = resources.files("tvm_fusion") / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def read_toml(file: Traversable) -> dict[str, Any]:
    """Read a TOML file, or raise ConfigError."""
    try:
        return tomllib.loads(read_text(file, "TOML", ConfigError))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not a TOML file: {error}; mend that line") from error


def parse(cls: type, data: dict[str, Any], where: str, strict: bool, partial: bool) -> dict:
    """Check `data` against the fields of `cls`; `strict` asks for {value, unit, source} tables."""
    known = {f.name: f for f in fields(cls)}
    for key in data:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, known)}")
    missing = [k for k in known if k not in data and known[k].default is MISSING]
    if missing and not partial:
        raise ConfigError(f"{where}: missing {', '.join(missing)}; add what is missing")
    return {k: _value(known[k], v, f"{where}: {k}", strict) for k, v in data.items()}


def _value(spec: Any, raw: Any, where: str, strict: bool) -> Any:
    unit = spec.metadata.get("unit")
    if spec.metadata.get("lists"):
        return _lists(raw, where)
    if unit is None:
        return _plain(spec.type, raw, where)
    if isinstance(raw, Mapping):
        raw = _unwrap(raw, unit, where)
    elif strict:
        raise ConfigError(f"{where}: write it as {{ value = ..., unit = {unit!r}, source = ... }}")
    if spec.metadata.get("table"):
        if not isinstance(raw, Mapping) or not raw:
            raise ConfigError(f"{where}: expected a table of numbers, got {raw!r}")
        return MappingProxyType({k: _plain(float, v, f"{where}.{k}") for k, v in raw.items()})
    return _plain(spec.type, raw, where)


def _lists(raw: Any, where: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = dict(raw) if isinstance(raw, Mapping | tuple) else None
    if found is None:
        raise ConfigError(f"{where}: expected a table of lists of whole numbers, got {raw!r}")
    for name, numbers in found.items():
        many = isinstance(numbers, list | tuple) and bool(numbers)
        if not many or not all(type(n) is int and n > 0 for n in numbers):
            raise ConfigError(
                f"{where}.{name}: expected a list of whole numbers above 0, got {numbers!r}"
            )
    return tuple((str(name), tuple(sorted(set(found[name])))) for name in sorted(found))


def _unwrap(raw: Mapping[str, Any], unit: str, where: str) -> Any:
    parts = ("value", "unit", "source")
    for key in raw:
        if key not in parts:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, parts)}")
    for key in parts:
        if key not in raw:
            raise ConfigError(f"{where}: {key} is missing; add it")
    if raw["unit"] != unit:
        raise ConfigError(f"{where}: unit must be {unit!r}, not {raw['unit']!r}")
    if not isinstance(raw["source"], str) or not raw["source"].strip():
        raise ConfigError(
            f"{where}: source must say where the number is from"
            "; write a datasheet, or a measurement with its date"
        )
    return raw["value"]


def _plain(kind: Any, raw: Any, where: str) -> Any:
    """`raw` as `kind` (int, float, str, bool, tuple of str), or ConfigError."""
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if kind is int and isinstance(raw, float) and raw.is_integer():
        return int(raw)
    if kind == tuple[str, ...] and isinstance(raw, list | tuple):
        return tuple(_plain(str, item, where) for item in raw)
    if isinstance(kind, type) and type(raw) is kind:
        return raw
    raise ConfigError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {raw!r}")


def number_fields(cls: type) -> list:
    """Return the dataclass fields that hold numbers."""
    return [f for f in fields(cls) if "unit" in f.metadata]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest known name, or ""."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def fingerprint(value: Any, without: tuple[str, ...] = ()) -> str:
    """Return a hash of the fields of a dataclass: equal for equal values."""
    names = [f.name for f in fields(value) if f.name not in without]
    data = {n: getattr(value, n) for n in names}
    text = json.dumps(data, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
