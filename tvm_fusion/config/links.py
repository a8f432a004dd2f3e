"""Links between GPUs of one host, and what a ring of them takes: `configs/gpu_links.toml`."""

from dataclasses import dataclass
from functools import cache

from .toml import config_folder, read_toml

FILE = "gpu_links.toml"
PROTOCOLS = ("LL", "LL128", "Simple")
REDUCE = "all_reduce"
_ONCE = ("all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True, slots=True)
class Link:
    """What a device sends to the next one of a ring.

    Attributes
    ----------
    bytes_per_s : float
    protocols : tuple of (float, float, float)
        Of each protocol, of which the fastest is taken: microseconds at the start and a step, and
        the share of the bytes that are data.
    """

    bytes_per_s: float
    protocols: tuple[tuple[float, float, float], ...]

    def ring_us(self, operator: str, size_bytes: int, ranks: int) -> float | None:
        """How long a collective takes in a ring, in microseconds.

        In n - 1 steps each of n processes sends (n - 1) / n of the whole, which is what is gathered
        or scattered; a sum for all is both, one after the other (Thakur, Rabenseifner and Gropp,
        Optimization of Collective Communication Operations in MPICH, 2005; the same factors in
        NCCL's tests, doc/PERFORMANCE.md).

        Parameters
        ----------
        operator : str
            torch's name, such as "all_reduce".
        size_bytes : int
            Of the whole.
        ranks : int

        Returns
        -------
        float or None
            None for an operator that is none of these.
        """
        if operator.removesuffix("_") != REDUCE and operator not in _ONCE:
            return None
        steps = (ranks - 1) * (1 if operator in _ONCE else 2)
        if not steps:
            return 0.0
        sent_us = steps * size_bytes / ranks / self.bytes_per_s * 1e6
        return min(base + steps * step + sent_us / share for base, step, share in self.protocols)


@cache
def link_of(capability: int) -> Link | None:
    """The link of a compute capability such as 90; None where nobody measured one."""
    data = read_toml(config_folder() / FILE)
    rate = data["bytes_per_s"].get(str(capability))
    if rate is None:
        return None
    terms = [data[name] for name in ("base_us", "step_us", "share")]
    protocols = (tuple(term[name] for term in terms) for name in PROTOCOLS)
    return Link(float(rate), tuple(protocols))
