"""The last step of every frontend: check a module, normalise it, and make it buildable."""

from tvm import relax
from tvm.ir import GlobalVar, IRModule

from tvm_fusion.errors import FrontendError
from tvm_fusion.transform.functions.entries import entry_alone, entry_functions, inlined, is_entry
from tvm_fusion.transform.functions.function_apart import renamed
from tvm_fusion.transform.lower.fix_bool_arithmetic import FixBoolArithmetic


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
