"""The space that a nest loops over: its axes, neighbouring ones fused where memory allows.

    for h < 7: for w < 7: y[n, h, w] = f(x[n, h, w])    ->  for i < 49: y[n, i // 7, i % 7] = ...

Short inner axes do not fill vectors. Axes are fused where every access is linear in the fused one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...program.expr import constant, convert, dtype_of, number
from ..contraction.operands import product_of
from ..loops import Loop
from ..stages.rewrite import Rewriter, Substitute, free_variables, nodes, rebuild
from ..stages.stages import Axis, offset
from .nests import Member, Nest
from .scope import Region, Scope


@dataclass(frozen=True, slots=True)
class Slot:
    """One loop of a nest: the positions of the axes it runs over, outermost first."""

    axes: tuple[int, ...]
    is_reduced: bool


class Space:
    """The slots of a nest, and what the axes are for given loop variables."""

    def __init__(self, item: Nest, scope: Scope) -> None:
        self.nest = item
        self.scope = scope
        self.regions = [scope.region(a) for a in item.axes]
        self.slots = self._fused()

    @property
    def lanes(self) -> list[tuple[Slot, tuple[Axis, ...]]]:
        """The slots, each with its innermost axis as every stage has it."""
        candidates = self.nest.candidates()
        return [(s, candidates[s.axes[-1]]) for s in self.slots]

    def extent(self, slot: Slot, whole: bool = False) -> Expr:
        """Number of iterations in this tile; or in a whole one."""
        regions = (self.regions[i] for i in slot.axes)
        return product_of((r.full if whole else r.extent for r in regions), self.scope.loops)

    def is_whole(self, slot: Slot) -> bool:
        """Whether this tile covers all of the slot's axes."""
        return all(_is_whole(self.regions[i]) for i in slot.axes)

    def loop(self, slot: Slot) -> Loop:
        """A loop over a slot."""
        return self.scope.loops.new("i", self.extent(slot))

    def values(self, local: dict[Slot, Expr]) -> list[Expr]:
        """What each axis of the nest is; `local` holds the position in each slot."""
        loops = self.scope.loops
        out: list[Expr] = [r.base for r in self.regions]
        for slot, at in local.items():
            for i, part in zip(slot.axes, self._parts(slot, at), strict=True):
                out[i] = loops.simplify(self.regions[i].base + part)
        return out

    def _parts(self, slot: Slot, at: Expr) -> list[Expr]:
        """Position on each axis of a slot."""
        parts: list[Expr] = []
        for i in reversed(slot.axes):
            full = self.regions[i].full
            outermost = i == slot.axes[0]
            parts.append(at if outermost else tirx.FloorMod(at, full))
            at = tirx.FloorDiv(at, full)
        return parts[::-1]

    # Fusing

    def _fused(self) -> list[Slot]:
        reduced = self.nest.reduced or frozenset()
        slots: list[Slot] = []
        for i, region in enumerate(self.regions):
            if number(region.full) == 1:
                continue
            slot = Slot((i,), i in reduced)
            if slots and slots[-1].is_reduced == slot.is_reduced:
                wider = Slot((*slots[-1].axes, i), slot.is_reduced)
                if self._may_fuse(wider):
                    slots[-1] = wider
                    continue
            slots.append(slot)
        return slots

    def _may_fuse(self, slot: Slot) -> bool:
        if any(not _is_whole(self.regions[i]) for i in slot.axes[1:]):
            return False
        return all(self._is_linear(m, slot) for m in self.nest.members)

    def _is_linear(self, member: Member, slot: Slot) -> bool:
        """Whether all accesses of a stage are linear in the fused axis, its parts else unused."""
        stage = member.stage
        fused = self.scope.loops.new("f", self.extent(slot)).var
        parts = self._parts(slot, fused)
        env = {}
        for i, part in zip(slot.axes, parts, strict=True):
            axis = member.axes[i]
            env[axis.var] = convert(self.regions[i].base + part, dtype_of(axis.var))
        for expr in stage.expressions():
            if any(k in env for k in free_variables(_WithoutLoads()(expr))):
                return False
        accesses = [(r.source, list(r.indices)) for r in stage.reads()]
        if stage.kind is None:
            accesses += [(b, [a.var for a in stage.axes]) for b in stage.buffers]
        return all(self._access_is_linear(b, i, env, fused) for b, i in accesses)

    def _access_is_linear(
        self, buffer: Var, indices: list[Expr], env: dict[Var, Expr], fused: Var
    ) -> bool:
        substitute = Substitute(env)
        opaque = _WithoutLoads()
        place = self.scope.place(buffer)
        at = offset(place.buffer, place.index([substitute(opaque(i)) for i in indices]))
        at = self.scope.loops.simplify(at)
        return not any(
            isinstance(e, tirx.FloorDiv | tirx.FloorMod) and fused in free_variables(e)
            for e in nodes(at)
        )


class _WithoutLoads(Rewriter):
    """Replaces loads by constants."""

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, TensorLoad):
            return constant(0, dtype_of(expr))
        return rebuild(expr, self)


def _is_whole(region: Region) -> bool:
    return number(region.base) == 0 and not region.is_dynamic
