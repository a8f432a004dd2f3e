"""Draws a program from a seed, statement by statement.

Each statement is run as soon as it is drawn, in the program's own types and in float64, and only
kept if torch takes it, its values stay moderate, and roundings do not decide them: integers are
equal both ways, and floats are as near as the type allows. What is left of a program is thus well
conditioned, and a wrong number is somebody's fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .torch_program import (
    FLOATS,
    Input,
    Program,
    Statement,
    in_float64,
    run_statement,
    wide,
    written,
)

LEAST, MOST = 5, 40  # statements
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 21, 24, 27, 31, 32, 33, 40, 49, 63, 64)
ELEMENTS = 8192  # of a value
LARGEST = 1e3  # magnitude of a value
CHAIN = 0.6  # how often a statement reads one of the last values
RECENT = 4
ATTEMPTS = 60  # statements that are drawn in a row without one being kept
RANK = 4

FLOAT_SHARES = {"float32": 5, "float16": 3, "bfloat16": 2, "float64": 1}
INTEGERS = ("int8", "int32", "int64", "uint8")

# How far a value may be from float64, relative to the largest: some hundred roundings.
NEAR = {"float64": 1e-12, "float32": 3e-5, "float16": 3e-2, "bfloat16": 1e-1}


@dataclass(frozen=True, slots=True)
class Step:
    """A kind of statement: how often it is drawn, and what draws it (None: not applicable)."""

    name: str
    weight: float
    draw: Callable[[Draft], Statement | None]


@dataclass
class Draft:
    """A program while it is drawn.

    Attributes
    ----------
    rng : random.Random
    dtype : the float type that most values have
    own, exact : values by name, in their own types and in float64
    """

    rng: random.Random
    seed: int
    dtype: str
    inputs: list[Input] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    exact: dict[str, torch.Tensor] = field(default_factory=dict)

    # ---- what steps are written with

    def size(self, most: int = 64) -> int:
        """A size of at most `most`."""
        return self.rng.choice([s for s in SIZES if s <= most])

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        return self.rng.choice(options)

    def value(self, fits: Callable[[torch.Tensor], bool]) -> str | None:
        """A value for which `fits` holds, mostly a recent one; None if there is none."""
        names = [name for name, x in self.own.items() if fits(x)]
        if not names:
            return None
        return self.rng.choice(names[-RECENT:] if self.rng.random() < CHAIN else names)

    def floating(self, ranks: Sequence[int] = (0, 1, 2, 3, 4, 5)) -> str | None:
        """A value of floats."""
        return self.value(lambda x: x.is_floating_point() and x.ndim in ranks)

    def alike(self, name: str) -> str:
        """Another value of the same shape and type, or a new input."""
        x = self.own[name]
        others = [
            other
            for other, y in self.own.items()
            if other != name and (y.shape, y.dtype) == (x.shape, x.dtype)
        ]
        if others and self.rng.random() < 0.7:
            return self.rng.choice(others)
        return self.input(tuple(x.shape), dtype_name(x.dtype))

    def broadcast(self, name: str) -> str:
        """An operand that broadcasts to a value: alike, a row, a column, a number."""
        x = self.own[name]
        if not x.ndim or self.rng.random() < 0.5:
            return self.alike(name)
        kept = [e if self.rng.random() < 0.5 else 1 for e in x.shape]
        return self.input(tuple(kept[self.rng.randrange(x.ndim) :]), dtype_name(x.dtype))

    def axis(self, name: str) -> int | None:
        """An axis of a value."""
        return self.rng.randrange(self.own[name].ndim) if self.own[name].ndim else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(self.own[name].shape)

    def input(self, shape: tuple[int, ...], dtype: str, below: int | None = None) -> str:
        """A new input; integers lie in [0, below), or are small."""
        code = self._strided(shape, lambda of: _random_code(of, dtype, below))
        declared = Input(f"x{len(self.inputs)}", code)
        self.inputs.append(declared)
        self.own[declared.name] = declared.value(self.seed)
        self.exact[declared.name] = wide(self.own[declared.name])
        return declared.name

    def statement(self, code: str, *operands: str | None) -> Statement | None:
        """A statement, unless an operand is missing; `{out} =` is put before an expression."""
        if None in operands:
            return None
        code = code if "{out}" in code else "{out} = " + code
        return Statement(f"v{len(self.statements)}", code, tuple(operands))

    def owned(self, name: str) -> bool:
        """Whether a value lies in memory that no input has."""
        taken = {self.own[i.name].untyped_storage().data_ptr() for i in self.inputs}
        return self.own[name].untyped_storage().data_ptr() not in taken

    def share(self, *names: str) -> bool:
        """Whether values lie in the same memory."""
        return len({self.own[name].untyped_storage().data_ptr() for name in names}) < len(names)

    # ---- keeping and finishing

    def keep(self, statement: Statement) -> bool:
        """Adds a statement, if it is as the module's docstring says."""
        try:
            with in_float64():
                run_statement(statement, self.exact, double=True)
            run_statement(statement, self.own, double=False)
            kept = all(_moderate(self.own[n], self.exact[n]) for n in self._changed(statement))
        except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError):
            kept = False
        if kept:
            self.statements.append(statement)
        else:
            self._again()
        return kept

    def program(self) -> Program:
        """The program; its results are the values that nothing reads, and some others."""
        read = {o for s in self.statements for o in s.operands}
        made = [s.name for s in self.statements]
        results = [n for n in made if n not in read or self.rng.random() < 0.1]
        return Program(
            tuple(self.inputs), tuple(self.statements), tuple(results), self.seed
        ).without_dead()

    def _changed(self, statement: Statement) -> list[str]:
        """The value that a statement makes and, where it writes, all."""
        return list(self.own) if written(statement) else [statement.name]

    def _again(self) -> None:
        """Computes the values anew, without what a refused statement did to them."""
        names = [i.name for i in self.inputs]
        self.own = {n: self.own[n] for n in names}
        self.exact = {n: self.exact[n] for n in names}
        for s in self.statements:
            run_statement(s, self.own, double=False)
            with in_float64():
                run_statement(s, self.exact, double=True)

    def _strided(self, shape: tuple[int, ...], code_of: Callable[[tuple], str]) -> str:
        """An expression for a tensor, a quarter of them views of another."""
        way = self.rng.choice(("turned", "stepped", "expanded", *("plain",) * 9))
        if way == "turned" and len(shape) >= 2:
            a, b = sorted(self.rng.sample(range(len(shape)), 2))
            turned = list(shape)
            turned[a], turned[b] = turned[b], turned[a]
            return f"{code_of(tuple(turned))}.transpose({a}, {b})"
        if way == "stepped" and shape:
            wider = (*shape[:-1], 2 * shape[-1])
            return f"{code_of(wider)}[..., 1::2]"
        if way == "expanded" and shape:
            axis = self.rng.randrange(len(shape))
            narrow = (*shape[:axis], 1, *shape[axis + 1 :])
            return f"{code_of(narrow)}.expand({', '.join(map(str, shape))})"
        return code_of(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's dtype without its module."""
    return str(dtype).removeprefix("torch.")


def first_shape(draft: Draft) -> tuple[int, ...]:
    """One to `RANK` axes of odd sizes, of few enough elements."""
    while True:
        shape = tuple(draft.size() for _ in range(draft.rng.choice((1, 2, 2, 2, 3, 3, RANK))))
        if 1 < torch.Size(shape).numel() <= ELEMENTS // 4:
            return shape


def _random_code(shape: tuple[int, ...], dtype: str, below: int | None) -> str:
    sizes = ", ".join(map(str, shape))
    if dtype in FLOATS:
        given = f"({sizes})" if shape else "()"
        given = f"({sizes},)" if len(shape) == 1 else given
        plain = f"torch.randn({given})"
        return plain if dtype == "float32" else f"{plain}.to(torch.{dtype})"
    given = f"({sizes},)" if len(shape) == 1 else f"({sizes})"
    if dtype == "bool":
        return f"(torch.rand({given}) < 0.5)"
    low, high = (0, below) if below is not None else (0 if dtype == "uint8" else -8, 9)
    return f"torch.randint({low}, {high}, {given}, dtype=torch.{dtype})"


def _moderate(own: Any, exact: Any) -> bool:
    if not isinstance(own, torch.Tensor) or own.shape != exact.shape:
        return False
    if not 0 < own.numel() <= ELEMENTS or own.ndim > RANK + 1:
        return False
    if not own.is_floating_point():
        return dtype_name(own.dtype) in (*INTEGERS, "bool") and torch.equal(own, exact)
    largest = float(exact.abs().max())
    error = float((own.double() - exact).abs().max())
    return largest <= LARGEST and error <= NEAR[dtype_name(own.dtype)] * max(largest, 1e-3)
