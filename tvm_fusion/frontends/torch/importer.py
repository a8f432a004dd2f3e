"""TVM's translator of exported programs, with its numerical faults put right.

What differs from TVM 0.27, beside the converters of operators.py, products.py,
slices.py and writes.py:
- What depends on no input is a constant.
- A permutation that undoes the one before it disappears.
- Every result has the element type and the shape that PyTorch says it has.
- There are 8-bit floats.
"""

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
import tvm
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy import functions as torch_functions
from tvm import relax, te, tirx
from tvm.ir import Op
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ...errors import FrontendError
from ...ir.extents import MULTIPLES_ATTR
from ...ir.origins import Origin
from ...ir.weights import SAMPLED, Weight, looks_random, may_be_weight
from ..multiples import Multiples, Size, Symbols, product
from .complex.pairs import has_no_rule, is_complex_node
from .refusals import COMPLEX, NO_CONVERTER, Refused, origin_of

FLOAT8_TYPES = ("float8_e4m3fn", "float8_e5m2")


def is_weight_elsewhere(tensor: Any) -> bool:
    """Whether a tensor is a weight on a device, that stays there (`ir.weights`)."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
        return False
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        return False
    if not may_be_weight(tensor.shape, dtype):
        return False
    picked = tensor.detach().view(-1)[:: max(1, tensor.numel() // SAMPLED)].cpu().contiguous()
    return looks_random(picked.view(torch.uint8).numpy().view(f"uint{8 * tensor.element_size()}"))


class Importer(ExportedProgramImporter):
    """Translates one exported program, by `converters` where TVM's are not to be used.

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
    origins : dict of str to Origin
        Where the results of nodes come from in the model, by the names of their variables.
    refused : list of Refused
        The nodes that could not be converted; something of their shape and type stands for them.
    unknown : set of fx.Node
        Those that nothing could stand for, and what reads them.
    """

    def __init__(self, converters: Mapping[str, Callable[[Any, fx.Node], relax.Expr]]) -> None:
        self.converters = converters
        self.known_values: dict[fx.Node, torch.Tensor] = {}
        self.symbols: dict[str, tirx.Expr] = {}
        self.multiples: dict[str, int] = {}
        self.masks: dict[tuple[fx.Node, str], tuple[relax.Expr, relax.Expr]] = {}
        self.in_place: set[fx.Node] = set()
        self.origins: dict[str, Origin] = {}
        self.refused: list[Refused] = []
        self.unknown: set[fx.Node] = set()
        super().__init__()

    def module_of(self, program: torch.export.ExportedProgram, bare: bool = False) -> Any:
        """The program with its weights in it; `bare`: one result is no tuple of one."""
        return self.from_exported_program(
            program,
            keep_params_as_input=False,
            unwrap_unit_return_tuple=bare,
            no_bind_return_tuple=False,
            custom_convert_map=None,
        )

    def from_exported_program(self, program: torch.export.ExportedProgram, **options: Any) -> Any:
        """Translate a program, after computing what depends on no input."""
        self.known_values = input_free_values(program)
        mod = super().from_exported_program(program, **options)
        if self.multiples:
            mod["main"] = mod["main"].with_attr(MULTIPLES_ATTR, self.multiples)
        return mod

    def create_input_vars(self, program: torch.export.ExportedProgram) -> Any:
        """TVM's variables for the inputs; notes their symbolic dimensions."""
        given, inputs, ranges = super().create_input_vars(program)
        self.symbols = symbols_of(inputs.values())
        multiples = Multiples.of(inputs.values(), self.symbols)
        self.symbols |= multiples.symbols
        self.multiples = multiples.of_what
        return given, multiples.inputs(inputs), multiples.ranges(ranges)

    def create_convert_map(self) -> dict[Any, Callable[[fx.Node], relax.Expr]]:
        """TVM's converters with ours over them, each followed by a conversion to the right type."""
        converters = super().create_convert_map()
        converters |= {name: self._bound(convert) for name, convert in self.converters.items()}
        typed = {name: self._typed(convert) for name, convert in converters.items()}
        return defaultdict(lambda: self._typed(_refuse), typed)

    def _check_unsupported_func_type(self, nodes: Iterable[fx.Node]) -> None:
        """Nothing: what has no converter is refused where it stands, and all of it is told."""

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor: torch.Tensor) -> tvm.runtime.Tensor:
        """A tensor as one of TVM; a weight on a device stays there, and gets a stand-in."""
        if not is_weight_elsewhere(tensor):
            # What has strides goes through NumPy there, which has no bfloat16.
            dense = tensor.contiguous() if tensor.layout is torch.strided else tensor
            return ExportedProgramImporter._convert_pytorch_tensor_to_tvm(dense)
        name = f"weight at {tensor.data_ptr():x}"
        dtype = Importer._convert_data_type(tensor.dtype)
        return Weight(name, tuple(tensor.shape), dtype, tensor).constant().value

    @staticmethod
    def _convert_data_type(input_type: Any, env: dict | None = None) -> str:
        """TVM's name of a type, those of 8-bit floats among them."""
        name = str(input_type).removeprefix("torch.")
        if name in FLOAT8_TYPES:
            return name
        if name.startswith("complex"):
            raise FrontendError(COMPLEX)
        return ExportedProgramImporter._convert_data_type(input_type, env)

    def _bound(self, convert: Callable) -> Callable[[fx.Node], relax.Expr]:
        return lambda node: convert(self, node)

    def _typed(self, convert: Callable) -> Callable[[fx.Node], relax.Expr]:
        """A converter whose result is a constant where it is known, and has PyTorch's type."""

        def convert_typed(node: fx.Node) -> relax.Expr | None:
            if has_no_rule(node):
                self.refused.append(_refused_complex(node))
            if is_complex_node(node) or not self.unknown.isdisjoint(node.all_input_nodes):
                self.unknown.add(node)
                return None
            if has_no_rule(node):
                return self._stand_in(node)
            try:
                return self._converted(node, convert)
            except MemoryError:
                raise
            except Exception as error:  # whatever a converter raises, TVM's or one of ours
                self.refused.append(Refused.by(node, error))
                return self._stand_in(node)

        return convert_typed

    def _converted(self, node: fx.Node, convert: Callable[[fx.Node], relax.Expr]) -> relax.Expr:
        known = self.known_values.get(node)
        if known is not None and 0 < known.nbytes <= CONSTANT_LIMIT_BYTES:
            return relax.const(self._convert_pytorch_tensor_to_tvm(known.contiguous()))
        refuse_random(node)
        self._let_shapes_agree(node)
        expected = node.meta.get("val")
        if isinstance(expected, torch.Tensor | tuple) and free_unbacked_symbols(expected):
            raise FrontendError(
                "the size of its result depends on values, as that of nonzero or of a mask as an "
                "index does: use torch.where, or a topk of a fixed size"
            )
        if isinstance(expected, torch.Tensor) and 0 in expected.shape:
            result = self._zeros(expected)  # a result without elements
        elif (constant := _of_nothing(node)) is not None:
            result = relax.const(self._convert_pytorch_tensor_to_tvm(constant))
        elif _reduces_a_number(node):
            result = self._reduced_row(node, convert)
        elif _is_float_of_integers(node):
            result = self._of_floats(node, convert)
        else:
            result = convert(node)
        if isinstance(result, relax.Call):
            result = self.emit(result)
        if isinstance(expected, torch.Tensor) and is_tensor(result):
            result = self._shaped(self.cast(result, self.dtype_of(node)), expected)
            _hold_to_shape(result, expected)
        for part in result.fields if isinstance(result, relax.Tuple) else [result]:
            if isinstance(part, relax.Var):
                self.origins.setdefault(part.name, origin_of(node))
        return result

    def _reduced_row(self, node: fx.Node, convert: Callable[[fx.Node], relax.Expr]) -> relax.Expr:
        """What a reduction makes of a number: what it makes of a row of that element."""
        number = self.env[node.args[0]]
        self.env[node.args[0]] = self.emit(relax.op.reshape(number, [1]))
        try:
            result = convert(node)
        finally:
            self.env[node.args[0]] = number
        if is_tensor(result):
            return self._number(result)
        places = range(len(node.meta["val"]))
        return relax.Tuple([self._number(self.emit(relax.TupleGetItem(result, i))) for i in places])

    def _of_floats(self, node: fx.Node, convert: Callable[[fx.Node], relax.Expr]) -> relax.Expr:
        """A function of integers or booleans as one of floats, which alone TVM takes."""
        given = self.env[node.args[0]]
        self.env[node.args[0]] = self.cast(given, self.dtype_of(node))
        try:
            return convert(node)
        finally:
            self.env[node.args[0]] = given

    def _number(self, x: relax.Expr) -> relax.Expr:
        return x if x.ty.ndim == 0 else self.emit(relax.op.squeeze(x, [0]))

    def _stand_in(self, node: fx.Node) -> relax.Expr | None:
        """Zeros for the result of a node that is refused, so that what reads it can be looked at;
        None where its shape is not known.
        """
        try:
            values = node.meta["val"]
            if isinstance(values, torch.Tensor):
                return self._zeros(values)
            return relax.Tuple([self._zeros(value) for value in values])
        except Exception:  # sizes that depend on values, numbers, types that TVM does not have
            self.unknown.add(node)
            return None

    def _zeros(self, like: torch.Tensor) -> relax.Expr:
        shape = shape_of(like, self.symbols)
        return self.emit(
            relax.op.zeros(relax.ShapeExpr(shape), self._convert_data_type(like.dtype))
        )

    def _shaped(self, x: relax.Expr, expected: torch.Tensor) -> relax.Expr:
        """x with the shape that PyTorch found, where TVM found none."""
        shape = shape_of(expected, self.symbols)
        if x.ty.shape is not None or shape is None:
            return x
        return self.block_builder.match_cast(x, relax.TensorType(shape, x.ty.dtype))

    def _let_shapes_agree(self, node: fx.Node) -> None:
        """Gives tensors that meet the shapes that PyTorch found, where TVM cannot tell them to be
        theirs: of twice ``(n - 1) // 2 + 1`` not that it is n, where n is even.
        """
        tensors = [x for x in node.all_input_nodes if _is_of_symbolic_size(x.meta.get("val"))]
        if len(tensors) < 2 or not self.multiples:
            return
        for given in tensors:
            x, shape = self.env.get(given), shape_of(given.meta["val"], self.symbols)
            if x is None or shape is None or not isinstance(x.ty.shape, relax.ShapeExpr):
                continue
            if not are_equal(x.ty.shape, shape):
                self.env[given] = self.block_builder.emit_te(_resized, x, shape)

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


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, defaults filled in."""
    bound = {}
    for index, argument in enumerate(node.target._schema.arguments):
        given = node.args[index] if index < len(node.args) else argument.default_value
        bound[argument.name] = node.kwargs.get(argument.name, given)
    return bound


def _reduces_a_number(node: fx.Node) -> bool:
    """Whether a node reduces a tensor without axes along an axis, as PyTorch allows."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    reduces = names[0] == "self" and {"dim", "keepdim"} <= set(names)
    return reduces and node.args[0].meta["val"].ndim == 0


