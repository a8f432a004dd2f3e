"""Profiles of GPUs that nobody measured: what a card has, times what its compute capability does.

    NVIDIA L4, 58 multiprocessors at 2.04 GHz       float16 by tensor cores:
    8.9: 512 multiply-adds a clock, 90 % of it  ->  2 * 512 * 0.9 * 58 * 2.04e9 = 1.09e14 flop/s

What a card has is the driver's or NVIDIA's (`cards`); what a multiprocessor does in a clock stands
in `configs/gpu_rates.toml`. Latencies, costs of launches and exponents are those of the profile
that was measured. Each number knows where it is from (`derived_toml`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import ConfigError
from .cards import Card
from .hardware import HardwareProfile
from .toml import config_folder, number_fields, read_toml

FILE = "gpu_rates.toml"

Sourced = tuple[Any, str]
"""A number of a profile, and where it is from."""

_TENSOR_DTYPES = {
    "float16": ("float16", "bfloat16"),
    "tfloat32": ("tfloat32",),
    "float8": ("float8_e4m3fn", "float8_e5m2"),
    "int8": ("int8",),
}
_BY_SM = ("int_div_per_s", "spill_bytes_per_s", "wavefronts_per_s", "blocks_per_s")
_BY_CLOCK = ("code_bytes_per_s", "sm_bytes_per_s")
_RESERVED = 1024
_SMEM_BYTES = 128
"""Of shared memory a clock: 32 banks of 4 bytes, on all capabilities."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A number by compute capability; one that is not there has that of the nearest earlier one."""

    by_capability: tuple[tuple[int, float], ...]
    source: str

    def of(self, capability: int) -> float | None:
        known = [value for number, value in self.by_capability if number <= capability]
        return known[-1] if known else None


def derived_profile(card: Card, measured: HardwareProfile) -> HardwareProfile:
    """The profile of a card, with what nothing says of it as it was `measured`."""
    numbers = {name: value for name, (value, _) in _numbers(card, measured).items()}
    return HardwareProfile(
        name=card.name,
        kind="cuda",
        arch=card.arch,
        description=_description(card),
        aliases=card.aliases,
        derived=f"{card.source}; the rest as {measured.name}",
        **numbers,
    )


def derived_toml(card: Card, measured: HardwareProfile) -> str:
    """The text of a profile's file, each number with its source."""
    units = {f.name: f.metadata["unit"] for f in number_fields(HardwareProfile)}
    head = {"name": card.name, "kind": "cuda", "arch": card.arch}
    head |= {"description": _description(card), "aliases": list(card.aliases)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in head.items()]
    for name, (value, source) in _numbers(card, measured).items():
        lines += [
            "",
            f"[{name}]",
            f"value = {_spelled(value)}",
            f"unit = {json.dumps(units[name])}",
        ]
        lines.append(f"source = {json.dumps(source)}")
    return "\n".join([f"# {_description(card)}", "", *lines, ""])


def measured_name() -> str:
    """The name of the profile that latencies are taken from."""
    return str(_file()["measured"])


def _description(card: Card) -> str:
    return f"{card.gpu}, {card.memory_gb:g} GB, a derived profile"


def _numbers(card: Card, measured: HardwareProfile) -> dict[str, Sourced]:
    found: dict[str, Sourced] = {}
    for f in number_fields(HardwareProfile):
        value = getattr(measured, f.name)
        found[f.name] = value, f"as measured of {measured.name}, none nearer was"
    found |= _limits(card) | _memory(card, measured) | _arithmetic(card) | _tensor(card)
    sms, clock = card.num_sms / measured.num_sms, card.clock_ghz / measured.clock_ghz
    for names, factor, what in (
        (_BY_SM, sms * clock, "multiprocessors and clock"),
        (_BY_CLOCK, clock, "clock"),
    ):
        for name in names:
            source = f"as measured of {measured.name}, scaled by {what}"
            found[name] = getattr(measured, name) * factor, source
    return {f.name: found[f.name] for f in number_fields(HardwareProfile)}


