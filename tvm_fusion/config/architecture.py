"""Architectures of NVIDIA GPUs as numbers, and what each can do: no other file asks for either.

    "sm_90a"  ->  Architecture(9, 0, "a"), which has wgmma

Which instruction needs which architecture is what the PTX ISA says below each of them (9.0, "Target
ISA Notes"). What has the suffix "a" is of one architecture alone, with "f" of its family; neither
is to be had on a later one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    """A compute capability, 9.0 as `major` 9 and `minor` 0, and the `suffix` of features that are
    of it alone. One of zeros is no GPU: it can nothing.
    """

    major: int = 0
    minor: int = 0
    suffix: str = ""

    @property
    def code(self) -> str:
        """What stands behind "compute_" and "sm_" in the flags of compilers: "90a"."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def number(self) -> int:
        """In the order of time: 90, 120."""
        return 10 * self.major + self.minor

    @property
    def name(self) -> str:
        """As compilers call it, "sm_90a"."""
        return f"sm_{self.code}"

    @property
    def has_cp_async(self) -> bool:
        """Asynchronous copies of 4 to 16 bytes into shared memory."""
        return self.number >= 80

    @property
    def has_mma(self) -> bool:
        """mma.sync of 16 x 8 results: halves of both kinds, tfloat32, integers of 8 bits."""
        return self.number >= 80

    @property
    def has_float8_mma(self) -> bool:
        """mma.sync of 8-bit floats."""
        return self.number >= 89

    @property
    def has_float8_as_halves(self) -> bool:
        """Whether mma.sync of 8-bit floats is products of halves, which ptxas makes of the operands
        in registers beside theirs: two HMMA and up to 12 F2FP each. sm_89, 120 and 121 have QMMA
        (SASS by CUDA 13.0); the others' own instructions for them are of one architecture alone.
        """
        return self.major in (9, 10, 11)

    @property
    def has_tma(self) -> bool:
        """Bulk copies, those of tensor maps among them, and the barriers that count their bytes."""
        return self.number >= 90

    @property
    def has_clusters(self) -> bool:
        """Thread block clusters, whose blocks reach each other's shared memory."""
        return self.number >= 90

    @property
    def has_dependent_launch(self) -> bool:
        """Kernels that begin before the one in front has ended (griddepcontrol)."""
        return self.number >= 90

    @property
    def has_wgmma(self) -> bool:
        """Products of warpgroups out of shared memory, and registers handed between warps."""
        return (self.major, self.minor, self.suffix) == (9, 0, "a")

    @property
    def is_unrolled_to_spills(self) -> bool:
        """Whether ptxas unrolls loops of few turns beyond the registers that a thread may have, and
        keeps what they read for the next ones: a softmax that streams rows of 65,536 by 1,024
        threads spills 160 to 172 bytes of four turns, a sum of 2,048 rows and what reads them again
        80; none where these stay loops, and none before sm_100 (CUDA 13.0).
        """
        return self.number >= 100

    @property
    def is_rated_by_wgmma(self) -> bool:
        """Whether the rates of tensor cores in a profile are those of wgmma, of which mma.sync
        reaches a share: Hopper's, with its own features or without.
        """
        return self.major == 9


NO_GPU = Architecture()


@cache
def read_architecture(text: str) -> Architecture:
    """The architecture that "sm_90a" names.

    Raises
    ------
    ConfigError
        It names none.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no architecture of an NVIDIA GPU; write sm_ and the compute capability "
            "without its point, as sm_89 for 8.9, with an a or f behind where features of that "
            "one alone are meant, as sm_90a"
        )
    return Architecture(int(match[1]), int(match[2]), match[3])
