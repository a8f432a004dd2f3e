"""Lines of ``guard.jsonl``: what is known of the lines of MetaSchedule's files, with a checksum.

    {"line":"device", ...}    the first line: device and target
    {"line":"workload", ...}  hash, digest and line number of a line of database_workload.json
    {"line":"trial", ...}     a trial with the hash of its workload; for an "ok" one the digest of
                              its record in database_tuning_record.json, without the line number

A trial's line holds all that its record is made of. It is written first, so that a record that is
missing or damaged is written again from it; for a failed trial there is nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..measure.trial_record import Trial
from .lines import BadLine, WorkloadLine, canonical, digest, is_key, parse

GUARD = "guard.jsonl"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial in a database: of which workload, and the digest of its record if it has one."""

    workload: str
    trial: Trial
    record: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """What a folder is of; the target as JSON, None while nothing is known of it."""

    device: str
    target: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Place:
    """The digest of a workload's line and its number in the file."""

    workload: str
    digest: str
    index: int


def tag(device: str) -> str:
    """What lines carry of the name of the device."""
    return digest(device)[:8]


def device_line(device: str, target: dict[str, Any] | None) -> str:
    """The first line."""
    return _line({"line": "device", "device": device, "target": target})


def workload_line(device: str, workload: WorkloadLine, index: int) -> str:
    """The line of a workload."""
    body = {"workload": workload.key, "digest": workload.digest, "index": index}
    return _line({"line": "workload", "device": tag(device), **body})


def trial_line(device: str, entry: Entry) -> str:
    """The line of a trial."""
    body = {"workload": entry.workload, "record": entry.record, **entry.trial.as_dict()}
    return _line({"line": "trial", "device": tag(device), **body})


def _line(body: dict[str, Any]) -> str:
    body = {"v": VERSION, **body}
    return canonical({**body, "checksum": digest(canonical(body))})


def parse_guard(raw: bytes, device: str | None) -> DeviceLine | Place | Entry:
    """What a line says; BadLine if it is damaged, or a line of another device than `device`."""
    body = parse(raw)
    if not isinstance(body, dict):
        raise BadLine("not an object")
    checksum = body.pop("checksum", None)
    if checksum != digest(canonical(body)):
        raise BadLine("the checksum is missing" if checksum is None else "the checksum is wrong")
    if body.pop("v", None) != VERSION:
        raise BadLine("of another version of the format")
    kind = body.pop("line", None)
    if kind == "device":
        return _device(body)
    if device is not None and body.get("device") != tag(device):
        raise BadLine("of another device")
    body.pop("device", None)
    if not is_key(body.get("workload")):
        raise BadLine("no structural hash of a workload")
    if kind == "workload":
        return _place(body)
    if kind == "trial":
        return _entry(body)
    raise BadLine(f"a line of kind {kind!r}")


def other_version(raw: bytes) -> int | None:
    """The version of a sound line of another version of the format; None for any other line."""
    try:
        body = parse(raw)
    except BadLine:
        return None
    if not isinstance(body, dict):
        return None
    sound = body.pop("checksum", None) == digest(canonical(body))
    version = body.get("v")
    return version if sound and isinstance(version, int) and version != VERSION else None


def _device(body: dict[str, Any]) -> DeviceLine:
    if set(body) != {"device", "target"} or not isinstance(body["device"], str):
        raise BadLine("not the description of a device")
    if not isinstance(body["target"], dict | None):
        raise BadLine("the target is not an object")
    return DeviceLine(body["device"], body["target"])


def _place(body: dict[str, Any]) -> Place:
    types = {name: type(value) for name, value in body.items()}
    if types != {"workload": str, "digest": str, "index": int} or body["index"] < 0:
        raise BadLine("not the description of a workload's line")
    return Place(**body)


def _entry(body: dict[str, Any]) -> Entry:
    workload, record = body.pop("workload"), body.pop("record", None)
    if not isinstance(record, str | None):
        raise BadLine("the digest of the record is no text")
    try:
        trial = Trial.from_dict(body)
    except (ValueError, TypeError) as error:
        raise BadLine(f"no trial: {error}") from error
    return Entry(workload, trial, record)
