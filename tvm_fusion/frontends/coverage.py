"""Which operators of PyTorch and of ONNX are converted, and by whom: one row an operator.

Of PyTorch the core ATen operators, which programs are taken apart into before they are converted;
of ONNX those of its default domain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from ..errors import FrontendError


class By(Enum):
    """What converts an operator."""

    OURS = "ours"
    TVM = "TVM's"
    DEFINITION = "its definition"
    RANDOM = "refused: random"
    OF_VALUES = "refused: its size depends on values"
    NOBODY = "refused"


@dataclass(frozen=True, slots=True)
class Row:
    """An operator.

    Attributes
    ----------
    name : str
    by : By
        `DEFINITION`: it is taken apart first, as PyTorch's decomposition or the definition that
        ONNX gives has it; of PyTorch's that write into a tensor, what computes a new one is
        converted, and of those that ask for sizes, numbers and products of sizes.
    opsets : tuple of int
        Of ONNX: from which opsets on TVM's converters count; the first counts for older ones, too.
    """

    name: str
    by: By
    opsets: tuple[int, ...] = ()


def torch_rows() -> list[Row]:
    """The operators that `torch.Tag.core` marks in the installed PyTorch, in the order of names,
    which is that of PyTorch's own list.

    Raises
    ------
    FrontendError
        There is no PyTorch.
    """
    reader, torch = import_module(".torch.model", __package__), import_module("torch")
    importer = import_module(".torch.importer", __package__).Importer(reader.CONVERTERS)
    decomposed = reader.decompositions(of_complex=False)

    def by(operator: Any) -> By:
        name = operator.__name__
        if name in reader.CONVERTERS:
            return By.OURS
        if torch.Tag.nondeterministic_seeded in operator.tags:
            return By.RANDOM
        if torch.Tag.dynamic_output_shape in operator.tags:
            return By.OF_VALUES
        if operator in decomposed or operator._schema.is_mutable or name.startswith("sym_"):
            return By.DEFINITION
        return By.TVM if name in importer.convert_map else By.NOBODY

    return [Row(f"aten.{operator.__name__}", by(operator)) for operator in _core(torch)]


def _core(torch: Any) -> Iterator[Any]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    for name in sorted(name for name in names if name.startswith("aten::")):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if packet is not None else ():
            operator = getattr(packet, overload)
            if torch.Tag.core in operator.tags:
                yield operator


def onnx_rows() -> list[Row]:
    """The operators of the default domain of the installed ONNX, by name.

    Raises
    ------
    FrontendError
        There is no ONNX.
    """
    try:
        onnx = import_module("onnx")
    except ImportError as error:
        raise FrontendError(
            "operators --onnx: onnx is not installed: pip install 'tvm_fusion[onnx]'"
        ) from error
    definitions = import_module(".onnx.definitions", __package__)
    by_tvm, defined = definitions.opsets_by_tvm(), definitions.defined_by_onnx()

    def row(name: str) -> Row:
        opsets = by_tvm.get(name, ())
        if name.startswith(definitions.RANDOM):
            return Row(name, By.RANDOM)
        if name in definitions.EXPANSIONS:
            return Row(name, By.OURS, opsets)
        if name in defined:
            return Row(name, By.DEFINITION)
        return Row(name, By.TVM if name in by_tvm else By.NOBODY, opsets)

    schemas = onnx.defs.get_all_schemas()
    names = {schema.name for schema in schemas if schema.domain == "" and not schema.deprecated}
    return [row(name) for name in sorted(names)]


def counted(rows: list[Row]) -> str:
    """How many rows there are of each kind, in words."""
    counts = ((by, sum(row.by is by for row in rows)) for by in By)
    return ", ".join(f"{count} {by.value}" for by, count in counts if count)
