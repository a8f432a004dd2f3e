"""Operators of complex numbers, decomposed to operators of their real and imaginary parts.

    z * w   ->  complex(a c - b d, a d + b c),   a = view_as_real(z)[..., 0], b = ...[..., 1], ...

What moves elements (view, permute, cat, index, where, ...) is done to both parts, as are sums.
`pairs` takes `complex` and `view_as_real` out where they meet, and what is left of them at the
border of a model. A real factor multiplies both parts: beside infinities PyTorch, which makes it a
complex number first, has NaN there. What has no rule here is refused by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ....errors import FrontendError
from . import complex_functions as functions
from .complex_functions import Tensor, Z

_aten = torch.ops.aten
Rule = Callable[..., Any]

REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def is_complex(x: object) -> bool:
    """Whether a tensor, a number or an element type is complex."""
    if isinstance(x, torch.dtype):
        return x.is_complex
    return isinstance(x, complex) or (isinstance(x, torch.Tensor) and x.is_complex())


def parts(x: Any) -> Z:
    """Real and imaginary part of a tensor or a number."""
    if isinstance(x, torch.Tensor) and x.is_complex():
        pair = _aten.view_as_real.default(x)
        return _aten.select.int(pair, -1, 0), _aten.select.int(pair, -1, 1)
    if isinstance(x, torch.Tensor):
        return x, torch.zeros_like(x)
    return (x.real, x.imag) if isinstance(x, complex) else (x, 0)


def joined(real: Tensor, imag: Tensor) -> Tensor:
    """The complex tensor of two real ones."""
    if free_unbacked_symbols(real):
        raise FrontendError("the size of a complex tensor depends on values: use sizes that do not")
    if real.shape != imag.shape:
        real, imag = torch.broadcast_tensors(real, imag)
    return _aten.complex.default(real, imag)


def operands(*given: Any) -> list[Z]:
    """The parts of operands, in the type that PyTorch computes in."""
    dtype = functools.reduce(torch.promote_types, _types(given))
    real = REAL.get(dtype, dtype)
    return [tuple(_in_type(part, real) for part in parts(x)) for x in given]


def _types(given: Sequence[Any]) -> list[torch.dtype]:
    """The types of operands: a number, or a tensor without axes beside others, counts for its kind
    alone.
    """
    first, *others = given
    return [torch.result_type(first, x) for x in (others or [first])]


def _in_type(x: Any, dtype: torch.dtype) -> Any:
    """A tensor in a type; numbers have none."""
    return x.to(dtype) if isinstance(x, torch.Tensor) else x


def _tensors(*given: Any) -> list[Z]:
    """`operands` of which numbers are tensors, too."""
    like = next(x for x in given if isinstance(x, torch.Tensor))
    given = [
        x if isinstance(x, torch.Tensor) else _scalar_tensor(x, dtype=torch.result_type(like, x))
        for x in given
    ]
    return operands(*given)


# ---- What is done to both parts.

# The arguments that hold elements of the result; others are places, sizes and axes.
_VALUES = frozenset(
    (
        "self",
        "input",
        "tensors",
        "src",
        "source",
        "value",
        "values",
        "other",
        "fill_value",
        "weight",
    )
)


def _by_parts(operator: Any) -> Rule:
    """An operator of each part."""
    arguments = [(a.name, a.name in _VALUES) for a in operator._schema.arguments]

    def rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((name for name, _ in arguments), args, strict=False)) | kwargs
        holds = {name for name, yes in arguments if yes}
        results = []
        for part in range(2):
            own = {
                name: pytree.tree_map(lambda x: _part(x, part), value)  # noqa: B023
                if name in holds
                else _real_type(value)
                for name, value in given.items()
            }
            leading = [own.pop(name) for name in _positional(operator, own)]
            results.append(operator(*leading, **own))
        if isinstance(results[0], torch.Tensor):
            return joined(*results)
        return type(results[0])(map(joined, *results))

    return rule


def _positional(operator: Any, given: Mapping[str, Any]) -> list[str]:
    """The leading arguments that are given."""
    names = []
    for argument in operator._schema.arguments:
        if argument.kwarg_only or argument.name not in given:
            break
        names.append(argument.name)
    return names


def _part(x: Any, part: int) -> Any:
    if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
        return x  # the condition of `where`
    return parts(x)[part] if isinstance(x, torch.Tensor | complex | int | float) else x


def _real_type(x: Any) -> Any:
    return REAL.get(x, x) if isinstance(x, torch.dtype) else x


BY_PARTS = [
    getattr(getattr(_aten, name), overload)
    for name, overloads in {
        "_neg_view": ("default",),
        "_unsafe_view": ("default",),
        "alias": ("default",),
        "cat": ("default",),
        "clone": ("default",),
        "constant_pad_nd": ("default",),
        "copy": ("default",),
        "cumsum": ("default",),
        "detach": ("default",),
        "diagonal": ("default",),
        "diagonal_scatter": ("default",),
        "embedding": ("default",),
        "expand": ("default",),
        "fill": ("Scalar", "Tensor"),
        "flip": ("default",),
        "gather": ("default",),
        "index": ("Tensor",),
        "index_put": ("default",),
        "index_select": ("default",),
        "lift_fresh_copy": ("default",),
        "masked_fill": ("Scalar", "Tensor"),
        "mean": ("default", "dim"),
        "neg": ("default",),
        "new_full": ("default",),
        "permute": ("default",),
        "repeat": ("default",),
        "roll": ("default",),
        "scatter": ("src", "value"),
        "scatter_add": ("default",),
        "select": ("int",),
        "select_scatter": ("default",),
        "slice": ("Tensor",),
        "slice_scatter": ("default",),
        "split": ("Tensor",),
        "split_with_sizes": ("default",),
        "squeeze": ("default", "dim", "dims"),
        "sum": ("default", "dim_IntList"),
        "t": ("default",),
        "transpose": ("int",),
        "tril": ("default",),
        "triu": ("default",),
        "unbind": ("int",),
        "unfold": ("default",),
        "unsqueeze": ("default",),
        "view": ("default",),
    }.items()
    for overload in overloads
]


def _as_strided(x: Tensor, *places: Any) -> Any:
    if not x.is_contiguous():
        return NotImplemented
    return joined(*(_aten.as_strided.default(part.contiguous(), *places) for part in parts(x)))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    pairs = operands(*tensors)
    return joined(*(_aten.cat.default([pair[part] for pair in pairs], dim) for part in range(2)))


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    x, y = _tensors(x, y)
    return joined(torch.where(condition, x[0], y[0]), torch.where(condition, x[1], y[1]))


# ---- Types and constants.


def _copied(x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """`_to_copy` from and to real and complex types."""
    dtype = dtype or x.dtype
    options = {"device": options.get("device")}
    real, imag = parts(x)
    if dtype == torch.bool:
        return (real != 0) | (imag != 0)
    own = REAL.get(dtype, dtype)
    real = _aten._to_copy.default(real, dtype=own, **options)
    if not dtype.is_complex:
        return real
    return joined(real, _aten._to_copy.default(imag, dtype=own, **options))


def _filled_like(number: Any) -> Rule:
    def rule(x: Tensor, *sizes: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        dtype = dtype or x.dtype
        size = sizes[0] if sizes else x.shape
        return _full(size, number, dtype=dtype, device=x.device)

    return rule


def _full_like(x: Tensor, value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _full(x.shape, value, dtype=dtype or x.dtype, device=x.device)


def _full(
    size: Sequence[int],
    value: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    dtype = dtype or torch.promote_types(torch.get_default_dtype(), torch.complex32)
    own = REAL.get(dtype, dtype)
    real, imag = (torch.full(size, part, dtype=own, device=device) for part in parts(value))
    return joined(real, imag) if dtype.is_complex else real


def _zeros(size: Sequence[int], **options: Any) -> Tensor:
    return _full(size, 0, **options)


def _scalar_tensor(value: Any, **options: Any) -> Tensor:
    return _full((), value, **options)


# ---- Elements.


def _of_one(function: Callable[[Z], Z]) -> Rule:
    return lambda x: joined(*function(parts(x)))


def _added(sign: int) -> Rule:
    def rule(x: Any, y: Any, alpha: Any = 1) -> Tensor:
        if alpha != 1:
            y = y * alpha
        (a, b), (c, d) = operands(x, y)
        return joined(a + c, b + d) if sign > 0 else joined(a - c, b - d)

    return rule


def _multiplied(x: Any, y: Any) -> Tensor:
    pairs = operands(x, y)
    for pair, other, given in ((pairs[0], pairs[1], x), (pairs[1], pairs[0], y)):
        if not is_complex(given):
            return joined(*functions.times(pair[0], other))
    return joined(*functions.product(*pairs))


def _divided(x: Any, y: Any) -> Tensor:
    if not is_complex(y):
        (a, b), (c, _) = operands(x, y)
        return joined(a / c, b / c)
    return joined(*functions.quotient(*_tensors(x, y)))


def _power(x: Any, y: Any) -> Tensor:
    short = functions.product_for(y)
    if short:
        return joined(*short(parts(x)))
    return joined(*functions.in_float64(functions.power)(*_tensors(x, y)))


def _magnitude(x: Tensor) -> Tensor:
    return functions.magnitude(parts(x))


def _angle(x: Tensor) -> Tensor:
    return functions.angle(parts(x))


def _conjugated(x: Tensor) -> Tensor:
    real, imag = parts(x)
    return joined(real, -imag)


def _equal(x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = operands(x, y)
    return (a == c) & (b == d)


def _differ(x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = operands(x, y)
    return (a != c) | (b != d)


def _of_either(operator: Any) -> Rule:
    return lambda x: operator(parts(x)[0]) | operator(parts(x)[1])


def _of_both(operator: Any) -> Rule:
    return lambda x: operator(parts(x)[0]) & operator(parts(x)[1])


def _of_truth(operator: Any) -> Rule:
    """An operator of which elements are not 0."""

    def truth(x: Any) -> Any:
        return x != 0 if isinstance(x, torch.Tensor) else x

    return lambda *given, **options: operator(*map(truth, given), **options)


def _polar(size: Tensor, turned: Tensor) -> Tensor:
    return joined(*functions.polar(size, turned))


def _complex(real: Tensor, imag: Tensor) -> Any:
    return NotImplemented if real.shape == imag.shape else joined(real, imag)


def _view_as_complex(x: Tensor) -> Tensor:
    return joined(_aten.select.int(x, -1, 0), _aten.select.int(x, -1, 1))


def _add_product(divides: bool) -> Rule:
    def rule(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
        term = a / b if divides else a * b
        return x + (term if value == 1 else value * term)

    return rule


def _lerp(x: Tensor, y: Tensor, weight: Any) -> Tensor:
    return x + weight * (y - x)


# ---- Products and norms.


def _bilinear(operator: Any) -> Rule:
    """A product of two operands, of both parts of each."""

    def rule(x: Tensor, y: Tensor) -> Tensor:
        (a, b), (c, d) = operands(x, y)
        if not is_complex(x):
            return joined(operator(a, c), operator(a, d))
        if not is_complex(y):
            return joined(operator(a, c), operator(b, c))
        return joined(operator(a, c) - operator(b, d), operator(a, d) + operator(b, c))

    return rule


def _add_matmul(operator: Any) -> Rule:
    """`addmm` and its like."""

    def rule(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        found = operator(a, b)
        found = found if alpha == 1 else alpha * found
        if beta == 0:
            return found
        return (x if beta == 1 else beta * x) + found

    return rule


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = _bilinear(_aten.linear.default)(x, weight)
    return found if bias is None else found + bias


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    found = _bilinear(lambda a, b: _aten.convolution.default(a, b, None, *options))(x, weight)
    return found if bias is None else found + bias.reshape([-1] + [1] * (x.ndim - 2))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def _vdot(x: Tensor, y: Tensor) -> Tensor:
    return _dot(_conjugated(x), y)


def _norm(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return torch.linalg.vector_norm(_magnitude(x), *args, dtype=_real_type(dtype), **options)


def _variance(x: Tensor, *args: Any, **options: Any) -> Tensor:
    real, imag = parts(x)
    return torch.var(real, *args, **options) + torch.var(imag, *args, **options)


def _deviation(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.sqrt(_variance(x, *args, **options))


def _whole_product(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _product_along(x.reshape(-1), 0, dtype=dtype)


def _product_along(
    x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Products of halves, until one element is left."""
    if not isinstance(x.shape[dim] if x.ndim else 1, int):
        return NotImplemented
    x = x.to(dtype or x.dtype)
    if x.ndim == 0:
        return x.clone()
    if x.shape[dim] == 0:
        x = torch.ones_like(x.sum(dim, keepdim=True))
    while (size := x.shape[dim]) > 1:
        half = size // 2
        found = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        rest = x.narrow(dim, 2 * half, size - 2 * half)
        x = torch.cat([found, rest], dim) if size % 2 else found
    return x if keepdim else x.squeeze(dim)


