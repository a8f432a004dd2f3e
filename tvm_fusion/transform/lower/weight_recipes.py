"""What lowering computes of weights alone, as recipes (`ir.weights`).

    lv = R.call_tir(cls.multiply, (stand-in, const), ...)   ->   another stand-in

`FoldConstants` is TVM's FoldConstant for modules with stand-ins: it evaluates what is made of other
constants, and writes down what is made of weights. What it evaluates is compiled once in a process:
TVM compiles it in each run of the pass, and a model is lowered once for each rewrite that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.ir import Call
from tvm.relax import Expr, Var
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.blocks import has_threads
from ...ir.weights import as_parameters, derived, tensor_of, weight_of, with_parameters_bound

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")

# Elements along both axes that change places: the lines of memory that a block reads and writes
# stay in the cache (5504 x 2048 halves: 41 ms by blocks of 256, 63 ms by 64, 256 ms at once).
BLOCK = 256


@dataclass(frozen=True, eq=False)
class Computed:
    """A PrimFunc without a schedule, of one output, all of whose shapes are known."""

    func: tirx.PrimFunc

    @classmethod
    def by(cls, func: tirx.PrimFunc) -> Computed:
        """Whatever its name in a module is."""
        named = func.attrs is not None and "global_symbol" in func.attrs
        return cls(func.without_attr("global_symbol") if named else func)

    @cached_property
    def _hash(self) -> int:
        return tvm_ffi.structural_hash(self.func)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Computed) and tvm_ffi.structural_equal(self.func, other.func)

    def digest(self) -> str:
        """See `ir.weights.Recipe`."""
        return f"computed {self._hash}"

    def of(self, arrays: Sequence[np.ndarray]) -> tvm.runtime.Tensor:
        """See `ir.weights.Recipe`: compiled for the host, as FoldConstant does."""
        return self.of_tensors(list(map(tvm.runtime.tensor, arrays)))

    def of_tensors(self, tensors: Sequence[tvm.runtime.Tensor]) -> tvm.runtime.Tensor:
        """The same of tensors on the host."""
        out = self.func.params[-1].ty
        result = tvm.runtime.empty([int(n) for n in out.shape], str(out.dtype))
        _compiled(self)(*tensors, result)
        return result

    def kernel(self) -> tirx.PrimFunc:
        """See `ir.weights.Recipe`."""
        return self.func


@lru_cache(maxsize=64)
def _compiled(recipe: Computed) -> Callable[..., None]:
    """A recipe for the host: the same for the weights of all layers."""
    func = recipe.func.with_attr("global_symbol", "recipe")
    return tvm.compile(tvm.IRModule({"recipe": func}), tvm.target.Target("llvm"))["recipe"]


@dataclass(frozen=True, slots=True)
class Permuted:
    """A weight of a shape and type with its axes in another order, contiguous."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    def digest(self) -> str:
        """See `ir.weights.Recipe`."""
        return f"permuted {self.axes}"

    def of(self, arrays: Sequence[np.ndarray]) -> tvm.runtime.Tensor:
        """See `ir.weights.Recipe`."""
        (array,) = arrays
        return permuted(array, self.axes)

    def kernel(self) -> tirx.PrimFunc:
        """See `ir.weights.Recipe`."""
        given = te.placeholder(self.shape, self.dtype, name="weight")
        return te.create_prim_func([given, topi.transpose(given, self.axes)])


def permuted(array: np.ndarray, axes: tuple[int, ...]) -> tvm.runtime.Tensor:
    """An array with its axes in another order, contiguous; by blocks, on all cores."""
    axes = tuple(axis % array.ndim for axis in axes)
    result = tvm.runtime.empty([array.shape[axis] for axis in axes], str(array.dtype))
    words = f"uint{8 * array.itemsize}"
    view = array.view(words).transpose(axes)
    out = np.from_dlpack(result._create_view(result.shape, words))
    if array.size <= BLOCK * BLOCK:
        out[...] = view
        return result
    rows = axes.index(array.ndim - 1)  # along which `array` is contiguous; `out` is along the last
    starts = range(0, view.shape[-1], BLOCK)

    def copy(row: int) -> None:
        for column in starts:
            block = _block(array.ndim, {rows: row, array.ndim - 1: column})
            out[block] = view[block]

    with ThreadPoolExecutor() as pool:
        list(pool.map(copy, range(0, view.shape[rows], BLOCK)))
    return result


