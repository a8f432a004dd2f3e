"""The number that would turn a refusal: what has to change until two groups become one."""

from collections.abc import Callable, Mapping
from typing import Any

Numbers = Mapping[str, Any]


def flip(code: str, numbers: Numbers) -> str | None:
    """Say what would have to change for a fusion to be done.

    Parameters
    ----------
    code : str
        Of the refusal (`kernels.base.RefusalCode`).
    numbers : Mapping of str to float
        What the refusal was based on.

    Returns
    -------
    str or None
        None where no number would do: no kernel class computes both groups, whatever it costs.
    """
    needed, said = _RULES.get(code, ((), None))
    if said is None or not set(needed) <= set(numbers):
        return None
    return said(numbers)


def _not_profitable(n: Numbers) -> str:
    lost = n["together_us"] - n["apart_us"]
    if lost <= 0:  # such pairs gain less than another fusion of one of them
        return f"pays by itself ({-lost:.3g} us), but less than what was fused instead"
    # apart has one launch more than together, so that a dearer launch closes the gap
    wanted = n["launch_us"] + lost
    return (
        f"pays if the joined kernel took {lost / n['together_us']:.1%} less than predicted, or a "
        f"launch cost {wanted:.3g} us (now {n['launch_us']:.3g})"
    )


def _recompute(n: Numbers) -> str:
    return (
        f"allowed from max_recompute = {n['factor']:.4g} (now {n['allowed']:.4g}), if it pays then"
    )


def _group_size(n: Numbers) -> str:
    return f"allowed from max_group_ops = {n['ops']:.0f} (now {n['allowed']:.0f}), if it pays then"


def _parameter_bytes(n: Numbers) -> str:
    return f"fits a device that takes {n['bytes']:.0f} bytes of parameters (now {n['allowed']:.0f})"


def _undecided(n: Numbers) -> str:
    if "error_us" in n:
        return _slower(n)
    off = n["apart_us"] / n["together_us"]
    return f"sure if such predictions were off by a factor {off:.3g} at most; --measure settles it"


def _slower(n: Numbers) -> str:
    wanted = n["apart_us"] - 3 * n["error_us"]
    return f"pays if it took less than {wanted:.3g} us, three standard errors below apart"


_RULES: dict[str, tuple[tuple[str, ...], Callable[[Numbers], str]]] = {
    "not_profitable": (("together_us", "apart_us", "launch_us"), _not_profitable),
    "undecided": (("together_us", "apart_us"), _undecided),
    "slower": (("apart_us", "error_us"), _slower),
    "recompute": (("factor", "allowed"), _recompute),
    "group_size": (("ops", "allowed"), _group_size),
    "parameter_bytes": (("bytes", "allowed"), _parameter_bytes),
}
