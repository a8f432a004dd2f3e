"""A profile's TOML with measured numbers in it: comments, order and all other numbers stay.

    [hbm_bytes_per_s]                         [hbm_bytes_per_s]
    value = 4.27e12                           value = 4.312e12
    unit = "byte/s"                  ->       unit = "byte/s"
    source = "datasheet"                      source = "measured by `tvm_fusion calibrate` ..."

What the benchmarks say beyond the fields of a profile follows as comments behind `NOTES`.
"""

from __future__ import annotations

import datetime
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tvm

from ..config import HardwareProfile
from ..config.toml import number_fields
from ..errors import ConfigError
from ..host.cores import available_cores
from ..runtime.build.cuda_compiler import find_compiler
from .findings import Measured, Number

# What a measurement was made on: date, device, driver, versions.


def described(hw: HardwareProfile) -> str:
    """ "2026-11-20 on NVIDIA H200, driver 570.86, CUDA 12.8, TVM 0.27" and the like."""
    parts = [f"{datetime.date.today().isoformat()} on {_device(hw)}"]
    if hw.kind == "cuda":
        parts += [f"driver {driver_version()}", cuda_version()]
    return ", ".join([*parts, f"TVM {tvm.__version__}"])


def driver_version() -> str:
    """Version of the NVIDIA driver, or "unknown"."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True, errors="replace")
        if run.returncode == 0 and run.stdout.strip():
            return run.stdout.split()[0]
    return _found(r"Kernel Module\D*([\d.]+)", "/proc/driver/nvidia/version") or "unknown"


def cuda_version() -> str:
    """ "CUDA 12.8", as the compiler says, or "CUDA unknown"."""
    compiler = find_compiler()
    found = re.search(r"cuda_([\d.]+)", compiler.version) or re.search(
        r"([\d.]+)", compiler.version
    )
    return f"CUDA {found[1].rstrip('.')}" if found else "CUDA unknown"


def cpu_name() -> str:
    """What the CPU of this machine calls itself."""
    name = _found(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor() or "CPU"
    return " ".join(name.split())


def _device(hw: HardwareProfile) -> str:
    if hw.kind == "cuda":
        return str(tvm.cuda(0).device_name)
    name = cpu_name()
    return f"{available_cores()} cores of {' '.join(name.split())}"


def _found(pattern: str, file: str) -> str | None:
    """What a pattern finds in a file of the system, or None."""
    try:
        match = re.search(pattern, Path(file).read_text(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


NOTES = "# What `tvm_fusion calibrate` measured beside the values above:"
DIGITS = 4


def with_values(text: str, profile: HardwareProfile, values: Sequence[Measured], where: str) -> str:
    """Put measured values into the text of a profile.

    Parameters
    ----------
    text : str
        TOML with a table ``[field]`` for each number.
    profile : HardwareProfile
        What the text says.
    values : sequence of Measured
    where : str
        Date, device and versions, for the sources.

    Raises
    ------
    ConfigError
        A field is unknown, or has no table in the text.
    """
    specs = {f.name: f for f in number_fields(HardwareProfile)}
    for value in values:
        if value.field not in specs:
            raise ConfigError(f"calibrate: there is no number {value.field!r} in a profile")
        old = getattr(profile, value.field)
        source = f"measured by `tvm_fusion calibrate` {where}: {value.how}"
        new = value.value
        if isinstance(old, Mapping):
            kept = [key for key in old if key not in new]
            if kept:
                source += f"; {', '.join(kept)}: {_source(text, value.field)}"
            new = {**old, **new}
        text = _replaced(text, value.field, spelled(new, specs[value.field].type), source)
    return text


def with_notes(text: str, notes: Sequence[str]) -> str:
    """Replace the comments behind `NOTES`."""
    head = text.partition(NOTES)[0].rstrip() + "\n"
    if not notes:
        return head
    return head + "\n" + "\n".join([NOTES, *(f"#   {' '.join(n.split())}" for n in notes)]) + "\n"


def notes_of(text: str) -> list[str]:
    """The comments behind `NOTES`."""
    return [line[1:].strip() for line in text.partition(NOTES)[2].splitlines() if line.strip()]


def spelled(value: Number | Mapping[str, Number], kind: object = float) -> str:
    """A number, or a table of numbers, as TOML; four digits."""
    if isinstance(value, Mapping):
        items = ", ".join(f"{key} = {spelled(number)}" for key, number in value.items())
        return f"{{ {items} }}"
    if kind is int:
        return f"{int(value):_}" if abs(value) >= 10_000 else str(int(value))
    text = f"{float(value):.{DIGITS}g}"
    return text if re.search(r"[.e]", text) else f"{text}.0"


def _tables(text: str, field: str) -> Iterator[re.Match[str]]:
    return re.finditer(rf"^\[{re.escape(field)}\][^\n]*\n(?:(?!\[)[^\n]*\n?)*", text, re.MULTILINE)


def _table(text: str, field: str) -> re.Match[str]:
    found = next(_tables(text, field), None)
    if found is None:
        raise ConfigError(
            f"calibrate: the profile has no table [{field}]; copy it from a profile of configs/"
        )
    return found


def _source(text: str, field: str) -> str:
    found = re.search(r'^source = "(.*)"', _table(text, field)[0], re.MULTILINE)
    return found[1] if found else "unknown"


def _replaced(text: str, field: str, value: str, source: str) -> str:
    table = _table(text, field)
    quoted = source.replace("\\", "\\\\").replace('"', '\\"')
    new = table[0]
    for key, entry in (("value", value), ("source", f'"{quoted}"')):
        line = re.compile(rf"^{key} *=.*$", re.MULTILINE)
        if not line.search(new):
            raise ConfigError(
                f"calibrate: [{field}] has no line that starts with `{key} =`"
                "; write the table a key a line, as in configs/"
            )
        new = line.sub(lambda _, key=key, entry=entry: f"{key} = {entry}", new, count=1)
    return text[: table.start()] + new + text[table.end() :]
