"""Sizes of inputs that are multiples of a symbol of torch.export's, which is no size itself.

    x: (8 * s, 4)  ->  x: (n, 4), and s is n // 8

The virtual machine cannot solve an expression for its symbol; with `Dim("s") * 8` none of the
sizes is one. That n is a multiple of 8 is noted at `main` (`ir.extents.MULTIPLES_ATTR`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from ..ir.extents import UNBOUNDED_BELOW

Size = int | tvm.ir.Expr
Symbols = Mapping[str, tirx.Expr]


def product(factors: list[Size], symbols: Symbols) -> Size:
    """(n // 8) * 8 -> n and (n // 8) * 2 -> n // 4, where one of the `symbols` says that n is a
    multiple of 8 (`Multiples`).
    """
    *others, last = factors
    if isinstance(last, tirx.IntImm):
        for i, factor in enumerate(others):
            if not _is_whole(factor, symbols):
                continue
            divisor, times = int(factor.b), int(last)
            rest = others[:i] + others[i + 1 :]
            if times % divisor == 0:
                return math.prod([factor.a, *rest], start=times // divisor)
            if divisor % times == 0:
                return math.prod(rest, start=tirx.floordiv(factor.a, divisor // times))
    return math.prod(factors[1:], start=factors[0])


@dataclass(frozen=True)
class Multiples:
    """Symbols that are no sizes, and the sizes that are multiples of them.

    Attributes
    ----------
    symbols : dict of str to tirx.Expr
        What those symbols are.
    sizes : dict of str to tirx.Var
        The sizes, by these symbols.
    of_what : dict of str to int
        What each size is a multiple of, by its name.
    """

    symbols: dict[str, tirx.Expr]
    sizes: dict[str, tirx.Var]
    of_what: dict[str, int]

    @classmethod
    def of(cls, inputs: Iterable[relax.Var], known: Symbols) -> "Multiples":
        """Those of the given tensors; `known` are symbols that are sizes."""
        found = cls({}, {}, {})
        for size in (size for variable in inputs for size in variable.ty.shape or ()):
            symbol, factor = _scaled(size)
            if symbol is not None and symbol.name not in {*known, *found.symbols}:
                n = tirx.Var(f"{symbol.name}_{factor}", "int64")
                found.symbols[symbol.name] = tirx.floordiv(n, factor)
                found.sizes[symbol.name], found.of_what[n.name] = n, factor
        return found

    def inputs(self, inputs: dict[str, relax.Var]) -> dict[str, relax.Var]:
        """The inputs with sizes of their own."""
        return {name: self._resized(variable) for name, variable in inputs.items()}

    def ranges(self, ranges: dict[str, tuple]) -> dict[str, tuple]:
        """The least and the largest values of symbols, with those of the sizes."""
        found = {name: bounds for name, bounds in ranges.items() if name not in self.sizes}
        for name in self.sizes.keys() & ranges.keys():
            least, most = ranges[name]
            n = self.sizes[name].name
            factor = self.of_what[n]
            least = least if least > UNBOUNDED_BELOW else 0
            found[n] = (least * factor, None if most is None else most * factor)
        return found

    def _resized(self, variable: relax.Var) -> relax.Var:
        sizes = variable.ty.shape
        if sizes is None or not any(_scaled(size)[0] is not None for size in sizes):
            return variable
        ty = relax.TensorType([self._size(size) for size in sizes], variable.ty.dtype)
        return relax.Var(variable.name, ty)

    def _size(self, size: Size) -> Size:
        symbol, factor = _scaled(size)
        if symbol is None or symbol.name not in self.symbols:
            return size
        return product([self.symbols[symbol.name], tirx.IntImm("int64", factor)], self.symbols)


def _is_whole(factor: Size, symbols: Symbols) -> bool:
    """Whether a factor is a quotient without a remainder, for all values of its size."""
    if not isinstance(factor, tirx.FloorDiv) or not isinstance(factor.b, tirx.IntImm):
        return False
    return any(
        isinstance(known, tirx.FloorDiv)
        and known.a.same_as(factor.a)
        and int(known.b) % int(factor.b) == 0
        for known in symbols.values()
    )


def _scaled(size: Size) -> tuple[tirx.Var | None, int]:
    """s and 8 of a size 8 * s; None for any other."""
    if isinstance(size, tirx.Mul):
        for number, symbol in ((size.a, size.b), (size.b, size.a)):
            if isinstance(number, tirx.IntImm) and tvm.ir.is_prim_var(symbol):
                return symbol, int(number)
    return None, 1
