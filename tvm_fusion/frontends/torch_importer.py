"""TVM's translator of exported programs, with its numerical faults put right.

What differs from TVM 0.27, beside the converters of torch_operators.py, torch_norms.py,
torch_products.py, torch_attention.py, torch_scatters.py, torch_slices.py, torch_splits.py and
torch_writes.py:
- What depends on no input is a constant (torch_constants.py).
- Inputs that the model writes into are changed (torch_writes.py).
- A permutation that undoes the one before it disappears.
- Every result has the element type and the shape that PyTorch says it has.
- There are 8-bit floats.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from tvm_fusion.frontends import (
    torch_attention,
    torch_norms,
    torch_operators,
    torch_products,
    torch_scatters,
    torch_slices,
    torch_splits,
    torch_writes,
)
from tvm_fusion.frontends.torch_constants import CONSTANT_LIMIT_BYTES, input_free_values
from tvm_fusion.frontends.torch_symbols import shape_of, symbols_of

CONVERTERS = {
    **torch_operators.CONVERTERS,
    **torch_norms.CONVERTERS,
    **torch_products.CONVERTERS,
    **torch_attention.CONVERTERS,
    **torch_scatters.CONVERTERS,
    **torch_slices.CONVERTERS,
    **torch_splits.CONVERTERS,
    **torch_writes.CONVERTERS,
}

FLOAT8_TYPES = ("float8_e4m3fn", "float8_e5m2")


class Importer(ExportedProgramImporter):
    """Translates one exported program.

    Attributes
    ----------
    known_values : dict of fx.Node to torch.Tensor
        The values of the nodes that depend on no input.
    symbols : dict of str to tirx.Var
        The symbolic dimensions of the inputs.
    masks : dict
        Attention masks that are translated already; the layers of a model share theirs.
    in_place : set of fx.Node
        The writes that change an input of the model.
    """

    def __init__(self) -> None:
        self.current: fx.Node | None = None
        self.known_values: dict[fx.Node, torch.Tensor] = {}
        self.symbols: dict[str, tirx.Var] = {}
        self.masks: dict[tuple[fx.Node, str], tuple[relax.Expr, relax.Expr]] = {}
        self.in_place: set[fx.Node] = set()
        super().__init__()

    def from_exported_program(self, program: torch.export.ExportedProgram, **options: Any) -> Any:
        """Translate a program, after computing what depends on no input."""
        self.known_values = input_free_values(program)
        self.in_place = torch_writes.written_inputs(program)
        return super().from_exported_program(program, **options)

    def create_input_vars(self, program: torch.export.ExportedProgram) -> Any:
        """TVM's variables for the inputs; notes their symbolic dimensions."""
        given, inputs, ranges = super().create_input_vars(program)
        self.symbols = symbols_of(inputs.values())
        return given, inputs, ranges

    def create_convert_map(self) -> dict[Any, Callable[[fx.Node], relax.Expr]]:
        """TVM's converters with ours over them, each followed by a conversion to the right type."""
        converters = super().create_convert_map()
        converters |= {name: self._bound(convert) for name, convert in CONVERTERS.items()}
        return {name: self._typed(convert) for name, convert in converters.items()}

    @staticmethod
    def _convert_data_type(input_type: Any, env: dict | None = None) -> str:
        """TVM's name of a type, those of 8-bit floats among them."""
        name = str(input_type).removeprefix("torch.")
        if name in FLOAT8_TYPES:
            return name
        return ExportedProgramImporter._convert_data_type(input_type, env)

    def stopped_at(self) -> str:
        """The operator that could not be translated, for messages; empty if it was none of them."""
        return f" at {self.current.target} ({self.current.name})" if self.current else ""

    def _bound(self, convert: Callable) -> Callable[[fx.Node], relax.Expr]:
        return lambda node: convert(self, node)

    def _typed(self, convert: Callable) -> Callable[[fx.Node], relax.Expr]:
        """A converter whose result is a constant where it is known, and has PyTorch's type."""

        def convert_typed(node: fx.Node) -> relax.Expr:
            known = self.known_values.get(node)
            if known is not None and known.nbytes <= CONSTANT_LIMIT_BYTES:
                return relax.const(self._convert_pytorch_tensor_to_tvm(known.contiguous()))
            self.current = node
            result = convert(node)
            expected = node.meta.get("val")
            if isinstance(expected, torch.Tensor) and is_tensor(result):
                result = self._shaped(self.cast(result, self.dtype_of(node)), expected)
            self.current = None
            return result

        return convert_typed

    def _shaped(self, x: relax.Expr, expected: torch.Tensor) -> relax.Expr:
        """x with the shape that PyTorch found, where TVM found none."""
        shape = shape_of(expected, self.symbols)
        if x.ty.shape is not None or shape is None:
            return x
        return self.block_builder.match_cast(x, relax.TensorType(shape, x.ty.dtype))

    # ---- what converters are written with ----

    def emit(self, expression: relax.Expr) -> relax.Var:
        """Bind an expression to a variable."""
        return self.block_builder.emit(expression)

    def value_of(self, arg: Any) -> Any:
        """What an argument of a node stands for: an expression, a number, a list of those, None."""
        return self._retrieve_args(arg)

    def dtype_of(self, node: fx.Node) -> str:
        """The element type of a node's result, as TVM names it."""
        return self._convert_data_type(node.meta["val"].dtype)

    def operand(self, arg: Any, dtype: str) -> relax.Expr:
        """An argument of a node as a tensor of the given type."""
        value = self.value_of(arg)
        if is_tensor(value):
            return self.cast(value, dtype)
        if isinstance(value, bool | int | float):
            return relax.const(value, dtype)
        return self._prim_value_to_scalar_tensor(value, dtype)

    def cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """x in the given type."""
        return x if str(x.ty.dtype) == dtype else self.emit(relax.op.astype(x, dtype))

    def permute(self, x: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """x with its axes permuted; two permutations become one, or none."""
        axes = [axis % x.ty.ndim for axis in axes]
        made_by = self.block_builder.lookup_binding(x) if isinstance(x, relax.Var) else None
        if _is_permutation(made_by):
            axes = [int(made_by.attrs.axes[axis]) for axis in axes]
            x = made_by.args[0]
        return x if axes == sorted(axes) else self.emit(relax.op.permute_dims(x, axes))


def is_tensor(value: Any) -> bool:
    """Whether a value is an expression that gives a tensor."""
    return isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType)


def _is_permutation(expression: relax.Expr | None) -> bool:
    return (
        isinstance(expression, relax.Call)
        and expression.op == Op.get("relax.permute_dims")
        and expression.attrs.axes is not None
    )
