"""When is a fused result good enough? Pure functions on arrays.

The error of an output x against the float64 reference is max|x - ref| / max|ref| over the elements
where both are finite numbers of the output's dtype (where all of those ref are 0: max|x - ref|).
A fused output passes if its error is

- at most twice (float64, float32) or three times (half) the error of the unfused output, or within
  a few units in the last place of the dtype, whichever allows more; and
- at most 1e-4 (float32), 1e-2 (float16), 2e-2 (bfloat16), two spacings of 1.0 (float8: 0.25 for
  e4m3fn, 0.5 for e5m2), whatever the unfused output does. The dtype is the narrowest in which
  anything on the way to the output is computed (`precision`): a float32 sum of values that were
  rounded to float16 is no better than these, fused or not.

Element by element, outside of those numbers:

- where the reference is nan, so is the fused output;
- where the reference is infinite or beyond the largest finite number of the dtype, the fused output
  is infinite with the same sign (in float8, where conversions saturate, it may be the largest
  finite number), or equals the unfused output (a clip, or a maximum that starts at the lowest
  finite number);
- where the reference is an ordinary number, a fused inf or nan passes only if the unfused output
  has the same there: the model itself overflows, and no fusion did it;
- integers and booleans equal the unfused output or the reference (the argmax of a near tie).
"""

from dataclasses import dataclass

import numpy as np

from ..errors import InputError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a dtype allows: a ratio to the unfused error, a floor, and a ceiling."""

    ratio: float
    floor: float
    ceiling: float
    largest: float  # finite number


# Floors are 4 spacings of 1.0 (2^-52, 2^-23) for the wide types and 2 (2^-10, 2^-7) for the halves:
# an unfused output may be exact by luck. For 8 bits 2 spacings (2^-3, 2^-2) are the ceiling, too.
TOLERANCES = {
    "float64": Tolerance(2.0, 4 * 2.0**-52, 1e-10, 1.7976931348623157e308),
    "float32": Tolerance(2.0, 4 * 2.0**-23, 1e-4, 3.4028234663852886e38),
    "float16": Tolerance(3.0, 2 * 2.0**-10, 1e-2, 65504.0),
    "bfloat16": Tolerance(3.0, 2 * 2.0**-7, 2e-2, 3.3895313892515355e38),
    "float8_e4m3fn": Tolerance(3.0, 2 * 2.0**-3, 2 * 2.0**-3, 448.0),
    "float8_e5m2": Tolerance(3.0, 2 * 2.0**-2, 2 * 2.0**-2, 57344.0),
}


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """The verdict on one output.

    Errors and `limit` are relative to max|ref|; an error is inf where an element breaks a rule of
    its own. `worst_index` is the element that decides; None where the shape or the dtype is wrong
    and where nothing differs. `why` is empty where `passed`.
    """

    passed: bool
    fused_error: float
    unfused_error: float
    limit: float
    worst_index: tuple[int, ...] | None
    why: str = ""


def check_output(
    fused: np.ndarray,
    unfused: np.ndarray,
    reference: np.ndarray,
    dtype: str,
    computed_in: str | None = None,
) -> OutputCheck:
    """Compare one output of the fused module with the unfused one and with the float64 reference.

    Parameters
    ----------
    fused, unfused : numpy.ndarray
        The output of both modules, in `dtype`.
    reference : numpy.ndarray
        The same output in float64 (integers and booleans as they are).
    dtype : str
        The dtype of the output in the module.
    computed_in : str or None
        The narrowest float dtype on the way to the output, if it is narrower than `dtype`.

    Returns
    -------
    OutputCheck

    Raises
    ------
    InputError
        The unfused output and the reference do not belong together, or no rule exists for `dtype`.

    Examples
    --------
    >>> x = np.ones(4, "float32")
    >>> check_output(x, x, x.astype("float64"), "float32").passed
    True
    >>> check_output(x + 1, x, x.astype("float64"), "float32").passed
    False
    """
    if unfused.shape != reference.shape:
        raise InputError(
            f"the unfused output {unfused.shape} and the reference {reference.shape} "
            "are not of one shape"
        )
    if fused.shape != reference.shape or fused.dtype.name != dtype:
        why = f"is {fused.dtype.name}{list(fused.shape)}, not {dtype}{list(reference.shape)}"
        return OutputCheck(False, np.inf, np.inf, 0.0, None, why)
    if dtype in TOLERANCES:
        own = TOLERANCES[dtype]
        ceiling = max(own.ceiling, TOLERANCES[computed_in or dtype].ceiling)
        return _check_floats(fused, unfused, reference, own, ceiling)
    if np.issubdtype(fused.dtype, np.integer) or fused.dtype == np.bool_:
        return _check_exact(fused, unfused, reference)
    raise InputError(f"there is no numeric rule for outputs of type {dtype}")


def _check_exact(fused: np.ndarray, unfused: np.ndarray, reference: np.ndarray) -> OutputCheck:
    wrong = (fused != unfused) & (fused != reference)
    if not wrong.any():
        return OutputCheck(True, 0.0, 0.0, 0.0, None)
    at = _first(wrong)
    why = f"{fused[at]} at {list(at)}, unfused {unfused[at]}, reference {reference[at]}"
    return OutputCheck(False, np.inf, 0.0, 0.0, at, why)


def _check_floats(
    fused: np.ndarray,
    unfused: np.ndarray,
    reference: np.ndarray,
    tolerance: Tolerance,
    ceiling: float,
) -> OutputCheck:
    wide, plain, ref = (array.astype("float64") for array in (fused, unfused, reference))
    ordinary = np.abs(ref) <= tolerance.largest  # false for nan
    finite = np.isfinite(wide)

    same = (wide == plain) | (np.isnan(wide) & np.isnan(plain))
    beyond = ~ordinary & ~np.isnan(ref)
    saturated = (tolerance.ceiling > 0.1) & (np.abs(wide) == tolerance.largest)  # float8 does
    overflown = (np.isinf(wide) | saturated) & (np.sign(wide) == np.sign(ref))
    as_ref = np.where(beyond, overflown, np.isnan(wide))
    accepted = np.where(ordinary, finite | same, as_ref | (beyond & same))

    scale = float(np.max(np.abs(ref), where=ordinary, initial=0.0)) or 1.0
    unfused_error, _ = _error(plain, ref, ordinary & np.isfinite(plain), scale)
    fused_error, worst = _error(wide, ref, ordinary & finite, scale)
    limit = min(max(tolerance.ratio * unfused_error, tolerance.floor), ceiling)
    if not accepted.all():
        worst, fused_error = _first(~accepted), np.inf
    passed = fused_error <= limit
    why = ""
    if not passed:
        numbers = f"{wide[worst]:.9g}, unfused {plain[worst]:.9g}, float64 {ref[worst]:.9g}"
        why = (
            f"error {fused_error:.2e} above {limit:.2e} (unfused {unfused_error:.2e}); "
            f"at {list(worst)}: {numbers}"
        )
    return OutputCheck(passed, fused_error, unfused_error, limit, worst, why)


def _error(
    values: np.ndarray, ref: np.ndarray, where: np.ndarray, scale: float
) -> tuple[float, tuple[int, ...] | None]:
    """The largest |values - ref| / scale over `where`, and its index."""
    difference = np.abs(np.subtract(values, ref, out=np.zeros(ref.shape), where=where))
    if not difference.any():
        return 0.0, None
    worst = np.unravel_index(int(np.argmax(difference)), ref.shape)
    return float(difference[worst]) / scale, tuple(map(int, worst))


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(int(np.argmax(mask)), mask.shape)))
