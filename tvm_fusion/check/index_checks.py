"""Indices that are data, checked before a call on a device that raises nothing for them.

    main:  i = x1 + 1                      of the model, on its device:   i = x1 + 1
           y = take(x0, i, axis=1)         of `take`, on the CPU:         assert 0 <= i[n] < 5, ...
           z = matmul(y, w)                (`runtime.build.lone_checks`)

What the indices are made of is computed as TVM alone lowers it; then they come to the CPU, and the
checks that a function for a CPU has raise the same `OutOfRange`. Numbers are read where the model
reads them: an index that is drawn from scores is that of this device, not of a CPU.

`TVM_FUSION_CHECK_INDICES=1` has it done before each call of what is compiled for a GPU, `verify`
does it to the inputs that it draws. Without either nothing is built, and a call costs what it did.
What is compiled with the variable keeps its checks when it is saved (`to_json`), and does them
where it is loaded with the variable. Functions of Relax that `main` calls are read as part of it.

Does not handle: indices in branches and in functions that call themselves, those that are made of
what a branch gives or of an input as the model has written it, sizes that are data, and what a
function reads of its own results. They are logged.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, Expr, GenericConst, Op, Var

from ..config.targets import device_of
from ..errors import OutOfRange
from ..frontends.finish import first_line
from ..ir.blocks import substitute
from ..ir.origins import Origins
from ..ir.weights import with_values
from ..runtime.build.guards import may_refuse
from ..runtime.build.lone_checks import LoneChecks, lone_checks
from ..runtime.calls.signature import function_of
from ..runtime.calls.written_inputs import written_inputs
from ..transform.functions.functions import (
    expressions_of,
    has_branches,
    is_opaque,
    with_functions,
)
from ..transform.functions.unique_names import UniqueNames
from ..transform.lower.drop_empty import DropEmpty
from ..transform.lower.places import reads_at_indices
from ..transform.pipeline import public
from .checked_sizes import points_of_run
from .plain import LLVM, plain_build, plain_module
from .reference import to_argument

logger = logging.getLogger(__name__)

RAISE_BY_THEMSELVES = ("llvm",)
VARIABLE = "TVM_FUSION_CHECK_INDICES"
MOST_BYTES = 1 << 26  # of weights that are saved with checks
MOST_POINTS = 1 << 21  # of all loops that compute indices, for a check that nobody asked for

_CALL_TIR = Op.get("relax.call_tir")
_CPU = tvm.cpu()
_QUICK = tvm.target.Target({"kind": "llvm", "opt-level": 0})


def wanted() -> bool:
    """Whether calls are to be checked, as the environment says."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def wanted_for(target: tvm.target.Target) -> bool:
    """Whether calls of what is compiled for a target are to be."""
    return wanted() and target.kind.name not in RAISE_BY_THEMSELVES


def quick_checks(mod: tvm.IRModule, target: tvm.target.Target) -> IndexChecks | None:
    """As `IndexChecks.of`, where its indices are computed in a moment: for checks that nobody asked
    for.
    """
    checks = IndexChecks.of(mod, target)
    return None if checks is None or checks.points > MOST_POINTS else checks


@dataclass(frozen=True, slots=True)
class _Site:
    """A call of `main` that reads or writes at indices.

    Attributes
    ----------
    name : str
        Of the operator, with its place in the model.
    func : PrimFunc
        Its checks (`runtime.build.lone_checks`).
    tensors : tuple of Expr
        What they take.
    sizes : tuple of Expr
        And the sizes behind them, in those of `main`.
    """

    name: str
    func: tirx.PrimFunc
    tensors: tuple[Expr, ...]
    sizes: tuple[Expr, ...]

    @property
    def symbol(self) -> str:
        """The name of the function."""
        return str(self.func.attrs["global_symbol"])


