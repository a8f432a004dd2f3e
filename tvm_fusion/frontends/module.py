"""The last step of every frontend: check a module, normalise it, and make it buildable."""

from tvm import relax
from tvm.ir import IRModule

from tvm_fusion.errors import FrontendError
from tvm_fusion.transform.fix_bool_arithmetic import FixBoolArithmetic
from tvm_fusion.transform.function_apart import renamed


def checked_module(mod: IRModule, where: str) -> IRModule:
    """Return the module normalised and without boolean arithmetic, or say what is wrong with it.

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
    try:
        mod = relax.transform.Normalize()(mod)
        relax.analysis.well_formed(mod)
    except Exception as error:
        raise FrontendError(
            f"{where}: is not a well-formed Relax module: {first_line(error)}"
        ) from error
    return FixBoolArithmetic()(mod)


def _with_main(mod: IRModule, where: str) -> IRModule:
    """The module with its only public Relax function as `main`: `nn.Module.export_tvm` and others
    give it names of their own.
    """
    found = [
        var
        for var, function in mod.functions.items()
        if isinstance(function, relax.Function) and "global_symbol" in (function.attrs or {})
    ]
    if len(found) != 1:
        names = ", ".join(sorted(var.name_hint for var in mod.get_global_vars())) or "none"
        raise FrontendError(
            f"{where}: has no function 'main' (it has {names}); name the Relax function to compile "
            "'main', or register `tvm_fusion.transform.Fuse` in a pipeline: it takes all functions"
        )
    return renamed(mod, found[0], "main")


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; its type where there is none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
