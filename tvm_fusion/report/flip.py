"""What would turn a refusal: one action, by its kind.

dtype, layout, size, model   what the author of a model can change in it
policy, measure              what a call of this package can ask for
kernel                       what takes another kernel, written here or in a class of the user's
none                         the two are faster apart
"""

from collections.abc import Callable, Mapping
from typing import Any

Numbers = Mapping[str, Any]

KINDS = ("dtype", "layout", "size", "model", "policy", "measure", "kernel", "none")


def flip(code: str, numbers: Numbers) -> str:
    """Say what would have to change for a fusion to be done, where the class that refuses does not
    say it (`plan.refusal.Refusal.action`).

    Parameters
    ----------
    code : str
        Of the refusal (`plan.refusal.RefusalCode`).
    numbers : Mapping of str to float
        What the refusal was based on.

    Returns
    -------
    str
        The kind of action, one of `KINDS`, a colon, and what to do: where the refusal rests on a
        number, the value from which on the fusion is done.

    Raises
    ------
    KeyError
        There is no such code.
    """
    for needed, said in _NUMBERS.get(code, ()):
        if set(needed) <= set(numbers):
            return said(numbers)
    return _ACTIONS[code]


def _not_profitable(n: Numbers) -> str:
    lost = n["together_us"] - n["apart_us"]
    if lost <= 0:  # such pairs gain less than another fusion of one of them
        return f"none: pays by itself ({-lost:.3g} us), but less than what was fused instead"
    share = f"pays if the joined kernel took {lost / n['together_us']:.1%} less than predicted"
    return f"none: {lost:.3g} us faster apart; {share}"


def _too_little(n: Numbers) -> str:
    share = 1 - n["together_us"] / n["apart_us"]
    return f"policy: taken with min_gain = {share:.3g} or less (now {n['min_gain']:.3g})"


def _waves(n: Numbers) -> str:
    return (
        f"size: considered if side by side took fewer than {n['waves_apart']:.3g} waves of blocks "
        f"(now {n['waves_together']:.3g})"
    )


def _undecided(n: Numbers) -> str:
    off = n["apart_us"] / n["together_us"]
    return f"measure: --measure settles it; sure if predictions were off by {off:.3g} times at most"


def _measured(n: Numbers) -> str:
    wanted = n["apart_us"] - 3 * n["error_us"]
    return f"kernel: pays if it took less than {wanted:.3g} us, three standard errors below apart"


def _budget(n: Numbers) -> str:
    return f"policy: settled with measure_budget_s above {n['budget_s']:.3g}"


def _recompute(n: Numbers) -> str:
    least = f"max_recompute = {n['factor']:.4g} (now {n['allowed']:.4g})"
    return f"policy: allowed from {least}, if it pays then"


def _group_size(n: Numbers) -> str:
    least = f"max_group_ops = {n['ops']:.0f} (now {n['allowed']:.0f})"
    return f"policy: allowed from {least}, if it pays then"


def _parameter_bytes(n: Numbers) -> str:
    fit = f"{n['bytes']:.0f} bytes of parameters, {n['allowed']:.0f} fit"
    return f"model: read and write fewer tensors: {fit}"


def _products(n: Numbers) -> str:
    return f"model: join at most {n['allowed']:.0f} products (now {n['products']:.0f})"


def _depths(n: Numbers) -> str:
    return (
        f"size: considered if the longest sum had {n['allowed']:.0f} terms (now {n['longest']:.0f})"
    )


def _row_length(n: Numbers) -> str:
    return (
        f"size: considered for rows of {n['least']:.0f} to {n['most']:.0f} elements (now "
        f"{n['columns']:.0f})"
    )


def _shorter_rows(n: Numbers) -> str:
    rows = f"rows of fewer than {n['columns']:.0f} elements"
    return f"size: considered for {rows}, if a block holds these"


def _one_reduction(n: Numbers) -> str:
    return f"model: considered with 1 reducing operator (now {n['reducing']:.0f})"


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

# By code, what to do where no number says it.
_ACTIONS = {
    "cycle": "model: move the operator between the two in front of both, or behind both",
    "opaque": (
        "model: write the operator as a pure tensor expression (`call_tir`), no external, random "
        "or impure call"
    ),
    "region": "model: put both into one dataflow block, with nothing impure between them",
    "space_mismatch": "layout: let both run over the same elements, in the same order",
    "reduction": "kernel: a class of your own that reduces for both in one pass over the data",
    "several_contractions": (
        "model: let the products read the same left operand, and neither the other's result"
    ),
    "not_trailing": "layout: permute what is read so that the reduced axes are the contiguous ones",
    "off_row": "model: let each row read values of its own row only",
    "prologue": (
        "model: leave only plain pointwise work in front of the reduction or product, read by "
        "nothing else"
    ),
    "epilogue": "kernel: a class of your own that holds the whole rows that are reduced",
    "recompute": "policy: raise max_recompute",
    "group_size": "policy: raise max_group_ops",
    "parameter_bytes": "model: read and write fewer tensors",
    "not_profitable": "none: such a kernel saves nothing here",
    "undecided": "measure: --measure times the two",
    "slower": "kernel: `tune` measures other kernels for the two as one",
    "writer": "kernel: a class of your own that writes this group",
    "class_error": "kernel: mend the error of the kernel class",
    "build": "kernel: report it, the generated kernel does not compile",
    "wrong_numbers": "kernel: report it, with the reproducer of `python -m tvm_fusion bisect`",
}
