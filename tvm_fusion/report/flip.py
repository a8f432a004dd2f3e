"""What would turn a refusal: the number that would have to change until two groups become one, or
the fact of the model, the device or the kernels that would have to be another one.
"""

from collections.abc import Callable, Mapping
from typing import Any

Numbers = Mapping[str, Any]


def flip(code: str, numbers: Numbers) -> str:
    """Say what would have to change for a fusion to be done.

    Parameters
    ----------
    code : str
        Of the refusal (`kernels.base.RefusalCode`).
    numbers : Mapping of str to float
        What the refusal was based on.

    Returns
    -------
    str
        The number and the value from which on the fusion is done; what starts with "no number" says
        which fact would have to be another one, since no value of anything would do.

    Raises
    ------
    KeyError
        There is no such code.
    """
    for needed, said in _NUMBERS.get(code, ()):
        if set(needed) <= set(numbers):
            return said(numbers)
    return f"no number would turn this: {_FACTS[code]}"


def _not_profitable(n: Numbers) -> str:
    lost = n["together_us"] - n["apart_us"]
    if lost <= 0:  # such pairs gain less than another fusion of one of them
        return f"pays by itself ({-lost:.3g} us), but less than what was fused instead"
    share = f"pays if the joined kernel took {lost / n['together_us']:.1%} less than predicted"
    saved = n.get("launches_saved", 1)
    if saved < 1:
        return share
    # apart has more launches than together, so that dearer launches close the gap
    wanted = n["launch_us"] + lost / saved
    return f"{share}, or a launch cost {wanted:.3g} us (now {n['launch_us']:.3g})"


def _too_little(n: Numbers) -> str:
    share = 1 - n["together_us"] / n["apart_us"]
    return f"taken with min_gain = {share:.3g} or less (now {n['min_gain']:.3g})"


def _waves(n: Numbers) -> str:
    return (
        f"considered if side by side took fewer than {n['waves_apart']:.3g} waves of blocks (now "
        f"{n['waves_together']:.3g})"
    )


def _undecided(n: Numbers) -> str:
    off = n["apart_us"] / n["together_us"]
    return f"sure if such predictions were off by a factor {off:.3g} at most; --measure settles it"


def _measured(n: Numbers) -> str:
    wanted = n["apart_us"] - 3 * n["error_us"]
    return f"pays if it took less than {wanted:.3g} us, three standard errors below apart"


def _budget(n: Numbers) -> str:
    return f"settled with measure_budget_s above {n['budget_s']:.3g}"


def _recompute(n: Numbers) -> str:
    return (
        f"allowed from max_recompute = {n['factor']:.4g} (now {n['allowed']:.4g}), if it pays then"
    )


def _group_size(n: Numbers) -> str:
    return f"allowed from max_group_ops = {n['ops']:.0f} (now {n['allowed']:.0f}), if it pays then"


def _parameter_bytes(n: Numbers) -> str:
    return f"fits a device that takes {n['bytes']:.0f} bytes of parameters (now {n['allowed']:.0f})"


def _products(n: Numbers) -> str:
    return f"fits kernels of {n['products']:.0f} products (now {n['allowed']:.0f})"


def _depths(n: Numbers) -> str:
    return f"considered if the longest sum had {n['allowed']:.0f} terms (now {n['longest']:.0f})"


def _row_length(n: Numbers) -> str:
    return (
        f"considered for rows of {n['least']:.0f} to {n['most']:.0f} elements (now "
        f"{n['columns']:.0f})"
    )


def _shorter_rows(n: Numbers) -> str:
    return f"considered for rows of fewer than {n['columns']:.0f} elements, if a block holds these"


def _one_reduction(n: Numbers) -> str:
    return f"considered with 1 reducing operator (now {n['reducing']:.0f})"


Rule = tuple[tuple[str, ...], Callable[[Numbers], str]]

# By code, the numbers that a sentence needs; the first whose numbers are there is said.
_NUMBERS: dict[str, tuple[Rule, ...]] = {
    "not_profitable": (
        (("together_us", "apart_us", "min_gain"), _too_little),
        (("together_us", "apart_us", "launch_us"), _not_profitable),
        (("waves_together", "waves_apart"), _waves),
    ),
    "undecided": (
        (("apart_us", "error_us"), _measured),
        (("together_us", "apart_us"), _undecided),
        (("budget_s",), _budget),
    ),
    "slower": ((("apart_us", "error_us"), _measured),),
    "recompute": ((("factor", "allowed"), _recompute),),
    "group_size": ((("ops", "allowed"), _group_size),),
    "parameter_bytes": ((("bytes", "allowed"), _parameter_bytes),),
    "several_contractions": (
        (("products", "allowed"), _products),
        (("longest", "allowed"), _depths),
    ),
    "space_mismatch": (
        (("columns", "least", "most"), _row_length),
        (("columns",), _shorter_rows),
    ),
    "reduction": ((("reducing",), _one_reduction),),
}

# By code, what would have to be otherwise where no number says it.
_FACTS = {
    "cycle": (
        "the operator on the path between the two would have to be in the group, or not read it"
    ),
    "opaque": (
        "the operator would have to be a pure tensor expression that can be read (`call_tir`), no "
        "external, random or impure call"
    ),
    "region": "both would have to stand in one dataflow block, with nothing impure between them",
    "space_mismatch": "both would have to run over the same elements, in the same order",
    "reduction": (
        "a kernel class would have to compute the reductions of both in one pass over the data; "
        "apart from pointwise work such reductions share no loop"
    ),
    "several_contractions": (
        "the matrix products would have to read the same left operand, or neither the other's "
        "result, with operands of one dtype"
    ),
    "not_trailing": (
        "the reduced axes would have to be the contiguous ones of what is read, as after a "
        "permutation that is stored"
    ),
    "off_row": "each row would have to read values of its own row only",
    "prologue": (
        "what comes before the reduction or product would have to be plain pointwise work that "
        "only this kernel reads, of a dtype that it takes"
    ),
    "epilogue": (
        "what follows would have to run over the elements that the kernel holds, rounded as the "
        "policy asks for"
    ),
    "recompute": "the operator would have to be read once an element",
    "group_size": "the group would have to hold fewer operators",
    "parameter_bytes": "the group would have to read and write fewer tensors",
    "not_profitable": "the group would have to hold work that this kind of kernel saves",
    "undecided": "the two would have to be timed (--measure)",
    "slower": "the joined kernel would have to be a faster one",
    "writer": "the kernel class would have to be able to write this group",
    "class_error": "the kernel class would have to answer without an error of its own",
    "build": "the generated kernel would have to compile",
    "wrong_numbers": "the kernel's result would have to stay within the limit of its check",
}
