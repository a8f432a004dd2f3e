"""PyTorch models to Relax, through `torch.export`.

The exported program is decomposed to core ATen operators, except for those that TVM and the
compiler handle better whole (`decompositions`), and translated by `importer.Importer`.
Parameters and buffers become constants.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tvm import relax, tirx
from tvm.ir import IRModule

from ...errors import FrontendError

try:
    import torch
    from torch import _meta_registrations
except ImportError as error:
    raise FrontendError(
        "reading a PyTorch model needs torch, which is not installed: "
        "pip install 'tvm_fusion[torch]'"
    ) from error

from ...ir.convention import with_convention
from ...ir.extents import DIMS_ATTR
from ...ir.origins import Origin, with_origins
from ...transform.layouts.memory_formats import with_formats
from ..finish import checked_module, cleaned, first_line
from ..memory_formats import formats_of
from . import (
    bits,
    ctc,
    eigenvalues,
    images,
    indefinite,
    indexing,
    linalg,
    loops,
    operators,
    orders,
    products,
    recurrent,
    slices,
)
from .assertions import drop_assertions
from .complex.pairs import as_pairs, has_complex
from .convention import (
    Border,
    drop_fixed_inputs,
    fixed_inputs,
    refuse_unusable,
    results_of,
    values_later,
    views_of,
)
from .decompositions import decompositions, flex_attention_opened
from .importer import Importer, is_weight_elsewhere
from .refusals import OperatorsRefused, origin_of, stopped_export
from .slices import merge_equal_splits
from .special import two_variables
from .value_checks import READS_VALUES, no_values_read
from .written import scatters, writes
from .written.writes import (
    refuse_other_sizes,
    refuse_writes_into_constants,
    refuse_writes_into_repeats,
    warn_of_lost_writes,
    written_inputs,
)

# torch.export traces with what a process has once: modes of modules, levels of loggers, warnings.
_ONE_AT_A_TIME = threading.RLock()

CONVERTERS = {
    **operators.CONVERTERS,
    **bits.CONVERTERS,
    **ctc.CONVERTERS,
    **eigenvalues.CONVERTERS,
    **orders.CONVERTERS,
    **products.CONVERTERS,
    **recurrent.CONVERTERS,
    **images.CONVERTERS,
    **indefinite.CONVERTERS,
    **indexing.CONVERTERS,
    **linalg.CONVERTERS,
    **loops.CONVERTERS,
    **two_variables.CONVERTERS,
    **slices.CONVERTERS,
    **scatters.CONVERTERS,
    **writes.CONVERTERS,
}


def from_module(
    model: torch.nn.Module,
    example_inputs: Any,
    dynamic_shapes: Any = None,
    keep_formats: bool = False,
    keep_convention: bool = False,
) -> IRModule:
    """Export a module for inference and translate it.

    Parameters
    ----------
    model : torch.nn.Module
        Exported in evaluation mode; the modes of its submodules are put back afterwards.
    example_inputs : tuple of torch.Tensor, or mapping of names to torch.Tensor
        Numbers, texts and None among them become part of the program.
    dynamic_shapes : optional
        As `torch.export.export` takes it.
    keep_formats, keep_convention : bool
        As for `from_exported_program`.
    """
    where = f"torch module {type(model).__name__}"
    program = exported(model, example_inputs, dynamic_shapes)
    mod = from_exported_program(program, where, keep_formats, keep_convention)
    return _with_dims(mod, program.graph_signature.user_inputs, dynamic_shapes)


def _with_dims(mod: IRModule, names: Collection[Any], dynamic_shapes: Any) -> IRModule:
    """The module with what the caller calls its sizes, as far as `dynamic_shapes` says which inputs
    have them.
    """
    params = {param.name: param for param in mod["main"].params}
    inputs, dims = list(_axes_of_each(dynamic_shapes)), {}
    for name, axes in zip(names, inputs, strict=True) if len(inputs) == len(names) else ():
        for axis, dim in axes.items():
            if isinstance(dim, torch.export.Dim) and name in params:
                extent = params[name].ty.shape.values[axis]
                dims |= {dim.__name__: extent.name} if isinstance(extent, tirx.Var) else {}
    if dims:
        mod["main"] = mod["main"].with_attr(DIMS_ATTR, dims)
    return mod


def _axes_of_each(shapes: Any) -> Iterator[Mapping[int, Any]]:
    """The axes that `dynamic_shapes` names of each input, in the order of these."""
    if shapes is None:
        yield {}
    elif isinstance(shapes, Mapping) and all(isinstance(axis, int) for axis in shapes):
        yield shapes
    elif isinstance(shapes, list | tuple) and any(_is_axis(one) for one in shapes):
        yield dict(enumerate(shapes))
    else:
        for one in shapes.values() if isinstance(shapes, Mapping) else shapes:
            yield from _axes_of_each(one)


def _is_axis(one: Any) -> bool:
    return one is not None and not isinstance(one, Mapping | list | tuple)


def exported(
    model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """A module as an exported program; parameters as for `from_module`.

    Raises
    ------
    FrontendError
        torch.export cannot trace it: the message has the line that stops it.
    """
    where = f"torch module {type(model).__name__}"
    args, kwargs = _split_inputs(where, example_inputs)
    try:
        with (
            _ONE_AT_A_TIME,
            evaluation_mode(model),
            _quiet(),
            values_later(model, (args, kwargs)) as (args, kwargs),
            recurrent.states_in_shape(),
            _pools_of_any_size(),
        ):
            return _traced(model, args, kwargs, dynamic_shapes)
    except Exception as error:
        raise FrontendError(stopped_export(where, error)) from error


def _traced(
    model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """What torch.export traces; where a function reads values, without that (`value_checks`)."""
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except READS_VALUES:
        with no_values_read():
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)


@contextlib.contextmanager
def _pools_of_any_size() -> Iterator[None]:
    """A context in which torch says how many windows a symbolic size holds without asking whether
    they fill it: its division asked for the remainder, which is of no account (2.11).
    """
    original = _meta_registrations.div_rtn
    _meta_registrations.div_rtn = operator.floordiv
    try:
        yield
    finally:
        _meta_registrations.div_rtn = original


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A program of core operators and of those that are kept whole, without assertions and inputs
    that are no tensors, its weights on the CPU.
    """
    with (
        _ONE_AT_A_TIME,
        _quiet(),
        recurrent.states_in_shape(),
        _pools_of_any_size(),
        flex_attention_opened(),
    ):
        program = _on_cpu(program.run_decompositions(decompositions()))
    drop_assertions(program)
    drop_fixed_inputs(program)
    as_pairs(program)
    merge_equal_splits(program)
    return program