def _is_float_of_integers(node: fx.Node) -> bool:
    """Whether a node computes floats element by element from integers or booleans alone, as acos
    does.
    """
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    value = node.meta.get("val")
    if not pointwise or len(node.all_input_nodes) != 1 or not isinstance(value, torch.Tensor):
        return False
    (given,) = node.all_input_nodes
    dtype = given.meta["val"].dtype
    is_float = dtype.is_floating_point or dtype.is_complex
    return node.args[:1] == (given,) and not is_float and value.is_floating_point()


def _refuse(node: fx.Node) -> relax.Expr:
    raise FrontendError(NO_CONVERTER)


def _refused_complex(node: fx.Node) -> Refused:
    """Why an operator of complex numbers is refused."""
    try:
        refuse_random(node)
    except FrontendError as error:
        return Refused.by(node, error)
    return Refused(node, COMPLEX)


def refuse_random(node: fx.Node) -> None:
    """Raise FrontendError for an operator whose result is another in each call."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags or not node.users:
        return
    options = bound_arguments(node)
    names = ("dropout_p", "p", "dropout")
    probability = next((options[name] for name in names if name in options), None)
    if probability == 0 or options.get("train") is False:
        return
    if "scaled_dot_product" in node.target.__name__:  # has a converter, which looks at that
        return
    raise FrontendError(
        "it draws random numbers, another value in each call: give them to the model as an input"
    )


def _of_nothing(node: fx.Node) -> torch.Tensor | None:
    """What an operator makes of tensors without elements alone (a sum of 0, a mean that is NaN): it
    depends on nothing else than their shapes. None for others.
    """
    inputs = [x.meta.get("val") for x in node.all_input_nodes]
    empty = inputs and all(isinstance(x, torch.Tensor) and 0 in x.shape for x in inputs)
    sizes = [n for x in (*inputs, node.meta["val"]) for n in getattr(x, "shape", ())]
    if not empty or not isinstance(node.meta["val"], torch.Tensor):
        return None
    if not all(isinstance(n, int) for n in sizes):
        return None
    given = {
        n: torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in node.all_input_nodes
    }
    args, kwargs = (fx.map_arg(x, given.__getitem__) for x in (node.args, node.kwargs))
    return node.target(*args, **kwargs).contiguous()


def _hold_to_shape(result: relax.Expr, expected: torch.Tensor) -> None:
    """Raise FrontendError where a result has another shape than that of PyTorch."""
    given = result.ty.shape
    if given is None:
        return
    pairs = [
        (int(a.value), b)
        for a, b in zip(given, expected.shape, strict=False)
        if isinstance(a, tirx.IntImm) and isinstance(b, int)
    ]
    if len(given) != expected.ndim or any(a != b for a, b in pairs):
        shape = ", ".join(str(a.value if isinstance(a, tirx.IntImm) else a) for a in given)
        raise FrontendError(
            f"its result would have the shape ({shape}), PyTorch's is {tuple(expected.shape)}: "
            "this form of the operator is not converted"
        )


def is_tensor(value: Any) -> bool:
    """Whether a value is an expression that gives a tensor."""
    return isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType)


def _is_permutation(expression: relax.Expr | None) -> bool:
    return (
        isinstance(expression, relax.Call)
        and expression.op == Op.get("relax.permute_dims")
        and expression.attrs.axes is not None
    )


# ---- Symbolic sizes of PyTorch as expressions of TVM.


def _folded(combine: Callable) -> Callable[..., Size]:
    return lambda *args: functools.reduce(combine, args)


FUNCTIONS: dict[type, Callable[..., Size]] = {
    sympy.Add: _folded(operator.add),
    sympy.Mul: _folded(operator.mul),
    sympy.Max: _folded(tirx.max),
    sympy.Min: _folded(tirx.min),
    torch_functions.Max: _folded(tirx.max),
    torch_functions.Min: _folded(tirx.min),
    torch_functions.FloorDiv: tirx.floordiv,
    torch_functions.CleanDiv: tirx.floordiv,
    torch_functions.Mod: tirx.floormod,
    torch_functions.PythonMod: tirx.floormod,
}


def are_equal(sizes: Iterable[Size], others: Iterable[Size]) -> bool:
    """Whether TVM knows that sizes are others."""
    analyzer = tvm.sym.Analyzer()
    pairs = zip(sizes, others, strict=True)
    return all(analyzer.can_prove_equal(*map(_as_expression, pair)) for pair in pairs)


def _resized(x: te.Tensor, shape: Sequence[Size]) -> te.Tensor:
    """x with sizes that are told otherwise; kernels take it along."""
    return te.compute(shape, lambda *index: x(*index), name="resized")


def _is_of_symbolic_size(value: Any) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return not all(isinstance(n, int) for n in sizes)


def _as_expression(size: Size) -> tvm.ir.Expr:
    return tirx.IntImm("int64", size) if isinstance(size, int) else size


def symbols_of(variables: Iterable[relax.Var]) -> dict[str, tirx.Var]:
    """The symbols that stand alone as a dimension of one of the given tensors, by name."""
    dimensions = (size for variable in variables for size in variable.ty.shape or ())
    return {size.name: size for size in dimensions if tvm.ir.is_prim_var(size)}


def size_of(value: int | torch.SymInt, symbols: Symbols) -> Size | None:
    """A size of PyTorch in terms of the given symbols; None where it has no such form."""
    return int(value) if isinstance(value, int) else _convert(value.node.expr, symbols)


def shape_of(value: torch.Tensor, symbols: Symbols) -> list[Size] | None:
    """The shape of a traced tensor in terms of the given symbols; None if it has no such form."""
    sizes = [size_of(size, symbols) for size in value.shape]
    return None if any(size is None for size in sizes) else sizes


def _convert(expression: sympy.Expr, symbols: Symbols) -> Size | None:
    if isinstance(expression, sympy.Integer):
        return tirx.IntImm("int64", int(expression))
    if isinstance(expression, sympy.Symbol):
        return symbols.get(str(expression))
    # numbers last, as TVM's simplifier has them: `n + 1` and `1 + n` are two for much of TVM
    args = list(expression.args)
    if isinstance(expression, sympy.Add | sympy.Mul):
        args.sort(key=lambda arg: bool(arg.is_number))
    args = [_convert(arg, symbols) for arg in args]
    function = FUNCTIONS.get(type(expression))
    if function is None or any(arg is None for arg in args):
        return None
    return product(args, symbols) if isinstance(expression, sympy.Mul) else function(*args)


# ---- The part of an exported program that depends on no input, computed by PyTorch itself.
#
# Models build masks, positions and rotary tables from `arange` and constants in every call: dozens
# of tiny operators whose results never change. What depends on a parameter is not computed here.

EVALUATION_LIMIT_BYTES = 64 << 20  # no larger value is computed
CONSTANT_LIMIT_BYTES = (
    1 << 20
)  # and none larger than this put into the module: it would be read, not computed


def input_free_values(program: torch.export.ExportedProgram) -> dict[fx.Node, torch.Tensor]:
    """The values of all nodes that depend on constants and buffers only.

    Parameters
    ----------
    program : torch.export.ExportedProgram

    Returns
    -------
    dict
        Nodes with a static shape and at most `EVALUATION_LIMIT_BYTES`; random ones are left out.
    """
    values: dict[fx.Node, torch.Tensor] = {}
    given = _given_tensors(program)
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in given:
                values[node] = given[node.name].cpu()
            elif node.op == "call_function" and _can_evaluate(node, values):
                result = node.target(
                    *fx.map_arg(node.args, values.__getitem__),
                    **fx.map_arg(node.kwargs, values.__getitem__),
                )
                values[node] = result.cpu()  # the module's constants lie there, whatever the model
    return values


def _given_tensors(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Buffers and constants by the name of their placeholder."""
    signature = program.graph_signature
    buffers = dict(program.named_buffers())
    given = {name: buffers[target] for name, target in signature.inputs_to_buffers.items()}
    for name, target in signature.inputs_to_lifted_tensor_constants.items():
        given[name] = program.constants[target]
    return given


def _can_evaluate(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or "empty" in node.target.__name__:
        return False
    if not all(argument in values for argument in node.all_input_nodes):
        return False
    result: Any = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not all(isinstance(n, int) for n in result.shape):
        return False
    return math.prod(result.shape) * result.element_size() <= EVALUATION_LIMIT_BYTES
