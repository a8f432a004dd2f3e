"""Relax modules from files: TVMScript in a Python file, or JSON."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import tvm
from tvm.ir import IRModule
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm.tirx.layout import Axis

from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends.finish import checked_module, first_line

Found = IRModule | dict[str, IRModule]

# What `IRModule.script()` assumes: it writes these imports as comments, or not at all.
SCRIPT_NAMES = {"I": I, "R": R, "T": T, "Axis": Axis, "TypeVar": TypeVar, "tvm": tvm}


Check = Callable[[IRModule, str], Found]
"""What is done with a module from a place: `module.checked_module` or `checked_functions`."""


def from_script(path: Path, check: Check = checked_module) -> Found:
    """Run a Python file and take the one IRModule it defines, checked.

    The names in `SCRIPT_NAMES` are there, so that what `mod.script()` printed runs as it is.

    Raises
    ------
    FrontendError
        The file raises, or defines no IRModule, or several.
    """
    namespace = _run(path)
    modules = {
        name: value
        for name, value in vars(namespace).items()
        if isinstance(value, IRModule) and not name.startswith("_")
    }
    different = {id(module): module for module in modules.values()}
    if not different:
        raise FrontendError(
            f"{path}: defines no IRModule; decorate a class with @tvm.script.ir_module"
        )
    if len(different) > 1:
        raise FrontendError(
            f"{path}: defines {len(different)} IRModules ({', '.join(sorted(modules))}); "
            f"leave one, or start the names of the others with an underscore"
        )
    return check(next(iter(different.values())), str(path))


def from_json(path: Path, check: Check = checked_module) -> Found:
    """Read a file that holds `tvm.ir.save_json(mod)`, checked.

    Raises
    ------
    FrontendError
        It is no JSON of TVM, or holds something else than an IRModule.
    """
    try:
        value = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise FrontendError(
            f"{path}: is no JSON of TVM: {first_line(error)}; write it with tvm.ir.save_json(mod)"
        ) from error
    if not isinstance(value, IRModule):
        raise FrontendError(
            f"{path}: holds a {type(value).__name__}, not an IRModule; "
            f"write it with tvm.ir.save_json(mod)"
        )
    return check(value, str(path))


def _run(path: Path) -> ModuleType:
    """Import a file under a name of its own, which is gone afterwards."""
    name = f"_tvm_fusion_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    namespace = importlib.util.module_from_spec(spec)
    vars(namespace).update(SCRIPT_NAMES)
    with _registered(name, namespace):
        try:
            spec.loader.exec_module(namespace)
        except (Exception, SystemExit) as error:
            raise FrontendError(
                f"{path}{_line_of(error, path)}: running the script raised "
                f"{type(error).__name__}: {first_line(error)}"
                "; mend the script until `python` runs it"
            ) from error
    return namespace


@contextlib.contextmanager
def _registered(name: str, namespace: ModuleType) -> Iterator[None]:
    """TVMScript reads the source of a class through `sys.modules`."""
    sys.modules[name] = namespace
    try:
        yield
    finally:
        sys.modules.pop(name, None)


def _line_of(error: BaseException, path: Path) -> str:
    """`:LINE` of the script where it stopped, as far as the error tells."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (str(path), str(path.absolute())):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f":{lines[-1]}" if lines else ""
