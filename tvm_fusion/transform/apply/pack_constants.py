"""PackConstants: constants become what the kernels want to read, once, when compiling.

Before::

    y = R.call_tir(cls.linear, (x, R.const([3072, 768])), ...)     # attrs: panels of argument 1

After::

    y = R.call_tir(cls.linear, (x, R.const([48, 768, 16])), ...)

Kernels for CPUs take weights in panels (see `kernels.cpu.contraction.panels`). Constants that are
equal memory and are packed alike stay one constant.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir import Call
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...config import HardwareProfile
from ...ir.weights import made
from ...kernels.cpu.contraction.panels import PANELS_ATTR, Panels, wanted_panels
from ..functions.functions import (
    PACK_CONSTANTS,
    ModulePass,
    is_opaque,
    rewrite_functions,
    with_functions,
)
from ..rewrites.constant_weights import identity
from ..rewrites.factors import is_constant

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


def constant_arguments(mod: tvm.IRModule) -> dict[str, tuple[int, ...]]:
    """Which parameters of each PrimFunc are constants in all of its calls, by position.

    Parameters
    ----------
    mod : IRModule
        A module after Materialize.
    """
    found: dict[str, set[int]] = {}

    def look(expr: tvm.ir.Expr) -> None:
        if isinstance(expr, Call) and expr.op == _CALL_TIR:
            name, arguments = expr.args[0].name_hint, arguments_of(expr)
            here = {i for i, argument in enumerate(arguments) if is_constant(argument)}
            found[name] = found.get(name, here) & here

    for func in mod.functions.values():
        if isinstance(func, relax.Function) and not is_opaque(func):
            relax.analysis.post_order_visit(func, look)
    return {name: tuple(sorted(positions)) for name, positions in found.items() if positions}


def packable_arguments(mod: tvm.IRModule, hw: HardwareProfile) -> dict[str, tuple[int, ...]]:
    """`constant_arguments` where kernels may take them packed: on CPUs."""
    return constant_arguments(mod) if hw.kind == "llvm" else {}


@tvm.transform.module_pass(opt_level=0, name=PACK_CONSTANTS)
class PackConstants(ModulePass):
    """Constants in the panels that kernels read, for which see the module docstring.

    Runs after `WriteKernels`, which says in attribute "tvm_fusion.panels" which arguments of a
    kernel become panels: by position, the columns of a panel, whether terms are paired, how many
    dimensions are batch, terms and columns, and which. A module whose kernels take no panels is
    returned as it is, and so is one that was packed before.

    Examples
    --------
    Before::

        @I.ir_module
        class Before:
            @T.prim_func(private=True, s_tir=True)
            def sums(w: T.Buffer((2, 2, 2)), y: T.Buffer((3,))):
                T.func_attr({"tvm_fusion.panels": [[0, 2, 0, 0, 1, 1, 0, 1]]})
                for j in range(3):
                    y[j] = w[j // 2, 0, j % 2] + w[j // 2, 1, j % 2]

            @R.function
            def main() -> R.Tensor((3,), "float32"):
                cls = Before
                y = R.call_tir(
                    cls.sums,
                    (R.const([[1, 2, 3], [4, 5, 6]], "float32"),),
                    out_ty=R.Tensor((3,), "float32"),
                )
                return y

    After ``PackConstants()``::

        @I.ir_module
        class After:
            @T.prim_func(private=True, s_tir=True)
            def sums(w: T.Buffer((2, 2, 2)), y: T.Buffer((3,))):
                for j in range(3):
                    y[j] = w[j // 2, 0, j % 2] + w[j // 2, 1, j % 2]

            @R.function
            def main() -> R.Tensor((3,), "float32"):
                cls = After
                y = R.call_tir(
                    cls.sums,
                    (R.const([[[1, 2], [4, 5]], [[3, 0], [6, 0]]], "float32"),),
                    out_ty=R.Tensor((3,), "float32"),
                )
                return y
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        wanted = {
            gvar.name_hint: wanted_panels(func)
            for gvar, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and PANELS_ATTR in func.attrs
        }
        if not wanted:
            return mod
        kernels = {
            gvar: func.without_attr(PANELS_ATTR) if gvar.name_hint in wanted else func
            for gvar, func in mod.functions_items()
        }
        packer = _Packer(mod)
        packer.wanted = wanted
        packer.renewed = {
            gvar.name_hint: _global_var(gvar.name_hint, func)
            for gvar, func in kernels.items()
            if gvar.name_hint in wanted
        }
        packed = rewrite_functions(mod, packer.builder_, packer.visit_expr)
        kernels.update({g: f for g, f in packed.functions_items() if isinstance(f, relax.Function)})
        functions = {packer.renewed.get(g.name_hint, g): f for g, f in kernels.items()}
        return with_functions(packed, functions)


def _global_var(name: str, kernel: tirx.PrimFunc) -> tvm.ir.GlobalVar:
    """A variable of the type of a kernel: that of its parameters has changed."""
    return relax.BlockBuilder().add_func(kernel, name)


def packed_constant(constant: tvm.ir.Expr, panels: Panels) -> tvm.ir.Expr:
    """The panels of a constant, as a constant."""
    value = constant.value
    shape, dtype = panels.shape(map(int, value.shape)), panels.dtype(str(value.dtype))
    return made(str(panels), panels.of, constant, shape, dtype)


def arguments_of(call: Call) -> list[tvm.ir.Expr]:
    """What a `call_tir` hands to its PrimFunc."""
    given = call.args[1]
    return list(given.fields) if isinstance(given, relax.Tuple) else [given]


@mutator
class _Packer(PyExprMutator):
    """Replaces the arguments of calls."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.wanted: dict[str, dict[int, Panels]] = {}
        self.renewed: dict[str, tvm.ir.GlobalVar] = {}
        self.packed: dict[tuple, tvm.ir.Expr] = {}

    def visit_call_(self, call: Call) -> tvm.ir.Expr:
        call = super().visit_call_(call)
        wanted = self.wanted.get(call.args[0].name_hint, {}) if call.op == _CALL_TIR else {}
        if not wanted:
            return call
        arguments = arguments_of(call)
        for position, panels in wanted.items():
            arguments[position] = self._pack(arguments[position], panels)
        args = [self.renewed[call.args[0].name_hint], relax.Tuple(arguments), *call.args[2:]]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _pack(self, constant: tvm.ir.Expr, panels: Panels) -> tvm.ir.Expr:
        key = (identity(constant), panels)
        if key not in self.packed:
            self.packed[key] = packed_constant(constant, panels)
        return self.packed[key]
