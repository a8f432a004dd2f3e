"""Why two groups may not become one: plain data, which plans keep."""

from __future__ import annotations

from dataclasses import dataclass
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
    """A reason a user may wonder at: `where` names the operators, `numbers` what was compared."""

    code: RefusalCode
    where: tuple[str, ...]
    why: str
    numbers: tuple[tuple[str, float], ...] = ()