class IndexChecks:
    """The checks of a function, to be called with what the function itself takes.

    Attributes
    ----------
    points : int
        Of all loops that compute indices; 0 where they are inputs.
    """

    def __init__(
        self,
        cut: tvm.IRModule,
        sites: Sequence[_Site],
        computed: Sequence[Expr],
        target: tvm.target.Target,
    ) -> None:
        """`cut` computes the places that are `computed`, in their order."""
        self._cut, self._computed, self._target = cut, computed, target
        self._params = list(cut["main"].params)
        self._sites = sites
        alone = tvm.IRModule({site.symbol: site.func for site in sites})
        self._library = tvm.compile(alone, _QUICK)
        self._low = plain_module(cut, target) if computed else None
        self.points = 0 if self._low is None else points_of_run(self._low)
        self._run: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins | None = None
    ) -> IndexChecks | None:
        """Of `main` of a Relax module that is compiled for a target; None where no index is data,
        or can be checked.
        """
        try:
            mod = _indices_opened(_in_one_function(mod))
            sites, params = _sites(mod, origins or {}), set(mod["main"].params)
            cut, computed = _computing(mod, sites)
            if written_inputs(cut) or has_branches(cut["main"]):
                logger.info("indices made of branches or of inputs that are written: not checked")
                sites = [site for site in sites if params.issuperset(site.tensors)]
                cut, computed = _computing(mod, sites)
            return cls(cut, sites, computed, target) if sites else None
        except Exception as error:  # TVM raises whatever an operator's legalization raises
            logger.warning("indices are not checked: %s", first_line(error))
            return None

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Look at the indices of a call.

        Parameters
        ----------
        arguments : sequence
            As the virtual machine takes them, on the target's device.

        Raises
        ------
        OutOfRange
            It names the operator, its place in the model, the axis and its extent, and from where
            to where the indices reach.
        """
        given = dict(zip(self._params, arguments, strict=True))
        sizes = _sizes_of(self._params, arguments)
        of_caller = [site for site in self._sites if given.keys() >= set(site.tensors)]
        self._look(of_caller, given, sizes)
        given |= zip(self._computed, self._compute(arguments), strict=True)
        self._look([site for site in self._sites if site not in of_caller], given, sizes)

    def _look(self, sites: Sequence[_Site], given: dict[Expr, Any], sizes: dict[Var, Expr]) -> None:
        for site in sites:
            tensors = [given[place].copyto(_CPU) for place in site.tensors]
            check = self._library[site.symbol]
            try:
                check(*tensors, *(_size(extent, sizes) for extent in site.sizes))
            except OutOfRange as error:
                raise OutOfRange(f"{site.name}{_told(error)}{_reach(tensors)}") from None

    def refuse(self, inputs: Sequence[Any]) -> None:
        """As a call, of inputs on the host (`drawn_inputs`)."""
        device = device_of(self._target)
        self([to_argument(x, device=device) for x in inputs])

    def to_json(self) -> str | None:
        """What `of_saved` takes; None where large weights are needed to compute indices."""
        if sum(map(_bytes, expressions_of(self._cut["main"], GenericConst))) > MOST_BYTES:
            logger.warning("checks of indices are not saved: these are made of large weights")
            return None
        places = [*self._params, *self._computed]
        sites = [
            [s.name, s.func, [places.index(place) for place in s.tensors], list(s.sizes)]
            for s in self._sites
        ]
        parts = [with_values(self._cut), len(self._computed), sites]
        return tvm.ir.save_json(tvm_ffi.convert(parts))

    @classmethod
    def of_saved(cls, text: str, target: tvm.target.Target) -> IndexChecks:
        """What `to_json` gave, for the same target."""
        cut, count, saved = tvm.ir.load_json(text)
        computed = [relax.Var(f"place{number}") for number in range(int(count))]
        places = [*cut["main"].params, *computed]
        sites = [
            _Site(str(name), func, tuple(places[int(i)] for i in tensors), tuple(sizes))
            for name, func, tensors, sizes in saved
        ]
        return cls(cut, sites, computed, target)

    def _compute(self, arguments: Sequence[Any]) -> Sequence[Any]:
        if self._low is None:
            return ()
        if self._run is None:
            built = plain_build(self._low, self._target)
            self._run = function_of(built.machine(), "main", built.device)
        return self._run(*arguments)


def _bytes(constant: GenericConst) -> int:
    bits = tvm.DataType(str(constant.ty.dtype)).bits
    return math.prod(int(extent) for extent in constant.ty.shape) * bits // 8


def _told(error: OutOfRange) -> str:
    """What the error of a check says behind the name of its function."""
    return ":" + str(error).partition(":")[2]


def _reach(tensors: Sequence[Any]) -> str:
    integers = [x.numpy() for x in tensors if str(x.dtype).startswith(("int", "uint"))]
    reach = [f"{x.min()} to {x.max()}" for x in integers if x.size]
    told = f" (its indices reach from {' and from '.join(reach)})" if reach else ""
    return f"{told}; a GPU reads the nearest element there, and writes nothing"


def of_saved(text: str | None, target: tvm.target.Target) -> IndexChecks | None:
    """The checks of a module that is loaded, from what was saved with it; None where they are not
    wanted, or where there are none.
    """
    if not wanted_for(target):
        return None
    if text is None:
        logger.warning("indices are not checked: the module was saved without %s=1", VARIABLE)
        return None
    return IndexChecks.of_saved(text, target)


# ---- The calls that read or write at indices, and what they are made of.


def _in_one_function(mod: tvm.IRModule) -> tvm.IRModule:
    """The module whose `main` has what functions of Relax that it calls compute."""
    functions = {}
    for gvar, func in public(mod).functions_items():
        if isinstance(func, relax.Function) and gvar.name_hint != "main" and not is_opaque(func):
            func = func.without_attr("global_symbol")
        functions[gvar] = func
    passes = [relax.transform.InlinePrivateFunctions(), relax.transform.Normalize()]
    return tvm.transform.Sequential(passes)(with_functions(mod, functions))


def _computing(mod: tvm.IRModule, sites: Sequence[_Site]) -> tuple[tvm.IRModule, list[Expr]]:
    """The module that gives what sites take and a caller does not give, and what that is."""
    params = set(mod["main"].params)
    places = dict.fromkeys(place for site in sites for place in site.tensors)
    computed = [place for place in places if place not in params]
    return _cut(mod, computed), computed


def _indices_opened(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with those operators as PrimFuncs for a CPU whose indices may be refused, and no
    others.
    """
    own = reads_at_indices(LLVM)
    names = {
        call.op.name
        for block in mod["main"].body.blocks
        for call in (getattr(binding, "value", None) for binding in block.bindings)
        if isinstance(call, Call) and isinstance(call.op, Op)
    }
    defaults = {name: Op.get(name).get_attr("FLegalize") for name in sorted(names)}
    known: dict[Any, bool] = {}
    rules = {
        name: partial(_if_refusing, known, own.get(name, default))
        for name, default in defaults.items()
        if default is not None
    }
    passes = [UniqueNames(), DropEmpty(), relax.transform.LegalizeOps(rules)]
    with LLVM:
        return tvm.transform.Sequential(passes)(public(mod))


