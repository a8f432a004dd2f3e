"""Reduces a program that fails to one that fails in the same way and is as short as can be.

Tried in turns, as long as one of them helps: fewer or earlier results; statements cut out, their
values drawn as inputs instead (first many at once, then one by one); a statement replaced by one
of its operands, or by a constant; smaller sizes; inputs that are no views.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from .draw import _moderate, _random_code, dtype_name
from .torch_program import Input, Program, Statement, in_float64, run_statement, wide

Fails = Callable[[Program], bool]

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_FIRST_CUT = 1000  # inputs above this number stand for statements that were cut


def reduced(program: Program, fails: Fails, seconds: float) -> Program:
    """A program that fails as `program` does, reduced for at most so many seconds.

    Parameters
    ----------
    program : Program
    fails : callable
        Whether a program fails in the way that matters; asked about programs that torch can run.
    seconds : float
    """
    end = time.monotonic() + seconds
    while True:
        for candidate in _candidates(program):
            if time.monotonic() > end:
                return program
            if candidate != program and _runs(candidate) and fails(candidate):
                program = candidate
                break
        else:
            return program


def _candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, those that are much smaller first."""
    yield from _fewer_results(program)
    values = _values(program)
    count = len(program.statements)
    size = count // 2
    while size:
        for first in range(0, count, size):
            yield _cut(program, program.statements[first : first + size], values)
        size //= 2
    for statement in reversed(program.statements):
        yield from _bypassed(program, statement, values)
    yield from _smaller(program)
    yield from _plain_inputs(program, values)


def _fewer_results(program: Program) -> Iterator[Program]:
    """One result alone, or what that one is made from."""
    if len(program.results) > 1:
        for result in program.results:
            yield replace(program, results=(result,)).without_dead()
        return
    made = {s.name: s for s in program.statements}
    for operand in made[program.results[0]].operands if program.results[0] in made else ():
        if operand in made:
            yield replace(program, results=(operand,)).without_dead()


def _cut(program: Program, cut: tuple[Statement, ...], values: dict[str, Any]) -> Program:
    """The program with new inputs in place of the values of statements."""
    for statement in cut:
        if len(program.results) == 1 and statement.name == program.results[0]:
            continue
        x = values[statement.name]
        name = f"x{_FIRST_CUT + int(statement.name[1:])}"
        new = Input(name, _drawn_like(x))
        program = _renamed(program, statement.name, name)
        program = replace(program, inputs=(*program.inputs, new))
    return program.without_dead()


def _bypassed(program: Program, statement: Statement, values: dict[str, Any]) -> Iterator[Program]:
    """One of the operands, if it is of the same kind, or a constant."""
    x = values[statement.name]
    for operand in dict.fromkeys(statement.operands):
        y = values[operand]
        if (x.shape, x.dtype) == (y.shape, y.dtype):
            yield _renamed(program, statement.name, operand).without_dead()
    constant = f"{{out}} = torch.full({tuple(x.shape)}, 1, dtype={x.dtype})"
    if statement.operands:
        new = Statement(statement.name, constant, ())
        statements = tuple(new if s == statement else s for s in program.statements)
        yield replace(program, statements=statements).without_dead()


def _renamed(program: Program, old: str, new: str) -> Program:
    """The program without what makes `old`, which is read as `new`."""
    statements = tuple(
        replace(s, operands=tuple(new if o == old else o for o in s.operands))
        for s in program.statements
        if s.name != old
    )
    results = tuple(new if r == old else r for r in program.results)
    return replace(program, statements=statements, results=results)


def _smaller(program: Program) -> Iterator[Program]:
    """One size less, wherever its number stands."""
    codes = [i.code for i in program.inputs] + [s.code for s in program.statements]
    numbers = sorted({int(n) for code in codes for n in _NUMBER.findall(code)}, reverse=True)
    for number in numbers:
        for smaller in dict.fromkeys((1, 2, 3, number // 2, number - 1)):
            if 0 < smaller < number:
                yield _with_number(program, number, smaller)


def _with_number(program: Program, old: int, new: int) -> Program:
    def changed(code: str) -> str:
        return _NUMBER.sub(lambda m: str(new) if int(m[0]) == old else m[0], code)

    return replace(
        program,
        inputs=tuple(replace(i, code=changed(i.code)) for i in program.inputs),
        statements=tuple(replace(s, code=changed(s.code)) for s in program.statements),
    )


def _plain_inputs(program: Program, values: dict[str, Any]) -> Iterator[Program]:
    for old in program.inputs:
        plain = _drawn_like(values[old.name])
        if len(plain) < len(old.code):
            new = replace(old, code=plain)
            yield replace(program, inputs=tuple(new if i == old else i for i in program.inputs))


def _drawn_like(x: torch.Tensor) -> str:
    """An expression for random values such as these, integers in their range."""
    dtype = dtype_name(x.dtype)
    if x.is_floating_point() or dtype == "bool":
        return _random_code(tuple(x.shape), dtype, None)
    return _random_code(tuple(x.shape), dtype, max(1, int(x.max()) + 1))


def _values(program: Program) -> dict[str, Any]:
    values = dict(zip((i.name for i in program.inputs), program.arguments(), strict=True))
    for statement in program.statements:
        run_statement(statement, values, double=False)
    return values


def _runs(program: Program) -> bool:
    """Whether torch runs it, with moderate values and without a change of an input."""
    try:
        arguments = program.arguments()
        own = dict(zip((i.name for i in program.inputs), map(torch.clone, arguments), strict=True))
        exact = {name: wide(x) for name, x in own.items()}
        for statement in program.statements:
            run_statement(statement, own, double=False)
            with in_float64():
                run_statement(statement, exact, double=True)
        inputs = zip(program.inputs, arguments, strict=True)
        return all(torch.equal(own[i.name], x) for i, x in inputs) and all(
            _moderate(own[s.name], exact[s.name]) for s in program.statements
        )
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, NameError):
        return False