def _block(rank: int, starts: dict[int, int]) -> tuple[slice, ...]:
    return tuple(
        slice(starts[axis], starts[axis] + BLOCK) if axis in starts else slice(None)
        for axis in range(rank)
    )


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FoldConstants")
class FoldConstants:
    """`relax.transform.FoldConstant`, for which see the module docstring."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        hidden, found = as_parameters(mod, ["main"])
        folded = relax.transform.FoldConstant()(_replaced(hidden, _Evaluator))
        if not found["main"]:
            return folded
        stand_ins = [weight.constant().value for weight in found["main"]]
        return _replaced(with_parameters_bound(folded, stand_ins), _Recorder)


def _replaced(mod: tvm.IRModule, replacing: Callable[[tvm.IRModule], _OfConstants]) -> tvm.IRModule:
    made = replacing(mod)
    gvar = mod.get_global_var("main")
    made.builder_.update_func(gvar, made.visit_expr(mod["main"]))
    return made.builder_.finalize()


class _OfConstants(PyExprMutator):
    """Puts a constant in the place of each call of constants alone, and of what is bound to it."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.functions = {gvar.name_hint: func for gvar, func in mod.functions_items()}

    def visit_var_(self, var: Var) -> Expr:
        return self._known(super().visit_var_(var))

    def visit_dataflow_var_(self, var: Var) -> Expr:
        return self._known(super().visit_dataflow_var_(var))

    def visit_call_(self, call: Call) -> Expr:
        call = super().visit_call_(call)
        if call.op != _CALL_TIR or len(call.args) != 2:
            return call
        given = call.args[1]
        sources = list(given.fields) if isinstance(given, relax.Tuple) else [given]
        if not sources or any(tensor_of(source) is None for source in sources):
            return call
        func, ty = self.functions[call.args[0].name_hint], call.ty
        if not isinstance(ty, relax.TensorType) or not _is_known(func, len(sources)):
            return call
        return self.constant(Computed.by(func), sources, ty) or call

    def constant(
        self, made: Computed, sources: Sequence[Expr], ty: relax.TensorType
    ) -> Expr | None:
        """What is put there; None: the call stays."""
        raise NotImplementedError

    def _known(self, var: Expr) -> Expr:
        """A variable, or the constant that it is bound to."""
        value = self.builder_.lookup_binding(var) if isinstance(var, Var) else None
        return var if value is None or tensor_of(value) is None else value


@mutator
class _Recorder(_OfConstants):
    """What is made of weights."""

    def constant(
        self, made: Computed, sources: Sequence[Expr], ty: relax.TensorType
    ) -> Expr | None:
        if not any(map(weight_of, sources)):
            return None
        return derived(made, sources, [int(extent) for extent in ty.shape.values], str(ty.dtype))


@mutator
class _Evaluator(_OfConstants):
    """What is made of other constants."""

    def constant(self, made: Computed, sources: Sequence[Expr], ty: relax.TensorType) -> Expr:
        return relax.const(made.of_tensors(list(map(tensor_of, sources))))


def _is_known(func: object, inputs: int) -> bool:
    """Whether a function, of no device yet, computes one output of extents that are numbers."""
    return (
        isinstance(func, tirx.PrimFunc)
        and len(func.params) == inputs + 1
        and all(isinstance(p.ty, tirx.BufferType) for p in func.params)
        and all(isinstance(n, tirx.IntImm) for p in func.params for n in p.ty.shape)
        and not has_threads(func.body)  # TVM's sorts and scans
    )