def _if_refusing(
    known: dict[Any, bool], legalizer: Callable, builder: relax.BlockBuilder, call: Call
) -> relax.Expr:
    """The legalization of a call whose indices may be refused; others stay. `known` says which, by
    operator, attributes, dtypes and ranks.
    """
    kinds = [(str(ty.dtype), ty.ndim) for ty in map(_type, call.args) if ty is not None]
    key = (call.op.name, call.attrs and tvm_ffi.StructuralKey(call.attrs), *kinds)
    if not known.get(key, True):
        return call
    aside = relax.BlockBuilder()
    try:
        made = legalizer(aside, call)
    except Exception as error:  # TVM raises whatever an operator's legalization raises
        logger.debug("%s is not opened for a check of indices: %s", call.op.name, error)
        made = None
    tells = isinstance(made, Call) and made.op == _CALL_TIR and may_refuse(aside.get())
    known[key] = tells
    if not tells:
        return call
    gvar, *rest = made.args
    found = builder.add_func(aside.get()[gvar], gvar.name_hint)
    return Call(made.op, [found, *rest], made.attrs, made.ty_args)


def _type(expr: Expr) -> relax.TensorType | None:
    return expr.ty if isinstance(expr.ty, relax.TensorType) else None


def _sites(mod: tvm.IRModule, origins: Origins) -> list[_Site]:
    known: dict[Any, LoneChecks | None] = {}
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = getattr(binding, "value", None)
            if not isinstance(call, Call) or call.op != _CALL_TIR:
                continue
            gvar, arguments = call.args[0], list(call.args[1].fields)
            if gvar not in known:
                known[gvar] = lone_checks(gvar.name_hint, mod[gvar])
            checks = known[gvar]
            if checks is None:
                continue
            if len(call.args) > 2 or any(i >= len(arguments) for i in checks.given):
                logger.info("indices of %s are not checked", gvar.name_hint)
                continue
            origin = origins.get(binding.var.name)
            parts = [origin.source, origin.module and f"in {origin.module}"] if origin else []
            at = ", ".join(filter(None, parts))
            name = gvar.name_hint + (f" ({at})" if at else "")
            tensors = tuple(arguments[i] for i in checks.given)
            sizes = tuple(_sizes_in(mod[gvar], arguments, checks.sizes))
            found.append(_Site(name, checks.func, tensors, sizes))
    return found


