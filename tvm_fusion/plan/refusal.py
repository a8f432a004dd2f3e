"""Why two groups may not become one: plain data, which plans keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RefusalCode(Enum):
    """Why two groups may not become one. Closed: a new reason is a new member here, with a test."""

    CYCLE = "cycle"
    OPAQUE = "opaque"
    REGION = "region"
    SPACE_MISMATCH = "space_mismatch"
    REDUCTION = "reduction"
    SEVERAL_CONTRACTIONS = "several_contractions"
    NOT_TRAILING = "not_trailing"
    OFF_ROW = "off_row"
    PROLOGUE = "prologue"
    EPILOGUE = "epilogue"
    RECOMPUTE = "recompute"
    PARAMETER_BYTES = "parameter_bytes"
    GROUP_SIZE = "group_size"
    NOT_PROFITABLE = "not_profitable"
    UNDECIDED = "undecided"
    SLOWER = "slower"
    WRITER = "writer"
    CLASS_ERROR = "class_error"
    BUILD = "build"
    WRONG_NUMBERS = "wrong_numbers"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason a user may wonder at.

    Attributes
    ----------
    code : RefusalCode
    where : tuple of str
        The operators, or the launches as "first..last", that stay apart.
    why : str
        The reason in one sentence.
    numbers : tuple of (str, float)
        What was compared.
    action : str or None
        What would turn it, where the kernel class that refuses knows the group as its kind and
        lacks one thing: "dtype: ...", "layout: ...", "policy: ...", "size: ..." or "model: ...".
        Plans do not keep it, nor what follows: `plan.explain.true_reasons` finds them again.
    kernel_class : str or None
        The class that refuses.
    cost_us : float or None
        What the refusal costs by the cost model.
    """

    code: RefusalCode
    where: tuple[str, ...]
    why: str
    numbers: tuple[tuple[str, float], ...] = ()
    action: str | None = field(default=None, compare=False)
    kernel_class: str | None = field(default=None, compare=False)
    cost_us: float | None = field(default=None, compare=False)
