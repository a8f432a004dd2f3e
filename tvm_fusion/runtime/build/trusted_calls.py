"""PrimFuncs of a GPU module that look at no argument: the module itself made all they are called
with.

    main(x, weight0):
        a = alloc_tensor(...)
        first(x, a)                 looks at x and a, as TVM has each function do
        b = alloc_tensor(...)
        second(a, weight0, b)       does not

TVM asks of each argument some fifteen things (its type, device, shape, strides, pointer), each with
a message of its own. Of GoogLeNet's 42 kernels that are 3,862: LLVM took 1.2 CPU s for their host
code and the JIT 1.8; without, 0.4 and 0.3 (Zen 4). What comes from a caller is looked at as before,
in the functions that it is given to and all that take a view of it.

Does not handle: sizes that are known at the call alone; those functions look at their arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GenericConst

from ...ir.weights import Weight

KINDS = frozenset({"TypeError", "ValueError"})
"""Of the errors that TVM's checks of arguments raise; this package's own checks raise others."""
_ALLOCATED = "relax.vm.alloc_tensor"
_VIEW = "vm.builtin.reshape"


def trusted_functions(mod: tvm.IRModule, weights: Mapping[str, Sequence[Weight]]) -> frozenset[str]:
    """The PrimFuncs of a lowered module that all its functions call with tensors of their own,
    constants, and their `weights`, which are their last parameters.
    """
    found: dict[str, bool] = {}
    for gvar, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        count = len(weights.get(gvar.name_hint, ()))
        own = set(func.params[len(func.params) - count :])
        for var, value in _bindings(func.body):
            if _is_own(value, own):
                own.add(var)
            if not isinstance(value, Call):
                continue
            handed = (a.name_hint for a in value.args if isinstance(a, tvm.ir.GlobalVar))
            found |= dict.fromkeys(handed, False)  # somebody else calls it
            if isinstance(value.op, tvm.ir.GlobalVar):
                args = value.args
                is_known = all(_has_known_sizes(a) and (_is_constant(a) or a in own) for a in args)
                name = value.op.name_hint
                found[name] = found.get(name, True) and is_known
    return frozenset(name for name, is_known in found.items() if is_known)


def without_checks(host: tvm.IRModule, trusted: Collection[str]) -> tvm.IRModule:
    """Host functions, of which the `trusted` ones look at no argument."""

    def unchecked(one: tirx.AssertStmt) -> tirx.Stmt:
        return tirx.Evaluate(0) if one.error_kind.value in KINDS else one

    functions = dict(host.functions_items())
    for gvar, func in functions.items():
        if gvar.name_hint in trusted:
            body = tvm_ffi.structural_map(func.body, [(tirx.AssertStmt, unchecked)])
            functions[gvar] = func.with_body(body)
    return tvm.IRModule(functions, attrs=host.attrs)


def _is_own(value: relax.Expr, own: Collection[relax.Var]) -> bool:
    """Whether a value is a tensor that the module made, or a view of one."""
    if not isinstance(value, Call):
        return False
    if isinstance(value.op, tvm.ir.Op):
        return value.op.name == _ALLOCATED
    is_view = isinstance(value.op, relax.ExternFunc) and value.op.global_symbol == _VIEW
    return is_view and value.args[0] in own


def _is_constant(arg: relax.Expr) -> bool:
    """Whether an argument is a constant of the executable, which is on its device."""
    return isinstance(arg, GenericConst)


def _has_known_sizes(arg: relax.Expr) -> bool:
    shape = getattr(arg.ty, "shape", None)
    is_known = isinstance(shape, relax.ShapeExpr)
    return is_known and all(isinstance(size, tirx.IntImm) for size in shape.values)


def _bindings(body: relax.Expr) -> Iterator[tuple[relax.Var, relax.Expr]]:
    """Variables and values of a function in order, its branches among them."""
    if not isinstance(body, relax.SeqExpr):
        return
    for block in body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                yield from _bindings(value.true_branch)
                yield from _bindings(value.false_branch)
            else:
                yield binding.var, value
