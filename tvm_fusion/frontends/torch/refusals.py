"""What a PyTorch model cannot be imported for, and where that stands in its source.

torch module Net: cannot be converted to Relax at 2 operators:
  aten.linalg_polar.default (net.py:12, in layers.0, and 3 more): there is no converter
  aten.randn.default (net.py:14): it draws random numbers ...

torch module Net: torch.export stops at net.py:20 (if x.sum() > 0:): Could not guard ...
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from ...errors import FrontendError, Unsupported
from ...ir.origins import Origin
from ..finish import first_line

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")

ORIGIN = "tvm_fusion_origin"  # in `meta` of a node of a graph that was kept on disk
NO_CONVERTER = "there is no converter"
COMPLEX = (
    "it has no form for complex numbers, which are computed as pairs of real ones: give it real "
    "and imaginary parts"
)
ADVICE = (
    "write these lines with other operators, or compile the submodules that do without them: "
    "tvm_fusion.compile takes any"
)


def origin_of(node: fx.Node) -> Origin:
    """The submodule that a node was traced in, and the last line of its trace outside of torch; or
    what its `meta` has as `ORIGIN`.
    """
    if ORIGIN in node.meta:
        return node.meta[ORIGIN]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith("<")]  # code that was made
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    source = f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
    return Origin(path.removeprefix("L['self']").lstrip("."), source)


def place_of(node: fx.Node) -> str:
    """A node's place in the model, in words: "net.py:12, in layers.0"; its name if that is all."""
    origin = origin_of(node)
    parts = [origin.source, origin.module and f"in {origin.module}"]
    return ", ".join(part for part in parts if part) or node.name


def producer(node: fx.Node) -> fx.Node:
    """The operator that gives a node: of a part of several results the one that gives them."""
    while getattr(node.target, "__name__", "") == "getitem":
        node = node.args[0]
    return node


@dataclass(frozen=True, slots=True)
class Refused:
    """An operator of a model that is not converted, and why."""

    node: fx.Node
    why: str

    @classmethod
    def by(cls, node: fx.Node, error: Exception) -> Refused:
        """As an error of its converter has it; those of TVM are said to be its own."""
        node = producer(node)
        if isinstance(error, FrontendError | Unsupported):
            return cls(node, first_line(error))
        return cls(node, f"this form of it is not converted (TVM: {first_line(error)})")


class OperatorsRefused(FrontendError):
    """Operators that cannot be converted.

    Attributes
    ----------
    refused : tuple of Refused
    """

    def __init__(self, where: str, refused: Sequence[Refused]) -> None:
        super().__init__(refusal(where, refused))
        self.refused = tuple(refused)


def listed(refused: Sequence[Refused]) -> list[str]:
    """Operators that are refused, each once, with the places where it stands."""
    places: dict[tuple[str, str], dict[str, None]] = {}
    for one in refused:
        places.setdefault((str(one.node.target), one.why), {})[place_of(one.node)] = None
    return [f"{name} ({_several(list(at))}): {why}" for (name, why), at in places.items()]


def refusal(where: str, refused: Sequence[Refused]) -> str:
    """The message for operators that are refused."""
    lines = listed(refused)
    if len(lines) == 1:
        return f"{where}: cannot be converted to Relax at {lines[0]}; {ADVICE}"
    told = "".join(f"\n  {line}" for line in lines)
    return f"{where}: cannot be converted to Relax at {len(lines)} operators:{told}\n{ADVICE}"


def _several(places: Sequence[str]) -> str:
    return places[0] + (f", and {len(places) - 1} more" if places[1:] else "")


# ---- What stops torch.export.

# Words of its errors, and what to change; the first that is found counts.
_REMEDIES = (
    (
        "data-dependent",
        "the line takes a branch or a size from the values of a tensor: use torch.where, "
        "torch.cond, or a size that does not depend on them",
    ),
    (
        "numpy",
        "the line leaves PyTorch for NumPy: use operators of torch there",
    ),
    (
        "Constraints violated",
        "the model does not work for all sizes of a dynamic dimension: leave it out of "
        "dynamic_shapes, or declare the sizes as torch says",
    ),
    (
        "positional argument",
        "give as many example inputs as `forward` takes",
    ),
    (
        "unexpected keyword argument",
        "give example inputs by the names that `forward` has",
    ),
    (
        "Unsupported input type",
        "give tensors as example inputs",
    ),
    (
        "assigned during export",
        "the line keeps a tensor as an attribute: register it as a buffer, or return it",
    ),
)
_OTHERWISE = "give other example inputs, or write that line with other operators"


def stopped_export(where: str, error: BaseException) -> str:
    """The message for an error of torch.export: the line of the model, and what to change."""
    frame = _frame_of_model(error)
    at = f"torch.export cannot trace it with these example inputs: {first_line(error)}"
    if frame is not None:
        line = f" ({' '.join(frame.line.split())})" if frame.line else ""
        place = f"{Path(frame.filename).name}:{frame.lineno}{line}"
        at = f"torch.export stops at {place}: {first_line(error)}"
    text = str(error)
    remedies = (remedy for words, remedy in _REMEDIES if words in text)
    return f"{where}: {at}; {next(remedies, _OTHERWISE)}"


def _frame_of_model(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the model that an error passed; None where there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        inside = False
        found = None
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename.startswith(_TORCH):
                inside = True  # what stands before is whoever compiles the model
            elif inside and _is_of_model(frame.filename):
                found = frame
        if found is not None:
            return found
        error = error.__cause__ or error.__context__
    return None


def _is_of_model(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not standard and not file.startswith((_OWN, "<"))
