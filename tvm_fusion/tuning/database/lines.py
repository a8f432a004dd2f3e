"""Lines of a store: JSON objects, each with a checksum over all else in it.

{"v":2, "line":"device",   "device":<name>, "target":{...}, "checksum":...}      the first line
{"v":2, "line":"workload", "device":<tag>, "workload":<structural hash>, "module":<base64>, ...}
{"v":2, "line":"trial",    "device":<tag>, "workload":<structural hash>, <fields of Trial>, ...}
{"v":2, "line":"plan",     "device":<tag>, "key":..., "plan":{...}, ...}         the last counts
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InputError
from .trial import Trial

VERSION = 2
TWICE = "the line is there twice"
_NUMBER = re.compile(r"0|[1-9]\d{0,19}", re.ASCII)


class BadLine(ValueError):
    """A line that is not what its file holds; `version` is that of a sound line of another version
    of the format.
    """

    version: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the files of a database; the `remedy` is what tuning does about it, such
    as "taken out", and `mended` whether that is done.
    """

    where: str
    why: str
    remedy: str = ""
    mended: bool = False

    def __str__(self) -> str:
        if not self.remedy:
            return f"{self.where}: {self.why}"
        done = self.remedy if self.mended else f"would be {self.remedy} by the next tune"
        return f"{self.where}: {self.why}; {done}"


def canonical(value: Any) -> str:
    """The one JSON text of a value: sorted, compact, ASCII; ValueError for inf and nan."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """16 hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity(target: Mapping[str, Any]) -> dict[str, Any]:
    """What of a target decides which kernels are fast: all but its host and its tag."""
    return {name: value for name, value in target.items() if name not in ("host", "tag")}


def is_key(value: Any) -> bool:
    """Whether a value is the decimal text of a structural hash."""
    is_number = isinstance(value, str) and _NUMBER.fullmatch(value)
    return bool(is_number) and int(value) < 1 << 64


def parse(raw: bytes) -> Any:
    """The JSON value of a line, all its numbers finite; BadLine for anything else."""
    if not raw.strip():
        raise BadLine("a blank line")
    try:
        value = json.loads(raw.decode("utf-8"))
        canonical(value)
    except UnicodeDecodeError as error:
        raise BadLine("not text in UTF-8") from error
    except RecursionError as error:
        raise BadLine("JSON that is nested too deeply") from error
    except ValueError as error:
        raise BadLine(f"not JSON of finite numbers ({error})") from error
    return value


def unpack(raw: bytes, version: int = VERSION) -> dict[str, Any]:
    """What a line says, without version and checksum; BadLine if it is damaged."""
    body = parse(raw)
    if not isinstance(body, dict):
        raise BadLine("not an object")
    checksum = body.pop("checksum", None)
    if checksum != digest(canonical(body)):
        raise BadLine("the checksum is missing" if checksum is None else "the checksum is wrong")
    if (found := body.pop("v", None)) != version:
        error = BadLine("of another version of the format")
        error.version = found
        raise error
    return body


def check_version(folder: Path, error: BadLine) -> None:
    """InputError for a first line of a version of the format that cannot be read."""
    if isinstance(error.version, int):
        raise InputError(
            f"{folder} has version {error.version} of the format, and this tvm_fusion reads "
            f"version {VERSION}: use the tvm_fusion that made it, or tune into another folder"
        )


def _pack(kind: str, device: str, /, **body: Any) -> str:
    """The line of `unpack`, with its end; names keep their order."""
    body = {"v": VERSION, "line": kind, "device": device, **body}
    body["checksum"] = digest(canonical(body))
    return json.dumps(body, separators=(",", ":"), allow_nan=False) + "\n"


def _tag(device: str) -> str:
    """What lines carry of the name of the device."""
    return digest(device)[:8]


@dataclass(slots=True)
class Content:
    """What lines tell, in their order: base64 of modules by the key of the workload, trials with
    these keys (as keys of a dict without values), plans by key. `device` and `target` (as JSON) are
    those of the store, and `head` what the last line of a device says of them; None is unknown.
    """

    device: str | None = None
    target: dict[str, Any] | None = None
    head: tuple[str, dict[str, Any] | None] | None = None
    workloads: dict[str, str] = field(default_factory=dict)
    entries: dict[tuple[str, Trial], None] = field(default_factory=dict)
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, body: dict[str, Any]) -> None:
        """Add what a line says (`unpack`).

        Raises
        ------
        BadLine
            It makes no sense, is there already, or is a line of another device.
        InputError
            It is the first of a device, and of another device or target than the store.
        """
        match body:
            case {"line": "device", "device": str(device), "target": dict() | None as target}:
                self._name(device, target)
            case {"device": found} if self.device is not None and found != _tag(self.device):
                raise BadLine("of another device")
            case {"line": "workload", "workload": key, "module": str(module)} if is_key(key):
                if key in self.workloads:
                    raise BadLine(TWICE)
                self.workloads[key] = module
            case {"line": "trial", "device": _, "workload": key, **fields} if is_key(key):
                try:
                    entry = key, Trial.from_dict(fields)
                except (ValueError, TypeError) as error:
                    raise BadLine(f"no trial: {error}") from error
                if entry in self.entries:
                    raise BadLine(TWICE)
                self.entries[entry] = None
            case {"line": "plan", "key": str(key), "plan": dict(plan)}:
                self.plans[key] = plan
            case _:
                raise BadLine(f"no line of kind {body.get('line')!r}")

    def _name(self, device: str, target: dict[str, Any] | None) -> None:
        if (device, target) == self.head:
            raise BadLine(TWICE)
        if self.head is not None and device != self.device:
            raise BadLine("of another device")
        if self.device not in (None, device):
            raise InputError(
                f"the folder is of {device}, not of {self.device}: trials of one device say "
                "nothing about another; give each its own folder"
            )
        if self.target and target and identity(target) != identity(self.target):
            raise InputError(
                f"the folder is of the target {target}, not of {self.target}: give each target "
                "its own folder"
            )
        self.device, self.target = device, target or self.target
        self.head = device, target

    def update(self, more: Content) -> None:
        """Add workloads, trials and plans of another content."""
        self.workloads.update(more.workloads)
        self.entries.update(more.entries)
        self.plans.update(more.plans)

    def lines(self, more: Content) -> list[str]:
        """The lines, with their ends, of what another content has and this one lacks."""
        device, known = self.device or "", self.workloads
        mark, head = _tag(device), (device, self.target)
        found = [] if head == self.head else [_pack("device", device, target=self.target)]
        for key, module in more.workloads.items():
            if key not in known:
                found.append(_pack("workload", mark, workload=key, module=module))
        for key, trial in more.entries:
            if (key, trial) not in self.entries:
                found.append(_pack("trial", mark, workload=key, **trial.as_dict()))
        for key, plan in more.plans.items():
            if self.plans.get(key) != plan:
                found.append(_pack("plan", mark, key=key, plan=plan))
        return found
