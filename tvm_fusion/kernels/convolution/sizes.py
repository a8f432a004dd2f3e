"""Convolutions as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """A convolution as plain numbers.

    Attributes
    ----------
    positions : of the results of one filter, of all images.
    filters : of all groups.
    channels : that a filter sums over.
    taps : of a filter; of a transposed convolution, those that a position meets.
    groups
    dtype : of the data, as it is multiplied.
    channels_last : whether the data is contiguous along channels.
    expansion : positions of data of a transposed convolution for each element, the others zeros.
    repeats : positions of data that is enlarged for each element, all of them this element.
    parts : channels of the tensors that data is read from one behind the other, if it is.
    """

    positions: int
    filters: int
    channels: int
    taps: int
    groups: int
    dtype: str
    channels_last: bool
    expansion: int = 1
    repeats: int = 1
    parts: tuple[int, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        """Channels of each tensor that data is read from."""
        return self.parts or (self.channels,)

    @property
    def multiply_adds(self) -> float:
        """Of all results."""
        return float(self.positions) * self.filters * self.channels * self.taps
