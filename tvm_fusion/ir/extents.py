"""Arithmetic on extents that may be symbolic: products that can be compared, and numbers for the
cost model.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, sym, tirx
from tvm.ir import Expr, Var

from .access import Extent

LOWER_BOUNDS_ATTR = "tir_var_lower_bound"  # of a Relax function: a mapping of symbols by name
UPPER_BOUNDS_ATTR = "tir_var_upper_bound"
MULTIPLES_ATTR = "tvm_fusion.multiples"  # of what each value is a multiple
SIZES_ATTR = "tvm_fusion.sizes"
"""On the PrimFunc of a group: least, most and multiple of each symbolic size of its parameters, in
the order of `symbols_of`, and behind these its hints; a most of -1 is none."""
HINTS_ATTR = "tvm_fusion.hints"  # at which values of each symbol kernels must be the fastest
DIMS_ATTR = "tvm_fusion.dims"  # what the caller calls symbols, until these are looked up
UNBOUNDED_BELOW = 2  # what torch.export may note as the least of a size without a lower bound
ASSUMED_SYMBOLIC_EXTENT = 128  # a size for n when only the cost is asked; legality never uses it


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which values a symbolic extent may have.

    Attributes
    ----------
    least : int
    most : int or None
        Both are among them; None where there is no bound.
    multiple : int
        Of which each value is a multiple.
    hints : tuple of int
        Values at which kernels must be the fastest, in order.
    """

    least: int = 0
    most: int | None = None
    multiple: int = 1
    hints: tuple[int, ...] = ()

    def refusal(self, value: int) -> str | None:
        """What is wrong with a value; None if it is one of them."""
        if self.most is not None and value > self.most:
            return f"at most {self.most}"
        if value < self.least:
            return f"at least {self.least}"
        return f"a multiple of {self.multiple}" if value % self.multiple else None

    def nearest(self, value: int) -> int:
        """One of them that is close to a value, and not 0 if there are others."""
        value = value if self.most is None else min(value, self.most)
        value = max(value // self.multiple, 1) * self.multiple
        return max(value, -(-self.least // self.multiple) * self.multiple)

    def tell(self, analyzer: sym.Analyzer, symbol: Var) -> None:
        """Have an analyzer know them as those of a symbol."""
        most = sym.ConstIntBound.POS_INF if self.most is None else self.most
        analyzer.update(symbol, sym.ConstIntBound(self.least, most))
        if self.multiple > 1:
            analyzer.update(symbol, sym.ModularSet(self.multiple, 0))

    def or_of(self, other: Bounds) -> Bounds:
        """What a value has that is one of these or of others."""
        most = None if self.most is None or other.most is None else max(self.most, other.most)
        least, multiple = min(self.least, other.least), math.gcd(self.multiple, other.multiple)
        return Bounds(least, most, multiple, tuple(sorted({*self.hints, *other.hints})))


def bounds_attrs(func: relax.Function) -> dict[str, Any]:
    """The attributes of a function that have the bounds of its symbols, by their names."""
    attrs = func.attrs or {}
    keys = LOWER_BOUNDS_ATTR, UPPER_BOUNDS_ATTR, MULTIPLES_ATTR, HINTS_ATTR
    return {key: attrs[key] for key in keys if key in attrs}


def bounds_of(func: relax.Function) -> dict[str, Bounds]:
    """The bounds of a function's symbols that have any, by their names."""
    attrs = func.attrs or {}
    least, most, multiple = (
        {str(k): int(v) for k, v in attrs[key].items()} if key in attrs else {}
        for key in (LOWER_BOUNDS_ATTR, UPPER_BOUNDS_ATTR, MULTIPLES_ATTR)
    )
    found = {}
    for symbol in dict.fromkeys((*least, *most, *multiple)):
        low = least.get(symbol, 0)
        low = 0 if low <= UNBOUNDED_BELOW else low
        bounds = Bounds(low, most.get(symbol), multiple.get(symbol, 1))
        if bounds != Bounds():
            found[symbol] = bounds
    return found


def hints_of(func: relax.Function) -> dict[str, tuple[int, ...]]:
    """The hints for a function's symbols, by their names."""
    hints = (func.attrs or {}).get(HINTS_ATTR, {})
    return {str(name): tuple(map(int, values)) for name, values in hints.items()}


def named_sizes(func: relax.Function) -> dict[str, str]:
    """The symbols of a function's parameters by all that callers may call them: what they are
    called themselves, an axis of a parameter ("x.0"), a name that was noted (`DIMS_ATTR`).
    """
    found = {}
    for param in func.params:
        shape = getattr(param.ty, "shape", None)
        for axis, extent in enumerate(shape.values if isinstance(shape, relax.ShapeExpr) else ()):
            if isinstance(extent, Var):
                found |= {f"{param.name}.{axis}": extent.name, extent.name: extent.name}
    dims = (func.attrs or {}).get(DIMS_ATTR, {})
    return found | {str(name): str(symbol) for name, symbol in dims.items()}


def with_hints(mod: tvm.IRModule, sizes: Iterable[tuple[str, tuple[int, ...]]]) -> tvm.IRModule:
    """A module whose `main` has the hints for those of `sizes` that are its own, by the symbols'
    own names.
    """
    main = mod["main"]
    names = named_sizes(main)
    hints = {names[name]: list(values) for name, values in sizes if name in names}
    noted = bool(main.attrs) and DIMS_ATTR in main.attrs
    if not hints and not noted:
        return mod
    main = main.without_attr(DIMS_ATTR) if noted else main
    found = mod.clone()
    found.update_func(
        mod.get_global_var("main"), main.with_attr(HINTS_ATTR, hints) if hints else main
    )
    return found


def analyzer_of(bounds: Mapping[str, Bounds], extents: Iterable[Expr]) -> sym.Analyzer:
    """An analyzer that knows the bounds of the symbols of extents; none of these is below 0."""
    return _analyzer({s: bounds.get(s.name, Bounds()) for s in symbols_of(extents)})


def _analyzer(bounds: Mapping[Var, Bounds]) -> sym.Analyzer:
    found = sym.Analyzer()
    for symbol, known in bounds.items():
        known.tell(found, symbol)
    return found


def symbols_of(extents: Iterable[Expr]) -> list[Var]:
    """The symbols of extents, in the order of their first use."""
    found: dict[Var, None] = {}
    for extent in extents:
        if not isinstance(extent, int):
            tvm_ffi.structural_walk(extent, [(Var, lambda var: found.setdefault(var))])
    return list(found)


def bounds_within(extent: Extent | Expr, known: Mapping[Var, Bounds]) -> Bounds:
    """Which values an extent may have, by the bounds of its symbols."""
    if isinstance(extent, int):
        return Bounds(extent, extent)
    symbols = symbols_of([extent])
    analyzer = _analyzer({s: known.get(s, Bounds()) for s in symbols})
    bound, modular = analyzer.const_int_bound(extent), analyzer.modular_set(extent)
    least, most = int(bound.min_value), int(bound.max_value)
    multiple = math.gcd(int(modular.coeff), int(modular.base))
    bounded = most < int(sym.ConstIntBound.POS_INF)
    hints = known[symbols[0]].hints if len(symbols) == 1 and symbols[0] in known else ()
    values = {int(_at(extent, symbols[0], value)) for value in hints}
    values = tuple(sorted(value for value in values if value > 0))
    return Bounds(max(least, 0), most if bounded else None, max(multiple, 1), values)


def _at(extent: Expr, symbol: Var, value: int) -> Expr:
    """An extent where its symbol has a value."""
    number = tirx.IntImm(str(symbol.ty.dtype), value)
    known = (Var, lambda var: number if var.same_as(symbol) else var)
    return sym.Analyzer().simplify(tvm_ffi.structural_map(extent, [known]))


def known_sizes(func: tirx.PrimFunc) -> dict[Var, Bounds]:
    """The bounds of the symbolic sizes of a PrimFunc's parameters (`SIZES_ATTR`), of those that
    have any.
    """
    noted = (func.attrs or {}).get(SIZES_ATTR, ())
    found = {}
    for symbol, one in zip(sizes_of(func), noted, strict=bool(noted)):
        least, most, multiple, *hints = map(int, one)
        found[symbol] = Bounds(least, None if most < 0 else most, multiple, tuple(hints))
    return {symbol: bounds for symbol, bounds in found.items() if bounds != Bounds()}


def with_known_sizes(func: tirx.PrimFunc, bounds: Mapping[Var, Bounds]) -> tirx.PrimFunc:
    """A PrimFunc that notes the bounds of its symbolic sizes, if they have any."""
    found = [bounds.get(symbol, Bounds()) for symbol in sizes_of(func)]
    if all(one == Bounds() for one in found):
        return func
    noted = [[b.least, -1 if b.most is None else b.most, b.multiple, *b.hints] for b in found]
    return func.with_attr(SIZES_ATTR, noted)


def sizes_of(func: tirx.PrimFunc) -> list[Var]:
    """The symbols in the shapes of a PrimFunc's parameters, in the order of their first use."""
    buffers = (p.ty for p in func.params if isinstance(p.ty, tirx.BufferType))
    return symbols_of(extent for ty in buffers for extent in ty.shape)


def product_key(extents: Iterable[Extent]) -> tuple[int, tuple[str, ...]]:
    """The product of extents in a form that is equal for equal products: (constant factor, sorted
    symbolic factors).
    """
    constant, symbolic = 1, []
    for e in extents:
        if isinstance(e, int):
            constant *= e
        else:
            factor, rest = _split_constant(e)
            constant *= factor
            symbolic.extend(rest)
    return constant, tuple(sorted(symbolic))


def non_unit(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    return tuple(e for e in extents if e != 1)


def assumed(extent: Extent) -> int:
    """The extent as a number; every symbol counts as ASSUMED_SYMBOLIC_EXTENT."""
    return extent if isinstance(extent, int) else _evaluate(extent)


def assumed_product(extents: Iterable[Extent]) -> int:
    return math.prod(assumed(e) for e in extents)


@lru_cache(maxsize=4096)
def _split_constant(text: str) -> tuple[int, tuple[str, ...]]:
    tree = _parse(text)
    constant, symbolic = 1, []

    def walk(node) -> None:
        nonlocal constant
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            walk(node.left)
            walk(node.right)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            constant *= node.value
        else:
            symbolic.append(ast.unparse(node))

    if tree is None:
        return 1, (text,)
    walk(tree)
    return constant, tuple(symbolic)


@lru_cache(maxsize=4096)
def _evaluate(text: str) -> int:
    tree = _parse(text)
    if tree is None:
        return ASSUMED_SYMBOLIC_EXTENT
    value = _number(tree)
    return max(1, value) if value is not None else ASSUMED_SYMBOLIC_EXTENT


def _parse(text: str):
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


_OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b if b else None,
    ast.Mod: lambda a, b: a % b if b else None,
}


def _number(node) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return ASSUMED_SYMBOLIC_EXTENT
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        a, b = _number(node.left), _number(node.right)
        return None if a is None or b is None else _OPERATORS[type(node.op)](a, b)
    return None
