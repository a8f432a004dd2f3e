"""What callers of a model see that `main` does not say: tensors that stay between calls, results of
any structure.

    model(x) -> {"y": y, "n": 3}, and writes into its buffer `steps`
    main(x, steps) -> (y, new_steps)

A model of PyTorch writes into buffers and inputs, has weights that are loaded later, and returns
the same tensor twice, an input, a view of another result, None or a number, in tuples, dicts and
data classes. Numbers among its example inputs are parts of what it computes. `main` takes tensors
and gives each that it computes; a `Convention` says what a call makes of them. Frontends note it in
an attribute of `main`, and `taken_from` takes it off before a module is planned: no plan, cache key
or kernel depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import tvm

CONVENTION_ATTR = "tvm_fusion.convention"
STATE_ATTR = "tvm_fusion.state"
BARE = "*"  # the structure of one result that nothing is around
OF_PROCESS: dict[str, Any] = {}  # structures of classes that have no name in files, by their text


class Of(StrEnum):
    """What a result is."""

    OUTPUT = "output"  # what `main` gives: its number
    INPUT = "input"  # what the caller gave, itself: its number
    VALUE = "value"  # None, a number, a text
    EXTENT = "extent"  # a number: an expression in the symbolic extents of the inputs


@dataclass(frozen=True, slots=True)
class View:
    """A result as a view of another result or of an input, where that is contiguous: its shape and
    its strides and offset in elements.
    """

    of: Of
    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Result:
    """A leaf of what a call returns.

    Attributes
    ----------
    of : Of
    value : int, float, bool, str or None
        As `of` says.
    view : View or None
        Where the tensor `value` of the outputs shares the memory of another one: callers who give
        tensors of torch get such a view.
    is_complex : bool
        Whether the output is a complex tensor, as pairs of real numbers along a last axis.
    """

    of: Of
    value: Any
    view: View | None = None
    is_complex: bool = False


@dataclass(frozen=True, slots=True)
class Convention:
    """What a call of a model takes and gives beside the tensors of `main`.

    Attributes
    ----------
    results : tuple of Result
        In the order of the structure.
    structure : str or None
        Of them, as `torch.utils._pytree.treespec_dumps` writes it, or a key of `OF_PROCESS`; None
        is a tuple, `BARE` nothing.
    state : mapping of str to int
        Tensors that stay between calls, by their names in the model: the number of the parameter of
        `main`. Tied ones have one number.
    updates : mapping of int to int
        Inputs and state that a call gives a new value, by number: which output of `main` that is.
    values : mapping of int to tvm.runtime.Tensor
        What state there is at first, by the number of the parameter; the rest is loaded later.
    fixed : mapping of int to int, float, bool, str or None
        Inputs of the caller that are no tensors, by place among all of them: parts of the program.
    pairs : tuple of int
        Parameters that are complex tensors in the model, by number: `main` takes real and imaginary
        parts as pairs along a last axis.
    """

    results: tuple[Result, ...]
    structure: str | None = None
    state: Mapping[str, int] = field(default_factory=dict)
    updates: Mapping[int, int] = field(default_factory=dict)
    values: Mapping[int, tvm.runtime.Tensor] = field(default_factory=dict, hash=False)
    fixed: Mapping[int, Any] = field(default_factory=dict)
    pairs: tuple[int, ...] = ()

    @property
    def parameters(self) -> list[int]:
        """The parameters of `main` that callers do not give, by number."""
        return sorted(set(self.state.values()))

    @property
    def is_plain(self) -> bool:
        """Whether a call takes what `main` takes and gives what it gives."""
        gives = [Result(Of.OUTPUT, number) for number in range(len(self.results))]
        is_flat = self.structure is None or self.structure == BARE
        changes = self.keeps or self.fixed or self.pairs
        return is_flat and list(self.results) == gives and not changes

    @property
    def keeps(self) -> bool:
        """Whether calls take what the caller does not give, or change more than their outputs."""
        return bool(self.state or self.updates)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`, without those of tensors."""
        return {
            "results": [
                [
                    r.of.value,
                    r.value,
                    r.view and [getattr(r.view, n) for n in View.__slots__],
                    r.is_complex,
                ]
                for r in self.results
            ],
            "structure": self.structure,
            "state": dict(self.state),
            "updates": sorted(self.updates.items()),
            "fixed": sorted(self.fixed.items()),
            "pairs": list(self.pairs),
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], values: Mapping[int, tvm.runtime.Tensor]
    ) -> Convention:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for other data."""
        results = tuple(
            Result(Of(of), value, _view(view), *map(bool, rest))
            for of, value, view, *rest in data["results"]
        )
        return cls(
            results,
            data["structure"],
            {str(name): int(number) for name, number in data["state"].items()},
            {int(to): int(output) for to, output in data["updates"]},
            values,
            {int(place): value for place, value in data.get("fixed", ())},
            tuple(map(int, data.get("pairs", ()))),
        )


def _view(data: Sequence[Any] | None) -> View | None:
    if data is None:
        return None
    of, number, shape, strides, offset = data
    return View(Of(of), int(number), tuple(shape), tuple(strides), int(offset))


def with_convention(mod: tvm.IRModule, convention: Convention) -> tvm.IRModule:
    """The module with what its callers see."""
    values = {str(number): value for number, value in convention.values.items()}
    main = mod["main"].with_attr(CONVENTION_ATTR, json.dumps(convention.to_json()))
    found = mod.clone()
    found.update_func(mod.get_global_var("main"), main.with_attr(STATE_ATTR, values))
    return found


def taken_from(mod: tvm.IRModule) -> tuple[tvm.IRModule, Convention | None]:
    """The module without what `with_convention` noted, and that."""
    main = mod["main"]
    if not main.attrs or CONVENTION_ATTR not in main.attrs:
        return mod, None
    values = {int(number): value for number, value in main.attrs[STATE_ATTR].items()}
    convention = Convention.from_json(json.loads(str(main.attrs[CONVENTION_ATTR])), values)
    found = mod.clone()
    bare = main.without_attr(CONVENTION_ATTR).without_attr(STATE_ATTR)
    found.update_func(mod.get_global_var("main"), bare)
    return found, convention