def from_pt2(path: Path, keep_formats: bool = False, keep_convention: bool = False) -> IRModule:
    """Read a file written by `torch.export.save`."""
    try:
        with _ONE_AT_A_TIME, _quiet():
            program = torch.export.load(path)
    except Exception as error:
        raise FrontendError(
            f"{path}: torch.export.load cannot read it: {first_line(error)}; "
            f"write it with torch.export.save(torch.export.export(model, inputs), path)"
        ) from error
    return from_exported_program(program, str(path), keep_formats, keep_convention)


def from_exported_program(
    program: torch.export.ExportedProgram,
    where: str,
    keep_formats: bool = False,
    keep_convention: bool = False,
) -> IRModule:
    """Translate an exported program; `main` takes its user inputs. With `keep_formats` tensors in
    channels_last are taken and given as they lie (`with_formats`), unless `main` writes into its
    inputs. With `keep_convention` it also takes the tensors that stay between calls, and gives
    their new values and those of inputs (`ir.convention`); without, what is written is lost, and a
    warning says so. `main` takes and gives complex tensors as pairs of real numbers along a last
    axis, as `torch.view_as_real` has them.

    Raises
    ------
    FrontendError
        It holds an operator that cannot be converted, or an input that is a symbolic number, or has
        weights without values where no convention is kept.
    """
    fixed = fixed_inputs(program, where)
    refuse_other_sizes(program, where)
    refuse_writes_into_constants(program, where)
    refuse_writes_into_repeats(program, where)
    refuse_unusable(program, where, keep_convention)
    formats = formats_of(program) if keep_formats and not has_complex(program) else None
    views = views_of(program) if keep_convention else []
    importer, border, results = Importer(CONVERTERS), None, []
    with _told(importer, where):
        program = decomposed(program)
        importer.in_place = written_inputs(program, buffers=keep_convention)
        if keep_convention:
            results, border = results_of(program), Border.of(program, importer.in_place)
            border.apply(program)
        else:
            warn_of_lost_writes(program, importer.in_place)
    mod = translated(importer, program, where, _returns_bare_tensor(program))
    if border is not None:
        convention = border.convention(program, views, results, fixed, importer.symbols, mod)
        mod = with_convention(mod, convention)
    if formats is None or importer.in_place or not formats.fits(mod):
        return mod
    return with_formats(mod, formats)


