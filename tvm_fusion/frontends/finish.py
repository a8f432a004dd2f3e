"""The last step of every frontend: check a module, normalise it, and make it buildable."""

import functools

import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar, IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..errors import FrontendError
from ..transform.functions.entries import entry_alone, entry_functions, inlined, is_entry
from ..transform.functions.function_apart import renamed
from ..transform.functions.functions import with_functions
from ..transform.lower.fix_bool_arithmetic import FixBoolArithmetic


def checked_module(mod: IRModule, where: str) -> IRModule:
    """Return the module normalised, with private functions in the place of their calls and without
    boolean arithmetic, or say what is wrong with it.

    Parameters
    ----------
    mod : IRModule
    where : str
        Where it came from, for messages.

    Raises
    ------
    FrontendError
        There is no Relax function `main`, nor just one that is public, or the module is not
        well-formed.
    """
    if all(var.name_hint != "main" for var in mod.get_global_vars()):
        mod = _with_main(mod, where)
    main = mod["main"]
    if not isinstance(main, relax.Function):
        raise FrontendError(
            f"{where}: 'main' is a {type(main).__name__}, not a Relax function; "
            f"call it from a Relax function 'main' with R.call_tir"
        )
    return FixBoolArithmetic()(inlined(_normalised(mod, where)))


def checked_functions(mod: IRModule, where: str) -> dict[str, IRModule]:
    """The public functions of a module, each as the `main` of a module of its own.

    Parameters
    ----------
    mod, where
        As for `checked_module`.

    Returns
    -------
    dict of str to IRModule
        By name; the only function of a module is called `main`, whatever its name is.

    Raises
    ------
    FrontendError
        As `checked_module`, but several functions are none.
    """
    if len(_entries(mod)) < 2:
        return {"main": checked_module(mod, where)}
    mod = _normalised(mod, where)
    return {name: FixBoolArithmetic()(entry_alone(mod, name)) for name in entry_functions(mod)}


def _normalised(mod: IRModule, where: str) -> IRModule:
    try:
        mod = relax.transform.Normalize()(mod)
        relax.analysis.well_formed(mod)
    except Exception as error:
        raise FrontendError(
            f"{where}: is not a well-formed Relax module: {first_line(error)}"
            "; look at it with relax.analysis.well_formed"
        ) from error
    return mod


def _entries(mod: IRModule) -> list[GlobalVar]:
    """The public Relax functions of a module that need not be normalised."""
    return [var for var, function in mod.functions.items() if is_entry(var, function)]


def _with_main(mod: IRModule, where: str) -> IRModule:
    """The module with its only public Relax function as `main`: `nn.Module.export_tvm` and others
    give it names of their own.
    """
    found = _entries(mod)
    if len(found) != 1:
        names = ", ".join(sorted(var.name_hint for var in mod.get_global_vars())) or "none"
        raise FrontendError(
            f"{where}: has no function 'main' (it has {names}); name the Relax function that is "
            "meant 'main'. (`tvm_fusion.compile`, `explain` and `tune` take all public functions, "
            "and so does the pass `tvm_fusion.transform.Fuse`)"
        )
    return renamed(mod, found[0], "main")


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; its type where there is none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


# ---- What TVM's importers leave behind, put in order.
#
# Before:
#     lv: R.Tensor((2, 4)) = R.broadcast_to(x, R.shape([2, 4]))     # x is R.Tensor((2, 4)) already
#     lv1: R.Tensor((2, 2, 4)) = R.stack((x, y), axis=0)
#     lv2: R.Tensor((2, 4)) = R.sum(lv1, axis=[0])                  # the Sum of ONNX
#     lv3: R.Shape = R.call_packed("vm.builtin.tensor_to_shape", n) # inside a dataflow block
#
# After:
#     lv2: R.Tensor((2, 4)) = R.add(x, y)
#     lv3: R.Shape = R.call_pure_packed("vm.builtin.tensor_to_shape", n)

SHAPE_READER = "vm.builtin.tensor_to_shape"

# What they do is told by the type of their result; nothing, if that is the type of their operand.
CONVERSIONS = ("relax.broadcast_to", "relax.reshape", "relax.astype")

# Reductions over tensors stacked for them, as operators on two tensors.
PAIRWISE = {
    "relax.sum": relax.op.add,
    "relax.max": relax.op.maximum,
    "relax.min": relax.op.minimum,
}


def cleaned(mod: IRModule) -> IRModule:
    """The module without dead code and conversions that change nothing, its calls declared pure.

    Parameters
    ----------
    mod : IRModule
        Fresh from an importer: `main` is all that counts.
    """
    mod = with_functions(mod, mod.functions)
    mod["main"] = _Cleaner(mod).visit_expr(mod["main"])
    return relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(mod))


@mutator
class _Cleaner(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if isinstance(call.op, relax.ExternFunc) and call.op.global_symbol == SHAPE_READER:
            return relax.op.call_pure_packed(SHAPE_READER, *call.args, ty_args=list(call.ty_args))
        if _changes_nothing(call):
            return call.args[0]
        stacked = self._reduced_stack(call)
        if stacked is None:
            return call
        pairwise = PAIRWISE[call.op.name]
        return functools.reduce(lambda a, b: self.builder_.normalize(pairwise(a, b)), stacked)

    def _reduced_stack(self, call: relax.Call) -> list[relax.Expr] | None:
        """The tensors that a reduction is given in a stack of its own; None for other calls."""
        if not isinstance(call.op, Op) or call.op.name not in PAIRWISE or call.attrs.keepdims:
            return None
        source = call.args[0]
        stack = self.lookup_binding(source) if isinstance(source, relax.Var) else source
        if not isinstance(stack, relax.Call) or stack.op != Op.get("relax.stack"):
            return None
        axis = 0 if stack.attrs.axis is None else int(stack.attrs.axis)
        same = call.attrs.axis is not None and [int(a) for a in call.attrs.axis] == [axis]
        return list(stack.args[0]) if same and isinstance(stack.args[0], relax.Tuple) else None


def _changes_nothing(call: relax.Call) -> bool:
    if not isinstance(call.op, Op) or call.op.name not in CONVERSIONS:
        return False
    return tvm_ffi.structural_equal(call.ty, call.args[0].ty)
