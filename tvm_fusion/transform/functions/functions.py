"""Reading and rewriting the Relax functions of a module one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import IRModule

# The stages of `Fuse` by name: what instruments time, what `PassContext` switches off.
#
# Within `Fuse` and `tvm_fusion.compile` a stage runs on one function at a time.

FUSE = "tvm_fusion.Fuse"
ASSIGN_LAYOUTS = "tvm_fusion.AssignLayouts"
DECOMPOSE = "tvm_fusion.Decompose"
PLAN = "tvm_fusion.Plan"
MATERIALIZE = "tvm_fusion.Materialize"
WRITE_KERNELS = "tvm_fusion.WriteKernels"
PACK_CONSTANTS = "tvm_fusion.PackConstants"
PLAN_MEMORY = "tvm_fusion.PlanMemory"

if TYPE_CHECKING:

    class ModulePass(tvm.transform.Pass):
        """What `module_pass` makes of a class, which type checkers cannot see: a pass."""

        def __call__(self, mod: tvm.IRModule) -> tvm.IRModule: ...

else:
    ModulePass = object

Result = TypeVar("Result")


def result_of(
    name: str,
    mod: tvm.IRModule,
    work: Callable[[tvm.IRModule], Result],
    changed: Callable[[Result], tvm.IRModule],
) -> Result | None:
    """What `work` makes of a module as the pass of a name, for which the module is then what
    `changed` says; None where the pass is disabled. What `work` raises is raised as it is: through
    TVM's passes it would come as a RuntimeError.
    """
    found: list[Result] = []
    failed: list[Exception] = []

    def run(given: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        try:
            found.append(work(given))
        except Exception as error:
            failed.append(error)
            raise
        return changed(found[0])

    try:
        tvm.transform.Sequential([tvm.transform.module_pass(run, opt_level=0, name=name)])(mod)
    except Exception as error:
        raise (failed[0] if failed else error) from None
    return found[0] if found else None


def is_enabled(name: str) -> bool:
    """Whether the current `PassContext` lets a stage run."""
    return name not in set(tvm.transform.PassContext.current().disabled_pass)


Kind = TypeVar("Kind")
Rewrite = Callable[[relax.Function], relax.Function | None]
_OPAQUE_ATTRS = ("Primitive", "Composite", "Codegen")


class Marking(Protocol):
    """A `PyExprMutator` that sets `changed` where it changes something."""

    changed: bool

    def visit_expr(self, expr: tvm.ir.Expr) -> tvm.ir.Expr: ...


def rewrite_functions(
    mod: IRModule, builder: relax.BlockBuilder, rewrite: Rewrite, *, opaque: bool = False
) -> IRModule:
    """The module with its functions rewritten; the module itself where none is.

    Parameters
    ----------
    mod : IRModule
    builder : relax.BlockBuilder
        That of the mutator, made of `mod`.
    rewrite : callable
        A function's new form, or None where it stays.
    opaque : bool
        Opaque functions, too.
    """
    changed = False
    for gvar, func in mod.functions_items():
        if not isinstance(func, relax.Function) or (is_opaque(func) and not opaque):
            continue
        new = rewrite(func)
        if new is not None:
            builder.update_func(gvar, new)
            changed = True
    return builder.finalize() if changed else mod


def where_changed(mutator: Marking) -> Rewrite:
    """A mutator as a `rewrite` of `rewrite_functions`."""

    def rewrite(func: relax.Function) -> relax.Function | None:
        mutator.changed = False
        new = mutator.visit_expr(func)
        return new if mutator.changed else None

    return rewrite


def with_functions(mod: IRModule, functions: Mapping[Any, tvm.ir.BaseFunc]) -> IRModule:
    """A module of other functions, with the attributes and virtual devices of `mod`."""
    return IRModule(dict(functions), attrs=mod.attrs, global_infos=mod.global_infos)


def rewritten(
    mod: IRModule,
    rules: Sequence[tuple[type, Callable[[Any], Any]]],
    on: Callable[[tirx.PrimFunc], bool] = lambda func: True,
) -> IRModule:
    """A module with nodes replaced in the PrimFuncs that `on` takes; the others, and those in which
    nothing changes, stay as they are.
    """
    functions = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and on(func):
            body = tvm_ffi.structural_map(func.body, rules)
            func = func if body.same_as(func.body) else func.with_body(body)
        functions[gvar] = func
    return with_functions(mod, functions)


def target_kind(func: tvm.ir.BaseFunc) -> str:
    """The kind of device that a function is bound to ("cuda"); empty where it is to none."""
    target = (func.attrs or {}).get("target", None)
    return target.kind.name if isinstance(target, tvm.target.Target) else ""


def expressions_of(root: tvm.ir.Expr, kind: type[Kind]) -> list[Kind]:
    """The expressions of a kind in a Relax expression, those inside of others first."""
    found: list[Kind] = []

    def visit(expr: tvm.ir.Expr) -> None:
        if isinstance(expr, kind):
            found.append(expr)

    relax.analysis.post_order_visit(root, visit)
    return found


def has_branches(func: relax.Function) -> bool:
    """Whether a function, or one inside of it, has an `If`."""
    return bool(expressions_of(func, relax.If))


def static_extents(ty: relax.Type) -> tuple[int, ...] | None:
    """The shape of the tensors of a type, if all of it is known."""
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return None
    # a slice of an array of TVM takes a quarter of the time of iterating over the shape
    extents = shape.values[:]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return tuple(map(int, extents))


def static_shape(tensor: relax.Expr) -> tuple[int, ...] | None:
    """The shape of a tensor expression, if all of it is known."""
    return static_extents(tensor.ty)


def operator_name(value: Any) -> str:
    """The name of the operator that an expression calls; "" for anything else."""
    is_operator = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return value.op.name if is_operator else ""


def is_opaque(func: relax.Function) -> bool:
    """Whether a function belongs to somebody else: a fused group, or another code generator's."""
    return func.attrs is not None and any(key in func.attrs for key in _OPAQUE_ATTRS)
