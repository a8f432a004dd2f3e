"""A run of random programs on a target: one after the other, in processes that may die.

A process judges a batch of programs and is replaced; where it dies or hangs, that program counts as
a crash and a new process goes on with the next. What fails is reduced, each trial of the reduction
in such a process, too.
"""

from __future__ import annotations

import collections
import datetime
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import TargetError
from ..tuning.measure.processes import LOST, Answer, Worker, stop_all, wait_for
from .draw import (
    ATTEMPTS,
    FLOAT_SHARES,
    LEAST,
    MOST,
    Draft,
    Step,
    _moderate,
    _random_code,
    dtype_name,
    first_shape,
)
from .steps_layers import STEPS as LAYERS
from .steps_math import STEPS as MATH
from .steps_moves import STEPS as MOVES
from .steps_writes import STEPS as WRITES
from .torch_program import Input, Program, Statement, in_float64, run_statement, wide
from .verdict import CRASH, ERROR, REFUSED, RIGHT, WRONG, Verdict, judged

# The operators that programs are drawn from, by groups; and a program of them.

STEPS: tuple[Step, ...] = (*MATH, *MOVES, *LAYERS, *WRITES)


def draw_program(seed: int, most: int = MOST) -> Program:
    """The program of a seed, of `LEAST` to `most` statements."""
    rng = random.Random(seed)
    dtype = rng.choices(list(FLOAT_SHARES), list(FLOAT_SHARES.values()))[0]
    draft = Draft(rng, seed, dtype)
    for _ in range(rng.randint(1, 3)):
        draft.input(first_shape(draft), draft.dtype)
    wanted, failed = rng.randint(LEAST, most), 0
    weights = [step.weight for step in STEPS]
    while len(draft.statements) < wanted and failed < ATTEMPTS:
        statement = rng.choices(STEPS, weights)[0].draw(draft)
        kept = statement is not None and draft.keep(statement)
        failed = 0 if kept else failed + 1
    return draft.program()


# Reduces a program that fails to one that fails in the same way and is as short as can be.
#
# Tried in turns, as long as one of them helps: fewer or earlier results; statements cut out, their
# values drawn as inputs instead (first many at once, then one by one); a statement replaced by one
# of its operands, or by a constant; smaller sizes; inputs that are no views.

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


BATCH = 100  # programs of one process: what they compile stays in its memory
LIMIT_S = 180.0  # of one program, kernels compiled by nvcc included
REDUCED_ALIKE = 2  # failures with the same words that are reduced
KEPT_APART = {"TVM_FUSION_PLAN_CACHE": "0", "TVM_FUSION_KERNEL_CACHE": "0"}

Judge = Callable[[Program, str], Verdict]


@dataclass(frozen=True, slots=True)
class Failure:
    """A program that failed, and what was left of it when it was reduced."""

    seed: int
    verdict: Verdict
    program: Program