def translated(importer: Importer, program: Any, where: str, bare: bool) -> IRModule:
    """What an importer makes of a decomposed program, checked, with the origins of its values; with
    `bare`, the only result is no tuple.

    Raises
    ------
    OperatorsRefused, FrontendError
    """
    with _told(importer, where):
        mod = importer.module_of(program, bare)
    if importer.refused:
        raise OperatorsRefused(where, importer.refused)
    mod = checked_module(cleaned(mod), where)
    return with_origins(mod, {**importer.origins, **_origin_of_result(mod, program)})


@contextlib.contextmanager
def _told(importer: Importer, where: str) -> Iterator[None]:
    """Only one thread at a time; what fails is said in words of the model."""
    try:
        with _ONE_AT_A_TIME, _quiet():
            yield
    except MemoryError:  # `frontends` has words for it
        raise
    except Exception as error:
        if importer.refused:
            raise OperatorsRefused(where, importer.refused) from error
        raise FrontendError(
            f"{where}: cannot be converted to Relax: {first_line(error)}"
            "; write the model without that"
        ) from error


def _origin_of_result(mod: IRModule, program: torch.export.ExportedProgram) -> dict[str, Origin]:
    """Where a bare result comes from: its variable has another name than that of its node."""
    result = mod["main"].body.body
    (nodes,) = program.graph.output_node().args
    named = isinstance(result, relax.Var) and isinstance(nodes[-1], torch.fx.Node)
    return {result.name: origin_of(nodes[-1])} if named else {}


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
        "; give one of the two"
    )


def _on_cpu(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with its small tensors in host memory, where constants are hashed and folded;
    weights stay where they are.

    The program is one of our own making; the weights it shares with its origin are not touched.
    """
    tensors = (*program.state_dict.values(), *program.constants.values())
    if all(not isinstance(t, torch.Tensor) or t.device.type == "cpu" for t in tensors):
        return program
    from torch.export.passes import move_to_device_pass

    program._state_dict, program._constants = dict(program.state_dict), dict(program.constants)
    stay = {name: t for name, t in program.state_dict.items() if is_weight_elsewhere(t)}
    for name, tensor in stay.items():  # a copy there would be as large as the model
        empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
        parameter = isinstance(tensor, torch.nn.Parameter)
        program._state_dict[name] = (
            torch.nn.Parameter(empty, requires_grad=False) if parameter else empty
        )
    moved = move_to_device_pass(program, "cpu")
    moved._state_dict |= stay
    return moved


def _returns_bare_tensor(program: torch.export.ExportedProgram) -> bool:
    """Whether forward returned one tensor, and no tuple, dict or data class around it."""
    return program.call_spec.out_spec.is_leaf()


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Modules in evaluation mode; those of `nn.Transformer` compute what they do in training, where
    there is a short cut that packs what a mask leaves (and leaves the rest to chance).
    """
    modes = {module: module.training for module in model.modules()}
    is_short = torch.backends.mha.get_fastpath_enabled()
    with contextlib.suppress(NotImplementedError):  # of an exported program, which has no modes
        model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_short)
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide deprecation warnings inside PyTorch and TVM, which no user can act on, and what torch
    logs and prints of errors that it raises as well.
    """
    logs = [logging.getLogger(name) for name in _REPEATING]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


_REPEATING = (
    "torch.export",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)
