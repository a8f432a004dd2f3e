"""All passes that a function goes through, in order; each phase takes a module and returns one.

    open_composites   high-level Relax; on a GPU convolutions get channels last (`layouts`);
                      composites (softmax, norms, attention, ...) are opened, and rows that nothing
                      reads are left out (`lower.needed_rows`)
    rewrite           what pays in some models only, one by one (`flow.variants` says which)
    legalize          primitive operators as `call_tir`, ready to be read as a fusion graph; on a
                      GPU it is told which concatenations need no kernel (`lower.joins`)

`lower` is these three. Then the graph is planned, and `flow.planned` goes on with the plan:

    Materialize       a PrimFunc for each group                            (`apply.materialize`)
    WriteKernels      in its place the kernel that its class writes        (`apply.write_kernels`)
    PackConstants     constants as these kernels take them                 (`apply.pack_constants`)

and `runtime.build` with the kernels: `lowering_pipeline` makes VM calls of Relax, with memory that
`PlanMemory` plans, and `mixed_tir_pipeline` host and device code of PrimFuncs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tvm
from tvm import relax

from ..config import HardwareProfile
from .decompose import Decompose
from .functions.unique_names import UniqueNames
from .layouts import AssignLayouts
from .lower.constant_arithmetic import folding
from .lower.drop_empty import DropEmpty, check_defined
from .lower.enlarged import ENLARGED
from .lower.first_of_sorts import FirstOfSorts
from .lower.fix_bool_arithmetic import FixBoolArithmetic
from .lower.joins import JOINED_CONCATS, MarkJoins
from .lower.keep_extents import KeepExtents
from .lower.legalized_once import once
from .lower.legalizers import (
    HALF_OPERATORS,
    LONG_CONCATS,
    TRANSPOSED_CONVOLUTIONS,
    UNSIGNED_SIGNS,
    Legalizer,
    from_infinity,
    legalize_divide,
    legalize_where,
)
from .lower.needed_rows import NeededRows
from .lower.ordered_writes import OrderedWrites
from .lower.permuted_weights import legalize_permutes
from .lower.places import reads_at_indices
from .lower.scans import OpenScans
from .lower.sorts import OpenMedians, WidenSorts
from .lower.weight_recipes import FoldConstants
from .rewrites.cancel_layouts import CancelLayouts
from .rewrites.hidden_weights import BindWeights
from .rewrites.join_pieces import JoinPieces
from .rewrites.lean_constants import LeanConstants
from .rewrites.nest_concats import NestConcats
from .rewrites.rewrites import REWRITES
from .rewrites.split_reductions import SplitReductions
from .rewrites.tell_repeats import TellRepeats
from .rewrites.unpack_stacks import UnpackStacks


def lower(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    decompose: bool = True,
    hw: HardwareProfile | None = None,
    rewrites: Collection[str] = (),
) -> tvm.IRModule:
    """Opens composites and legalizes; what stays is `call_tir`, calls of packed functions, and
    shape arithmetic.

    Parameters
    ----------
    mod : IRModule
    target : Target
        Decides how sort, scan and sampling operators are dispatched.
    decompose : bool
        False keeps composite operators whole: one PrimFunc each, as without this package.
    hw : HardwareProfile or None
        The GPU whose size decides how reductions are taken apart; None (or a CPU) leaves them.
    rewrites : collection of str
        Names of `rewrites.REWRITES` to apply to the opened graph.
    """
    return legalize(opened(mod, target, decompose, hw, rewrites), target, hw if decompose else None)


def opened(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    decompose: bool = True,
    hw: HardwareProfile | None = None,
    rewrites: Collection[str] = (),
) -> tvm.IRModule:
    """`lower` before it legalizes."""
    found = open_composites(mod, target, decompose, hw if decompose else None)
    for name in (name for name in REWRITES if name in rewrites):
        found = rewrite(found, name, target, hw)
    return found


def open_composites(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    decompose: bool = True,
    hw: HardwareProfile | None = None,
) -> tvm.IRModule:
    """The first part of `lower`: high-level operators, composites opened."""
    check_defined(mod)
    passes = [
        UniqueNames(),
        FixBoolArithmetic(),
        relax.transform.CanonicalizeBindings(),
        DropEmpty(),
        JoinPieces(),
        *([TellRepeats()] if decompose else []),
        *([NestConcats()] if decompose and _gpu(hw) is not None else []),
        *([AssignLayouts()] if decompose and _gpu(hw) is not None else []),
        Decompose(_gpu(hw), keep_all=not decompose),
        *([CancelLayouts(), NeededRows()] if decompose else []),
        *([UnpackStacks()] if _gpu(hw) is not None else []),
    ]
    with target:
        return tvm.transform.Sequential(passes)(public(mod))


def rewrite(
    opened: tvm.IRModule, name: str, target: tvm.target.Target, hw: HardwareProfile
) -> tvm.IRModule:
    """An opened module with one of `rewrites.REWRITES` applied; the same module if that finds
    nothing to do.
    """
    with target:
        return REWRITES[name].make(hw)(opened)


def legalize(
    opened: tvm.IRModule, target: tvm.target.Target, hw: HardwareProfile | None = None
) -> tvm.IRModule:
    """The last part of `lower`: `call_tir` in place of the operators of an opened module."""
    gpu = _gpu(hw)
    table = {
        **HALF_OPERATORS,
        **from_infinity(target.kind.name),
        **UNSIGNED_SIGNS,
        **(LONG_CONCATS if gpu is None else JOINED_CONCATS),
        **TRANSPOSED_CONVOLUTIONS,
        **ENLARGED,
        **reads_at_indices(target),
        "relax.divide": legalize_divide,
        "relax.where": legalize_where,
    }
    # Constants that are lean stay so: what widens them again is for kernels to evaluate.
    widening = [LeanConstants(), relax.transform.LegalizeOps(_permuting(once(table)))]
    passes = [
        *([SplitReductions(gpu)] if gpu is not None else []),
        *([KeepExtents()] if target.kind.name == "llvm" else []),
        *(
            [WidenSorts()]
            if target.kind.name == "llvm"
            else [FirstOfSorts(), OpenMedians(), OpenScans()]
        ),
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(_permuting(folding(once(table)))),
        OrderedWrites(),
        FoldConstants(),
        BindWeights(),
        *(widening if gpu is not None else []),
        relax.transform.ConvertToDataflow(min_size=1),
        relax.transform.DeadCodeElimination(["main"]),
        UniqueNames(),
        *([MarkJoins(gpu)] if gpu is not None else []),
    ]
    with target:
        return tvm.transform.Sequential(passes)(opened)


def _permuting(table: Mapping[str, Legalizer]) -> dict[str, Legalizer]:
    """The legalizations of a table, those of constants that are permuted without an operator."""
    name = "relax.permute_dims"
    return {**table, name: legalize_permutes(table[name])}


def _gpu(hw: HardwareProfile | None) -> HardwareProfile | None:
    return hw if hw is not None and hw.kind != "llvm" else None


def public(mod: tvm.IRModule) -> tvm.IRModule:
    """`main` with a global symbol: without one it counts as private, and as dead code."""
    main = mod["main"]
    if main.attrs and "global_symbol" in main.attrs:
        return mod
    out = mod.clone()
    out.update_func(mod.get_global_var("main"), main.with_attr("global_symbol", "main"))
    return out