def _limits(card: Card) -> dict[str, Sourced]:
    """What a multiprocessor has: the driver's, else the table's."""
    names = ("max_threads_per_sm", "max_blocks_per_sm", "registers_per_sm", "smem_per_sm_bytes")
    found = {name: _rated(name, card) for name in names}
    found = {name: (int(value), source) for name, (value, source) in found.items()}
    smem, source = found["smem_per_sm_bytes"]
    found["smem_per_block_bytes"] = smem - _RESERVED, f"{source}; less what is reserved"
    found["smem_reserved_per_block_bytes"] = _RESERVED, source
    found["num_sms"] = card.num_sms, card.source
    found["clock_ghz"] = card.clock_ghz, f"{card.source}: maximum clock"
    return found | {name: (value, card.source) for name, value in card.limits}


def _memory(card: Card, measured: HardwareProfile) -> dict[str, Sourced]:
    peak = card.bandwidth_gb_per_s * 1e9
    share, why = _rated("hbm_share", card)
    access, of_access = _rated("hbm_access_bytes", card)
    return {
        "memory_bytes": (int(card.memory_gb * 1e9), card.source),
        "hbm_peak_bytes_per_s": (peak, card.source),
        "hbm_bytes_per_s": (peak * share, f"{share:g} {why}"),
        "l2_bytes": (int(card.l2_mib * 2**20), card.source),
        "l2_bytes_per_s": _per_second("l2", card),
        "smem_bytes_per_s": (_SMEM_BYTES * _clocks(card), "32 banks of 4 bytes each clock and SM"),
        "bytes_in_flight_latency_s": _rated("bytes_in_flight_latency_s", card),
        "hbm_access_bytes": (int(access), of_access),
    }


def _arithmetic(card: Card) -> dict[str, Sourced]:
    multiply_adds, source = _per_second("fma_f32", card)
    return {
        "fma_per_s_f32": (2 * multiply_adds, source),
        "special_per_s": _per_second("special", card),
        "int_per_s": _per_second("int", card),
        "conversion_per_s": _per_second("conversion", card),
    }


def _tensor(card: Card) -> dict[str, Sourced]:
    reached, why = _rated("tensor_share", card)
    found, sources = {}, [f"{reached:g} of these: {why}"]
    for name, dtypes in _TENSOR_DTYPES.items():
        rate = _rates()[f"tensor.{name}"]
        if (each := rate.of(card.architecture.number)) is not None:
            share = card.int8_share if name == "int8" else card.float_share
            flop = 2 * each * share * reached * _clocks(card)
            found |= dict.fromkeys(dtypes, flop)
            sources.insert(-1, f"{name} {each * share:g} a clock and SM ({rate.source})")
    return {"tensor_flop_per_s": (found, "; ".join(sources))}


def _clocks(card: Card) -> float:
    """Clocks of all multiprocessors in a second."""
    return card.num_sms * card.clock_ghz * 1e9


def _per_second(name: str, card: Card) -> Sourced:
    value, source = _rated(name, card)
    return value * _clocks(card), f"{value:g} each clock and SM: {source}"


def _rated(name: str, card: Card) -> Sourced:
    rate = _rates()[name]
    value = rate.of(card.architecture.number)
    if value is None:
        raise ConfigError(f"{FILE}: {name} has nothing for {card.arch}; add it")
    return value, rate.source


@cache
def _file() -> dict[str, Any]:
    return read_toml(config_folder() / FILE)


@cache
def _rates() -> dict[str, Rate]:
    tables = {name: data for name, data in _file().items() if isinstance(data, Mapping)}
    tensor = tables.pop("tensor")
    tables |= {f"tensor.{name}": data for name, data in tensor.items()}
    return {
        name: Rate(
            tuple(sorted((int(key), value) for key, value in data.items() if key.isdigit())),
            data["source"],
        )
        for name, data in tables.items()
    }


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_spelled(each)}" for key, each in value.items()) + " }"
    return repr(value)
