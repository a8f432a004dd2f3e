"""GPUs that nobody measured: what NVIDIA or the driver says of them, `configs/gpu_cards.toml`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from ..errors import ConfigError
from .architecture import Architecture, read_architecture
from .toml import config_folder, parse, read_toml

TAGS = "nvidia/"
"""How TVM's names of devices begin: "nvidia/nvidia-h200"."""
FILE = "gpu_cards.toml"
OLDEST = 80
"""Compute capability 8.0, before which kernels have neither asynchronous copies nor mma.sync."""


_LIMITS = (
    "max_threads_per_sm",
    "max_blocks_per_sm",
    "registers_per_sm",
    "smem_per_sm_bytes",
    "smem_per_block_bytes",
    "smem_reserved_per_block_bytes",
)


@dataclass(frozen=True, slots=True)
class Card:
    """What is known of a GPU without measuring it.

    Attributes
    ----------
    name : str
        Of its profile.
    gpu : str
        As its driver calls it.
    clock_ghz : float
        The highest.
    memory_gb, bandwidth_gb_per_s : float
        1e9 bytes, and as many a second; `l2_mib` is 2**20 bytes.
    float_share, int8_share : float
        Of the rates of tensor cores of its compute capability, where it has less than these.
    limits : tuple of (str, int)
        Numbers of a profile that the driver gives instead of the table by compute capability.
    """

    name: str
    gpu: str
    arch: str
    num_sms: int
    clock_ghz: float
    memory_gb: float
    bandwidth_gb_per_s: float
    l2_mib: float
    source: str
    float_share: float = 1.0
    int8_share: float = 1.0
    limits: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        read_architecture(self.arch)
        for name in ("num_sms", "clock_ghz", "memory_gb", "bandwidth_gb_per_s", "l2_mib"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{self.gpu}: {name} = {getattr(self, name)} is not above 0; mend it"
                )

    @property
    def architecture(self) -> Architecture:
        return read_architecture(self.arch)

    @property
    def words(self) -> str:
        """What of the name tells it from others, "l4" and "geforce rtx 3090"."""
        return _words(self.gpu).removeprefix("nvidia ")

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the profile: without the maker, the words by which the GPU is found, and
        as a tag in the manner of TVM's.
        """
        tag, short = self.words.replace(" ", "-"), self.name.removeprefix("nvidia_")
        tags = f"{TAGS}{tag}", f"{TAGS}nvidia-{tag}"
        return tuple(dict.fromkeys([short, self.words, *tags, self.gpu.lower()]))


@cache
def cards() -> tuple[Card, ...]:
    """All cards of the file, in its order."""
    file = config_folder() / FILE
    found = read_toml(file).get("card", [])
    return tuple(
        Card(**parse(Card, data, f"{file}: {data.get('name')}", strict=False, partial=False))
        for data in found
    )


def card_named(name: str) -> Card | None:
    """The card of a profile's name, an alias, a tag, or as its driver calls it; "RTX PRO 6000",
    "rtx_pro_6000" and "rtx-pro-6000" are one name.
    """
    return {_joined(key): card for key, card in _by_name().items()}.get(_joined(name))


def all_names() -> list[str]:
    """The names of all cards, their aliases and tags."""
    return list(_by_name())


def card_names() -> list[str]:
    """The names of all cards."""
    return [card.name for card in cards()]


def _joined(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.lower())


@cache
def _by_name() -> dict[str, Card]:
    return {name: card for card in cards() for name in (card.name, *card.aliases)}


def card_of_gpu(device_name: str) -> Card | None:
    """The card whose words a device's name holds, the one with the most of them."""
    found = [card for card in cards() if longest_words([card.words], device_name)]
    return max(found, key=lambda card: len(card.words), default=None)


def card_of_driver(
    device_name: str, architecture: Architecture, attributes: Mapping[str, int]
) -> Card:
    """The card of a GPU that is present, by what its driver says (`host.gpu_driver`); what it does
    not say is that of the card of the device's name, or of the one of its architecture.

    Raises
    ------
    ConfigError
        The architecture is before 8.0.
    """
    known = card_of_gpu(device_name)
    if known is None or known.architecture.number != architecture.number:
        known = None
    like = known or card_of_architecture(architecture)
    said = {name: value for name, value in attributes.items() if value > 0}
    found = {"num_sms": said.get("num_sms", like.num_sms)}
    if "clock_khz" in said:
        found["clock_ghz"] = said["clock_khz"] / 1e6
    if "memory_bytes" in said:
        found["memory_gb"] = said["memory_bytes"] / 1e9
    if "l2_bytes" in said:
        found["l2_mib"] = said["l2_bytes"] / 2**20
    if {"memory_clock_khz", "memory_bus_bits"} <= said.keys() and "is_integrated" not in said:
        # Data on both edges of the clock; memory shared with a CPU has no clock of its own.
        rate = 2 * said["memory_clock_khz"] * 1e3 * said["memory_bus_bits"] / 8
        found["bandwidth_gb_per_s"] = rate / 1e9
    geforce = known is None and "geforce" in device_name.lower()
    return replace(
        like,
        name=known.name if known and known.num_sms == found["num_sms"] else _name_of(device_name),
        gpu=device_name,
        arch="sm_90a" if architecture.number == 90 else like.arch,
        source=f"reported by the driver of {device_name}",
        float_share=0.5 if geforce else like.float_share if known else 1.0,
        int8_share=like.int8_share if known else 1.0,
        limits=tuple((name, said[name]) for name in _LIMITS if name in said),
        **found,
    )


def _name_of(device_name: str) -> str:
    """A profile's name: "nvidia_geforce_rtx_5060"."""
    found = re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")
    return found if found.startswith("nvidia_") else f"nvidia_{found}"


def card_of_architecture(architecture: Architecture) -> Card:
    """The card that stands for an architecture, with its features: the first one of it; of one that
    the file does not have a card of the nearest earlier one.

    Raises
    ------
    ConfigError
        It is before 8.0.
    """
    if architecture.number < OLDEST:
        raise ConfigError(f"{too_old(architecture)}; give another")
    newest = max(n for c in cards() if (n := c.architecture.number) <= architecture.number)
    card = next(card for card in cards() if card.architecture.number == newest)
    if card.architecture.number != architecture.number:
        name = f"nvidia_{architecture.name}"
        card = replace(card, name=name, gpu=f"a GPU of {architecture.name}")
    return replace(card, arch=architecture.name)


def newest_architecture() -> int:
    """The latest compute capability of a card that is known."""
    return max(card.architecture.number for card in cards())


def too_old(architecture: Architecture) -> str:
    """What is said of an architecture that no kernel is for."""
    return (
        f"{architecture.name} is compute capability {architecture.major}.{architecture.minor}; "
        "kernels need 8.0 (Ampere) or later, or the CPU (llvm)"
    )


def longest_words(names: Iterable[str], device_name: str) -> int:
    """How long the longest of some names is that a device's holds as whole words; 0 where it holds
    none. What is of laptops is another chip than the card of its name.
    """
    device = f" {_words(device_name)} "
    known = [name for name in map(_words, names) if f" {name} " in device]
    return max((len(n) for n in known if ("laptop" in n) == (" laptop " in device)), default=0)


def _words(name: str) -> str:
    return " ".join(name.lower().replace("-", " ").split())
