"""Online softmax: a sum of exponentials relative to a maximum runs along with that maximum.

    r0 = max a            phase 0            r0 = max a             phase 0
    r1 = sum exp(a - r0)  phase 1     ->     r1 = sum exp(a - r0)   phase 0, along with r0
    y  = exp(a - r0) / r1 phase 2            y  = exp(a - r0) / r1  phase 1

While it runs, such a sum is relative to the maximum so far; whoever raises the maximum from `old`
to `new` multiplies the sum by ``exp(old - new)``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Call, Expr, Var

from .expr import same, substitute, variables
from .program import Program, ReduceKind, Reduction, Value


def merge_online(program: Program) -> Program:
    """`program` with every sum over ``exp(a - max a) [* w]`` run along with its maximum."""
    if program.exact:
        return program
    view = _View(program)
    partners = {}
    for reduction in program.reductions:
        partner = view.partner(reduction)
        if partner is not None:
            partners[reduction.var] = partner.var
    return _with_partners(program, partners) if partners else program


def scaled_values(program: Program) -> dict[Var, Var]:
    """Values that are proportional to ``exp(-m)`` for the maximum m of an online sum, by value."""
    view = _View(program)
    found: dict[Var, Var] = {}
    for reduction in program.reductions:
        if reduction.online is None:
            continue
        for var in view.factors(reduction.body).values_on_the_way:
            if view.depends(var, reduction.online):
                found[var] = reduction.online
    return found


def depends_on(program: Program, var: Var, target: Var) -> bool:
    """Whether placeholder `var` is computed from `target`, through values."""
    return _View(program).depends(var, target)


@dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    factors: list[Expr]
    values_on_the_way: list[Var]


class _View:
    """Looks through the values of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[Var, Value] = {value.var: value for value in program.values}

    def open(self, expr: Expr) -> Expr:
        """The body behind a value, else `expr` itself."""
        while isinstance(expr, Var) and expr in self.values:
            expr = self.values[expr].body
        return expr

    def expand(self, expr: Expr) -> Expr:
        """`expr` with all values put in."""
        env = {v: self.expand(self.values[v].body) for v in variables(expr) if v in self.values}
        return substitute(expr, env)

    def depends(self, expr: Expr, target: Var) -> bool:
        waiting, seen = variables(expr), set()
        while waiting:
            var = waiting.pop()
            if var.same_as(target):
                return True
            if var in self.values and var not in seen:
                seen.add(var)
                waiting += variables(self.values[var].body)
        return False

    def factors(self, expr: Expr) -> _Factors:
        """Factors of a product, with the values that are products or factors themselves."""
        found = _Factors([], [])

        def split(e: Expr) -> None:
            if isinstance(e, Var) and e in self.values:
                found.values_on_the_way.append(e)
                e = self.open(e)
            if isinstance(e, tirx.Mul):
                split(e.a)
                split(e.b)
            else:
                found.factors.append(e)

        split(expr)
        return found

    def partner(self, reduction: Reduction) -> Reduction | None:
        """The maximum that `reduction` can run along with."""
        if reduction.kind != ReduceKind.SUM or reduction.initial is not None:
            return None
        factors = self.factors(reduction.body).factors
        for top in self.program.reductions:
            if top.kind != ReduceKind.MAX or top.phase + 1 != reduction.phase:
                continue
            if top.initial is None and top.dtype == reduction.dtype == "float32":
                related = [f for f in factors if self.depends(f, top.var)]
                if len(related) == 1 and self.is_exponential(related[0], top):
                    late = (
                        r for r in self.program.reductions if r.phase >= top.phase and r is not top
                    )
                    if not any(self.depends(reduction.body, other.var) for other in late):
                        return top
        return None

    def is_exponential(self, factor: Expr, top: Reduction) -> bool:
        """Whether `factor` is ``exp(a - max a)``."""
        if not isinstance(factor, Call) or factor.op.name != "tirx.exp":
            return False
        difference = self.open(factor.args[0])
        if not isinstance(difference, tirx.Sub) or not difference.b.same_as(top.var):
            return False
        return same(self.expand(difference.a), self.expand(top.body))


def _with_partners(program: Program, partners: dict[Var, Var]) -> Program:
    """Sets the partners and counts the phases again, in order of definition."""
    view = _View(program)
    level: dict[Var, int] = {}
    by_phase = sorted(program.reductions, key=lambda r: r.phase)
    phases: dict[Var, int] = {}
    for r in by_phase:
        partner = partners.get(r.var)
        others = [q for q in level if partner is None or not q.same_as(partner)]
        needed = [level[q] for q in others if view.depends(r.body, q)]
        if partner is not None:
            needed.append(phases[partner])
        phases[r.var] = max(needed, default=0)
        level[r.var] = phases[r.var] + 1

    def after(expr: Expr) -> int:
        return max((level[q] for q in level if view.depends(expr, q)), default=0)

    replace = dataclasses.replace
    return replace(
        program,
        reductions=tuple(
            replace(r, phase=phases[r.var], online=partners.get(r.var)) for r in program.reductions
        ),
        values=tuple(replace(v, phase=after(v.body)) for v in program.values),
        outputs=tuple(replace(o, phase=after(o.value)) for o in program.outputs),
    )
