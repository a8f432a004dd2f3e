"""A torch program as text: inputs, statements, results.

    Program((Input("x0", "torch.randn(7, 9).t()"),),
            (Statement("v0", "{out} = torch.softmax({0}, 1)", ("x0",)),), ("v0",))

stands for

    def forward(x0):
        v0 = torch.softmax(x0, 1)
        return (v0,)

The same text gives the program in its own types and, with every float type read as float64, its
reference: nothing is computed twice in two spellings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

FLOATS = ("float16", "bfloat16", "float32", "float64")
_NARROW = re.compile(r"\btorch\.(float16|bfloat16|float32)\b")


@dataclass(frozen=True, slots=True)
class Input:
    """An input, and the expression that draws it from torch's generator; views included.

    Its values do not depend on the other inputs, so that these can go.
    """

    name: str
    code: str

    def seed(self, seed: int) -> int:
        """The seed of its values in a program's."""
        return seed * 1000 + int(self.name[1:])

    def value(self, seed: int) -> torch.Tensor:
        """Its value for a program's seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed(seed))
            return eval(self.code, {"torch": torch})


@dataclass(frozen=True, slots=True)
class Statement:
    """What makes one value.

    Attributes
    ----------
    name : str
        The value.
    code : str
        Lines of Python, with `{out}` for the value and `{0}`, `{1}` ... for the operands.
    operands : tuple of str
        Inputs and earlier values.
    """

    name: str
    code: str
    operands: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The lines as they stand in the program."""
        return self.code.format(*self.operands, out=self.name).split("\n")


@dataclass(frozen=True, slots=True)
class Program:
    """A program; `seed` is that of its inputs' values."""

    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    seed: int = 0

    def source(self) -> str:
        """The function `forward`."""
        lines = [line for s in self.statements for line in s.lines]
        lines.append(f"return ({', '.join(self.results)},)")
        head = f"def forward({', '.join(i.name for i in self.inputs)}):"
        return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"

    def module(self) -> torch.nn.Module:
        """The program as a module that torch can export."""
        return _Module(_function(self.source()))

    def arguments(self, seed: int | None = None) -> tuple[torch.Tensor, ...]:
        """Values for the inputs."""
        return tuple(i.value(self.seed if seed is None else seed) for i in self.inputs)

    def eager(self, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What torch computes in the program's own types."""
        return _function(self.source())(*map(copied, arguments))

    def exact(self, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The same in float64; integers and booleans as they are."""
        with in_float64():
            return _function(widened(self.source()))(*map(wide, arguments))

    def without_dead(self) -> Program:
        """The program without what no result depends on; writes through a view of a result may go
        with it.
        """
        needed, kept = set(self.results), []
        for s in reversed(self.statements):
            if s.name in needed or needed.intersection(written(s)):
                needed.update((s.name, *s.operands))
                kept.append(s)
        inputs = tuple(i for i in self.inputs if i.name in needed)
        return replace(self, inputs=inputs, statements=tuple(reversed(kept)))

    def standalone(self, target: str, title: str) -> str:
        """A test file that needs torch and this package only."""
        drawn = (f"    ({i.seed(self.seed)}, lambda: {i.code})," for i in self.inputs)
        return _STANDALONE.format(
            title=title, source=self.source(), inputs="\n".join(drawn), target=target
        )


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.function(*inputs)


class in_float64:
    """Python's numbers make float64 of integers, as they make float32 elsewhere."""

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before)


def widened(code: str) -> str:
    """The code with every float type read as float64."""
    return _NARROW.sub("torch.float64", code)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, in float64 if it is of floats."""
    return x.double().clone() if x.is_floating_point() else x.clone()


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy, so that nothing changes the arguments; an expanded tensor cannot be written into."""
    return x if 0 in x.stride() else x.clone()


def run_statement(statement: Statement, values: dict[str, Any], double: bool) -> None:
    """Runs one statement on values by name."""
    code = "\n".join(statement.lines)
    exec(widened(code) if double else code, {"torch": torch, "F": F}, values)


def written(statement: Statement) -> tuple[str, ...]:
    """The operands that a statement changes: those that its code begins with, before a `[`."""
    found = re.match(r"\{(\d+)\}\[", statement.code)
    return (statement.operands[int(found.group(1))],) if found else ()


def _function(source: str) -> Any:
    space: dict[str, Any] = {"torch": torch, "F": F}
    exec(source, space)
    return space["forward"]


_STANDALONE = '''"""{title}"""

import torch
import torch.nn.functional as F  # noqa: F401

import tvm_fusion


{source}

INPUTS = (
{inputs}
)


class Model(torch.nn.Module):
    def forward(self, *inputs):
        return forward(*inputs)


def drawn(seed, draw):
    torch.manual_seed(seed)
    return draw()


def test_the_program_is_right():
    inputs = tuple(drawn(*of) for of in INPUTS)
    compiled = tvm_fusion.compile(Model(), "{target}", example_inputs=inputs, verify=False)
    results = compiled(*inputs)
    for given, right in zip(results, forward(*inputs), strict=True):
        torch.testing.assert_close(torch.as_tensor(given).cpu(), right)
'''
