"""Lines of a store: JSON objects, each with a checksum over all else in it.

{"v":2, "line":"device",   "device":<name>, "target":{...}, "checksum":...}      the first line
{"v":2, "line":"workload", "device":<tag>, "workload":<structural hash>, "module":<base64>, ...}
{"v":2, "line":"trial",    "device":<tag>, "workload":<structural hash>, <fields of Trial>, ...}
{"v":2, "line":"plan",     "device":<tag>, "key":..., "plan":{...}, ...}         the last counts
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError
from ..measure.trial_record import Trial

VERSION = 2
TWICE = "the line is there twice"


class BadLine(ValueError):
    """A line that is not what its file holds; the message says why.

    Attributes
    ----------
    version : int or None
        That of a sound line of another version of the format.
    """

    def __init__(self, why: str, version: int | None = None) -> None:
        super().__init__(why)
        self.version = version


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the files of a database.

    Attributes
    ----------
    where, why : str
    remedy : str
        What tuning does about it, such as "taken out"; empty where it stays as it is.
    mended : bool
        Whether that is done.
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


def tag(device: str) -> str:
    """What lines carry of the name of the device."""
    return digest(device)[:8]


def identity(target: Mapping[str, Any]) -> dict[str, Any]:
    """What of a target decides which kernels are fast: all but its host and its tag."""
    return {name: value for name, value in target.items() if name not in ("host", "tag")}


def is_key(value: Any) -> bool:
    """Whether a value is the decimal text of a structural hash."""
    if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20):
        return False
    return str(int(value)) == value and int(value) < 1 << 64


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
        raise BadLine("of another version of the format", found)
    return body


def _pack(kind: str, device: str, /, **body: Any) -> str:
    """The line of `unpack`, with its end; names keep their order."""
    body = {"v": VERSION, "line": kind, "device": device, **body}
    body["checksum"] = digest(canonical(body))
    return json.dumps(body, separators=(",", ":"), allow_nan=False) + "\n"


@dataclass(slots=True)
class Content:
    """What lines tell.

    Attributes
    ----------
    device : str or None
        What the store is of; None where nothing says it.
    target : dict or None
        The target as JSON.
    head : tuple or None
        Device and target as the last line of a device has them.
    workloads : dict
        Base64 of modules by the key of the workload, in the order of the lines.
    entries : dict
        Keys of workloads and trials, in the order of the lines; the values are None.
    plans : dict
        By key.
    """

    device: str | None = None
    target: dict[str, Any] | None = None
    head: tuple[str, dict[str, Any] | None] | None = None
    workloads: dict[str, str] = field(default_factory=dict)
    entries: dict[tuple[str, Trial], None] = field(default_factory=dict)
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, raw: bytes) -> None:
        """Read a line.

        Raises
        ------
        BadLine
            It is damaged, is there already, or is a line of another device.
        InputError
            It is the first of a device, and of another device or target than the store.
        """
        match unpack(raw):
            case {"line": "device", "device": str(device), "target": dict() | None as target}:
                self.name((device, target))
            case {"device": found} if self.device is not None and found != tag(self.device):
                raise BadLine("of another device")
            case {"line": "workload", "workload": key, "module": str(module)} if is_key(key):
                if key in self.workloads:
                    raise BadLine(TWICE)
                self.workloads[key] = module
            case {"line": "trial", "device": _, "workload": key, **fields} if is_key(key):
                entry = key, trial_of(fields)
                if entry in self.entries:
                    raise BadLine(TWICE)
                self.entries[entry] = None
            case {"line": "plan", "key": str(key), "plan": dict(plan)}:
                self.plans[key] = plan
            case body:
                raise BadLine(f"no line of kind {body.get('line')!r}")

    def name(self, head: tuple[str, dict[str, Any] | None]) -> None:
        """Take over what a line says of device and target: see `take`."""
        device, target = head
        if head == self.head:
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
        device = self.device or ""
        mark, head = tag(device), (device, self.target)
        return [
            *([_pack("device", device, target=self.target)] if head != self.head else []),
            *(
                _pack("workload", mark, workload=key, module=module)
                for key, module in more.workloads.items()
                if key not in self.workloads
            ),
            *(
                _pack("trial", mark, workload=key, **trial.as_dict())
                for key, trial in more.entries
                if (key, trial) not in self.entries
            ),
            *(
                _pack("plan", mark, key=key, plan=plan)
                for key, plan in more.plans.items()
                if self.plans.get(key) != plan
            ),
        ]


def trial_of(fields: Mapping[str, Any]) -> Trial:
    """The trial of the fields of a line; BadLine if it is none."""
    try:
        return Trial.from_dict(fields)
    except (ValueError, TypeError) as error:
        raise BadLine(f"no trial: {error}") from error
