"""When is a result good enough? Pure functions on arrays, of NumPy or of torch on a device.

One rule for whole modules, for single groups and for the trials of tuning. The error of an output x
against the float64 reference is max|x - ref| / max|ref| over the elements where both are finite
numbers of the output's dtype (where all of those ref are 0: max|x - ref|). An output passes if its
error is

- at most `SAFETY` times what the roundings of its arithmetic do to the reference (`bounds`), or
  within a few units in the last place of the dtype, whichever allows more. Where no such bound is
  given, twice (float64, float32) or three times (half) the error of a plain output stands for it:
  what TVM's own lowering gives, or in tuning the untuned kernel; where there is no such output
  either, a few units in the last place of the narrowest dtype on the way; and
- at most 1e-4 (float32), 1e-2 (float16, and tfloat32 where the policy allows it), 2e-2 (bfloat16),
  two spacings of 1.0 (float8: 0.25 for e4m3fn, 0.5 for e5m2), whatever else is said. The dtype is
  the narrowest in which anything on the way to the output is computed
  (`allowance.computed_dtypes`): a float32 sum of values that were rounded to float16 is no better
  than these, fused or not.

Element by element, outside of those numbers:

- where the reference is nan, so is the output;
- where the reference is infinite or beyond the largest finite number of the dtype, the output is
  infinite with the same sign (in float8, where conversions saturate, it may be the largest finite
  number), or equals the plain output (a clip, or a maximum that starts at the lowest finite
  number);
- where the reference is an ordinary number, an inf or nan passes only if the plain output has the
  same there: the model itself overflows, and no fusion did it;
- integers and booleans equal the reference, but for those that a rounding may decide (the argmax of
  a near tie). Without a bound, they may equal the plain output instead.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError

# A kernel errs by a third of what the disturbances do, and less (tests/results/right_programs_*).
# In an output of one element, whose largest change of eight draws may be small by chance, an error
# above twice that change is then a matter of 1 in 100,000; many elements leave less to chance.
SAFETY = 2.0
# Terms that cancel make more of roundings than any ceiling, and are right; where roundings grow
# much more (1 / x near 0), an output says nothing.
BEYOND = 8.0
PIECE = 1 << 22  # elements that are judged at a time: 32 MB of float64


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a dtype allows: a ratio to the error of a plain output, a floor, and a ceiling."""

    ratio: float
    floor: float
    ceiling: float
    largest: float  # finite number
    least: float  # an error that is none, in numbers as small


# Floors are 4 spacings of 1.0 (2^-52, 2^-23) for the wide types and 2 (2^-10, 2^-7) for the halves:
# a plain output may be exact by luck. For 8 bits 2 spacings (2^-3, 2^-2) are the ceiling, too. The
# least is the smallest normal number, below which kernels may take 0; of float16 and of 8 bits,
# whose subnormal numbers all kernels have, some of their spacings.
TOLERANCES = {
    "float64": Tolerance(2.0, 4 * 2.0**-52, 1e-10, 1.7976931348623157e308, 2.0**-1022),
    "float32": Tolerance(2.0, 4 * 2.0**-23, 1e-4, 3.4028234663852886e38, 2.0**-126),
    "tfloat32": Tolerance(3.0, 2 * 2.0**-10, 1e-2, 3.4028234663852886e38, 2.0**-126),
    "float16": Tolerance(3.0, 2 * 2.0**-10, 1e-2, 65504.0, 4 * 2.0**-24),
    "bfloat16": Tolerance(3.0, 2 * 2.0**-7, 2e-2, 3.3895313892515355e38, 2.0**-126),
    "float8_e4m3fn": Tolerance(3.0, 2 * 2.0**-3, 2 * 2.0**-3, 448.0, 2 * 2.0**-9),
    "float8_e5m2": Tolerance(3.0, 2 * 2.0**-2, 2 * 2.0**-2, 57344.0, 2 * 2.0**-16),
}


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """The verdict on one output.

    Errors and `limit` are relative to max|ref|; an error is inf where an element breaks a rule of
    its own. `worst_index` is the element that decides; None where the shape or the dtype is wrong
    and where nothing differs. `why` is empty where `passed`. `not_finite` is the share of elements
    that are NaN or infinite in the reference, so that no error can be told of them.
    """

    passed: bool
    error: float
    plain_error: float
    limit: float
    worst_index: tuple[int, ...] | None
    why: str = ""
    not_finite: float = 0.0