def _sizes_in(func: tirx.PrimFunc, arguments: Sequence[Expr], sizes: Sequence[Var]) -> list[Expr]:
    """What sizes of a PrimFunc are in a call of it."""
    means = {}
    for param, argument in zip(func.params, arguments, strict=False):
        for inner, outer in zip(param.ty.shape, argument.ty.shape.values, strict=True):
            if isinstance(inner, Var):
                means.setdefault(inner, outer)
    return [means[size] for size in sizes]


def _cut(mod: tvm.IRModule, places: Sequence[Expr]) -> tvm.IRModule:
    """The module whose `main` gives these alone."""
    main = mod["main"]
    shown = {
        place: relax.Var(place.name, place.ty)
        for place in places
        if isinstance(place, relax.DataflowVar)
    }
    body = tvm_ffi.structural_map(main.body, (relax.DataflowVar, lambda v: shown.get(v, v)))
    result = relax.BlockBuilder().normalize(
        relax.Tuple([shown.get(place, place) for place in places])
    )
    body = relax.SeqExpr(body.blocks, result)
    cut = mod.clone()
    made = relax.Function(main.params, body, result.ty, main.is_pure, main.attrs)
    cut.update_func(mod.get_global_var("main"), made)
    passes = [relax.transform.Normalize(), relax.transform.DeadCodeElimination(["main"])]
    return tvm.transform.Sequential(passes)(cut)


# ---- Symbolic sizes of a call.


def _sizes_of(params: Sequence[Var], arguments: Sequence[Any]) -> dict[Var, Expr]:
    """The values of symbolic sizes, by those of `main`."""
    found = {}
    for param, given in zip(params, arguments, strict=True):
        shape = getattr(param.ty, "shape", None)
        if isinstance(shape, relax.ShapeExpr) and hasattr(given, "shape"):
            for extent, size in zip(shape.values, given.shape, strict=True):
                if isinstance(extent, Var):
                    found.setdefault(extent, tirx.IntImm("int64", int(size)))
    return found


def _size(extent: Expr, sizes: dict[Var, Expr]) -> int:
    return int(tvm.sym.Analyzer().simplify(substitute(extent, sizes)))
