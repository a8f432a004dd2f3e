"""A run of random programs on a target: one after the other, in processes that may die.

A process judges a batch of programs and is replaced; where it dies or hangs, that program counts as
a crash and a new process goes on with the next. What fails is reduced, each trial of the reduction
in such a process, too.
"""

from __future__ import annotations

import collections
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import TargetError
from ..tuning.measure.processes import LOST, Answer, Worker, stop_all, wait_for
from .reduce import reduced
from .steps import draw_program
from .torch_program import Program
from .verdict import CRASH, ERROR, REFUSED, RIGHT, WRONG, Verdict, judged

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
        while (answer := worker.collect()) is None:
            wait_for([worker], 1.0)
        return _verdict(answer)

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
