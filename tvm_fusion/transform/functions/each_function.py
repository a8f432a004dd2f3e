"""The functions of a module one by one, as the stages want them; and back.

Every Relax function is looked at by itself, private and nested ones too, and so are the branches of
an `If`. Operators on several virtual devices are looked at device by device. Functions that belong
to others (`Composite`, `Codegen`, `Primitive`) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ...errors import InputError, TvmFusionError
from .branches import inline_branches, lift_branches
from .devices import Part, device_of, parts_of
from .function_apart import (
    ENTRY,
    FunctionApart,
    has_dataflow,
    own_functions,
    put_back,
    without_unused,
)
from .functions import expressions_of
from .hidden_calls import HiddenCalls

Change = Callable[[str, tvm.IRModule, Part], tvm.IRModule | None]
"""Given a piece's name, a module whose `main` it is, and its device, the module changed; or None
where it stays."""


@dataclass(frozen=True, slots=True)
class EachFunction:
    """The pieces of a module: what of a function is planned together.

    Attributes
    ----------
    stage : str
        The pass that looks at it; errors name it.
    before : IRModule
        The module.
    pieces : dict of str to (GlobalVar, Part)
        By name: that of the function, of a branch after its function, and `name@cuda:0` where
        results of one function lie on several virtual devices.
    """

    stage: str
    before: tvm.IRModule
    pieces: dict[str, tuple[tvm.ir.GlobalVar, Part]]
    _lifted: tvm.IRModule
    _branches: tuple[str, ...]

    @classmethod
    def of(cls, stage: str, mod: tvm.IRModule, target: Any) -> EachFunction:
        """Take a module apart for a pass; `target` as for `Fuse`.

        Raises
        ------
        TargetError
            See `devices.device_of`.
        """
        if not own_functions(mod):
            return cls(stage, mod, {}, mod, ())
        with errors_named(mod, stage):
            device = device_of(target, mod)
        lifted, branches = lift_branches(_without_nesting(mod))
        pieces = {}
        for gvar in own_functions(lifted):
            for part in parts_of(lifted[gvar], device):
                place = "" if part.alone else f"@{part.label}"
                pieces[f"{gvar.name_hint}{place}"] = gvar, part
        return cls(stage, mod, pieces, lifted, branches)

    def changed(self, change: Change) -> tvm.IRModule:
        """The module with each piece changed; `before` itself where none is."""
        mod, found = self._lifted, False
        for name, (gvar, part) in self.pieces.items():
            apart = FunctionApart.of(mod, gvar)
            with errors_named(self.before, f"{self.stage}, function {name}"):
                seen = HiddenCalls.of(apart.mod, ENTRY, lambda ty, part=part: not part.holds(ty))
                new = change(name, seen.mod, part)
                if new is None:
                    continue
                new = seen.shown(new, ENTRY)
            if not has_dataflow(mod[gvar]):  # passes that want none may come next
                new = relax.transform.ToNonDataflow()(new)
            mod, found = put_back(mod, apart, new, part.target if part.place else None), True
        if not found:
            return self.before
        return without_unused(inline_branches(mod, self._branches), self.before)


@contextmanager
def errors_named(mod: tvm.IRModule, where: str) -> Iterator[None]:
    """Errors within say where they are from; those of a module that is not well formed say that it
    is not. (Notes of an error are lost where it leaves a pass.)
    """
    try:
        yield
    except InputError as error:
        raise type(error)(f"{where}: {error}") from error
    except TvmFusionError:
        raise
    except Exception as error:
        try:
            relax.analysis.well_formed(mod)
        except Exception as why:
            reason = str(why).strip().splitlines()[-1]
            raise InputError(
                f"{where}: the module is not well formed: {reason}. "
                "Look for the pass that made it so with relax.analysis.well_formed"
            ) from error
        raise


def _without_nesting(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with functions inside of functions as functions of their own."""
    bodies = (mod[gvar].body for gvar in own_functions(mod))
    nested = any(expressions_of(body, relax.Function) for body in bodies)
    return relax.transform.LambdaLift()(mod) if nested else mod
