"""Read a model from where it is and give back one Relax module, ready for the compiler.

    nn.Module + example inputs -> torch.export -> IRModule
    .pt2 / ExportedProgram     ->                 IRModule
    .onnx / ModelProto         ->                 IRModule
    .py / .json / IRModule     ->                 IRModule

(`load_functions` takes Relax modules of several functions apart first: one such module for each.)

Whatever it came from, the module has a Relax function `main` whose parameters are the inputs of the
model only (weights are constants in it), is normalised and well-formed, and does no arithmetic on
booleans (see `transform/lower/fix_bool_arithmetic.py`).

`main` returns what the source returns: a torch model whose forward returns one bare tensor gives a
tensor, any other torch model gives the flat tuple of its tensors (so a tuple or a dict with one
tensor gives a tuple of one); an ONNX graph with one output gives a tensor, with several a tuple;
Relax functions are left alone.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tvm.ir import IRModule

from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends.finish import checked_functions, checked_module

SUFFIXES = (".pt2", ".onnx", ".py", ".json")


def load(model: Any, example_inputs: Any = None, *, dynamic_shapes: Any = None) -> IRModule:
    """Read a model and return it as a high-level Relax module.

    Parameters
    ----------
    model : IRModule, torch.nn.Module, ExportedProgram, onnx.ModelProto, tuple, str or Path
        A tuple is a `torch.nn.Module` and its example inputs. A path names a `.pt2` file
        (`torch.export.save`), an `.onnx` file, a Python file that defines one IRModule in
        TVMScript, or a `.json` file (`tvm.ir.save_json`).
    example_inputs : tuple of torch.Tensor, or mapping of names to torch.Tensor, optional
        The inputs to trace a `torch.nn.Module` with; required for one, refused for everything else.
    dynamic_shapes : optional
        The dimensions that stay symbolic, as `torch.export.export` takes them.

    Returns
    -------
    IRModule
        Holds `main`; its parameters are the inputs of the model, in order.

    Raises
    ------
    FrontendError
        The model is missing, broken, of an unknown kind, or holds an operator that cannot be
        converted.

    Examples
    --------
    >>> load("model.onnx")                                                        # doctest: +SKIP
    >>> load(torch.nn.Linear(8, 4), (torch.ones(2, 8),))                          # doctest: +SKIP
    """
    return _read(model, example_inputs, dynamic_shapes, checked_module, False, False)


def load_functions(
    model: Any,
    example_inputs: Any = None,
    *,
    dynamic_shapes: Any = None,
    keep_formats: bool = False,
) -> dict[str, IRModule]:
    """Read a model, and return each public function of it as a module; parameters and errors as for
    `load`. With `keep_formats` a torch model takes and gives tensors in channels_last as they lie
    (`transform.layouts.memory_formats`). What callers see beside the tensors of a torch model is
    noted in it (`ir.convention`).

    Returns
    -------
    dict of str to IRModule
        As `load` returns a model, by the function's name; a model of one function is called `main`.
    """
    found = _read(model, example_inputs, dynamic_shapes, checked_functions, keep_formats, True)
    return found if isinstance(found, dict) else {"main": found}


def _read(model: Any, *how: Any) -> Any:
    """Read a model, and check it if it is of Relax; what ends for want of memory says so."""
    try:
        return _read_by_kind(model, *how)
    except MemoryError as error:
        raise FrontendError(
            f"{_describe(model)}: memory ran out while it was read; a model's weights are held "
            "about three times meanwhile: end other programs, or take a machine with more memory"
        ) from error


def _read_by_kind(
    model: Any, example_inputs: Any, dynamic_shapes: Any, check: Any, *kept: bool
) -> Any:
    """`kept` are `keep_formats` and `keep_convention` of `pytorch.from_exported_program`."""
    if isinstance(model, tuple) and len(model) == 2 and example_inputs is None:
        model, example_inputs = model
    if _is_torch(model, "nn", "Module"):
        return _pytorch().from_module(model, example_inputs, dynamic_shapes, *kept)
    if example_inputs is not None or dynamic_shapes is not None:
        raise FrontendError(
            f"example inputs and dynamic shapes only go with a torch.nn.Module, not with "
            f"{_describe(model)}: leave them out"
        )
    if isinstance(model, IRModule):
        return check(model, "the given IRModule")
    if isinstance(model, str | os.PathLike):
        return _from_file(Path(model), check, *kept)
    if _is_torch(model, "export", "ExportedProgram"):
        where = "the given ExportedProgram"
        return _pytorch().from_exported_program(model, where, *kept)
    if type(model).__name__ == "ModelProto":
        from tvm_fusion.frontends.onnx.model import from_model

        return from_model(model, "the given ModelProto")
    raise FrontendError(
        f"{_describe(model)} is no model: give an IRModule, a torch.nn.Module with example inputs, "
        f"an ExportedProgram, or the path of a file ({', '.join(SUFFIXES)})"
    )


def _from_file(path: Path, check: Any, *kept: bool) -> Any:
    """Read a model file; its suffix says how."""
    if not path.exists():
        raise FrontendError(f"{path}: no such file; check the path")
    if not path.is_file():
        raise FrontendError(f"{path}: not a file; give the path of a model file")
    suffix = path.suffix.lower()
    if suffix == ".pt2":
        return _pytorch().from_pt2(path, *kept)
    if suffix == ".onnx":
        from tvm_fusion.frontends.onnx.model import from_onnx_file

        return from_onnx_file(path)
    if suffix in (".py", ".json"):
        from tvm_fusion.frontends.relax_file import from_json, from_script

        return from_script(path, check) if suffix == ".py" else from_json(path, check)
    raise FrontendError(
        f"{path}: unknown kind of model file {suffix!r}; known are {', '.join(SUFFIXES)} "
        f"(for PyTorch save torch.export.export(...) with torch.export.save)"
    )


def _pytorch() -> ModuleType:
    """What reads models of PyTorch; torch is imported with it."""
    return importlib.import_module("tvm_fusion.frontends.torch.model")


def _is_torch(value: Any, module: str, name: str) -> bool:
    """Whether a value is of a class of torch, which is imported already if it is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(getattr(torch, module), name))


def _describe(value: Any) -> str:
    """A few words for an error message."""
    if isinstance(value, str | os.PathLike):
        return str(value)
    return f"a value of type {type(value).__name__}"