def _scan(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Products of all elements up to each, of 2, 4, 8, ... of them at a time."""
    size = x.shape[dim] if x.ndim else 1
    if not isinstance(size, int):
        return NotImplemented
    x, step = x.to(dtype or x.dtype), 1
    while step < size:
        first, last = x.narrow(dim, 0, step), x.narrow(dim, step, size - step)
        x, step = torch.cat([first, last * x.narrow(dim, 0, size - step)], dim), 2 * step
    return x.clone() if size == 1 else x


RULES: dict[Any, Rule] = {
    **{operator: _by_parts(operator) for operator in BY_PARTS},
    **{operator: _of_one(function) for operator, function in functions.FUNCTIONS.items()},
    _aten._conj.default: _conjugated,
    _aten._conj_physical.default: _conjugated,
    _aten.conj_physical.default: _conjugated,
    _aten._to_copy.default: _copied,
    _aten.abs.default: _magnitude,
    _aten.add.Scalar: _added(1),
    _aten.add.Tensor: _added(1),
    _aten.addbmm.default: _add_matmul(lambda a, b: torch.bmm(a, b).sum(0)),
    _aten.addcdiv.default: _add_product(divides=True),
    _aten.addcmul.default: _add_product(divides=False),
    _aten.addmm.default: _add_matmul(torch.mm),
    _aten.addmv.default: _add_matmul(torch.mv),
    _aten.addr.default: _add_matmul(torch.outer),
    _aten.baddbmm.default: _add_matmul(torch.bmm),
    _aten.all.default: _of_truth(_aten.all.default),
    _aten.all.dim: _of_truth(_aten.all.dim),
    _aten.all.dims: _of_truth(_aten.all.dims),
    _aten.any.default: _of_truth(_aten.any.default),
    _aten.any.dim: _of_truth(_aten.any.dim),
    _aten.any.dims: _of_truth(_aten.any.dims),
    _aten.angle.default: _angle,
    _aten.as_strided.default: _as_strided,
    _aten.bmm.default: _bilinear(_aten.bmm.default),
    _aten.cat.default: _cat,
    _aten.convolution.default: _convolution,
    _aten.cumprod.default: _scan,
    _aten.div.Scalar: _divided,
    _aten.div.Tensor: _divided,
    _aten.dot.default: _dot,
    _aten.empty_like.default: _filled_like(0),
    _aten.eq.Scalar: _equal,
    _aten.eq.Tensor: _equal,
    _aten.full.default: _full,
    _aten.full_like.default: _full_like,
    _aten.isfinite.default: _of_both(torch.isfinite),
    _aten.isinf.default: _of_either(torch.isinf),
    _aten.isnan.default: _of_either(torch.isnan),
    _aten.lerp.Scalar: _lerp,
    _aten.lerp.Tensor: _lerp,
    _aten.linalg_vector_norm.default: _norm,
    _aten.linear.default: _linear,
    _aten.logical_and.default: _of_truth(torch.logical_and),
    _aten.logical_not.default: _of_truth(torch.logical_not),
    _aten.logical_or.default: _of_truth(torch.logical_or),
    _aten.logical_xor.default: _of_truth(torch.logical_xor),
    _aten.matmul.default: _bilinear(_aten.matmul.default),
    _aten.mm.default: _bilinear(_aten.mm.default),
    _aten.mul.Scalar: _multiplied,
    _aten.mul.Tensor: _multiplied,
    _aten.mv.default: _bilinear(torch.mv),
    _aten.ne.Scalar: _differ,
    _aten.ne.Tensor: _differ,
    _aten.new_empty.default: _filled_like(0),
    _aten.new_empty_strided.default: _filled_like(0),
    _aten.new_ones.default: _filled_like(1),
    _aten.new_zeros.default: _filled_like(0),
    _aten.ones_like.default: _filled_like(1),
    _aten.pow.Scalar: _power,
    _aten.pow.Tensor_Scalar: _power,
    _aten.pow.Tensor_Tensor: _power,
    _aten.prod.default: _whole_product,
    _aten.prod.dim_int: _product_along,
    _aten.scalar_tensor.default: _scalar_tensor,
    _aten.std.correction: _deviation,
    _aten.sub.Scalar: _added(-1),
    _aten.sub.Tensor: _added(-1),
    _aten.var.correction: _variance,
    _aten.vdot.default: _vdot,
    _aten.where.self: _where,
    _aten.zeros.default: _zeros,
    _aten.zeros_like.default: _filled_like(0),
}
OF_REAL: dict[Any, Rule] = {
    _aten.complex.default: _complex,
    _aten.polar.default: _polar,
    _aten.view_as_complex.default: _view_as_complex,
}


def of_complex(rule: Rule) -> Rule:
    """A rule for calls in which a complex number takes part."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs) if _takes_complex(args, kwargs) else NotImplemented

    return decomposed


def of_real(rule: Rule) -> Rule:
    """A decomposition for calls in which none does."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if _takes_complex(args, kwargs) else rule(*args, **kwargs)

    return decomposed


def _takes_complex(*given: Any) -> bool:
    return any(map(is_complex, pytree.tree_leaves(given)))


def first_of(rule: Rule, otherwise: Rule | None) -> Rule:
    """A rule, and another decomposition for what it does not know."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        found = rule(*args, **kwargs)
        if found is NotImplemented and otherwise is not None:
            return otherwise(*args, **kwargs)
        return found

    return decomposed


OF_COMPLEX = {operator: of_complex(rule) for operator, rule in RULES.items()}
