"""PyTorch models to Relax, through `torch.export`.

The exported program is decomposed to core ATen operators, except for those that TVM and the
compiler handle better whole (torch_decompositions.py), and translated by `torch_importer.Importer`.
Parameters and buffers become constants.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tvm.ir import IRModule

from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends.cleanup import cleaned
from tvm_fusion.frontends.finish import checked_module, first_line

try:
    import torch
except ImportError as error:
    raise FrontendError(
        "reading a PyTorch model needs torch, which is not installed: "
        "pip install 'tvm_fusion[torch]'"
    ) from error

from tvm_fusion.frontends.torch_decompositions import decompositions
from tvm_fusion.frontends.torch_importer import Importer
from tvm_fusion.frontends.torch_splits import merge_equal_splits
from tvm_fusion.frontends.torch_writes import refuse_writes_into_repeats


def from_module(
    model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any = None
) -> IRModule:
    """Export a module for inference and translate it.

    Parameters
    ----------
    model : torch.nn.Module
        Exported in evaluation mode; the modes of its submodules are put back afterwards.
    example_inputs : tuple of torch.Tensor, or mapping of names to torch.Tensor
    dynamic_shapes : optional
        As `torch.export.export` takes it.
    """
    where = f"torch module {type(model).__name__}"
    args, kwargs = _split_inputs(where, example_inputs)
    try:
        with _evaluation_mode(model), _quiet():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise FrontendError(
            f"{where}: torch.export cannot trace it with these example inputs: {first_line(error)}"
        ) from error
    return from_exported_program(program, where)


def from_pt2(path: Path) -> IRModule:
    """Read a file written by `torch.export.save`."""
    try:
        with _quiet():
            program = torch.export.load(path)
    except Exception as error:
        raise FrontendError(
            f"{path}: torch.export.load cannot read it: {first_line(error)}; "
            f"write it with torch.export.save(torch.export.export(model, inputs), path)"
        ) from error
    return from_exported_program(program, str(path))


def from_exported_program(
    program: torch.export.ExportedProgram,
    where: str,
    inspect: Callable[[torch.export.ExportedProgram], None] | None = None,
) -> IRModule:
    """Translate an exported program; `main` takes its user inputs. `inspect` is given the
    decomposed program, in which nothing writes into a tensor, and may refuse it.

    Raises
    ------
    FrontendError
        It holds an operator that cannot be converted, or an input that is no tensor.
    """
    _refuse_inputs_that_are_no_tensors(program, where)
    refuse_writes_into_repeats(program, where)
    importer = Importer()
    try:
        with _quiet():
            program = _on_cpu(program.run_decompositions(decompositions()))
            merge_equal_splits(program)
            if inspect is not None:
                inspect(program)
            mod = importer.from_exported_program(
                program,
                keep_params_as_input=False,
                unwrap_unit_return_tuple=_returns_bare_tensor(program),
                no_bind_return_tuple=False,
                custom_convert_map=None,
            )
    except Exception as error:
        raise FrontendError(
            f"{where}: cannot be converted to Relax{importer.stopped_at()}: {first_line(error)}"
        ) from error
    return checked_module(cleaned(mod), where)


def _split_inputs(where: str, inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Example inputs as positional and keyword arguments."""
    if inputs is None:
        raise FrontendError(
            f"{where}: needs example inputs to be traced with; give a tuple of tensors"
        )
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    raise FrontendError(
        f"{where}: example inputs are a tuple of tensors or a mapping of names to tensors, "
        f"not a {type(inputs).__name__}"
    )


def _refuse_inputs_that_are_no_tensors(program: torch.export.ExportedProgram, where: str) -> None:
    for spec in program.graph_signature.input_specs:
        is_user_input = spec.kind is torch.export.graph_signature.InputKind.USER_INPUT
        if is_user_input and not isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
            raise FrontendError(
                f"{where}: input {spec.arg.name!r} is no tensor; the compiled model takes tensors "
                f"only, so fix its value inside the model"
            )


def _on_cpu(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with its weights in host memory, where constants are hashed and folded.

    The program is one of our own making; the weights it shares with its origin are not touched.
    """
    tensors = (*program.state_dict.values(), *program.constants.values())
    if all(not isinstance(t, torch.Tensor) or t.device.type == "cpu" for t in tensors):
        return program
    from torch.export.passes import move_to_device_pass

    program._state_dict, program._constants = dict(program.state_dict), dict(program.constants)
    return move_to_device_pass(program, "cpu")


def _returns_bare_tensor(program: torch.export.ExportedProgram) -> bool:
    """Whether forward returned one tensor, and no tuple, dict or data class around it."""
    return program.call_spec.out_spec.is_leaf()


@contextlib.contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide deprecation warnings inside PyTorch and TVM, which no user can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