def check_output(
    given: Any,
    plain: Any,
    reference: Any,
    dtype: str,
    computed_in: str | None = None,
    bound: Any = None,
    ceiling: bool = True,
) -> OutputCheck:
    """Compare one output with the float64 reference.

    Parameters
    ----------
    given : numpy.ndarray or torch.Tensor
        The output to judge, in `dtype`.
    plain : array or None
        The same from plain loops, or without tuning; None where there is none.
    reference : array
        The same output in float64 (integers and booleans as they are).
    dtype : str
        The dtype of the output in the module.
    computed_in : str or None
        The narrowest float dtype on the way to the output, if it is narrower than `dtype`.
    bound : array or None
        What roundings do to each element, from `bounds`: a float's largest change, and whether an
        integer changes.
    ceiling : bool
        Whether an error above the ceiling of the dtype is wrong, unless roundings were seen to make
        as much of one (terms that cancel), up to `BEYOND` times the ceiling. On inputs
        that are extreme on purpose it is not: there an exponential may turn roundings of halves
        into more, and others judge the same kernels by the ceiling.

    Returns
    -------
    OutputCheck

    Raises
    ------
    InputError
        The plain output and the reference do not belong together, or no rule exists for `dtype`.

    Examples
    --------
    >>> x = np.ones(4, "float32")
    >>> check_output(x, x, x.astype("float64"), "float32").passed
    True
    >>> check_output(x + 1, x, x.astype("float64"), "float32").passed
    False
    """
    shape = tuple(reference.shape)
    if plain is not None and tuple(plain.shape) != shape:
        raise InputError(
            f"the plain output {tuple(plain.shape)} and the reference {shape} are not of one shape"
            "; give what the same model gives"
        )
    if tuple(given.shape) != shape or name_of(given.dtype) != dtype:
        why = f"is {name_of(given.dtype)}{list(given.shape)}, not {dtype}{list(shape)}"
        return OutputCheck(False, math.inf, math.inf, 0.0, None, why)
    if dtype in TOLERANCES:
        own = TOLERANCES[dtype]
        narrow = TOLERANCES[computed_in or dtype]
        return _check_floats(given, plain, reference, own, narrow, bound, ceiling)
    if dtype.startswith(("int", "uint", "bool")):
        return _check_exact(given, plain, reference, bound)
    raise InputError(f"there is no numeric rule for outputs of type {dtype}")


def name_of(dtype: Any) -> str:
    """The name of a dtype of NumPy's or torch's."""
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def namespace(array: Any) -> Any:
    """NumPy or torch, whichever an array is of."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


def wide(array: Any) -> Any:
    """Floats in float64, anything else as it is."""
    if "float" not in name_of(array.dtype):
        return array
    return array.astype("float64") if namespace(array) is np else array.double()


def as_array(value: Any) -> np.ndarray:
    """An array, or a tensor of torch, as an array in host memory."""
    if namespace(value) is np or not hasattr(value, "detach"):
        return np.asarray(value)
    host, torch = value.detach().cpu().contiguous(), sys.modules["torch"]
    other = getattr(ml_dtypes, name_of(host.dtype), None)  # what NumPy has not by itself
    if other is None:
        return host.numpy()
    return host.view(torch.int16 if host.itemsize == 2 else torch.uint8).numpy().view(other)


def as_tensor(value: Any) -> Any:
    """An array, or a tensor of torch, as a tensor.

    Raises
    ------
    TypeError
        torch has no such dtype.
    """
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value)
    array = np.array(array, order="C", copy=None if array.flags.writeable else True)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def pieces(size: int) -> Iterator[slice]:
    """The elements of an array that are computed with at a time: what is made of them on the way
    takes several times their memory.
    """
    return (slice(first, min(first + PIECE, size)) for first in range(0, size, PIECE))


def like(value: Any, other: Any) -> Any:
    """An array, or a tensor of torch, as the other one is: on the host, or on a device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(other, torch.Tensor):
        return as_tensor(value).to(other.device)
    return as_array(value)


def _check_exact(given: Any, plain: Any, reference: Any, undecided: Any) -> OutputCheck:
    wrong = given != reference
    if undecided is not None:
        wrong = wrong & ~undecided
    elif plain is not None:
        wrong = wrong & (given != plain)
    if not wrong.any():
        return OutputCheck(True, 0.0, 0.0, 0.0, None)
    at = _first(wrong)
    beside = "" if plain is None else f", plain {plain[at]}"
    why = f"{given[at]} at {list(at)}{beside}, reference {reference[at]}"
    return OutputCheck(False, math.inf, 0.0, 0.0, at, why)