@dataclass
class Campaign:
    """What came of a run.

    Attributes
    ----------
    verdicts : dict of int to Verdict
        By seed.
    failures : list of Failure
    """

    target: str
    machine: str
    statements: int
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many programs there are of each kind."""
        found = collections.Counter(v.kind for v in self.verdicts.values())
        return {kind: found[kind] for kind in (RIGHT, REFUSED, ERROR, WRONG, CRASH)}

    def refusals(self) -> dict[str, list[int]]:
        """The seeds that were refused, by what refused them."""
        found: dict[str, list[int]] = collections.defaultdict(list)
        for seed, verdict in sorted(self.verdicts.items()):
            if verdict.kind == REFUSED:
                found[verdict.why].append(seed)
        return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))

    def to_json(self, command: str) -> dict[str, Any]:
        """The result as it is kept."""
        import torch
        import tvm

        return {
            "target": self.target,
            "machine": self.machine,
            "date": datetime.date.today().isoformat(),
            "tvm": tvm.__version__,
            "torch": torch.__version__,
            "command": command,
            "seeds": [min(self.verdicts, default=0), max(self.verdicts, default=0)],
            "most_statements": self.statements,
            "programs": len(self.verdicts),
            "counts": self.counts(),
            "refused": self.refusals(),
            "failures": [
                {"seed": seed, "kind": v.kind, "why": v.why}
                for seed, v in sorted(self.verdicts.items())
                if v.failed
            ],
        }


@dataclass
class Runner:
    """Judges programs in processes.

    Parameters
    ----------
    target : str
    processes : int
    limit_s : float
        For one program.
    judge : callable
        A function of a module: what becomes of a program on a target.
    """

    target: str
    processes: int = 1
    limit_s: float = LIMIT_S
    judge: Judge = judged
    _workers: list[Worker] = field(default_factory=list)
    _asked: collections.Counter = field(default_factory=collections.Counter)

    def __enter__(self) -> Runner:
        self._workers = [Worker(f"fuzz {n}", environment=KEPT_APART) for n in range(self.processes)]
        return self

    def __exit__(self, *error: object) -> None:
        stop_all(self._workers)

    def run(
        self,
        campaign: Campaign,
        first: int,
        seconds: float,
        told: Callable[[int, Verdict], None] = lambda seed, verdict: None,
    ) -> None:
        """Judges the programs of the seeds from `first` on, as many as there is time for."""
        end, seed = time.monotonic() + seconds, first
        running: dict[Worker, int] = {}
        while running or time.monotonic() < end:
            for worker in self._workers:
                if worker not in running and time.monotonic() < end:
                    drawn = (self.judge, seed, campaign.statements, self.target)
                    self._ask(worker, judge_seed, drawn)
                    running[worker] = seed
                    seed += 1
            wait_for(list(running), 1.0)
            for worker in list(running):
                answer = worker.collect()
                if answer is not None:
                    done = running.pop(worker)
                    campaign.verdicts[done] = _verdict(answer)
                    told(done, campaign.verdicts[done])

    def reduce(self, campaign: Campaign, seconds: float) -> None:
        """Reduces the failures of a campaign, at most `REDUCED_ALIKE` of those with the same first
        words, for at most so many seconds each.
        """
        alike: collections.Counter = collections.Counter()
        for seed, verdict in sorted(campaign.verdicts.items()):
            key = (verdict.kind, seed if verdict.kind == WRONG else verdict.why[:60])
            if verdict.failed and alike[key] < REDUCED_ALIKE:
                alike[key] += 1
                program = draw_program(seed, campaign.statements)
                program = self.reduced(program, verdict, seconds)
                campaign.failures.append(Failure(seed, verdict, program))

    def judged(self, program: Program) -> Verdict:
        """The verdict on one program, of a process that is free."""
        worker = self._workers[0]
        self._ask(worker, judge_program, (self.judge, program, self.target))
        return _verdict(worker.wait())

    def reduced(self, program: Program, verdict: Verdict, seconds: float) -> Program:
        """A shorter program that fails in the same way."""
        return reduced(program, lambda p: self.judged(p).like(verdict), seconds)

    def _ask(self, worker: Worker, function: Callable, arguments: tuple) -> None:
        if self._asked[worker.name] >= BATCH:
            worker.stop()
            self._asked[worker.name] = 0
        self._asked[worker.name] += 1
        worker.send(function, arguments, self.limit_s)


def judge_seed(judge: Judge, seed: int, statements: int, target: str) -> Verdict:
    """The verdict on the program of a seed."""
    return judge(draw_program(seed, statements), target)


def judge_program(judge: Judge, program: Program, target: str) -> Verdict:
    """The verdict on a program."""
    return judge(program, target)


def _verdict(answer: Answer) -> Verdict:
    """The verdict that a process gave, or what its death says."""
    if answer.status == "ok":
        return answer.value
    if answer.status == LOST:
        raise TargetError(answer.why)
    return Verdict(ERROR if answer.status == "error" else CRASH, answer.why)