def _check_floats(
    given: Any,
    plain: Any,
    reference: Any,
    own: Tolerance,
    narrow: Tolerance,
    bound: Any,
    ceiling: bool,
) -> OutputCheck:
    is_alone = plain is None
    whole = _Pieces((given, plain, reference, bound), own)
    scale = _most(piece.largest(abs(piece.ref)) for _, piece in whole) or 1.0
    roundings = 0.0
    if bound is not None:
        roundings = _most(piece.largest(piece.bound) for _, piece in whole) / scale
    found = [_judged(piece, scale, first) for first, piece in whole]
    plain_error = max((one.plain_error for one in found), default=0.0)
    error, worst = max(((f.error, f.worst) for f in found), key=_first_of, default=(0.0, None))
    if bound is not None:
        allowed = SAFETY * roundings
    else:
        allowed = narrow.floor if is_alone else own.ratio * plain_error
    limit, most = max(allowed, own.floor), max(own.ceiling, narrow.ceiling)
    if not math.isfinite(limit):
        limit = most
    elif ceiling or bound is None:
        limit = min(limit, max(most, min(roundings, BEYOND * most)))
    limit = max(limit, own.least / scale)
    refused = next((f.refused for f in found if f.refused is not None), None)
    if refused is not None:
        worst, error = refused, math.inf
    at = None if worst is None else _index(worst, reference.shape)
    passed = error <= limit
    why = "" if passed else f"error {error:.2e} above {limit:.2e}"
    if not passed:
        beside = "" if is_alone else f", plain {float(plain[at]):.9g} ({plain_error:.2e})"
        why += (
            f"; at {list(at)}: {float(given[at]):.9g}{beside}, float64 {float(reference[at]):.9g}"
        )
    not_finite = sum(f.not_finite for f in found) / max(1, math.prod(reference.shape))
    return OutputCheck(passed, error, plain_error, limit, at, why, not_finite)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring elements of an output, in float64; `ordinary` is where an error can be told."""

    given: Any
    plain: Any
    ref: Any
    bound: Any
    own: Tolerance
    ordinary: Any

    def largest(self, values: Any) -> float:
        """The largest of the values, where an error can be told."""
        return _largest(values, self.ordinary)


class _Pieces:
    """An output, the plain one, the reference and bounds, as far as there are any, by `pieces`."""

    def __init__(self, arrays: tuple[Any, Any, Any, Any], own: Tolerance) -> None:
        self._arrays = [None if x is None else x.reshape(-1) for x in arrays]
        self._own, self._size = own, math.prod(arrays[2].shape)
        self._kept = list(self._made()) if self._size <= PIECE else None

    def __iter__(self) -> Iterator[tuple[int, _Piece]]:
        return self._made() if self._kept is None else iter(self._kept)

    def _made(self) -> Iterator[tuple[int, _Piece]]:
        for own in pieces(self._size):
            given, plain, ref, bound = (None if x is None else x[own] for x in self._arrays)
            ref = wide(ref)
            plain = None if plain is None else wide(plain)
            ordinary = abs(ref) <= self._own.largest  # false for nan
            yield own.start, _Piece(wide(given), plain, ref, bound, self._own, ordinary)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What was found of a piece: errors, the place of the largest in the whole, the first place
    that is refused, and how many numbers are not finite.
    """

    error: float
    worst: int | None
    plain_error: float
    refused: int | None
    not_finite: int


def _judged(piece: _Piece, scale: float, first: int) -> _Judged:
    xp, is_alone = namespace(piece.ref), piece.plain is None
    given, ref, ordinary = piece.given, piece.ref, piece.ordinary
    plain = xp.full_like(ref, math.nan) if is_alone else piece.plain
    same = (given == plain) | (xp.isnan(given) & xp.isnan(plain) & (not is_alone))
    accepted = _accepted(given, same, ref, ordinary, piece.own)
    plain_error, _ = _error(plain, ref, ordinary & xp.isfinite(plain), scale)
    error, worst = _error(given, ref, ordinary & xp.isfinite(given), scale)
    return _Judged(
        error,
        None if worst is None else first + worst,
        plain_error,
        None if accepted.all() else first + int((~accepted * 1).argmax()),
        int((~xp.isfinite(ref)).sum()),
    )


def _first_of(found: tuple[float, int | None]) -> float:
    return found[0]


def _most(values: Iterable[float]) -> float:
    """The largest number; NaN where one is."""
    return float(np.max([0.0, *values]))


def _accepted(given: Any, same: Any, ref: Any, ordinary: Any, tolerance: Tolerance) -> Any:
    """Where what is not finite, in the output or in the reference, is as the rules say; `same` is
    where the output is as the plain one.
    """
    xp = namespace(ref)
    finite = xp.isfinite(given)
    beyond = ~ordinary & ~xp.isnan(ref)
    overflown = xp.isinf(given)
    if tolerance.ceiling > 0.1:  # float8 saturates
        overflown = overflown | (xp.abs(given) == tolerance.largest)
    overflown = overflown & (xp.sign(given) == xp.sign(ref))
    as_ref = xp.where(beyond, overflown, xp.isnan(given))
    return xp.where(ordinary, finite | same, as_ref | (beyond & same))


def _largest(values: Any, where: Any) -> float:
    """The largest of the values over `where`, all of them at least 0."""
    if not len(values.reshape(-1)):
        return 0.0
    xp = namespace(values)
    return float(xp.where(where, values, xp.zeros_like(values)).max())


def _error(values: Any, ref: Any, where: Any, scale: float) -> tuple[float, int | None]:
    """The largest |values - ref| / scale over `where`, and its place."""
    xp = namespace(ref)
    zero = xp.zeros_like(ref)
    difference = xp.abs(xp.where(where, values, zero) - xp.where(where, ref, zero))
    if not difference.any():
        return 0.0, None
    worst = int(difference.argmax())
    return float(difference[worst]) / scale, worst


def _first(mask: Any) -> tuple[int, ...]:
    return _index((mask * 1).argmax(), mask.shape)


def _index(flat: Any, shape: Any) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(int(flat), tuple(shape))))
